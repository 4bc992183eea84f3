"""Reports of the simulated engine to the router: each step's, some steps late.

An event is a call into the scheduler that is still to be made; it gets the time at which the router hears of it.
"""

from collections import deque
from collections.abc import Callable

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import Outcome
from balanceroute.simulator.oracle import Forecast
from balanceroute.simulator.setting import Setting

Event = Callable[[float], object]


class Channel:
    """The news of one group of workers on their way to the router.

    `events` are those since the last end of a step; `steps` are (step, its events), the oldest first.
    """

    def __init__(self, scheduler: Scheduler, forecast: Forecast, names: list[str], setting: Setting) -> None:
        self._scheduler, self._forecast, self._names = scheduler, forecast, names
        self._lock_step = setting.lock_step
        self._lag_steps = setting.telemetry_lag_steps
        self._lag_s = setting.telemetry_lag_steps * setting.step_overhead_s
        self._events: list[Event] = []
        self._steps: deque[tuple[int, list[Event]]] = deque()

    # -- what happens

    def tokens(self, gains: list[tuple[int, int]]) -> None:
        """Running requests got so many tokens each."""

        def progress(now: float) -> None:
            note, names = self._scheduler.progress, self._names
            for request, tokens in gains:
                note(names[request], tokens, now)

        self._events.append(progress)

    def step(self) -> None:
        """Every running request got one token."""
        self._events.append(self._scheduler.step)

    def start(self, request: int) -> None:
        """The request runs."""
        note = self._scheduler.start if self._lock_step else self._scheduler.began
        self._events.append(lambda now: note(self._names[request], now))

    def finish(self, request: int) -> None:
        """The request has all of its answer."""
        self._events.append(lambda now: self._finish(self._names[request], now))

    def requeue(self, request: int) -> None:
        """The request must be prefilled again."""
        self._events.append(lambda now: self._scheduler.requeue(self._names[request], now))

    def _finish(self, request_id: str, now: float) -> None:
        self._forecast.finished(self._scheduler, self._scheduler.snapshot.requests[request_id], now)
        self._scheduler.finish(request_id, Outcome.FINISHED, now)

    # -- delivery to the router

    @property
    def is_empty(self) -> bool:
        """Whether all events are delivered."""
        return not self._steps and not self._events

    @property
    def has_steps(self) -> bool:
        """Whether some step is not delivered yet."""
        return bool(self._steps)

    def end_step(self, step: int, now: float) -> None:
        """A step has ended; deliver those whose lag is over."""
        self._steps.append((step, self._events))
        self._events = []
        while len(self._steps) > self._lag_steps:
            self._deliver_step(now)

    def deliver_all(self, now: float) -> None:
        """Deliver all events."""
        while self._steps:
            self._deliver_step(now)
        events, self._events = self._events, []
        for event in events:
            event(now)

    def delivered_s(self, ended_s: float) -> float:
        """When a last step that ended then is delivered: after the lag in steps in which nothing runs."""
        return ended_s + self._lag_s

    def _deliver_step(self, now: float) -> None:
        """Deliver the oldest step to the router, which renews its forecasts."""
        step, events = self._steps.popleft()
        for event in events:
            event(now)
        self._forecast.renew(self._scheduler, step, now)
