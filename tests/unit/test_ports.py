"""Ports for tests: two test processes never get the same ones."""

import subprocess
import sys

from tests.ports import free_base_port

FOUND = "from tests.ports import free_base_port; print(free_base_port([0, 1]), flush=True); input()"


def test_processes_that_run_at_the_same_time_get_different_ports() -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", FOUND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        found = [int(other.stdout.readline()) for other in others if other.stdout is not None]
        assert len({*found, free_base_port([0, 1])}) == 4
        assert free_base_port([0, 1]) == free_base_port([0, 1])  # nobody listens there
    finally:
        for other in others:
            other.communicate("\n")
