"""One leads at a time, under a number that nobody has had."""

import errno
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link import leadership
from balanceroute.proxy.link.files import is_gone, locked
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.link.messages import MAX_EPOCH
from tests.waiting import block_until

HOLD = """
import asyncio, sys, pathlib
from balanceroute.proxy.link.leadership import RENEW_S, FileLead
async def lead():
    while held.renew():
        await asyncio.sleep(RENEW_S)
held = FileLead(pathlib.Path(sys.argv[1]))
print(held.take(), held.epoch, flush=True)
asyncio.run(lead())
print("lost", flush=True)
"""


@pytest.fixture(autouse=True)
def _no_leader_outlasts_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its thread would touch its file for ten more seconds, and log in another test that it cannot."""
    leaders, lead = list[FileLead](), FileLead._lead

    def noted(leader: FileLead, file: int) -> None:
        leaders.append(leader)
        lead(leader, file)

    monkeypatch.setattr(FileLead, "_lead", noted)
    yield
    for leader in leaders:
        leader.release()


def test_one_brain_leads_and_the_next_increments_the_epoch(tmp_path: Path) -> None:
    first, second = FileLead(tmp_path / "lead"), FileLead(tmp_path / "lead")
    assert first.take() and first.epoch == 1
    assert not second.take() and second.epoch == 0
    first.release()
    assert second.take() and second.epoch == 2 and not first.renew()
    assert (tmp_path / "lead").stat().st_mode & 0o777 == 0o600


def test_epochs_start_at_the_given_number_and_increase(tmp_path: Path) -> None:
    for epoch in (1000, 1001):
        lead = FileLead(tmp_path / "lead", 1000)
        assert lead.take() and lead.epoch == epoch
        lead.release()


def test_a_killed_leader_releases_the_lead(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == "True 1\n"
        successor = FileLead(path)
        assert not successor.take()
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        assert successor.take() and successor.epoch == 2


def test_a_stopped_leader_is_deposed_and_notices_it_when_it_resumes(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == "True 1\n"
        os.kill(leader.pid, signal.SIGSTOP)
        successor, other = FileLead(path), FileLead(path)
        block_until(successor.take)
        assert successor.epoch == 2 and not other.take()
        os.kill(leader.pid, signal.SIGCONT)
        assert leader.stdout.readline() == "lost\n"
    assert successor.renew() and not other.take()
    successor.release()
    assert other.take() and other.epoch == 3


def test_a_leader_with_a_busy_event_loop_goes_on_touching_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "STUCK_S", math.inf)  # a busy machine may let this process stand still for longer
    path = tmp_path / "lead"
    leader = FileLead(path)
    assert leader.take()
    for _ in range(2):
        touched = path.stat().st_mtime_ns
        block_until(lambda touched=touched: path.stat().st_mtime_ns != touched, "a touch without `renew`")
    assert leader.renew()
    leader.release()


@pytest.mark.parametrize("ends", [lambda lead, path: lead.release(), lambda lead, path: path.unlink()])
def test_the_thread_of_a_leader_ends_with_its_lead(tmp_path: Path, ends: Callable[[FileLead, Path], None]) -> None:
    lead, path, others = FileLead(tmp_path / "lead"), tmp_path / "lead", threading.enumerate()
    assert lead.take()
    (thread,) = [each for each in threading.enumerate() if each.name == "lead" and each not in others]
    ends(lead, path)
    block_until(lambda: not thread.is_alive())
    lead.release()


def test_a_busy_event_loop_is_told_from_a_hung_one_by_the_last_renewal_however_long_ago_the_lead_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, path = 100.0, tmp_path / "lead"
    monkeypatch.setattr(leadership.time, "monotonic", lambda: now_s)
    leader = FileLead(path)
    assert leader.take()
    now_s += 2 * leadership.STUCK_S
    assert leader.renew()
    now_s += leadership.STUCK_S / 2
    os.utime(path, ns=(1, 1))
    block_until(lambda: path.stat().st_mtime_ns != 1, "a touch of a leader whose event loop is late")
    leader.release()


class Stopped(FileLead):
    """A leader whose process does not run: neither does the thread that touches its file."""

    def _touch_while_late(self, file: int) -> None:
        pass


def test_a_renewing_or_unobserved_leader_is_not_deposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(leadership.time, "monotonic", lambda: now_s)
    leader, standby = Stopped(tmp_path / "lead"), FileLead(tmp_path / "lead")
    assert leader.take()
    for number in range(50):
        now_s += leadership.RENEW_S
        os.utime(tmp_path / "lead", ns=(number, number))  # what renewing does, at times that surely differ
        assert not standby.take()
    now_s += 1000.0  # the standby stood still itself, so it begins to wait anew
    assert not standby.take()
    now_s += leadership.LEASE_S * 0.4
    assert not standby.take()
    now_s += leadership.LEASE_S * 0.4
    assert not standby.take()
    now_s += leadership.LEASE_S * 0.4
    assert standby.take() and standby.epoch == 2
    assert not leader.renew()


def test_only_the_lock_holder_may_raise_its_epoch_above_a_lost_one(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    leader = FileLead(path)
    assert leader.take() and leader.raise_epoch(6)
    leader.lift(3)
    assert leader.epoch == 7 and path.read_text() == "7\n"
    path.unlink()
    successor = FileLead(path)
    assert successor.take() and not leader.raise_epoch(8)
    assert (leader.epoch, successor.epoch) == (7, 1)
    successor.release()


def test_the_next_leader_has_an_epoch_also_after_the_largest_that_a_relay_may_name(tmp_path: Path) -> None:
    leader, successor = FileLead(tmp_path / "lead"), FileLead(tmp_path / "lead")
    assert leader.take() and leader.raise_epoch(MAX_EPOCH)
    leader.release()
    assert successor.take() and successor.epoch > leader.epoch > MAX_EPOCH
    successor.release()


def test_a_full_disk_does_not_prevent_deposing_a_stopped_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(leadership.time, "monotonic", lambda: now_s)
    path = tmp_path / "lead"
    path.write_text("99\n")
    leader, standby = Stopped(path), FileLead(path)
    assert leader.take() and not standby.take()
    write = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        """Room is there only where something is written already."""
        if not os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    monkeypatch.setattr(leadership.os, "pwrite", full)
    for _ in range(10):
        now_s += leadership.RENEW_S
        if standby.take():
            break
    assert standby.epoch == 101 and path.read_text() == "101\n"
    assert not leader.renew()


def test_a_standby_keeps_waiting_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lead"
    leader, standby = FileLead(path), FileLead(path)
    assert leader.take()

    def full(file: Path) -> int | None:
        if not file.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return locked(file)

    monkeypatch.setattr(leadership, "locked", full)
    assert not standby.take() and leader.renew()


def test_a_brain_that_can_start_no_thread_still_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    lead = FileLead(tmp_path / "lead")
    assert lead.take() and lead.renew()
    lead.release()


def test_a_foreign_file_at_the_lead_path_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    path.write_text("keys: [a]\n")
    with pytest.raises(ConfigError, match="no epoch"):
        FileLead(path).take()
    assert path.read_text() == "keys: [a]\n"
    with pytest.raises(ConfigError):
        FileLead(tmp_path / "missing" / "lead").take()


@pytest.mark.parametrize("spoilt", [b"-5\n", b"9" * 31], ids=["negative", "too large"])
def test_an_invalid_epoch_file_is_refused_at_the_first_start(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "lead").write_bytes(spoilt)
    with pytest.raises(ConfigError, match="no epoch"):
        FileLead(tmp_path / "lead").take()
    lead = FileLead(tmp_path / "lead", 1000, again=True)
    assert lead.take() and lead.epoch == 1000
    lead.release()


@pytest.mark.parametrize("content", [b"", b"\0\0\0"], ids=["nothing", "zeros"])
def test_an_epoch_file_emptied_by_a_power_loss_does_not_prevent_leading(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lead").write_bytes(content)
    lead = FileLead(tmp_path / "lead", 1000)
    assert lead.take() and lead.epoch == 1000
    assert (tmp_path / "lead").read_bytes() == b"1000\n"


def test_a_later_leader_restarts_the_count_when_the_epoch_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "lead"
    path.write_bytes(b"\xff spoilt")
    lead = FileLead(path, again=True)
    assert lead.take() and lead.epoch == 1 and path.read_bytes() == b"1\n"
    lead.release()


def test_a_stopped_leader_is_deposed_although_its_epoch_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lead"
    stands, standby = Stopped(path), FileLead(path)
    assert stands.take()
    monkeypatch.setattr(standby, "_stands_still", lambda: True)
    path.write_bytes(b"\xff spoilt")
    status = path.stat()
    standby._sign = (status.st_ino, status.st_mtime_ns)
    faster = locked(tmp_path / "lead.next")
    assert faster is not None and not standby.take(), "another standby is about to lead"
    os.close(faster)
    late = FileLead(path)
    monkeypatch.setattr(late, "_stands_still", lambda: True)
    late._sign = standby._sign
    assert standby.take() and standby.epoch == 1 and not stands.renew()
    assert not late.take() and standby.renew(), "it has seen the former leader stand still, not this one"
    for lead in (stands, standby):
        lead.release()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOTDIR])
def test_a_leader_with_an_unreadable_folder_keeps_leading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lead, other = FileLead(tmp_path / "lead"), tmp_path / "other"
    other.touch()
    assert lead.take()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        assert lead.renew() and not is_gone(other)
    other.unlink()
    assert lead.renew() and is_gone(other)
    lead.release()


def test_a_leader_with_an_unwritable_disk_keeps_leading_and_logs_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lead = FileLead(tmp_path / "lead")
    assert lead.take()
    with monkeypatch.context() as patched:
        patched.setattr(leadership.os, "utime", read_only)
        assert [lead.renew() for _ in range(3)] == [True] * 3
    assert [one.getMessage() for one in caplog.records] == ["the file of the lead cannot be renewed"]
    assert lead.renew()
    lead.release()


def test_a_brain_that_cannot_write_its_epoch_does_not_lead_and_lets_others_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, other = FileLead(tmp_path / "lead"), FileLead(tmp_path / "lead")
    with monkeypatch.context() as patched:
        patched.setattr(leadership.os, "pwrite", read_only)
        with pytest.raises(ConfigError, match="Read-only"):
            lead.take()
    assert other.take() and other.epoch == 1
    other.release()


def read_only(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
