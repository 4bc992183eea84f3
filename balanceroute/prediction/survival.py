"""Empirical survival: both stages from the distribution of past output lengths.

With S(t) = P(output > t) and all lengths o_j of the history (arXiv:2605.06113, appendix C,
"Empirical-survival"):

    p_finish          = 1 - S(a + H) / S(a)
    mean_if_finished  = mean of o_j - a over a < o_j <= a + H

Requests that were cut short at c tokens (client gone, worker lost) are right-censored: all that is known is o
> c. They count as at risk up to c and never as finishes: S is the Kaplan-Meier product over the distinct
finish lengths t,

    S(t) = prod over t' <= t of (1 - finishes(t') / at_risk(t')),

and each finish weighs S(t-) - S(t). Dropping them instead would make long answers look rarer than they are,
because long answers are the ones that clients leave. Without censoring this is the empirical distribution,
counted exactly.

A fit is immutable: distinct lengths, S and the tail sums of t * weight; an answer is two binary searches, or in
a batch, which would miss the cache on every step of them, two look-ups in a table by age. The sums run from the
tail, where S is small, so that ratios there keep their precision. At an age that no past request survived
nothing is known: p_finish = 0, mean = H.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from balanceroute.arrays import FloatArray, IntArray

from .contract import FinishedRequest, TwoStage
from .observations import DEFAULT_ROWS, ObservationRing, Observations

_LONGEST_IN_TABLE = 2**17  # tokens, 1 MB: lengths beyond are rare, and then a batch searches too


class SurvivalCurve:
    """An immutable Kaplan-Meier fit; O(log n) per answer."""

    __slots__ = ("_alive", "_alive_list", "_lengths", "_lengths_list", "_over", "_tail", "_tail_list", "n_rows")

    def __init__(self, observations: Observations) -> None:
        self.n_rows = len(observations)
        lengths, alive = _kaplan_meier(observations)
        tail = np.zeros(len(lengths) + 1)
        tail[:-1] = np.cumsum((lengths * (alive[:-1] - alive[1:]))[::-1])[::-1]
        # index k: the first k distinct lengths are over; alive[k] is S after them, tail[k] sums the later
        # ones
        self._lengths, self._alive, self._tail = lengths, alive, tail
        self._over = _over_by_age(lengths)
        # bisect on a list takes 0.15 us where searchsorted on one value takes 2
        self._lengths_list: list[int] = lengths.tolist()
        self._alive_list: list[float] = alive.tolist()
        self._tail_list: list[float] = tail.tolist()

    def one(self, age: int, horizon_steps: int) -> tuple[float, float]:
        """Answer (p_finish, mean_if_finished) at one age."""
        lengths = self._lengths_list
        low = bisect_right(lengths, age)
        high = bisect_right(lengths, age + horizon_steps, low)
        alive = self._alive_list[low]
        finishing = alive - self._alive_list[high]
        if finishing <= 0.0:
            return 0.0, float(horizon_steps)
        return finishing / alive, (self._tail_list[low] - self._tail_list[high]) / finishing - age

    def many(self, ages: IntArray, horizon_steps: int) -> TwoStage:
        """Answer both stages at many ages."""
        low, high = self._index(ages), self._index(ages + horizon_steps)
        alive = self._alive.take(low)
        finishing = alive - self._alive.take(high)
        weighted = self._tail.take(low) - self._tail.take(high)
        unknown = finishing <= 0.0
        if unknown.any():
            finishing[unknown], alive[unknown] = 1.0, math.inf
            weighted[unknown] = ages[unknown] + horizon_steps
        return TwoStage(finishing / alive, weighted / finishing - ages)

    def _index(self, ages: IntArray) -> IntArray:
        """How many of the distinct lengths are over at these ages."""
        if self._over is None:
            return self._lengths.searchsorted(ages, side="right")
        return self._over.take(ages, mode="clip")  # beyond the longest all are


def _over_by_age(lengths: FloatArray) -> IntArray | None:
    """Return how many of the ascending lengths are over at each age up to the last one; None where that is far."""
    if not len(lengths):
        return np.zeros(1, dtype=np.int64)
    longest = int(lengths[-1])
    if longest > _LONGEST_IN_TABLE:
        return None
    table = np.zeros(longest + 1, dtype=np.int64)
    table[lengths.astype(np.int64)] = 1
    return table.cumsum(out=table)


def _kaplan_meier(observations: Observations) -> tuple[FloatArray, FloatArray]:
    """Return the k distinct finish lengths, and n * S before the first and after each: (k,) and (k + 1,)."""
    outputs = observations.output_tokens
    finishes, counts = np.unique(outputs[~observations.censored], return_counts=True)
    alive = np.empty(len(finishes) + 1)
    alive[0] = len(outputs)
    if not observations.censored.any():
        alive[1:] = len(outputs) - np.cumsum(counts)  # whole numbers: exact
    else:
        at_risk = len(outputs) - np.sort(outputs).searchsorted(finishes, side="left")
        alive[1:] = len(outputs) * np.cumprod(1.0 - counts / at_risk)
    return finishes.astype(np.float64), alive


class SurvivalPredictor:
    """The marginal distribution of output lengths: no signal needed but the age of a request."""

    refits_in_process = False

    def __init__(self, horizon_steps: int, *, max_rows: int = DEFAULT_ROWS, max_age_s: float | None = None) -> None:
        self._horizon = horizon_steps
        self.ring = ObservationRing(max_rows, max_age_s)
        self.curve = SurvivalCurve(Observations.of([]))

    def start(self, rows: Iterable[FinishedRequest]) -> None:
        """Load a whole history, oldest first, and fit at once."""
        for row in rows:
            self.ring.add(row)
        self.adopt(SurvivalCurve(self.ring.take()))

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """Answer both stages by age alone; two binary searches per request."""
        return self.curve.many(ages, self._horizon)

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """Answer both stages by age alone."""
        return self.curve.one(age, self._horizon)

    def observe(self, finished: FinishedRequest) -> None:
        """Keep one more row for the next re-fit."""
        self.ring.add(finished)

    def fitter(self) -> Callable[[Observations], SurvivalCurve]:
        """Sort and count; O(n log n), any thread."""
        return SurvivalCurve

    def adopt(self, fitted: SurvivalCurve) -> None:
        """Answer from `fitted` from now on; one assignment."""
        self.curve = fitted
