"""Corrects times of step logs whose clock was set back, or differs from another machine's.

A step's own cost tells how far it is from the step before, whatever the clock said. And the ranks of a barrier take
equally long for each step: where their costs change alike from step to step, and the ends of those steps are one
constant time apart, that time is what their clocks differ by. Changes are compared, not costs, for two servers may both
slow down over a day.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHUFFLED = 0.01  # of the steps: where more than so many are before the one above, the file has no order of time
SHARED_STEPS = 100  # that two ranks are compared over at least; fewer may look alike by chance
MOST_STEPS = 16_384  # that are compared: many files in pairs take long
ALIKE = 0.6  # correlation of the changes; of unlike servers it is below .45 at the best of a thousand lags
CONSTANT = 0.25  # of a step: how far ends may be from their constant distance, nine times in ten


def in_order(steps: Floats) -> tuple[Floats, str | None]:
    """The steps with times that do not go back, and what had to be done for it. Columns as in a step log."""
    times = steps[:, 0].copy()
    back = np.flatnonzero(np.diff(times) < 0) + 1
    if not len(back):
        return steps, None
    if len(back) > SHUFFLED * len(steps):
        order = np.argsort(times, kind="stable")
        return steps[order], f"times go back {len(back):,} times: sorted by time"
    for at in back.tolist():
        times[at:] += times[at - 1] - times[at] + steps[at, 1] / 1e3
    went = "time, as where a clock is set" if len(back) == 1 else "times, as where a clock is set"
    return with_times(steps, times), f"times go back {len(back):,} {went}: the steps after it follow at their own cost"


def with_times(steps: Floats, times: Floats) -> Floats:
    """The same steps at other times."""
    return np.column_stack([times, steps[:, 1:]])


def clock_offset(one: Floats, other: Floats) -> float | None:
    """Seconds that the clock of `other` is ahead of that of `one`; None where they do not seem to share a barrier."""
    one, other = one[:MOST_STEPS], other[:MOST_STEPS]
    changes, others = _changes(one), _changes(other)
    if min(len(changes), len(others)) < SHARED_STEPS:
        return None
    lag = _best_lag(changes, others)
    first, second = max(0, lag), max(0, -lag)
    shared = min(len(changes) - first, len(others) - second)
    if shared < max(SHARED_STEPS, min(len(changes), len(others)) // 2):
        return None
    here, there = changes[first : first + shared], others[second : second + shared]
    if not here.any() or not there.any() or np.corrcoef(here, there)[0, 1] < ALIKE:
        return None
    apart = other[second : second + shared, 0] - one[first : first + shared, 0]
    offset = float(np.median(apart))
    if np.percentile(np.abs(apart - offset), 90) > CONSTANT * float(np.median(one[:, 1])) / 1e3:
        return None
    return offset


def _changes(steps: Floats) -> Floats:
    """How much longer each step took than the one before; pauses count no more than large changes."""
    found = np.diff(steps[:, 1])
    limit = 5 * float(np.median(np.abs(found))) if len(found) else 0.0
    return np.clip(found, -limit, limit)


def _best_lag(one: Floats, other: Floats) -> int:
    """How many steps later in `one` the same change is than in `other`."""
    size = 1 << (len(one) + len(other) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(one, size) * np.conj(np.fft.rfft(other, size)), size)
    lag = int(products.argmax())
    return lag if lag < size // 2 else lag - size
