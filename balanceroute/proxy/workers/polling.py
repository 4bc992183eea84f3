"""Polls every worker URL once per period; one that hangs, or causes an error, does not delay the others."""

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
    """No answer in time. `ours`: the router was late itself, or could not ask."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.ours = ours


async def answer_of(asking: Awaitable[_T], timeout_s: float) -> _T:
    """The result of `asking`, if it comes in time. Raises: Silent; errors of `asking` except CannotConnect."""
    limit = FairTimeout(timeout_s)
    try:
        async with limit:
            return await asking
    except TimeoutError as error:
        raise Silent(limit.ours) from error
    except CannotConnect as error:
        raise Silent(ours=True) from error


def still_here(fleet: Fleet, workers: list[Worker]) -> list[Worker]:
    """The workers that have not left; the first one's connections are used for all."""
    return [worker for worker in workers if fleet.has(worker)]


class Polling:
    """Calls `ask` with the workers of each URL, one call at a time per URL; `ask` has its own timeout.

    An error that `ask` raises is a bug: it goes to `on_bug`, and the other workers are still polled. An error of
    `on_bug` ends the polling.
    """

    def __init__(self, fleet: Fleet, ask: Ask, on_bug: OnBug) -> None:
        self._fleet, self._ask, self._on_bug = fleet, ask, on_bug
        self._open: dict[str, asyncio.Task[None]] = {}

    async def run(self, period_s: Callable[[], float]) -> None:
        """Poll until cancelled; the period is read each time, so a reload takes effect."""
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
        """Start a call for every URL without one under way. Raises: an error of `on_bug` from an earlier call."""
        self._collect()
        loop = asyncio.get_running_loop()
        by_url: dict[str, list[Worker]] = {}
        for worker in self._fleet:
            by_url.setdefault(worker.spec.url, []).append(worker)
        for url, workers in by_url.items():
            if url not in self._open:
                self._open[url] = loop.create_task(self._run(workers))

    async def close(self) -> None:
        """Stop polling."""
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
