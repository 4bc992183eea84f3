"""`reproduce` with several processes: it ends when told to, and leaves none of them behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import _base
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from balanceroute.errors import BalanceRouteError
from balanceroute.experiments import jobs
from balanceroute.experiments.jobs import Task, run_jobs, signals_held_back
from tests.waiting import PATIENCE_S, block_until

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc"),
    pytest.mark.timeout(300),
]


@dataclass(frozen=True, slots=True)
class Killed(Task):
    """A task whose process dies as one that the kernel kills for want of memory."""

    cost: float = 1.0

    def run(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def processes_of(session: int) -> list[str]:
    """Command lines of a session's living processes; zombies have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session and (line := (folder / "cmdline").read_text()):
                found.append(line)
        except (ProcessLookupError, FileNotFoundError):
            continue  # ended while we looked
    return found


def simulating(session: int) -> int:
    """How many of them are workers of a pool."""
    return sum("spawn_main" in line for line in processes_of(session))


def heed_interrupts() -> None:
    """Undo what a shell does to a test run in its background, whose processes ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A `reproduce` of many simulations on two processes, in a session of its own."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "balanceroute", "reproduce", "main", "--quick", "--jobs", "2", "--out", "out"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        block_until(lambda: simulating(process.pid) == 2)
        yield process
    finally:
        if processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("send", "number", "code", "simulates"),
    [
        (os.killpg, signal.SIGINT, 130, False),
        (os.killpg, signal.SIGINT, 130, True),
        (os.kill, signal.SIGINT, 130, True),
        (os.kill, signal.SIGTERM, 143, True),
        (os.kill, signal.SIGKILL, -signal.SIGKILL, True),
    ],
    ids=["ctrl-c-as-it-starts", "ctrl-c-as-it-simulates", "interrupted-alone", "terminated", "killed"],
)
def test_a_run_on_several_processes_ends_at_once_and_leaves_none(
    running: subprocess.Popen[str],
    send: Callable[[int, int], None],
    number: signal.Signals,
    code: int,
    simulates: bool,
) -> None:
    if simulates:
        block_until(lambda: simulating(running.pid) > 0)
    send(running.pid, number)
    _, error_text = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == code
    if number is not signal.SIGKILL:  # which may come while it hands a process its task, and that one says so
        assert "Traceback" not in error_text
    assert ("balanceroute: interrupted before the report\n" in error_text) == (code == 130)
    block_until(lambda: not processes_of(running.pid), within_s=PATIENCE_S)


def test_a_process_that_is_killed_is_an_error_not_an_endless_wait() -> None:
    with pytest.raises(BalanceRouteError, match="was killed"):
        run_jobs([Killed(1.0), Killed(2.0)], 2)


@dataclass(frozen=True, slots=True)
class Interrupts(Task):
    """A task that has the process interrupted that waits for it, and lasts until it is ended."""

    cost: float = 1.0

    def run(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()


def test_an_interrupt_leaves_no_future_locked_that_the_end_of_its_process_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`as_completed` locks all futures one by one: an interrupt in between left some locked, and the run hung."""

    def interrupted(self: Any) -> None:
        self.futures[0]._condition.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr(_base._AcquireFutures, "__enter__", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs([Interrupts(1.0), Interrupts(2.0)], 2)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_while_processes_are_ended_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run waited for ever for those that were left."""
    calls: list[bool] = []

    def children() -> list[BaseProcess]:
        calls.append(True)
        if len(calls) == 2:  # the first call is made before any is started
            signal.raise_signal(signal.SIGINT)
        return active_children()

    monkeypatch.setattr(jobs, "active_children", children)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs([Interrupts(1.0)], 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 2 and not active_children()


def test_an_interrupt_that_another_thread_takes_is_raised_when_all_processes_have_been_started() -> None:
    """That thread was there before signals were held back, as the one of a progress bar is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background ignores it
    reached, ended = False, Event()
    taker = Thread(target=ended.wait)
    taker.start()
    try:
        with pytest.raises(KeyboardInterrupt), signals_held_back():
            os.kill(os.getpid(), signal.SIGINT)
            reached = True
        assert reached
    finally:
        ended.set()
        taker.join()
        signal.signal(signal.SIGINT, before)
