"""Times for periodic checks: whole multiples of the period, the same in all processes of a machine; and `Looks`.

A check costs little; to wake a process for it costs several times that. Processes share a clock and so check at the
same time: a message that one then sends finds the other awake.
"""

import math


def until_tick_s(now: float, period_s: float) -> float:
    """Seconds from `now` to the next multiple of the period, at least half a period: a nearer one is the present
    check's.
    """
    return (math.floor(now / period_s + 0.5) + 1.0) * period_s - now


class Looks:
    """The looks of one periodic check, which tell whether this process stood still between two: it was stopped
    (SIGSTOP), suspended with its machine, or very busy. Then silence means nothing: what came may not have been read.
    """

    def __init__(self) -> None:
        self.last_s = math.inf  # the time of the last look; infinite: there was none

    def stood_still(self, now: float, longest_s: float) -> bool:
        """Note a look; returns whether it comes more than `longest_s` after the last one."""
        before_s, self.last_s = self.last_s, now
        return now - before_s > longest_s
