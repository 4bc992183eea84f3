"""`Scheduler`: the only writer of the snapshot. Events come in with their time, actions go out; no clock, no I/O.

The live proxy, the step simulator and the rerun of a journal drive the same object. A driver reports what happened
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

A request with a limit of 0 tokens needs no decode worker: in either order it queues, prefills and finishes.

A call in the wrong phase raises InvariantError (INV-10). `finish` is legal in every phase and releases what that phase
holds, once; a second one raises InvariantError, too.

The scheduler moves requests between phases. What a request holds and gives back with a move belongs to others: prefill
slots to `PrefillDispatch`, which also chooses the prefillers; pinned KV to `PrefillerBudget`; decode slots and loads to
`ClusterSnapshot`. The policy chooses the decode workers.

Lower priority classes go first wherever requests wait: for a prefiller (`PrefillQueue`, and requests that ask for one)
and for a slot (`PromptPool`). `Promotion` bounds how long one class keeps another waiting.

Predictions enter as values: the driver asks `due_refreshes()` which requests need one (`RefreshSchedule`) and passes
the results to `refresh`, so a rerun needs no predictor.
"""

import math
from collections.abc import Sequence
from operator import attrgetter

from mypy_extensions import mypyc_attr

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import AdmissionPolicy, Choice, StageTimer
from balanceroute.core.prefill_dispatch import PrefillDispatch
from balanceroute.core.promotion import PATIENCE_SHARE, Promotion
from balanceroute.core.refresh_schedule import RefreshSchedule
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot, free_slots
from balanceroute.core.tracker import (
    DecodeInstanceState,
    PrefillerBudget,
    RequestTracker,
    prefiller_of,
    unpin,
    worker_of,
)
from balanceroute.core.types import (
    DECODING,
    DOWN,
    GONE,
    POOLED,
    PREFILLING,
    QUEUED,
    Admit,
    Outcome,
    Phase,
    Prefill,
    Reject,
    RejectReason,
    Release,
    RequestSpec,
    Standing,
    WorkerSpec,
    WorkerState,
)
from balanceroute.errors import InvariantError


@mypyc_attr(allow_interpreted_subclasses=True)  # the journal's
class Scheduler:
    """Keeps the snapshot of one cluster and lets a policy decide on it."""

    def __init__(
        self, policy: AdmissionPolicy, config: SchedulerConfig | None = None, stage_timer: StageTimer | None = None
    ) -> None:
        """`stage_timer`: the one that `policy` was made with; `reroute` makes later policies with it.

        Raises: InputError: a bound makes no sense.
        """
        self.policy = policy
        self.config = (config or SchedulerConfig()).checked()
        self.prefills = PrefillDispatch(self.config)
        self._stage_timer = stage_timer
        self.snapshot = ClusterSnapshot(policy.horizon_steps)
        self._refreshes = RefreshSchedule()
        self._hand_out_bounds()
        self.draining = False
        self._arrivals = 0
        self._promotion = Promotion()
        self._has_admitted = False

    def configure(self, config: SchedulerConfig, now: float) -> None:
        """Apply another configuration from now on. Raises: InputError: a bound makes no sense; nothing has changed."""
        config.checked()
        if config.prefill_policy != self.config.prefill_policy:
            for prefiller in self.snapshot.prefillers:
                prefiller.cache.clear()  # under a policy without prefixes nothing is recorded of sent prompts
            self.snapshot.shared_prefixes.clear()
        self.config = config
        self._hand_out_bounds()
        self._size_overlap()
        self.prefills.configure(config)
        self._shorten_patience()

    def _shorten_patience(self) -> None:
        """Let nobody be patient past a time to live in the pool that has become shorter."""
        snapshot = self.snapshot
        for tracker in [*snapshot.pool, *snapshot.decoding()]:  # of these some may be put back
            latest_s = tracker.ready_s + snapshot.longest_wait_s
            if not latest_s < tracker.overdue_s < math.inf:
                continue
            waits = tracker.phase is POOLED
            if waits:
                snapshot.pool.remove(tracker)
            tracker.overdue_s = latest_s
            if waits:
                snapshot.pool.add(tracker)

    def _hand_out_bounds(self) -> None:
        """Give the snapshot and the schedule the bounds that they apply."""
        self.snapshot.longest_wait_s = PATIENCE_SHARE * self.config.pool_ttl_s
        self.snapshot.max_pooled = math.inf if self.config.max_pooled is None else self.config.max_pooled
        self.snapshot.shared_barrier = self.config.shared_barrier
        self._refreshes.configure(self.config.refresh_every_tokens, self.config.lock_step)

    def set_draining(self, draining: bool, now: float) -> None:
        """Refuse every new request from now on, or no longer; those that are here are served."""
        self.draining = draining

    def reroute(self, settings: PolicySettings, now: float) -> None:
        """Use another policy from now on. Requests that are bound stay where they are; the new policy decides the rest.

        Only the snapshot is kept. Patience counts anew from when a request became ready, and loads are projected over
        the new horizon. c-hat counts within a horizon, so it is forgotten: each request counts as staying until its
        forecast is renewed. That is due at once; for waiting requests it is the driver's to do.
        """
        self.policy = make_policy(settings, self._stage_timer)
        snapshot = self.snapshot
        for tracker in snapshot.requests.values():
            tracker.refreshed_remaining, tracker.refreshed_at, tracker.refresh_due_at = math.inf, 0, math.inf
        snapshot.set_horizon(self.policy.horizon_steps)
        for tracker in list(snapshot.pool):
            snapshot.pool.remove(tracker)
            self._wait(tracker)
        self._refreshes.restart([tracker for tracker in snapshot.decoding() if tracker.running])
        for tracker in snapshot.decoding():
            if not tracker.generated:  # it may be put back
                self._set_patience(tracker)

    # -- workers ----------------------------------------------------------------------------------------------

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        """A worker joins, up. Raises: InvariantError: its id is taken. InputError: a value makes no sense."""
        self.snapshot.add_worker(spec.checked())
        worker = self.snapshot.find_worker(spec.id)
        if worker is not None:  # a driver that asks `has_room` must see its places ahead before the first decision
            worker.ahead = self.places_ahead(worker)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """An empty worker leaves. Raises InvariantError while it holds anything: drain it first."""
        self.snapshot.remove_worker(worker_id)

    def set_worker_state(self, worker_id: str, state: WorkerState | str, now: float) -> None:
        """Set a worker's state, by health or an operator; its requests stay. Raises: ValueError: it is none."""
        state = WorkerState(state)  # its text is as good
        worker = self.snapshot.find_worker(worker_id)
        if worker is not None:
            self.snapshot.set_state(worker, state)
            return
        prefiller = self.snapshot.find_prefiller(worker_id)
        if prefiller is None:
            raise InvariantError(f"no worker {worker_id}")
        prefiller.state = state
        if state is DOWN:
            prefiller.cache.clear()  # it may come back with an empty cache

    def report_prefiller(self, worker_id: str, kv_usage: float | None, now: float) -> None:
        """A fresh sample of a prefiller's KV usage (ratio): 1.0 when it can't be reached, None when it doesn't tell."""
        self.snapshot.prefiller(worker_id).kv_usage = kv_usage

    def report_prefix_cache(
        self, worker_id: str, capacity_tokens: int | None, now: float, engine_block_tokens: int = 0
    ) -> None:
        """How many tokens a prefiller's prefix cache holds: 0 where it is off, None where that is not known.

        `engine_block_tokens`: of one of its blocks, less than which it never caches; 0 where that is not known.
        """
        cache = self.snapshot.prefiller(worker_id).cache
        cache.engine_block_tokens = engine_block_tokens
        cache.resize(capacity_tokens)

    def report_prefix_hits(self, worker_id: str, queried_tokens: float, hit_tokens: float, now: float) -> None:
        """A prefiller's own counters of what it looked up in its prefix cache, and found there."""
        self.snapshot.prefiller(worker_id).count_hits(queried_tokens, hit_tokens)

    def forget_prefixes(self, worker_id: str, now: float) -> None:
        """A prefiller's prefix cache is empty: it was reset, or restarted."""
        self.snapshot.prefiller(worker_id).cache.clear()

    def report_decoder(
        self, worker_id: str, foreign_requests: int, foreign_tokens: int, least_own_slots: int, now: float
    ) -> None:
        """Set a decode worker's foreign load: it takes slots, and counts as load in decisions.

        The router may use `least_own_slots` in any case, so that foreign requests can't shut it out.
        """
        self.snapshot.worker(worker_id).set_foreign(foreign_requests, foreign_tokens, least_own_slots)

    def report_decoder_memory(self, worker_id: str, capacity_tokens: int, now: float) -> None:
        """Set a decode worker's KV capacity, in tokens as its load counts them; 0: unknown."""
        self.snapshot.worker(worker_id).kv_capacity_tokens = capacity_tokens

    def report_tokens_per_step(self, worker_id: str, tokens_per_step: float, now: float) -> None:
        """Set a decode worker's mean tokens per request and step; with speculative decoding more than 1.

        With it a step's time is told from the time between tokens (`core.overlap`).
        """
        self.snapshot.worker(worker_id).tokens_per_step = tokens_per_step

    def show_report(self, worker_id: str, samples: dict[str, float]) -> None:
        """Keep a decode worker's own report, shown beside the ledger; no decision reads it."""
        self.snapshot.worker(worker_id).reported = samples

    # -- prefill ----------------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec, now: float) -> Reject | None:
        """A client request arrives and queues for a prefiller (decode-first: in the pool), or is refused.

        Raises: InvariantError: its id is taken. InputError: a value makes no sense.
        """
        reason = self._refusal(spec)
        if reason is not None:
            return Reject(spec.id, reason)
        self._begin(self._register(spec, now), now)
        return None

    def submit_prefilled(self, spec: RequestSpec, now: float, expected_remaining: float | None = None) -> None:
        """Submit a request that is prefilled already: it goes straight into the pool. Raises: as `submit`."""
        self._pool(self._register(spec, now), now, expected_remaining)

    def dispatch(self, now: float, most: int | None = None) -> list[Prefill]:
        """Assign queued requests to prefillers, in order, while one may take more and the pool has room.

        Requests whose decode worker asks for the KV go first, and whatever the pool holds. `most`: of requests in this
        call, as each takes time in proportion to its prefix; None for all.
        """
        return self.prefills.dispatch(self.snapshot, now, most)

    def prefilled(
        self,
        request_id: str,
        prompt_tokens: int,
        now: float,
        expected_remaining: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """The probe was answered: the exact prompt size is known, the KV is pinned, the request waits for a slot.

        `cached_tokens`: how many of the prompt's tokens the prefiller had cached; None where it doesn't say.
        """
        tracker = self._find(request_id, PREFILLING)
        prefiller = self.prefills.done(tracker, prompt_tokens, cached_tokens, self.snapshot, now)
        tracker.prompt_tokens = prompt_tokens
        prefiller.pin(tracker)
        self._pool(tracker, now, expected_remaining)

    def prefill_failed(self, request_id: str, now: float) -> None:
        """The probe failed without pinning anything: the request queues again in its old place."""
        tracker = self._find(request_id, PREFILLING)
        self.prefills.failed(tracker, self.snapshot, now)
        self.prefills.enqueue(tracker, self.snapshot)

    # -- decode first -----------------------------------------------------------------------------------------

    def request_prefill(self, request_id: str, now: float) -> None:
        """The decode worker has room for the request and asks for its KV: it waits for a prefiller."""
        tracker = self._find(request_id, DECODING)
        if tracker.prefiller is not None or request_id in self.snapshot.asking:
            raise InvariantError(f"{request_id} has a prefill already")
        self.snapshot.asking[request_id] = tracker

    def pushed(self, request_id: str, prompt_tokens: int, now: float, cached_tokens: int | None = None) -> None:
        """The prefiller has written the KV to the decode worker: the exact prompt size is known."""
        tracker = self._find_pushing(request_id)
        self.prefills.done(tracker, prompt_tokens, cached_tokens, self.snapshot, now)
        self.snapshot.resize(tracker, prompt_tokens)

    def push_failed(self, request_id: str, now: float) -> None:
        """The prefiller has not seen the request, so that another may: it waits for a prefiller again."""
        tracker = self._find_pushing(request_id)
        self.prefills.failed(tracker, self.snapshot, now)
        self.snapshot.asking[request_id] = tracker

    # -- decode -----------------------------------------------------------------------------------------------

    def admit(self, now: float) -> list[Admit]:
        """Let the policy bind waiting requests to decode workers, and charge each at once.

        Raises: whatever a user's own policy raises; then nobody is admitted.
        """
        self._promotion.promote(self.snapshot, now)
        admissions: list[Admit] = []
        try:
            self._decide(now, admissions, sent_ahead=False)
            if self.config.overlap_requests != 0 and self.policy.waits_for_slots and self.snapshot.pool.size:
                self._send_ahead(now, admissions)
        except BaseException:  # it may also call `sys.exit`
            for admission in admissions:  # the driver gets none of these admissions
                self._return_to_pool(self._find(admission.request, DECODING))
            raise
        self._promotion.count_admissions(len(admissions))
        return admissions

    def _decide(self, now: float, admissions: list[Admit], *, sent_ahead: bool) -> None:
        workers, waits = self.snapshot.workers, self.policy.waits_for_slots
        for choice in self.policy.decide(self.snapshot, now):
            worker = choice.worker
            if worker.index >= len(workers) or workers[worker.index] is not worker:
                raise InvariantError(f"{self.policy.name} chose {worker.spec.id}, which is no worker of the snapshot")
            if waits and not worker.free_slots:
                raise InvariantError(f"{self.policy.name} chose {worker.spec.id}, which has no free slot")
            score = float(choice.score)  # as numpy has it, it could not be written to the journal
            choice.request.sent_ahead = sent_ahead
            self._bind(choice, now)
            admissions.append(Admit(choice.request.id, worker.spec.id, choice.stage, score))

    def _send_ahead(self, now: float, admissions: list[Admit]) -> None:
        """Let the policy choose for slots that are still to come, once it has filled those that are free.

        It sees every full worker with m slots more. The loads that it sees count what runs and what was sent ahead.
        Before the next request starts, every worker has as many departures; so the differences between these loads will
        last. A slower worker whose slots it leaves free, though requests wait, gets none here either. Where a fast one
        keeps slots free, memory is short, and nothing is sent ahead.
        """
        self._size_overlap()
        snapshot = self.snapshot
        if not snapshot.has_room or self._may_fill_slots():
            return
        own_slots = [worker.own_slots for worker in snapshot.workers]
        for worker in snapshot.workers:
            worker.own_slots = len(worker.active) if worker.free_slots else worker.own_slots + worker.ahead
        try:
            self._decide(now, admissions, sent_ahead=True)
        finally:
            for worker, slots in zip(snapshot.workers, own_slots, strict=True):
                worker.own_slots = slots

    def _may_fill_slots(self) -> bool:
        """Whether a free slot may yet be filled: any but those that the policy leaves free on slower workers.

        O(G); O(G log G) where workers differ.
        """
        snapshot = self.snapshot
        of_policy = getattr(self.policy, "fillable", None)  # a user's own may lack it
        free = of_policy(snapshot) if of_policy else snapshot.open_workers()
        if not free:
            return False
        fastest = min([worker.spec.slowdown for worker in snapshot.up])
        return snapshot.pool.size <= free_slots(free) or fastest in [worker.spec.slowdown for worker in free]

    def _size_overlap(self) -> None:
        """Set how many requests each decode worker may be sent ahead of its slots. O(G)."""
        for worker in self.snapshot.workers:
            worker.ahead = self.places_ahead(worker)

    def places_ahead(self, worker: DecodeInstanceState) -> int:
        """How many requests a decision that is taken now may send to a worker ahead of its slots."""
        return self.snapshot.places_ahead(worker, self.config.overlap_requests)

    def due_promotion(self, now: float) -> RequestTracker | None:
        """The request that joins the front class with a decision that is taken now; None: nobody."""
        return self._promotion.due(self.snapshot, now)

    def recheck_s(self, now: float) -> float:
        """When to call `admit` again even if nothing happens until then; infinite where nothing is held back.

        `target_fit` and `level_fit` may hold a request back beside a free slot. A driver without steps of its own must
        ask again by this time.
        """
        return self.policy.recheck_s(self.snapshot, now)

    def start(self, request_id: str, now: float) -> None:
        """Lock-step drivers: the engine runs the request from its next step on; its KV has left the prefiller."""
        tracker = self._find(request_id, DECODING)
        if tracker.running:
            raise InvariantError(f"{request_id} runs already")
        self.snapshot.run(tracker)
        self._see_first_token(tracker, now)
        self._refreshes.plan(tracker, self.snapshot.horizon_steps)
        unpin(tracker)

    def began(self, request_id: str, now: float) -> None:
        """Note the time of its first token, by which the overlap is sized (`SchedulerConfig.overlap_requests`)."""
        self._see_first_token(self._find(request_id, DECODING), now)

    def _see_first_token(self, tracker: RequestTracker, now: float) -> None:
        tracker.began_s = now
        worker = worker_of(tracker)
        if not worker.foreign_requests:
            delay_s = now - tracker.admitted_s
            mean_prompts = tracker.prompt_tokens / max(1.0, self.snapshot.means.prompt_tokens)
            self.snapshot.overlap.see_first_token(delay_s, tracker.sent_ahead, worker.tokens_per_step, mean_prompts)

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """The request has generated `tokens` more. Called for every token, so O(1) whatever is active."""
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase is not DECODING:
            raise InvariantError(f"{request_id} is not decoding")
        self.snapshot.grow(tracker, tokens)
        if tracker.prefiller is not None:
            unpin(tracker)
        if tracker.counted >= tracker.refresh_due_at:
            self._refreshes.make_due(tracker)

    def step(self, now: float) -> None:
        """Lock-step drivers: every running request on every worker has generated one token. O(G*H)."""
        self.snapshot.step()
        self._refreshes.step()

    def due_refreshes(self) -> list[RequestTracker]:
        """Requests whose prediction is to be renewed now; each is handed out once per due date."""
        return self._refreshes.due()

    def refresh(self, request_id: str, expected_remaining: float, now: float) -> None:
        """A renewed c-hat in [0, H] (`prediction.refresh.gated`), for a decoding (decode-first: or pooled) request."""
        pooled = self.snapshot.requests.get(request_id)
        if pooled is not None and pooled.phase is POOLED:
            pooled.refreshed_remaining = expected_remaining
            return
        tracker = self._find(request_id, DECODING)
        self.snapshot.forecast(tracker, expected_remaining)
        self._refreshes.plan(tracker, self.snapshot.horizon_steps)

    def put_back(self, request_id: str, now: float) -> None:
        """The request was not sent to its worker after all: it waits in the pool again, in its old place.

        Its KV has been pinned since it became ready, so its patience and its time to live go on from then.
        """
        tracker = self._find(request_id, DECODING)
        unasked = not tracker.generated and not tracker.pushing and request_id not in self.snapshot.asking
        if not unasked or (self.config.decode_first and tracker.prefiller is not None):
            raise InvariantError(f"{request_id} was sent to its worker already")
        self._return_to_pool(tracker)

    def _return_to_pool(self, tracker: RequestTracker) -> None:
        """Undo its admission."""
        self.snapshot.release_slot(tracker)
        tracker.phase = POOLED
        self.snapshot.pool.add(tracker)

    def requeue(self, request_id: str, now: float, prefix: Sequence[int] = (), anew: bool = False) -> Release:
        """The decode ended without finishing (recompute, worker lost): prefill again, with what was generated so far.

        Legal while pooled too, when the pinned KV is known to be lost. Decode-first it waits in the pool again.
        `prefix`: as in its spec; a request may have been adopted without it. `anew`: without what was generated so
        far, as the answer can't be continued.
        """
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase not in (DECODING, POOLED):
            raise InvariantError(f"{request_id} is neither decoding nor pooled")
        phase = tracker.phase
        if tracker.pushing:
            prefiller_of(tracker).withdraw_prefix(tracker)  # it is hung up on
        self._release_held(tracker, now)
        kept_tokens = -tracker.earlier_tokens if anew else tracker.counted
        tracker.prompt_tokens += kept_tokens
        tracker.earlier_tokens += kept_tokens
        tracker.counted = 0
        tracker.requeues += 1
        tracker.queued_s = now
        if prefix:
            tracker.prefix = prefix
        self._begin(tracker, now)
        return Release(request_id, phase)

    # -- leaving ----------------------------------------------------------------------------------------------

    def finish(self, request_id: str, outcome: Outcome | str, now: float) -> Release:
        """The request leaves, from whatever phase; everything it held is released. Raises: ValueError: no outcome."""
        outcome = Outcome(outcome)  # its text is as good
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None:
            raise InvariantError(f"{request_id} is not here: released twice, or never submitted")
        phase = tracker.phase
        if outcome is Outcome.FAILED and tracker.prefix_use is not None:
            prefiller_of(tracker).withdraw_prefix(tracker)  # its last prefill has failed
        self._release_held(tracker, now)
        if outcome is Outcome.FINISHED and tracker.age_tokens:  # a prompt that is only scored has no answer
            self.snapshot.means.see_answer(tracker.age_tokens, tracker.prompt_tokens - tracker.earlier_tokens)
            if tracker.began_s < math.inf:
                self.snapshot.overlap.see_answer(now - tracker.began_s, tracker.counted)
        tracker.phase = GONE
        del self.snapshot.requests[request_id]
        return Release(request_id, phase)

    def expire(self, now: float, most: int | None = None) -> list[Release]:
        """End pool entries past their TTL and queued requests past their deadline, at most so many; None: all.

        The wait of a requeued request counts from its requeue. If there are tokens of its answer its client may have
        half of it, so it waits on, and its own deadline ends it.
        """
        return [self.finish(tracker.id, Outcome.EXPIRED, now) for tracker in self.late(now)[:most]]

    def late(self, now: float) -> list[RequestTracker]:
        """All requests that `expire` would end now, in its order, for a driver that learns from them before."""
        pool_limit, queue_limit = now - self.config.pool_ttl_s, now - self.config.queue_deadline_s
        late = [tracker for tracker in self.snapshot.pool if tracker.ready_s < pool_limit]
        late += [t for t in self.snapshot.queued.values() if t.queued_s < queue_limit and not t.earlier_tokens]
        return late

    # -- taking over ------------------------------------------------------------------------------------------

    def adopt(self, standing: Standing, now: float) -> bool:
        """Continue a request that another scheduler let in. Returns False where that is impossible.

        It is impossible where the request prefills or decodes on a worker that is not here, or where another request
        may have got its slot. The request is then unknown here, and whoever holds it must end it.

        A scheduler that has admitted nobody yet has given no slot away: it takes in every request that runs, whatever
        its own bounds are. A scheduler that has admitted takes in no more than it would admit. Queues and the pool take
        in all.
        """
        spec, phase = standing.spec, standing.phase
        prefiller = self.snapshot.find_prefiller(standing.prefiller)
        worker = self.snapshot.find_worker(standing.decoder)
        needs_prefiller = phase is PREFILLING or standing.pushing
        if needs_prefiller and prefiller is None:
            return False
        if phase is DECODING and (worker is None or not self._may_have_kept(worker)):
            return False
        tracker = self._register(spec, now - standing.waited_s)
        tracker.prompt_tokens, tracker.earlier_tokens = standing.prompt_tokens, standing.earlier_tokens
        tracker.requeues = standing.requeues
        if tracker.requeues:
            tracker.queued_s = now  # when that was its holder does not tell
        if phase is QUEUED:
            self.prefills.enqueue(tracker, self.snapshot)
        elif phase is PREFILLING:
            assert prefiller is not None
            self.prefills.begin(tracker, prefiller, self.snapshot, now)
        elif phase is POOLED:
            if prefiller is not None:
                prefiller.pin(tracker)
            self._pool(tracker, now - standing.ready_s)
        else:
            assert worker is not None
            tracker.ready_s = now - standing.ready_s  # it may be put back
            self._take_slot(tracker, worker, now)
            self._adopt_decoding(tracker, worker, standing, prefiller, now)
            if not standing.tokens:
                self._set_patience(tracker)
        return True

    def order_by_arrival(self, now: float) -> None:
        """Put waiting requests in the order of their arrival, after `adopt` has taken them in holder by holder."""
        snapshot = self.snapshot
        by_arrival = sorted(
            (tracker for tracker in snapshot.requests.values() if tracker.phase is not DECODING),
            key=attrgetter("arrived_s", "order"),
        )
        pooled = list(snapshot.pool)
        for tracker in pooled:
            snapshot.pool.remove(tracker)
        orders = sorted([tracker.order for tracker in by_arrival])
        for tracker, order in zip(by_arrival, orders, strict=True):
            tracker.order = order
        for tracker in pooled:
            snapshot.pool.add(tracker)
        self.prefills.order_anew()

    def _may_have_kept(self, worker: DecodeInstanceState) -> bool:
        """Whether a request that already decodes on the worker can still have its slot."""
        if not (self._has_admitted and self.policy.waits_for_slots):
            return True
        return len(worker.active) < worker.spec.slots + worker.ahead

    def _adopt_decoding(
        self,
        tracker: RequestTracker,
        worker: DecodeInstanceState,
        standing: Standing,
        prefiller: PrefillerBudget | None,
        now: float,
    ) -> None:
        tracker.sent_ahead = len(worker.active) > worker.spec.slots
        if standing.tokens:
            self.progress(tracker.id, standing.tokens, now)
        if standing.asking:
            self.snapshot.asking[tracker.id] = tracker
        elif standing.pushing and prefiller is not None:
            self.prefills.begin(tracker, prefiller, self.snapshot, now)
        elif not standing.tokens and prefiller is not None:
            prefiller.pin(tracker)
        if tracker.refresh_due_at < math.inf:
            self._refreshes.make_due(tracker)  # nothing is forecast of it here yet

    # -- the moves between phases -----------------------------------------------------------------------------

    def _refusal(self, spec: RequestSpec) -> RejectReason | None:
        if self.draining:
            return RejectReason.DRAINING
        snapshot = self.snapshot
        if _all_down(snapshot.prefillers) or (spec.decodes and not snapshot.n_in_barrier):
            return RejectReason.NO_WORKERS
        if self.config.max_queued == 0:
            return RejectReason.QUEUE_FULL
        if self._begins_in_pool(spec.decodes):
            bound, waiting = self.config.max_pooled, len(snapshot.pool)
        else:
            bound, waiting = self.config.max_queued, len(snapshot.queued)
        return RejectReason.QUEUE_FULL if bound is not None and waiting >= bound else None

    def _begins_in_pool(self, decodes: bool) -> bool:
        """Decode first; but in the pool a request that does not decode would get a slot that it does not use."""
        return self.config.decode_first and decodes

    def _register(self, spec: RequestSpec, now: float) -> RequestTracker:
        if spec.id in self.snapshot.requests:
            raise InvariantError(f"{spec.id} is here already")
        spec.checked()
        self._arrivals += 1
        tracker = RequestTracker(
            id=spec.id,
            prompt_tokens=spec.prompt_tokens,
            order=self._arrivals,
            priority=spec.priority,
            prompt_key=spec.prompt_key,
            max_new_tokens=spec.max_new_tokens,
            arrived_s=now,
            prefix=spec.prefix,
            block_tokens=spec.block_tokens,
        )
        self.snapshot.requests[spec.id] = tracker
        return tracker

    def _begin(self, tracker: RequestTracker, now: float) -> None:
        """Its first phase: the queue or, decode first, the pool."""
        if self._begins_in_pool(tracker.decodes):
            self._pool(tracker, now)
        else:
            self.prefills.enqueue(tracker, self.snapshot)

    def _pool(self, tracker: RequestTracker, now: float, expected_remaining: float | None = None) -> None:
        tracker.phase, tracker.ready_s = POOLED, now
        tracker.refreshed_remaining = math.inf if expected_remaining is None else expected_remaining
        tracker.refreshed_at = 0
        self.snapshot.means.see_prompt(tracker.prompt_tokens)
        self._wait(tracker)

    def _wait(self, tracker: RequestTracker) -> None:
        """Put it in the pool, even if `patience_s` of a user's own policy raises: from the pool it can leave."""
        try:
            self._set_patience(tracker)
        finally:
            self.snapshot.pool.add(tracker)

    def _set_patience(self, tracker: RequestTracker) -> None:
        """Set the time from which it goes first in the pool, by the present policy."""
        tracker.overdue_s = math.inf
        patience_s = self.policy.patience_s(tracker.prompt_tokens, self.snapshot)
        if patience_s < math.inf:  # a large prompt's longer patience must not outlast its pinned KV
            tracker.overdue_s = tracker.ready_s + min(patience_s, self.snapshot.longest_wait_s)

    def _bind(self, choice: Choice, now: float) -> None:
        tracker, worker = choice.request, choice.worker
        self._has_admitted = True
        self.snapshot.pool.remove(tracker)
        self.snapshot.means.see_wait(now - tracker.ready_s, tracker.priority)
        self._take_slot(tracker, worker, now)

    def _take_slot(self, tracker: RequestTracker, worker: DecodeInstanceState, now: float) -> None:
        tracker.admitted_s, tracker.began_s = now, math.inf
        self.snapshot.take_slot(tracker, worker, running=not self.config.lock_step)
        if tracker.running:
            self._refreshes.plan(tracker, self.snapshot.horizon_steps)

    def _release_held(self, tracker: RequestTracker, now: float) -> None:
        """Release whatever the tracker's phase holds."""
        if tracker.phase is DECODING:
            self.snapshot.asking.pop(tracker.id, None)
            if tracker.pushing:
                self.prefills.end(tracker, self.snapshot, now)
            self.snapshot.release_slot(tracker)
        elif tracker.phase is QUEUED:
            del self.snapshot.queued[tracker.id]
        elif tracker.phase is PREFILLING:
            self.prefills.end(tracker, self.snapshot, now)
        elif tracker.phase is POOLED:
            self.snapshot.pool.remove(tracker)
        if tracker.prefiller is not None:
            unpin(tracker)

    def _find_pushing(self, request_id: str) -> RequestTracker:
        tracker = self._find(request_id, DECODING)
        if not tracker.pushing:
            raise InvariantError(f"{request_id} is not being prefilled for its decode worker")
        return tracker

    def _find(self, request_id: str, phase: Phase) -> RequestTracker:
        tracker = self.snapshot.requests.get(request_id)
        if tracker is None or tracker.phase is not phase:
            found = "not here" if tracker is None else tracker.phase.value
            raise InvariantError(f"{request_id} is {found}, expected {phase.value}")
        return tracker


def _all_down(prefillers: Sequence[PrefillerBudget]) -> bool:
    for prefiller in prefillers:
        if prefiller.state is not DOWN:
            return False
    return True
