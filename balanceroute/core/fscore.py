"""The F-scores: what admitting D more tokens to one worker does to the imbalance, now and over the horizon.

BR-0 (paper, eq. br0-Fscore):  F(D) = D - G * (D - m)+
BR-H (paper, eq. brh-Fscore):  F(D) = alpha * W * D - beta * sum_h d_h * (D - m_h)+,   d_h = gamma^h, W = sum_h d_h

Tokens that fit below the envelope M count once; tokens above it move the barrier for everyone. Both depend on the
admitted set only through its total D, and are concave and piecewise linear in D with a kink at every margin m_h: the
slope starts at alpha * W and falls by beta * d_h when D passes m_h. Up to the `peak`, the smallest margin at which the
slope turns negative, F does not fall; after it, F does not rise. Hence among any set of totals the best is the largest
one at or below the peak or the smallest one above it, and two evaluations find it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """F of one worker as a function of the admitted tokens, as its line segments.

    `margins` ascend (K of them, tokens, non-negative). Beyond the first k of them
    F(D) = (gain - fallen[k]) * D + offsets[k]; these two have K + 1 entries.
    """

    gain: float
    margins: Sequence[float]
    fallen: Sequence[float]
    offsets: Sequence[float]
    peak: float

    def __call__(self, tokens: float) -> float:
        """F(tokens), in tokens; larger is better, may be negative. O(log K)."""
        segment = bisect_left(self.margins, tokens)
        return (self.gain - self.fallen[segment]) * tokens + self.offsets[segment]


def present_score(margin: float, alpha: float, beta: float) -> Score:
    """F of BR-0 for a worker with this margin (tokens): the horizon score with H = 0."""
    return Score(alpha, (margin,), (0.0, beta), (0.0, beta * margin), margin if beta > alpha else math.inf)


class HorizonWeights:
    """alpha, beta and the discounts gamma^h, h = 0..H, ready to make a worker's `Score` from its margins.

    Sums and powers are running ones, whose rounding is the same on every machine: a journal replays anywhere.
    """

    def __init__(self, horizon_steps: int, alpha: float, beta: float, gamma: float) -> None:
        self.horizon_steps = horizon_steps
        discounts = np.array([1.0] + [gamma] * horizon_steps).cumprod()
        self.gain = float(alpha * discounts.cumsum()[-1])
        self._weights = beta * discounts

    def score(self, margins: IntArray) -> Score:
        """F for a worker with these margins at h = 0..H, tokens, non-negative. O(H log H)."""
        order = margins.argsort()
        ascending, weights = margins[order], self._weights[order]
        kinks = ascending.tolist()
        fallen = [0.0, *np.add.accumulate(weights).tolist()]
        offsets = [0.0, *np.add.accumulate(weights * ascending).tolist()]
        beyond = bisect_right(fallen, self.gain)  # the first segment on which F falls
        peak = kinks[beyond - 1] if beyond < len(fallen) else math.inf
        return Score(self.gain, kinks, fallen, offsets, peak)
