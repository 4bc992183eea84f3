"""Asking every worker URL something once per period, without one that hangs or breaks us holding up the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from balanceroute.errors import CannotConnect
from balanceroute.proxy.workers.fair_timeout import FairTimeout
from balanceroute.proxy.workers.fleet import Fleet, Worker

_T = TypeVar("_T")

Ask = Callable[[list[Worker]], Awaitable[None]]
OnBug = Callable[[list[Worker], Exception], None]


class Silent(Exception):
    """No answer in time. `ours`: we may not have looked in time either, or could not ask."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.ours = ours


async def answer_of(asking: Awaitable[_T], timeout_s: float) -> _T:
    """What `asking` returns, if it does so in time. Raises: Silent, and what `asking` raises but for CannotConnect."""
    limit = FairTimeout(timeout_s)
    try:
        async with limit:
            return await asking
    except TimeoutError as error:
        raise Silent(limit.ours) from error
    except CannotConnect as error:
        raise Silent(ours=True) from error


def still_here(fleet: Fleet, workers: list[Worker]) -> list[Worker]:
    """The workers that have not left; the first of them is asked for all, because it has connections."""
    return [worker for worker in workers if fleet.has(worker)]


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
