"""Measures a predictor's accuracy, in the way the router uses it.

Each test request is walked at the ages 0, dT, 2 dT, ... below its length (dT = H/2, the refresh period): one
sample per refresh that the router would have made. Stage 1 is judged on every sample (AUC, Brier score,
calibration), stage 2 on those that do finish within H (mean absolute error of mean_if_finished), and what the
router consumes, c_hat after the gate, on every sample against min(r, H).

Causality: the training part knows nothing from after the start of the test part (`time_split`), and with
`online` a predictor sees a test request only when it has finished, in time order. A trace has no finish times,
so a request is taken to finish STEP_S per token after its arrival.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from balanceroute.arrays import BoolArray, FloatArray, IntArray
from balanceroute.errors import InputError

from .contract import FinishedRequest, Predictor, TwoStage
from .refit import Refittable, refit_on_growth
from .refresh import GATE, gated_batch, refresh_ages, refresh_interval_tokens

STEP_S = 0.05
"""Seconds per token at full slots in the reference setting (25 ms plus 1.2e-7 s per KV token of the fullest)."""
N_BINS = 10
MOST_SAMPLES = 50_000_000  # rows of a walk; they take 2 GB of memory
_BATCH = 512
_TIMED_CALLS = 2_000


@dataclass(frozen=True, slots=True)
class Samples:
    """Walked samples, arrays of one shape (n,), in time order; `remaining` is the true r in tokens."""

    request: IntArray
    age: IntArray
    remaining: IntArray
    at_s: FloatArray


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Samples with p_finish in [low, high): how sure the predictor was, and how often it happened."""

    low: float
    high: float
    samples: int
    mean_p_finish: float
    finish_rate: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one evaluation; `auc` and `conditional_mae` are None where a class has no sample."""

    auc: float | None
    brier: float
    conditional_mae: float | None
    c_hat_mae: float
    gate_open_rate: float
    calibration_error: float
    samples: int
    requests: int
    finish_rate: float
    calibration: tuple[CalibrationBin, ...]
    us_per_call: float
    us_per_request_batched: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        bins = [{name: getattr(b, name) for name in CalibrationBin.__slots__} for b in self.calibration]
        return {name: getattr(self, name) for name in self.__slots__} | {"calibration": bins}


def time_split(
    rows: Sequence[FinishedRequest], train_ratio: float = 0.5
) -> tuple[list[FinishedRequest], list[FinishedRequest]]:
    """Split at a moment: what a router had seen by then, and the requests that started from then on.

    What ran across the moment is part of the first as far as it had come: cut short at its age, and without its key,
    as in a re-fit (`ObservationRing.freeze`). Left out, it would make requests look shorter than they are.
    """
    if not rows:
        return [], []
    starts = np.sort([started_s(row) for row in rows])
    moment = float(starts[min(len(starts) - 1, int(train_ratio * len(starts)))])
    running = [_cut(row, moment) for row in rows if started_s(row) < moment <= row.finished_s]
    known = [row for row in rows if row.finished_s < moment] + [row for row in running if row.output_tokens]
    return known, [row for row in rows if started_s(row) >= moment]


def _cut(row: FinishedRequest, moment: float) -> FinishedRequest:
    """A running request as known at `moment`."""
    age = int((moment - started_s(row)) / STEP_S)
    return FinishedRequest("", row.prompt_tokens, min(age, row.output_tokens - 1), "cancelled", moment)


def started_s(row: FinishedRequest) -> float:
    """When the request's decode began, by the nominal step time."""
    return row.finished_s - row.output_tokens * STEP_S


def walk(rows: Sequence[FinishedRequest], horizon_steps: int) -> Samples:
    """Walk every finished request at the ages 0, dT, 2 dT, ... below its length.

    Raises: InputError: that would be too many samples.
    """
    length = np.array([0 if row.censored else row.output_tokens for row in rows], dtype=np.int64)
    period = refresh_interval_tokens(horizon_steps)
    samples = int((-(-length // period)).sum())
    if samples > MOST_SAMPLES:
        raise InputError(
            f"the predictor would be asked {samples:,} times, once per {period} tokens of each answer; accepted are"
            f" {MOST_SAMPLES:,}: give fewer requests or a larger horizon"
        )
    request, age = refresh_ages(length, horizon_steps, MOST_SAMPLES)
    begun_s = np.array([started_s(row) for row in rows], dtype=np.float64)
    at_s = begun_s[request] + age * STEP_S
    order = np.argsort(at_s, kind="stable")
    return Samples(request[order], age[order], (length[request] - age)[order], at_s[order])


def evaluate(
    predictor: Predictor, rows: Sequence[FinishedRequest], horizon_steps: int, *, online: bool = False
) -> Evaluation:
    """Judge `predictor` on the finished requests of `rows`; with `online` it learns from them as they finish.

    Raises: ValueError when there is nothing to judge, InputError when there is too much.
    """
    samples = walk(rows, horizon_steps)
    if not len(samples.age):
        raise ValueError("no finished request to evaluate on")
    us_per_call = _time_scalar(predictor, rows, samples)
    began = time.perf_counter()
    stages = _predict(predictor, rows, samples, online)
    batched_us = (time.perf_counter() - began) / len(samples.age) * 1e6
    finished = samples.remaining <= horizon_steps
    truth = np.minimum(samples.remaining - 1, horizon_steps)  # c-hat is the last step, see `core.projection`
    c_hat = gated_batch(stages, horizon_steps)
    bins = calibration_bins(stages.p_finish, finished)
    return Evaluation(
        auc=area_under_roc(stages.p_finish, finished),
        brier=float(np.mean((stages.p_finish - finished) ** 2)),
        conditional_mae=(
            float(np.mean(np.abs(stages.mean_if_finished - samples.remaining)[finished])) if finished.any() else None
        ),
        c_hat_mae=float(np.mean(np.abs(c_hat - truth))),
        gate_open_rate=float(np.mean(stages.p_finish >= GATE)),
        calibration_error=calibration_error(bins),
        samples=len(finished),
        requests=len(np.unique(samples.request)),
        finish_rate=float(np.mean(finished)),
        calibration=bins,
        us_per_call=us_per_call,
        us_per_request_batched=batched_us,
    )


def area_under_roc(score: FloatArray, positive: BoolArray) -> float | None:
    """P(score of a positive > score of a negative), ties counted half; None without both classes. O(n log n)."""
    n_positive = int(np.count_nonzero(positive))
    n_negative = len(positive) - n_positive
    if not n_positive or not n_negative:
        return None
    _, value, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2.0
    above = float(rank[value][positive].sum()) - n_positive * (n_positive + 1) / 2.0
    return above / (n_positive * n_negative)


def calibration_bins(p_finish: FloatArray, finished: BoolArray) -> tuple[CalibrationBin, ...]:
    """Compare stated and observed frequency in equal bins of p_finish; empty bins are left out."""
    index = np.minimum((p_finish * N_BINS).astype(np.int64), N_BINS - 1)
    found = []
    for at in np.unique(index).tolist():
        inside = index == at
        found.append(
            CalibrationBin(
                at / N_BINS,
                (at + 1) / N_BINS,
                int(np.count_nonzero(inside)),
                float(np.mean(p_finish[inside])),
                float(np.mean(finished[inside])),
            )
        )
    return tuple(found)


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """How far stated and observed frequency are apart, on average over the samples."""
    return sum(b.samples * abs(b.mean_p_finish - b.finish_rate) for b in bins) / sum(b.samples for b in bins)


def _predict(predictor: Predictor, rows: Sequence[FinishedRequest], samples: Samples, online: bool) -> TwoStage:
    """Ask in batches in time order; with `online` show what finished before each batch first."""
    learner = _OnlineLearner(predictor, rows)
    prompts = np.array([row.prompt_tokens for row in rows], dtype=np.int64)
    keys = [row.prompt_key for row in rows]
    answers = []
    for at in range(0, len(samples.age), _BATCH):
        if online:
            learner.advance(float(samples.at_s[at]))
        request = samples.request[at : at + _BATCH]
        batch_keys = [keys[r] for r in request.tolist()]
        answers.append(predictor.predict(samples.age[at : at + _BATCH], prompts[request], batch_keys))
    return TwoStage(*(np.concatenate(part) for part in zip(*answers, strict=True)))


class _OnlineLearner:
    """Shows a predictor what a router would have seen by a time: finished requests, running ones and their ages."""

    def __init__(self, predictor: Predictor, rows: Sequence[FinishedRequest]) -> None:
        self._predictor = predictor
        self._rows = sorted(rows, key=lambda row: row.finished_s)
        self._started_s = np.array([started_s(row) for row in self._rows])
        self._next = 0
        self._now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Go on to `now_s`."""
        self._now_s = now_s
        while self._next < len(self._rows) and self._rows[self._next].finished_s <= now_s:
            self._predictor.observe(self._rows[self._next])
            self._next += 1
            if isinstance(self._predictor, Refittable) and not self._predictor.refits_in_process:
                refit_on_growth(self._predictor, self._running)

    def _running(self) -> list[tuple[int, int]]:
        # within a batch of finishes: requests that finish later in it still run
        started = np.flatnonzero(self._started_s[self._next :] <= self._now_s) + self._next
        return [
            (min(int((self._now_s - self._started_s[at]) / STEP_S), row.output_tokens - 1), row.prompt_tokens)
            for at in started.tolist()
            for row in (self._rows[at],)
        ]


def _time_scalar(predictor: Predictor, rows: Sequence[FinishedRequest], samples: Samples) -> float:
    """Measure one answer at a time, in microseconds: the best of three passes, which a busy machine disturbs least."""
    spread = np.linspace(0, len(samples.age) - 1, min(_TIMED_CALLS, len(samples.age))).astype(np.int64)
    calls = [
        (age, rows[request].prompt_tokens, rows[request].prompt_key)
        for age, request in zip(samples.age[spread].tolist(), samples.request[spread].tolist(), strict=True)
    ]
    return min(_passes(predictor, calls)) / len(calls) * 1e6


def _passes(predictor: Predictor, calls: list[tuple[int, int, str]]) -> Iterator[float]:
    """The duration of each of three passes over these calls, seconds."""
    for _ in range(3):
        began = time.perf_counter()
        for age, prompt_tokens, key in calls:
            predictor.predict_one(age, prompt_tokens, key)
        yield time.perf_counter() - began
