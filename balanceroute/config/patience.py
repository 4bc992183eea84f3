"""Reads files with a timeout: a file of a lost server, or a pipe without a writer, may never answer.

Nothing ends a thread that stands in such a read, so it is a daemon: the process can end, and what it still brings is
dropped.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from balanceroute.errors import ConfigError

T = TypeVar("T")

READ_S: Final = 5.0  # a file of some kilobytes takes milliseconds, over a busy network too


def in_time(read: Callable[[], T], what: str, within_s: float = READ_S) -> T:
    """The result, or the error, of `read`, which reads `what`.

    Raises: ConfigError: it takes longer than `within_s`, or no thread can be started.
    """
    try:
        result = _begun(read)
    except RuntimeError as error:
        raise ConfigError(f"{what}: cannot be read now: {error}") from None
    try:
        return result.result(within_s)
    except TimeoutError:
        if result.done():
            raise  # its own
        raise ConfigError(f"{what}: no answer within {within_s:g} s") from None


async def off_the_loop(read: Callable[[], T]) -> T:
    """The result, or the error, of `read`, run in a thread: only the caller waits.

    Raises: RuntimeError: no thread is to be had.
    """
    return await asyncio.wrap_future(_begun(read))


def _begun(read: Callable[[], T]) -> Future[T]:
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # the thread needs it even if the waiting task is cancelled

    def run() -> None:
        try:
            result.set_result(read())
        except BaseException as error:  # the caller's, whatever it is
            result.set_exception(error)

    threading.Thread(target=run, name="read", daemon=True).start()
    return result
