"""The only module of the simulator that reads true output lengths.

Two things need it: the engine, which must know when a request is done (`TrueLengths`), and the oracle of the paper's
reference rows (`OracleForecast`), which tells the router exactly what remains. Everything that a policy sees otherwise
comes from predictors that were fitted on another trace. A test keeps the column's name out of the other modules.
"""

import math
from collections import defaultdict

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import Phase
from balanceroute.prediction import Forecaster, refit_on_growth
from balanceroute.prediction.refit import Refittable
from balanceroute.prediction.refresh import refresh_interval_tokens
from balanceroute.traces import Trace


class TrueLengths:
    """Tokens that each request of a trace will generate."""

    def __init__(self, trace: Trace) -> None:
        self.tokens: list[int] = trace.output_tokens.tolist()
        self.total: int = sum(self.tokens)

    def largest_kv_tokens(self, trace: Trace) -> int:
        """KV tokens of the request that becomes the largest."""
        return int((trace.prompt_tokens + trace.output_tokens).max())

    def least_steps(self, n_slots: int) -> int:
        """Steps that it takes at least: those of the longest answer, or of all answers where all slots are in use."""
        return max([*self.tokens, math.ceil(self.total / n_slots)])


class Forecast:
    """How the simulator asks for c-hat: at the start of the wait, and whenever it is to be renewed.

    This one knows nothing: every request counts as staying for the whole horizon.
    """

    refresh_every_tokens: int | None = None

    def initial(self, request: int, prompt_tokens: int, prompt_key: str, age_tokens: int = 0) -> float | None:
        """c-hat of a request that waits, steps; `None` for no forecast. `age_tokens`: 0 unless it was requeued."""
        return None

    def started(self, request: int, step: int, left: int) -> None:
        """The request runs from this step on, with so many tokens to go (for the oracle's eyes)."""

    def renew(self, scheduler: Scheduler, step: int, now: float) -> None:
        """Tell the scheduler the forecasts that are due after a step."""

    def finished(self, scheduler: Scheduler, tracker: RequestTracker, now: float) -> None:
        """The router has heard that this request is done, and is about to forget it."""


class PredictorForecast(Forecast):
    """A predictor, asked as the live proxy asks it: when the scheduler says that a refresh is due.

    With `learns` it starts knowing nothing and is told each finish that the router hears of, as the live one is;
    its re-fits take no simulated time.
    """

    def __init__(self, forecaster: Forecaster, *, learns: bool = False) -> None:
        self.forecaster = forecaster
        self.learns = learns
        predictor = forecaster.predictor
        self._refitted = predictor if isinstance(predictor, Refittable) else None  # slow: looked up once
        self.refresh_every_tokens = refresh_interval_tokens(forecaster.horizon_steps)

    def initial(self, request: int, prompt_tokens: int, prompt_key: str, age_tokens: int = 0) -> float | None:
        """c-hat at its age."""
        return self.forecaster.initial(prompt_tokens, prompt_key, age_tokens=age_tokens)

    def renew(self, scheduler: Scheduler, step: int, now: float) -> None:
        """One batched call for all that are due."""
        due = scheduler.due_refreshes()
        if due:
            for tracker, value in zip(due, self.forecaster.refresh(due), strict=True):
                scheduler.refresh(tracker.id, value, now)

    def finished(self, scheduler: Scheduler, tracker: RequestTracker, now: float) -> None:
        """Learn its length, and fit anew once enough is new."""
        if not self.learns:
            return
        self.forecaster.finished(tracker, "stop", now)
        if self._refitted is not None:
            running = scheduler.snapshot.decoding()
            refit_on_growth(
                self._refitted,
                lambda: [(t.age_tokens, t.prompt_tokens - t.earlier_tokens) for t in running if t is not tracker],
            )


class OracleForecast(Forecast):
    """True forecasts at every step: with r steps to go c-hat = min(r-1, H) (`core.projection`).

    The scheduler counts it down and it stays exact, so a request needs one refresh, on the step on which its last load
    comes within the horizon.
    """

    def __init__(self, lengths: TrueLengths, horizon_steps: int) -> None:
        self.lengths = lengths
        self.horizon_steps = horizon_steps
        self.changing: defaultdict[int, list[int]] = defaultdict(list)
        """By step: requests that come within the horizon of their end, if they have run until then."""

    def initial(self, request: int, prompt_tokens: int, prompt_key: str, age_tokens: int = 0) -> float | None:
        """min(r - 1, H)."""
        return float(min(self.lengths.tokens[request] - age_tokens - 1, self.horizon_steps))

    def started(self, request: int, step: int, left: int) -> None:
        """Note when it comes within the horizon of its end."""
        if left > self.horizon_steps > 0:
            self.changing[step + left - self.horizon_steps].append(request)

    def renew(self, scheduler: Scheduler, step: int, now: float) -> None:
        """Tell the true remainder of the requests for which counting down is not enough."""
        for request in self.changing.pop(step, ()):
            tracker = scheduler.snapshot.requests.get(str(request))
            if tracker is None or tracker.phase is not Phase.DECODING:
                continue
            late = self.lengths.tokens[request] - tracker.age_tokens - self.horizon_steps
            if late == 0:
                scheduler.refresh(tracker.id, self.horizon_steps - 1.0, now)
            elif late > 0:  # it was taken off meanwhile, or has been paused
                self.changing[step + late].append(request)
