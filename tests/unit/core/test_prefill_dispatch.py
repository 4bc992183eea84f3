"""Which requests get prefillers in one call, and in several."""

import pytest

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, Prefill, Reject, RejectReason, RequestSpec
from tests.unit.core.builders import a_request, a_scheduler

SIZES = {"a": 400, "b": 100, "c": 300, "d": 200, "e": 500}


def waiting(decode_first: bool) -> Scheduler:
    """Requests of two priorities that wait for two prefillers."""
    scheduler = a_scheduler(prefillers=2, slots=9, config=SchedulerConfig(decode_first=decode_first))
    for number, (name, size) in enumerate(SIZES.items()):
        scheduler.submit(a_request(name, size, number % 2), 0.0)
    if decode_first:
        scheduler.admit(0.0)
        for name in SIZES:
            scheduler.request_prefill(name, 0.0)
    return scheduler


@pytest.mark.parametrize("decode_first", [False, True], ids=["prefill first", "decode first"])
def test_in_several_calls_of_a_few_each_request_gets_the_prefiller_that_it_gets_in_one(decode_first: bool) -> None:
    at_once, few = waiting(decode_first), waiting(decode_first)
    calls = [few.dispatch(0.0, 2) for _ in range(4)]
    assert [len(prefills) for prefills in calls] == [2, 2, 1, 0]
    assert sum(calls, []) == at_once.dispatch(0.0)
    few.snapshot.check_invariants()


def test_those_whose_decode_worker_asks_count_among_the_few() -> None:
    scheduler = waiting(decode_first=True)
    scheduler.configure(SchedulerConfig(), 0.0)
    scheduler.submit(a_request("later"), 0.0)
    calls = [[prefill.request for prefill in scheduler.dispatch(0.0, 3)] for _ in range(3)]
    assert calls == [["a", "c", "e"], ["b", "d", "later"], []]


def test_decode_first_a_full_pool_keeps_no_request_from_a_prefiller_that_needs_no_slot() -> None:
    config = SchedulerConfig(decode_first=True, max_pooled=1, max_prefill_inflight=1)
    scheduler = a_scheduler(prefillers=1, slots=1, config=config)
    for name in ("scored", "next"):
        scheduler.submit(RequestSpec(name, 100, max_new_tokens=0), 0.0)
    assert scheduler.dispatch(0.0) == [Prefill("scored", "p0")]
    scheduler.submit(a_request("fills the pool"), 0.0)
    scheduler.finish("scored", Outcome.FINISHED, 1.0)
    assert scheduler.snapshot.pool_is_full and scheduler.dispatch(1.0) == [Prefill("next", "p0")]


@pytest.mark.parametrize("decode_first", [False, True])
def test_a_prefill_for_a_prompt_that_is_only_scored_takes_no_room_in_the_pool(decode_first: bool) -> None:
    """With prefill first, as many of them as the pool has places kept all others from the prefillers."""
    scheduler = a_scheduler(workers=1, config=SchedulerConfig(max_pooled=1, decode_first=decode_first))
    scheduler.submit(RequestSpec("scored", 100, max_new_tokens=0), 0.0)
    assert scheduler.dispatch(0.0) and not scheduler.snapshot.pool_is_full
    scheduler.snapshot.check_invariants()
    scheduler.submit(a_request("decodes"), 0.0)
    assert decode_first or scheduler.dispatch(0.0) == [Prefill("decodes", "p0")]
    assert scheduler.snapshot.pool_is_full
    scheduler.finish("scored", Outcome.FINISHED, 1.0)
    scheduler.snapshot.check_invariants()


def test_decode_first_the_queue_and_the_pool_refuse_only_the_requests_that_would_come_there() -> None:
    """Scoring requests that filled the queue had all others refused, and a full pool scoring requests."""
    config = SchedulerConfig(decode_first=True, max_pooled=1, max_queued=1)
    scheduler = a_scheduler(prefillers=1, slots=1, config=config)
    assert scheduler.submit(RequestSpec("scored", 100, max_new_tokens=0), 0.0) is None
    assert scheduler.submit(a_request("decodes"), 0.0) is None
    full = RejectReason.QUEUE_FULL
    assert scheduler.submit(a_request("another"), 0.0) == Reject("another", full)
    assert scheduler.submit(RequestSpec("also scored", 100, max_new_tokens=0), 0.0) == Reject("also scored", full)
    assert scheduler.dispatch(0.0) == [Prefill("scored", "p0")]
    assert scheduler.submit(RequestSpec("also scored", 100, max_new_tokens=0), 0.0) is None
