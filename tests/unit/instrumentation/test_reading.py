"""What is read out of step logs."""

import json
from pathlib import Path

import pytest

from balanceroute.instrumentation.__main__ import main
from balanceroute.instrumentation.reading import BadStepLog, read, summarise
from balanceroute.instrumentation.step_log import COLUMNS

HEADER = ",".join(COLUMNS) + "\n"


def a_log(
    path: Path, loads: list[int], *, start_s: float = 1e9, every_s: float = 0.05, ms: float | None = None
) -> Path:
    """One step per load, 0.002 ms per token and 15 ms besides, unless `ms` says what each cost."""
    lines = [
        f"{start_s + every_s * (i + 1):.6f},{15 + 0.002 * load if ms is None else ms},{1 if load else 0},{load},0,0.5\n"
        for i, load in enumerate(loads)
    ]
    path.write_text(HEADER + "".join(lines))
    return path


def test_the_fit_finds_the_cost_of_a_token_and_of_a_step(tmp_path: Path) -> None:
    fit = summarise([a_log(tmp_path / "a", [1000, 5000, 9000, 20_000])]).ranks[0].fit
    assert fit is not None
    assert (fit.a_us_per_token, fit.b_ms, fit.r2, fit.steps) == pytest.approx((2.0, 15.0, 1.0, 4), rel=1e-6)


def test_steps_without_a_request_are_no_part_of_the_fit(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1000, 5000, 9000])
    path.write_text(path.read_text() + "1000000001.0,500.0,0,0,0,0.0\n")
    fit = summarise([path]).ranks[0].fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.steps == 3


def test_steps_that_a_request_has_joined_are_no_part_of_the_fit(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1000, 5000, 9000])
    path.write_text(path.read_text() + "1000000001.0,900.0,2,9100,0,0.5\n1000000001.1,33.4,2,9200,0,0.5\n")
    fit = summarise([path]).ranks[0].fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.steps == 4


def test_the_spread_is_largest_minus_smallest_load_at_the_same_time(tmp_path: Path) -> None:
    files = [a_log(tmp_path / "a", [1000] * 10), a_log(tmp_path / "b", [400] * 10, start_s=1e9 + 0.001)]
    summary = summarise(files)
    assert summary.load_spread_mean == pytest.approx(600) and summary.load_spread_p99 == pytest.approx(600)
    assert summary.load_spread_of_mean_ratio == pytest.approx(600 / 700)


def test_only_the_time_that_all_files_cover_is_compared(tmp_path: Path) -> None:
    early = a_log(tmp_path / "a", [9000] * 20 + [100] * 20)
    late = a_log(tmp_path / "b", [100] * 20, start_s=1e9 + 1.0)
    assert summarise([early, late]).load_spread_mean == pytest.approx(0, abs=1)


def test_the_barrier_s_cost_follows_the_largest_load(tmp_path: Path) -> None:
    heavy = [1000, 6000, 3000, 9000, 2000]
    a = a_log(tmp_path / "a", heavy)
    b = a_log(tmp_path / "b", [500] * 5)
    costs = [float(line.split(",")[1]) for line in a.read_text().splitlines()[1:]]
    lines = b.read_text().splitlines()
    b.write_text(
        "\n".join(
            [lines[0]]
            + [",".join([r.split(",")[0], str(c), *r.split(",")[2:]]) for r, c in zip(lines[1:], costs, strict=True)]
        )
        + "\n"
    )
    fit = summarise([a, b]).envelope_fit
    assert fit is not None and fit.a_us_per_token == pytest.approx(2.0) and fit.r2 == pytest.approx(1.0)


def test_files_that_do_not_overlap_have_no_spread(tmp_path: Path) -> None:
    summary = summarise([a_log(tmp_path / "a", [1] * 3), a_log(tmp_path / "b", [1] * 3, start_s=2e9)])
    assert summary.load_spread_mean is None and summary.envelope_fit is None


def test_an_engine_that_never_stepped_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(HEADER)
    assert summarise([path]).ranks[0].steps == 0


def test_half_a_last_line_is_forgiven_and_half_a_line_before_it_is_not(tmp_path: Path) -> None:
    path = a_log(tmp_path / "a", [1, 2, 3])
    path.write_text(path.read_text() + "10000")
    assert len(read(path)) == 3
    path.write_text(path.read_text() + "\n1e9,1,1,1,0,0\n")
    with pytest.raises(BadStepLog, match="line 5"):
        read(path)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(a_log(tmp_path / name, [1000, 2000, 4000])) for name in ("a.csv", "b.csv")]
    assert main(files) == 0
    text = capsys.readouterr().out
    assert "load spread (max - min): mean 0 tokens" in text
    assert "step = 2.0000 us * L + 15.000 ms" in text
    assert main([*files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][1]["file"] == "b.csv"


@pytest.mark.parametrize("content", [None, "a,b\n1,2\n"])
def test_what_is_no_step_log_is_one_line_and_exit_code_2(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
