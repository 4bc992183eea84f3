"""Trying something in a process of its own.

The parent must not load what may break it, or what does not survive a fork: libraries that start threads, above all.
"""

import os
import select
import signal
from collections.abc import Callable
from typing import Final, NoReturn

from balanceroute.errors import BalanceRouteError, ConfigError

WITHIN_S: Final = 30.0  # a model or a long history takes seconds
_MOST_BYTES: Final = 65_536


def try_apart(attempt: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Do it, without its effects on this process. Raises: ConfigError: why it fails, or that it takes too long."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        _attempt(attempt, writable)
    os.close(writable)
    try:
        in_time = select.select([readable], [], [], within_s)[0]
        told = os.read(readable, _MOST_BYTES).decode() if in_time else f"it takes longer than {within_s:g} s"
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)  # it has told; its threads may not end by themselves
        os.waitpid(pid, 0)
    if told != "done":
        raise ConfigError(told or "internal error")


def _attempt(attempt: Callable[[], object], writable: int) -> NoReturn:
    """What the other process is, from its first moment to its last."""
    told = ""
    try:
        attempt()
        told = "done"
    except BalanceRouteError as error:
        told = str(error)
    except BaseException as error:
        told = f"internal error: {error!r}"
    finally:
        os.write(writable, told.encode()[:_MOST_BYTES])
        os._exit(0)
