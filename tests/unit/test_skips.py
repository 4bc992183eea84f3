"""A green run has run everything: what would be skipped fails, with its reason."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIPS = """
import pytest

def test_here() -> None:
    pytest.skip("no accelerator")

@pytest.mark.skipif(True, reason="no network")
def test_before() -> None:
    pass

@pytest.mark.xfail(reason="known")
def test_expected() -> None:
    assert False
"""


def test_a_missing_prerequisite_fails_a_test_and_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "test_that_skips.py"
    file.write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no accelerator" in done.stdout and "no network" in done.stdout
    assert "1 failed, 1 xfailed, 1 error" in done.stdout
