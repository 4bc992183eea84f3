"""The decision benchmark keeps running, and prints what the README's table needs."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_benchmark_prints_every_stage_of_a_point() -> None:
    command = [sys.executable, "scripts/bench/decision.py", "--workers", "8", "--waiting", "16", "--r-max", "4"]
    run = subprocess.run(
        [*command, "--ticks", "5"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    rows = [line.split() for line in run.stdout.splitlines()]
    stages = {(row[0], row[5]) for row in rows if len(row) == 10 and row[1] == "8"}
    wanted = {"prepare", "stage1", "stage2", "total"}
    assert {("br_h", stage) for stage in wanted} | {("target_fit", "total")} <= stages
    assert "progress() per token" in run.stdout
