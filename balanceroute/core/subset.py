"""Which waiting requests to admit together: exact subset selection under a cardinality limit.

Stage 2 asks for the subset Q of the candidates, at most `max_count` of them, with the largest F-score (paper,
eq. br0-Fscore and brh-Fscore). F depends on Q only through the sum D of its prompt sizes, and as a function
of D it is concave and piecewise linear: non-decreasing up to `peak`, where its slope changes sign,
non-increasing after it.

**Two probes are enough**, for BR-0 with its one kink and for BR-H with all H+1 of them. Let lo be the largest
reachable sum <= peak and hi the smallest reachable sum > peak. Every other reachable sum <= peak is below lo,
and up to lo F does not fall; every other reachable sum > peak is above hi, and from hi on F does not rise. So
max(F(lo), F(hi)) is the maximum over all reachable sums, however often the slope changes on either side.

**Large candidates leave the search.** A subset that holds a candidate larger than peak sums to at least that
candidate, which is above peak already. So of all such candidates only the smallest can be hi, by itself; what
remains is a search among candidates <= peak.

**Sums above peak + max(size) never matter.** Take a subset that reaches hi and remove any element: the rest
is reachable with fewer elements, so it sums to <= peak (else it would be a smaller hi), and hi <= peak + that
element. Sums only grow as elements are added, so no partial sum on the way to lo or hi exceeds this limit
either, and every bit above it can be masked away at each step.

**Bit-sets.** In a Python integer whose bit b says "sum b is reachable", one more candidate is one shift-OR
per cardinality: `within[j] |= within[j-1] << size`, j from high to low. When no subset of sum <= peak +
max(size) can hold more than `max_count` candidates, a single bit-set does. The scan stops as soon as the peak
itself is reachable, which with many candidates is long before the last one.

**Ties.** Of two probes with equal score the smaller sum wins. Among the subsets of the winning sum the one
that gets by with the earliest candidates wins: its latest index is smallest, then its second latest, and so
on (colexicographic order). Candidates come in waiting order, so ties go to the oldest requests.

**Cost.** For n candidates, k = min(max_count, n), S = peak + max(size) bits and words of w bits: O(n k S / w)
time and O(sqrt(n) k S / w) memory. (Every state is kept for the backtracking while they fit `STATE_BYTES`;
else one in sqrt(n), from which it recomputes the rest: at most twice the time.) Measured, EPYC 2.4 GHz, n =
64, peak at 60 % of the largest sum: heavy-tailed prompts (mean 3k) k=4 2.7 ms, k=16 1.3 ms, k=64 0.2 ms;
uniform to 200k tokens k=4 18 ms, k=16 40 ms, k=64 10 ms; the worst found (equal prompts of 200k but one,
k=32) 840 ms in 0.2 GB. For the sizes that a router meets (n <= 16, k <= 4) see `BEST_BY_ENUMERATION`: 20 to
40 us.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import nlargest
from itertools import accumulate
from math import comb, floor, isqrt

import numpy as np
from numpy.typing import NDArray

Score = Callable[[int], float]
Subset = tuple[tuple[int, ...], float]

BEST_BY_ENUMERATION = 1 << 15
"""Up to this many table entries (subsets x cardinality) enumerating all subsets beats the bit-sets.

Measured (EPYC 2.4 GHz, heavy-tailed prompts; enumeration / bit-sets, us): n=4 k=2 16 / 20; n=8 k=4 20 / 41;
n=16 k=4 39 / 78; n=32 k=3 48 / 135; n=64 k=2 28 / 209; but n=12 k=12 98 / 65 and n=16 k=6 170 / 96."""

STATE_BYTES = 32 << 20
"""Memory that one search may keep for the backtracking before it falls back to checkpoints."""


def best_subset(sizes: Sequence[int], max_count: int, peak: float, score: Score) -> Subset:
    """Choose the non-empty subset of at most `max_count` candidates whose sum scores best.

    Args:
        sizes: prompt sizes of the candidates in waiting order, tokens; at least one candidate.
        max_count: most candidates to take, at least 1.
        peak: the sum at which the score stops rising, tokens, non-negative; may be infinite.
        score: concave in the sum, non-decreasing up to `peak`, non-increasing after it; called at most twice.
    Returns: the indices in ascending order, and their score. For cost and tie-breaking see the module.
    """
    count = min(max_count, len(sizes))
    if count == 1:
        return _best_single(sizes, peak, score)
    if sum(nlargest(count, sizes)) <= peak:
        return _all_that_fits(sizes, count, score)
    if count * _subset_count(len(sizes), count) <= BEST_BY_ENUMERATION:
        return _best_by_enumeration(sizes, count, peak, score)
    return _best_by_bitsets(sizes, count, peak, score)


def _best_single(sizes: Sequence[int], peak: float, score: Score) -> Subset:
    low = max((size for size in sizes if size <= peak), default=None)
    high = min((size for size in sizes if size > peak), default=None)
    total, best = _better(low, high, score)
    return (sizes.index(total),), best


def _all_that_fits(sizes: Sequence[int], count: int, score: Score) -> Subset:
    """The `count` largest, the earliest of equal ones: the largest reachable sum does not pass the peak."""
    largest = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:count]
    return tuple(sorted(largest)), score(sum(sizes[i] for i in largest))


def _better(low: int | None, high: int | None, score: Score) -> tuple[int, float]:
    """Probe the sums on both sides of the peak; the smaller one wins a tie."""
    if low is None or high is None:
        only = low if high is None else high
        assert only is not None, "some sum is reachable"
        return only, score(only)
    low_score, high_score = score(low), score(high)
    return (low, low_score) if low_score >= high_score else (high, high_score)


# -- enumeration ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _subset_count(n: int, count: int) -> int:
    return sum(comb(n, size) for size in range(1, count + 1))


@lru_cache(maxsize=64)
def _subset_table(n: int, count: int) -> NDArray[np.intp]:
    """All subsets of n candidates with at most `count`, shape (count, subsets), in colexicographic order.

    A column lists the indices of one subset; unused places hold -1. Column 0 is the empty subset.
    """
    if n == 0 or count == 0:
        return np.full((count, 1), -1, dtype=np.intp)
    without, smaller = _subset_table(n - 1, count), _subset_table(n - 1, count - 1)
    last = np.full((1, smaller.shape[1]), n - 1, dtype=np.intp)
    return np.hstack([without, np.vstack([last, smaller])])


def _best_by_enumeration(sizes: Sequence[int], count: int, peak: float, score: Score) -> Subset:
    table = _subset_table(len(sizes), count)
    padded = np.array([*sizes, 0], dtype=np.int64)
    sums = padded[table[0]]
    for row in table[1:]:
        sums += padded[row]
    fitting, passing = sums[sums <= peak], sums[sums > peak]
    low = int(fitting.max()) if len(fitting) else 0
    high = int(passing.min()) if len(passing) else None
    total, best = _better(low or None, high, score)
    column = int((sums == total).argmax())
    return tuple(sorted(int(i) for i in table[:, column] if i >= 0)), best


# -- bit-sets ------------------------------------------------------------------------------------------------


def _best_by_bitsets(sizes: Sequence[int], count: int, peak: float, score: Score) -> Subset:
    small = [i for i, size in enumerate(sizes) if size <= peak]
    high = min((size for size in sizes if size > peak), default=None)
    low = None
    if small:
        sums = _ReachableSums([sizes[i] for i in small], count, peak)
        low, above = sums.around_peak()
        high = min((total for total in (high, above) if total is not None), default=None)
    total, best = _better(low, high, score)
    alone = [(i,) for i, size in enumerate(sizes) if size == total][:1]
    together = [tuple(small[i] for i in sums.subset(total))] if small and total in (low, above) else []
    return min(alone + together, key=lambda chosen: chosen[::-1]), best


class _ReachableSums:
    """The sums of at most `count` of the sizes, none larger than `peak`, and which sizes make them up.

    A state is a list of bit-sets: bit b of `state[j]` says that at most j of the sizes so far sum to b.
    Without a cardinality dimension (`counted` False) it is the single bit-set `state[0]`.
    """

    def __init__(self, sizes: Sequence[int], count: int, peak: float) -> None:
        self.sizes = sizes
        self.peak = floor(peak)
        self.peak_is_a_sum = peak == self.peak  # else the sum right above it may score higher
        self.width = self.peak + max(sizes) + 1
        smallest_first = accumulate(sorted(sizes))
        fitting = sum(1 for total in smallest_first if total < self.width)
        self.counted = count < fitting
        self.count = count if self.counted else 0
        self.keep = (1 << self.width) - 1
        depth = self.count + 1
        all_states_bytes = len(sizes) * depth * self.width // 8
        self.stride = 1 if all_states_bytes <= STATE_BYTES else isqrt(len(sizes))
        self.checkpoints: list[list[int]] = []
        self.final = self._scan([1] * depth)

    def _scan(self, state: list[int]) -> list[int]:
        for position, size in enumerate(self.sizes):
            if position % self.stride == 0:
                self.checkpoints.append(state)
            state = self._extended(state, size)
            if self.peak_is_a_sum and state[-1] >> self.peak & 1:  # no other sum scores higher
                self.scanned = position + 1
                return state
        self.scanned = len(self.sizes)
        return state

    def _extended(self, state: list[int], size: int) -> list[int]:
        """The state after one more candidate."""
        if not self.counted:
            reach = state[0]
            return [(reach | reach << size) & self.keep]
        extended = [1]
        for fewer, reach in zip(state, state[1:], strict=False):
            shifted = fewer << size
            if shifted.bit_length() > self.width:
                shifted &= self.keep
            extended.append(reach | shifted)
        return extended

    def around_peak(self) -> tuple[int | None, int | None]:
        """The largest reachable sum <= peak (of at least one candidate) and the smallest above it."""
        reach = self.final[-1]
        low = (reach & ((2 << self.peak) - 1)).bit_length() - 1
        above = reach >> (self.peak + 1)
        high = self.peak + (above & -above).bit_length() if above else None
        return low or None, high

    def subset(self, total: int) -> list[int]:
        """Positions, ascending, of the subset with this sum that gets by with the earliest candidates.

        Backwards over the candidates: one is needed exactly if the sum is out of reach without it.
        """
        chosen: list[int] = []
        left = self.count
        for checkpoint in reversed(range(len(self.checkpoints))):
            begin = checkpoint * self.stride
            end = min(begin + self.stride, self.scanned)
            states = [self.checkpoints[checkpoint]]
            for position in range(begin, end - 1):
                states.append(self._extended(states[-1], self.sizes[position]))
            for position in reversed(range(begin, end)):
                if total and not states[position - begin][left] >> total & 1:
                    chosen.append(position)
                    total -= self.sizes[position]
                    left -= self.counted
        return chosen[::-1]
