"""One leads at a time, under a number that nobody has had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.leadership import Leadership

HOLD = """
import sys, signal, pathlib
from balanceroute.proxy.link.leadership import Leadership
lead = Leadership(pathlib.Path(sys.argv[1]))
print(lead.take(), lead.epoch, flush=True)
signal.pause()
"""


def test_one_leads_and_the_next_counts_on(tmp_path: Path) -> None:
    first, second = Leadership(tmp_path / "lead"), Leadership(tmp_path / "lead")
    assert first.take() and first.epoch == 1
    assert not second.take() and second.epoch == 0
    first.release()
    assert second.take() and second.epoch == 2
    assert (tmp_path / "lead").stat().st_mode & 0o777 == 0o600


def test_a_leader_that_is_killed_leads_no_more(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == "True 1\n"
        heir = Leadership(path)
        assert not heir.take()
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        assert heir.take() and heir.epoch == 2


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    path.write_text("keys: [a]\n")
    with pytest.raises(ConfigError, match="no epoch"):
        Leadership(path).take()
    assert path.read_text() == "keys: [a]\n"
    with pytest.raises(ConfigError):
        Leadership(tmp_path / "missing" / "lead").take()
