"""The ledger: implements the calls of `decider.py` on the scheduler, which it owns.

Each call of `decider.Decider` runs to its end without awaiting, so between reading the snapshot and acting on it
nothing else happens. Answers go out by `on_answer`, at once. New tokens come in by `collect`, before every decision and
in `settle`; a reader of loads calls `settle` first.

**Readers** get views of the cluster (`core/view.py`): copies, made on request. No code outside this package uses
the scheduler, the snapshot or a tracker.

The ledger also owns the events that the dispatchers wait for. It sets them when the state changes; the dispatchers
clear them.

`Ledger` is one class with many short methods: calls of requests, and queries and changes by others, all on the one
scheduler.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from balanceroute.build import any_waits, build_scheduler
from balanceroute.config import Config
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.state import state_to_dict
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import (
    DECODING,
    POOLED,
    Admit,
    Outcome,
    Prefill,
    Release,
    RequestSpec,
    Role,
    Standing,
    WorkerSpec,
    WorkerState,
)
from balanceroute.core.view import (
    ClusterView,
    DecoderView,
    PrefillerView,
    view_cluster,
    view_decoder,
    view_prefiller,
)
from balanceroute.journal import RecordingScheduler
from balanceroute.proxy.admission.decider import OnAnswer, Refusal, RefusalKind, refusal
from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.telemetry.instruments import StageClock

MEMORY_STEPS: Final = 64  # a worker's KV capacity is passed on if it has changed by more than 1/n of itself
MOST_PREFILLS: Final = 32  # begun in one call; with prompts of 100,000 tokens that takes about 10 ms
PER_STEP_TOKENS: Final = 0.05  # tokens per step are passed on if they have changed by more than this


class Ledger:
    """The calls of requests to one scheduler, its answers to them, and the events that the dispatchers wait for."""

    at_once = False

    def __init__(
        self,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        forecasts: Forecasts | None = None,
        stage_clock: StageClock | None = None,
    ) -> None:
        self.scheduler, self.loop, self.forecasts = scheduler, loop, forecasts
        self._stage_clock = stage_clock or StageClock()  # times the policy's stages
        self.now = loop.time
        self.on_answer: OnAnswer = lambda request_id, answer: None
        self.collect: Callable[[], None] = lambda: None
        self.adopts = False  # relays have not reported their requests yet, so no worker is known to be idle
        self.prefill_event = asyncio.Event()  # a queued request may now get a prefiller
        self.decision_due = asyncio.Event()  # the pool, or the capacity for it, has changed since the last decision
        self._waits_for_slots = scheduler.policy.waits_for_slots

    # -- requests' calls: see `decider.Decider`

    def submit(self, spec: RequestSpec) -> None:
        """A request arrives."""
        refused = self.scheduler.submit(spec, self.now())
        if refused is not None:
            self.on_answer(spec.id, refusal(refused.reason, self.view))
        elif self.scheduler.config.decode_first and spec.decodes:
            self._pooled(spec.id)
        elif len(self.scheduler.snapshot.queued) == 1:
            self.dispatch()  # at once: prefillers are chosen per request, so nothing is gained by a batch
        else:
            self.prefill_event.set()

    def prefilled(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """The probe was answered: the request waits in the pool."""
        expected: float | None = None
        if self.forecasts is not None:
            expected = self.forecasts.initial(self.scheduler.snapshot.requests[request_id], prompt_tokens)
        self.scheduler.prefilled(request_id, prompt_tokens, self.now(), expected, cached_tokens)
        self._pool_filled()

    def prefill_failed(self, request_id: str) -> None:
        """The probe failed: the request queues again."""
        self.scheduler.prefill_failed(request_id, self.now())
        self._prefill_capacity_changed()

    def request_prefill(self, request_id: str) -> None:
        """Decode first: the decode worker asks for the KV."""
        self.scheduler.request_prefill(request_id, self.now())
        if len(self.scheduler.snapshot.asking) == 1:
            self.dispatch()
        else:
            self.prefill_event.set()

    def pushed(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Decode first: the prefiller has delivered the KV."""
        self.scheduler.pushed(request_id, prompt_tokens, self.now(), cached_tokens)
        self._prefill_capacity_changed()

    def push_failed(self, request_id: str) -> None:
        """Decode first: the prefiller has not begun; another is chosen."""
        self.scheduler.push_failed(request_id, self.now())
        self._prefill_capacity_changed()

    def progress(self, request_id: str, tokens: int) -> None:
        """The request has generated so many more tokens. Raises InvariantError when it is not decoding."""
        self.scheduler.progress(request_id, tokens, self.now())

    def progress_all(self, request_ids: list[str], tokens: list[int]) -> None:
        """As `progress` for several requests. Raises InvariantError where one is not decoding."""
        scheduler, now = self.scheduler, self.now()
        for index in range(len(request_ids)):
            scheduler.progress(request_ids[index], tokens[index], now)

    def began(self, request_id: str, age_s: float = 0.0) -> None:
        """The first tokens came `age_s` ago; called only where KV transfers are measured."""
        self.scheduler.began(request_id, self.now() - age_s)

    def put_back(self, request_id: str) -> None:
        """The decode worker will not be asked after all: the request waits for another in the pool."""
        self.scheduler.put_back(request_id, self.now())
        self._pool_filled()

    def requeue(self, request_id: str, prefix: Sequence[int] = (), anew: bool = False) -> None:
        """The decode ended early, or the pinned KV was lost: the request queues for a prefill again. `prefix`, `anew`:
        as in `Scheduler.requeue`.
        """
        self._released(self.scheduler.requeue(request_id, self.now(), prefix, anew))
        if self.scheduler.config.decode_first:
            self._pooled(request_id)

    def finish(self, request_id: str, outcome: Outcome, reason: str = "", age_s: float = 0.0) -> None:
        """The request has left, `age_s` ago. Raises InvariantError when gone."""
        if self.forecasts is not None:
            tracker = self.scheduler.snapshot.requests.get(request_id)
            if tracker is not None:
                self.forecasts.finished(tracker, reason or outcome.value)
        self._released(self.scheduler.finish(request_id, outcome, self.now() - age_s))

    def adopt(self, standing: Standing) -> bool:
        """Take over a former brain's request in its state; False: it can't be continued, and is unknown here."""
        if not self.scheduler.adopt(standing, self.now()):
            return False
        if standing.phase is POOLED:
            self._pooled(standing.spec.id)
        self._prefill_capacity_changed()
        return True

    def order_by_arrival(self) -> None:
        """Order waiting requests of all relays by arrival, once all relays have reported."""
        self.scheduler.order_by_arrival(self.now())

    def _pooled(self, request_id: str) -> None:
        """Handle a request that has come into the pool; decode first, its size is an estimate."""
        self._forecast(self.scheduler.snapshot.requests[request_id])
        self._pool_filled()

    def _forecast(self, tracker: RequestTracker) -> None:
        """Give the scheduler the forecast of a request that waits in the pool."""
        expected = None if self.forecasts is None else self.forecasts.initial(tracker, tracker.prompt_tokens)
        if expected is not None:
            self.scheduler.refresh(tracker.id, expected, self.now())

    # -- decisions

    def dispatch(self) -> list[Prefill]:
        """Give queued requests to the prefillers that may take them; if many can, the dispatcher does the rest."""
        prefills = self.scheduler.dispatch(self.now(), MOST_PREFILLS)
        if len(prefills) == MOST_PREFILLS:
            self.prefill_event.set()
        for prefill in prefills:
            self.on_answer(prefill.request, prefill.worker)
        return prefills

    def settle(self) -> None:
        """Collect all new tokens. O(requests with new tokens)."""
        self.collect()

    def admit(self) -> list[Admit]:
        """One decision over the pool, with the predictor's present forecasts."""
        self.collect()
        scheduler, now = self.scheduler, self.now()
        if self.forecasts is not None:
            self.forecasts.renew(scheduler)
        self._stage_clock.begin()
        admissions = scheduler.admit(now)
        for admission in admissions:
            self.on_answer(admission.request, admission.worker)
        if admissions:
            self._prefill_capacity_changed()  # the pool has room again
        return admissions

    def expire(self, most: int | None = None) -> list[str]:
        """Refuse requests that have waited too long, at most so many (None: all); returns their ids."""
        now = self.now()
        if self.forecasts is not None:
            for tracker in self.scheduler.late(now)[:most]:  # tokens from before a requeue belong to a cut-off answer
                self.forecasts.finished(tracker, Outcome.EXPIRED.value)
        expired = self.scheduler.expire(now, most)
        for release in expired:
            where = "a decode slot" if release.phase is POOLED else "a prefiller"
            self.on_answer(release.request, Refusal(RefusalKind.EXPIRED, f"The request waited too long for {where}."))
            self._released(release)
        return [release.request for release in expired]

    # -- the whole

    @property
    def draining(self) -> bool:
        """Whether every new request is refused."""
        return self.scheduler.draining

    def drain(self) -> None:
        """Refuse new requests from now on; present ones are served."""
        self.scheduler.set_draining(True, self.now())

    @property
    def bounds(self) -> SchedulerConfig:
        """The bounds and times that hold now."""
        return self.scheduler.config

    def refits(self) -> Callable[[], Awaitable[None]] | None:
        """The coroutine that re-fits the present predictor; None: it needs none."""
        return None if self.forecasts is None else self.forecasts.runner(self.scheduler.snapshot)

    def close(self) -> None:
        """Write the rest of the journal."""
        if isinstance(self.scheduler, RecordingScheduler):
            self.scheduler.close()

    def configure(self, config: SchedulerConfig) -> None:
        """Use other bounds and times from now on; which workers share a barrier follows from their specs."""
        self.scheduler.configure(replace(config, shared_barrier=self._any_waits()), self.now())

    def _any_waits(self) -> bool:
        return any_waits(worker.spec.barrier_group for worker in self.scheduler.snapshot.workers)

    def _look_at_barrier(self) -> None:
        """A decode worker has come or gone: others may share its barrier, or nobody any more. O(workers)."""
        config = self.scheduler.config
        if config.shared_barrier is not self._any_waits():
            self.configure(config)

    def reroute(self, settings: PolicySettings, config: SchedulerConfig, forecasts: Forecasts | None) -> None:
        """Use another policy and predictor from now on: bound requests stay, waiting ones are decided anew."""
        self.settle()
        self.forecasts = forecasts
        self.configure(config)
        self.scheduler.reroute(settings, self.now())
        self._waits_for_slots = self.scheduler.policy.waits_for_slots
        for tracker in list(self.scheduler.snapshot.pool):
            self._forecast(tracker)
        self.capacity_changed()

    # -- workers

    def add_worker(self, spec: WorkerSpec) -> None:
        """A worker joins."""
        self.scheduler.add_worker(spec, self.now())
        if spec.role is Role.DECODE:
            self._look_at_barrier()
        self.capacity_changed()

    def remove_if_idle(self, worker_id: str, role: Role) -> bool:
        """A worker leaves, if it holds nothing; returns whether it did."""
        if self.adopts or (self.decoder(worker_id).active if role is Role.DECODE else self.prefiller(worker_id).held):
            return False
        self.scheduler.remove_worker(worker_id, self.now())
        if role is Role.DECODE:
            self._look_at_barrier()
        return True

    def set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        """Set a worker's state."""
        self.settle()
        self.scheduler.set_worker_state(worker_id, state, self.now())
        self.capacity_changed()

    def report_prefiller(self, worker_id: str, kv_usage: float | None) -> None:
        """A sample of a prefiller's KV usage; None: the prefiller does not report it."""
        self.scheduler.report_prefiller(worker_id, kv_usage, self.now())
        self._prefill_capacity_changed()

    def report_prefix_cache(
        self, worker_id: str, capacity_tokens: int | None, block_tokens: int, counters: tuple[float, float] | None
    ) -> None:
        """Take a prefiller's report on its prefix cache; passed on only if it is new.

        Args: capacity_tokens: 0: the cache is off; None: unknown. block_tokens: of its blocks. counters: tokens looked
        up and found so far; None: not reported.
        """
        now = self.now()
        if self.prefiller(worker_id).cache_known != (capacity_tokens, block_tokens):
            self.scheduler.report_prefix_cache(worker_id, capacity_tokens, now, block_tokens)
        if counters is not None:
            self.scheduler.report_prefix_hits(worker_id, *counters, now)

    def forget_prefixes(self, worker_id: str) -> None:
        """Empty the estimate of a prefiller's prefix cache."""
        self.scheduler.forget_prefixes(worker_id, self.now())

    def report_decoder(self, worker_id: str, foreign_requests: int, foreign_tokens: int, least_own_slots: int) -> None:
        """Take a decode worker's foreign load, and the slots that the router may use in spite of it; passed on only if
        new.
        """
        worker = self.scheduler.snapshot.worker(worker_id)
        before = worker.own_slots
        known = (worker.foreign_requests, worker.foreign_tokens, worker.least_own_slots)
        if known == (foreign_requests, foreign_tokens, least_own_slots):
            return
        self.scheduler.report_decoder(worker_id, foreign_requests, foreign_tokens, least_own_slots, self.now())
        if worker.own_slots > before or worker.kv_capacity_tokens:  # what waits for memory may fit now
            self._slots_changed()

    def report_decoder_memory(self, worker_id: str, capacity_tokens: int) -> None:
        """Take a decode worker's KV capacity, in tokens as its load counts them; passed on only if it is new."""
        known = self.scheduler.snapshot.worker(worker_id).kv_capacity_tokens
        if abs(capacity_tokens - known) * MEMORY_STEPS > known:
            self.scheduler.report_decoder_memory(worker_id, capacity_tokens, self.now())
            self._slots_changed()

    def report_tokens_per_step(self, worker_id: str, tokens_per_step: float) -> None:
        """Take a decode worker's mean tokens per request and step; passed on only if they are new."""
        known = self.scheduler.snapshot.worker(worker_id).tokens_per_step
        if abs(tokens_per_step - known) > PER_STEP_TOKENS:
            self.scheduler.report_tokens_per_step(worker_id, tokens_per_step, self.now())

    def show_report(self, worker_id: str, samples: dict[str, float]) -> None:
        """Keep a decode worker's report for /state and views."""
        self.scheduler.show_report(worker_id, samples)

    # -- queries

    def view(self) -> ClusterView:
        """A view of the cluster; call `settle` first if loads matter. O(workers)."""
        return view_cluster(self.scheduler.snapshot, self.scheduler.draining)

    def decoder(self, worker_id: str) -> DecoderView:
        """One decode worker. Raises: InvariantError: there is none of that id."""
        snapshot = self.scheduler.snapshot
        return view_decoder(snapshot, snapshot.worker(worker_id))

    def prefiller(self, worker_id: str) -> PrefillerView:
        """One prefiller. Raises: InvariantError: there is none of that id."""
        return view_prefiller(self.scheduler.snapshot.prefiller(worker_id))

    def state(self, settings: PolicySettings) -> dict[str, Any]:
        """The document of `/state`, JSON-ready, for `explain`. `settings`: the present ones.
        O(requests).
        """
        return state_to_dict(settings, self.scheduler.snapshot, self.now(), self.scheduler)

    def rows(self, *, running: bool) -> int:
        """The number of rows of `state`: workers, waiting requests and, with `running`, running ones. O(workers)."""
        snapshot = self.scheduler.snapshot
        return len(snapshot.workers) + (len(snapshot.requests) if running else len(snapshot.pool))

    # -- the events

    @property
    def decision_possible(self) -> bool:
        """Whether the policy could admit a request: a worker can take one, or the policy does not wait for slots."""
        return not self._waits_for_slots or self.scheduler.snapshot.has_room

    def _pool_filled(self) -> None:
        """A request has come into the pool."""
        if self.decision_possible:
            self.decision_due.set()

    def _prefill_capacity_changed(self) -> None:
        """Wake the prefill dispatcher: a prefiller may have new capacity."""
        if self.scheduler.snapshot.queued or self.scheduler.snapshot.asking:
            self.prefill_event.set()

    def capacity_changed(self) -> None:
        """Wake the dispatchers: a worker may have new capacity."""
        self._prefill_capacity_changed()
        self._slots_changed()

    def _released(self, release: Release) -> None:
        """Wake the dispatcher that waits for what a request held in the phase that it left."""
        self._prefill_capacity_changed()
        if release.phase is DECODING:
            self._slots_changed()

    def _slots_changed(self) -> None:
        if self.scheduler.snapshot.pool.size:
            self.decision_due.set()


def open_ledger(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    forecasts: Forecasts | None,
    stage_clock: StageClock,
    journal: Path | None,
) -> Ledger:
    """The ledger of a configuration, with all its workers; `close` it at the end. `journal`: a file for every call."""
    scheduler = build_scheduler(config, loop.time(), stage_clock, journal)
    return Ledger(scheduler, loop, forecasts, stage_clock)
