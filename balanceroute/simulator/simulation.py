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

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from time import perf_counter

import numpy as np
from mypy_extensions import mypyc_attr

from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import InputError, InvariantError
from balanceroute.simulator.arrivals import NEVER, Arrivals
from balanceroute.simulator.groups import Group, group_names, ranks_by_barrier, up_capacity
from balanceroute.simulator.oracle import Forecast, TrueLengths
from balanceroute.simulator.prefill_tier import PrefillTier
from balanceroute.simulator.result import Outcome, Recorder
from balanceroute.simulator.setting import Setting
from balanceroute.simulator.telemetry import Channel
from balanceroute.traces import Trace

Progress = Callable[[int, int], None]
"""Told the finished requests and all requests; may raise `Stopped`."""
MOST_STEPS = 20_000_000  # of what must be simulated: ten minutes and 3 GB of figures, twelve days of steps of 50 ms
SHORTEST_WAIT_S = 1e-6  # time goes on by this much where a policy asks to be asked again at once
MOST_RECHECKS = 10_000  # times that a policy is asked again while nothing runs: it will never admit


class Stopped(Exception):
    """Ends a simulation early; the result covers the steps until now."""


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


@mypyc_attr(allow_interpreted_subclasses=True)  # tests look into its steps
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
        self.trace = trace
        prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self.names = [str(request) for request in range(len(trace))]
        self.lengths = lengths
        self.forecast = forecast
        self.policy = policy
        self.stage_timer = stage_timer
        self.check_invariants = check_invariants
        self.recorder = Recorder(setting, prompt_tokens, with_loads=with_loads)
        self.t, self.steps = 0.0, 0
        self.rechecks = 0  # since something ran
        self.finished = 0
        self.up = setting.n_workers
        self.changes = self.planned_changes()
        # what must be prefilled again needs a prefiller: one that takes no time, unless a tier is simulated
        self.tier = PrefillTier(
            setting.prefillers or int(setting.requeues),
            setting.prefill_tokens_per_s if setting.prefillers else NEVER,
            setting.prefix_cache_tokens,
        )
        self.scheduler = self.new_scheduler()
        self.groups = [
            Group(ranks, first, Channel(self.scheduler, forecast, self.names, setting))
            for first, ranks in ranks_by_barrier(setting, prompt_tokens, lengths.tokens)
        ]
        self.group_of = [group for group in self.groups for _ in group.ranks.ranks]  # by worker
        self.arrivals = Arrivals(
            trace, setting, self.scheduler, self.tier, forecast, self.recorder, self.queued_at_workers
        )

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
            lock_step=setting.lock_step,  # otherwise tokens are reported request by request
            prefill_policy=setting.prefill_policy,
            overlap_requests=setting.overlap_requests,
            shared_barrier=setting.barrier_groups < setting.n_workers or setting.n_workers == 1,
        )
        scheduler = Scheduler(self.policy, config)
        for name in self.tier.names:
            scheduler.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
            scheduler.report_prefix_cache(name, setting.prefix_cache_tokens, 0.0)
        for index, group in enumerate(group_names(setting)):
            slowdown = setting.slowdowns[index] if setting.slowdowns and setting.cost_aware else 1.0
            each = setting.request_tokens if setting.cost_aware else 0
            spec = WorkerSpec(
                f"d{index}",
                Role.DECODE,
                slots=setting.slots,
                slowdown=slowdown,
                request_tokens=each,
                barrier_group=group,
            )
            scheduler.add_worker(spec, 0.0)
            scheduler.report_decoder_memory(spec.id, setting.kv_capacity_tokens or 0, 0.0)
            scheduler.report_tokens_per_step(spec.id, setting.tokens_per_step, 0.0)
        return scheduler

    def queued_at_workers(self) -> int:
        """Requests that wait at workers for a slot."""
        return sum([group.ranks.queued for group in self.groups])

    def run(self, on_progress: Progress | None = None) -> Outcome:
        """Replay the whole trace, or until `on_progress` stops it."""
        with suppress(Stopped):
            self.play(on_progress)
        latency_s = np.array(self.recorder.ready_s) - self.trace.arrival_s
        return self.recorder.outcome(
            np.array(self.lengths.tokens, dtype=np.float64), self.t, latency_s, self.tier.computed_ratio
        )

    def play(self, on_progress: Progress | None) -> None:
        """Step after step until all requests have finished."""
        n, rounds = len(self.trace), 0
        while self.finished < n:
            rounds += 1  # not steps: there may be none for long
            if on_progress is not None and rounds % 256 == 0:
                on_progress(self.finished, n)
            self.change_workers()
            self.deliver_idle()
            self.arrivals.let_in(self.t)
            self.decide()
            for group in self.groups:
                if group.ends_s == NEVER:
                    self.begin_step(group)
            if not self.end_step():
                self.jump()
                continue
            if self.check_invariants:
                self.scheduler.snapshot.check_invariants()
        if on_progress is not None:
            on_progress(n, n)

    # -- decisions --------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Let the policy run where there is something to decide, and bind what it admits."""
        snapshot = self.scheduler.snapshot
        if not len(snapshot.pool) or (self.policy.waits_for_slots and not snapshot.has_room):
            return
        began = perf_counter()
        if self.stage_timer is not None:
            self.stage_timer("begin")
        admissions = self.scheduler.admit(self.t)
        self.recorder.decision_us.append((perf_counter() - began) * 1e6)
        for admission in admissions:
            worker = int(admission.worker[1:])
            group = self.group_of[worker]
            group.ranks.bind(int(admission.request), worker - group.first)

    def fill(self, group: Group) -> None:
        """The engine takes what was sent to it, as far as slots and memory go."""
        self.arrivals.room_since_s = self.t
        ranks = group.ranks
        for request in ranks.preempt_overflow(group.steps):
            self.recorder.recomputed += 1
            group.channel.requeue(request)
        if ranks.balancer is not None:
            self.follow_plan(group)
            return
        for request in ranks.fill(group.steps):
            self.recorder.admit(request, self.steps, self.t)
            self.forecast.started(request, group.steps, ranks.left[request])
            group.channel.start(request)

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
        self.recorder.step(loads, level, group.ranks.step_tokens(), self.t, duration, self.up)
        if self.recorder.with_loads:
            self.recorder.loads.extend([load for each in self.groups for load in each.ranks.loads])
        group.ends_s = self.t + duration
        self.steps += 1
        self.rechecks = 0

    def step_loads(self, group: Group) -> tuple[list[int] | list[float], float]:
        """The step's cost on each worker that is up, and on all if they were level.

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
        busy = [group for group in self.groups if group.ends_s < NEVER]
        if not busy:
            return False
        group = min(busy, key=attrgetter("ends_s"))
        if len(busy) < len(self.groups):
            moment = self.t if self.arrivals.may_enter(self.t) else min(self.moments(), default=NEVER)
            if moment < group.ends_s:
                self.t = moment
                return True
        ranks, self.t, group.ended_s, group.ends_s = group.ranks, group.ends_s, group.ends_s, NEVER
        group.steps += 1
        ranks.grow()
        if self.setting.lock_step:
            group.channel.step()
        else:
            group.channel.tokens(ranks.gains())
        for request in ranks.finished(group.steps):
            self.recorder.finished_s[request] = self.t
            self.finished += 1
            group.channel.finish(request)
        group.channel.end_step(group.steps, self.t)
        return True

    def moments(self) -> list[float]:
        """When something happens next, beside ends of steps."""
        moments = [change[0] for change in self.changes[:1]] + self.arrivals.moments()
        moments += [
            group.channel.delivered_s(group.ended_s)
            for group in self.groups
            if group.channel.has_steps and not group.ranks.active
        ]
        return [moment for moment in moments if moment > self.t]

    def jump(self) -> None:
        """Nothing runs: go to the next moment at which something happens."""
        if not all(group.channel.is_empty for group in self.groups):
            self.deliver_all()
            return
        later = self.moments()
        if len(self.scheduler.snapshot.pool):  # held back by the policy, which says until when
            at = self.scheduler.recheck_s(self.t)
            self.rechecks += 1
            later += [max(at, self.t + SHORTEST_WAIT_S)] if at < NEVER and self.rechecks <= MOST_RECHECKS else []
        if not later:
            stuck = self.arrivals.waiting + self.arrivals.outside
            waits = f"at {self.t:.3f} s nothing runs and {stuck} requests wait for ever"
            if not any(rank.up for group in self.groups for rank in group.ranks.ranks):
                raise InputError(f"failures: no worker is left, and none comes back: {waits}")
            asked = f": the policy was asked {MOST_RECHECKS:,} times" if self.rechecks > MOST_RECHECKS else ""
            raise InvariantError(waits + asked)
        self.t = min(later)

    # -- the router and the engine ----------------------------------------------------------------------------

    def deliver_all(self) -> None:
        """Deliver the events of all groups to the router."""
        for group in self.groups:
            group.channel.deliver_all(self.t)

    def deliver_idle(self) -> None:
        """Deliver the events of groups that have nothing to run: no step of theirs follows that would do it."""
        for group in self.groups:
            channel = group.channel
            if channel.has_steps and not group.ranks.active and self.t >= channel.delivered_s(group.ended_s):
                channel.deliver_all(self.t)

    def change_workers(self) -> None:
        """Carry out the failures and recoveries that are due."""
        while self.changes and self.changes[0][0] <= self.t:
            _, index, state = self.changes.pop(0)
            self.deliver_all()
            if not self.scheduler.snapshot.n_in_barrier:
                self.arrivals.room_since_s = self.t
            self.scheduler.set_worker_state(f"d{index}", state, self.t)
            group = self.group_of[index]
            self.up += 1 if state is WorkerState.UP else -1
            if state is WorkerState.UP:
                group.ranks.ranks[index - group.first].up = True
                continue
            for request in group.ranks.fail(index - group.first, group.steps):
                self.recorder.recomputed += 1
                self.scheduler.requeue(self.names[request], self.t)
