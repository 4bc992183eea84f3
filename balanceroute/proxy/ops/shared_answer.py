"""An answer that anybody may ask for and that costs something to make: the same for all who ask at one time.

Without a key, two hundred connections that ask for `/metrics` over and over took all of the event loop, and everybody's
stream stood still for seconds. So making answers takes a tenth of the time at most. All callers that come while one is
made, or in the pause after it, share the next one, which is begun after their calls. An answer that takes long mostly
waits for another process, so no pause is longer than `MAX_PAUSE_S`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from balanceroute.errors import BalanceRouteError

PAUSE: Final = 9.0  # after an answer was made, times what that took
MAX_PAUSE_S: Final = 1.0

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """What `make` returns or raises, made no more often than it may be."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._made: T | BalanceRouteError
        self._begun_s = self._next_s = -math.inf  # when the last one was, and when the next one may be

    async def get(self) -> T:
        """An answer that was begun after this call. Raises: BalanceRouteError, as `make` does."""
        now = asyncio.get_running_loop().time
        asked_s = now()
        async with self._one_at_a_time:
            if self._begun_s <= asked_s:
                await asyncio.sleep(max(0.0, self._next_s - now()))
                begun_s = now()
                try:
                    self._made = await self._make()
                except BalanceRouteError as error:
                    self._made = error
                self._begun_s, ended_s = begun_s, now()
                self._next_s = ended_s + min(PAUSE * (ended_s - begun_s), MAX_PAUSE_S)
            made = self._made
        if isinstance(made, BalanceRouteError):
            raise made
        return made
