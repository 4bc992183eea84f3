"""Times for periodic checks: whole multiples of the period, the same in all processes of a machine.

A check costs little; to wake a process for it costs several times that. Processes share a clock and so check at the
same time: a message that one then sends finds the other awake.
"""

import math


def until_tick_s(now: float, period_s: float) -> float:
    """Seconds from `now` to the next multiple of the period, at least half a period: a nearer one is the present
    check's.
    """
    return (math.floor(now / period_s + 0.5) + 1.0) * period_s - now
