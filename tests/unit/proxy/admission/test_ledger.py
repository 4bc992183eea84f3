"""The narrow waist with a real scheduler behind it."""

import asyncio

import pytest

from balanceroute.core.types import Outcome, Phase, RequestSpec, WorkerState
from balanceroute.errors import Draining, InvariantError, NoHealthyWorkers, QueueFull, QueueTimeout
from balanceroute.proxy.admission.ledger import Ledger
from tests.unit.proxy.admission.ledgers import a_ledger, decoding, turns
from tests.unit.proxy.stage import on_stage


def test_an_idle_router_gives_a_prefiller_without_waiting() -> None:
    async def test() -> None:
        ticket = a_ledger().submit(RequestSpec("r", 10))
        waiting = ticket.prefiller()
        with pytest.raises(StopIteration) as answered:
            waiting.send(None)
        assert answered.value.value == "p0"

    on_stage(test)


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

    on_stage(test)


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

    on_stage(test)


def test_a_ticket_leaves_once() -> None:
    async def test() -> None:
        ledger = a_ledger()
        ticket = ledger.submit(RequestSpec("r", 5))
        release = ticket.finish(Outcome.CANCELLED)
        assert release.phase is Phase.PREFILLING and ticket.left is release
        with pytest.raises(InvariantError):
            ticket.finish(Outcome.CANCELLED)
        assert ledger.tickets == {}

    on_stage(test)


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

    on_stage(test)


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

    on_stage(test)


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

    on_stage(test)
