"""Synthetic traces have the published moments and depend on the seed alone."""

import collections
from pathlib import Path

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.traces import (
    ReferenceSetting,
    describe_trace,
    generate_trace,
    ideal_capacity,
    load_trace,
    write_trace,
)


def test_equal_seeds_give_equal_bytes_and_other_seeds_do_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_trace(generate_trace("heavy_tailed", rows=300, seed=seed), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    ("preset", "prompt_mean", "prompt_p50", "prompt_p99", "output_mean", "output_p50", "output_p99"),
    [
        ("heavy_tailed", 3197, 1252, 31_563, 1185, 700, 7932),
        ("capped", 4652, 3173, 23_670, 1052, 1010, 1761),
    ],
)
def test_presets_have_the_published_moments(
    preset: str,
    prompt_mean: float,
    prompt_p50: float,
    prompt_p99: float,
    output_mean: float,
    output_p50: float,
    output_p99: float,
) -> None:
    summary = describe_trace(generate_trace(preset, seed=11))
    assert summary.prompt_mean == pytest.approx(prompt_mean, rel=0.005)
    assert summary.prompt_p50 == pytest.approx(prompt_p50, rel=0.1)
    assert summary.prompt_p99 == pytest.approx(prompt_p99, rel=0.2)
    assert summary.output_mean == pytest.approx(output_mean, rel=0.005)
    assert summary.output_p50 == pytest.approx(output_p50, rel=0.1)
    assert summary.output_p99 == pytest.approx(output_p99, rel=0.2)


def test_half_of_heavy_tailed_recurs_with_one_prompt_and_one_percent_output_noise_per_key() -> None:
    trace = generate_trace("heavy_tailed", seed=5)
    assert describe_trace(trace).keyed_ratio == pytest.approx(0.5, abs=0.02)
    rows_of = collections.defaultdict(list)
    for row, key in enumerate(trace.prompt_key.tolist()):
        if key:
            rows_of[key].append(row)
    assert len(rows_of) > 380
    noise = []
    for rows in rows_of.values():
        assert len(set(trace.prompt_tokens[rows].tolist())) == 1
        outputs = trace.output_tokens[rows]
        if len(rows) >= 5 and outputs.min() > 200:  # below that, rounding to whole tokens adds its own spread
            noise.extend((outputs / outputs.mean() - 1.0).tolist())
    assert np.std(noise) == pytest.approx(0.01, abs=0.002)


def test_seeds_share_their_recurring_prompts_so_that_one_can_be_the_history_of_another() -> None:
    one, other = (generate_trace("heavy_tailed", seed=seed) for seed in (1, 2))
    outputs = [dict(zip(t.prompt_key.tolist(), t.output_tokens.tolist(), strict=True)) for t in (one, other)]
    shared = [key for key in outputs[0] if key and key in outputs[1] and outputs[0][key] > 200]
    ratios = [outputs[0][key] / outputs[1][key] for key in shared]
    assert len(shared) > 200
    assert np.std(ratios) < 0.03


@pytest.mark.parametrize("load", [0.5, 1.15])
@pytest.mark.parametrize("workers", [8, 32])
def test_load_is_the_arrival_rate_over_ideal_capacity(load: float, workers: int) -> None:
    setting = ReferenceSetting(n_workers=workers)
    trace = generate_trace("capped", rows=2000, load=load, setting=setting)
    assert len(trace) / trace.arrival_s[-1] / ideal_capacity(trace, setting) == pytest.approx(load, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"preset": "uniform"}, "unknown preset 'uniform'; one of capped, heavy_tailed"),
        ({"preset": "capped", "rows": 0}, "at least one row"),
        ({"preset": "capped", "load": 0.0}, "positive load"),
        ({"preset": "capped", "load": float("nan")}, "positive load"),
        ({"preset": "capped", "load": float("inf")}, "positive load"),
        ({"preset": "capped", "load": 1e-300}, "requests per second, not 1e-06 to 100000"),
        ({"preset": "capped", "seed": -1}, "seed must be at least 0, not -1"),
        ({"preset": "capped", "setting": ReferenceSetting(slots=0)}, "slots must be at least 1"),
        ({"preset": "capped", "setting": ReferenceSetting(step_cost_s=-1)}, "step cost must be"),
        ({"preset": "capped", "setting": ReferenceSetting(step_cost_s=float("inf"))}, "step cost must be"),
        ({"preset": "capped", "setting": ReferenceSetting(step_overhead_s=float("nan"))}, "step overhead must be"),
        ({"preset": "capped", "setting": ReferenceSetting(step_cost_s=0, step_overhead_s=0)}, "are both 0"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        generate_trace(**arguments)  # type: ignore[arg-type]


def test_a_preset_name_stands_for_a_generated_trace(tmp_path: Path) -> None:
    assert len(load_trace("capped", rows=20)) == 20
    write_trace(generate_trace("capped", rows=20), tmp_path / "t.csv")
    assert len(load_trace(str(tmp_path / "t.csv"), rows=5)) == 5


def test_a_file_with_the_name_of_a_preset_is_read_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(generate_trace("capped", rows=20), Path("heavy_tailed"))
    notes: list[str] = []
    assert len(load_trace("heavy_tailed", on_note=notes.append)) == 20
    assert notes == ["this is the file heavy_tailed, not the generated trace; rename the file to have that"]
    assert len(load_trace("./heavy_tailed", on_note=notes.append)) == 20 and len(notes) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "cannot be read: File name too long"),
        ("loop/t.csv", "cannot be read: "),  # as in a folder that its reader may not search
        ("none/t.csv", "no such file, nor one of capped, heavy_tailed"),
        ("a\0b", "no such file, nor one of capped, heavy_tailed"),
    ],
    ids=["too long", "out of reach", "not there", "no name"],
)
def test_a_file_that_cannot_be_looked_for_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(InputError, match=message):
        load_trace(name)


def test_the_first_rows_of_a_preset_are_those_of_its_whole_trace() -> None:
    first, whole = load_trace("heavy_tailed", seed=3, rows=20), load_trace("heavy_tailed", seed=3)
    for field in ("arrival_s", "prompt_tokens", "output_tokens", "prompt_key"):
        assert getattr(first, field).tolist() == getattr(whole, field)[:20].tolist()
