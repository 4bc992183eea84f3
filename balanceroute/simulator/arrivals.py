"""Requests on their way into the router: they arrive, are prefilled, and wait for a decode slot."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import RequestSpec
from balanceroute.simulator.oracle import Forecast
from balanceroute.simulator.prefill_tier import PrefillTier
from balanceroute.simulator.result import Recorder
from balanceroute.simulator.setting import Setting
from balanceroute.traces import BLOCK_TOKENS, Trace

NEVER = float("inf")


class Arrivals:
    """Lets the requests of a trace in while the waiting area has room, and carries out their prefills.

    Args: tier: the prefillers; without a tier in the setting one that takes no time, for what is prefilled again.
    queued_at_workers: how many requests wait for a slot at the workers.
    """

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        scheduler: Scheduler,
        tier: PrefillTier,
        forecast: Forecast,
        recorder: Recorder,
        queued_at_workers: Callable[[], int],
    ) -> None:
        self.trace, self.setting, self.scheduler, self.tier = trace, setting, scheduler, tier
        self.forecast, self.recorder, self.queued_at_workers = forecast, recorder, queued_at_workers
        self.arrival_s: list[float] = trace.arrival_s.tolist()
        self.prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self.keys: list[str] = trace.prompt_key.tolist()
        self.next_arrival = 0
        self.cached_tokens: dict[str, int] = {}  # of the prompts that are being prefilled
        self.prefill_done: list[tuple[float, int, str]] = []  # a heap: (when, sequence, request)
        self.prefills = 0
        self.room_since_s = 0.0  # when the waiting area last became open: requests left it, or a first worker came back

    def let_in(self, now: float) -> None:
        """Let in what has arrived and, with a prefill tier, what has been prefilled by now."""
        if self.setting.prefillers:
            self.let_in_through_prefill(now)
            return
        self.dispatch(now)  # what is to be prefilled again, which takes no time without a tier
        scheduler = self.scheduler
        while self.next_arrival < len(self.arrival_s) and self.arrival_s[self.next_arrival] <= now:
            if self.waiting >= self.setting.pool:
                return
            request = self.next_arrival
            self.next_arrival += 1
            self.recorder.ready_s[request] = now
            scheduler.submit_prefilled(self.spec(request), now, self.expected(request))

    def let_in_through_prefill(self, end: float) -> None:
        """Arrivals and ends of prefills up to `end`, in order of time; each may let the next prefill begin.

        What arrived while the waiting area was full enters when it opened again, which was with the step before.
        """
        while True:
            arrival = done = NEVER
            if self.next_arrival < len(self.arrival_s) and self.lets_in:
                arrival = max(self.arrival_s[self.next_arrival], self.room_since_s)
            if self.prefill_done:
                done = self.prefill_done[0][0]
            now = min(arrival, done)
            if now > end:
                break
            if arrival <= done:
                self.scheduler.submit(self.spec(self.next_arrival), now)
                self.next_arrival += 1
            else:
                self.prefilled(heappop(self.prefill_done)[2], now)
            self.dispatch(now)
        self.dispatch(end)

    def dispatch(self, now: float) -> None:
        """Start the prefills that the router asks for."""
        for prefill in self.scheduler.dispatch(now):
            tracker = self.scheduler.snapshot.requests[prefill.request]
            done, cached = self.tier.compute(prefill.worker, tracker.prefix, tracker.prompt_tokens, now)
            self.cached_tokens[prefill.request] = cached
            self.prefills += 1
            if done <= now:
                self.prefilled(prefill.request, now)
            else:
                heappush(self.prefill_done, (done, self.prefills, prefill.request))

    def prefilled(self, request_id: str, now: float) -> None:
        """The prefill is over: the request waits for a decode slot."""
        request = int(request_id)
        if math.isnan(self.recorder.ready_s[request]):
            self.recorder.ready_s[request] = now
        tracker, cached = self.scheduler.snapshot.requests[request_id], self.cached_tokens.pop(request_id)
        expected = self.expected(request, tracker.earlier_tokens)
        self.scheduler.prefilled(request_id, tracker.prompt_tokens, now, expected, cached)

    def spec(self, request: int) -> RequestSpec:
        return RequestSpec(
            str(request),
            self.prompt_tokens[request],
            prompt_key=self.keys[request],
            prefix=self.trace.full_blocks(request),
            block_tokens=BLOCK_TOKENS,
        )

    def expected(self, request: int, age_tokens: int = 0) -> float | None:
        return self.forecast.initial(request, self.prompt_tokens[request], self.keys[request], age_tokens)

    @property
    def lets_in(self) -> bool:
        """Whether the router takes what arrives: it refuses a request while no decode worker is there."""
        return self.waiting < self.setting.pool and self.scheduler.snapshot.n_in_barrier > 0

    def may_enter(self, now: float) -> bool:
        """Whether the next request has arrived and the waiting area, full before, has room by now."""
        return self.outside > 0 and self.arrival_s[self.next_arrival] <= now and self.lets_in

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, in the pool or at workers, or are prefilled or about to be."""
        snapshot = self.scheduler.snapshot
        return len(snapshot.pool) + self.queued_at_workers() + len(snapshot.queued) + len(self.prefill_done)

    @property
    def outside(self) -> int:
        """Requests that the router has not let in yet."""
        return len(self.arrival_s) - self.next_arrival

    def moments(self) -> list[float]:
        """When the next request arrives, and when the next prefill ends."""
        moments = [entry[0] for entry in self.prefill_done[:1]]
        if self.outside:
            moments.append(self.arrival_s[self.next_arrival])
        return moments
