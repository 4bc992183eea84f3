"""The decision benchmark keeps running, and prints what the README's table needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import decision

REPO = Path(__file__).parents[3]


def test_the_benchmark_prints_every_stage_of_a_point() -> None:
    command = [sys.executable, "-m", "scripts.bench.decision", "--workers", "8", "--waiting", "16", "--r-max", "4"]
    run = subprocess.run(
        [*command, "--freed", "1", "4", "--where", "one", "--policies", "br_h", "target_fit", "--ticks", "20"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    rows = [line.split() for line in run.stdout.splitlines()]
    found = {(row[0], row[4], row[6], row[7]): int(row[8]) for row in rows if len(row) == 13 and row[1] == "8"}
    assert {found["br_h", "1", "single", stage] for stage in ("prepare", "stage1", "stage2", "total")} == {20}
    searched = {
        method: found.get(("br_h", "4", method, "total"), 0) for method in ("all-fit", "enumerated", "bit-sets")
    }
    assert sum(searched.values()) == 20 and searched["enumerated"] > 0, (
        "four slots on one worker are a subset to search"
    )
    assert found["target_fit", "4", "scarce", "total"] == 20
    assert "progress() per token" in run.stdout


@pytest.mark.parametrize(
    "given", ["--freed 0", "--freed 16 --waiting 8", "--freed 65", "--policies random", "--ticks 0"]
)
def test_what_no_cluster_can_be_made_of_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_decision", *given.split()])
    with pytest.raises(SystemExit):
        decision.main()
    assert f"error: argument {given.split()[0]}" in capsys.readouterr().err
