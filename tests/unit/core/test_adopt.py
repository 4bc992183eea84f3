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
def heir() -> Scheduler:
    return workers(Scheduler(make_policy(SETTINGS), BOUNDS))


def decoding(name: str, **more: object) -> Standing:
    return Standing(RequestSpec(name, 10), Phase.DECODING, 12, decoder="d0", **more)  # type: ignore[arg-type]


def admit_one(heir: Scheduler, name: str) -> None:
    heir.submit_prefilled(RequestSpec(name, 10), 1.0)
    assert [admission.request for admission in heir.admit(1.0)] == [name]


def test_a_slot_is_not_given_twice(heir: Scheduler) -> None:
    assert heir.adopt(decoding("a", tokens=3), 1.0)
    heir.finish("a", Outcome.FINISHED, 1.0)
    admit_one(heir, "other")
    assert not heir.adopt(decoding("b"), 1.0)
    assert list(heir.snapshot.requests) == ["other"]
    heir.snapshot.check_invariants()


def test_an_adopted_request_may_take_a_free_place_ahead_of_a_slot() -> None:
    heir = workers(Scheduler(make_policy(SETTINGS), SchedulerConfig(overlap_requests=1)))
    admit_one(heir, "other")
    heir.submit_prefilled(RequestSpec("ahead", 10), 1.0)
    assert [admission.request for admission in heir.admit(1.0)] == ["ahead"]
    heir.finish("ahead", Outcome.FINISHED, 1.0)
    assert heir.adopt(decoding("b", tokens=3), 1.0)
    assert not heir.adopt(decoding("c", tokens=3), 1.0)


def test_an_adopted_request_beyond_the_slots_counts_as_sent_ahead() -> None:
    heir = workers(Scheduler(make_policy(SETTINGS), SchedulerConfig(overlap_requests=1)))
    for name in "ab":
        assert heir.adopt(decoding(name), 1.0)
    assert [heir.snapshot.requests[name].sent_ahead for name in "ab"] == [False, True]


def test_a_successor_adopts_all_running_requests_even_beyond_the_slots(heir: Scheduler) -> None:
    """The predecessor may have sent requests ahead of slots, or had more of them."""
    for name in "abc":
        assert heir.adopt(decoding(name, tokens=1), 1.0)
    assert heir.snapshot.workers[0].load == 39
    heir.submit_prefilled(RequestSpec("next", 10), 1.0)
    assert not heir.admit(1.0)
    heir.snapshot.check_invariants()


@pytest.mark.parametrize(
    "standing",
    [
        Standing(RequestSpec("a", 10), Phase.DECODING, 10, decoder="d9"),
        Standing(RequestSpec("a", 10), Phase.PREFILLING, 10, prefiller="p9"),
        Standing(RequestSpec("a", 10), Phase.DECODING, 10, decoder="d0", prefiller="p9", pushing=True),
    ],
)
def test_a_request_that_names_an_absent_worker_stays_unknown(heir: Scheduler, standing: Standing) -> None:
    assert not heir.adopt(standing, 1.0)
    assert not heir.snapshot.requests and not heir.snapshot.workers[0].active


def test_an_adopted_request_that_is_put_back_has_waited_since_its_prefill() -> None:
    policy = PolicySettings(policy="br_0", max_wait_s=20.0)
    heir = workers(Scheduler(make_policy(policy), SchedulerConfig(pool_ttl_s=40.0)))
    assert heir.adopt(decoding("a", prefiller="p0", waited_s=9.0, ready_s=5.0), 1_000.0)
    heir.put_back("a", 1_001.0)
    assert heir.expire(1_001.0) == []
    heir.submit_prefilled(RequestSpec("fits better", 900), 1_001.0)
    assert heir.snapshot.pool.front.most_overdue(1_020.0) is heir.snapshot.requests["a"]
    assert [admission.request for admission in heir.admit(1_020.0)] == ["a"]
    assert heir.snapshot.means.wait_s == pytest.approx(0.01 * 25.0)
    heir.snapshot.check_invariants()


def test_kv_stays_pinned_until_the_first_token(heir: Scheduler) -> None:
    heir.adopt(decoding("a", prefiller="p0"), 1.0)
    assert heir.snapshot.prefillers[0].pinned_tokens == 12
    heir.progress("a", 1, 1.0)
    assert heir.snapshot.prefillers[0].pinned_tokens == 0


def test_a_forecast_is_due_at_once(heir: Scheduler) -> None:
    heir.adopt(decoding("a", tokens=2), 1.0)
    assert [tracker.id for tracker in heir.due_refreshes()] == ["a"]


def test_waiting_counts_from_the_arrival_at_the_predecessor(heir: Scheduler) -> None:
    heir.configure(SchedulerConfig(queue_deadline_s=10.0), 20.0)
    heir.adopt(Standing(RequestSpec("late", 10), Phase.QUEUED, 10, waited_s=11.0), 20.0)
    heir.adopt(Standing(RequestSpec("again", 10), Phase.QUEUED, 10, waited_s=11.0, requeues=1), 20.0)
    assert [release.request for release in heir.expire(20.0)] == ["late"]


@pytest.mark.parametrize("phase", [Phase.POOLED, Phase.QUEUED])
def test_requests_wait_in_the_order_of_their_arrival_whichever_relay_holds_them(heir: Scheduler, phase: Phase) -> None:
    waited_s = {"a1": 9.0, "a2": 5.0, "b1": 7.0, "b2": 1.0}  # two holders tell of theirs one after the other
    heir.configure(SchedulerConfig(max_prefill_inflight=1), 20.0)
    for name, seconds in waited_s.items():
        assert heir.adopt(Standing(RequestSpec(name, 10), phase, 10, waited_s=seconds, ready_s=0.5), 20.0)
    for _ in range(2):
        heir.order_by_arrival(20.0)
        heir.snapshot.check_invariants()
        assert [tracker.id for tracker in heir.snapshot.pool] == (["a1", "b1", "a2", "b2"] * (phase is Phase.POOLED))
    prefilled = []
    while phase is Phase.QUEUED and (prefills := heir.dispatch(20.0)):
        for prefill in prefills:
            heir.prefilled(prefill.request, 10, 20.0)
            prefilled.append(prefill.request)
        heir.order_by_arrival(20.0)
    assert [tracker.id for tracker in heir.snapshot.pool] == ["a1", "b1", "a2", "b2"]
    assert prefilled in ([], ["a1", "b1", "a2", "b2"])
    heir.submit_prefilled(RequestSpec("new", 10), 20.0)
    assert [tracker.id for tracker in heir.snapshot.pool][-1] == "new"
    heir.snapshot.check_invariants()


def test_a_journal_of_a_takeover_reruns(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    heir = RecordingScheduler(SETTINGS, BOUNDS, path)
    workers(heir)
    heir.adopt(decoding("a", tokens=3), 1.0)
    heir.adopt(decoding("b"), 1.0)
    heir.adopt(Standing(RequestSpec("c", 10, prefix=[7, 8], block_tokens=4), Phase.POOLED, 10, prefiller="p0"), 1.0)
    heir.order_by_arrival(1.0)
    heir.admit(2.0)
    heir.requeue("a", 3.0, [7, 8])
    heir.dispatch(3.0)
    heir.close()
    report = rerun(path)
    assert report.difference is None and report.calls == 9


def test_a_request_adopted_without_its_prefix_is_prefilled_where_its_prefix_is_cached() -> None:
    heir = Scheduler(make_policy(SETTINGS), SchedulerConfig(prefill_policy="prefix_affinity"))
    for name in ("p0", "p1"):
        heir.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
    heir.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    prefix = list(range(1, 9))
    cached = []
    for name, blocks in (("x", [99]), ("y", prefix)):  # the second goes to the prefiller that the first leaves idle
        heir.submit(RequestSpec(name, 100 * len(blocks), prefix=blocks, block_tokens=100), 1.0)
        cached += heir.dispatch(1.0)
    for name, blocks in (("x", [99]), ("y", prefix)):
        heir.prefilled(name, 100 * len(blocks), 1.0)
        heir.finish(name, Outcome.FINISHED, 1.0)
    for name, given_prefix in (("a", prefix), ("b", ())):
        standing = Standing(RequestSpec(name, 800, block_tokens=100), Phase.DECODING, 800, decoder="d0", tokens=1)
        assert heir.adopt(standing, 2.0)
        heir.requeue(name, 2.0, given_prefix)
        assert list(heir.snapshot.requests[name].prefix) == list(given_prefix)
    (first, *_) = heir.dispatch(2.0)
    assert (first.request, first.worker) == ("a", cached[1].worker)
    assert heir.snapshot.requests["a"].uncached_tokens == 1
    heir.snapshot.check_invariants()
