"""`RefreshSchedule`: when each request's prediction is renewed.

Predictions enter the core as values: the driver takes those that are `due`, asks its predictor, and passes the results
to `Scheduler.refresh`, so a rerun needs no predictor. A request is due every `every_tokens` of its generated tokens, at
once when c-hat has come down to 0, and when the client's limit comes into the window; it is handed out once per date.
"""

import math
from collections.abc import Iterable
from heapq import heappop, heappush

from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import DECODING


class RefreshSchedule:
    """Dates are in generated tokens of the request (`RequestTracker.refresh_due_at`), infinite while none is set."""

    def __init__(self) -> None:
        self._every_tokens: int | None = None
        self._lock_step = False
        self._due: list[RequestTracker] = []
        self._steps = 0
        self._at_step: list[tuple[int, int, RequestTracker]] = []  # a heap: when to look whether a date has come

    def configure(self, every_tokens: int | None, lock_step: bool) -> None:
        """From now on: tokens between two predictions, None without a predictor; whether `step` tells what is due."""
        self._every_tokens, self._lock_step = every_tokens, lock_step

    def plan(self, tracker: RequestTracker, horizon_steps: int) -> None:
        """Set the next date of a running request."""
        every = self._every_tokens
        if every is None:
            return
        ahead = float(every)
        if tracker.refreshed_remaining < horizon_steps:
            # after c tokens its last step begins: that is when c-hat is renewed, if not before
            ahead = min(ahead, max(1.0, math.ceil(tracker.refreshed_remaining)))
        elif tracker.max_new_tokens is not None:
            # H tokens from the client's limit it is certain to leave within the window: no anchor any more
            until_certain = tracker.max_new_tokens - tracker.age_tokens - horizon_steps
            ahead = min(ahead, until_certain) if until_certain > 0 else ahead
        tracker.refresh_due_at = tracker.generated + ahead
        if self._lock_step:
            heappush(self._at_step, (self._steps + int(ahead), tracker.order, tracker))

    def make_due(self, tracker: RequestTracker) -> None:
        """Make a request due."""
        tracker.refresh_due_at = math.inf
        self._due.append(tracker)

    def step(self) -> None:
        """Lock-step: every running request has generated one more token."""
        self._steps += 1
        dates = self._at_step
        while dates and dates[0][0] <= self._steps:
            _, _, tracker = heappop(dates)
            if tracker.phase is DECODING and tracker.generated >= tracker.refresh_due_at:
                self.make_due(tracker)

    def restart(self, running: Iterable[RequestTracker]) -> None:
        """Make all running requests due, and no others: predictions were dropped."""
        self._due = [] if self._every_tokens is None else list(running)

    def due(self) -> list[RequestTracker]:
        """The requests that became due since the last call."""
        if not self._due:
            return []
        due, self._due = self._due, []
        return [tracker for tracker in due if tracker.phase is DECODING]
