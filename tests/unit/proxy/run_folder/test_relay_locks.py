"""Which relays of a run folder live, and are known to."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.run_folder import relay_locks as module
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.relay_locks import RelayLocks, relay_name


def test_a_removed_life_file_is_recreated_by_its_relay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    relay_locks = RelayLocks(folder)
    folder.make()
    lock = relay_locks.lock("relay-0")
    try:
        shutil.rmtree(folder.folder)
        assert relay_locks.renew("relay-0", lock) and not relay_locks.renew("relay-0", lock)
        assert relay_locks.running() == ["relay-0"]
    finally:
        os.close(lock)
    assert relay_locks.running() == []


def test_an_unreadable_life_file_counts_as_a_living_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "life-relay-0").touch()
    assert RelayLocks(RunFolder(tmp_path)).running() == []

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        assert RelayLocks(RunFolder(tmp_path)).running() == ["relay-0"]


@contextmanager
def living(folder: RunFolder, relay: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is this relay."""
    code = "import sys, pathlib, signal; from balanceroute.proxy.run_folder.relay_locks import RelayLocks\n"
    code += "from balanceroute.proxy.run_folder.folder import RunFolder\n"
    code += "RelayLocks(RunFolder(pathlib.Path(sys.argv[1]))).lock(sys.argv[2])\n"
    code += "print('here', flush=True); signal.pause()"
    command = [sys.executable, "-c", code, str(folder.folder), relay]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "here\n"
        try:
            yield running
        finally:
            running.kill()


def test_locks_show_which_relays_live(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    relay_locks = RelayLocks(folder)
    assert relay_locks.running() == [] and relay_locks.next_generation() == 1
    with living(folder, "relay-0") as relay:
        assert relay_locks.running() == ["relay-0"]
        with pytest.raises(ConfigError, match="another process is its relay-0"):
            relay_locks.lock("relay-0")
        relay.kill()
        relay.wait()
        assert relay_locks.running() == [] and relay_locks.next_generation() == 1


@pytest.mark.parametrize(("running", "generation"), [(["relay-0"], 2), (["relay-0", "relay-1.10", "relay-0.9"], 11)])
def test_a_router_names_its_relays_unlike_all_that_still_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: list[str], generation: int
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    relay_locks = RelayLocks(RunFolder(tmp_path))
    locks = [relay_locks.lock(relay) for relay in running]
    assert relay_locks.next_generation() == generation
    assert relay_name(0, generation) not in running
    for lock in locks:
        os.close(lock)


def test_a_relay_whose_life_file_is_removed_during_its_creation_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = RunFolder(tmp_path), os.open
    relay_locks = RelayLocks(folder)
    with living(folder, "relay-0") as relay:
        relay.kill()
        relay.wait()

    def then_removed(path: Path, *more: int) -> int:
        file = opened(path, *more)
        monkeypatch.undo()
        path.unlink()
        return file

    monkeypatch.setattr(os, "open", then_removed)
    lock = relay_locks.lock("relay-0")
    assert relay_locks.running() == ["relay-0"]
    os.close(lock)
