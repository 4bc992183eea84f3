"""The life of a request through the scheduler, and what it holds in each phase."""

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import (
    Outcome,
    Phase,
    Prefill,
    Reject,
    RejectReason,
    Release,
    RequestSpec,
    Role,
    WorkerSpec,
    WorkerState,
)
from balanceroute.errors import InputError, InvariantError
from tests.unit.core.builders import a_request, a_scheduler, admitted, pool_all


def into_prefill(scheduler: Scheduler, request_id: str) -> None:
    scheduler.submit(a_request(request_id, 100), 0.0)
    scheduler.dispatch(0.0)


def into_decode(scheduler: Scheduler, request_id: str = "r") -> None:
    into_prefill(scheduler, request_id)
    scheduler.prefilled(request_id, 100, 1.0)
    scheduler.admit(1.0)


def test_outcomes_and_states_may_be_given_as_texts() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.progress("r", 5, 2.0)
    scheduler.finish("r", "finished", 3.0)
    assert scheduler.snapshot.means.answers == 1  # it was learned from
    scheduler.set_worker_state("d0", "down", 4.0)
    assert scheduler.snapshot.down == [0] and scheduler.snapshot.workers[0].state is WorkerState.DOWN


@pytest.mark.parametrize(("call", "of"), [("finish", "r"), ("set_worker_state", "d0")])
def test_a_text_that_is_no_outcome_or_state_is_refused(call: str, of: str) -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    with pytest.raises(ValueError, match="'gone away' is not a valid"):
        getattr(scheduler, call)(of, "gone away", 3.0)
    scheduler.snapshot.check_invariants()
    assert "r" in scheduler.snapshot.requests


NAN = math.nan


@pytest.mark.parametrize("wrong", [
    {"prompt_tokens": -1}, {"prompt_tokens": NAN}, {"prompt_tokens": 2.5}, {"prompt_tokens": "9"},
    {"max_new_tokens": -1}, {"max_new_tokens": NAN}, {"priority": NAN}, {"priority": "high"},
], ids=str)  # fmt: skip
def test_a_request_with_a_number_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    scheduler = a_scheduler()
    for submit in (scheduler.submit, scheduler.submit_prefilled):
        with pytest.raises(InputError, match=rf"{next(iter(wrong))} .*: accepted is a (whole )?number"):
            submit(RequestSpec("r", **{"prompt_tokens": 1, **wrong}), 0.0)
    assert not scheduler.snapshot.requests


def test_the_refusal_of_a_number_of_numpys_says_that_it_is_not_of_pythons_own() -> None:
    scheduler = a_scheduler()
    prompts = np.array([100, 200])
    with pytest.raises(InputError, match="accepted is a whole number of Python's own from 0"):
        scheduler.submit(RequestSpec("r", prompts[0]), 0.0)
    scheduler.submit(RequestSpec("r", prompts.tolist()[0]), 0.0)


@pytest.mark.parametrize("wrong", [
    {"slots": 0}, {"slots": NAN}, {"slots": 2.5}, {"slots": "4"}, {"slots": True}, {"slowdown": 0.0},
    {"slowdown": NAN}, {"slowdown": math.inf}, {"slowdown": "1"}, {"request_tokens": -1}, {"request_tokens": NAN},
    {"role": "decode"},
], ids=str)  # fmt: skip
def test_a_worker_with_a_value_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    scheduler = a_scheduler()
    with pytest.raises(InputError, match=rf"worker new: {next(iter(wrong))} .*: accepted is"):
        scheduler.add_worker(WorkerSpec(**{"id": "new", "role": Role.DECODE, **wrong}), 0.0)
    assert all(worker.spec.id != "new" for worker in scheduler.snapshot.workers)


@pytest.mark.parametrize(("name", "values"), [
    ("max_queued", (-1, NAN, 2.5, "3")), ("max_pooled", (0, -1, NAN, "3")), ("max_prefill_inflight", (0, NAN)),
    ("refresh_every_tokens", (0, -4, NAN)), ("overlap_requests", (-1, NAN, 2.5)),
    ("pool_ttl_s", (-5, NAN, "9", None)), ("queue_deadline_s", (-0.1, NAN)), ("ageing", (-1, NAN, math.inf)),
    ("kv_usage_limit", (0, -1, NAN, 90)), ("prefill_policy", ("fastest", None)),
    ("lock_step", ("yes",)), ("decode_first", (1,)), ("shared_barrier", (None,)),
], ids=str)  # fmt: skip
def test_a_bound_that_makes_no_sense_is_refused_by_name_at_the_start_and_later(
    name: str, values: tuple[object, ...]
) -> None:
    scheduler = a_scheduler()
    before = scheduler.config
    for value in values:
        config = SchedulerConfig(**{name: value})  # type: ignore[arg-type]
        for give in (
            lambda config: Scheduler(scheduler.policy, config),
            lambda config: scheduler.configure(config, 0.0),
        ):
            with pytest.raises(InputError, match=f"^{name} "):
                give(config)
    assert scheduler.config is before


def everything_held(scheduler: Scheduler) -> list[float]:
    snapshot = scheduler.snapshot
    held: list[float] = [len(snapshot.requests), len(snapshot.pool), len(snapshot.queued), snapshot.pool.tokens]
    held += [value for w in snapshot.workers for value in (w.load, len(w.active), w.running)]
    held += [value for p in snapshot.prefillers for value in (p.inflight, p.inflight_tokens, p.pinned, p.pinned_tokens)]
    return [*held, int(snapshot.projected_loads().sum())]


def test_the_state_of_a_worker_that_is_not_there_is_refused_whatever_its_tier() -> None:
    scheduler = a_scheduler()
    with pytest.raises(InvariantError, match="^no worker d9$"):
        scheduler.set_worker_state("d9", "draining", 0.0)


def test_a_request_passes_through_prefill_pool_and_decode_and_leaves_nothing_behind() -> None:
    scheduler = a_scheduler()
    assert scheduler.submit(a_request("r", 90), 0.0) is None
    assert scheduler.dispatch(0.0) == [Prefill("r", "p0")]
    scheduler.prefilled("r", 100, 1.0)
    assert admitted(scheduler, 1.0) == [("r", "d0")]
    scheduler.progress("r", 3, 2.0)
    assert (scheduler.snapshot.workers[0].load, scheduler.snapshot.workers[0].free_slots) == (103, 1)
    assert scheduler.finish("r", Outcome.FINISHED, 3.0) == Release("r", Phase.DECODING)
    assert not any(everything_held(scheduler))


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILLING, Phase.POOLED, Phase.DECODING], ids=str)
def test_a_request_that_leaves_in_any_phase_releases_what_it_held(phase: Phase) -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(), 0.0)
    if phase is not Phase.QUEUED:
        scheduler.dispatch(0.0)
    if phase in (Phase.POOLED, Phase.DECODING):
        scheduler.prefilled("r", 100, 1.0)
    if phase is Phase.DECODING:
        scheduler.admit(1.0)
    assert scheduler.finish("r", Outcome.CANCELLED, 2.0) == Release("r", phase)
    assert not any(everything_held(scheduler))
    scheduler.snapshot.check_invariants()


def test_the_first_token_releases_the_prefillers_kv() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    assert scheduler.snapshot.prefillers[0].pinned_tokens == 100
    scheduler.progress("r", 1, 2.0)
    assert scheduler.snapshot.prefillers[0].pinned == 0
    scheduler.finish("r", Outcome.CANCELLED, 3.0)
    assert not any(everything_held(scheduler))


def test_a_second_release_raises_instead_of_clamping() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.finish("r", Outcome.FINISHED, 2.0)
    with pytest.raises(InvariantError, match="r is not here"):
        scheduler.finish("r", Outcome.FINISHED, 2.0)


def test_calls_in_the_wrong_phase_or_of_an_unknown_request_are_refused_and_change_nothing() -> None:
    """INV-10."""
    scheduler = a_scheduler()
    scheduler.submit(a_request(), 0.0)
    for call in (
        lambda: scheduler.progress("r", 1, 0.0),
        lambda: scheduler.prefilled("r", 10, 0.0),
        lambda: scheduler.prefill_failed("r", 0.0),
        lambda: scheduler.requeue("r", 0.0),
        lambda: scheduler.submit(a_request(), 0.0),
        lambda: scheduler.progress("unknown", 1, 0.0),
        lambda: scheduler.prefilled("unknown", 10, 0.0),
    ):
        with pytest.raises(InvariantError):
            call()
        scheduler.snapshot.check_invariants()


@pytest.mark.parametrize(
    ("named", "falsify"),
    [
        ("d0 load", lambda snapshot: setattr(snapshot.workers[0], "load", snapshot.workers[0].load + 1)),
        ("d0 running", lambda snapshot: setattr(snapshot.workers[0], "running", 7)),
        ("p0 inflight", lambda snapshot: setattr(snapshot.prefillers[0], "inflight", 1)),
        ("p0 pinned", lambda snapshot: setattr(snapshot.prefillers[0], "pinned", 2)),
        ("prefilling", lambda snapshot: setattr(snapshot, "prefilling", 1)),
        ("pooled", lambda snapshot: snapshot.requests.pop("waits")),
    ],
)
def test_a_count_that_differs_from_its_requests_breaks_an_invariant(
    named: str, falsify: Callable[[ClusterSnapshot], object]
) -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.submit_prefilled(a_request("waits"), 2.0)
    scheduler.snapshot.check_invariants()
    falsify(scheduler.snapshot)
    with pytest.raises(InvariantError, match=f"{named}: kept .*, recounted "):
        scheduler.snapshot.check_invariants()


def test_a_failed_prefill_queues_again_before_younger_requests() -> None:
    scheduler = a_scheduler()
    into_prefill(scheduler, "old")
    scheduler.submit(a_request("young"), 1.0)
    scheduler.prefill_failed("old", 2.0)
    assert [action.request for action in scheduler.dispatch(2.0)] == ["old", "young"]


def test_a_request_with_pinned_kv_cannot_ask_for_another_prefill_beside_it() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    with pytest.raises(InvariantError, match="r has a prefill already"):
        scheduler.request_prefill("r", 2.0)
    scheduler.dispatch(2.0)
    scheduler.finish("r", Outcome.CANCELLED, 3.0)
    (prefiller,) = scheduler.snapshot.prefillers
    assert (prefiller.pinned, prefiller.inflight) == (0, 0)


def test_a_recomputed_request_prefills_again_with_what_it_generated() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.progress("r", 7, 2.0)
    assert scheduler.requeue("r", 3.0) == Release("r", Phase.DECODING)
    tracker = scheduler.snapshot.requests["r"]
    assert (tracker.phase, tracker.prompt_tokens, tracker.generated) == (Phase.QUEUED, 107, 0)
    assert scheduler.snapshot.workers[0].load == 0
    scheduler.dispatch(3.0)
    scheduler.prefilled("r", 107, 4.0)
    assert admitted(scheduler, 4.0) == [("r", "d0")]


def test_a_request_whose_answer_begins_anew_prefills_its_own_prompt_and_has_no_age() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    tracker = scheduler.snapshot.requests["r"]
    for anew, prompt_tokens in ((False, 107), (True, 100), (True, 100)):
        scheduler.progress("r", 7, 2.0)
        scheduler.requeue("r", 3.0, anew=anew)
        assert (tracker.prompt_tokens, tracker.age_tokens) == (prompt_tokens, prompt_tokens - 100)
        scheduler.dispatch(3.0)
        scheduler.prefilled("r", prompt_tokens, 4.0)
        scheduler.admit(4.0)
    scheduler.progress("r", 9, 5.0)
    scheduler.finish("r", Outcome.FINISHED, 6.0)
    means = scheduler.snapshot.means
    assert (means.answer_tokens, means.log_prompt) == (9.0, math.log(100))


def test_prefills_stop_while_pool_and_prefills_fill_the_pools_bound() -> None:
    scheduler = a_scheduler(workers=1, slots=1, config=SchedulerConfig(max_pooled=2))
    for name in "abc":
        scheduler.submit(a_request(name), 0.0)
    assert [action.request for action in scheduler.dispatch(0.0)] == ["a", "b"]
    scheduler.prefilled("a", 100, 1.0)
    assert scheduler.dispatch(1.0) == []
    scheduler.admit(1.0)
    assert [action.request for action in scheduler.dispatch(1.0)] == ["c"]


def test_a_prefiller_over_its_kv_limit_gets_no_probe_until_it_recovers() -> None:
    scheduler = a_scheduler(prefillers=2, config=SchedulerConfig(kv_usage_limit=0.9))
    scheduler.report_prefiller("p0", 0.95, 0.0)
    scheduler.report_prefiller("p1", 1.0, 0.0)
    scheduler.submit(a_request(), 0.0)
    assert scheduler.dispatch(0.0) == []
    scheduler.report_prefiller("p1", 0.9, 1.0)
    assert scheduler.dispatch(1.0) == [Prefill("r", "p1")]


def test_probes_go_to_the_prefiller_with_the_fewest_tokens_and_rotate_when_idle() -> None:
    scheduler = a_scheduler(prefillers=2)
    chosen = []
    for name in "abcd":
        scheduler.submit(a_request(name), 0.0)
        chosen.append(scheduler.dispatch(0.0)[0].worker)
        scheduler.prefilled(name, 100, 0.0)
    assert chosen == ["p0", "p1", "p0", "p1"]


def test_arrivals_are_refused_when_the_queue_is_full_nothing_can_serve_or_the_router_drains() -> None:
    scheduler = a_scheduler(workers=1, config=SchedulerConfig(max_queued=1))
    scheduler.submit(a_request("a"), 0.0)
    assert scheduler.submit(a_request("b"), 0.0) == Reject("b", RejectReason.QUEUE_FULL)
    scheduler.dispatch(0.0)
    scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
    assert scheduler.submit(a_request("b"), 0.0) == Reject("b", RejectReason.NO_WORKERS)
    scheduler.set_worker_state("d0", WorkerState.UP, 0.0)
    scheduler.set_draining(True, 0.0)
    assert scheduler.submit(a_request("b"), 0.0) == Reject("b", RejectReason.DRAINING)
    assert list(scheduler.snapshot.requests) == ["a"]


@pytest.mark.parametrize("decode_first", [False, True])
def test_a_request_that_is_only_scored_needs_no_decode_worker_that_is_up(decode_first: bool) -> None:
    scheduler = a_scheduler(workers=1, config=SchedulerConfig(decode_first=decode_first))
    scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
    assert scheduler.submit(a_request("decodes"), 0.0) == Reject("decodes", RejectReason.NO_WORKERS)
    assert scheduler.submit(RequestSpec("scored", 100, max_new_tokens=0), 0.0) is None
    assert [prefill.request for prefill in scheduler.dispatch(0.0)] == ["scored"]
    scheduler.set_worker_state("p0", WorkerState.DOWN, 0.0)
    assert scheduler.submit(RequestSpec("late", 100, max_new_tokens=0), 0.0) == Reject("late", RejectReason.NO_WORKERS)


def test_pool_and_queue_entries_expire_at_their_deadlines() -> None:
    scheduler = a_scheduler(workers=1, slots=1, config=SchedulerConfig(pool_ttl_s=10.0, queue_deadline_s=5.0))
    into_decode(scheduler, "running")
    into_prefill(scheduler, "pooled")
    scheduler.prefilled("pooled", 100, 2.0)
    scheduler.report_prefiller("p0", 1.0, 2.0)
    scheduler.submit(a_request("queued"), 3.0)
    assert scheduler.expire(8.0) == []
    assert scheduler.expire(8.5) == [Release("queued", Phase.QUEUED)]
    assert scheduler.expire(12.5) == [Release("pooled", Phase.POOLED)]
    assert list(scheduler.snapshot.requests) == ["running"]


@pytest.mark.parametrize("dispatches", [True, False])
def test_requests_that_expire_in_the_middle_leave_the_queue_without_a_trace(dispatches: bool) -> None:
    """The class in front never ends, or nothing is dispatched at all."""
    known = trackers()  # those of other tests
    scheduler = a_scheduler(config=SchedulerConfig(queue_deadline_s=5.0, max_prefill_inflight=1))
    into_prefill(scheduler, "running")
    for second in range(600):
        now = float(second)
        scheduler.submit(a_request(f"front {second}", priority=-1), now)
        scheduler.submit(a_request(f"behind {second}"), now)
        scheduler.expire(now)
        if dispatches:
            assert not scheduler.dispatch(now)
    assert len(scheduler.snapshot.queued) == 12
    assert len(trackers() - known) < 120
    waiting, served, running = list(scheduler.snapshot.queued), [], "running"
    for _ in waiting:
        scheduler.finish(running, Outcome.FINISHED, now)
        running = scheduler.dispatch(now)[0].request
        served.append(running)
    assert sorted(served) == sorted(waiting)


@pytest.mark.parametrize("policy", ["br_0", "level_fit"])
def test_requests_that_leave_from_the_middle_leave_the_pool_without_a_trace(policy: str) -> None:
    """Somebody of a class in front waits all the time, and somebody of the class behind."""
    known = trackers()
    scheduler = a_scheduler(policy, workers=1, slots=1, config=SchedulerConfig(pool_ttl_s=300.0))
    pool_all(scheduler, {"running": 100})
    assert len(admitted(scheduler)) == 1
    for second in range(600):
        now = float(second)
        scheduler.submit_prefilled(a_request(f"front {second}", priority=-1), now)
        scheduler.submit_prefilled(a_request(f"behind {second}"), now)
        for name in ("front", "behind") if second else ():
            scheduler.finish(f"{name} {second - 1}", Outcome.CANCELLED, now)
        assert not admitted(scheduler, now)
    assert len(scheduler.snapshot.pool) == 2
    assert len(trackers() - known) < 200


def trackers() -> set[int]:
    """All that are alive, by identity."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, RequestTracker)}


@pytest.mark.parametrize("anew", [False, True])
def test_a_requeued_request_waits_as_long_as_an_arrival_and_longer_if_its_client_may_have_tokens(anew: bool) -> None:
    scheduler = a_scheduler(workers=1, slots=1, config=SchedulerConfig(queue_deadline_s=5.0))
    into_decode(scheduler)
    scheduler.progress("r", 3, 100.0)
    scheduler.requeue("r", 100.0, anew=anew)
    assert scheduler.expire(105.0) == []
    assert bool(scheduler.expire(105.5)) is anew


def test_lower_priority_values_leave_queue_and_pool_first() -> None:
    scheduler = a_scheduler(workers=1, slots=1, config=SchedulerConfig(max_pooled=3))
    scheduler.report_prefiller("p0", 1.0, 0.0)
    for name, priority in (("later", 5), ("first", -1), ("second", 0)):
        scheduler.submit(a_request(name, priority=priority), 0.0)
    scheduler.report_prefiller("p0", 0.0, 0.0)
    assert [action.request for action in scheduler.dispatch(0.0)] == ["first", "second", "later"]
    for name in ("later", "second", "first"):
        scheduler.prefilled(name, 100, 1.0)
    assert admitted(scheduler, 1.0) == [("first", "d0")]


def test_a_worker_that_holds_requests_cannot_be_removed_and_one_that_drains_gets_no_more() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.set_worker_state("d0", WorkerState.DRAINING, 1.0)
    with pytest.raises(InvariantError, match="still has 1"):
        scheduler.remove_worker("d0", 1.0)
    pool_all(scheduler, {"a": 10, "b": 10, "c": 10})
    assert admitted(scheduler) == [("a", "d1"), ("b", "d1")]
    scheduler.finish("r", Outcome.FINISHED, 2.0)
    scheduler.remove_worker("d0", 2.0)
    assert [worker.index for worker in scheduler.snapshot.workers] == [0]
    scheduler.snapshot.check_invariants()


def test_a_lock_step_advances_running_requests_only() -> None:
    scheduler = a_scheduler("br_h", config=SchedulerConfig(lock_step=True), horizon_steps=4)
    pool_all(scheduler, {"a": 10, "b": 20})
    scheduler.admit(0.0)
    scheduler.start("a", 0.0)
    scheduler.step(1.0)
    generated = {tracker.id: tracker.generated for tracker in scheduler.snapshot.decoding()}
    assert generated == {"a": 1, "b": 0}
    scheduler.snapshot.check_invariants()


@pytest.mark.parametrize("lock_step", [False, True], ids=["by token", "by step"])
def test_a_refresh_scheduled_before_a_requeue_does_not_apply_after_it(lock_step: bool) -> None:
    config = SchedulerConfig(refresh_every_tokens=4, lock_step=lock_step)
    scheduler = a_scheduler("br_h", workers=1, config=config, horizon_steps=8)
    scheduler.submit_prefilled(a_request(), 0.0, 3.0)

    def generate() -> None:
        if lock_step:
            scheduler.step(0.0)
        else:
            scheduler.progress("r", 1, 0.0)

    for life in range(2):
        if life:
            scheduler.requeue("r", 0.0)
            scheduler.dispatch(0.0)
            scheduler.prefilled("r", 102, 0.0, 3.0)
        scheduler.admit(0.0)
        if lock_step:
            scheduler.start("r", 0.0)
        for _ in range(2):
            generate()
            assert not scheduler.due_refreshes()
    generate()
    assert [tracker.id for tracker in scheduler.due_refreshes()] == ["r"]


def test_requests_in_transfer_are_projected_alike_by_step_and_by_token() -> None:
    """A replay with transfers or late reports decides as the router does, which is told tokens."""
    loads = []
    for lock_step in (False, True):
        scheduler = a_scheduler("br_h", config=SchedulerConfig(lock_step=lock_step), horizon_steps=4)
        scheduler.submit_prefilled(a_request("r", 100), 0.0, 1.0)
        scheduler.admit(0.0)
        loads.append([row.tolist() for row in scheduler.snapshot.projected_loads() if row.any()])
    assert loads == [[[100, 101, 0, 0, 0]]] * 2


@pytest.mark.parametrize("lock_step", [False, True], ids=["by token", "by step"])
def test_predictions_are_refreshed_every_period_and_at_their_floor(lock_step: bool) -> None:
    config = SchedulerConfig(refresh_every_tokens=4, lock_step=lock_step)
    scheduler = a_scheduler("br_h", config=config, horizon_steps=8)
    pool_all(scheduler, {"r": 10})
    scheduler.admit(0.0)
    if lock_step:
        scheduler.start("r", 0.0)
    due_at = []
    for generated in range(1, 13):
        if lock_step:
            scheduler.step(0.0)
        else:
            scheduler.progress("r", 1, 0.0)
        for tracker in scheduler.due_refreshes():
            due_at.append(generated)
            # an anchor first (next in 4), then c = 3 (reaches 0 in 3 tokens), then an anchor again
            scheduler.refresh(tracker.id, 3.0 if len(due_at) == 1 else 8.0, 0.0)
        scheduler.snapshot.check_invariants()
    assert due_at == [4, 7, 11]


def test_an_anchored_prediction_falls_due_when_the_clients_limit_comes_within_the_horizon() -> None:
    scheduler = a_scheduler("br_h", config=SchedulerConfig(refresh_every_tokens=4), horizon_steps=8)
    scheduler.submit_prefilled(RequestSpec("r", 10, max_new_tokens=14), 0.0)
    scheduler.admit(0.0)
    due_at = []
    for generated in range(1, 12):
        scheduler.progress("r", 1, 0.0)
        for tracker in scheduler.due_refreshes():
            due_at.append(generated)
            scheduler.refresh(tracker.id, 8.0, 0.0)
    assert due_at == [4, 6, 10]  # at 6 of 14 the limit leaves 8 tokens, which is H


def test_a_requeued_request_keeps_its_age_and_its_limit() -> None:
    scheduler = a_scheduler()
    scheduler.submit(RequestSpec("r", 100, max_new_tokens=50), 0.0)
    for life in range(3):
        scheduler.dispatch(1.0)
        scheduler.prefilled("r", 100 + 5 * life, 1.0)
        scheduler.admit(1.0)
        scheduler.progress("r", 5, 2.0)
        tracker = scheduler.snapshot.requests["r"]
        assert (tracker.generated, tracker.age_tokens, tracker.kv_tokens) == (5, 5 * life + 5, 105 + 5 * life)
        scheduler.requeue("r", 3.0)
        assert (tracker.generated, tracker.age_tokens, tracker.max_new_tokens) == (0, 5 * life + 5, 50)
        scheduler.snapshot.check_invariants()


def test_a_request_that_is_put_back_keeps_its_place_and_its_pinned_kv() -> None:
    scheduler = a_scheduler(workers=1, slots=1)
    for name in ("first", "second"):
        into_prefill(scheduler, name)
        scheduler.prefilled(name, 100, 1.0)
    assert admitted(scheduler, 2.0) == [("first", "d0")]
    scheduler.put_back("first", 3.0)
    first = scheduler.snapshot.requests["first"]
    assert (first.phase, first.ready_s, scheduler.snapshot.prefillers[0].pinned) == (Phase.POOLED, 1.0, 2)
    assert [tracker.id for tracker in scheduler.snapshot.pool] == ["first", "second"]
    scheduler.snapshot.check_invariants()
    assert admitted(scheduler, 4.0) == [("first", "d0")]


def test_a_request_that_has_tokens_cannot_be_put_back() -> None:
    scheduler = a_scheduler()
    into_decode(scheduler)
    scheduler.progress("r", 1, 2.0)
    with pytest.raises(InvariantError, match="sent to its worker already"):
        scheduler.put_back("r", 3.0)


def test_another_policy_counts_patience_from_when_a_request_became_ready() -> None:
    scheduler = a_scheduler("pool_fifo", workers=1, slots=1)
    pool_all(scheduler, {"running": 10})
    admitted(scheduler)
    pool_all(scheduler, {"old": 5})
    pool_all(scheduler, {"best": 900, "new": 700}, now=99.0)
    scheduler.reroute(PolicySettings(policy="br_0", max_wait_s=20.0), 99.0)
    scheduler.finish("running", Outcome.FINISHED, 100.0)
    action = scheduler.admit(100.0)[0]
    assert (action.request, action.stage) == ("old", 0)


def test_a_request_bound_under_another_policy_has_the_present_ones_patience_when_put_back() -> None:
    scheduler = a_scheduler("join_shortest_queue", workers=1, slots=1)
    for name in ("old", "running"):
        into_prefill(scheduler, name)
        scheduler.prefilled(name, 5, 0.0)
    assert [request for request, _ in admitted(scheduler)] == ["old", "running"]
    scheduler.reroute(PolicySettings(policy="br_0", max_wait_s=20.0), 1.0)
    scheduler.put_back("old", 2.0)
    pool_all(scheduler, {"best": 900}, now=2.0)
    scheduler.finish("running", Outcome.FINISHED, 30.0)
    action = scheduler.admit(30.0)[0]
    assert (action.request, action.stage) == ("old", 0)


def test_a_policy_with_a_horizon_projects_requests_bound_by_one_without() -> None:
    scheduler = a_scheduler("pool_fifo", workers=1)
    pool_all(scheduler, {"r": 10})
    admitted(scheduler)
    scheduler.progress("r", 5, 1.0)
    assert scheduler.snapshot.projected_loads().tolist() == [[15]]
    scheduler.reroute(PolicySettings(policy="br_h", horizon_steps=2), 1.0)
    assert scheduler.snapshot.projected_loads().tolist() == [[15, 16, 17]]
    scheduler.progress("r", 1, 2.0)
    assert scheduler.snapshot.projected_loads().tolist() == [[16, 17, 18]]


@pytest.mark.parametrize("every", [None, 4])
def test_a_change_of_policy_requests_forecasts_only_with_a_predictor(every: int | None) -> None:
    scheduler = a_scheduler("pool_fifo", config=SchedulerConfig(refresh_every_tokens=every))
    pool_all(scheduler, {"r": 10})
    admitted(scheduler)
    scheduler.reroute(PolicySettings(policy="br_h", horizon_steps=8), 1.0)
    assert [tracker.id for tracker in scheduler.due_refreshes()] == ([] if every is None else ["r"])
    scheduler.snapshot.check_invariants()


def test_a_shorter_time_to_live_shortens_the_patience_of_those_that_wait_already() -> None:
    scheduler = a_scheduler("br_0", workers=1, slots=1, config=SchedulerConfig(pool_ttl_s=600.0))
    pool_all(scheduler, {"runs": 10})
    assert admitted(scheduler) == [("runs", "d0")]
    pool_all(scheduler, {"waits": 10, "too": 10})
    scheduler.configure(SchedulerConfig(pool_ttl_s=20.0), 1.0)
    assert scheduler.snapshot.pool.front.most_overdue(15.0) is scheduler.snapshot.requests["waits"]
    assert scheduler.snapshot.requests["runs"].overdue_s == 15.0, "it may be put back"
