"""Connects the live router with a predictor: renews forecasts, and reports finished requests to it.

The scheduler gets plain numbers; only this module knows the predictor, its history on disk and its re-fits. Before each
decision all due forecasts are renewed in one batch: on the loop if that takes microseconds; in a thread for boosted
trees, whose results serve the next decision.

A batch that fails delays no decision: its requests count as staying for the whole horizon (the anchor), as with `kind:
none`, until their next renewal.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from balanceroute.arrays import IntArray
from balanceroute.build import predicts
from balanceroute.config import Config
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import Phase
from balanceroute.errors import ConfigError
from balanceroute.prediction import (
    FinishedRequest,
    Forecaster,
    History,
    LearnedPredictor,
    PromptKeyer,
    Refitter,
    build_predictor,
    finished_row,
)
from balanceroute.prediction.forecaster import Answers
from balanceroute.prediction.learned import NEEDS_SCIKIT_LEARN, can_grow
from balanceroute.prediction.observations import Recent
from balanceroute.prediction.refit import Refittable
from balanceroute.prediction.refresh import decremented
from balanceroute.proxy.telemetry.forecast_metrics import ForecastMetrics

log = logging.getLogger(__name__)

# The rows of a fit; the file may have more. 50,000 lengths give a probability to 0.2 %, and no step of a fit then
# holds the interpreter lock for more than 2 ms (with 200,000 it was up to 6)
ROWS_IN_MEMORY: Final = 50_000
LISTED_AT_ONCE: Final = 128  # 0.1 to 0.3 ms of the loop; 144 x 64 requests at once took 10


@dataclass(frozen=True, slots=True)
class Past:
    """What a predictor passes to its successor: the salt of its keys, and rows that are in no file."""

    salt: bytes
    seen: Recent | None

    def finished_requests(self) -> list[FinishedRequest]:
        """The rows, oldest first, without keys. Any thread."""
        if self.seen is None:
            return []
        rows = self.seen.joined()
        columns = (rows.prompt_tokens, rows.output_tokens, rows.censored, rows.finished_s)
        return [
            FinishedRequest("", prompt, output, "cancelled" if censored else "stop", finished_s)
            for prompt, output, censored, finished_s in zip(*(column.tolist() for column in columns), strict=True)
        ]


class Keys:
    """Makes the keys of prompts for one history, in any process."""

    def __init__(self, salt: bytes, by_header: bool) -> None:
        """`by_header`: use the client's header as the key, if it is present."""
        self.salt, self.by_header = salt, by_header
        self._keyer = PromptKeyer(salt)

    def key(self, prompt: bytes, header: str) -> str:
        """A salted hash of the header, or without one of the prompt (its JSON)."""
        return self._keyer.of_header(header) if self.by_header and header else self._keyer.of_json(prompt)


class Forecasts:
    """Forecasts of remaining steps, clipped to [0, H]. Without a predictor: only records finished requests.

    `keys`: makes the keys of prompts; None: keys are not used. `metrics`: the series of the history, and of the
    predictor if there is one.
    """

    def __init__(self, config: Config, past: Past | None = None) -> None:
        chosen = config.predictor
        self.history = History(chosen.history, max_rows=chosen.max_rows, max_age_s=chosen.max_age_s)
        if past is not None and self.history.path is None:
            self.history.salt = past.salt
        keyed = chosen.history is not None or chosen.by_key
        self.keys = Keys(self.history.salt, chosen.key_header is not None) if keyed else None
        self.metrics = ForecastMetrics(self.history)

    def initial(self, tracker: RequestTracker, prompt_tokens: int) -> float | None:
        """c-hat of a waiting request with this prompt; None: nothing is predicted."""
        return None

    def renew(self, scheduler: Scheduler) -> None:
        """Renew due forecasts at the scheduler: here none."""

    def finished(self, tracker: RequestTracker, reason: str) -> None:
        """Record a request that leaves, if it has generated tokens. `reason`: the engine's finish reason, or the
        router's outcome.
        """
        if tracker.age_tokens:
            self.history.add(finished_row(tracker, reason, time.time()))

    def runner(self, snapshot: ClusterSnapshot) -> Callable[[], Awaitable[None]] | None:
        """The coroutine that re-fits the predictor; None: it needs none."""
        return None

    def past(self) -> Past:
        """The start of a successor: here only the salt, as rows are in the file, if anywhere."""
        return Past(self.history.salt, None)

    def close(self) -> None:
        """Write the rows that are queued."""
        self.history.close()


class _Asked(NamedTuple):
    """A request of a batch, as it was when the predictor was asked."""

    tracker: RequestTracker
    requeues: int
    age_tokens: int


class LiveForecasts(Forecasts):
    """A predictor with its history."""

    def __init__(self, config: Config, past: Past | None = None) -> None:
        chosen, self._horizon = config.predictor, config.routing.horizon_steps
        self._refits = chosen.kind != "learned" or can_grow()
        if not self._refits:
            if chosen.model is None:
                raise ConfigError(NEEDS_SCIKIT_LEARN)
            log.warning("the model stays as it is: %s", NEEDS_SCIKIT_LEARN)
        super().__init__(config, past)
        try:
            if past is not None and self.history.path is None:
                rows = past.finished_requests()
            else:  # a predictor without keys keeps only the newest rows
                rows = self.history.load(ROWS_IN_MEMORY if chosen.kind == "survival" else None)
            self._predictor = build_predictor(
                chosen.kind,
                self._horizon,
                rows=rows,
                model=None if chosen.model is None else Path(chosen.model),
                max_rows=min(chosen.max_rows, ROWS_IN_MEMORY),
                max_age_s=chosen.max_age_s,
                size_buckets=chosen.size_buckets,
                options=chosen.options,
            )
        except BaseException:
            self.history.close()
            raise
        self.forecaster = Forecaster(self._predictor, self._horizon)
        self._refit_interval_s = chosen.refit_interval_s
        self._asker: ThreadPoolExecutor | None = None
        if isinstance(self._predictor, LearnedPredictor):
            self._asker = ThreadPoolExecutor(1, thread_name_prefix="prediction")
        self._due: list[RequestTracker] = []
        self._asking = self._closed = False
        self._failing: set[str] = set()  # which of its calls fail now: one forecast, a batch, learning
        self.metrics = ForecastMetrics(self.history, self.forecaster)

    def initial(self, tracker: RequestTracker, prompt_tokens: int) -> float | None:
        """See `Forecasts`."""
        try:
            expected = self.forecaster.initial(
                prompt_tokens - tracker.earlier_tokens,
                tracker.prompt_key,
                age_tokens=tracker.age_tokens,
                max_new_tokens=tracker.max_new_tokens,
            )
        except (Exception, SystemExit) as error:  # any error of a user's own predictor
            self._failed(error, "first forecasts")
            return float(self._horizon)
        self._failing.discard("first forecasts")
        return expected

    def renew(self, scheduler: Scheduler) -> None:
        """Renew due forecasts: now, or in a batch in the thread."""
        due = scheduler.due_refreshes()
        if self._asker is not None:
            self._due += due
            self._ask(scheduler, self._asker)
        elif due:
            now = asyncio.get_running_loop().time()
            try:
                renewed = self.forecaster.refresh(due)
                self._failing.discard("forecasts")
            except (Exception, SystemExit) as error:  # any error: decisions continue without a forecast
                self._failed(error)
                renewed = self._anchors(len(due))
            for tracker, expected in zip(due, renewed, strict=True):
                scheduler.refresh(tracker.id, expected, now)

    def _ask(self, scheduler: Scheduler, asker: ThreadPoolExecutor) -> None:
        """Run a batch in the thread, one at a time; later due requests wait for the next."""
        if self._asking:
            return
        due, self._due = self._due, []
        batch = [_Asked(each, each.requeues, each.age_tokens) for each in due if each.phase is Phase.DECODING]
        if not batch:
            return
        questions = self.forecaster.questions([asked.tracker for asked in batch])
        self._asking = True
        try:
            answers = asyncio.get_running_loop().run_in_executor(asker, self.forecaster.answer, questions)
        except RuntimeError as error:  # no thread to be had
            self._failed(error)
            self._renew_batch(scheduler, batch, self._anchors(len(batch)))
        else:
            answers.add_done_callback(partial(self._answered, scheduler, asker, batch))

    def _answered(
        self, scheduler: Scheduler, asker: ThreadPoolExecutor, batch: "list[_Asked]", answers: "asyncio.Future[Answers]"
    ) -> None:
        """Take the answers to a batch, and ask the next."""
        if answers.cancelled() or self._closed:  # the router ends, or has another predictor
            return
        error = answers.exception()
        if error is None:
            self._failing.discard("forecasts")
            self.forecaster.count(answers.result())
            self._renew_batch(scheduler, batch, answers.result().c_hat.tolist())
        else:
            self._failed(error)
            self._renew_batch(scheduler, batch, self._anchors(len(batch)))
        self._ask(scheduler, asker)

    def _renew_batch(self, scheduler: Scheduler, batch: "list[_Asked]", values: list[float]) -> None:
        """Renew the forecasts of a batch: less the tokens that have come since; one that is 0 then is due again."""
        self._asking = False
        now = asyncio.get_running_loop().time()
        for asked, expected in zip(batch, values, strict=True):
            tracker = asked.tracker
            if tracker.phase is Phase.DECODING and tracker.requeues == asked.requeues:
                left = decremented(expected, tracker.age_tokens - asked.age_tokens, self._horizon)
                scheduler.refresh(tracker.id, left, now)

    def _anchors(self, n: int) -> list[float]:
        return [float(self._horizon)] * n

    def _failed(self, error: BaseException, what: str = "forecasts") -> None:
        """Count requests without a forecast, and log the first failure of a run."""
        self.forecaster.failures += 1
        if what not in self._failing:
            self._failing.add(what)
            log.warning("%s fail, requests count as staying: %r", what, error, exc_info=error)

    def finished(self, tracker: RequestTracker, reason: str) -> None:
        """Learn from a finished request that has generated tokens, and record it."""
        if tracker.age_tokens:
            now = time.time()
            try:
                row = self.forecaster.finished(tracker, reason, now)
                self._failing.discard("observations")
            except (Exception, SystemExit) as error:  # of a user's own predictor; the row is recorded all the same
                self._failed(error, "observations")
                row = finished_row(tracker, reason, now)
            self.history.add(row)
            if not row.censored:  # the request has ended: the steps still expected are the error
                self.metrics.error_tokens.observe(tracker.remaining(self._horizon))

    def runner(self, snapshot: ClusterSnapshot) -> Callable[[], Awaitable[None]] | None:
        """The re-fits; a user's own predictor does its own."""
        if not isinstance(self._predictor, Refittable) or not self._refits:
            return None

        refitter: Refitter[Any] = Refitter(
            self._predictor, interval_s=self._refit_interval_s, running=lambda: running_requests(snapshot)
        )
        self.metrics.refitter = refitter
        return refitter.run

    def past(self) -> Past:
        """What was learned and is in no file; large copies are made later, in another thread."""
        if self.history.path is None and isinstance(self._predictor, Refittable):
            ring, pending = self._predictor.ring, self._predictor.ring.pending
            seen, ring.pending = ring.freeze(), pending  # this one goes on if the reload is refused
            ours = ring.added - ring.of_model  # the successor reads its model itself
            return Past(self.history.salt, replace(seen, capacity=min(seen.capacity, ours)) if ours else None)
        return super().past()

    def close(self) -> None:
        """End the thread, write the rows that are queued."""
        self._closed = True
        if self._asker is not None:
            self._asker.shutdown(wait=False, cancel_futures=True)
        super().close()


async def running_requests(snapshot: ClusterSnapshot) -> IntArray:
    """Age and prompt tokens of every request on a decode worker, as their clients see them; shape (n, 2).

    It yields to the loop after every `LISTED_AT_ONCE`; requests that leave meanwhile are omitted.
    """
    trackers = list(snapshot.decoding())
    parts = [np.empty((0, 2), dtype=np.int64)]
    for at in range(0, len(trackers), LISTED_AT_ONCE):
        listed = [
            (tracker.age_tokens, tracker.prompt_tokens - tracker.earlier_tokens)
            for tracker in trackers[at : at + LISTED_AT_ONCE]
            if tracker.phase is Phase.DECODING
        ]
        parts.append(np.array(listed, dtype=np.int64).reshape(-1, 2))
        await asyncio.sleep(0)
    return np.concatenate(parts)


def build_forecasts(config: Config, past: Past | None = None) -> Forecasts | None:
    """The forecasts of a configuration; None: the policy uses none, and no history is configured.

    Reads the history, which for hundreds of thousands of rows takes seconds: not on a loop that has requests to serve.
    `past`: what another predictor of this process has learned. Raises: ConfigError, InputError: for a model file that
    does not fit.
    """
    if predicts(config):
        return LiveForecasts(config, past)
    return Forecasts(config, past) if config.predictor.history is not None else None
