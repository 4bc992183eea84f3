"""Predictors as files: what `balanceroute predictor fit` writes and `serve` starts from.

One .npz (a zip of plain arrays): a JSON header with version, kind and horizon; the newest rows of the
history, from which survival and exact match are rebuilt and the learned predictor's view of the recent past
is warmed up; and the learned trees as arrays. No pickle is written, and reading refuses one
(`allow_pickle=False`), so a model file can't run code; shapes and feature numbers are checked before use.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from balanceroute.bounded import check_regular
from balanceroute.errors import InputError
from balanceroute.plugins import described
from balanceroute.whole_file import write_whole

from .contract import FinishedRequest
from .learned import NAMES, LearnedFit, Trees
from .observations import Observations
from .survival import SurvivalCurve

FORMAT = "balanceroute-predictor"
VERSION = 1
MAX_ROWS = 200_000

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Model:
    """The contents of a model file; `learned` only for the learned kind."""

    kind: str
    horizon_steps: int
    rows: list[FinishedRequest]
    learned: LearnedFit | None = None


def save_model(path: Path, model: Model) -> None:
    """Write `model`, over whatever was at `path`, whole or not at all. Raises: InputError."""
    rows = model.rows[-MAX_ROWS:]
    arrays: dict[str, npt.NDArray[Any]] = {
        "key": np.array([row.prompt_key for row in rows], dtype=np.str_),
        "prompt_tokens": np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        "output_tokens": np.array([row.output_tokens for row in rows], dtype=np.int64),
        "finish_reason": np.array([row.finish_reason for row in rows], dtype=np.str_),
        "finished_s": np.array([row.finished_s for row in rows], dtype=np.float64),
    }
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": model.kind,
        "horizon_steps": model.horizon_steps,
    }
    if model.learned is not None and model.learned.classifier and model.learned.regressor:
        header |= {
            "features": NAMES,
            "slope": model.learned.slope,
            "shift": model.learned.shift,
            "calibration_error": model.learned.calibration_error,
        }
        for stage, trees in (("classifier", model.learned.classifier), ("regressor", model.learned.regressor)):
            header[f"{stage}_base"] = trees.base
            arrays |= {f"{stage}_{part}": getattr(trees, part) for part in ("feature", "threshold", "leaf")}
    archive = BytesIO()
    np.savez_compressed(archive, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]
    write_whole(path, archive.getvalue())


def load_model(path: Path) -> Model:
    """Read a model file.

    Raises: InputError when it is missing, not ours, newer than this version, or contradicts itself.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("no archive")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                header = _header(path, arrays)
                rows = _rows(arrays)
                return Model(header["kind"], int(header["horizon_steps"]), rows, _learned(header, arrays, rows))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # errors of zipfile, zlib, numpy, json or tokenize for a damaged archive
        raise InputError(f"{path}: not a predictor file, or a damaged one: {described(error)}") from error


def _header(path: Path, arrays: Arrays) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(str(arrays["header"]))
    if header.get("format") != FORMAT:
        raise ValueError("no predictor header in it")
    if header["version"] > VERSION:
        raise InputError(f"{path}: written by a newer version ({header['version']}, known up to {VERSION})")
    return header


def _rows(arrays: Arrays) -> list[FinishedRequest]:
    types = {"key": np.str_, "prompt_tokens": np.int64, "output_tokens": np.int64}
    types |= {"finish_reason": np.str_, "finished_s": np.float64}
    columns: Arrays = {name: arrays[name].astype(kind, casting="safe") for name, kind in types.items()}
    if any((columns[name] < 0).any() for name in ("prompt_tokens", "output_tokens")):
        raise ValueError("a request has a negative number of tokens")
    if not np.isfinite(columns["finished_s"]).all():
        raise ValueError("a request has no valid time at which it ended")
    return [FinishedRequest(*row) for row in zip(*(column.tolist() for column in columns.values()), strict=True)]


def _learned(header: Mapping[str, Any], arrays: Arrays, rows: Sequence[FinishedRequest]) -> LearnedFit | None:
    if "features" not in header:
        return None
    if tuple(header["features"]) != NAMES:
        raise ValueError("its trees look at other features than this version computes: fit it again")
    stages = []
    for stage in ("classifier", "regressor"):
        trees = Trees(
            arrays[f"{stage}_feature"].astype(np.int32),
            arrays[f"{stage}_threshold"].astype(np.float32),
            arrays[f"{stage}_leaf"].astype(np.float32),
            float(header[f"{stage}_base"]),
        )
        trees.check(len(NAMES))
        stages.append(trees)
    curve = SurvivalCurve(Observations.of(rows))
    correction = float(header["slope"]), float(header["shift"]), float(header["calibration_error"])
    return LearnedFit(stages[0], stages[1], *correction, curve)
