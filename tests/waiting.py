"""Waiting for what must become true: the only place where a test lets real time pass.

Both poll, because what is waited for is the state of many things (sockets, processes, counters) and few have an event.
On the virtual clock a poll costs nothing.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.001  # short states must not be missed
MOST_POLL_S = 0.02
MOST_PACE_S = 0.25
PATIENCE_S = 120.0  # nothing takes so long on the busiest machine; whoever waits longer waits for ever


async def until(true: Callable[[], Any], what: str = "", within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, which is called, and awaited if it is a coroutine. Raises: AssertionError."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        found = true()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        await asyncio.sleep(_next_look_s(loop.time() - began_s, within_s, what or true))


def block_until(true: Callable[[], Any], what: str = "", within_s: float = PATIENCE_S) -> None:
    """The same where no event loop runs. Raises: AssertionError."""
    began_s = time.monotonic()
    while not true():
        time.sleep(_next_look_s(time.monotonic() - began_s, within_s, what or true))


def _next_look_s(waited_s: float, within_s: float, wanted: str | Callable[[], Any]) -> float:
    if waited_s >= within_s:
        text = wanted if isinstance(wanted, str) else inspect.getsource(wanted).strip()
        raise AssertionError(f"not within {within_s:g} s: {text}")
    return min(MOST_POLL_S, max(POLL_S, waited_s / 20))


async def pace(seconds: float) -> None:
    """The time between two bytes of a peer that is slow on purpose; no verdict may need it to be exact."""
    assert seconds <= MOST_PACE_S
    await asyncio.sleep(seconds)


def block_pace(seconds: float) -> None:
    """The same where no event loop runs."""
    assert seconds <= MOST_PACE_S
    time.sleep(seconds)
