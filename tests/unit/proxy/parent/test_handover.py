"""A router takes over from another one: what it is given, and what happens when it ends too soon."""

import errno
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.parent import handover
from balanceroute.proxy.parent.handover import Handover, HandoverState, Predecessor
from balanceroute.proxy.run_folder.folder import RunFolder
from tests.waiting import block_until

STATE = HandoverState(lineage=4711, generation=2, decode_first=True)


class Old:
    """The old parent, which looks whenever it is asked to, and a thread in which new ones ask for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.lock = RunFolder(path.parent).claim()
        self.keys = os.memfd_create("keys")
        os.write(self.keys, b"what keys have used")
        self.listen()
        self._threads = ThreadPoolExecutor(1)

    def listen(self) -> None:
        self.side = Handover(self.path, STATE, [self.listener], self.lock, self.keys)

    def found(self) -> Predecessor:
        """A new parent's side, once it has been answered."""
        asked: Future[Predecessor | None] = self._threads.submit(Predecessor.find, self.path)
        block_until(lambda: self.side.look() or asked.done())
        predecessor = asked.result()
        assert predecessor is not None
        return predecessor

    def close(self) -> None:
        self.side.close()
        self.listener.close()
        self.lock.close()
        os.close(self.keys)
        self._threads.shutdown()


@pytest.fixture
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Old]:
    """One that is asked to look by nobody: the signal is not heard."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    side = Old(tmp_path_factory.mktemp("run") / "sock")
    yield side
    side.close()
    signal.signal(signal.SIGIO, before)


def test_a_successor_gets_sockets_and_state_and_reports_when_it_is_ready(old: Old) -> None:
    predecessor = old.found()
    host, port = old.listener.getsockname()
    assert predecessor.state == STATE and not old.side.look()
    assert predecessor.listener(host, port + 1) is None
    assert predecessor.abandoned == [f"{host}:{port}"]
    listener = predecessor.listener(host, port)
    assert listener is not None and listener.getsockname() == (host, port)
    assert predecessor.listener(host, port) is None, "it is the caller's by now"
    assert predecessor.abandoned == []
    predecessor.go()
    block_until(old.side.look)
    listener.close()


def test_a_successor_that_ends_before_it_is_ready_changes_nothing_and_another_may_come(old: Old) -> None:
    old.found().close()
    assert not old.side.look(), "its end is heard, and is no word to go"
    predecessor = old.found()
    predecessor.go()
    block_until(old.side.look)


def test_a_successor_detects_that_its_predecessor_has_ended(old: Old) -> None:
    predecessor = old.found()
    assert predecessor.is_alive
    old.side.close()
    block_until(lambda: not predecessor.is_alive)
    predecessor.close()


def test_the_run_folder_lock_is_held_throughout_a_takeover(old: Old) -> None:
    predecessor, folder = old.found(), RunFolder(old.path.parent)
    lock = predecessor.lock()
    predecessor.go()
    block_until(old.side.look)
    old.lock.close()
    with pytest.raises(ConfigError, match="another router"):
        folder.claim()
    lock.close()
    folder.claim().close()


def test_a_successor_gets_the_file_of_the_table_of_keys(old: Old) -> None:
    predecessor = old.found()
    keys = predecessor.keys
    assert os.pread(keys.fileno(), 100, 0) == b"what keys have used"
    predecessor.close()
    assert keys.closed


def test_a_successor_that_is_killed_before_it_reads_its_answer_leaves_the_old_router_as_it_was(
    old: Old, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as too_early:
        too_early.connect(str(old.path))
    assert not old.side.look() and not old.side.has_successor
    with socket.socket(socket.AF_UNIX) as successor:
        successor.connect(str(old.path))
        assert not old.side.look() and old.side.has_successor
    assert not old.side.look() and not old.side.has_successor
    assert [record.message for record in caplog.records] == ["the router that was to take over has ended"]
    old.found().go()
    block_until(old.side.look)
    assert len(caplog.records) == 1


def test_a_successor_goes_on_if_its_predecessor_has_died(old: Old) -> None:
    predecessor = old.found()
    old.side.close()
    predecessor.go()


def test_a_predecessor_that_does_not_answer_is_not_waited_for_without_end(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "TIMEOUT_S", 0.01)
    with pytest.raises(ConfigError, match="can't be taken over: it does not answer"):
        Predecessor.find(old.path)


def test_a_router_replaces_the_socket_of_a_dead_one_by_one_for_its_own_user_alone(old: Old, tmp_path: Path) -> None:
    old.side.close()
    old.listen()
    assert old.path.stat().st_mode & 0o777 == 0o600
    old.found().close()
    old.side.close()
    with pytest.raises(ConfigError, match="sock: cannot be used: No such file or directory"):
        Handover(tmp_path / "gone" / "sock", STATE, [], old.lock, old.keys)


def test_an_ipv6_address_is_found_and_is_named_in_brackets(tmp_path: Path) -> None:
    class Listener(socket.socket):
        def getsockname(self) -> tuple[str, int, int, int]:
            return "::1", 8000, 0, 0

    with socket.socket() as connection, Listener() as listener, (tmp_path / "file").open("w+b") as file:
        predecessor = Predecessor(connection, STATE, [listener], file, file)
        assert predecessor.abandoned == ["[::1]:8000"]
        assert predecessor.listener("::1", 8000) is listener and predecessor.abandoned == []


def test_a_second_successor_is_refused_meanwhile(old: Old) -> None:
    first = old.found()
    with pytest.raises(ConfigError, match="another router is taking over"):
        old.found()
    first.go()
    block_until(old.side.look)


def test_two_successors_that_come_at_one_moment_are_both_answered(old: Old) -> None:
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for successor in (first, second):
            successor.connect(str(old.path))
        assert not old.side.look() and old.side.has_successor
        assert first.recv(100) and not second.recv(100)


def test_without_a_free_descriptor_a_successor_waits(
    old: Old, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_is_free(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched, socket.socket(socket.AF_UNIX) as successor:
        patched.setattr(socket.socket, "accept", none_is_free)
        assert not old.side.look() and not caplog.records  # nobody has come: a child of ours is up
        successor.connect(str(old.path))
        assert not old.side.look() and not old.side.has_successor
    assert [record.message for record in caplog.records] == ["another router can't be answered"]
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="Too many open files"):
        patched.setattr(socket, "socket", none_is_free)
        old.listen()
    predecessor = old.found()
    predecessor.go()
    block_until(old.side.look)


def test_without_a_running_router_there_is_no_predecessor(old: Old) -> None:
    assert Predecessor.find(old.path.with_name("nobody")) is None
    old.side.close()
    assert Predecessor.find(old.path) is None


def test_a_run_folder_that_cannot_have_a_socket_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--take-over: .*: cannot be used: Not a directory"):
        Predecessor.find(tmp_path / "file" / "sock")
    with pytest.raises(ConfigError, match="--take-over: .*: cannot be used: AF_UNIX path too long"):
        Predecessor.find(tmp_path / ("x" * 120))
