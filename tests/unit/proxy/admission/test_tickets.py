"""The requests' side, with a real scheduler behind it."""

import asyncio

import pytest

from balanceroute.core.types import Outcome, Phase, RequestSpec, WorkerState
from balanceroute.errors import Draining, InvariantError, NoHealthyWorkers, QueueFull, QueueTimeout
from balanceroute.proxy.admission.decider import Answer, Refusal, RefusalKind
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.tickets import Ticket
from tests.unit.proxy.admission.ledgers import a_ledger, decoding, load, turns
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


@with_virtual_time
async def test_a_ticket_leaves_once() -> None:
    ledger, tickets = a_ledger()
    ticket = tickets.submit(RequestSpec("r", 5))
    assert ticket.phase is Phase.PREFILLING
    ticket.finish(Outcome.CANCELLED)
    assert ticket.left and ticket.phase is Phase.GONE
    with pytest.raises(InvariantError):
        ticket.finish(Outcome.CANCELLED)
    assert tickets.by_id == ledger.scheduler.snapshot.requests == {}


@with_virtual_time
async def test_an_expired_request_is_refused_and_has_left() -> None:
    ledger, tickets = a_ledger(queue_deadline_s=0.0)
    ledger.report_prefiller("p0", 1.0)
    ticket = tickets.submit(RequestSpec("r", 5))
    await let_pass(0.01)
    assert ledger.expire() == ["r"]
    assert ticket.left and tickets.by_id == {}
    with pytest.raises(QueueTimeout):
        await ticket.prefiller()


@with_virtual_time
async def test_refusals_become_errors_with_a_time_to_come_back() -> None:
    _, full = a_ledger(max_queued=0)
    ticket = full.submit(RequestSpec("r", 5))
    with pytest.raises(QueueFull) as refused:
        await ticket.prefiller()
    assert refused.value.retry_after_s and ticket.left and full.by_id == {}
    ledger, down = a_ledger()
    ledger.set_worker_state("d0", WorkerState.DOWN)
    with pytest.raises(NoHealthyWorkers, match=r"none of 1 decode workers is up \(1 down\)"):
        await down.submit(RequestSpec("r", 5)).prefiller()
    ledger, draining = a_ledger()
    ledger.drain()
    with pytest.raises(Draining):
        draining.submit(RequestSpec("r", 5)).check()


@with_virtual_time
async def test_who_waits_in_place_of_one_that_was_cancelled_in_the_same_turn_is_woken() -> None:
    """As when a decode worker gives a request back that still waits for its prefiller."""
    ledger, tickets = a_ledger(decode_first=True)
    ticket = tickets.submit(RequestSpec("r", 5))
    ledger.admit()
    assert await ticket.admission() == "d0"
    ledger.report_prefiller("p0", 1.0)
    ticket.request_prefill()
    push = asyncio.ensure_future(ticket.prefiller())
    await turns()
    push.cancel()
    ticket.requeue()
    tickets.loop.call_later(1.0, ledger.admit)
    async with asyncio.timeout(2.0):
        assert await ticket.admission() == "d0"


@with_virtual_time
async def test_a_request_that_leaves_its_worker_when_the_brain_has_refused_it_learns_of_that() -> None:
    """At a relay: a new brain voids its ticket in the turn in which it is moved off a silent worker."""
    ledger, tickets = a_ledger()
    (ticket,) = await decoding(ledger, tickets, "r")
    await ticket.admission()
    tickets.answer("r", Refusal(RefusalKind.LOST, "lost"))
    ticket.requeue()
    with pytest.raises(NoHealthyWorkers, match="lost"):
        async with asyncio.timeout(1.0):
            await ticket.prefiller()


@pytest.mark.parametrize("in_the_same_turn", [False, True], ids=["before", "at-once"])
@with_virtual_time
async def test_a_waiter_that_was_cancelled_does_not_disturb_the_dispatcher(in_the_same_turn: bool) -> None:
    ledger, tickets = a_ledger()
    ledger.report_prefiller("p0", 1.0)
    ticket = tickets.submit(RequestSpec("r", 5))
    waiting = asyncio.ensure_future(ticket.prefiller())
    await turns()
    waiting.cancel()
    if not in_the_same_turn:
        await turns()
    ledger.report_prefiller("p0", 0.0)
    ledger.dispatch()
    assert ticket.phase is Phase.PREFILLING
    ticket.finish(Outcome.CANCELLED)
    assert not ledger.scheduler.snapshot.requests


@with_virtual_time
async def test_a_ticket_follows_the_phase_of_the_scheduler() -> None:
    ledger, tickets = a_ledger()
    ledger.report_prefiller("p0", 1.0)
    ticket = tickets.submit(RequestSpec("r", 5))
    seen = [ticket.phase]
    ledger.report_prefiller("p0", 0.0)
    for act in (
        ledger.dispatch,
        ticket.prefill_failed,
        ledger.dispatch,
        lambda: ticket.prefilled(5),
        ledger.admit,
        ticket.put_back,
        ledger.admit,
        ticket.requeue,
    ):
        act()
        seen.append(ticket.phase)
        assert seen[-1] is ledger.scheduler.snapshot.requests["r"].phase
    assert "queued prefilling queued prefilling pooled decoding pooled decoding queued".split() == seen


@with_virtual_time
async def test_a_decode_first_ticket_has_its_decode_worker_and_prefiller() -> None:
    ledger, tickets = a_ledger(decode_first=True)
    ticket = tickets.submit(RequestSpec("r", 5))
    assert ticket.phase is Phase.POOLED and ticket.pooled_s == ticket.arrived_s
    ledger.admit()
    assert (await ticket.admission(), ticket.phase, ticket.decoder) == ("d0", Phase.DECODING, "d0")
    ledger.report_prefiller("p0", 1.0)
    ticket.request_prefill()
    assert (ticket.asking, ticket.pushing) == (True, False)
    ledger.report_prefiller("p0", 0.0)
    ledger.dispatch()
    assert (await ticket.prefiller(), ticket.asking, ticket.pushing) == ("p0", False, True)
    ticket.requeue()
    assert (ticket.phase, ticket.decoder, ticket.pushing) == (Phase.POOLED, "", False)
    ledger.scheduler.snapshot.check_invariants()


@with_virtual_time
async def test_a_prefiller_that_was_chosen_before_a_requeue_is_not_taken_for_the_next_decode_worker() -> None:
    ledger, tickets = a_ledger(decode_first=True)
    ticket = tickets.submit(RequestSpec("r", 5))
    ledger.admit()
    await ticket.admission()
    ticket.request_prefill()
    assert ticket.prefiller_id == "p0"  # chosen at once, and nobody has waited for it
    ticket.requeue()
    waiting = asyncio.ensure_future(ticket.admission())
    await turns()
    ledger.admit()
    assert await waiting == "d0"


@with_virtual_time
async def test_an_idle_router_gives_a_prefiller_without_waiting() -> None:
    ticket = a_ledger()[1].submit(RequestSpec("r", 10))
    waiting = ticket.prefiller()
    with pytest.raises(StopIteration) as answered:
        waiting.send(None)
    assert answered.value.value == "p0"


@with_virtual_time
async def test_tokens_are_reported_in_sums_before_every_decision() -> None:
    ledger, tickets = a_ledger(slots=4)
    first, second = await decoding(ledger, tickets, "a", "b")
    for _ in range(3):
        first.progress(2)
    second.progress(1)
    assert (load(ledger), first.unreported_tokens, second.unreported_tokens) == (20, 6, 1)
    ledger.admit()
    assert (load(ledger), first.unreported_tokens, second.unreported_tokens, tickets.unsettled) == (27, 0, 0, [])
    first.progress(1)
    ledger.settle()
    ledger.settle()
    assert load(ledger) == 28


@pytest.mark.parametrize("leave", ["finish", "requeue"])
@with_virtual_time
async def test_a_request_reports_all_its_tokens_before_it_leaves_its_worker(leave: str) -> None:
    ledger, tickets = a_ledger(slots=4)
    first, second = await decoding(ledger, tickets, "a", "b")
    leaves, stays = (ledger.scheduler.snapshot.requests[ticket.id] for ticket in (first, second))
    first.progress(3)
    second.progress(1)
    first.progress(4)
    first.finish(Outcome.FINISHED) if leave == "finish" else first.requeue()
    assert (leaves.age_tokens, stays.age_tokens, load(ledger)) == (7, 0, 10)
    ledger.settle()  # it may be in the list still
    assert (leaves.age_tokens, stays.age_tokens, load(ledger)) == (7, 1, 11)
    ledger.scheduler.snapshot.check_invariants()


@pytest.mark.parametrize("decode_first", [False, True], ids=["prefill first", "decode first"])
@with_virtual_time
async def test_another_ledger_adopts_requests_from_their_tickets(decode_first: bool) -> None:
    """In every phase, with every token, and an answer that was due comes from there."""
    ledger, tickets = a_ledger(slots=3, decode_first=decode_first)
    stream, waiting = tickets.submit(RequestSpec("s", 10)), tickets.submit(RequestSpec("w", 7, priority=1))
    await until_bound(ledger, stream)
    stream.progress(3)
    stream.requeue()
    await until_bound(ledger, stream)
    stream.progress(2)
    ledger.report_prefiller("p0", 1.0)
    last = tickets.submit(RequestSpec("l", 5))
    tickets.settle()
    successor, _ = a_ledger(slots=3, decode_first=decode_first)
    answers: dict[str, Answer] = {}
    successor.on_answer = lambda request_id, answer: answers.update({request_id: answer})
    for ticket in (stream, waiting, last):
        assert successor.adopt(ticket.standing(ledger.now()))
    successor.scheduler.snapshot.check_invariants()
    before, after = ledger.scheduler.snapshot, successor.scheduler.snapshot
    assert after.workers[0].load == before.workers[0].load
    assert after.prefillers[0].pinned_tokens == before.prefillers[0].pinned_tokens
    for name, tracker in before.requests.items():
        found = after.requests[name]
        assert (found.phase, found.prompt_tokens, found.age_tokens, found.priority) == (
            tracker.phase,
            tracker.prompt_tokens,
            tracker.age_tokens,
            tracker.priority,
        )
    successor.dispatch()
    successor.admit()
    assert answers["l"] == ("d0" if decode_first else "p0")


async def until_bound(ledger: Ledger, ticket: Ticket) -> None:
    """Bring a ticket to its decode worker, with its prompt computed."""
    if not ledger.scheduler.config.decode_first:
        ledger.dispatch()
        await ticket.prefiller()
        ticket.prefilled(ticket.prompt_tokens)
    ledger.admit()
    assert await ticket.admission() == "d0"
    if ledger.scheduler.config.decode_first:
        ticket.request_prefill()
        assert await ticket.prefiller() == "p0"
        ticket.pushed(ticket.prompt_tokens)
