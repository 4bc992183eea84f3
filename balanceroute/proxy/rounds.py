"""Asking every worker URL something once per period, without one that hangs holding up the others."""

import asyncio
from collections.abc import Awaitable, Callable

from balanceroute.proxy.fleet import Fleet, Worker

Ask = Callable[[list[Worker]], Awaitable[None]]


class Rounds:
    """One question at a time per URL; `ask` gets the workers behind it and takes care of its own timeout."""

    def __init__(self, fleet: Fleet, ask: Ask) -> None:
        self._fleet, self._ask = fleet, ask
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
        """Ask every URL that isn't being asked still. Raises: what an earlier `ask` raised."""
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
        await self._ask(workers)

    def _collect(self) -> None:
        for url, task in list(self._open.items()):
            if task.done():
                del self._open[url]
                task.result()
