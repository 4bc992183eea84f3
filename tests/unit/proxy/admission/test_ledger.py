"""The narrow waist with a real scheduler behind it, and the two dispatchers on it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from balanceroute.core.policies import PolicySettings, make_policy
from balanceroute.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.core.types import Admit, Outcome, Phase, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import Draining, InvariantError, NoHealthyWorkers, QueueFull, QueueTimeout
from balanceroute.proxy.admission.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.admission.ledger import Ledger, Ticket
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.telemetry.instruments import Histogram


def a_ledger(policy: str = "br_0", slots: int = 1, **config: float) -> Ledger:
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy)), SchedulerConfig(**config))  # type: ignore[arg-type]
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=slots), 0.0)
    return Ledger(scheduler, asyncio.get_running_loop())


def running(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 5))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_idle_router_gives_a_prefiller_without_waiting() -> None:
    async def test() -> None:
        ticket = a_ledger().submit(RequestSpec("r", 10))
        waiting = ticket.prefiller()
        with pytest.raises(StopIteration) as answered:
            waiting.send(None)
        assert answered.value.value == "p0"

    running(test)


def test_the_decode_dispatcher_decides_over_all_that_came_together() -> None:
    async def test() -> None:
        ledger = a_ledger(slots=8)
        decisions: list[list[Admit]] = []
        dispatcher = DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: decisions[-1].append(admit))
        step = dispatcher.step

        def counted() -> None:
            decisions.append([])
            step()

        dispatcher.step = counted  # type: ignore[method-assign]
        task = asyncio.ensure_future(dispatcher.run())
        tickets = [ledger.submit(RequestSpec(f"r{n}", 10)) for n in range(5)]
        ledger.dispatch()
        for ticket in tickets:
            await ticket.prefiller()
            ticket.prefilled(10)
        assert [await ticket.admission() for ticket in tickets] == ["d0"] * 5
        assert [len(decision) for decision in decisions] == [5]
        task.cancel()

    running(test)


def test_a_freed_slot_wakes_the_decode_dispatcher() -> None:
    async def test() -> None:
        ledger = a_ledger(slots=1)
        task = asyncio.ensure_future(DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None).run())
        first, second = ledger.submit(RequestSpec("a", 5)), ledger.submit(RequestSpec("b", 5))
        ledger.dispatch()
        for ticket in (first, second):
            await ticket.prefiller()
            ticket.prefilled(5)
        assert await first.admission() == "d0"
        await turns()
        assert len(ledger.scheduler.snapshot.pool) == 1 and not ledger.slot_freed.is_set()
        first.progress(3)
        first.finish(Outcome.FINISHED)
        assert await second.admission() == "d0"
        task.cancel()

    running(test)


async def decoding(ledger: Ledger, *names: str) -> list[Ticket]:
    tickets = [ledger.submit(RequestSpec(name, 10)) for name in names]
    ledger.dispatch()
    for ticket in tickets:
        await ticket.prefiller()
        ticket.prefilled(10)
    ledger.admit()
    return tickets


def load(ledger: Ledger) -> int:
    return ledger.scheduler.snapshot.workers[0].load


def test_tokens_are_told_in_sums_and_before_every_decision() -> None:
    async def test() -> None:
        ledger = a_ledger(slots=4)
        first, second = await decoding(ledger, "a", "b")
        for _ in range(3):
            first.progress(2)
        second.progress(1)
        assert (load(ledger), first.unreported_tokens, second.unreported_tokens) == (20, 6, 1)
        ledger.admit()
        assert (load(ledger), first.unreported_tokens, second.unreported_tokens, ledger.behind) == (27, 0, 0, [])
        first.progress(1)
        ledger.settle()
        ledger.settle()
        assert load(ledger) == 28

    running(test)


@pytest.mark.parametrize("leave", ["finish", "requeue"])
def test_a_request_leaves_its_worker_with_every_token_told(leave: str) -> None:
    async def test() -> None:
        ledger = a_ledger(slots=4)
        first, second = await decoding(ledger, "a", "b")
        told: list[int] = []
        progress = ledger.scheduler.progress
        ledger.scheduler.progress = lambda request, tokens, now: (told.append(tokens), progress(request, tokens, now))  # type: ignore[assignment, func-returns-value]
        first.progress(3)
        second.progress(1)
        first.progress(4)
        first.finish(Outcome.FINISHED) if leave == "finish" else first.requeue()
        assert told == [7] and load(ledger) == 10
        ledger.settle()  # it may be in the list still
        assert told == [7, 1] and load(ledger) == 11
        ledger.scheduler.snapshot.check_invariants()

    running(test)


def test_kv_usage_that_falls_wakes_the_prefill_dispatcher() -> None:
    async def test() -> None:
        ledger = a_ledger()
        task = asyncio.ensure_future(PrefillDispatcher(ledger).run())
        ledger.report_prefiller("p0", 0.99)
        ticket = ledger.submit(RequestSpec("r", 5))
        waiting = asyncio.ensure_future(ticket.prefiller())
        await turns()
        assert not waiting.done()
        ledger.report_prefiller("p0", 0.1)
        assert await waiting == "p0"
        task.cancel()

    running(test)


def test_a_ticket_leaves_once() -> None:
    async def test() -> None:
        ledger = a_ledger()
        ticket = ledger.submit(RequestSpec("r", 5))
        release = ticket.finish(Outcome.CANCELLED)
        assert release.phase is Phase.PREFILLING and ticket.left is release
        with pytest.raises(InvariantError):
            ticket.finish(Outcome.CANCELLED)
        assert ledger.tickets == {}

    running(test)


def test_what_expires_is_told_and_has_left() -> None:
    async def test() -> None:
        ledger = a_ledger(queue_deadline_s=0.0)
        ledger.report_prefiller("p0", 1.0)
        ticket = ledger.submit(RequestSpec("r", 5))
        await asyncio.sleep(0.01)
        assert ledger.expire() == [ticket]
        assert ticket.left is not None
        with pytest.raises(QueueTimeout):
            await ticket.prefiller()

    running(test)


def test_refusals_become_errors_with_a_time_to_come_back() -> None:
    async def test() -> None:
        full = a_ledger(max_queued=0)
        with pytest.raises(QueueFull) as refused:
            full.submit(RequestSpec("r", 5))
        assert refused.value.retry_after_s
        down = a_ledger()
        down.set_worker_state("d0", WorkerState.DOWN)
        with pytest.raises(NoHealthyWorkers):
            down.submit(RequestSpec("r", 5))
        draining = a_ledger()
        draining.drain()
        with pytest.raises(Draining):
            draining.submit(RequestSpec("r", 5))

    running(test)


def test_a_waiter_that_was_cancelled_does_not_disturb_the_dispatcher() -> None:
    async def test() -> None:
        ledger = a_ledger()
        ledger.report_prefiller("p0", 1.0)
        ticket = ledger.submit(RequestSpec("r", 5))
        waiting = asyncio.ensure_future(ticket.prefiller())
        await turns()
        waiting.cancel()
        await turns()
        ledger.report_prefiller("p0", 0.0)
        ledger.dispatch()
        assert ticket.finish(Outcome.CANCELLED).phase is Phase.PREFILLING

    running(test)


def test_an_assign_at_once_policy_is_asked_although_no_slot_is_free() -> None:
    async def test() -> None:
        ledger = a_ledger("join_shortest_queue", slots=1)
        task = asyncio.ensure_future(DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None).run())
        for n in range(3):
            ticket = ledger.submit(RequestSpec(f"r{n}", 5))
            await ticket.prefiller()
            ticket.prefilled(5)
            assert await ticket.admission() == "d0"
        task.cancel()

    running(test)


def test_while_something_is_held_decisions_come_at_one_pace_however_many_have_arrived() -> None:
    """A timer for each arrival would have a busy router decide thousands of times per second."""

    async def test() -> None:
        ledger = a_ledger("target_fit", slots=64)
        await decoding(ledger, "a", "b", "c", "d")
        dispatcher = DecodeDispatcher(ledger, Histogram((1.0,)), lambda admit: None)
        timers: list[asyncio.TimerHandle] = []
        call_later = ledger.loop.call_later

        def counted(delay_s: float, *call: Callable[..., object]) -> asyncio.TimerHandle:
            timers.append(call_later(delay_s, *call))
            return timers[-1]

        ledger.loop.call_later = counted  # type: ignore[method-assign, assignment]
        for n in range(20):
            ticket = ledger.submit(RequestSpec(f"held{n}", 10))
            await ticket.prefiller()
            ticket.prefilled(10)
            dispatcher.step()
            assert len(ledger.scheduler.snapshot.pool) == n + 1
        assert len(timers) == 1
        for timer in timers:
            timer.cancel()

    running(test)
