"""A timeout that does not take a pause of our own for the worker's silence."""

import asyncio
from types import TracebackType
from typing import Final

_SLICES: Final = 8
_LATE_S: Final = 0.5  # our own loop stood still when a timer fires this much after its time


class FairTimeout:
    """`async with FairTimeout(timeout_s) as limit`: raises TimeoutError when the time is over.

    The time is waited for in slices: a pause of our own is seen wherever it falls, and takes no more than a slice from
    what the worker is given, so that what came meanwhile is still read. `ours`: there was one, so that silence says
    nothing of the worker.
    """

    def __init__(self, timeout_s: float) -> None:
        self.ours = False
        self._slice_s, self._left = timeout_s / _SLICES, _SLICES
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> "FairTimeout":
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._next()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _next(self) -> None:
        self._until_s = self._loop.time() + self._slice_s
        self._timer = self._loop.call_at(self._until_s, self._slice_is_over)

    def _slice_is_over(self) -> None:
        now = self._loop.time()
        self.ours = self.ours or now - self._until_s > _LATE_S
        self._left -= 1
        if self._left:
            self._next()
        else:
            self._limit.reschedule(now)
