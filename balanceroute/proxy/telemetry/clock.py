"""The router's clock, which goes on while its machine is suspended.

Elsewhere prefillers keep KV for so many seconds, and drop it meanwhile. Python's and libuv's clocks stand still in a
suspend, so KV would look younger than it is, and decode workers would read what is in its blocks by then.
"""

import time
from typing import Final

import uvloop

# macOS has no other name for it: its CLOCK_MONOTONIC goes on, and is not what `time.monotonic` reads there
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since the machine's start."""
    return time.clock_gettime(_CLOCK)


class Loop(uvloop.Loop):
    """A loop by this clock: a suspend looks like a stop of the process, and what is done about that is right for it.

    uvloop's own clock is also that of the turn's beginning; here a turn that is stopped half-way knows.
    """

    def time(self) -> float:
        """See `now_s`."""
        return time.clock_gettime(_CLOCK)
