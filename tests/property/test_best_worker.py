"""The worker where F is largest, found among many at once, against a search that scores each of them alone."""

import math
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.balance_route import BalanceRoute, Margins, ProjectedMargins, Room
from balanceroute.core.fscore import present_score
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.pool import WaitingClass
from balanceroute.core.pool_bypass import PoolBypass
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import RequestSpec, Role, WorkerSpec, WorkerState

SLOTS = 4
few = st.sampled_from([1, 2, 500])
sizes = few | st.integers(1, 4_000) | st.sampled_from([1_000_000_000])
remaining = st.sampled_from([None, 0.0, 0.5, 2.0])
workers = st.fixed_dictionaries(
    {
        "slowdown": st.just(1.0) | st.sampled_from([0.25, 1.1, 3.0]),
        "request_tokens": st.sampled_from([0, 0, 7, 900]),
        "held": st.lists(st.tuples(sizes, remaining), max_size=SLOTS),
        "foreign": st.sampled_from([(0, 0), (0, 0), (1, 800)]),
        "state": st.sampled_from([WorkerState.UP, WorkerState.UP, WorkerState.UP, *WorkerState]),
    }
)
alike = workers.map(lambda drawn: {**drawn, "slowdown": 1.0, "request_tokens": 0})
clusters = st.lists(workers, min_size=1, max_size=6) | st.lists(alike, min_size=1, max_size=6)
pools = st.lists(st.tuples(sizes, remaining, st.integers(0, 20)), min_size=1, max_size=14)
knobs = st.builds(
    PolicySettings,
    policy=st.sampled_from(["br_0", "br_h", "br_h"]),
    horizon_steps=st.sampled_from([0, 1, 4, 30]),
    alpha=st.sampled_from([1.0, 0.3]),
    beta=st.none() | st.sampled_from([0.0, 0.3, 1.0, 43.0, 1e6]),
    gamma=st.sampled_from([0.1, 0.86, 1.0]),
    s_greedy=st.sampled_from([0, 3]),
    max_wait_s=st.sampled_from([0.0, 10.0]),
)


def alone(score_of: Iterator[tuple[float, float]]) -> int:
    """The position of the largest score; ties go to the smallest load, then to the first."""
    scores = list(score_of)
    return max(range(len(scores)), key=lambda index: (scores[index][0], -scores[index][1]))


class OneByOne(BalanceRoute):
    """BR-0 or BR-H that scores an overdue request on every worker alone, and anew."""

    def _overdue(self, waiting: WaitingClass, margins: Margins, room: Room, now: float) -> Iterator[Choice]:
        while room.free and (request := waiting.most_overdue(now)):
            if isinstance(margins, ProjectedMargins):
                margins._scores.clear()
            tokens = request.prompt_tokens
            scores = [margins.score(worker)(tokens + worker.spec.request_tokens) for worker in room.workers]
            best = alone((score, room.workers[index].step_load) for index, score in enumerate(scores))
            yield Choice(request, room.workers[best], 0, scores[best])


class BypassOneByOne(AdmissionPolicy):
    """The same without a pool."""

    name = "br_0"
    waits_for_slots = False

    def __init__(self, alpha: float, beta: float | None, margin: int) -> None:
        self.alpha, self.beta, self.margin = alpha, beta, margin

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        beta = self.beta if self.beta is not None else float(snapshot.n_in_barrier)
        while len(snapshot.pool):
            request, envelope = snapshot.pool.front[0], snapshot.envelope
            open_workers = [each for each in snapshot.up if len(each.active) < each.own_slots + self.margin]
            if not open_workers:
                return
            scores = []
            for worker in open_workers:
                slowdown, added = worker.spec.slowdown, request.prompt_tokens + worker.spec.request_tokens
                margin = (envelope - worker.step_load) / slowdown
                scores.append(present_score(margin, self.alpha, beta * slowdown)(added))
            best = alone((score, open_workers[index].step_load) for index, score in enumerate(scores))
            yield Choice(request, open_workers[best], 3, scores[best])


def a_cluster(drawn: list[dict], waiting: list[tuple[int, float | None, int]], knobs: PolicySettings) -> Scheduler:  # type: ignore[type-arg]
    """Workers that hold requests, and a pool in which some are beyond their patience at 20 s."""
    scheduler = Scheduler(make_policy(knobs))
    for number, worker in enumerate(drawn):
        name = f"d{number}"
        spec = WorkerSpec(
            name,
            Role.DECODE,
            slots=SLOTS,
            slowdown=worker["slowdown"],
            request_tokens=worker["request_tokens"],
        )
        scheduler.add_worker(spec, 0.0)
        scheduler.report_decoder(name, *worker["foreign"], 1, 0.0)
        for index, (size, steps) in enumerate(worker["held"]):
            scheduler.submit_prefilled(RequestSpec(f"{name}.{index}", size), 0.0, steps)
            scheduler._bind(Choice(scheduler.snapshot.pool.front[0], scheduler.snapshot.workers[-1], 0, 0.0), 0.0)
    for number, worker in enumerate(drawn):
        scheduler.set_worker_state(f"d{number}", worker["state"], 0.0)
    for number, (size, steps, ready_s) in enumerate(waiting):
        scheduler.submit_prefilled(RequestSpec(f"w{number}", size), float(ready_s), steps)
    return scheduler


@settings(max_examples=150, deadline=None)
@given(clusters, pools, knobs)
def test_overdue_requests_go_where_scoring_each_worker_alone_puts_them(
    drawn: list[dict],
    waiting: list[tuple[int, float | None, int]],
    knobs: PolicySettings,  # type: ignore[type-arg]
) -> None:
    ours, oracle = (a_cluster(drawn, waiting, knobs) for _ in range(2))
    assert isinstance(ours.policy, BalanceRoute)
    oracle.policy = OneByOne(knobs.policy, ours.policy.params)
    assert ours.admit(20.0) == oracle.admit(20.0)


@settings(max_examples=100, deadline=None)
@given(clusters, pools, knobs)
def test_without_a_pool_requests_go_where_scoring_each_worker_alone_puts_them(
    drawn: list[dict],
    waiting: list[tuple[int, float | None, int]],
    knobs: PolicySettings,  # type: ignore[type-arg]
) -> None:
    at_once = replace(knobs, policy="br_0", pool_bypass=True, bypass_margin=1)
    ours, oracle = (a_cluster(drawn, waiting, at_once) for _ in range(2))
    assert isinstance(ours.policy, PoolBypass)
    oracle.policy = BypassOneByOne(at_once.alpha, at_once.beta, at_once.bypass_margin)
    admissions = ours.admit(20.0)
    assert admissions == oracle.admit(20.0)
    assert all(math.isfinite(admission.score) for admission in admissions)
