"""A timeout that does not count pauses of this process as the worker's silence."""

import asyncio
from types import TracebackType
from typing import Final

_SLICES: Final = 8
_LATE_S: Final = 0.5  # a timer that fires this late means that the loop was stopped


class FairTimeout:
    """`async with FairTimeout(timeout_s) as limit`: raises TimeoutError when the time is over.

    It waits in slices, so a pause of this process is noticed, and costs the worker one slice at most; bytes that came
    meanwhile are still read. `ours`: there was a pause, so silence says nothing about the worker.
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
