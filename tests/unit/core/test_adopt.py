"""A scheduler that takes over from another; the property machine compares whole states (`hand_over`)."""

from pathlib import Path

import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, Phase, RequestSpec, Role, Standing, WorkerSpec
from balanceroute.journal import RecordingScheduler, rerun

SETTINGS = PolicySettings(policy="br_h", horizon_steps=8)
BOUNDS = SchedulerConfig(refresh_every_tokens=4)


def workers(scheduler: Scheduler) -> Scheduler:
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=1), 0.0)
    return scheduler


@pytest.fixture
def successor() -> Scheduler:
    return workers(Scheduler(make_policy(SETTINGS), BOUNDS))


def decoding(name: str, **more: object) -> Standing:
    return Standing(RequestSpec(name, 10), Phase.DECODING, 12, decoder="d0", **more)  # type: ignore[arg-type]


def admit_one(successor: Scheduler, name: str) -> None:
    successor.submit_prefilled(RequestSpec(name, 10), 1.0)
    assert [admission.request for admission in successor.admit(1.0)] == [name]


def test_a_slot_is_not_given_twice(successor: Scheduler) -> None:
    assert successor.adopt(decoding("a", tokens=3), 1.0)
    successor.finish("a", Outcome.FINISHED, 1.0)
    admit_one(successor, "other")
    assert not successor.adopt(decoding("b"), 1.0)
    assert list(successor.snapshot.requests) == ["other"]
    successor.snapshot.check_invariants()


def test_an_adopted_request_may_take_a_free_place_ahead_of_a_slot() -> None:
    successor = workers(Scheduler(make_policy(SETTINGS), SchedulerConfig(overlap_requests=1)))
    admit_one(successor, "other")
    successor.submit_prefilled(RequestSpec("ahead", 10), 1.0)
    assert [admission.request for admission in successor.admit(1.0)] == ["ahead"]
    successor.finish("ahead", Outcome.FINISHED, 1.0)
    assert successor.adopt(decoding("b", tokens=3), 1.0)
    assert not successor.adopt(decoding("c", tokens=3), 1.0)


def test_an_adopted_request_beyond_the_slots_counts_as_sent_ahead() -> None:
    successor = workers(Scheduler(make_policy(SETTINGS), SchedulerConfig(overlap_requests=1)))
    for name in "ab":
        assert successor.adopt(decoding(name), 1.0)
    assert [successor.snapshot.requests[name].sent_ahead for name in "ab"] == [False, True]


def test_a_successor_adopts_all_running_requests_even_beyond_the_slots(successor: Scheduler) -> None:
    """The predecessor may have sent requests ahead of slots, or had more of them."""
    for name in "abc":
        assert successor.adopt(decoding(name, tokens=1), 1.0)
    assert successor.snapshot.workers[0].load == 39
    successor.submit_prefilled(RequestSpec("next", 10), 1.0)
    assert not successor.admit(1.0)
    successor.snapshot.check_invariants()


@pytest.mark.parametrize(
    "standing",
    [
        Standing(RequestSpec("a", 10), Phase.DECODING, 10, decoder="d9"),
        Standing(RequestSpec("a", 10), Phase.PREFILLING, 10, prefiller="p9"),
        Standing(RequestSpec("a", 10), Phase.DECODING, 10, decoder="d0", prefiller="p9", pushing=True),
    ],
)
def test_a_request_that_names_an_absent_worker_stays_unknown(successor: Scheduler, standing: Standing) -> None:
    assert not successor.adopt(standing, 1.0)
    assert not successor.snapshot.requests and not successor.snapshot.workers[0].active


def test_an_adopted_request_that_is_put_back_has_waited_since_its_prefill() -> None:
    policy = PolicySettings(policy="br_0", max_wait_s=20.0)
    successor = workers(Scheduler(make_policy(policy), SchedulerConfig(pool_ttl_s=40.0)))
    assert successor.adopt(decoding("a", prefiller="p0", waited_s=9.0, ready_s=5.0), 1_000.0)
    successor.put_back("a", 1_001.0)
    assert successor.expire(1_001.0) == []
    successor.submit_prefilled(RequestSpec("fits better", 900), 1_001.0)
    assert successor.snapshot.pool.front.most_overdue(1_020.0) is successor.snapshot.requests["a"]
    assert [admission.request for admission in successor.admit(1_020.0)] == ["a"]
    assert successor.snapshot.means.wait_s == pytest.approx(0.01 * 25.0)
    successor.snapshot.check_invariants()


def test_an_adopted_request_whose_prefiller_has_gone_can_be_put_back(successor: Scheduler) -> None:
    assert successor.adopt(decoding("a", prefiller="p9"), 1.0)
    successor.put_back("a", 1.0)
    assert [admission.request for admission in successor.admit(1.0)] == ["a"]
    successor.snapshot.check_invariants()


def test_kv_stays_pinned_until_the_first_token(successor: Scheduler) -> None:
    successor.adopt(decoding("a", prefiller="p0"), 1.0)
    assert successor.snapshot.prefillers[0].pinned_tokens == 12
    successor.progress("a", 1, 1.0)
    assert successor.snapshot.prefillers[0].pinned_tokens == 0


def test_a_forecast_is_due_at_once(successor: Scheduler) -> None:
    successor.adopt(decoding("a", tokens=2), 1.0)
    assert [tracker.id for tracker in successor.due_refreshes()] == ["a"]


def test_waiting_counts_from_the_arrival_at_the_predecessor(successor: Scheduler) -> None:
    successor.configure(SchedulerConfig(queue_deadline_s=10.0), 20.0)
    successor.adopt(Standing(RequestSpec("late", 10), Phase.QUEUED, 10, waited_s=11.0), 20.0)
    successor.adopt(Standing(RequestSpec("again", 10), Phase.QUEUED, 10, waited_s=11.0, requeues=1), 20.0)
    assert [release.request for release in successor.expire(20.0)] == ["late"]


@pytest.mark.parametrize("phase", [Phase.POOLED, Phase.QUEUED])
def test_requests_wait_in_the_order_of_their_arrival_whichever_relay_holds_them(
    successor: Scheduler, phase: Phase
) -> None:
    waited_s = {"a1": 9.0, "a2": 5.0, "b1": 7.0, "b2": 1.0}  # two holders tell of theirs one after the other
    successor.configure(SchedulerConfig(max_prefill_inflight=1), 20.0)
    for name, seconds in waited_s.items():
        assert successor.adopt(Standing(RequestSpec(name, 10), phase, 10, waited_s=seconds, ready_s=0.5), 20.0)
    for _ in range(2):
        successor.order_by_arrival(20.0)
        successor.snapshot.check_invariants()
        assert [tracker.id for tracker in successor.snapshot.pool] == (
            ["a1", "b1", "a2", "b2"] * (phase is Phase.POOLED)
        )
    prefilled = []
    while phase is Phase.QUEUED and (prefills := successor.dispatch(20.0)):
        for prefill in prefills:
            successor.prefilled(prefill.request, 10, 20.0)
            prefilled.append(prefill.request)
        successor.order_by_arrival(20.0)
    assert [tracker.id for tracker in successor.snapshot.pool] == ["a1", "b1", "a2", "b2"]
    assert prefilled in ([], ["a1", "b1", "a2", "b2"])
    successor.submit_prefilled(RequestSpec("new", 10), 20.0)
    assert [tracker.id for tracker in successor.snapshot.pool][-1] == "new"
    successor.snapshot.check_invariants()


def test_a_journal_of_a_takeover_reruns(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    successor = RecordingScheduler(SETTINGS, BOUNDS, path)
    workers(successor)
    successor.adopt(decoding("a", tokens=3), 1.0)
    successor.adopt(decoding("b"), 1.0)
    successor.adopt(
        Standing(RequestSpec("c", 10, prefix=[7, 8], block_tokens=4), Phase.POOLED, 10, prefiller="p0"), 1.0
    )
    successor.order_by_arrival(1.0)
    successor.admit(2.0)
    successor.requeue("a", 3.0, [7, 8])
    successor.dispatch(3.0)
    successor.close()
    report = rerun(path)
    assert report.difference is None and report.calls == 9


def test_a_request_adopted_without_its_prefix_is_prefilled_where_its_prefix_is_cached() -> None:
    successor = Scheduler(make_policy(SETTINGS), SchedulerConfig(prefill_policy="prefix_affinity"))
    for name in ("p0", "p1"):
        successor.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
    successor.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    prefix = list(range(1, 9))
    cached = []
    for name, blocks in (("x", [99]), ("y", prefix)):  # the second goes to the prefiller that the first leaves idle
        successor.submit(RequestSpec(name, 100 * len(blocks), prefix=blocks, block_tokens=100), 1.0)
        cached += successor.dispatch(1.0)
    for name, blocks in (("x", [99]), ("y", prefix)):
        successor.prefilled(name, 100 * len(blocks), 1.0)
        successor.finish(name, Outcome.FINISHED, 1.0)
    for name, given_prefix in (("a", prefix), ("b", ())):
        standing = Standing(RequestSpec(name, 800, block_tokens=100), Phase.DECODING, 800, decoder="d0", tokens=1)
        assert successor.adopt(standing, 2.0)
        successor.requeue(name, 2.0, given_prefix)
        assert list(successor.snapshot.requests[name].prefix) == list(given_prefix)
    (first, *_) = successor.dispatch(2.0)
    assert (first.request, first.worker) == ("a", cached[1].worker)
    assert successor.snapshot.requests["a"].uncached_tokens == 1
    successor.snapshot.check_invariants()
