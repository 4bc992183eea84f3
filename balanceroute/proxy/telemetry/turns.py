"""Long work in pieces: a bounded part of it in each turn of the event loop, as all streams stand still meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def over_turns(loop: asyncio.AbstractEventLoop, items: list[Item], act: Callable[[Item], object], most: int) -> None:
    """Call `act` for these items, `most` in this turn of the loop and in each of the next ones.

    Until its turn an item may have changed, or be gone.
    """
    for item in items[:most]:
        act(item)
    if rest := items[most:]:
        loop.call_soon(over_turns, loop, rest, act, most)


async def in_turns(items: Iterable[Item], most: int) -> AsyncIterator[Item]:
    """The items, at most so many in a turn of the loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % most == 0:
            await asyncio.sleep(0)
