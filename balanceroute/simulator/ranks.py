"""The simulated decode workers: the requests that really run, independent of the router's state.

A request bound to a worker waits in its queue (FIFO) until its transfer begins, is on the way for `transfer_steps`, and
runs once a slot is free: its KV grows by one token per step until it is done. With `transfers_by_size` a transfer takes
that long for the mean prompt, and for others in proportion, but a step at least. All sums are kept by addition; a step
costs O(G) plus the requests that end on it, not the number that run.

**When transfers begin** is as in vLLM: in a step that begins with a free slot, for every queued request whose KV fits;
a request on the way holds its KV and no slot; those whose KV has come start first (`engine.decode` has the source).
With `transfers_beside_full` they begin as soon as the request is there.
"""

import random
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field

from balanceroute.engine import DpBalancer, Held, RankBatch, StepTimeModel, blocks_of
from balanceroute.simulator.setting import Setting


@dataclass(slots=True)
class Rank:
    """One decode worker."""

    index: int
    up: bool = True
    queue: deque[int] = field(default_factory=deque)
    moving: dict[int, int] = field(default_factory=dict)  # request -> step on which it starts to run
    running: dict[int, int] = field(default_factory=dict)  # request -> step on which it started, oldest first

    @property
    def held(self) -> int:
        """Requests whose KV is there or on the way."""
        return len(self.moving) + len(self.running)


class Ranks:
    """The decode workers of one barrier; requests are numbers, steps are counted by the caller.

    `kv` and `left` belong to all barriers: a request that is taken off goes on at any.
    """

    most_tokens = 1  # tokens of a request in one step

    def __init__(self, setting: Setting, workers: int, kv: list[int], left: list[int]) -> None:
        self.setting = setting
        self.ranks = [Rank(index) for index in range(workers)]
        self.loads = [0] * workers  # KV tokens of the running requests
        self.counts = [0] * workers  # running requests
        self.kv = kv  # KV tokens of a request when it (re)started
        self.left = left  # tokens to go when it (re)started
        self.mean_prompt = max(1.0, sum(kv) / max(1, len(kv)))
        self.home = [-1] * len(kv)
        self.ending: defaultdict[int, list[int]] = defaultdict(list)  # step -> requests that may end before it
        self.ends_at = [-1] * len(kv)  # the step that counts: -1 while not running
        self.in_queues = 0  # requests in the queues, without those that a balancer has paused
        self.paused: set[int] = set()  # by the engine's balancer; they stand in their rank's queue
        self.balancer: DpBalancer | None = None
        self.planned: list[set[int]] = [set() for _ in self.ranks]  # the balancer's choice of requests for each rank
        if setting.engine_balancer_blocks is not None:
            step_time = StepTimeModel(setting.step_cost_s, setting.step_overhead_s)
            self.balancer = DpBalancer(setting.slots, step_time, setting.engine_balancer_blocks)

    def bind(self, request: int, rank: int) -> None:
        """The router sent the request to this worker."""
        self.home[request] = rank
        self.ranks[rank].queue.append(request)
        self.in_queues += 1

    def fill(self, step: int) -> list[int]:
        """Start what has come, as far as slots are free, and begin transfers; the requests that start."""
        started: list[int] = []
        delay, slots = self.setting.transfer_steps, self.setting.slots
        for rank in self.ranks:
            if rank.moving:
                arrived = [request for request, start in rank.moving.items() if start <= step]
                for request in arrived[: slots - len(rank.running)]:
                    del rank.moving[request]
                    self.run(request, rank, step)
                    started.append(request)
            while rank.queue and rank.up and self.may_begin(rank) and self.fits(rank, rank.queue[0]):
                request = rank.queue.popleft()
                self.in_queues -= 1
                if delay:
                    rank.moving[request] = step + self.transfer_steps(request)
                else:
                    self.run(request, rank, step)
                    started.append(request)
        return started

    def transfer_steps(self, request: int) -> int:
        """Steps that its KV is on the way."""
        steps = self.setting.transfer_steps
        if not self.setting.transfers_by_size:
            return steps
        return max(1, round(steps * self.kv[request] / self.mean_prompt))

    def may_begin(self, rank: Rank) -> bool:
        """Whether the worker begins the transfer of a request that waits there."""
        early = self.setting.transfers_beside_full and self.setting.transfer_steps > 0
        return early or len(rank.running) < self.setting.slots

    @property
    def queued(self) -> int:
        """Requests at workers that have no slot, nor one kept for them."""
        slots = self.setting.slots
        if not self.in_queues and not self.setting.transfer_steps:
            return 0
        if self.setting.barrier_groups > 1:  # what comes in the middle of a step waits for the next one alone
            return sum(max(0, len(rank.queue) + rank.held - slots) for rank in self.ranks)
        if not self.setting.transfer_steps:
            return self.in_queues
        return self.in_queues + sum(max(0, rank.held - slots) for rank in self.ranks)

    def follow_plan(self, step: int) -> tuple[list[int], list[int], list[int]]:
        """Run what the balancer planned after the last step, and let it plan: (got a slot, resumed, paused).

        While nothing runs anywhere nobody waits for anybody: every rank takes the first of its queue.
        """
        assert self.balancer is not None
        seated: list[int] = []
        resumed: list[int] = []
        paused: list[int] = []
        idle = not any(rank.running for rank in self.ranks)
        for rank, planned in zip(self.ranks, self.planned, strict=True):
            for request in [request for request in rank.running if request not in planned]:
                self.take_off(request, rank, step)
                self.paused.add(request)
                rank.queue.append(request)
                paused.append(request)
            wanted = set(list(rank.queue)[: self.setting.slots]) if idle else planned
            starting = [request for request in rank.queue if request in wanted]
            for request in starting:
                rank.queue.remove(request)
                self.run(request, rank, step)
                if request in self.paused:
                    self.paused.discard(request)
                    resumed.append(request)
                else:
                    self.in_queues -= 1
                    seated.append(request)
        self.planned = self.balancer.plan([self.batch(rank, step) for rank in self.ranks])
        return seated, resumed, paused

    def batch(self, rank: Rank, step: int) -> RankBatch:
        """The ranks' exchange after this step: the KV blocks of every request."""
        running = [Held(blocks_of(self.kv[r] + step + 1 - began), r) for r, began in rank.running.items()]
        lasting = [held for held in running if self.ends_at[held.request] > step + 1]
        return RankBatch(lasting, [Held(blocks_of(self.kv[request]), request) for request in rank.queue])

    def fits(self, rank: Rank, request: int) -> bool:
        """Whether its KV, with the tokens that every request is about to add, fits beside the rest."""
        capacity = self.setting.kv_capacity_tokens
        if capacity is None:
            return True
        return self.next_kv(rank) + self.kv[request] + self.most_tokens <= capacity

    def next_kv(self, rank: Rank) -> int:
        """KV tokens of all that it holds, on the way or running, with those that each is about to add."""
        coming = sum([self.kv[request] for request in rank.moving])
        return self.loads[rank.index] + coming + rank.held * self.most_tokens

    def run(self, request: int, rank: Rank, step: int) -> None:
        """The request takes part in this step."""
        rank.running[request] = step
        self.loads[rank.index] += self.kv[request]
        self.counts[rank.index] += 1
        self.expect_end(request, step)

    def expect_end(self, request: int, step: int) -> None:
        """Note when it will be done."""
        self.ends_at[request] = step + self.left[request]
        self.ending[self.ends_at[request]].append(request)

    def preempt_overflow(self, step: int) -> list[int]:
        """Take off, newest first, what must go so that the next tokens of each request fit; the requests.

        What is on the way keeps its KV, as in vLLM.
        """
        capacity = self.setting.kv_capacity_tokens
        evicted: list[int] = []
        if capacity is None:
            return evicted
        for rank in self.ranks:
            while self.next_kv(rank) > capacity:
                request = next(reversed(rank.running))
                self.take_off(request, rank, step)
                evicted.append(request)
        return evicted

    def take_off(self, request: int, rank: Rank, step: int) -> None:
        """A running request leaves unfinished; it keeps what it has generated as part of its prompt."""
        generated = self.generated(request, step - rank.running.pop(request))
        self.kv[request] += generated
        self.left[request] -= generated
        self.loads[rank.index] -= self.kv[request]
        self.counts[rank.index] -= 1
        self.ends_at[request] = -1

    def generated(self, request: int, steps: int) -> int:
        """A request's tokens in so many steps since it (re)started."""
        return steps

    def step_tokens(self) -> int:
        """How many tokens the step that begins now yields."""
        return sum(self.counts)

    def grow(self) -> None:
        """Every running request has one token more."""
        self.loads = [load + count for load, count in zip(self.loads, self.counts, strict=True)]

    def gains(self) -> list[tuple[int, int]]:
        """The running requests, and the tokens that each has from this step."""
        return [(request, 1) for rank in self.ranks for request in rank.running]

    def finished(self, step: int) -> list[int]:
        """Requests that are done before this step begins; they leave."""
        done: list[int] = []
        for request in self.ending.pop(step, ()):
            if self.ends_at[request] != step:
                continue  # it was taken off meanwhile
            self.ends_at[request] = -1  # it may stand here twice: taken off, and back on the same step
            self.leave(request)
            done.append(request)
        return done

    def leave(self, request: int) -> None:
        """A running request has all of its answer."""
        rank = self.ranks[self.home[request]]
        del rank.running[request]
        self.loads[rank.index] -= self.kv[request] + self.left[request]
        self.counts[rank.index] -= 1

    def fail(self, index: int, step: int) -> list[int]:
        """The worker is gone; the requests that it held."""
        rank = self.ranks[index]
        rank.up = False
        for request in list(rank.running):
            self.take_off(request, rank, step)
            rank.moving[request] = step
        lost = [*rank.moving, *rank.queue]
        self.in_queues -= len(rank.queue)
        rank.moving.clear()
        rank.queue.clear()
        return lost

    @property
    def active(self) -> int:
        """Requests that run or are on their way."""
        return sum(rank.held for rank in self.ranks)


class DraftingRanks(Ranks):
    """Workers with speculative decoding: of `draft_tokens` guesses per step and request the first few hold.

    Each holds with probability `draft_acceptance` if the one before did, and one token comes in any case. Every request
    has a sequence of its own, so that it is the same under every policy. A step takes as long as without. `draws`, by
    request, belong to all barriers as well.
    """

    def __init__(
        self, setting: Setting, workers: int, kv: list[int], left: list[int], draws: dict[int, random.Random]
    ) -> None:
        super().__init__(setting, workers, kv, left)
        self.most_tokens = 1 + setting.draft_tokens
        self.done: dict[int, int] = {}  # tokens of a running request since it (re)started
        self.coming: dict[int, int] = {}  # tokens of each request in this step
        self.draws = draws
        self.hold = sorted(setting.draft_acceptance ** (index + 1) for index in range(setting.draft_tokens))

    def expect_end(self, request: int, step: int) -> None:
        """Nobody knows yet."""
        self.done[request] = 0
        self.draws.setdefault(request, random.Random(request))

    def generated(self, request: int, steps: int) -> int:
        """See `Ranks`."""
        return self.done.pop(request)

    def step_tokens(self) -> int:
        """Draw them: as many guesses hold as have a higher chance than the number that is drawn."""
        self.coming = coming = {}
        hold, most, left, done, draws = self.hold, self.most_tokens, self.left, self.done, self.draws
        for rank in self.ranks:
            for request in rank.running:
                tokens = most - bisect_right(hold, draws[request].random())
                still = left[request] - done[request]
                coming[request] = tokens if tokens < still else still
        return sum(coming.values())

    def grow(self) -> None:
        """Every running request has its tokens."""
        for request, tokens in self.gains():
            self.done[request] += tokens
            self.loads[self.home[request]] += tokens

    def gains(self) -> list[tuple[int, int]]:
        """See `Ranks`; what has failed in the middle of the step has none."""
        return [(request, self.coming[request]) for rank in self.ranks for request in rank.running]

    def finished(self, step: int) -> list[int]:
        """Requests that are done before this step begins; they leave."""
        ended = [request for request, tokens in self.done.items() if tokens == self.left[request]]
        for request in ended:
            self.leave(request)
            del self.done[request], self.draws[request]
        return ended
