"""When the policy is asked, and over what."""

import asyncio
from collections.abc import Callable

from balanceroute.core.types import Admit, Outcome, RequestSpec
from balanceroute.proxy.admission.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.telemetry.instruments import Histogram
from tests.unit.proxy.admission.ledgers import a_ledger, decoding, pooled, turns
from tests.unit.proxy.virtual_time import with_virtual_time


@with_virtual_time
async def test_the_decode_dispatcher_decides_over_all_that_came_together() -> None:
    ledger, tickets = a_ledger(slots=8)
    admissions: list[Admit] = []
    decisions = Histogram((1.0,))
    task = asyncio.ensure_future(DecodeDispatcher(ledger, decisions, admissions.append).run())
    made = [tickets.submit(RequestSpec(f"r{n}", 10)) for n in range(5)]
    ledger.dispatch()
    for ticket in made:
        await ticket.prefiller()
        ticket.prefilled(10)
    assert [await ticket.admission() for ticket in made] == ["d0"] * 5
    assert (len(admissions), sum(decisions.counts)) == (5, 1)
    task.cancel()


@with_virtual_time
async def test_a_freed_slot_wakes_the_decode_dispatcher() -> None:
    ledger, tickets = a_ledger(slots=1)
    task = asyncio.ensure_future(DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None).run())
    first, second = tickets.submit(RequestSpec("a", 5)), tickets.submit(RequestSpec("b", 5))
    ledger.dispatch()
    for ticket in (first, second):
        await ticket.prefiller()
        ticket.prefilled(5)
    assert await first.admission() == "d0"
    await turns()
    assert len(ledger.scheduler.snapshot.pool) == 1 and not ledger.decision_due.is_set()
    first.progress(3)
    first.finish(Outcome.FINISHED)
    assert await second.admission() == "d0"
    task.cancel()


@with_virtual_time
async def test_an_assign_at_once_policy_is_asked_although_no_slot_is_free() -> None:
    ledger, tickets = a_ledger("join_shortest_queue", slots=1)
    task = asyncio.ensure_future(DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None).run())
    for n in range(3):
        ticket = await pooled(tickets, f"r{n}", 5)
        assert await ticket.admission() == "d0"
    task.cancel()


@with_virtual_time
async def test_while_requests_are_held_decisions_have_a_fixed_pace_whatever_arrives() -> None:
    """A timer for each arrival would have a busy router decide thousands of times per second."""
    ledger, tickets = a_ledger("target_fit", slots=64)
    await decoding(ledger, tickets, "a", "b", "c", "d")
    dispatcher = DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None)
    timers: list[asyncio.TimerHandle] = []
    call_later = ledger.loop.call_later

    def counted(delay_s: float, *call: Callable[..., object]) -> asyncio.TimerHandle:
        timers.append(call_later(delay_s, *call))
        return timers[-1]

    ledger.loop.call_later = counted  # type: ignore[method-assign, assignment]
    for n in range(20):
        await pooled(tickets, f"held{n}")
        dispatcher.step()
        assert len(ledger.scheduler.snapshot.pool) == n + 1
    assert len(timers) == 1
    for timer in timers:
        timer.cancel()
