"""What is tried in another process leaves nothing behind in this one."""

import errno
import math
import os
import signal
from collections.abc import Callable

import pytest

from balanceroute.errors import ConfigError, InputError
from balanceroute.proxy.parent.supervisor import try_apart
from balanceroute.proxy.parent.trial import Attempt, Trial
from tests.descriptors import open_descriptors
from tests.unit.proxy.parent.trials import failure, fork


def test_a_successful_trial_has_no_effect_on_the_parent() -> None:
    done: list[int] = []
    assert failure(lambda: done.append(1)) is None
    assert done == []


def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (lambda: fails(ConfigError("predictor.model: wrong")), "predictor.model: wrong"),
        (lambda: fails(ZeroDivisionError("by 0")), "internal error: ZeroDivisionError: by 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "internal error: the process that tried it has died"),
        (lambda: fails(ConfigError("x" * 5000)), "x" * 4096),
    ],
    ids=["refused", "fails", "dies", "says much"],
)
def test_a_failed_trial_has_its_reason(attempt: Attempt, why: str) -> None:
    assert str(failure(attempt)) == why


@pytest.mark.parametrize("of_children", [signal.SIG_DFL, signal.SIG_IGN], ids=["as usual", "SIGCHLD is ignored"])
def test_an_attempt_before_the_start_is_waited_for_and_has_no_effect_here(of_children: signal.Handlers) -> None:
    before, done = signal.signal(signal.SIGCHLD, of_children), list[int]()
    try:
        try_apart(lambda: done.append(1))
        with pytest.raises(ConfigError, match=r"^predictor\.model: wrong$"):
            try_apart(lambda: fails(InputError("predictor.model: wrong")))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert done == []


def test_an_attempt_for_which_there_is_no_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", none)
    with pytest.raises(ConfigError, match="Resource temporarily unavailable"):
        try_apart(signal.pause)


def test_an_attempt_before_the_start_that_hangs_is_given_up() -> None:
    with pytest.raises(ConfigError, match=r"^to try the configuration takes longer than 0\.2 s$"):
        try_apart(signal.pause, 0.2)


def test_a_hanging_trial_is_killed() -> None:
    trial = Trial(signal.pause, fork, 0.2)
    trial.give_up()
    os.waitpid(trial.pid, 0)
    assert str(trial.failure()) == "to try the configuration takes longer than 0.2 s" and trial.deadline_s == math.inf


def test_a_trial_that_dies_and_leaves_a_child_does_not_block_its_parent() -> None:
    readable, writable = os.pipe()

    def leave_one() -> None:
        if os.fork():
            os._exit(0)
        os.read(readable, 1)
        os._exit(0)

    assert "has died" in str(failure(leave_one))
    os.write(writable, b"\n")
    os.close(readable)
    os.close(writable)


def test_a_trial_that_cannot_start_leaves_no_descriptor_open() -> None:
    def none(run: Callable[[], None]) -> int:
        raise BlockingIOError("no process")

    before = open_descriptors()
    with pytest.raises(BlockingIOError):
        Trial(signal.pause, none)
    assert open_descriptors() <= before
