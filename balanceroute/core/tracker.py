"""Requests and the workers that hold them: what `Scheduler` writes, one object each.

A request refers to its workers and a decode worker to its requests, so the three are in one module. `snapshot.py` says
what a request holds in which phase; its `ClusterSnapshot` owns these objects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from balanceroute.core.prefill_work import Pace, work_tokens
from balanceroute.core.prefix import PrefixHits, PrefixIndex, PrefixUse
from balanceroute.core.types import QUEUED, UP, Phase, WorkerSpec, WorkerState
from balanceroute.errors import InvariantError


class RequestTracker:
    """One request from its arrival to its finish.

    `order` is its arrival number and breaks every tie. `counted` tokens were reported one by one; a lock-step driver
    adds the steps its worker has taken since `joined_step` (see `generated`). `expected_remaining` at any time follows
    from the last refresh by `remaining()`, so nothing is decremented per token. A requeue turns what was generated into
    prompt, which is right for loads; `earlier_tokens` remembers it for the predictor, which asks for the whole age.
    """

    # No dataclass: one is made per request, and the `__init__` of a dataclass stays Python where this is compiled.
    __slots__ = (
        "admitted_s",
        "arrived_s",
        "began_s",
        "block_tokens",
        "counted",
        "earlier_tokens",
        "id",
        "joined_step",
        "max_new_tokens",
        "offers",
        "order",
        "overdue_s",
        "phase",
        "prefiller",
        "prefix",
        "prefix_use",
        "priority",
        "prompt_key",
        "prompt_tokens",
        "pushing",
        "queue_s",
        "queued_s",
        "ready_s",
        "refresh_due_at",
        "refreshed_at",
        "refreshed_remaining",
        "requeues",
        "running",
        "sent_ahead",
        "shared_blocks",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        order: int,
        priority: int = 0,
        prompt_key: str = "",
        max_new_tokens: int | None = None,
        arrived_s: float = 0.0,
        prefix: Sequence[int] = (),
        block_tokens: int = 0,
        refreshed_remaining: float = math.inf,
    ) -> None:
        """A request that has arrived and holds nothing yet."""
        self.id, self.prompt_tokens, self.order = id, prompt_tokens, order
        self.priority, self.prompt_key, self.max_new_tokens = priority, prompt_key, max_new_tokens
        self.phase: Phase = QUEUED
        self.prefiller: PrefillerBudget | None = None
        self.worker: DecodeInstanceState | None = None
        self.running = False
        self.arrived_s, self.ready_s, self.overdue_s = arrived_s, 0.0, math.inf
        self.queued_s = arrived_s  # or the time of its last requeue
        self.admitted_s = 0.0
        self.sent_ahead = False  # sent ahead: its worker had no free slot at its admission
        self.began_s = math.inf  # time of its first token, if reported
        self.counted = self.joined_step = 0
        self.refreshed_remaining, self.refreshed_at = refreshed_remaining, 0
        self.refresh_due_at = math.inf
        self.requeues = 0
        self.pushing = False  # decode-first: its prefiller is computing the prompt for the decode worker that holds it
        self.earlier_tokens = 0
        self.prefix, self.block_tokens = prefix, block_tokens
        # while it is prefilled: predicted cached tokens, and tokens to compute
        self.prefix_use: PrefixUse | None = None
        self.uncached_tokens = 0
        self.shared_blocks = 0  # at its last probe: the number of its leading blocks that many conversations share
        self.queue_s: float | None = None  # its place in the queue for a prefiller, once computed
        # while it is prefilled: the cost at each prefiller
        self.offers: tuple[Sequence[PrefillerBudget], Sequence[float]] | None = None

    @property
    def decodes(self) -> bool:
        """Whether it needs a decode worker, and so comes to the pool."""
        return self.max_new_tokens != 0

    def uncached_on(self, prefiller: "PrefillerBudget") -> int:
        """Tokens of its prompt that this prefiller would have to compute."""
        if not self.prefix:
            return self.prompt_tokens
        return self.uncached_after(prefiller.cache.matched(self.prefix))

    def uncached_after(self, blocks: int) -> int:
        """Tokens of its prompt after so many of its blocks; an engine computes one at least."""
        tokens = self.prompt_tokens - blocks * self.block_tokens
        return tokens if tokens > 1 else 1

    @property
    def generated(self) -> int:
        """Tokens generated so far (a_i) in its present decode; 0 again after a requeue."""
        if self.running and self.worker is not None:
            return self.counted + self.worker.steps - self.joined_step
        return self.counted

    @property
    def age_tokens(self) -> int:
        """Tokens generated for the client so far, before and after requeues."""
        return self.earlier_tokens + self.generated

    @property
    def kv_tokens(self) -> int:
        """KV tokens that it occupies on its decode worker (s_i + a_i)."""
        return self.prompt_tokens + self.generated

    def remaining(self, horizon_steps: int) -> float:
        """c-hat now, in [0, H]: the last step ahead on which it counts (`core.projection`).

        Counted down per token since its refresh, to 0: an active request takes part in the present step, whatever was
        predicted. The anchor H stays.
        """
        if self.refreshed_remaining >= horizon_steps:
            return float(horizon_steps)
        return max(0.0, self.refreshed_remaining - (self.generated - self.refreshed_at))


@dataclass(slots=True, eq=False)
class DecodeInstanceState:
    """A decode worker as the router knows it: its active requests, L_g and cap_g.

    `active` holds every request that was admitted and has not left, in admission order, whether the engine runs it
    already or not. `steps` counts the lock-steps a step-driven engine has taken (0 on a live cluster).

    `active` and `load` are our own ledger. What others run on the worker (a second router, direct clients) stands apart
    as `foreign_requests` and `foreign_tokens`; decisions weigh both: `free_slots`, `occupied`, `step_load`.

    `ahead` (m): how many requests of ours may be there beyond `own_slots`, to have their KV moved while others run
    (`core.overlap`).
    """

    spec: WorkerSpec
    index: int
    state: WorkerState = UP
    active: dict[str, RequestTracker] = field(default_factory=dict)
    load: int = 0
    running: int = 0
    steps: int = 0
    reported: dict[str, float] = field(default_factory=dict)
    foreign_requests: int = 0
    foreign_tokens: int = 0
    least_own_slots: int = 0
    kv_capacity_tokens: int = 0  # 0: unknown
    tokens_per_step: float = 1.0  # mean per running request; more than 1 with speculative decoding
    ahead: int = 0
    own_slots: int = field(init=False)  # B less foreign requests: how many own ones may be active

    def __post_init__(self) -> None:
        self.own_slots = self.spec.slots

    def set_foreign(self, requests: int, tokens: int, least_own_slots: int) -> None:
        """Set the foreign requests and their KV tokens; the router may use `least_own_slots` in any case."""
        self.foreign_requests, self.foreign_tokens, self.least_own_slots = requests, tokens, least_own_slots
        self.own_slots = max(self.spec.slots - requests, min(least_own_slots, self.spec.slots))

    @property
    def free_slots(self) -> int:
        """cap_g: room for more active requests; 0 unless the worker is up."""
        return max(0, self.own_slots - len(self.active)) if self.state is UP else 0

    @property
    def occupied(self) -> int:
        """Requests on the worker, foreign ones included."""
        return len(self.active) + self.foreign_requests

    @property
    def total_load(self) -> int:
        """KV tokens on the worker, foreign ones included."""
        return self.load + self.foreign_tokens

    @property
    def step_load(self) -> float:
        """The cost of its step, in KV tokens of a worker of slowdown 1; decisions use it as L_g."""
        spec = self.spec
        return spec.slowdown * (self.load + self.foreign_tokens + spec.request_tokens * self.occupied)


@dataclass(slots=True, eq=False)
class PrefillerBudget:
    """A prefiller: the latest sample of its KV usage, and the ledger of requests' holdings there.

    A prefill takes a slot by `begin` and releases it by `end`; then its KV is pinned by `pin`, until `unpin`.

    `kv_usage` is a ratio: 1.0 where its metrics can't be reached, so that it is never preferred; None where they don't
    tell, so that only our own ledger bounds what it gets. `inflight_uncached_tokens` are the tokens in flight that its
    prefix cache was predicted not to hold.
    """

    spec: WorkerSpec
    state: WorkerState = UP
    kv_usage: float | None = 0.0
    inflight: int = 0
    inflight_tokens: int = 0
    inflight_uncached_tokens: int = 0
    pinned: int = 0
    pinned_tokens: int = 0
    cache: PrefixIndex = field(default_factory=PrefixIndex)
    hits: PrefixHits = field(default_factory=PrefixHits)
    pace: Pace = field(default_factory=Pace)
    last_used: int = 0

    @property
    def inflight_s(self) -> float:
        """Expected seconds of the prefills under way, done one after the other."""
        return work_tokens(self.inflight_tokens, self.inflight_uncached_tokens) * self.pace.s_per_token

    def begin(self, tracker: RequestTracker, now: float) -> None:
        """A prefill takes a slot here; its prompt counts as cached from now on, as far as blocks fit."""
        self.pace.pass_time(now, self.inflight > 0)
        tracker.prefiller, tracker.uncached_tokens = self, tracker.prompt_tokens
        if tracker.prefix:
            use = tracker.prefix_use = self.cache.use(tracker.prefix, tracker.block_tokens)
            tracker.uncached_tokens = tracker.uncached_after(use.matched)
        self.inflight += 1
        self.inflight_tokens += tracker.prompt_tokens
        self.inflight_uncached_tokens += tracker.uncached_tokens

    def end(self, tracker: RequestTracker, now: float, done: bool) -> None:
        """The prefill releases its slot. `done`: whether the prompt was computed, so that its time counts."""
        self.pace.pass_time(now, True)
        if done:
            self.pace.done(work_tokens(tracker.prompt_tokens, tracker.uncached_tokens))
        else:
            self.pace.failed()
        self.inflight -= 1
        self.inflight_tokens -= tracker.prompt_tokens
        self.inflight_uncached_tokens -= tracker.uncached_tokens
        tracker.prefiller = None
        tracker.uncached_tokens, tracker.prefix_use, tracker.offers = 0, None, None

    def pin(self, tracker: RequestTracker) -> None:
        """The KV of the prompt stays here until `unpin`."""
        self.pinned += 1
        self.pinned_tokens += tracker.prompt_tokens
        tracker.prefiller = self

    def learn_cached(self, tracker: RequestTracker, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Compare what the engine found cached of a prompt with what was predicted. Call it before `end`.

        Args: prompt_tokens: the exact size. cached_tokens: None where the engine does not tell.
        """
        use = tracker.prefix_use
        predicted = tracker.prompt_tokens - tracker.uncached_tokens if tracker.prefix else 0
        self.hits.answered(prompt_tokens, predicted, cached_tokens)
        if use is None or cached_tokens is None or not tracker.prompt_tokens:
            return
        block_tokens = tracker.block_tokens * prompt_tokens / tracker.prompt_tokens  # now that the size is exact
        if not block_tokens or use.matched * block_tokens < self.cache.engine_block_tokens:
            return  # less than one block of the engine: it caches no part of a block
        self.cache.correct(use, max(cached_tokens > 0, int(cached_tokens / block_tokens)))

    def count_hits(self, queried_tokens: float, hit_tokens: float) -> None:
        """The engine's own counters of what it looked up in its prefix cache, and found there."""
        if self.hits.count(queried_tokens, hit_tokens, self.inflight_tokens - self.inflight_uncached_tokens):
            self.cache.clear()
            return
        ratio = self.hits.found_ratio()
        if ratio is not None:
            self.cache.trust(ratio)

    def withdraw_prefix(self, tracker: RequestTracker) -> None:
        """The prompt was not computed, so its blocks do not count as cached. Call it before `end`."""
        if tracker.prefix_use is not None:
            self.cache.withdraw(tracker.prefix, tracker.prefix_use)


def unpin(tracker: RequestTracker) -> None:
    """The request's pinned KV, if it has any, has left its prefiller. While it is `pushing`, none is pinned."""
    prefiller = tracker.prefiller
    if prefiller is not None and not tracker.pushing:
        prefiller.pinned -= 1
        prefiller.pinned_tokens -= tracker.prompt_tokens
        tracker.prefiller = None


def prefiller_of(tracker: RequestTracker) -> PrefillerBudget:
    """The prefiller on which the request holds something. Raises: InvariantError: there is none."""
    if tracker.prefiller is None:
        raise InvariantError(f"{tracker.id} has no prefiller")
    return tracker.prefiller


def worker_of(tracker: RequestTracker) -> DecodeInstanceState:
    """The decode worker of the request. Raises: InvariantError: there is none."""
    if tracker.worker is None:
        raise InvariantError(f"{tracker.id} has no decode worker")
    return tracker.worker
