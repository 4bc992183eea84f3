"""Classes of priority against a brute-force oracle: one class after the other, each decided as if it were alone."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import Choice
from balanceroute.core.promotion import PATIENCE_SHARE, PROMOTION_PERIOD
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot_json import outline_to_dict
from balanceroute.core.state import state_to_dict
from balanceroute.core.types import Admit, Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.explain import explain

SLOTS = 6
Waiting = list[tuple[int, int, int]]  # prompt tokens, priority, how many seconds ago it came into the pool

knobs = st.builds(
    PolicySettings,
    policy=st.sampled_from(
        ["br_0", "br_h", "target_fit", "level_fit", "pool_fifo", "join_shortest_queue", "least_kv", "bypass"]
    ),
    horizon_steps=st.sampled_from([0, 3]),
    s_greedy=st.sampled_from([0, 2, 5]),
    r_max=st.sampled_from([1, 3]),
    candidate_order=st.sampled_from(["fifo", "ascending", "descending"]),
    slack_placement=st.sampled_from(["free_slots", "load"]),
    guard=st.sampled_from(["pool", "head"]),
    max_wait_s=st.sampled_from([0.0, 3.0, math.inf]),
    hold_s=st.just(0.0),
).map(lambda drawn: replace(drawn, policy="br_0", pool_bypass=True) if drawn.policy == "bypass" else drawn)
clusters = st.lists(st.lists(st.integers(1, 2_000), max_size=SLOTS), min_size=1, max_size=4)
sizes = st.one_of(st.integers(1, 12), st.integers(1, 4_000))
memories = st.sampled_from([0, 3_000, 9_000])  # tokens that fit a worker; 0: it does not tell
pools = st.lists(st.tuples(sizes, st.integers(-2, 2), st.integers(0, 8)), min_size=1, max_size=14)
NOW = 10.0


def a_scheduler(knobs: PolicySettings, loads: list[list[int]], waiting: Waiting, memory_tokens: int = 0) -> Scheduler:
    """Workers that hold requests of these sizes, and a pool."""
    scheduler = Scheduler(make_policy(knobs))
    for worker, held in enumerate(loads):
        scheduler.add_worker(WorkerSpec(f"d{worker}", Role.DECODE, slots=SLOTS), 0.0)
        scheduler.report_decoder_memory(f"d{worker}", memory_tokens, 0.0)
        for index, size in enumerate(held):
            scheduler.submit_prefilled(RequestSpec(f"d{worker}.{index}", size), 0.0, 2.0 if size % 3 == 0 else None)
            scheduler._bind(Choice(scheduler.snapshot.pool.front[0], scheduler.snapshot.workers[worker], 0, 0.0), 0.0)
    for index, (size, priority, waited_s) in enumerate(waiting):
        scheduler.submit_prefilled(RequestSpec(f"w{index}", size, priority), NOW - waited_s)
    return scheduler


def class_after_class(scheduler: Scheduler) -> list[Admit]:
    """The oracle: nothing but one class is in the pool when the policy decides on it."""
    pool = scheduler.snapshot.pool
    everybody = list(pool)
    for tracker in everybody:
        pool.remove(tracker)
    admissions = []
    for priority in sorted({tracker.priority for tracker in everybody}):
        for tracker in everybody:
            if tracker.priority == priority:
                pool.add(tracker)
        admissions += scheduler.admit(NOW)
        if len(pool):
            break  # no worker takes more
    return admissions


@settings(max_examples=400, deadline=None)
@given(knobs, clusters, pools)
def test_every_policy_serves_one_class_after_the_other_as_if_each_were_alone(
    knobs: PolicySettings, loads: list[list[int]], waiting: Waiting
) -> None:
    scheduler = a_scheduler(knobs, loads, waiting)
    admissions = scheduler.admit(NOW)
    scheduler.snapshot.check_invariants()
    assert admissions == class_after_class(a_scheduler(knobs, loads, waiting))


@settings(max_examples=150, deadline=None)
@given(knobs, clusters, pools, st.integers(-3, 3))
def test_a_priority_that_all_requests_share_changes_no_decision(
    knobs: PolicySettings, loads: list[list[int]], waiting: Waiting, priority: int
) -> None:
    alike = [(size, priority, waited_s) for size, _, waited_s in waiting]
    zero = [(size, 0, waited_s) for size, _, waited_s in waiting]
    assert a_scheduler(knobs, loads, alike).admit(NOW) == a_scheduler(knobs, loads, zero).admit(NOW)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(knobs, knobs.map(lambda drawn: replace(drawn, policy="level_fit", pool_bypass=False))),
    clusters,
    pools,
    memories,
)
def test_no_request_is_held_back_while_a_later_class_is_served(
    knobs: PolicySettings, loads: list[list[int]], waiting: Waiting, memory_tokens: int
) -> None:
    scheduler = a_scheduler(replace(knobs, hold_s=5.0), loads, waiting, memory_tokens)
    served = [waiting[int(admission.request[1:])][1] for admission in scheduler.admit(NOW)]
    assert served == sorted(served)
    left = [tracker.priority for tracker in scheduler.snapshot.pool]
    assert not served or not left or served[-1] <= min(left)


@pytest.mark.parametrize("policy", ["br_0", "br_h", "target_fit", "level_fit", "pool_fifo"])
def test_a_later_class_takes_its_share_only_when_it_is_about_to_expire(policy: str) -> None:
    """One slot frees per second and a request of the first class arrives: the second one lives on what is promoted."""
    ttl_s, seconds, random = 40, 300, Random(1)
    chosen = PolicySettings(policy=policy)
    scheduler = Scheduler(make_policy(chosen), SchedulerConfig(pool_ttl_s=ttl_s))
    scheduler.add_worker(WorkerSpec("d", Role.DECODE, slots=1), 0.0)
    ready_s: dict[str, int] = {}
    promoted: list[int] = []
    for second in range(seconds):
        for name in (f"first{second}", f"second{second}")[: 2 if second % 2 else 1]:
            spec = RequestSpec(name, random.randint(1, 3_000), int(name.startswith("second")))
            scheduler.submit_prefilled(spec, second)
            ready_s[name] = second
        scheduler.expire(second)
        for tracker in list(scheduler.snapshot.decoding()):
            scheduler.finish(tracker.id, Outcome.FINISHED, second)
        document = state_to_dict(chosen, scheduler.snapshot, second, scheduler)
        outline = {**document, **outline_to_dict(scheduler.snapshot, second, scheduler)}
        (admission,) = scheduler.admit(second)
        assert explain(document).admissions == (admission,), "a state that is written before says who comes"
        assert scheduler.policy.horizon_steps or explain(outline).admissions == (admission,)
        if admission.request.startswith("second"):
            promoted.append(second)
            assert second - ready_s[admission.request] >= PATIENCE_SHARE * ttl_s
        scheduler.snapshot.check_invariants()
    assert {later - earlier for earlier, later in pairwise(promoted)} == {PROMOTION_PERIOD}
    assert len(promoted) >= (seconds - ttl_s) // PROMOTION_PERIOD


@pytest.mark.parametrize("policy", ["br_0", "br_h", "target_fit", "level_fit", "pool_fifo"])
def test_without_a_time_to_live_a_later_class_waits_for_ever(policy: str) -> None:
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy)))
    scheduler.add_worker(WorkerSpec("d", Role.DECODE, slots=1), 0.0)
    scheduler.submit_prefilled(RequestSpec("later", 100, 1), 0.0)
    for hour in range(100):
        scheduler.submit_prefilled(RequestSpec(f"first{hour}", 3_000), 3600.0 * hour)
        assert [admission.request for admission in scheduler.admit(3600.0 * hour)] == [f"first{hour}"]
        scheduler.finish(f"first{hour}", Outcome.FINISHED, 3600.0 * hour)
    assert [admission.request for admission in scheduler.admit(4e5)] == ["later"]


@pytest.mark.parametrize("policy", ["br_0", "br_h", "target_fit", "level_fit"])
def test_a_request_of_an_urgent_class_is_admitted_next_among_two_hundred_overdue_ones(policy: str) -> None:
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy)))
    scheduler.add_worker(WorkerSpec("d", Role.DECODE, slots=1), 0.0)
    for index in range(200):
        scheduler.submit_prefilled(RequestSpec(f"r{index}", 100 + 17 * index % 900), 0.0)
    scheduler.submit_prefilled(RequestSpec("urgent", 100_000, -1), 1.0)
    assert [admission.request for admission in scheduler.admit(100.0)] == ["urgent"]  # all others are overdue
