"""Long work in pieces: a bounded part of it in each turn of the event loop, as all streams stand still meanwhile."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


def over_turns(loop: asyncio.AbstractEventLoop, items: list[Item], act: Callable[[Item], object], most: int) -> None:
    """Call `act` for these items, `most` in this turn of the loop and in each of the next ones.

    Until its turn an item may have changed, or be gone.
    """
    for item in items[:most]:
        act(item)
    if rest := items[most:]:
        loop.call_soon(over_turns, loop, rest, act, most)


class Spread(Generic[Item]):
    """Calls `act` for each item that is added, from the next turn of the loop on, `most` in a turn."""

    def __init__(self, act: Callable[[Item], object], most: int) -> None:
        self._act, self._most = act, most
        self._waiting: deque[Item] = deque()

    def add(self, item: Item) -> None:
        """Add an item. Until its turn it may change, or be gone."""
        self._waiting.append(item)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        now = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)
        for item in now:
            self._act(item)


class Gate:
    """Tasks that something has woken all at once pass it, `most` in a turn of the loop."""

    def __init__(self, most: int) -> None:
        self._spread: Spread[asyncio.Future[None]] = Spread(_let_on, most)

    async def passed(self) -> None:
        """Wait for the next turn, or for a later one."""
        waiter = asyncio.get_running_loop().create_future()
        self._spread.add(waiter)
        await waiter


def _let_on(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # cancelled
        waiter.set_result(None)


async def in_turns(items: Iterable[Item], most: int) -> AsyncIterator[Item]:
    """The items, at most so many in a turn of the loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % most == 0:
            await asyncio.sleep(0)
