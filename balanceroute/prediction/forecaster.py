"""The driver's side of prediction: from a predictor's two stages to the c_hat that the scheduler takes.

The proxy and the simulator ask here, on their own loop, and pass the values on (`Scheduler.refresh`); the
scheduler never sees a predictor. All refreshes that are due together are one batched call. Counters are plain
integers that a metrics page reads.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .contract import FinishedRequest, Memory, Predictor
from .refresh import GATE, gated, gated_batch

# below this many due requests the scalar path costs less than the array one (measured with survival: about 8)
_BATCH = 8


class Tracked(Protocol):
    """What a forecast reads of a request: the scheduler's `RequestTracker` fits."""

    @property
    def prompt_tokens(self) -> int:
        """s_i, tokens."""
        ...

    @property
    def generated(self) -> int:
        """a_i, tokens."""
        ...

    @property
    def prompt_key(self) -> str:
        """The key of the prompt, "" where unknown."""
        ...

    def remaining(self, horizon_steps: int) -> float:
        """The c_hat that the scheduler holds now, steps."""
        ...


class Forecaster:
    """Composite, gate, clip and floor around one predictor, with the counters of the metrics page."""

    def __init__(self, predictor: Predictor, horizon_steps: int) -> None:
        self.predictor = predictor
        self._horizon = float(horizon_steps)
        self.refreshes = 0
        self.gate_open = 0
        self.gate_closed = 0
        self.finished_count = 0
        self.error_tokens_sum = 0.0

    @property
    def horizon_steps(self) -> int:
        """H, the length of the window."""
        return int(self._horizon)

    @property
    def key_hits(self) -> int:
        """Answers from a request's own key; 0 for predictors without keys."""
        return self.predictor.key_hits if isinstance(self.predictor, Memory) else 0

    @property
    def key_misses(self) -> int:
        """Answers that fell back to the marginal distribution; 0 for predictors without keys."""
        return self.predictor.key_misses if isinstance(self.predictor, Memory) else 0

    def initial(self, prompt_tokens: int, prompt_key: str = "") -> float:
        """Return c_hat at age 0: for a request that waits for, or just got, its admission."""
        return self._one(0, prompt_tokens, prompt_key)

    def refresh(self, trackers: Sequence[Tracked]) -> list[float]:
        """Return the new c_hat of each tracker, in order; one batched call."""
        self.refreshes += len(trackers)
        if len(trackers) < _BATCH:
            return [self._one(t.generated, t.prompt_tokens, t.prompt_key) for t in trackers]
        stages = self.predictor.predict(
            np.array([t.generated for t in trackers], dtype=np.int64),
            np.array([t.prompt_tokens for t in trackers], dtype=np.int64),
            [t.prompt_key for t in trackers],
        )
        opened = int(np.count_nonzero(stages.p_finish >= GATE))
        self.gate_open += opened
        self.gate_closed += len(trackers) - opened
        values: list[float] = gated_batch(stages, self._horizon).tolist()
        return values

    def finished(
        self,
        tracker: Tracked,
        finish_reason: str,
        now: float,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> FinishedRequest:
        """Learn from a request that leaves its worker, and return the row for the history.

        A tracker that was requeued counts what it had generated as prompt: the driver, which knows the
        client's view, then gives both numbers. A finish has nothing remaining, so the c_hat that the
        scheduler still holds is its absolute error in tokens; what was cut short says nothing about that
        error.
        """
        row = FinishedRequest(
            tracker.prompt_key,
            tracker.prompt_tokens if prompt_tokens is None else prompt_tokens,
            tracker.generated if output_tokens is None else output_tokens,
            finish_reason,
            now,
        )
        if not row.censored:
            self.finished_count += 1
            self.error_tokens_sum += tracker.remaining(self.horizon_steps)
        self.predictor.observe(row)
        return row

    def _one(self, age: int, prompt_tokens: int, prompt_key: str) -> float:
        p_finish, mean = self.predictor.predict_one(age, prompt_tokens, prompt_key)
        if p_finish >= GATE:
            self.gate_open += 1
        else:
            self.gate_closed += 1
        return gated(p_finish, mean, self._horizon)
