"""Tries a function in its own process.

The parent must not load code that may break it, or libraries that do not survive a fork, above all those that start
threads: a thread that does not block the parent's signals ends the parent with the first one. While it runs, it does
not wait: SIGCHLD tells the end of the process.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from select import select
from typing import Final

from balanceroute.errors import BalanceRouteError, ConfigError
from balanceroute.plugins import described

WITHIN_S: Final = 30.0  # a model or a long history takes seconds
_MOST_BYTES: Final = 4096  # the least room of a pipe, even when the user's quota is used up

Attempt = Callable[[], object]
Fork = Callable[[Callable[[], None]], int]
"""Starts a process that runs its argument and ends; returns its id. Raises: OSError: none is to be had."""


class Trial:
    """A call in the process `pid`, without effects on this one."""

    def __init__(self, attempt: Attempt, fork: Fork, within_s: float = WITHIN_S) -> None:
        """Begin the attempt. Raises: OSError: no process or pipe can be made."""
        self._within_s, self._late = within_s, False
        self._result_pipe, writable = os.pipe()
        os.set_blocking(self._result_pipe, False)  # its own children may hold the other end open
        try:
            self.pid = fork(partial(_try, attempt, writable))
        except OSError:
            os.close(self._result_pipe)
            raise
        finally:
            os.close(writable)
        self.deadline_s = time.monotonic() + within_s

    def wait(self) -> None:
        """Wait for the result, or give up when it takes too long; for a parent that has nothing else to do."""
        if not select([self._result_pipe], [], [], None if math.isinf(self._within_s) else self._within_s)[0]:
            self.give_up()

    def give_up(self) -> None:
        """Kill the process: it has taken too long, or its result is not wanted any more."""
        self._late, self.deadline_s = True, math.inf
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def failure(self) -> ConfigError | None:
        """Why the attempt has failed, or that it took too long; None: it succeeded. Called once, after its end."""
        try:
            result = os.read(self._result_pipe, _MOST_BYTES).decode(errors="replace")
        except BlockingIOError:
            result = ""
        os.close(self._result_pipe)
        if result == "done":
            return None
        if self._late:
            return ConfigError(f"to try the configuration takes longer than {self._within_s:g} s")
        return ConfigError(result or "internal error: the process that tried it has died")


def _try(attempt: Attempt, writable: int) -> None:
    """Run the attempt; in the other process."""
    try:
        attempt()
        result = "done"
    except BalanceRouteError as error:
        result = str(error)
    except BaseException as error:
        result = f"internal error: {described(error)}"
    os.write(writable, result.encode(errors="backslashreplace")[:_MOST_BYTES])
