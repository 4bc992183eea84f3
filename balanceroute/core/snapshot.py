"""The cluster snapshot: everything a policy may know, and the bookkeeping that keeps it exact.

One `ClusterSnapshot` holds the decode workers with their active requests (A_g, L_g, cap_g), the prompt pool (R_wait),
the prefillers with their KV budgets, and the arrivals that wait for a prefiller. `Scheduler` is its only writer.

Every request is one `RequestTracker`, and its `phase` says what it holds:

    queued      nothing
    prefilling  a prefill slot of its prefiller, and the KV that this prefill is about to pin there
    pooled      pinned KV on its prefiller
    decoding    a slot and load on its decode worker; until its first token also the pinned KV. Decode-first,
                while `pushing`: a prefill slot of the prefiller that writes its KV to the decode worker
    gone        nothing

L_g counts prompt and generated tokens of A_g and is an integer kept by addition, so reading it is O(1).
`check_invariants()` recounts everything from the trackers.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import numpy as np

from balanceroute.core.overlap import Overlap
from balanceroute.core.pool import PromptPool
from balanceroute.core.prefill_work import FIRST_S_PER_TOKEN
from balanceroute.core.prefix import SharedPrefixes
from balanceroute.core.projection import LoadArray, Projection
from balanceroute.core.tracker import DecodeInstanceState, PrefillerBudget, RequestTracker, worker_of
from balanceroute.core.types import (
    DECODING,
    DOWN,
    GONE,
    POOLED,
    PREFILLING,
    QUEUED,
    UP,
    Phase,
    Role,
    WorkerSpec,
    WorkerState,
)
from balanceroute.core.workload_means import PLAIN_MEAN_OF, WorkloadMeans
from balanceroute.errors import InvariantError

_INDEX: Final = attrgetter("index")


class ClusterSnapshot:
    """Decode workers, prompt pool, prefillers and queued arrivals at one moment.

    Args:
        horizon_steps: H of the projection; 0: the present loads are all that counts, and nothing is projected.
    """

    def __init__(self, horizon_steps: int = 0) -> None:
        self.horizon_steps = horizon_steps
        self.requests: dict[str, RequestTracker] = {}
        self.workers: list[DecodeInstanceState] = []
        self.up: list[DecodeInstanceState] = []  # those that take new requests, by index
        self.down: list[int] = []  # indices of those outside the barrier
        self.slots = 0  # of all in the barrier
        self.prefillers: list[PrefillerBudget] = []
        self.shared_prefixes = SharedPrefixes()
        self.queued: dict[str, RequestTracker] = {}
        self.asking: dict[str, RequestTracker] = {}  # decode-first: decoding, and no prefiller may take them yet
        self.pool = PromptPool()
        self.means = WorkloadMeans()
        self.overlap = Overlap()
        self.projection = Projection(0, horizon_steps)
        self._workers_by_id: dict[str, DecodeInstanceState] = {}
        self._prefillers_by_id: dict[str, PrefillerBudget] = {}
        self.alike = True  # every worker has slowdown 1 and charges nothing per request, so that tokens are cost
        self.uniform = True  # all workers have the same slowdown, c and slots
        self._kinds: dict[tuple[float, int, int], int] = {}  # how many workers have each of these
        self.request_tokens = 0.0  # c, the mean over the workers
        self._all_request_tokens = 0  # the sum
        self.longest_wait_s = math.inf  # a request that waits longer would leave the pool unserved
        self.max_pooled = math.inf  # requests in the pool, and those being prefilled for it
        self.prefilling = 0  # those that come to the pool
        self.shared_barrier = True  # else each decode worker steps alone
        self.draws = 0  # random decisions taken so far: with the seed, the whole state of a random policy

    @property
    def pool_is_full(self) -> bool:
        """Whether the pool is full, so that arrivals are kept out."""
        return self.pool.size + self.prefilling >= self.max_pooled

    # -- membership -------------------------------------------------------------------------------------------

    def find_worker(self, worker_id: str) -> DecodeInstanceState | None:
        """The decode worker of that id, if there is one."""
        return self._workers_by_id.get(worker_id)

    def worker(self, worker_id: str) -> DecodeInstanceState:
        """The decode worker of that id. Raises InvariantError when there is none."""
        worker = self._workers_by_id.get(worker_id)
        if worker is None:
            raise InvariantError(f"no decode worker {worker_id}")
        return worker

    def find_prefiller(self, worker_id: str) -> PrefillerBudget | None:
        """The prefiller of that id, if there is one."""
        return self._prefillers_by_id.get(worker_id)

    def prefiller(self, worker_id: str) -> PrefillerBudget:
        """The prefiller of that id. Raises InvariantError when there is none."""
        prefiller = self._prefillers_by_id.get(worker_id)
        if prefiller is None:
            raise InvariantError(f"no prefiller {worker_id}")
        return prefiller

    def add_worker(self, spec: WorkerSpec) -> None:
        """Take in a worker of either role. Raises InvariantError when its id is taken."""
        if spec.id in self._workers_by_id or spec.id in self._prefillers_by_id:
            raise InvariantError(f"worker {spec.id} is there already")
        if spec.role is Role.DECODE:
            worker = self._workers_by_id[spec.id] = DecodeInstanceState(spec, len(self.workers))
            self.workers.append(worker)
            self.projection.add_worker()
            self._count_state(worker)
            self._count_costs(spec, 1)
        else:
            prefiller = self._prefillers_by_id[spec.id] = PrefillerBudget(spec)
            self.prefillers.append(prefiller)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that holds nothing. Raises InvariantError when it still does."""
        worker = self.find_worker(worker_id)
        if worker is not None:
            if worker.active:
                raise InvariantError(f"decode worker {worker_id} still has {len(worker.active)} requests")
            del self._workers_by_id[worker_id], self.workers[worker.index]
            self.projection.remove_worker(worker.index)
            self._forget_state(worker)
            self._count_costs(worker.spec, -1)
            for index, other in enumerate(self.workers):
                other.index = index
            self.down = [other.index for other in self.workers if other.state is DOWN]
            return
        prefiller = self.prefiller(worker_id)
        if prefiller.inflight or prefiller.pinned:
            raise InvariantError(f"prefiller {worker_id} still holds {prefiller.inflight + prefiller.pinned} requests")
        del self._prefillers_by_id[worker_id]
        self.prefillers.remove(prefiller)

    def set_state(self, worker: DecodeInstanceState, state: WorkerState) -> None:
        """Set a decode worker's state. Without a loop over all workers: hundreds may fail in one moment."""
        self._forget_state(worker)
        worker.state = state
        self._count_state(worker)

    def _count_state(self, worker: DecodeInstanceState) -> None:
        if worker.state is UP:
            insort(self.up, worker, key=_INDEX)
        if worker.state is DOWN:
            insort(self.down, worker.index)
        else:
            self.slots += worker.spec.slots

    def _forget_state(self, worker: DecodeInstanceState) -> None:
        if worker.state is UP:
            del self.up[bisect_left(self.up, worker.index, key=_INDEX)]
        if worker.state is DOWN:
            self.down.remove(worker.index)
        else:
            self.slots -= worker.spec.slots

    def _count_costs(self, spec: WorkerSpec, count: int) -> None:
        kind = (spec.slowdown, spec.request_tokens, spec.slots)
        self._kinds[kind] = self._kinds.get(kind, 0) + count
        if not self._kinds[kind]:
            del self._kinds[kind]
        self._all_request_tokens += count * spec.request_tokens
        self.alike = all([slowdown == 1.0 and not each for slowdown, each, _ in self._kinds])
        self.uniform = len(self._kinds) < 2
        self.request_tokens = self._all_request_tokens / max(1, len(self.workers))

    def set_horizon(self, horizon_steps: int) -> None:
        """Project over another horizon from now on."""
        self.horizon_steps = horizon_steps
        self.projection = self.recount_projection()

    def recount_projection(self) -> Projection:
        """The projection from scratch, from the trackers alone."""
        projection = Projection(len(self.workers), self.horizon_steps)
        for worker in self.workers if self.horizon_steps else ():
            for tracker in worker.active.values():
                projection.add(worker.index, tracker.kv_tokens, tracker.remaining(self.horizon_steps), tracker.running)
        return projection

    # -- what a request holds on its decode worker -------------------------------------------------------------

    def take_slot(self, tracker: RequestTracker, worker: DecodeInstanceState, *, running: bool) -> None:
        """The request takes a slot and charges its load; `running`: whether the engine runs it from now on."""
        tracker.phase, tracker.worker, tracker.running = DECODING, worker, running
        tracker.counted, tracker.joined_step = 0, worker.steps
        worker.active[tracker.id] = tracker
        worker.load += tracker.prompt_tokens
        worker.running += running
        self._project(tracker)

    def release_slot(self, tracker: RequestTracker) -> None:
        """The request releases its slot and its load; `counted` keeps what it has generated."""
        worker = worker_of(tracker)
        self._project(tracker, -1)
        tracker.counted = generated = tracker.generated
        worker.load -= tracker.prompt_tokens + generated
        worker.running -= tracker.running
        del worker.active[tracker.id]
        tracker.running, tracker.worker, tracker.refresh_due_at = False, None, math.inf

    def run(self, tracker: RequestTracker) -> None:
        """Lock-step: the engine runs the request from its next step on."""
        self._project(tracker, -1)
        worker = worker_of(tracker)
        tracker.running, tracker.joined_step = True, worker.steps
        worker.running += 1
        self._project(tracker)

    def grow(self, tracker: RequestTracker, tokens: int) -> None:
        """The request has generated `tokens` more. O(1): called for every token."""
        worker = tracker.worker
        assert worker is not None
        horizon = self.horizon_steps
        if not horizon:
            tracker.counted += tokens
        elif tracker.refreshed_remaining >= horizon:
            tracker.counted += tokens
            self.projection.grow(worker.index, tokens)
        else:
            kv_tokens, before = tracker.kv_tokens, int(tracker.remaining(horizon))
            tracker.counted += tokens
            self.projection.move(worker.index, kv_tokens, tokens, before, int(tracker.remaining(horizon)))
        worker.load += tokens

    def step(self) -> None:
        """Lock-step: every running request has generated one token. O(G*H)."""
        for worker in self.workers:
            worker.steps += 1
            worker.load += worker.running
        if self.horizon_steps:
            self.projection.step()

    def resize(self, tracker: RequestTracker, prompt_tokens: int) -> None:
        """The exact size of its prompt is known."""
        self._project(tracker, -1)
        worker_of(tracker).load += prompt_tokens - tracker.prompt_tokens
        tracker.prompt_tokens = prompt_tokens
        self._project(tracker)

    def forecast(self, tracker: RequestTracker, expected_remaining: float) -> None:
        """Renew its c-hat, which counts from now on."""
        self._project(tracker, -1)
        tracker.refreshed_remaining, tracker.refreshed_at = expected_remaining, tracker.generated
        self._project(tracker)

    def _project(self, tracker: RequestTracker, count: int = 1) -> None:
        """Project the request over the horizon as it is now; `count` -1: take it out, before any of that changes."""
        horizon = self.horizon_steps
        if horizon:
            index, remaining = worker_of(tracker).index, tracker.remaining(horizon)
            self.projection.add(index, tracker.kv_tokens, remaining, tracker.running, count)

    def places_ahead(self, worker: DecodeInstanceState, fixed: int | None) -> int:
        """How many requests a worker may be sent ahead of its slots: `fixed`, or as measured where that is None.

        None as measured where others send requests, too: waiting for one of their slots looks like a transfer.
        """
        slots = worker.spec.slots
        if fixed is not None:
            return min(slots, fixed)
        if worker.foreign_requests:
            return 0
        pool_share = self.max_pooled / max(1, self.n_in_barrier)
        return self.overlap.requests(
            slots, self.means.answer_tokens, worker.tokens_per_step, self.early_choice_slots(), pool_share
        )

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Slots free on all workers that take new requests. O(G)."""
        return free_slots(self.open_workers())

    @property
    def has_room(self) -> bool:
        """Whether any worker may be sent another request, into a slot or ahead of one. O(G)."""
        for worker in self.up:
            if len(worker.active) < worker.own_slots + worker.ahead:
                return True
        return False

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds per token of work of a prefiller, over all of them. O(prefillers)."""
        if not self.prefillers:
            return FIRST_S_PER_TOKEN
        return sum([prefiller.pace.s_per_token for prefiller in self.prefillers]) / len(self.prefillers)

    def mean_wait_s(self) -> float:
        """The mean wait of the class in front, seconds; of all classes while nothing waits."""
        means = self.means
        return means.wait_of(self.pool.front[0].priority) if self.pool.size else means.wait_s

    def mean_stay_s(self) -> float:
        """How long the mean answer takes on a worker, as measured; infinite until a hundred answers have ended."""
        if self.means.answers < PLAIN_MEAN_OF or not self.overlap.token_s:
            return math.inf
        return self.overlap.token_s * self.means.answer_tokens

    def mean_answer_steps(self) -> float:
        """Steps that the mean answer takes on a worker; infinite until a hundred answers have ended. O(G)."""
        if self.means.answers < PLAIN_MEAN_OF:
            return math.inf
        return self.means.answer_tokens / max([worker.tokens_per_step for worker in self.workers])

    def early_choice_slots(self) -> float:
        """What a choice made a departure too early costs in tokens/s, in slots left empty (`core.overlap`).

        Nothing where no worker waits for another. Else the loads are less level by how much prompts differ, as a share
        of the mean load of a slot, and the more workers there are, the likelier one of them is far above the others.
        """
        means = self.means
        slot_tokens = means.prompt_tokens + 0.5 * means.answer_tokens
        if not self.shared_barrier or self.n_in_barrier < 2 or slot_tokens <= 0.0:
            return 0.0
        return means.deviation_tokens / slot_tokens * (1.0 - 1.0 / self.n_in_barrier)

    def step_loads(self) -> list[float]:
        """`step_load` of every worker, by index. O(G)."""
        if self.alike:
            return [worker.load + worker.foreign_tokens for worker in self.workers]
        return [worker.step_load for worker in self.workers]

    def open_workers(self) -> list[DecodeInstanceState]:
        """Workers with a free slot, by index. O(G)."""
        return [worker for worker in self.up if len(worker.active) < worker.own_slots]

    @property
    def n_in_barrier(self) -> int:
        """G: the workers that wait for each other at the end of a step, which are those that are not down."""
        return len(self.workers) - len(self.down)

    def in_barrier(self, values: list[float]) -> list[float]:
        """Those of a value per worker that are of the workers in the barrier. O(G)."""
        down = self.down
        return values if not down else [value for index, value in enumerate(values) if index not in down]

    @property
    def envelope(self) -> float:
        """M: the largest load of a worker that is not down; 0 without workers. O(G)."""
        return max(self.in_barrier(self.step_loads()), default=0.0)

    def projected_loads(self) -> LoadArray:
        """L_g(k+h), shape (G, H+1): our requests as projected, those of others as if they stayed. O(G*H).

        In tokens of a worker of slowdown 1, as `step_load`; integers where all workers are alike.
        """
        if not self.horizon_steps:
            present: LoadArray = np.array(self.step_loads())
            return present[:, None]
        per_request = None if self.alike else [worker.spec.request_tokens for worker in self.workers]
        loads = self.projection.loads(per_request)
        foreign = [worker for worker in self.workers if worker.foreign_requests or worker.foreign_tokens]
        if foreign:
            ahead = np.arange(self.horizon_steps + 1)
            for worker in foreign:
                each = ahead + worker.spec.request_tokens
                loads[worker.index] += worker.foreign_tokens + worker.foreign_requests * each
        return loads if self.alike else loads * np.array([[worker.spec.slowdown] for worker in self.workers])

    def decoding(self) -> Iterator[RequestTracker]:
        """Every request on a decode worker."""
        for worker in self.workers:
            yield from worker.active.values()

    # -- invariants -------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recount everything from the trackers (INV-3: loads). Raises InvariantError at the first difference."""
        by_phase: dict[Phase, set[str]] = {phase: set() for phase in Phase}
        for tracker in self.requests.values():
            by_phase[tracker.phase].add(tracker.id)
        self._expect("queued", set(self.queued), by_phase[QUEUED])
        pooling = [name for name in by_phase[PREFILLING] if self.requests[name].decodes]
        self._expect("prefilling", self.prefilling, len(pooling))
        self._expect("pooled", {tracker.id for tracker in self.pool}, by_phase[POOLED])
        self._expect("decoding", {tracker.id for tracker in self.decoding()}, by_phase[DECODING])
        self._expect("gone", set(), by_phase[GONE])
        pushing = [tracker for tracker in self.requests.values() if tracker.pushing]
        self._expect("pushing while decoding", {t.id for t in pushing} - by_phase[DECODING], set())
        busy = {tracker.id for tracker in pushing}
        self._expect("asking", set(self.asking), set(self.asking) & by_phase[DECODING] - busy)
        order = [(tracker.priority, tracker.order) for tracker in self.pool]
        self._expect("pool order", order, sorted(order))
        self._expect("up", self.up, [worker for worker in self.workers if worker.state is UP])
        self._expect("down", self.down, [worker.index for worker in self.workers if worker.state is DOWN])
        specs = [worker.spec for worker in self.workers]
        self._expect("slots", self.slots, sum(w.spec.slots for w in self.workers if w.state is not DOWN))
        self._expect("alike", self.alike, all(spec.slowdown == 1.0 and not spec.request_tokens for spec in specs))
        kinds = {(spec.slowdown, spec.request_tokens, spec.slots) for spec in specs}
        self._expect("uniform", self.uniform, len(kinds) < 2)
        self._expect("request tokens", self.request_tokens, sum(s.request_tokens for s in specs) / max(1, len(specs)))
        for worker in self.workers:
            self._check_worker(worker)
        for prefiller in self.prefillers:
            self._check_prefiller(prefiller)
        if not self.projection.equals(self.recount_projection()):
            raise InvariantError("the projection differs from its recount")

    def _check_worker(self, worker: DecodeInstanceState) -> None:
        name = worker.spec.id
        active = worker.active.values()
        self._expect(f"{name} load", worker.load, sum(tracker.kv_tokens for tracker in active))
        self._expect(f"{name} running", worker.running, sum(tracker.running for tracker in active))
        for tracker in active:
            self._expect(f"{tracker.id} worker", tracker.worker, worker)
            if tracker.generated < 0:
                raise InvariantError(f"{tracker.id} has generated {tracker.generated} tokens")

    def _check_prefiller(self, prefiller: PrefillerBudget) -> None:
        name = prefiller.spec.id
        here = [tracker for tracker in self.requests.values() if tracker.prefiller is prefiller]
        busy = [tracker for tracker in here if tracker.phase is PREFILLING or tracker.pushing]
        pinned = [t for t in here if t.phase in (POOLED, DECODING) and not t.pushing]
        self._expect(f"{name} inflight", prefiller.inflight, len(busy))
        self._expect(f"{name} inflight tokens", prefiller.inflight_tokens, sum(t.prompt_tokens for t in busy))
        uncached = sum(t.uncached_tokens for t in busy)
        self._expect(f"{name} inflight uncached tokens", prefiller.inflight_uncached_tokens, uncached)
        self._expect(f"{name} pinned", prefiller.pinned, len(pinned))
        self._expect(f"{name} pinned tokens", prefiller.pinned_tokens, sum(t.prompt_tokens for t in pinned))

    @staticmethod
    def _expect(what: str, found: object, counted: object) -> None:
        if found != counted:
            raise InvariantError(f"{what}: kept {found!r}, recounted {counted!r}")


def free_slots(open_workers: list[DecodeInstanceState]) -> int:
    """Free slots of workers that have any."""
    return sum([worker.own_slots - len(worker.active) for worker in open_workers])
