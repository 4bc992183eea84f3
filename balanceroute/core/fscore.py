"""The F-scores: what admitting D more tokens to one worker does to the imbalance, now and over the horizon.

BR-0 (paper, eq. br0-Fscore):  F(D) = D - G * (D - m)+
BR-H (paper, eq. brh-Fscore):  F(D) = alpha * W * D - beta * sum_h d_h * (D - m_h)+,   d_h = gamma^h, W = sum_h d_h

Tokens that fit below the envelope M count once; tokens above it move the barrier for everyone. Both depend on the
admitted set only through its total D, and are concave and piecewise linear in D with a kink at every margin m_h: the
slope starts at alpha * W and falls by beta * d_h when D passes m_h. Up to the `peak`, the smallest margin at which the
slope turns negative, F does not fall; after it, F does not rise. Hence among any set of totals the best is the largest
one at or below the peak or the smallest one above it, and two evaluations find it. Where the slope before the peak is
nothing (beta = alpha, say), all totals from `level_from` up to the peak are as good as it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.arrays import FloatArray

Margins = NDArray[np.int64] | NDArray[np.float64]

ROUNDING = 1e-12  # relative: discounts that are summed in another order differ by less
SUMMED_APART = 1e-10  # relative: F by its segments and F by its steps differ by less


@dataclass(frozen=True, slots=True)
class Score:
    """F of one worker as a function of the admitted tokens, as its line segments.

    `margins` ascend (K of them, tokens, non-negative). Beyond the first k of them
    F(D) = (gain - fallen[k]) * D + offsets[k]; these two have K + 1 entries. F rises up to `level_from` and
    falls beyond `peak`; either may be infinite.
    """

    gain: float
    margins: Sequence[float]
    fallen: Sequence[float]
    offsets: Sequence[float]
    level_from: float
    peak: float

    def __call__(self, tokens: float) -> float:
        """F(tokens), in tokens; larger is better, may be negative. O(log K)."""
        segment = bisect_left(self.margins, tokens)
        return (self.gain - self.fallen[segment]) * tokens + self.offsets[segment]


def present_score(margin: float, alpha: float, beta: float) -> Score:
    """F of BR-0 for a worker with this margin (tokens): the horizon score with H = 0."""
    return _score(alpha, (margin,), (0.0, beta), (0.0, beta * margin))


def present_value(tokens: float, margin: float, alpha: float, beta: float) -> float:
    """`present_score(margin, alpha, beta)(tokens)`, to the last bit."""
    return alpha * tokens if tokens <= margin else (alpha - beta) * tokens + beta * margin


class HorizonWeights:
    """alpha, beta and the discounts gamma^h, h = 0..H, ready to make a worker's `Score` from its margins.

    Sums and powers are running ones, whose rounding is the same on every machine: a journal can be run again anywhere.
    """

    def __init__(self, horizon_steps: int, alpha: float, beta: float, gamma: float) -> None:
        self.horizon_steps = horizon_steps
        discounts = np.array([1.0] + [gamma] * horizon_steps).cumprod()
        self.gain = float(alpha * discounts.cumsum()[-1])
        self._weights = beta * discounts
        self.rounding = SUMMED_APART * (self.gain + float(self._weights.sum()))

    def score(self, margins: Margins, slowdown: float = 1.0) -> Score:
        """F for a worker of this slowdown, with these margins in its tokens at h = 0..H, non-negative. O(H log H)."""
        order = margins.argsort()
        ascending, weights = margins[order], self._weights[order]
        if slowdown != 1.0:
            weights = weights * slowdown
        kinks = ascending.tolist()
        fallen = [0.0, *np.add.accumulate(weights).tolist()]
        offsets = [0.0, *np.add.accumulate(weights * ascending).tolist()]
        return _score(self.gain, kinks, fallen, offsets)

    def losses(self, above: Margins, slowdowns: FloatArray) -> FloatArray:
        """What n workers lose of F = gain * tokens because of the margins, shape (n,). O(n*H).

        It differs from `score` by at most `rounding` for each token, times the slowdown where that is above 1; not at
        all where nothing is lost.

        Args: above: tokens beyond the margins at h = 0..H, shape (n, H+1), non-negative. slowdowns: shape (n,).
        """
        losses: FloatArray = np.einsum("ij,j->i", above, self._weights)
        losses *= slowdowns
        return losses


def _score(gain: float, margins: Sequence[float], fallen: Sequence[float], offsets: Sequence[float]) -> Score:
    """The segments, and the totals between which F is highest."""
    level = bisect_left(fallen, gain * (1.0 - ROUNDING))
    falling = bisect_right(fallen, gain * (1.0 + ROUNDING))
    return Score(gain, margins, fallen, offsets, _begin(level, margins), _begin(falling, margins))


def _begin(segment: int, margins: Sequence[float]) -> float:
    """Where the k-th of the K + 1 segments begins; infinity for what comes after them."""
    if segment == 0:
        return 0.0
    return margins[segment - 1] if segment <= len(margins) else math.inf
