"""What step logs say: how far apart the ranks' loads were, and what a step costs per token of load.

Each file is one rank. A rank's load at a time is that of its last step before it, so ranks are compared at the ends of
all steps, over the span that all files cover. `load_spread` is max - min over the ranks; its mean is weighted by the
time until the next step's end. The fit is least squares of step_ms = a * L + b over the decode steps: those with a
request in them and none that has just joined, whose prompt or transfer they would count. L is the rank's own load, and
with several files also the largest load of all ranks at that time, which is what a barrier waits for.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.instrumentation.step_log import COLUMNS

Floats = NDArray[np.float64]


class BadStepLog(ValueError):
    """A file that is no step log; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Fit:
    """step_ms = a_us_per_token * L / 1000 + b_ms; `r2` is the share of the variance that it explains."""

    a_us_per_token: float
    b_ms: float
    r2: float
    steps: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One file: its steps, their cost, the load in them."""

    file: str
    steps: int
    span_s: float
    step_ms_p50: float
    step_ms_p99: float
    mean_running: float
    mean_tokens: float
    max_waiting: int
    max_kv_cache_usage: float
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All files together; the spread is None with fewer than two that overlap."""

    ranks: list[RankSummary]
    overlap_s: float
    load_spread_mean: float | None
    load_spread_p99: float | None
    load_spread_of_mean_ratio: float | None
    envelope_fit: Fit | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read(path: Path) -> Floats:
    """A step log as an array, one row per step, columns as in `COLUMNS`. Half a last line is forgiven.

    Raises: BadStepLog; OSError.
    """
    rows: list[list[float]] = []
    with path.open(newline="", encoding="ascii", errors="replace") as file:
        lines = csv.reader(file)
        if tuple(next(lines, ())) != COLUMNS:
            raise BadStepLog(f"{path}, line 1: expected the columns {','.join(COLUMNS)}")
        broken: int | None = None
        for number, row in enumerate(lines, start=2):
            if broken is not None:
                raise BadStepLog(f"{path}, line {broken}: expected {len(COLUMNS)} numbers")
            try:
                values = [float(value) for value in row]
            except ValueError:
                values = []
            if len(values) == len(COLUMNS):
                rows.append(values)
            else:
                broken = number
    return np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))


def summarise(paths: Sequence[Path]) -> Summary:
    """Read and compare. Raises: BadStepLog; OSError."""
    logs = [(path, read(path)) for path in paths]
    ranks = [_rank(path, steps) for path, steps in logs]
    filled = [steps for _, steps in logs if len(steps)]
    start = max((steps[0, 0] for steps in filled), default=0.0)
    stop = min((steps[-1, 0] for steps in filled), default=0.0)
    if len(filled) < 2 or stop <= start:
        return Summary(ranks, max(0.0, stop - start), None, None, None, None)
    times = np.unique(np.concatenate([steps[:, 0] for steps in filled]))
    times = times[(times >= start) & (times <= stop)]
    loads = np.stack([_at(steps, times) for steps in filled])
    spread = loads.max(axis=0) - loads.min(axis=0)
    weights = np.diff(times, append=times[-1])
    mean = float(np.average(spread, weights=weights)) if weights.sum() else float(spread.mean())
    mean_load = float(np.average(loads.mean(axis=0), weights=weights)) if weights.sum() else float(loads.mean())
    within = [steps[_decodes(steps) & (steps[:, 0] >= start) & (steps[:, 0] <= stop)] for steps in filled]
    together = np.concatenate(within)
    envelope = np.max([_at(steps, together[:, 0]) for steps in filled], axis=0)
    return Summary(
        ranks=ranks,
        overlap_s=float(stop - start),
        load_spread_mean=mean,
        load_spread_p99=float(np.percentile(spread, 99)),
        load_spread_of_mean_ratio=mean / mean_load if mean_load else None,
        envelope_fit=_fit(envelope, together[:, 1]),
    )


def _at(steps: Floats, times: Floats) -> Floats:
    """A rank's load at each of some times: that of its last step not after it."""
    last = np.clip(np.searchsorted(steps[:, 0], times, side="right") - 1, 0, None)
    loads: Floats = steps[last, 3]
    return loads


def _decodes(steps: Floats) -> NDArray[np.bool_]:
    """Which steps only decode."""
    running = steps[:, 2]
    joined = np.diff(running, prepend=running[:1]) > 0
    return (running > 0) & ~joined


def _rank(path: Path, steps: Floats) -> RankSummary:
    if not len(steps):
        return RankSummary(path.name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, None)
    busy = steps[_decodes(steps)]
    return RankSummary(
        file=path.name,
        steps=len(steps),
        span_s=float(steps[-1, 0] - steps[0, 0]),
        step_ms_p50=float(np.percentile(steps[:, 1], 50)),
        step_ms_p99=float(np.percentile(steps[:, 1], 99)),
        mean_running=float(steps[:, 2].mean()),
        mean_tokens=float(steps[:, 3].mean()),
        max_waiting=int(steps[:, 4].max()),
        max_kv_cache_usage=float(steps[:, 5].max()),
        fit=_fit(busy[:, 3], busy[:, 1]),
    )


def _fit(load: Floats, step_ms: Floats) -> Fit | None:
    """None where there is nothing to tell a slope from: fewer than three steps, or all with one load."""
    if len(load) < 3 or float(np.ptp(load)) == 0.0:
        return None
    slope, base = np.polyfit(load, step_ms, 1)
    rest = step_ms - (slope * load + base)
    total = float(((step_ms - step_ms.mean()) ** 2).sum())
    r2 = 1.0 - float((rest**2).sum()) / total if total else 1.0
    return Fit(float(slope) * 1e3, float(base), r2, len(load))
