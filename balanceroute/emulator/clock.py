"""Modelled seconds on the event loop's clock, so that a cluster can run faster or slower than real time."""

import asyncio
import math

from balanceroute.errors import ConfigError


class EmulatedClock:
    """`time_scale` is real seconds per modelled second: 0.1 runs ten times as fast as modelled, 2 half as fast."""

    def __init__(self, time_scale: float = 1.0) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ConfigError(f"time scale: must be positive, got {time_scale}")
        self.time_scale = time_scale

    def now(self) -> float:
        """Modelled seconds on a monotonic axis."""
        return asyncio.get_running_loop().time() / self.time_scale

    async def sleep_until(self, moment: float) -> None:
        """Return when the modelled time `moment` has come; at least one turn of the loop passes."""
        await asyncio.sleep(max(0.0, (moment - self.now()) * self.time_scale))

    async def wait(self, event: asyncio.Event, moment: float) -> None:
        """Return when `event` is set or the modelled time `moment` (infinity: never) has come.

        The timer sets the event, which the caller clears anyway. `asyncio.wait_for` would swallow a cancellation
        that meets the event in one turn of the loop (Python 3.11), and the task would outlive its cluster.
        """
        if math.isinf(moment):
            await event.wait()
            return
        delay = max(0.0, (moment - self.now()) * self.time_scale)
        timer = asyncio.get_running_loop().call_later(delay, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()
