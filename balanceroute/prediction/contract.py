"""The two-stage prediction contract: what BR-H asks about a request, and nothing more.

For a request that has generated `a` tokens and is still running, with r tokens to go, a predictor answers two
numbers (arXiv:2605.06113, eq. two-stage):

    p_finish          = P(r <= H | request, age a)
    mean_if_finished  = E[r | request, age a, r <= H]     in (0, H]

The router turns them into one expected in-window contribution c_hat (`refresh.py`) and knows no realisation.
Every realisation answers one request at a time (`predict_one`, an admission) and many at once (`predict`, all
due refreshes), and takes each request that left (`observe`). Answers are immediate: whatever takes long
happens in a re-fit elsewhere (`refit.py`) and is swapped in.

Where a predictor knows nothing (no history, nobody ever lived this long) it answers p_finish = 0 and
mean_if_finished = H, which the gate turns into the conservative anchor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from balanceroute.arrays import FloatArray, IntArray

CENSORED_REASONS = frozenset({"cancelled", "aborted", "abort", "failed", "error", "expired", "rejected"})


class TwoStage(NamedTuple):
    """Both stages for a batch; arrays of one shape (n,)."""

    p_finish: FloatArray
    mean_if_finished: FloatArray


@dataclass(slots=True)
class FinishedRequest:
    """One request that left a decode worker, as a predictor learns from it.

    `finish_reason` is the engine's word ("stop", "length", ...) or ours ("cancelled", "failed", ...). A
    request cut off by its token limit did leave the worker at that length, so "length" is a finish like any
    other. `finished_s` is seconds on the driver's clock: Unix time live, simulated time in the simulator.
    """

    prompt_key: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str = "stop"
    finished_s: float = 0.0

    @property
    def censored(self) -> bool:
        """True where the request was cut short: it would have generated more than `output_tokens`."""
        return self.finish_reason in CENSORED_REASONS


class Predictor(Protocol):
    """A realisation of the two-stage contract for one fixed horizon."""

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """Answer both stages for many requests; `ages` in generated tokens, `keys` "" where unknown."""

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """Answer (p_finish, mean_if_finished) for one request."""

    def observe(self, finished: FinishedRequest) -> None:
        """Take note of a request that left; O(1), no re-fit."""


@runtime_checkable
class Memory(Protocol):
    """A predictor that looks requests up by key, and counts how often it knew them."""

    @property
    def key_hits(self) -> int:
        """Answers that came from the request's own key."""

    @property
    def key_misses(self) -> int:
        """Answers that fell back to the marginal distribution."""


class AnchorPredictor:
    """`kind: none`: never confident, so that every c_hat is the anchor H."""

    def __init__(self, horizon_steps: int) -> None:
        self._horizon = float(horizon_steps)

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """Answer (0, H) for each request."""
        return TwoStage(np.zeros(len(ages)), np.full(len(ages), self._horizon))

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """Answer (0, H)."""
        return 0.0, self._horizon

    def observe(self, finished: FinishedRequest) -> None:
        """Nothing is learned."""
