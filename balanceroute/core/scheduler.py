"""`Scheduler`: the only writer of the snapshot. Events come in with their time, actions go out; no clock, no I/O.

The live proxy, the step simulator and the replay of a journal drive the same object. A driver reports what happened
(`submit`, `prefilled`, `progress`, `finish`, ...) and asks for decisions (`dispatch`, `admit`, `expire`); whatever the
answer demands (send a probe, open a decode stream, drain pinned KV) is the driver's to do. Calls never await, so
between reading the state and acting on it nothing else happens.

    submit -> queued --dispatch--> prefilling --prefilled--> pooled --admit--> decoding --finish--> gone
                ^------- prefill_failed ---'                   ^--- put_back ------|
                '----------------------------- requeue ---------------------------'

Decode-first (layerwise connectors, `SchedulerConfig.decode_first`) turns the order round: the decode worker is chosen
with the estimated prompt size, allocates its blocks and asks for the KV, and only then a prefiller is.

    submit -> pooled --admit--> decoding [ request_prefill -> dispatch -> pushed | push_failed ] --finish--> gone
                 '------------- requeue -------------'

The request is decoding all the while, because it holds a slot and blocks there; the prefill in brackets holds a prefill
slot beside it and releases it by `pushed`, `push_failed`, `requeue` or `finish`, whichever comes first.

`finish` is legal in every phase and releases what that phase holds, once; a second one raises InvariantError.

Predictions enter as values: the driver asks `due_refreshes()` which requests need one (every `refresh_every_tokens`
generated tokens, and at once when c-hat would fall below 1) and passes the results to `refresh`, so a replay needs no
predictor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.prefill import choose_prefiller
from balanceroute.core.snapshot import ClusterSnapshot, DecodeInstanceState, PrefillerBudget, RequestTracker
from balanceroute.core.types import (
    Admit,
    Outcome,
    Phase,
    Prefill,
    Reject,
    RejectReason,
    Release,
    RequestSpec,
    WorkerSpec,
    WorkerState,
)
from balanceroute.errors import InvariantError

PATIENCE_SHARE = 0.75  # of the pool's TTL: the rest is for a slot to free and the transfer to begin


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds and cadences of the scheduler.

    Args:
        max_queued: arrivals that may wait for a prefiller; None for no bound.
        max_pooled: pool entries plus prefills under way; no further prefill is started beyond.
        pool_ttl_s: how long an entry may wait in the pool before it expires.
        queue_deadline_s: how long an arrival may wait for a prefiller before it expires.
        kv_usage_limit: KV usage (ratio) of a prefiller above which it gets no new probe.
        max_prefill_inflight: probes under way on one prefiller; None for no bound.
        refresh_every_tokens: dT, generated tokens between predictor refreshes (H/2); None without a predictor.
        decode_first: whether a decode worker is chosen before the prefill; `max_pooled` then refuses arrivals.
        lock_step: whether the driver steps the engine itself (`start`, `step`) instead of reporting `progress`.
    """

    max_queued: int | None = None
    max_pooled: int | None = None
    pool_ttl_s: float = math.inf
    queue_deadline_s: float = math.inf
    kv_usage_limit: float = 0.9
    max_prefill_inflight: int | None = None
    refresh_every_tokens: int | None = None
    lock_step: bool = False
    decode_first: bool = False


class Scheduler:
    """Keeps the snapshot of one cluster and lets a policy decide on it."""

    def __init__(self, policy: AdmissionPolicy, config: SchedulerConfig | None = None) -> None:
        self.policy = policy
        self.config = config or SchedulerConfig()
        self.snapshot = ClusterSnapshot(policy.horizon_steps)
        self.draining = False
        self._arrivals = 0
        self._dispatches = 0
        self._steps = 0
        self._prefilling = 0
        self._queue: list[tuple[int, int, RequestTracker]] = []
        self._due: list[RequestTracker] = []
        self._refresh_at_step: list[tuple[int, int, float, RequestTracker]] = []

    def configure(self, config: SchedulerConfig, now: float) -> None:
        """Other bounds and times from now on."""
        self.config = config

    # -- workers ----------------------------------------------------------------------------------------------

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        """A worker joins, up. Raises InvariantError when its id is taken."""
        self.snapshot.add_worker(spec)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """An empty worker leaves. Raises InvariantError while it holds anything: drain it first."""
        self.snapshot.remove_worker(worker_id)

    def set_worker_state(self, worker_id: str, state: WorkerState, now: float) -> None:
        """Health or an operator says what the worker may do; its requests stay where they are."""
        for worker in self.snapshot.workers:
            if worker.spec.id == worker_id:
                worker.state = state
                return
        self.snapshot.prefiller(worker_id).state = state

    def report_prefiller(self, worker_id: str, kv_usage: float, now: float) -> None:
        """A fresh sample of a prefiller's KV usage (ratio); 1.0 when the scrape failed."""
        self.snapshot.prefiller(worker_id).kv_usage = kv_usage

    # -- prefill ----------------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec, now: float) -> Reject | None:
        """A client request arrives and queues for a prefiller (decode-first: in the pool), or is refused."""
        reason = self._refusal()
        if reason is not None:
            return Reject(spec.id, reason)
        tracker = self._register(spec, now)
        if self.config.decode_first:
            self._pool(tracker, spec.prompt_tokens, now, None)
        else:
            self._enqueue(tracker)
        return None

    def submit_prefilled(self, spec: RequestSpec, now: float, expected_remaining: float | None = None) -> None:
        """A request arrives whose prefill somebody else has done: straight into the pool."""
        self._pool(self._register(spec, now), spec.prompt_tokens, now, expected_remaining)

    def dispatch(self, now: float) -> list[Prefill]:
        """Assign queued requests to prefillers, in order, while one may take more and the pool has room.

        Requests whose decode worker asks for the KV go first, and whatever the pool holds.
        """
        prefills: list[Prefill] = []
        bound = math.inf if self.config.max_pooled is None else self.config.max_pooled
        for tracker in list(self.snapshot.asking.values()):
            prefiller = self._choose_prefiller()
            if prefiller is None:
                return prefills
            del self.snapshot.asking[tracker.id]
            tracker.pushing = True
            self.snapshot.pushing_tokens += tracker.prompt_tokens
            prefills.append(self._begin_prefill(tracker, prefiller))
        while self._queue and self._prefilling + len(self.snapshot.pool) < bound:
            tracker = self._queue[0][2]
            if tracker.phase is not Phase.QUEUED:
                heappop(self._queue)
                continue
            prefiller = self._choose_prefiller()
            if prefiller is None:
                break
            heappop(self._queue)
            del self.snapshot.queued[tracker.id]
            tracker.phase = Phase.PREFILLING
            self._prefilling += 1
            prefills.append(self._begin_prefill(tracker, prefiller))
        return prefills

    def prefilled(
        self, request_id: str, prompt_tokens: int, now: float, expected_remaining: float | None = None
    ) -> None:
        """The probe was answered: the exact prompt size is known, the KV is pinned, the request waits for a slot."""
        tracker = self._find(request_id, Phase.PREFILLING)
        prefiller = tracker.prefiller
        assert prefiller is not None
        self._end_prefill(tracker)
        prefiller.pinned += 1
        prefiller.pinned_tokens += prompt_tokens
        tracker.prefiller, tracker.pinned_tokens = prefiller, prompt_tokens
        self._pool(tracker, prompt_tokens, now, expected_remaining)

    def prefill_failed(self, request_id: str, now: float) -> None:
        """The probe failed without pinning anything: the request queues again in its old place."""
        tracker = self._find(request_id, Phase.PREFILLING)
        self._end_prefill(tracker)
        self._enqueue(tracker)

    # -- decode first -----------------------------------------------------------------------------------------

    def request_prefill(self, request_id: str, now: float) -> None:
        """The decode worker has room for the request and asks for its KV: it waits for a prefiller."""
        tracker = self._find(request_id, Phase.DECODING)
        if tracker.pushing or request_id in self.snapshot.asking:
            raise InvariantError(f"{request_id} has a prefill already")
        self.snapshot.asking[request_id] = tracker

    def pushed(self, request_id: str, prompt_tokens: int, now: float) -> None:
        """The prefiller has written the KV to the decode worker: the exact prompt size is known."""
        tracker = self._find_pushing(request_id)
        self._end_push(tracker)
        worker = self._worker_of(tracker)
        self._project(tracker, worker, -1)
        worker.load += prompt_tokens - tracker.prompt_tokens
        tracker.prompt_tokens = prompt_tokens
        self._project(tracker, worker, 1)

    def push_failed(self, request_id: str, now: float) -> None:
        """The prefiller has not seen the request, so that another may: it waits for a prefiller again."""
        tracker = self._find_pushing(request_id)
        self._end_push(tracker)
        self.snapshot.asking[request_id] = tracker

    # -- decode -----------------------------------------------------------------------------------------------

    def admit(self, now: float) -> list[Admit]:
        """Let the policy bind waiting requests to decode workers, and charge each at once."""
        admissions: list[Admit] = []
        for choice in self.policy.decide(self.snapshot, now):
            self._bind(choice, now)
            admissions.append(Admit(choice.request.id, choice.worker.spec.id, choice.stage, choice.score))
        return admissions

    def recheck_s(self, now: float) -> float:
        """When to call `admit` again even if nothing happens until then; infinite for all policies but one that holds.

        `target_fit` in slack may hold a request back beside a free slot, for `hold_s`; a driver without steps of its
        own must then ask again at this time.
        """
        return self.policy.recheck_s(self.snapshot, now)

    def start(self, request_id: str, now: float) -> None:
        """Lock-step drivers: the engine runs the request from its next step on; its KV has left the prefiller."""
        tracker = self._find(request_id, Phase.DECODING)
        worker = self._worker_of(tracker)
        if tracker.running:
            raise InvariantError(f"{request_id} runs already")
        self._project(tracker, worker, -1)
        tracker.running, tracker.joined_step = True, worker.steps
        worker.running += 1
        self._project(tracker, worker, 1)
        self._schedule_refresh(tracker)
        self._unpin(tracker)

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """The request has generated `tokens` more. The relay's path: O(1), whatever is active."""
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase is not Phase.DECODING:
            raise InvariantError(f"{request_id} is not decoding")
        worker = tracker.worker
        assert worker is not None
        snapshot = self.snapshot
        if tracker.refreshed_remaining >= snapshot.horizon_steps:
            snapshot.projection.grow(worker.index, tokens)
        else:
            generated = tracker.generated
            before = tracker.refreshed_remaining + tracker.refreshed_at - generated
            after = before - tokens
            least = 1 if tracker.refreshed_remaining > 0.0 else 0
            snapshot.projection.move(
                worker.index,
                tracker.prompt_tokens + generated,
                tokens,
                int(before) if before > 1.0 else least,
                int(after) if after > 1.0 else least,
            )
        tracker.counted += tokens
        worker.load += tokens
        if tracker.prefiller is not None:
            self._unpin(tracker)
        if tracker.counted >= tracker.refresh_due_at:
            tracker.refresh_due_at = math.inf
            self._due.append(tracker)

    def step(self, now: float) -> None:
        """Lock-step drivers: every running request on every worker has generated one token. O(G*H)."""
        self._steps += 1
        for worker in self.snapshot.workers:
            worker.steps += 1
            worker.load += worker.running
        self.snapshot.projection.step()
        due = self._refresh_at_step
        while due and due[0][0] <= self._steps:
            _, _, due_at, tracker = heappop(due)
            if tracker.phase is Phase.DECODING and tracker.refresh_due_at == due_at:
                tracker.refresh_due_at = math.inf
                self._due.append(tracker)

    def due_refreshes(self) -> list[RequestTracker]:
        """Requests whose prediction is to be renewed now; each is handed out once per due date."""
        if not self._due:
            return []
        due, self._due = self._due, []
        return [tracker for tracker in due if tracker.phase is Phase.DECODING]

    def refresh(self, request_id: str, expected_remaining: float, now: float) -> None:
        """A renewed c-hat (composite, gated, clipped to [0, H]) for a decoding (decode-first: or pooled) request."""
        pooled = self.snapshot.requests.get(request_id)
        if pooled is not None and pooled.phase is Phase.POOLED:
            pooled.refreshed_remaining = expected_remaining
            return
        tracker = self._find(request_id, Phase.DECODING)
        worker = self._worker_of(tracker)
        self._project(tracker, worker, -1)
        tracker.refreshed_remaining, tracker.refreshed_at = expected_remaining, tracker.generated
        self._project(tracker, worker, 1)
        self._schedule_refresh(tracker)

    def put_back(self, request_id: str, now: float) -> None:
        """The worker of its admission was not asked after all: it waits in the pool again, in its old place.

        Its KV is still pinned, and has been since it became ready, so nothing of its patience or time to live is new.
        """
        tracker = self._find(request_id, Phase.DECODING)
        unasked = not tracker.generated and not tracker.pushing and request_id not in self.snapshot.asking
        if not unasked or (tracker.prefiller is None) != self.config.decode_first:
            raise InvariantError(f"{request_id} was sent to its worker already")
        self._unbind(tracker)
        tracker.phase = Phase.POOLED
        self.snapshot.pool.add(tracker)

    def requeue(self, request_id: str, now: float) -> Release:
        """The decode ended without finishing (recompute, worker lost): prefill again, with what was generated so far.

        Legal while pooled too, when the pinned KV is known to be lost. The Release says what is left to be drained.
        Decode-first it waits in the pool again.
        """
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase not in (Phase.DECODING, Phase.POOLED):
            raise InvariantError(f"{request_id} is neither decoding nor pooled")
        phase, pinned_at = tracker.phase, self._let_go(tracker)
        tracker.prompt_tokens += tracker.counted
        tracker.earlier_tokens += tracker.counted
        tracker.counted = 0
        tracker.requeues += 1
        if self.config.decode_first:
            self._pool(tracker, tracker.prompt_tokens, now, None)
        else:
            self._enqueue(tracker)
        return Release(request_id, None, phase, pinned_at)

    # -- leaving ----------------------------------------------------------------------------------------------

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Release:
        """The request leaves, from whatever phase; everything it held is released."""
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None:
            raise InvariantError(f"{request_id} is not here: released twice, or never submitted")
        phase, pinned_at = tracker.phase, self._let_go(tracker)
        tracker.phase = Phase.GONE
        del self.snapshot.requests[request_id]
        return Release(request_id, outcome, phase, pinned_at)

    def expire(self, now: float) -> list[Release]:
        """End pool entries past their TTL and arrivals past their queue deadline.

        A requeued request is no arrival: its client may have half of its answer, and its own deadline ends it.
        """
        return [self.finish(tracker.id, Outcome.EXPIRED, now) for tracker in self.late(now)]

    def late(self, now: float) -> list[RequestTracker]:
        """Whom `expire` would end now, in its order: a driver has something to learn from them before they go."""
        pool_limit, queue_limit = now - self.config.pool_ttl_s, now - self.config.queue_deadline_s
        late = [tracker for tracker in self.snapshot.pool if tracker.ready_s < pool_limit]
        late += [t for t in self.snapshot.queued.values() if t.arrived_s < queue_limit and not t.requeues]
        return late

    # -- the moves between phases -----------------------------------------------------------------------------

    def _refusal(self) -> RejectReason | None:
        if self.draining:
            return RejectReason.DRAINING
        snapshot = self.snapshot
        if _all_down(snapshot.prefillers) or _all_down(snapshot.workers):
            return RejectReason.NO_WORKERS
        if self.config.max_queued is not None and len(snapshot.queued) >= self.config.max_queued:
            return RejectReason.QUEUE_FULL
        bound = self.config.max_pooled if self.config.decode_first else None
        if bound is not None and len(snapshot.pool) >= bound:
            return RejectReason.QUEUE_FULL
        return None

    def _register(self, spec: RequestSpec, now: float) -> RequestTracker:
        if spec.id in self.snapshot.requests:
            raise InvariantError(f"{spec.id} is here already")
        self._arrivals += 1
        tracker = RequestTracker(
            id=spec.id,
            prompt_tokens=spec.prompt_tokens,
            order=self._arrivals,
            priority=spec.priority,
            prompt_key=spec.prompt_key,
            max_new_tokens=spec.max_new_tokens,
            arrived_s=now,
        )
        self.snapshot.requests[spec.id] = tracker
        return tracker

    def _enqueue(self, tracker: RequestTracker) -> None:
        tracker.phase = Phase.QUEUED
        self.snapshot.queued[tracker.id] = tracker
        heappush(self._queue, (tracker.priority, tracker.order, tracker))

    def _choose_prefiller(self) -> PrefillerBudget | None:
        config = self.config
        return choose_prefiller(self.snapshot.prefillers, config.kv_usage_limit, config.max_prefill_inflight)

    def _begin_prefill(self, tracker: RequestTracker, prefiller: PrefillerBudget) -> Prefill:
        self._dispatches += 1
        tracker.prefiller, tracker.pinned_tokens = prefiller, tracker.prompt_tokens
        prefiller.inflight += 1
        prefiller.inflight_tokens += tracker.prompt_tokens
        prefiller.last_used = self._dispatches
        return Prefill(tracker.id, prefiller.spec.id)

    def _free_prefiller(self, tracker: RequestTracker) -> None:
        prefiller = tracker.prefiller
        assert prefiller is not None
        prefiller.inflight -= 1
        prefiller.inflight_tokens -= tracker.pinned_tokens
        tracker.prefiller, tracker.pinned_tokens = None, 0

    def _end_prefill(self, tracker: RequestTracker) -> None:
        self._free_prefiller(tracker)
        self._prefilling -= 1

    def _end_push(self, tracker: RequestTracker) -> None:
        self.snapshot.pushing_tokens -= tracker.pinned_tokens
        tracker.pushing = False
        self._free_prefiller(tracker)

    def _pool(self, tracker: RequestTracker, prompt_tokens: int, now: float, expected_remaining: float | None) -> None:
        snapshot = self.snapshot
        tracker.phase, tracker.prompt_tokens, tracker.ready_s = Phase.POOLED, prompt_tokens, now
        tracker.refreshed_remaining = math.inf if expected_remaining is None else expected_remaining
        tracker.refreshed_at = 0
        snapshot.means.see_prompt(prompt_tokens)
        patience_s = self.policy.patience_s(prompt_tokens, snapshot)
        if patience_s < math.inf:  # a large prompt's longer patience must not outlast its pinned KV
            patience_s = min(patience_s, PATIENCE_SHARE * self.config.pool_ttl_s)
        tracker.overdue_s = now + patience_s
        snapshot.pool.add(tracker)

    def _bind(self, choice: Choice, now: float) -> None:
        tracker, worker = choice.request, choice.worker
        self.snapshot.pool.remove(tracker)
        self.snapshot.means.see_wait(now - tracker.ready_s)
        tracker.phase, tracker.worker, tracker.admitted_s = Phase.DECODING, worker, now
        tracker.counted, tracker.joined_step = 0, worker.steps
        tracker.running = not self.config.lock_step
        worker.active[tracker.id] = tracker
        worker.load += tracker.prompt_tokens
        worker.running += tracker.running
        self._project(tracker, worker, 1)
        if tracker.running:
            self._schedule_refresh(tracker)

    def _let_go(self, tracker: RequestTracker) -> str | None:
        """Release whatever the tracker's phase holds; the prefiller whose pinned KV must be drained, if any."""
        if tracker.phase is Phase.QUEUED:
            del self.snapshot.queued[tracker.id]
        elif tracker.phase is Phase.PREFILLING:
            self._end_prefill(tracker)
        elif tracker.phase is Phase.POOLED:
            self.snapshot.pool.remove(tracker)
        elif tracker.phase is Phase.DECODING:
            self.snapshot.asking.pop(tracker.id, None)
            if tracker.pushing:
                self._end_push(tracker)
            self._unbind(tracker)
        pinned_at = tracker.prefiller.spec.id if tracker.prefiller is not None else None
        self._unpin(tracker)
        return pinned_at

    def _unbind(self, tracker: RequestTracker) -> None:
        worker = self._worker_of(tracker)
        self._project(tracker, worker, -1)
        tracker.counted = generated = tracker.generated
        worker.load -= tracker.prompt_tokens + generated
        worker.running -= tracker.running
        del worker.active[tracker.id]
        tracker.running, tracker.worker, tracker.refresh_due_at = False, None, math.inf

    def _unpin(self, tracker: RequestTracker) -> None:
        prefiller = tracker.prefiller
        if prefiller is not None and not tracker.pushing:
            prefiller.pinned -= 1
            prefiller.pinned_tokens -= tracker.pinned_tokens
            tracker.prefiller, tracker.pinned_tokens = None, 0

    def _project(self, tracker: RequestTracker, worker: DecodeInstanceState, sign: int) -> None:
        remaining = tracker.remaining(self.snapshot.horizon_steps)
        change = self.snapshot.projection.add if sign > 0 else self.snapshot.projection.remove
        change(worker.index, tracker.prompt_tokens + tracker.generated, remaining, tracker.running)

    def _schedule_refresh(self, tracker: RequestTracker) -> None:
        every = self.config.refresh_every_tokens
        if every is None:
            return
        generated = tracker.generated
        ahead = float(every)
        if tracker.refreshed_remaining < self.snapshot.horizon_steps:
            # c-hat falls to its floor of 1 after c-1 tokens: that is when it is renewed, if not before
            ahead = min(ahead, max(1.0, math.ceil(tracker.refreshed_remaining - 1.0)))
        elif tracker.max_new_tokens is not None:
            # fewer than H tokens from the client's limit it is certain to leave within the window: no anchor any more
            until_certain = tracker.max_new_tokens - tracker.age_tokens - self.snapshot.horizon_steps + 1
            ahead = min(ahead, until_certain) if until_certain > 0 else ahead
        tracker.refresh_due_at = generated + ahead
        if self.config.lock_step:
            heappush(
                self._refresh_at_step,
                (self._steps + int(ahead), tracker.order, tracker.refresh_due_at, tracker),
            )

    def _worker_of(self, tracker: RequestTracker) -> DecodeInstanceState:
        if tracker.worker is None:
            raise InvariantError(f"{tracker.id} has no decode worker")
        return tracker.worker

    def _find_pushing(self, request_id: str) -> RequestTracker:
        tracker = self._find(request_id, Phase.DECODING)
        if not tracker.pushing:
            raise InvariantError(f"{request_id} is not being prefilled for its decode worker")
        return tracker

    def _find(self, request_id: str, phase: Phase) -> RequestTracker:
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase is not phase:
            found = "not here" if tracker is None else tracker.phase.value
            raise InvariantError(f"{request_id} is {found}, expected {phase.value}")
        return tracker


def _all_down(members: Sequence[PrefillerBudget | DecodeInstanceState]) -> bool:
    for member in members:
        if member.state is not WorkerState.DOWN:
            return False
    return True
