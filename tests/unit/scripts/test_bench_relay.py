"""The relay benchmark keeps running, other routers included, and prints what the README's table needs."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[3]


def test_the_benchmark_prints_a_row_per_target_without_failures() -> None:
    other = f"other={sys.executable} -m scripts.bench.relay_reference {{port}} {{decode1_port}} {{decode2_port}}"
    run = subprocess.run(
        [sys.executable, "-m", "scripts.bench.relay", "--rounds", "1", "--seconds", "0.2", "--held", "20", "--quiet"]
        + ["--target", other, "--set", "predictor.kind=none"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in run.stdout.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 7}
    assert table["bare relay"][0].endswith("(1.00x)")
    assert float(table["balanceroute"][1].split()[0]) > 0
    assert [table[name][-1] for name in ("bare relay", "balanceroute", "other")] == ["0", "0", "0"]
    ratios = {row[0]: row[1:] for row in rows if len(row) == 5}
    assert list(ratios)[2:] == ["bare relay", "other"]
    assert all(" to " in cell for cell in ratios["other"])
