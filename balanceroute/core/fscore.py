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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """F of one worker as a function of the admitted tokens.

    `margins` ascend, shape (K,), tokens, non-negative; `weights` are beta * d_h in the same order; `gain` is alpha * W.
    """

    gain: float
    margins: tuple[float, ...] | list[float]
    weights: tuple[float, ...] | list[float]
    peak: float

    def __call__(self, tokens: float) -> float:
        """F(tokens), in tokens; larger is better, may be negative. O(kinks below `tokens`)."""
        score = self.gain * tokens
        for margin, weight in zip(self.margins, self.weights, strict=True):
            if margin >= tokens:
                break
            score -= weight * (tokens - margin)
        return score


def present_score(margin: float, alpha: float, beta: float) -> Score:
    """F of BR-0 for a worker with this margin (tokens): the horizon score with H = 0."""
    return Score(alpha, (margin,), (beta,), margin if beta > alpha else math.inf)


class HorizonWeights:
    """alpha, beta and the discounts gamma^h, h = 0..H, ready to make a worker's `Score` from its margins."""

    def __init__(self, horizon_steps: int, alpha: float, beta: float, gamma: float) -> None:
        self.discounts = gamma ** np.arange(horizon_steps + 1)
        self.gain = float(alpha * self.discounts.sum())
        self._weights = beta * self.discounts

    def score(self, margins: FloatArray) -> Score:
        """F for a worker with these margins, shape (H+1,), tokens, non-negative. O(H log H)."""
        order = margins.argsort()
        weights = self._weights[order]
        falls = int(weights.cumsum().searchsorted(self.gain, side="right"))
        ascending = margins[order]
        peak = float(ascending[falls]) if falls < len(ascending) else math.inf
        return Score(self.gain, ascending.tolist(), weights.tolist(), peak)
