"""When those look who look again and again: all of them together, in all processes of a machine.

A look that finds nothing costs little; a process that wakes up for it alone costs several times that. So a look comes
at a whole multiple of its period, by the clock that the processes of a machine share: what one of them then says to
another finds it awake.
"""

import math


def until_tick_s(now: float, period_s: float) -> float:
    """Seconds from `now` to the next such time but one that is less than half a period away: that was this look's."""
    return (math.floor(now / period_s + 0.5) + 1.0) * period_s - now
