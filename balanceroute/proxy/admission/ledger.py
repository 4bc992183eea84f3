"""The narrow waist: all that a request's lifecycle may ask of the scheduler, and all that it is told.

    ticket = ledger.submit(spec)          arrival; raises Rejected
    await ticket.prefiller()              which prefiller gets the probe
    ticket.prefilled(n, cached) | .prefill_failed()
    await ticket.admission()              which decode worker, when the policy has decided
    ticket.began()                        the first tokens have come
    ticket.progress(n)                    per read of the worker's stream; taken down here, told to the scheduler later
    ticket.put_back()                     the decode worker went out before it was asked: decide again
    ticket.requeue()                      decode ended early: once more from the prefill on
    ticket.finish(outcome)                leaves, from any phase, once

Every call runs to its end without awaiting, so between reading the snapshot and acting on it nothing else happens. A
lifecycle never sees the scheduler, so relays can move into processes of their own behind these calls.

Decode first (layerwise), a ticket is pooled at once, and between admission and the first token:

    ticket.request_prefill(), await ticket.prefiller(), ticket.pushed(n) | .push_failed()

**Tokens are told in sums.** They come thousands of times per second and matter when somebody looks: so a ticket only
adds them up, and `settle` tells the scheduler what has come since, before every decision, before a request leaves its
worker, and several times per second besides. Whoever reads loads at another time calls it first.

**What others may know** of the cluster are views (`core/view.py`): frozen data, made when asked for. Nobody outside
this package touches the scheduler, the snapshot or a tracker.

The ledger also owns the events that the dispatchers sleep on. It sets them where the state changes; the dispatchers
clear them where they have looked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from balanceroute.build import build_scheduler
from balanceroute.config import Config
from balanceroute.core.policies import PolicySettings
from balanceroute.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.core.snapshot_json import snapshot_to_dict
from balanceroute.core.types import (
    Admit,
    Outcome,
    Phase,
    Prefill,
    RejectReason,
    Release,
    RequestSpec,
    WorkerSpec,
    WorkerState,
)
from balanceroute.core.view import (
    ClusterView,
    DecoderView,
    PrefillerView,
    RequestView,
    view_cluster,
    view_decoder,
    view_prefiller,
    view_request,
)
from balanceroute.errors import BalanceRouteError, Draining, NoHealthyWorkers, QueueFull, QueueTimeout, Rejected
from balanceroute.journal import RecordingScheduler
from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.telemetry.instruments import StageClock

RETRY_AFTER_S = 1.0


def rejection(reason: RejectReason) -> Rejected:
    """The error that a client gets for a refusal of the core."""
    if reason is RejectReason.QUEUE_FULL:
        return QueueFull("Too many requests are waiting; try again shortly.", retry_after_s=RETRY_AFTER_S)
    if reason is RejectReason.DRAINING:
        return Draining("The router is shutting down.", retry_after_s=RETRY_AFTER_S)
    return no_healthy_workers({})


def no_healthy_workers(states: Mapping[str, Sequence[WorkerState]]) -> NoHealthyWorkers:
    """What a client is told when a tier has nobody: which, and whether its workers are down or drained.

    Args: states: those of the workers of each tier, by its name.
    """
    causes = [
        f"none of {len(members)} {tier} is up ({members.count(WorkerState.DOWN)} down)"
        for tier, members in states.items()
        if WorkerState.UP not in members
    ]
    why = f": {', '.join(causes)}; GET /ready says more" if causes else ""
    return NoHealthyWorkers(f"No healthy worker can serve the request now{why}.", retry_after_s=5.0)


class Ticket:
    """One request's place in the scheduler, from `submit` to its single `finish`.

    `left` is its Release once it has left, by its own `finish` or because it expired. `unreported_tokens` have come,
    and the scheduler hasn't heard of them; `last_token_s` is when the last ones came, 0 before.
    """

    __slots__ = (
        "_answer",
        "_behind",
        "_ledger",
        "_now",
        "_waiter",
        "arrived_s",
        "id",
        "last_token_s",
        "left",
        "pooled_s",
        "unreported_tokens",
    )

    def __init__(self, ledger: "Ledger", request_id: str, now: float) -> None:
        self.id = request_id
        self.left: Release | None = None
        self.arrived_s = now
        self.pooled_s = self.last_token_s = 0.0
        self.unreported_tokens = 0
        self._ledger, self._now, self._behind = ledger, ledger.now, ledger.behind
        self._answer: str | BalanceRouteError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def prefiller(self) -> str:
        """Wait for the prefiller that gets the probe. Raises: QueueTimeout."""
        return await self._wait()

    async def admission(self) -> str:
        """Wait for the decode worker. Raises: QueueTimeout."""
        return await self._wait()

    def prefilled(self, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """The probe was answered: the request waits in the pool. `cached_tokens`: as in `Scheduler.prefilled`."""
        ledger = self._ledger
        now = self.pooled_s = ledger.now()
        expected: float | None = None
        if ledger.forecasts is not None:
            expected = ledger.forecasts.initial(ledger.scheduler.snapshot.requests[self.id], prompt_tokens)
        ledger.scheduler.prefilled(self.id, prompt_tokens, now, expected, cached_tokens)
        ledger.pool_filled()

    def pooled(self) -> None:
        """Decode first: the request is in the pool at once, with the size that it is thought to have."""
        ledger = self._ledger
        now = self.pooled_s = ledger.now()
        if ledger.forecasts is not None:
            tracker = ledger.scheduler.snapshot.requests[self.id]
            expected = ledger.forecasts.initial(tracker, tracker.prompt_tokens)
            if expected is not None:
                ledger.scheduler.refresh(self.id, expected, now)
        ledger.pool_filled()

    def prefill_failed(self) -> None:
        """The probe failed: the request queues again."""
        self._ledger.scheduler.prefill_failed(self.id, self._ledger.now())
        self._ledger.prefill_capacity_changed()

    def request_prefill(self) -> None:
        """Decode first: the decode worker asks for the KV; `prefiller` says who computes it."""
        ledger = self._ledger
        ledger.scheduler.request_prefill(self.id, ledger.now())
        if len(ledger.scheduler.snapshot.asking) == 1:
            ledger.dispatch()
        else:
            ledger.prefill_event.set()

    def pushed(self, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Decode first: the prefiller has delivered the KV."""
        self._ledger.scheduler.pushed(self.id, prompt_tokens, self._ledger.now(), cached_tokens)
        self._ledger.prefill_capacity_changed()

    def push_failed(self) -> None:
        """Decode first: the prefiller has not begun; ask for another."""
        self._ledger.scheduler.push_failed(self.id, self._ledger.now())
        self._ledger.prefill_capacity_changed()

    def progress(self, tokens: int) -> None:
        """So many more tokens have been generated. The relay's path."""
        self.last_token_s = self._now()
        if not self.unreported_tokens:
            self._behind.append(self)
        self.unreported_tokens += tokens

    def settle(self) -> None:
        """Tell the scheduler the tokens that it hasn't heard of. Raises InvariantError when not decoding."""
        tokens, self.unreported_tokens = self.unreported_tokens, 0
        if tokens:
            self._ledger.scheduler.progress(self.id, tokens, self._now())

    def began(self) -> None:
        """The first tokens have come."""
        self.settle()
        scheduler = self._ledger.scheduler
        if scheduler.config.overlap_requests is None:  # nobody else asks
            scheduler.began(self.id, self._now())

    def put_back(self) -> None:
        """The decode worker will not be asked after all: wait for another in the pool."""
        ledger = self._ledger
        ledger.scheduler.put_back(self.id, ledger.now())
        ledger.pool_filled()

    def requeue(self) -> Release:
        """The decode ended early, or the pinned KV was lost: queue for a prefill again."""
        ledger = self._ledger
        self.settle()
        self._answer = None  # decode first, a prefiller may have been told to a prefill that has ended since
        release = ledger.scheduler.requeue(self.id, ledger.now())
        ledger.released(release)
        if ledger.scheduler.config.decode_first:
            self.pooled()
        return release

    def finish(self, outcome: Outcome, reason: str = "") -> Release:
        """Leave. `reason` is the engine's finish reason, for the predictor. Raises InvariantError when gone."""
        ledger = self._ledger
        self.settle()
        tracker = ledger.scheduler.snapshot.requests.get(self.id)
        if ledger.forecasts is not None and tracker is not None:
            ledger.forecasts.finished(tracker, reason or outcome.value)
        release = self.left = ledger.scheduler.finish(self.id, outcome, ledger.now())
        del ledger.tickets[self.id]
        ledger.released(release)
        return release

    # -- the dispatchers' side

    def answer(self, answer: str | BalanceRouteError) -> None:
        """Tell the waiting lifecycle: a worker's id, or why there won't be one."""
        self._answer = answer
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> str:
        while self._answer is None:
            self._waiter = self._ledger.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        answer, self._answer = self._answer, None
        if isinstance(answer, BalanceRouteError):
            raise answer
        return answer


class Ledger:
    """All tickets of one scheduler, and the events between lifecycles and dispatchers."""

    def __init__(
        self,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        forecasts: Forecasts | None = None,
        stage_clock: StageClock | None = None,
    ) -> None:
        self.scheduler, self.loop, self.forecasts = scheduler, loop, forecasts
        self._stage_clock = stage_clock or StageClock()  # hears the policy's stages; told here when they begin
        self.now = loop.time
        self.tickets: dict[str, Ticket] = {}
        self.behind: list[Ticket] = []  # those that may have unreported tokens; always this one list
        self.prefill_event = asyncio.Event()  # a queued request may now find a prefiller
        self.pool_not_empty = asyncio.Event()
        self.slot_freed = asyncio.Event()  # a decision could turn out differently than the last one
        self._waits_for_slots = scheduler.policy.waits_for_slots

    def submit(self, spec: RequestSpec) -> Ticket:
        """A request arrives. Raises: Rejected: QueueFull, NoHealthyWorkers, Draining."""
        now = self.now()
        refused = self.scheduler.submit(spec, now)
        if refused is not None:
            raise self.no_workers() if refused.reason is RejectReason.NO_WORKERS else rejection(refused.reason)
        ticket = self.tickets[spec.id] = Ticket(self, spec.id, now)
        if self.scheduler.config.decode_first:
            ticket.pooled()
        elif len(self.scheduler.snapshot.queued) == 1:
            self.dispatch()  # nobody waits before it: prefillers are given out one by one, so there is nothing to batch
        else:
            self.prefill_event.set()
        return ticket

    def no_workers(self) -> NoHealthyWorkers:
        """The error of a request that nobody can serve now, with the cause."""
        snapshot = self.scheduler.snapshot
        prefillers = [prefiller.state for prefiller in snapshot.prefillers]
        return no_healthy_workers(
            {"prefillers": prefillers, "decode workers": [worker.state for worker in snapshot.workers]}
        )

    def dispatch(self) -> list[Prefill]:
        """Give queued requests to prefillers, as far as these take them."""
        prefills = self.scheduler.dispatch(self.now())
        for prefill in prefills:
            self.tickets[prefill.request].answer(prefill.worker)
        return prefills

    def settle(self) -> None:
        """Tell the scheduler every token that has come. O(requests that have generated any since the last time)."""
        for ticket in self.behind:
            ticket.settle()
        self.behind.clear()

    def admit(self) -> list[Admit]:
        """One decision over the pool, with what the predictor says now."""
        self.settle()
        scheduler, now = self.scheduler, self.now()
        if self.forecasts is not None:
            self.forecasts.renew(scheduler)
        self._stage_clock.begin()
        admissions = scheduler.admit(now)
        for admission in admissions:
            self.tickets[admission.request].answer(admission.worker)
        if admissions:
            self.prefill_capacity_changed()  # the pool has room again
        return admissions

    def expire(self) -> list[Ticket]:
        """End what has waited too long; the lifecycles are told."""
        expired, now = [], self.now()
        if self.forecasts is not None:
            for tracker in self.scheduler.late(now):  # what had been generated before a requeue was cut short
                self.forecasts.finished(tracker, Outcome.EXPIRED.value)
        for release in self.scheduler.expire(now):
            ticket = self.tickets.pop(release.request)
            ticket.left = release
            where = "a decode slot" if release.phase is Phase.POOLED else "a prefiller"
            ticket.answer(QueueTimeout(f"The request waited too long for {where}.", retry_after_s=RETRY_AFTER_S))
            self.released(release)
            expired.append(ticket)
        return expired

    # -- the whole

    @property
    def draining(self) -> bool:
        """Whether every new request is refused."""
        return self.scheduler.draining

    def drain(self) -> None:
        """Refuse every new request from now on; those that are here are served."""
        self.scheduler.set_draining(True, self.now())

    @property
    def bounds(self) -> SchedulerConfig:
        """The bounds and times that hold now."""
        return self.scheduler.config

    def refits(self) -> Callable[[], Awaitable[None]] | None:
        """What keeps the present predictor fresh beside the loop, if anything."""
        return None if self.forecasts is None else self.forecasts.runner(self.scheduler.snapshot)

    def close(self) -> None:
        """Write what a journal has not written yet."""
        if isinstance(self.scheduler, RecordingScheduler):
            self.scheduler.close()

    def configure(self, config: SchedulerConfig) -> None:
        """Other bounds and times from now on."""
        self.scheduler.configure(config, self.now())

    def reroute(self, settings: PolicySettings, config: SchedulerConfig, forecasts: Forecasts | None) -> None:
        """Another policy and predictor from now on: what is bound stays, what waits is decided on anew."""
        self.settle()
        self.forecasts = forecasts
        self.configure(config)
        now = self.now()
        self.scheduler.reroute(settings, now)
        self._waits_for_slots = self.scheduler.policy.waits_for_slots
        if forecasts is not None:
            for tracker in list(self.scheduler.snapshot.pool):
                expected = forecasts.initial(tracker, tracker.prompt_tokens)
                if expected is not None:
                    self.scheduler.refresh(tracker.id, expected, now)
        self.capacity_changed()

    # -- workers

    def add_worker(self, spec: WorkerSpec) -> None:
        """A worker joins."""
        self.scheduler.add_worker(spec, self.now())
        self.capacity_changed()

    def remove_if_idle(self, worker_id: str) -> bool:
        """A worker leaves, if it holds nothing; returns whether it did."""
        worker = self.decoder(worker_id)
        if worker is not None and worker.active:
            return False
        prefiller = self.prefiller(worker_id)
        if prefiller is not None and (prefiller.inflight or prefiller.pinned):
            return False
        self.scheduler.remove_worker(worker_id, self.now())
        return True

    def set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        """A worker may do more or less than before."""
        self.settle()
        self.scheduler.set_worker_state(worker_id, state, self.now())
        self.capacity_changed()

    def report_prefiller(self, worker_id: str, kv_usage: float | None) -> None:
        """A sample of a prefiller's KV usage; None where it doesn't tell."""
        self.scheduler.report_prefiller(worker_id, kv_usage, self.now())
        self.prefill_capacity_changed()

    def report_prefix_cache(
        self, worker_id: str, capacity_tokens: int | None, block_tokens: int, counters: tuple[float, float] | None
    ) -> None:
        """What a prefiller says of its prefix cache; told only when it is new.

        Args: capacity_tokens: 0 where it is off, None where that is not known. block_tokens: of its blocks. counters:
        tokens looked up and found so far, None where it doesn't tell.
        """
        prefiller, now = self.prefiller(worker_id), self.now()
        if prefiller is not None and prefiller.cache_known != (capacity_tokens, block_tokens):
            self.scheduler.report_prefix_cache(worker_id, capacity_tokens, now, block_tokens)
        if counters is not None:
            self.scheduler.report_prefix_hits(worker_id, *counters, now)

    def forget_prefixes(self, worker_id: str) -> None:
        """A prefiller's prefix cache has been emptied."""
        self.scheduler.forget_prefixes(worker_id, self.now())

    def report_decoder(self, worker_id: str, foreign_requests: int, foreign_tokens: int, least_own_slots: int) -> None:
        """What others run on a decode worker, and how many slots are ours all the same; told only when it is new."""
        worker = self.scheduler.snapshot.worker(worker_id)
        before = worker.own_slots
        known = (worker.foreign_requests, worker.foreign_tokens, worker.least_own_slots)
        if known == (foreign_requests, foreign_tokens, least_own_slots):
            return
        self.scheduler.report_decoder(worker_id, foreign_requests, foreign_tokens, least_own_slots, self.now())
        if worker.own_slots > before:
            self.slot_freed.set()

    def show_report(self, worker_id: str, samples: dict[str, float]) -> None:
        """What a decode worker says of itself, for /state and views."""
        self.scheduler.show_report(worker_id, samples)

    # -- what others may know

    def view(self) -> ClusterView:
        """The cluster as it is now; `settle` first where loads matter. O(workers)."""
        return view_cluster(self.scheduler.snapshot, self.scheduler.draining)

    def decoder(self, worker_id: str) -> DecoderView | None:
        """One decode worker; None when there is none of that id."""
        snapshot = self.scheduler.snapshot
        found = (view_decoder(snapshot, worker) for worker in snapshot.workers if worker.spec.id == worker_id)
        return next(found, None)

    def prefiller(self, worker_id: str) -> PrefillerView | None:
        """One prefiller; None when there is none of that id."""
        prefillers = self.scheduler.snapshot.prefillers
        return next((view_prefiller(each) for each in prefillers if each.spec.id == worker_id), None)

    def request(self, request_id: str) -> RequestView | None:
        """One request; None when it is not here. O(1)."""
        return view_request(self.scheduler.snapshot, request_id)

    def running_tokens(self) -> int:
        """What the requests that are decoding have generated so far. O(requests)."""
        return sum(tracker.age_tokens for tracker in self.scheduler.snapshot.decoding())

    def state(self) -> dict[str, Any]:
        """The whole snapshot, JSON-ready: what a decision can be explained from. O(requests)."""
        return snapshot_to_dict(self.scheduler.snapshot, self.now())

    # -- the events

    @property
    def decision_possible(self) -> bool:
        """Whether the policy could admit something: a worker may be sent one, or it doesn't wait for that."""
        return not self._waits_for_slots or self.scheduler.snapshot.has_room

    def pool_filled(self) -> None:
        """A request has come into the pool."""
        self.pool_not_empty.set()
        if self.decision_possible:
            self.slot_freed.set()

    def prefill_capacity_changed(self) -> None:
        """A prefiller may take a request that it couldn't before."""
        if self.scheduler.snapshot.queued or self.scheduler.snapshot.asking:
            self.prefill_event.set()

    def capacity_changed(self) -> None:
        """Some worker may take a request that it couldn't before."""
        self.prefill_capacity_changed()
        self.slot_freed.set()

    def released(self, release: Release) -> None:
        """A request has left its phase: whoever waited for what it held is woken."""
        self.prefill_capacity_changed()
        if release.phase is Phase.DECODING:
            self.slot_freed.set()


def open_ledger(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    forecasts: Forecasts | None,
    stage_clock: StageClock,
    journal: Path | None = None,
) -> Ledger:
    """The ledger of a configuration, with all its workers; `close` it at the end. `journal`: a file for every call."""
    scheduler = build_scheduler(config, loop.time(), stage_clock, journal)
    return Ledger(scheduler, loop, forecasts, stage_clock)
