"""The scheduler under random events, for every policy.

After every call the snapshot equals its recount. Before every decision the state goes through JSON and `explain` must
come to the decision that the scheduler then takes. At the end a rerun of the whole journal must give the same answers,
byte for byte.
"""

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import POLICIES, make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.state import state_to_dict
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import Outcome, Phase, Reject, RequestSpec, Role, Standing, WorkerSpec, WorkerState
from balanceroute.explain import explain
from balanceroute.journal import RecordingScheduler, rerun

HORIZON = 6
prompt_sizes = st.one_of(st.integers(1, 20), st.integers(1, 3_000))
remaining = st.one_of(st.none(), st.floats(0, HORIZON + 1))
outcomes = st.sampled_from([Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED])
policy_settings = st.builds(
    PolicySettings,
    policy=st.sampled_from(sorted(POLICIES)),
    horizon_steps=st.sampled_from([0, 1, 2, HORIZON]),
    beta=st.sampled_from([None, 3.0]),
    s_greedy=st.integers(0, 4),
    r_max=st.integers(1, 5),
    candidate_order=st.sampled_from(["fifo", "ascending", "descending"]),
    slack_placement=st.sampled_from(["free_slots", "load"]),
    guard=st.sampled_from(["pool", "head"]),
    max_wait_s=st.sampled_from([0.0, 3.0, 60.0]),
    hold_s=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
)


def with_bypass(drawn: PolicySettings, bypass: bool) -> PolicySettings:
    """The same with the pool bypass, where the policy has one."""
    if not bypass or drawn.policy != "br_0":
        return drawn
    return PolicySettings(policy="br_0", beta=drawn.beta, pool_bypass=True, bypass_margin=1)


def where(*phases: Phase) -> Any:
    """A rule for requests in these phases: only where there are some, else most calls would change nothing."""
    return precondition(lambda machine: machine.some(0, *phases) is not None)


def holdings(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Who holds what, and how much of it."""
    return {
        "workers": {w.spec.id: (dict.fromkeys(sorted(w.active)), w.load) for w in snapshot.workers if w.active},
        "prefillers": {
            p.spec.id: (p.inflight, p.inflight_tokens, p.pinned, p.pinned_tokens) for p in snapshot.prefillers
        },
        "pool": {tracker.id: (round(tracker.ready_s, 6), tracker.prompt_tokens) for tracker in snapshot.pool},
        "queued": sorted(snapshot.queued),
        "asking": sorted(snapshot.asking),
        "ages": {tracker.id: tracker.age_tokens for tracker in snapshot.requests.values()},
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Every call of the scheduler's API, in any legal order."""

    lock_step = False
    decode_first = False

    @initialize(
        drawn=policy_settings,
        bypass=st.booleans(),
        slots=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        overlap=st.sampled_from([None, 0, 1]),
        shared=st.booleans(),
    )
    def begin(self, drawn: PolicySettings, bypass: bool, slots: list[int], overlap: int | None, shared: bool) -> None:
        self.settings = with_bypass(drawn, bypass)
        self.folder = Path(tempfile.mkdtemp())
        config = SchedulerConfig(
            max_queued=4, max_pooled=8, pool_ttl_s=30.0, queue_deadline_s=20.0, refresh_every_tokens=3,
            lock_step=self.lock_step, decode_first=self.decode_first, overlap_requests=overlap, shared_barrier=shared,
        )  # fmt: skip
        self.scheduler = RecordingScheduler(self.settings, config, self.folder / "journal.jsonl")
        self.now = 0.0
        self.arrivals = self.left = 0
        self.admitted: set[str] = set()
        for index in range(2):
            self.scheduler.add_worker(WorkerSpec(f"p{index}", Role.PREFILL), self.now)
        for index, count in enumerate(slots):
            spec = WorkerSpec(f"d{index}", Role.DECODE, slots=count, slowdown=1 + index / 4)
            self.scheduler.add_worker(spec, self.now)

    def some(self, pick: int, *phases: Phase) -> str | None:
        """One of the requests in these phases."""
        ids = [tracker.id for tracker in self.scheduler.snapshot.requests.values() if tracker.phase in phases]
        return ids[pick % len(ids)] if ids else None

    @rule(size=prompt_sizes, priority=st.integers(-1, 1))
    def submit(self, size: int, priority: int) -> None:
        self.arrivals += 1
        refused = self.scheduler.submit(RequestSpec(f"r{self.arrivals}", size, priority), self.now)
        self.left += isinstance(refused, Reject)

    @rule(size=prompt_sizes, guess=remaining)
    def submit_prefilled(self, size: int, guess: float | None) -> None:
        self.arrivals += 1
        self.scheduler.submit_prefilled(RequestSpec(f"r{self.arrivals}", size), self.now, guess)

    @rule(sizes=st.lists(prompt_sizes, min_size=1, max_size=6), at_once=st.booleans())
    def burst(self, sizes: list[int], at_once: bool) -> None:
        for size in sizes:
            self.submit_prefilled(size, None)
        if at_once:
            self.admit()

    @precondition(lambda self: not self.lock_step)
    @rule()
    def hand_over(self) -> None:
        """A successor that is told where each request stands holds what its predecessor holds."""
        before = self.scheduler.snapshot
        successor = Scheduler(make_policy(self.settings), self.scheduler.config)
        for role in (before.prefillers, before.workers):
            for member in role:
                successor.add_worker(member.spec, self.now)
        for tracker in sorted(before.requests.values(), key=lambda tracker: tracker.order):
            assert successor.adopt(self.standing(tracker), self.now)
        successor.snapshot.check_invariants()
        assert holdings(successor.snapshot) == holdings(before)
        for tracker in before.requests.values():
            if self.is_unasked(tracker):
                successor.put_back(tracker.id, self.now)
                assert math.isclose(successor.snapshot.requests[tracker.id].ready_s, tracker.ready_s, abs_tol=1e-6)
        successor.snapshot.check_invariants()
        for tracker in before.requests.values():  # and each of them can leave from there
            successor.finish(tracker.id, Outcome.CANCELLED, self.now)
        successor.snapshot.check_invariants()
        assert not any(holdings(successor.snapshot)["workers"].values())

    def standing(self, tracker: RequestTracker) -> Standing:
        return Standing(
            RequestSpec(tracker.id, 1, tracker.priority),
            tracker.phase,
            tracker.prompt_tokens,
            waited_s=self.now - tracker.arrived_s,
            ready_s=self.now - tracker.ready_s,
            prefiller="" if tracker.prefiller is None else tracker.prefiller.spec.id,
            decoder="" if tracker.worker is None else tracker.worker.spec.id,
            tokens=tracker.counted,
            earlier_tokens=tracker.earlier_tokens,
            requeues=tracker.requeues,
            asking=tracker.id in self.scheduler.snapshot.asking,
            pushing=tracker.pushing,
        )

    @rule()
    def dispatch(self) -> None:
        for action in self.scheduler.dispatch(self.now):
            assert self.scheduler.snapshot.prefiller(action.worker).state is WorkerState.UP

    @where(Phase.PREFILLING)
    @rule(pick=st.integers(0, 99), size=prompt_sizes, guess=remaining, fails=st.booleans())
    def end_prefill(self, pick: int, size: int, guess: float | None, fails: bool) -> None:
        if request := self.some(pick, Phase.PREFILLING):
            if fails:
                self.scheduler.prefill_failed(request, self.now)
            else:
                self.scheduler.prefilled(request, size, self.now, guess)

    @rule(passes=st.floats(0, 8))
    def time_passes(self, passes: float) -> None:
        self.now += passes

    @rule()
    def admit(self) -> None:
        scheduler = self.scheduler
        written = state_to_dict(self.settings, scheduler.snapshot, self.now, scheduler)
        state = json.loads(json.dumps(written))
        foreseen = explain(state)
        snapshot = self.scheduler.snapshot
        free = {worker.spec.id: worker.free_slots for worker in snapshot.workers}
        admissions = self.scheduler.admit(self.now)
        into_slots = [action for action in admissions if not snapshot.requests[action.request].sent_ahead]
        assert list(foreseen.admissions)[: len(foreseen.admissions) - foreseen.sent_ahead] == into_slots
        assert list(foreseen.admissions) == admissions
        for action in admissions:
            assert action.request not in self.admitted, "INV-4: one admission per request"
            self.admitted.add(action.request)
            free[action.worker] -= 1
            assert self.scheduler.snapshot.worker(action.worker).state is WorkerState.UP
        if self.scheduler.policy.waits_for_slots:
            places = [free[worker.spec.id] + worker.ahead for worker in snapshot.workers]
            assert min(places, default=0) >= 0, "INV-2: no more requests than slots and places ahead of them"
            assert into_slots == admissions or not snapshot.free_slots, "INV-2: none goes ahead of slots that are free"
            idle = len(snapshot.pool) and snapshot.free_slots
            assert not idle or self.scheduler.recheck_s(self.now) > self.now, "INV-8: idle slots need a reason"
            assert not idle or self.settings.policy in ("target_fit", "level_fit")
        if self.lock_step:
            for action in admissions:
                self.scheduler.start(action.request, self.now)

    @precondition(lambda self: not self.lock_step)
    @where(Phase.DECODING)
    @rule(pick=st.integers(0, 99), tokens=st.integers(0, 4))
    def progress(self, pick: int, tokens: int) -> None:
        if request := self.some(pick, Phase.DECODING):
            self.scheduler.progress(request, tokens, self.now)

    @precondition(lambda self: self.lock_step)
    @where(Phase.DECODING)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.step(self.now)

    @rule(guess=st.floats(0, HORIZON + 1))
    def refresh_what_is_due(self, guess: float) -> None:
        for tracker in self.scheduler.due_refreshes():
            self.scheduler.refresh(tracker.id, guess, self.now)

    @where(Phase.QUEUED, Phase.PREFILLING, Phase.POOLED, Phase.DECODING)
    @rule(pick=st.integers(0, 99), outcome=outcomes)
    def finish(self, pick: int, outcome: Outcome) -> None:
        if request := self.some(pick, Phase.QUEUED, Phase.PREFILLING, Phase.POOLED, Phase.DECODING):
            self.scheduler.finish(request, outcome, self.now)
            self.left += 1

    def is_unasked(self, tracker: RequestTracker) -> bool:
        """Whether it is bound to a worker that has not been asked yet, as far as the scheduler can know."""
        if tracker.phase is not Phase.DECODING or tracker.generated or tracker.pushing:
            return False
        return tracker.id not in self.scheduler.snapshot.asking and (tracker.prefiller is None) == self.decode_first

    @rule(drawn=policy_settings, bypass=st.booleans())
    def reroute(self, drawn: PolicySettings, bypass: bool) -> None:
        self.settings = with_bypass(drawn, bypass)
        self.scheduler.reroute(self.settings, self.now)

    @where(Phase.DECODING)
    @rule(pick=st.integers(0, 99))
    def put_back(self, pick: int) -> None:
        snapshot = self.scheduler.snapshot
        unasked = [tracker.id for tracker in snapshot.decoding() if self.is_unasked(tracker)]
        if unasked:
            request = unasked[pick % len(unasked)]
            ready_s = snapshot.requests[request].ready_s
            self.scheduler.put_back(request, self.now)
            self.admitted.discard(request)
            assert snapshot.requests[request].ready_s == ready_s, "its KV is as old as before"

    @where(Phase.POOLED, Phase.DECODING)
    @rule(pick=st.integers(0, 99), anew=st.booleans())
    def requeue(self, pick: int, anew: bool) -> None:
        if request := self.some(pick, Phase.POOLED, Phase.DECODING):
            self.scheduler.requeue(request, self.now, anew=anew)
            self.admitted.discard(request)

    @rule(most=st.none() | st.integers(1, 3))
    def expire(self, most: int | None) -> None:
        late = len(self.scheduler.late(self.now))
        expired = len(self.scheduler.expire(self.now, most))
        assert expired == (late if most is None else min(late, most))
        self.left += expired

    @rule(pick=st.integers(0, 3), state=st.sampled_from(WorkerState), prefill=st.booleans())
    def set_worker_state(self, pick: int, state: WorkerState, prefill: bool) -> None:
        workers = self.scheduler.snapshot.prefillers if prefill else self.scheduler.snapshot.workers
        self.scheduler.set_worker_state(workers[pick % len(workers)].spec.id, state, self.now)

    @rule(requests=st.integers(0, 6), tokens=st.integers(0, 5_000), least=st.integers(0, 2))
    def report_decoder(self, requests: int, tokens: int, least: int) -> None:
        self.scheduler.report_decoder("d0", requests, tokens, least, self.now)

    @rule(capacity=st.sampled_from([0, 500, 5_000]), pick=st.integers(0, 3))
    def report_decoder_memory(self, capacity: int, pick: int) -> None:
        workers = self.scheduler.snapshot.workers
        self.scheduler.report_decoder_memory(workers[pick % len(workers)].spec.id, capacity, self.now)

    @rule(tokens_per_step=st.sampled_from([1.0, 2.5]), pick=st.integers(0, 3))
    def report_tokens_per_step(self, tokens_per_step: float, pick: int) -> None:
        workers = self.scheduler.snapshot.workers
        self.scheduler.report_tokens_per_step(workers[pick % len(workers)].spec.id, tokens_per_step, self.now)

    @rule(usage=st.sampled_from([0.1, 1.0]))
    def report_prefiller(self, usage: float) -> None:
        self.scheduler.report_prefiller("p0", usage, self.now)

    @rule(stops=st.booleans())
    def drain(self, stops: bool) -> None:
        self.scheduler.set_draining(stops, self.now)

    @rule()
    def replace_an_empty_worker(self) -> None:
        for worker in self.scheduler.snapshot.workers:
            if not worker.active:
                self.scheduler.remove_worker(worker.spec.id, self.now)
                self.scheduler.add_worker(worker.spec, self.now)
                return

    @invariant()
    def everything_equals_its_recount(self) -> None:
        snapshot = self.scheduler.snapshot
        snapshot.check_invariants()
        assert self.arrivals == self.left + len(snapshot.requests), "INV-1"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request in list(self.scheduler.snapshot.requests):
            self.scheduler.finish(request, Outcome.CANCELLED, self.now)
        snapshot = self.scheduler.snapshot
        snapshot.check_invariants()
        held = [(w.load, len(w.active)) for w in snapshot.workers]
        held += [(p.inflight + p.pinned, p.inflight_tokens + p.pinned_tokens) for p in snapshot.prefillers]
        assert all(pair == (0, 0) for pair in held) and snapshot.pool.tokens == 0, (
            "INV-5: all counters are back at zero"
        )
        self.scheduler.close()
        report = rerun(self.folder / "journal.jsonl")
        shutil.rmtree(self.folder)
        assert report.difference is None, report.difference


class LockStepMachine(SchedulerMachine):
    """The same for a driver that steps the engine itself."""

    lock_step = True


class DecodeFirstMachine(SchedulerMachine):
    """The same where the decode worker is chosen before the prefill."""

    decode_first = True

    @where(Phase.POOLED)
    @rule(pick=st.integers(0, 99), guess=st.floats(0, HORIZON + 1))
    def refresh_pooled(self, pick: int, guess: float) -> None:
        if request := self.some(pick, Phase.POOLED):
            self.scheduler.refresh(request, guess, self.now)

    @where(Phase.DECODING)
    @rule(pick=st.integers(0, 99))
    def request_prefill(self, pick: int) -> None:
        snapshot = self.scheduler.snapshot
        request = self.some(pick, Phase.DECODING)
        if request and request not in snapshot.asking and not snapshot.requests[request].pushing:
            self.scheduler.request_prefill(request, self.now)

    @rule(pick=st.integers(0, 99), size=prompt_sizes, fails=st.booleans())
    def end_push(self, pick: int, size: int, fails: bool) -> None:
        pushing = [tracker.id for tracker in self.scheduler.snapshot.requests.values() if tracker.pushing]
        if pushing:
            request = pushing[pick % len(pushing)]
            if fails:
                self.scheduler.push_failed(request, self.now)
            else:
                self.scheduler.pushed(request, size, self.now)

    @rule(sizes=st.lists(prompt_sizes, min_size=1, max_size=3), fails=st.none() | st.booleans())
    def push(self, sizes: list[int], fails: bool | None) -> None:
        """The way of a request up to its prefill, or to the end of that; by single rules few get so far."""
        self.burst(sizes, True)
        self.request_prefill(0)
        self.dispatch()
        if fails is not None:
            self.end_push(0, sizes[0], fails)


CHEAP = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestLiveDriver = SchedulerMachine.TestCase
TestLiveDriver.settings = CHEAP
TestLockStepDriver = LockStepMachine.TestCase
TestLockStepDriver.settings = CHEAP
TestDecodeFirst = DecodeFirstMachine.TestCase
TestDecodeFirst.settings = CHEAP
