"""What becomes of the output where it cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest

BALANCEROUTE = f"exec {sys.executable} -m balanceroute"
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", ["--version", "--help"])
def test_a_full_standard_output_is_one_line_and_exit_code_1(arguments: str, unbuffered: str) -> None:
    command = f"PYTHONUNBUFFERED={unbuffered} {BALANCEROUTE} {arguments} > {FULL}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    message = "balanceroute: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_closed_standard_output_is_one_line_and_exit_code_1() -> None:
    done = subprocess.run(["sh", "-c", f"{BALANCEROUTE} --version >&-"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "balanceroute: the output cannot be written: not writable\n")
