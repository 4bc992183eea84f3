"""Waiting for what must become true: the only place where a test lets time pass without being told how much is enough.

Both poll, because what is waited for is the state of many things (sockets, processes, counters) and few have an event.
On the virtual clock a poll costs nothing.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.005
PATIENCE_S = 120.0  # nothing takes so long on the busiest machine; whoever waits longer waits for ever


async def until(true: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, which is called, and awaited if it is a coroutine. Raises: AssertionError."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        found = true()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert loop.time() < deadline_s, f"not within {within_s:g} s: {inspect.getsource(true).strip()}"
        await asyncio.sleep(POLL_S)


def block_until(true: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    """The same where no event loop runs. Raises: AssertionError."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {inspect.getsource(true).strip()}"
        time.sleep(POLL_S)
