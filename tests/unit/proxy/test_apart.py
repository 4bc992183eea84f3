"""What is tried in another process leaves nothing behind in this one."""

import os
import signal

import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.apart import try_apart


def test_what_succeeds_has_no_effect_here() -> None:
    done: list[int] = []
    try_apart(lambda: done.append(1))
    assert done == []


def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (lambda: fails(ConfigError("predictor.model: wrong")), r"^predictor\.model: wrong$"),
        (lambda: fails(ZeroDivisionError("by 0")), "internal error: ZeroDivisionError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "internal error"),
        (signal.pause, "longer than 0.2 s"),
    ],
    ids=["refused", "fails", "dies", "hangs"],
)
def test_why_it_fails_is_told(attempt: object, why: str) -> None:
    assert callable(attempt)
    with pytest.raises(ConfigError, match=why):
        try_apart(attempt, 60.0 if attempt is not signal.pause else 0.2)
