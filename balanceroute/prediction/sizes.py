"""Survival by prompt size: one curve per quantile bucket of s_i.

The second key that the paper names for memorisation (appendix C, "a quantile bucket of s_i"). It needs no
recurring prompts, only outputs that depend on the size of the prompt, as in the public Azure 2023 trace.
"""

from bisect import bisect_right

import numpy as np

from balanceroute.arrays import BoolArray, IntArray

from .contract import TwoStage
from .observations import Observations
from .survival import SurvivalCurve

MIN_ROWS = 50  # a bucket with fewer answers from all requests


class SizedCurves:
    """An immutable fit: bucket edges at quantiles of the prompt sizes, and a curve for each bucket."""

    __slots__ = ("_curves", "_edges", "_edges_list", "marginal")

    def __init__(self, observations: Observations, n_buckets: int) -> None:
        self.marginal = SurvivalCurve(observations)
        sizes = observations.prompt_tokens
        inner = np.arange(1, n_buckets) / max(1, n_buckets)
        edges = np.unique(np.quantile(sizes, inner)) if len(sizes) else np.empty(0)
        bucket = edges.searchsorted(sizes, side="right")
        self._edges = edges
        self._edges_list: list[float] = edges.tolist()
        several = [self._curve(observations, bucket == at) for at in range(len(edges) + 1)] if len(edges) else []
        self._curves = several or [self.marginal]

    def _curve(self, observations: Observations, inside: BoolArray) -> SurvivalCurve:
        return SurvivalCurve(observations.where(inside)) if inside.sum() >= MIN_ROWS else self.marginal

    def one(self, age: int, prompt_tokens: int, horizon_steps: int) -> tuple[float, float]:
        """Answer (p_finish, mean_if_finished) among requests of like prompt size."""
        return self._curves[bisect_right(self._edges_list, prompt_tokens)].one(age, horizon_steps)

    def many(self, ages: IntArray, prompt_tokens: IntArray, horizon_steps: int) -> TwoStage:
        """Answer both stages for many requests; one pass per bucket that occurs."""
        if len(self._curves) == 1:
            return self._curves[0].many(ages, horizon_steps)
        bucket = self._edges.searchsorted(prompt_tokens, side="right")
        answer = TwoStage(np.empty(len(ages)), np.empty(len(ages)))
        for at in np.unique(bucket).tolist():
            inside = np.flatnonzero(bucket == at)
            answer.p_finish[inside], answer.mean_if_finished[inside] = self._curves[at].many(
                ages[inside], horizon_steps
            )
        return answer


class SizedFitter:
    """Fits `SizedCurves`; picklable."""

    def __init__(self, n_buckets: int) -> None:
        self._n_buckets = n_buckets

    def __call__(self, observations: Observations) -> SizedCurves:
        """Fit every bucket; O(n log n)."""
        return SizedCurves(observations, self._n_buckets)
