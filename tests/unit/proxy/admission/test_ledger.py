"""The side that decides, with a real scheduler behind it: who is woken by what, and when a worker may leave."""

import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import InvariantError
from balanceroute.explain import explain
from balanceroute.proxy.admission.decider import Answer, Refusal
from balanceroute.proxy.admission.ledger import Ledger
from tests.unit.proxy.admission.ledgers import a_ledger, decoding, pooled
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


def answers_of(ledger: Ledger) -> dict[str, Answer]:
    """What is told from now on, the last answer of each request."""
    answers: dict[str, Answer] = {}
    ledger.on_answer = answers.__setitem__
    return answers


@with_virtual_time
async def test_an_arrival_is_answered_at_once_where_a_prefiller_is_free_and_else_by_the_dispatcher() -> None:
    ledger, _ = a_ledger()
    answers = answers_of(ledger)
    ledger.submit(RequestSpec("a", 10))
    assert answers == {"a": "p0"}
    ledger.report_prefiller("p0", 1.0)
    ledger.submit(RequestSpec("b", 10))
    assert answers == {"a": "p0"}
    ledger.prefill_event.clear()
    ledger.report_prefiller("p0", 0.0)
    assert ledger.prefill_event.is_set()
    ledger.dispatch()
    assert answers == {"a": "p0", "b": "p0"}


@with_virtual_time
async def test_a_request_that_is_refused_has_left_and_a_refusal_is_plain_data() -> None:
    ledger, _ = a_ledger()
    answers = answers_of(ledger)
    ledger.set_worker_state("d0", WorkerState.DOWN)
    ledger.submit(RequestSpec("a", 10))
    assert isinstance(answers["a"], Refusal) and "decode workers" in answers["a"].text
    assert not ledger.scheduler.snapshot.requests


@with_virtual_time
async def test_a_decision_is_wanted_when_something_waits_and_a_slot_is_free() -> None:
    ledger, tickets = a_ledger(slots=1)
    (first,) = await decoding(ledger, tickets, "a")
    ledger.decision_due.clear()
    await pooled(tickets, "b")
    assert not ledger.decision_due.is_set() and not ledger.decision_possible
    first.finish(Outcome.FINISHED)
    assert ledger.decision_due.is_set() and ledger.decision_possible


@with_virtual_time
async def test_a_request_that_has_waited_too_long_is_refused_with_the_tier_it_waited_for() -> None:
    ledger, tickets = a_ledger(slots=1, queue_deadline_s=5.0, pool_ttl_s=20.0)
    await decoding(ledger, tickets, "a")
    answers = answers_of(ledger)
    ledger.submit(RequestSpec("pooled", 10))
    ledger.prefilled("pooled", 10)
    ledger.report_prefiller("p0", 1.0)
    ledger.submit(RequestSpec("queued", 10))
    await let_pass(6.0)
    assert ledger.expire() == ["queued"]
    await let_pass(20.0)
    assert ledger.expire() == ["pooled"]
    texts = {name: answer.text for name, answer in answers.items() if isinstance(answer, Refusal)}
    assert "a prefiller" in texts["queued"] and "a decode slot" in texts["pooled"]
    assert len(ledger.scheduler.snapshot.requests) == 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@with_virtual_time
async def test_a_worker_leaves_when_it_holds_nothing_and_no_sooner(role: Role) -> None:
    ledger, tickets = a_ledger()
    worker = "p0" if role is Role.PREFILL else "d0"
    ticket = tickets.submit(RequestSpec("a", 10))
    await ticket.prefiller()
    if role is Role.PREFILL:
        assert not ledger.remove_if_idle(worker, role)
    ticket.prefilled(10)
    ledger.admit()
    assert not ledger.remove_if_idle(worker, role)
    ticket.finish(Outcome.FINISHED)
    assert ledger.remove_if_idle(worker, role)
    with pytest.raises(InvariantError):
        (ledger.prefiller if role is Role.PREFILL else ledger.decoder)(worker)


@with_virtual_time
async def test_a_worker_that_joins_wakes_waiting_requests() -> None:
    ledger, tickets = a_ledger(slots=1)
    await decoding(ledger, tickets, "a")
    await pooled(tickets, "b")
    assert ledger.admit() == []
    ledger.decision_due.clear()
    ledger.add_worker(WorkerSpec("d1", Role.DECODE, slots=1))
    assert ledger.decision_due.is_set()
    (admission,) = ledger.admit()
    assert (admission.request, admission.worker) == ("b", "d1")


@with_virtual_time
async def test_joins_and_departures_update_whether_workers_share_a_barrier() -> None:
    ledger, _ = a_ledger()
    known = [ledger.scheduler.snapshot.shared_barrier]
    for name, group in (("d1", ""), ("d2", "g"), ("d3", "g")):
        ledger.add_worker(WorkerSpec(name, Role.DECODE, barrier_group=group))
        known.append(ledger.scheduler.snapshot.shared_barrier)
    ledger.configure(SchedulerConfig(shared_barrier=False))
    known.append(ledger.scheduler.snapshot.shared_barrier)
    for name in ("d3", "d2", "d1"):
        assert ledger.remove_if_idle(name, Role.DECODE)
        known.append(ledger.scheduler.snapshot.shared_barrier)
    assert known == [True, False, False, True, True, False, False, True]


@with_virtual_time
async def test_freed_foreign_slots_wake_waiting_requests_and_an_unchanged_report_does_not() -> None:
    ledger, tickets = a_ledger(slots=4)
    ledger.report_decoder("d0", 3, 300, 1)
    await decoding(ledger, tickets, "a")
    await pooled(tickets, "b")
    ledger.decision_due.clear()
    ledger.report_decoder("d0", 3, 300, 1)
    assert not ledger.decision_due.is_set()
    ledger.report_decoder("d0", 1, 100, 3)
    assert ledger.decision_due.is_set()


@with_virtual_time
async def test_memory_that_requests_of_others_give_back_wakes_what_waits_for_it() -> None:
    """None of ours runs, so that none of ours will leave and have the decision taken again."""
    ledger, tickets = a_ledger(slots=4, policy="level_fit")
    ledger.report_decoder_memory("d0", 100_000)
    ledger.report_decoder("d0", 2, 95_000, 1)
    await pooled(tickets, "a", 10_000)
    ledger.decision_due.clear()
    assert ledger.admit() == []
    ledger.report_decoder("d0", 2, 20_000, 1)
    assert ledger.decision_due.is_set()
    assert [admission.request for admission in ledger.admit()] == ["a"]


@with_virtual_time
async def test_a_workers_memory_changes_only_by_more_than_a_64th() -> None:
    ledger, _ = a_ledger()
    for reported, known in ((0, 0), (6_400, 6_400), (6_500, 6_400), (6_501, 6_501), (6_400, 6_501), (0, 0)):
        ledger.report_decoder_memory("d0", reported)
        assert ledger.scheduler.snapshot.workers[0].kv_capacity_tokens == known


@with_virtual_time
async def test_another_policy_decides_on_what_waits_and_leaves_what_is_bound() -> None:
    ledger, tickets = a_ledger(slots=1)
    (bound,) = await decoding(ledger, tickets, "a")
    await pooled(tickets, "b")
    assert ledger.admit() == []
    ledger.decision_due.clear()
    ledger.reroute(PolicySettings(policy="join_shortest_queue"), ledger.bounds, None)
    assert ledger.decision_due.is_set() and ledger.decision_possible, "it queues at workers"
    (admission,) = ledger.admit()
    assert admission.request == "b" and bound.decoder == "d0"


@with_virtual_time
async def test_the_state_shows_the_overlap_before_any_request_has_waited() -> None:
    """The scheduler sizes it when a decision leaves requests waiting; a state is written at any time."""
    ledger, tickets = a_ledger("level_fit", overlap_requests=1)
    await decoding(ledger, tickets, "a")
    state = ledger.state(PolicySettings(policy="level_fit"))
    waiting = [{"id": "b", "prompt_tokens": 10}]
    assert [(made.request, made.worker) for made in explain({**state, "waiting": waiting}).admissions] == [("b", "d0")]
