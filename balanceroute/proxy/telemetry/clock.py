"""The router's clock, which goes on while its machine is suspended.

Prefillers on other machines drop pinned KV after a time, also while this machine is suspended. Python's and libuv's
clocks stop during a suspend. By them KV would look younger than it is, and decode workers would read blocks that hold
other data by then.
"""

import os
import time
from typing import Final

import uvloop

# macOS has no other name for it: its CLOCK_MONOTONIC goes on, and is not what `time.monotonic` reads there
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since the machine's start."""
    return time.clock_gettime(_CLOCK)


class Loop(uvloop.Loop):
    """An event loop on this clock: a suspend looks like a stopped process, and is handled as one.

    uvloop's own clock gives the time at which the turn began; this one also advances within a turn.
    """

    def __new__(cls) -> "Loop":
        """Raises: OSError: no descriptor is free, where libuv would abort the process without a word."""
        for end in os.pipe():
            os.close(end)
        return super().__new__(cls)

    def time(self) -> float:
        """See `now_s`."""
        return time.clock_gettime(_CLOCK)
