import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import ConfigError, InputError
from balanceroute.prediction import (
    KINDS,
    AnchorPredictor,
    ExactMatchPredictor,
    LearnedPredictor,
    Model,
    SurvivalPredictor,
    build_predictor,
    load_model,
    save_model,
)

from .builders import a_finish, finishes

H = 80
ROWS = [a_finish(60, key="k"), a_finish(62, key="k"), a_finish(500, reason="cancelled", prompt_tokens=7, at_s=3.5)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    list(zip(KINDS, (AnchorPredictor, SurvivalPredictor, ExactMatchPredictor, LearnedPredictor), strict=True)),
    ids=KINDS,
)
def test_every_kind_starts_warm_from_a_history(kind: str, expected: type) -> None:
    predictor = build_predictor(kind, H, rows=ROWS)

    assert type(predictor) is expected
    assert (predictor.predict_one(0, 100, "k")[0] > 0.5) is (kind != "none")


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'oracle' is unknown; accepted are none, survival, exact_match, learned"):
        build_predictor("oracle", H)


@pytest.mark.parametrize("kind", ["survival", "exact_match"])
def test_a_model_file_restores_its_rows_and_the_history_is_added(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    save_model(path, Model(kind, H, ROWS))

    assert load_model(path) == Model(kind, H, ROWS)
    predictor = build_predictor(kind, H, model=path, rows=[a_finish(64, key="k")])
    assert predictor.predict_one(0, 100, "k")[1] == pytest.approx(62.0)
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz"]


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "m.npz", Model("survival", H, ROWS))

    with pytest.raises(ConfigError, match=r"holds a survival predictor, predictor\.kind is exact_match"):
        build_predictor("exact_match", H, model=tmp_path / "m.npz")


def header(**changes: object) -> np.ndarray:
    values = {"format": "balanceroute-predictor", "version": 1, "kind": "survival", "horizon_steps": H}
    return np.array(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"header": header(version=2)}, "newer version"),
        ({"header": header(format="other")}, "not a predictor file"),
        ({"header": header()}, "not a predictor file"),
        ({"header": np.array([{}], dtype=object)}, "not a predictor file"),
    ],
    ids=["newer", "foreign", "without rows", "pickled"],
)
def test_a_file_that_is_not_a_predictor_is_one_clear_error(
    arrays: dict[str, np.ndarray], reason: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "m.npz", **arrays)

    with pytest.raises(InputError, match=reason):
        load_model(tmp_path / "m.npz")


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 torn"], ids=["missing", "empty", "torn"])
def test_a_missing_or_damaged_model_is_one_clear_error(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "m.npz").write_bytes(content)

    with pytest.raises(InputError, match=r"m\.npz"):
        load_model(tmp_path / "m.npz")


def test_a_model_with_any_damaged_byte_is_read_or_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    save_model(path, Model("survival", H, ROWS))
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xA5]) + whole[at + 1 :])
        with suppress(InputError):
            load_model(path)


def test_a_model_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        save_model(tmp_path / "nowhere" / "m.npz", Model("survival", H, ROWS))


def test_a_model_replaces_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    save_model(link, Model("survival", H, ROWS))
    assert load_model(link).rows == ROWS and not link.is_symlink()


def test_a_model_is_written_into_a_pipe_and_through_a_link_without_replacing_them(tmp_path: Path) -> None:
    model, file, link, pipe = Model("survival", H, ROWS), tmp_path / "m.npz", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    save_model(link, model)
    assert link.is_symlink() and load_model(file).rows == ROWS

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_model(pipe, model)
    (tmp_path / "read.npz").write_bytes(os.read(reader, 1_000_000))
    os.close(reader)
    assert pipe.is_fifo() and load_model(tmp_path / "read.npz").rows == ROWS


def test_an_incomplete_file_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        save_model(tmp_path / "m.npz", Model("survival", H, ROWS))
    assert list(tmp_path.iterdir()) == []


def test_with_size_buckets_a_miss_looks_at_prompts_of_like_size() -> None:
    rows = [a_finish(20 if at % 2 else 900, prompt_tokens=1000 if at % 2 else 50) for at in range(200)]
    plain, sized = (build_predictor("exact_match", H, rows=rows, size_buckets=n) for n in (0, 2))

    assert [plain.predict_one(0, size, "")[0] for size in (50, 1000)] == [0.5, 0.5]
    assert [sized.predict_one(0, size, "")[0] for size in (50, 1000)] == [0.0, 1.0]
    stages = sized.predict(np.array([0, 0]), np.array([1000, 50]), ["", ""])
    assert stages.p_finish.tolist() == [1.0, 0.0]


def test_a_thin_size_bucket_answers_from_all_requests() -> None:
    predictor = build_predictor("exact_match", H, rows=finishes(20, 900), size_buckets=4)

    assert predictor.predict_one(0, 100, "")[0] == 0.5
