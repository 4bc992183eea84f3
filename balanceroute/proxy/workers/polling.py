"""Polls every worker URL once per period; one that hangs, or causes an error, does not delay the others.

The URLs of a round are polled `BATCH` in a turn of the loop, or as many at a time over the period: to ask 160 and to
read their answers takes many milliseconds, and streams would wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from balanceroute.errors import CannotConnect
from balanceroute.proxy.telemetry.turns import over_turns
from balanceroute.proxy.workers.fair_timeout import FairTimeout
from balanceroute.proxy.workers.fleet import Fleet, Worker

BATCH: Final = 16  # URLs polled in one turn of the loop
LOOK_S: Final = 5.0  # between two looks, during a long pause, whether a reload has made it shorter

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


async def _pause(period_s: Callable[[], float], share: float) -> None:
    """Wait for this share of the period."""
    now = asyncio.get_running_loop().time
    begun_s = now()
    while (left_s := begun_s + share * period_s() - now()) > LOOK_S:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(left_s)


class Polling:
    """Calls `ask` with the workers of each URL, one call at a time per URL; `ask` has its own timeout.

    An error that `ask` raises is a bug: it goes to `on_bug`, and the other workers are still polled. An error of
    `on_bug` ends the polling.
    """

    def __init__(self, fleet: Fleet, ask: Ask, on_bug: OnBug) -> None:
        self._fleet, self._ask, self._on_bug = fleet, ask, on_bug
        self._open: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def run(self, period_s: Callable[[], float], spread: bool = False) -> None:
        """Poll until cancelled; a period that a reload has changed holds within `LOOK_S`. `spread`: all rounds but the
        first are spread over the period.
        """
        self._closed = False
        batches = [self._by_url()]
        try:
            while True:
                for batch in batches:
                    self._start(batch)
                    await _pause(period_s, 1 / len(batches))
                groups = self._by_url()
                size = BATCH if spread else max(1, len(groups))
                batches = [groups[at : at + size] for at in range(0, len(groups), size)] or [[]]
        finally:
            await self.close()

    async def once(self) -> None:
        """One round, to its end."""
        for workers in self._by_url():
            self._begin(workers)
        await asyncio.gather(*self._open.values())
        self._collect()

    def start(self) -> None:
        """Start a call for every URL without one under way. Raises: an error of `on_bug` from an earlier call."""
        self._start(self._by_url())

    def _by_url(self) -> list[list[Worker]]:
        by_url: dict[str, list[Worker]] = {}
        for worker in self._fleet:
            by_url.setdefault(worker.spec.url, []).append(worker)
        return list(by_url.values())

    def _start(self, groups: list[list[Worker]]) -> None:
        self._collect()
        over_turns(asyncio.get_running_loop(), groups, self._begin, BATCH)

    def _begin(self, workers: list[Worker]) -> None:
        url = workers[0].spec.url
        if url not in self._open and not self._closed:
            self._open[url] = asyncio.get_running_loop().create_task(self._run(workers))

    async def close(self) -> None:
        """Stop polling."""
        self._closed = True
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
