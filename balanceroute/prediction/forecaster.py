"""Makes the scheduler's c_hat of a predictor's two stages.

The proxy and the simulator ask here, on their own loop, and pass the values on (`Scheduler.refresh`); the
scheduler never sees a predictor. All refreshes that are due together are one batched call. A predictor that
takes milliseconds is asked in another thread: `questions` copies what it looks at, `answer` may run anywhere,
`count` is for the loop again. Counters are plain integers that a metrics page reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from balanceroute.arrays import FloatArray, IntArray

from .contract import FinishedRequest, Memory, Predictor
from .refresh import GATE, gated, gated_batch

# below this many due requests the scalar path costs less than the array one (measured with survival: about 8)
_BATCH = 8


class Tracked(Protocol):
    """The fields of a request that a forecast reads; the scheduler's `RequestTracker` has them."""

    @property
    def prompt_tokens(self) -> int:
        """s_i, tokens; after a requeue `earlier_tokens` are part of it."""

    @property
    def earlier_tokens(self) -> int:
        """Tokens generated before the last requeue."""

    @property
    def age_tokens(self) -> int:
        """Tokens generated so far, before and after requeues."""

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit on these."""

    @property
    def prompt_key(self) -> str:
        """The key of the prompt, "" where unknown."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a batch about n requests; `left_tokens` is infinite if the client set no limit."""

    ages: IntArray
    prompt_tokens: IntArray
    left_tokens: FloatArray
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Answers:
    """c_hat of each request of a batch, and how many of them passed the gate."""

    c_hat: FloatArray
    opened: int


def finished_row(tracker: Tracked, finish_reason: str, now: float) -> FinishedRequest:
    """A finished request for the predictor, as the client saw it: requeues do not count."""
    return FinishedRequest(
        tracker.prompt_key, tracker.prompt_tokens - tracker.earlier_tokens, tracker.age_tokens, finish_reason, now
    )


class Forecaster:
    """Composite, gate, limit, clip and floor around one predictor, with the counters of the metrics page."""

    def __init__(self, predictor: Predictor, horizon_steps: int) -> None:
        self.predictor = predictor
        self._horizon = float(horizon_steps)
        self.refreshes = 0
        self.failures = 0  # batches that the driver got no answer to
        self.gate_open = 0
        self.gate_closed = 0

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

    def initial(
        self, prompt_tokens: int, prompt_key: str = "", *, age_tokens: int = 0, max_new_tokens: int | None = None
    ) -> float:
        """Return c_hat for a request that waits for, or just got, its admission.

        `age_tokens` is 0 unless it was requeued, and `prompt_tokens` are the client's own.
        """
        return self._one(age_tokens, prompt_tokens, prompt_key, max_new_tokens)

    def refresh(self, trackers: Sequence[Tracked]) -> list[float]:
        """Return the new c_hat of each tracker, in order; one batched call."""
        if len(trackers) < _BATCH:
            self.refreshes += len(trackers)
            return [
                self._one(t.age_tokens, t.prompt_tokens - t.earlier_tokens, t.prompt_key, t.max_new_tokens)
                for t in trackers
            ]
        answers = self.answer(self.questions(trackers))
        self.count(answers)
        values: list[float] = answers.c_hat.tolist()
        return values

    def questions(self, trackers: Sequence[Tracked]) -> Questions:
        """Copy what a predictor looks at, as it is now."""
        ages = np.array([t.age_tokens for t in trackers], dtype=np.int64)
        limits = [math.inf if t.max_new_tokens is None else t.max_new_tokens for t in trackers]
        return Questions(
            ages,
            np.array([t.prompt_tokens - t.earlier_tokens for t in trackers], dtype=np.int64),
            np.array(limits) - ages,
            [t.prompt_key for t in trackers],
        )

    def answer(self, questions: Questions) -> Answers:
        """Ask the predictor; any thread, and nothing of the forecaster changes."""
        stages = self.predictor.predict(questions.ages, questions.prompt_tokens, questions.keys)
        opened = np.count_nonzero((stages.p_finish >= GATE) | (questions.left_tokens <= self._horizon))
        return Answers(gated_batch(stages, self._horizon, questions.left_tokens), int(opened))

    def count(self, answers: Answers) -> None:
        """Count a batch of refreshes."""
        self.refreshes += len(answers.c_hat)
        self.gate_open += answers.opened
        self.gate_closed += len(answers.c_hat) - answers.opened

    def finished(self, tracker: Tracked, finish_reason: str, now: float) -> FinishedRequest:
        """Learn from a request that leaves its worker, and return the row for the history."""
        row = finished_row(tracker, finish_reason, now)
        self.predictor.observe(row)
        return row

    def _one(self, age: int, prompt_tokens: int, prompt_key: str, max_new_tokens: int | None) -> float:
        p_finish, mean = self.predictor.predict_one(age, prompt_tokens, prompt_key)
        left = math.inf if max_new_tokens is None else max_new_tokens - age
        if p_finish >= GATE or left <= self._horizon:
            self.gate_open += 1
        else:
            self.gate_closed += 1
        return gated(p_finish, mean, self._horizon, left)
