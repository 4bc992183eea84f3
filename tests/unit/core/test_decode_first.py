"""Decode-first scheduling: the worker before the prefill, as the layerwise connector wants it."""

import pytest

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, Phase, Prefill, Reject, RejectReason, RequestSpec, WorkerState
from balanceroute.errors import InvariantError
from tests.unit.core.builders import a_request, a_scheduler


def decode_first(**config: object) -> Scheduler:
    return a_scheduler(config=SchedulerConfig(decode_first=True, **config))  # type: ignore[arg-type]


def decoding(scheduler: Scheduler, request_id: str = "r", prompt_tokens: int = 100) -> None:
    scheduler.submit(a_request(request_id, prompt_tokens), 0.0)
    assert [admission.request for admission in scheduler.admit(0.0)] == [request_id]


def pushing(scheduler: Scheduler) -> None:
    decoding(scheduler)
    scheduler.request_prefill("r", 0.0)
    assert scheduler.dispatch(0.0) == [Prefill("r", "p0")]


def test_an_arrival_is_admitted_before_any_prefill_with_its_estimated_size() -> None:
    scheduler = decode_first()
    scheduler.submit(a_request("r", 100), 0.0)
    assert scheduler.dispatch(0.0) == []
    assert [admission.worker for admission in scheduler.admit(0.0)] == ["d0"]
    assert scheduler.snapshot.workers[0].load == 100


def test_a_pooled_arrival_keeps_its_prediction() -> None:
    scheduler = a_scheduler("br_h", config=SchedulerConfig(decode_first=True), horizon_steps=10)
    scheduler.submit(a_request("r", 100), 0.0)
    scheduler.refresh("r", 4.0, 0.0)
    scheduler.admit(0.0)
    assert scheduler.snapshot.requests["r"].remaining(10) == 4.0
    scheduler.snapshot.check_invariants()


def test_the_prefiller_is_chosen_when_the_decode_worker_asks_and_its_answer_corrects_the_load() -> None:
    scheduler = decode_first()
    pushing(scheduler)
    prefiller, worker = scheduler.snapshot.prefillers[0], scheduler.snapshot.workers[0]
    assert (prefiller.inflight, prefiller.inflight_tokens) == (1, 100)
    scheduler.progress("r", 2, 1.0)
    scheduler.pushed("r", 130, 1.0)
    scheduler.snapshot.check_invariants()
    assert (prefiller.inflight, prefiller.pinned, worker.load) == (0, 0, 132)


def test_a_decoding_request_waits_while_every_prefiller_is_above_its_kv_limit() -> None:
    scheduler = decode_first(kv_usage_limit=0.9)
    scheduler.report_prefiller("p0", 0.95, 0.0)
    decoding(scheduler)
    scheduler.request_prefill("r", 0.0)
    assert scheduler.dispatch(0.0) == []
    assert scheduler.snapshot.requests["r"].phase is Phase.DECODING
    scheduler.report_prefiller("p0", 0.5, 1.0)
    assert scheduler.dispatch(1.0) == [Prefill("r", "p0")]


@pytest.mark.parametrize("phase", ["pooled", "decoding", "asking", "pushing", "pushed"])
@pytest.mark.parametrize("leaves", ["finish", "requeue"])
def test_a_finish_in_any_phase_releases_everything_once(phase: str, leaves: str) -> None:
    scheduler = decode_first()
    if phase == "pooled":
        scheduler.submit(a_request(), 0.0)
    elif phase in ("pushing", "pushed"):
        pushing(scheduler)
    else:
        decoding(scheduler)
    if phase == "asking":
        scheduler.request_prefill("r", 0.0)
    elif phase == "pushed":
        scheduler.pushed("r", 100, 0.0)
    if leaves == "finish":
        scheduler.finish("r", Outcome.CANCELLED, 1.0)
    else:
        scheduler.requeue("r", 1.0)
        assert scheduler.snapshot.requests["r"].phase is Phase.POOLED
        scheduler.finish("r", Outcome.CANCELLED, 1.0)
    snapshot = scheduler.snapshot
    snapshot.check_invariants()
    assert [(w.load, len(w.active)) for w in snapshot.workers] == [(0, 0), (0, 0)]
    assert (snapshot.prefillers[0].inflight, snapshot.prefillers[0].pinned) == (0, 0)
    assert not snapshot.asking and not snapshot.pool.tokens


def test_a_recomputed_request_goes_back_to_the_pool_with_what_it_generated_and_may_ask_again() -> None:
    scheduler = decode_first()
    pushing(scheduler)
    scheduler.pushed("r", 100, 0.0)
    scheduler.progress("r", 7, 1.0)
    scheduler.requeue("r", 2.0)
    assert scheduler.snapshot.pool.tokens == 107
    scheduler.admit(2.0)
    scheduler.request_prefill("r", 2.0)
    assert scheduler.dispatch(2.0) == [Prefill("r", "p0")]
    scheduler.snapshot.check_invariants()


@pytest.mark.parametrize("computed", [False, True], ids=["pushing", "pushed"])
def test_a_prompt_whose_push_ends_with_its_decode_does_not_count_as_cached(computed: bool) -> None:
    scheduler = decode_first()
    scheduler.submit(RequestSpec("r", 200, prefix=[1, 2], block_tokens=100), 0.0)
    scheduler.admit(0.0)
    scheduler.request_prefill("r", 0.0)
    scheduler.dispatch(0.0)
    if computed:
        scheduler.pushed("r", 200, 1.0)
    scheduler.requeue("r", 2.0)
    assert scheduler.snapshot.prefillers[0].cache.matched([1, 2]) == (2 if computed else 0)


def test_a_prefill_that_failed_is_dispatched_again() -> None:
    scheduler = decode_first()
    pushing(scheduler)
    scheduler.push_failed("r", 0.0)
    scheduler.snapshot.check_invariants()
    assert scheduler.dispatch(0.0) == [Prefill("r", "p0")]


@pytest.mark.parametrize("dispatched", [False, True], ids=["asking", "pushing"])
def test_a_request_whose_worker_has_requested_its_prefill_cannot_be_put_back(dispatched: bool) -> None:
    scheduler = decode_first()
    decoding(scheduler)
    scheduler.request_prefill("r", 0.0)
    if dispatched:
        scheduler.dispatch(0.0)
    with pytest.raises(InvariantError):
        scheduler.put_back("r", 0.0)
    scheduler.snapshot.check_invariants()


def test_requesting_a_prefill_twice_or_answering_an_unrequested_one_is_refused() -> None:
    scheduler = decode_first()
    decoding(scheduler)
    for call in (lambda: scheduler.pushed("r", 1, 0.0), lambda: scheduler.push_failed("r", 0.0)):
        with pytest.raises(InvariantError):
            call()
    scheduler.request_prefill("r", 0.0)
    with pytest.raises(InvariantError):
        scheduler.request_prefill("r", 0.0)
    scheduler.dispatch(0.0)
    with pytest.raises(InvariantError):
        scheduler.request_prefill("r", 0.0)


def test_arrivals_are_refused_when_the_pool_is_full() -> None:
    scheduler = decode_first(max_pooled=1)
    for worker in ("d0", "d1"):
        scheduler.set_worker_state(worker, WorkerState.DRAINING, 0.0)
    assert scheduler.submit(a_request("a"), 0.0) is None
    assert scheduler.submit(a_request("b"), 0.0) == Reject("b", RejectReason.QUEUE_FULL)


def test_a_full_pool_refuses_no_arrival_that_needs_no_slot() -> None:
    scheduler = decode_first(max_pooled=1)
    for worker in ("d0", "d1"):
        scheduler.set_worker_state(worker, WorkerState.DRAINING, 0.0)
    scheduler.submit(a_request("fills the pool"), 0.0)
    assert scheduler.submit(RequestSpec("scored", 100, max_new_tokens=0), 0.0) is None
    assert scheduler.dispatch(0.0) == [Prefill("scored", "p0")]


def test_a_bound_of_no_waiting_request_refuses_all_also_those_that_would_begin_in_the_pool() -> None:
    scheduler = decode_first(max_queued=0)
    assert scheduler.submit(a_request("a"), 0.0) == Reject("a", RejectReason.QUEUE_FULL)


def test_requests_of_a_lower_priority_value_are_prefilled_first() -> None:
    scheduler = decode_first()
    for name, priority in (("later", 1), ("first", 0)):
        scheduler.submit(a_request(name, 100, priority), 0.0)
    scheduler.admit(0.0)
    for name in ("later", "first"):
        scheduler.request_prefill(name, 0.0)
    assert [prefill.request for prefill in scheduler.dispatch(0.0)] == ["first", "later"]
