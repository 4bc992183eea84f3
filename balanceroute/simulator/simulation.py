"""The step simulator: the live router's scheduler and policies on the clock of a simulated engine.

One round of the loop is one engine step, begun at time t. With several barrier groups each has its own clock, and a
round goes on to the end of the step that is over first:

    1. arrivals up to t enter while fewer than W wait (in the pool, or queued at workers), ready at t
    2. the policy runs if a request waits and a slot is free; what it admits is active from this step on
    3. if nothing is active, t jumps to the next thing that happens
    4. loads are recorded; the step takes a * max L + b; every active request gains a token
    5. a request admitted at step x with o tokens to generate leaves before step x + o, and its slot is free

The engine's truth is in `Ranks`; the scheduler only hears of it (`start`, `step`, `finish`, `requeue`), and with a
telemetry lag it hears late. The loop never looks at the router's ledger to move the engine, nor the other way round.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from time import perf_counter

import numpy as np

from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.core.types import Outcome as RequestOutcome
from balanceroute.core.types import RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import InputError, InvariantError
from balanceroute.simulator.oracle import Forecast, TrueLengths
from balanceroute.simulator.prefill_tier import PrefillTier
from balanceroute.simulator.ranks import DraftingRanks, Ranks
from balanceroute.simulator.result import Outcome, Recorder
from balanceroute.simulator.setting import Setting
from balanceroute.traces import BLOCK_TOKENS, Trace

Progress = Callable[[int, int], None]
"""Told the finished requests and all requests; may raise `Stopped`."""
NEVER = float("inf")
Batch = tuple[int, list[Callable[[], object]]]
MOST_STEPS = 20_000_000  # of what must be simulated: ten minutes and 3 GB of figures, twelve days of steps of 50 ms
SHORTEST_WAIT_S = 1e-6  # by which time goes on where a policy asks to be asked again at once


class Stopped(Exception):
    """Whoever watches a replay has enough of it: the outcome is that of the steps until now."""


def check_lengths(lengths: TrueLengths, trace: Trace, setting: Setting) -> None:
    """Raises: InputError where a request fits no worker's memory, or the answers are too long to be simulated."""
    capacity, steps = setting.kv_capacity_tokens, lengths.least_steps(setting.n_workers * setting.slots)
    needed = lengths.largest_kv_tokens(trace) + setting.draft_tokens  # a step that may yield them all has to fit
    if capacity is not None and needed > capacity:
        raise InputError(f"KV capacity {capacity:,} tokens: the largest request needs {needed:,}")
    if steps > MOST_STEPS:
        raise InputError(
            f"the answers of this trace take {steps:,} steps on this cluster at least; accepted are {MOST_STEPS:,}"
        )


@dataclass(slots=True, eq=False)
class Group:
    """The workers of one barrier, from the one with the number `first` on, and their clock.

    `ends_s`: when the step under way ends, None where there is none; `ended_s`: when the last one ended. `told`: what
    each step tells the router, of which the oldest is heard when the lag is over; `telling`: what the next one will.
    """

    ranks: Ranks
    first: int
    steps: int = 0
    ends_s: float | None = None
    ended_s: float = 0.0
    told: deque[Batch] = field(default_factory=deque)
    telling: list[Callable[[], object]] = field(default_factory=list)


class Simulation:
    """One replay of a trace; `run` may be called once."""

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        policy: AdmissionPolicy,
        lengths: TrueLengths,
        forecast: Forecast,
        *,
        with_loads: bool = False,
        stage_timer: StageTimer | None = None,
        check_invariants: bool = False,
    ) -> None:
        self.setting = setting = setting.checked()
        check_lengths(lengths, trace, setting)
        self.arrival_s: list[float] = trace.arrival_s.tolist()
        self.prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self.names = [str(request) for request in range(len(trace))]
        self.keys: list[str] = trace.prompt_key.tolist()
        self.lengths = lengths
        self.forecast = forecast
        self.policy = policy
        self.stage_timer = stage_timer
        self.check_invariants = check_invariants
        self.groups, self.group_of = groups_of(setting, self.prompt_tokens, lengths.tokens)
        self.recorder = Recorder(setting, self.prompt_tokens, with_loads=with_loads)
        self.t, self.steps = 0.0, 0
        self.next_arrival, self.finished = 0, 0
        self.changes = self.planned_changes()
        self.trace = trace
        # what must be prefilled again needs a prefiller: one that takes no time, unless a tier is simulated
        self.tier = PrefillTier(
            setting.prefillers or int(setting.requeues),
            setting.prefill_tokens_per_s if setting.prefillers else NEVER,
            setting.prefix_cache_tokens,
        )
        self.cached_tokens: dict[str, int] = {}  # of the prompts that are being prefilled
        self.prefill_done: list[tuple[float, int, str]] = []  # (when, sequence, request)
        self.prefills = 0
        self.room_since_s = 0.0  # when the waiting area last became open: requests left it, or a first worker came back
        self.scheduler = self.new_scheduler()

    def planned_changes(self) -> list[tuple[float, int, WorkerState]]:
        """Failures and recoveries in order of time; failures of one worker that overlap are one."""
        outages: dict[int, list[tuple[float, float]]] = {}
        for failure in sorted(self.setting.failures, key=lambda failure: failure.start_s):
            start, end = failure.start_s, NEVER if failure.end_s is None else failure.end_s
            spans = outages.setdefault(failure.worker, [])
            if spans and start <= spans[-1][1]:
                start, end = spans[-1][0], max(spans.pop()[1], end)
            spans.append((start, end))
        changes = [(start, worker, WorkerState.DOWN) for worker, spans in outages.items() for start, _ in spans]
        changes += [
            (end, worker, WorkerState.UP) for worker, spans in outages.items() for _, end in spans if end < NEVER
        ]
        return sorted(changes, key=lambda change: change[0])

    def new_scheduler(self) -> Scheduler:
        """A scheduler with all workers; prefillers only where prompts go through them."""
        setting = self.setting
        config = SchedulerConfig(
            max_pooled=setting.pool,
            refresh_every_tokens=self.forecast.refresh_every_tokens,
            lock_step=setting.lock_step,  # else tokens are told request by request
            prefill_policy=setting.prefill_policy,
            overlap_requests=setting.overlap_requests,
            shared_barrier=setting.barrier_groups < setting.n_workers or setting.n_workers == 1,
        )
        scheduler = Scheduler(self.policy, config)
        for name in self.tier.names:
            scheduler.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
            scheduler.report_prefix_cache(name, setting.prefix_cache_tokens, 0.0)
        for index in range(setting.n_workers):
            slowdown = setting.slowdowns[index] if setting.slowdowns and setting.cost_aware else 1.0
            each = setting.request_tokens if setting.cost_aware else 0
            spec = WorkerSpec(f"d{index}", Role.DECODE, slots=setting.slots, slowdown=slowdown, request_tokens=each)
            scheduler.add_worker(spec, 0.0)
            scheduler.report_decoder_memory(spec.id, setting.kv_capacity_tokens or 0, 0.0)
            scheduler.report_tokens_per_step(spec.id, setting.tokens_per_step, 0.0)
        return scheduler

    def run(self, on_progress: Progress | None = None) -> Outcome:
        """Replay the whole trace, or until `on_progress` stops it."""
        with suppress(Stopped):
            self.play(on_progress)
        latency_s = np.array(self.recorder.ready_s) - np.array(self.arrival_s)
        return self.recorder.outcome(
            np.array(self.lengths.tokens, dtype=np.float64), self.t, latency_s, self.tier.computed_ratio
        )

    def play(self, on_progress: Progress | None) -> None:
        """Step after step until all requests have finished."""
        n, rounds = len(self.arrival_s), 0
        while self.finished < n:
            rounds += 1  # not steps: there may be none for long
            if on_progress is not None and rounds % 256 == 0:
                on_progress(self.finished, n)
            self.change_workers()
            self.hear_idle()
            self.arrive()
            self.decide()
            for group in self.groups:
                if group.ends_s is None:
                    self.begin_step(group)
            if not self.end_step():
                self.jump()
                continue
            if self.check_invariants:
                self.scheduler.snapshot.check_invariants()
        if on_progress is not None:
            on_progress(n, n)

    # -- arrivals and prefill ---------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Let in what has arrived and, with a prefill tier, what has been prefilled by now."""
        if self.setting.prefillers:
            self.arrive_through_prefill()
            return
        self.dispatch(self.t)  # what is to be prefilled again, which takes no time without a tier
        scheduler = self.scheduler
        while self.next_arrival < len(self.arrival_s) and self.arrival_s[self.next_arrival] <= self.t:
            if self.waiting >= self.setting.pool:
                return
            request = self.next_arrival
            self.next_arrival += 1
            self.recorder.ready_s[request] = self.t
            scheduler.submit_prefilled(self.spec(request), self.t, self.expected(request))

    def arrive_through_prefill(self) -> None:
        """Arrivals and ends of prefills up to now, in order of time; each may let the next prefill begin.

        What arrived while nothing more was let in enters when that ended, which was with the step before.
        """
        while True:
            arrival = done = NEVER
            if self.next_arrival < len(self.arrival_s) and self.lets_in:
                arrival = max(self.arrival_s[self.next_arrival], self.room_since_s)
            if self.prefill_done:
                done = self.prefill_done[0][0]
            now = min(arrival, done)
            if now > self.t:
                break
            if arrival <= done:
                self.scheduler.submit(self.spec(self.next_arrival), now)
                self.next_arrival += 1
            else:
                self.prefilled(heappop(self.prefill_done)[2], now)
            self.dispatch(now)
        self.dispatch(self.t)

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
        if self.recorder.ready_s[request] < 0:
            self.recorder.ready_s[request] = now
        tokens = self.scheduler.snapshot.requests[request_id].prompt_tokens
        age = self.scheduler.snapshot.requests[request_id].earlier_tokens
        cached = self.cached_tokens.pop(request_id)
        self.scheduler.prefilled(request_id, tokens, now, self.expected(request, age), cached)

    def spec(self, request: int) -> RequestSpec:
        return RequestSpec(
            self.names[request],
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

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, in the pool or at workers, or are prefilled or about to be."""
        snapshot = self.scheduler.snapshot
        queued = sum([group.ranks.queued for group in self.groups])
        return len(snapshot.pool) + queued + len(snapshot.queued) + len(self.prefill_done)

    # -- decisions --------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Let the policy run where there is something to decide, and bind what it admits."""
        snapshot = self.scheduler.snapshot
        if not len(snapshot.pool) or (self.policy.waits_for_slots and not snapshot.has_room):
            return
        if self.stage_timer is not None:
            self.stage_timer("begin")
        began = perf_counter()
        admissions = self.scheduler.admit(self.t)
        self.recorder.decision_us.append((perf_counter() - began) * 1e6)
        for admission in admissions:
            worker = int(admission.worker[1:])
            group = self.group_of[worker]
            group.ranks.bind(int(admission.request), worker - group.first)

    def fill(self, group: Group) -> None:
        """The engine takes what was sent to it, as far as slots and memory go."""
        self.room_since_s = self.t
        ranks = group.ranks
        for request in ranks.overfull(group.steps):
            self.recorder.recomputed += 1
            self.tell_requeue(group, request)
        if ranks.balancer is not None:
            self.follow_plan(group)
            return
        for request in ranks.fill(group.steps):
            self.recorder.admit(request, self.steps, self.t)
            self.forecast.started(request, group.steps, ranks.left[request])
            self.tell_start(group, request)

    def follow_plan(self, group: Group) -> None:
        """The engine runs what its balancer planned."""
        seated, resumed, paused = group.ranks.follow_plan(group.steps)
        for request in seated:
            self.recorder.admit(request, self.steps, self.t)
            self.forecast.started(request, group.steps, group.ranks.left[request])
        for request in paused:
            self.recorder.pause(request, self.t)
        for request in resumed:
            self.recorder.resume(request, self.t)

    # -- the engine's step ------------------------------------------------------------------------------------

    def begin_step(self, group: Group) -> None:
        """One barrier-to-barrier step of a group, if it has something to do."""
        self.fill(group)
        if not group.ranks.active:
            return
        loads, level = self.step_loads(group)
        duration = self.setting.step_cost_s * max(loads) + self.setting.step_overhead_s
        self.recorder.step(loads, level, group.ranks.step_tokens(), self.t, duration)
        if self.recorder.with_loads:
            self.recorder.loads.extend([load for each in self.groups for load in each.ranks.loads])
        group.ends_s = self.t + duration
        self.steps += 1

    def step_loads(self, group: Group) -> tuple[list[int] | list[float], float]:
        """What the step costs each worker that is up, and what it would cost all if they were level.

        In KV tokens of a worker of slowdown 1.
        """
        ranks, setting = group.ranks, self.setting
        loads: list[int] | list[float] = ranks.loads
        if setting.request_tokens:
            loads = [load + setting.request_tokens * count for load, count in zip(loads, ranks.counts, strict=True)]
        total = sum(loads)
        slowdowns = setting.slowdowns[group.first : group.first + len(loads)]
        if slowdowns:
            loads = [load * slowdown for load, slowdown in zip(loads, slowdowns, strict=True)]
        alike = not slowdowns and not setting.failures
        level = total / (len(loads) if alike else up_capacity(ranks, slowdowns))
        if setting.failures:
            loads = [load for load, rank in zip(loads, ranks.ranks, strict=True) if rank.up]
        return loads, level

    def end_step(self) -> bool:
        """Go on to the end of the step that is over first, or to what comes before it for a group that does nothing.

        False: no step is under way.
        """
        busy = [group for group in self.groups if group.ends_s is not None]
        if not busy:
            return False
        group = min(busy, key=lambda group: group.ends_s or 0.0)
        assert group.ends_s is not None
        if len(busy) < len(self.groups) and (moment := min(self.moments(), default=NEVER)) < group.ends_s:
            self.t = moment
            return True
        ranks, self.t, group.ended_s, group.ends_s = group.ranks, group.ends_s, group.ends_s, None
        group.steps += 1
        ranks.grow()
        if self.setting.lock_step:
            group.telling.append(lambda: self.scheduler.step(self.t))
        else:
            self.tell_tokens(group, ranks.gains())
        for request in ranks.finished(group.steps):
            self.recorder.finished_s[request] = self.t
            self.finished += 1
            self.tell_finish(group, request)
        group.told.append((group.steps, group.telling))
        group.telling = []
        while len(group.told) > self.setting.telemetry_lag_steps:
            self.hear(*group.told.popleft())
        return True

    def moments(self) -> list[float]:
        """When something happens next, beside ends of steps."""
        moments = [change[0] for change in self.changes[:1]]
        moments += [entry[0] for entry in self.prefill_done[:1]]
        if self.next_arrival < len(self.arrival_s):
            moments.append(self.arrival_s[self.next_arrival])
        moments += [self.heard_s(group) for group in self.groups if group.told and not group.ranks.active]
        return [moment for moment in moments if moment > self.t]

    def jump(self) -> None:
        """Nothing runs: go to the next moment at which something happens."""
        if any(group.told or group.telling for group in self.groups):
            self.hear_all()
            return
        later = self.moments()
        if not later and self.waiting:  # all that is left is held back by the policy, which says until when
            at = self.scheduler.recheck_s(self.t)
            later = [max(at, self.t + SHORTEST_WAIT_S)] if at < NEVER else []
        if not later:
            outside = len(self.arrival_s) - self.next_arrival
            waits = f"at {self.t:.3f} s nothing runs and {self.waiting + outside} requests wait for ever"
            if not any(rank.up for group in self.groups for rank in group.ranks.ranks):
                raise InputError(f"failures: no worker is left, and none comes back: {waits}")
            raise InvariantError(waits)
        self.t = min(later)

    # -- what the router hears --------------------------------------------------------------------------------

    def tell_tokens(self, group: Group, gains: list[tuple[int, int]]) -> None:
        def progress() -> None:
            tell, names, now = self.scheduler.progress, self.names, self.t
            for request, tokens in gains:
                tell(names[request], tokens, now)

        group.telling.append(progress)

    def tell_start(self, group: Group, request: int) -> None:
        tell = self.scheduler.start if self.setting.lock_step else self.scheduler.began
        group.telling.append(lambda: tell(self.names[request], self.t))

    def tell_finish(self, group: Group, request: int) -> None:
        group.telling.append(lambda: self.hear_finish(self.names[request]))

    def tell_requeue(self, group: Group, request: int) -> None:
        group.telling.append(lambda: self.scheduler.requeue(self.names[request], self.t))

    def hear_finish(self, request_id: str) -> None:
        self.forecast.finished(self.scheduler, self.scheduler.snapshot.requests[request_id], self.t)
        self.scheduler.finish(request_id, RequestOutcome.FINISHED, self.t)

    def hear(self, step: int, events: list[Callable[[], object]]) -> None:
        """The router learns what happened up to the end of a step, and renews its forecasts."""
        for event in events:
            event()
        self.forecast.renew(self.scheduler, step, self.t)

    def hear_all(self) -> None:
        """The router catches up with the engine."""
        for group in self.groups:
            self.hear_group(group)

    def hear_group(self, group: Group) -> None:
        while group.told:
            self.hear(*group.told.popleft())
        events, group.telling = group.telling, []
        for event in events:
            event()

    def hear_idle(self) -> None:
        """The router hears of groups that have nothing to run: no step of theirs follows after which it would."""
        for group in self.groups:
            if group.told and not group.ranks.active and self.t >= self.heard_s(group):
                self.hear_group(group)

    def heard_s(self, group: Group) -> float:
        """When the router has heard all of a group that ran out of requests: the lag in steps of nothing later."""
        return group.ended_s + self.setting.telemetry_lag_steps * self.setting.step_overhead_s

    def change_workers(self) -> None:
        """Carry out the failures and recoveries that are due."""
        while self.changes and self.changes[0][0] <= self.t:
            _, index, state = self.changes.pop(0)
            self.hear_all()
            if not self.scheduler.snapshot.n_in_barrier:
                self.room_since_s = self.t
            self.scheduler.set_worker_state(f"d{index}", state, self.t)
            group = self.group_of[index]
            if state is WorkerState.UP:
                group.ranks.ranks[index - group.first].up = True
                continue
            for request in group.ranks.fail(index - group.first, group.steps):
                self.recorder.recomputed += 1
                self.scheduler.requeue(self.names[request], self.t)


def groups_of(setting: Setting, prompt_tokens: list[int], lengths: list[int]) -> tuple[list[Group], list[Group]]:
    """The groups, as equal in size as can be, and the one of each worker."""
    kv, left = list(prompt_tokens), list(lengths)
    kind = partial(DraftingRanks, draws={}) if setting.draft_tokens else Ranks
    bounds = [setting.n_workers * index // setting.barrier_groups for index in range(setting.barrier_groups + 1)]
    sizes = [(first, end - first) for first, end in pairwise(bounds)]
    groups = [Group(kind(setting, workers, kv, left), first) for first, workers in sizes]
    return groups, [group for group in groups for _ in group.ranks.ranks]


def up_capacity(ranks: Ranks, slowdowns: Sequence[float]) -> float:
    """What the workers that are up can carry per token of the common level: each the inverse of its slowdown."""
    slowdowns = slowdowns or (1.0,) * len(ranks.ranks)
    return sum(1.0 / slowdown for slowdown, rank in zip(slowdowns, ranks.ranks, strict=True) if rank.up)
