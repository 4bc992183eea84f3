"""Asking every worker URL something once per period, without one that hangs or breaks us holding up the others."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from balanceroute.proxy.workers.fleet import Fleet, Worker

_T = TypeVar("_T")
_SLICES: Final = 8
_LATE_S: Final = 0.5  # our own loop stood still when a timer fires this much after its time

Ask = Callable[[list[Worker]], Awaitable[None]]
OnBug = Callable[[list[Worker], Exception], None]


class Silent(Exception):
    """No answer in time; `ours` says that we may not have looked in time either."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.ours = ours


async def answer_of(asking: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """What `asking` returns, if it does so in time. Raises: Silent, and what `asking` raises.

    The time is waited for in slices: a pause of our own is seen wherever it falls, and takes no more than a slice from
    what the worker is given, so that an answer that came meanwhile is still read.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(asking)
    ours = False
    try:
        for _ in range(_SLICES):
            until_s = loop.time() + timeout_s / _SLICES
            await asyncio.wait((task,), timeout=timeout_s / _SLICES)
            if task.done():
                return task.result()
            ours = ours or loop.time() - until_s > _LATE_S
        raise Silent(ours)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # raised above, or there is nobody to raise it for: nothing for the loop to report


class Polling:
    """One question at a time per URL; `ask` gets the workers behind it and takes care of its own timeout.

    `on_bug` is told what an `ask` raised: its own errors are its business, so that is a bug of ours, and must not keep
    the other workers from being asked. What `on_bug` raises ends the polling.
    """

    def __init__(self, fleet: Fleet, ask: Ask, on_bug: OnBug) -> None:
        self._fleet, self._ask, self._on_bug = fleet, ask, on_bug
        self._open: dict[str, asyncio.Task[None]] = {}

    async def run(self, period_s: Callable[[], float]) -> None:
        """Until cancelled; the period is read anew each time, so a reload counts."""
        try:
            while True:
                self.start()
                await asyncio.sleep(period_s())
        finally:
            await self.close()

    async def once(self) -> None:
        """One round, to its end."""
        self.start()
        await asyncio.gather(*self._open.values())
        self._collect()

    def start(self) -> None:
        """Ask every URL that isn't being asked still. Raises: what `on_bug` raised for an earlier `ask`."""
        self._collect()
        loop = asyncio.get_running_loop()
        by_url: dict[str, list[Worker]] = {}
        for worker in self._fleet:
            by_url.setdefault(worker.spec.url, []).append(worker)
        for url, workers in by_url.items():
            if url not in self._open:
                self._open[url] = loop.create_task(self._run(workers))

    async def close(self) -> None:
        """Stop asking."""
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        self._open.clear()

    async def _run(self, workers: list[Worker]) -> None:
        try:
            await self._ask(workers)
        except Exception as error:
            self._on_bug(workers, error)

    def _collect(self) -> None:
        for url, task in list(self._open.items()):
            if task.done():
                del self._open[url]
                task.result()
