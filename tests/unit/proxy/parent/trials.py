"""What the supervisor does with an attempt (`proxy/parent/trial.py`), for tests that have no supervisor."""

import os
from collections.abc import Callable

from balanceroute.errors import ConfigError
from balanceroute.proxy.parent.trial import Attempt, Trial


def fork(run: Callable[[], None]) -> int:
    """A process that runs it and ends."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    finally:
        os._exit(0)


def failure(attempt: Attempt) -> ConfigError | None:
    """Of a trial that has ended."""
    trial = Trial(attempt, fork)
    os.waitpid(trial.pid, 0)
    return trial.failure()
