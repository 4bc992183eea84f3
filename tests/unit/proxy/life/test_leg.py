"""What follows what in a request's life, by the tables and coroutines of strategies, and what ends it from outside."""

import ast
import asyncio
import math
from pathlib import Path

import pytest

from balanceroute.core.types import Outcome, Phase
from balanceroute.errors import Draining, UpstreamStatus
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.errors import WorkerSilent
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.life.leg import Event, Leg, Strategy
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.life.scoring import Scoring
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.workers.reply import Reply
from tests.unit.proxy.virtual_time import a_router, let_pass, with_virtual_time

REPO = Path(__file__).parents[4]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STRATEGIES = pytest.mark.parametrize("strategy", [Pull, Layerwise, Scoring])


def events_in(module: str, name: str) -> set[Event]:
    """The events that the source of a function names; those of `requeue_rest`, too, where it ends with that."""
    source = (REPO / module.replace(".", "/")).with_suffix(".py")  # compiled functions do not know theirs
    functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, FUNCTIONS)]
    (function,) = [node for node in functions if node.name == name]
    found: set[Event] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in Event.__members__:
            found.add(Event[node.id])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "requeue_rest":
            found |= events_in("balanceroute.proxy.life.cut_off", "requeue_rest")
    return found


@STRATEGIES
def test_every_phase_names_exactly_the_events_that_its_coroutine_returns(strategy: type[Strategy]) -> None:
    for phase, row in strategy.follows.items():
        assert events_in(strategy.__module__, phase) == set(row), phase


@STRATEGIES
def test_every_named_phase_is_defined_or_the_end(strategy: type[Strategy]) -> None:
    named = {strategy.first, *(after for row in strategy.follows.values() for after in row.values())}
    assert named == {*strategy.follows, Phase.GONE}


@STRATEGIES
def test_the_end_can_be_reached_from_every_phase(strategy: type[Strategy]) -> None:
    ends = {Phase.GONE}
    for _ in strategy.follows:
        ends |= {phase for phase, row in strategy.follows.items() if ends & set(row.values())}
    assert ends == {*strategy.follows, Phase.GONE}


@STRATEGIES
def test_a_request_that_was_cut_off_gets_a_decode_slot_again(strategy: type[Strategy]) -> None:
    for row in strategy.follows.values():
        if Event.CUT_OFF not in row:
            continue
        phase = row[Event.CUT_OFF]
        while Event.ADMITTED not in strategy.follows[phase]:
            assert phase is not Phase.DECODING
            phase = strategy.follows[phase][Event.TAKEN if phase is Phase.QUEUED else Event.PREFILLED]


# ---------------------------------------------------------------------------------------- one that runs


class Stays:
    """A strategy that sends one request to d0, which never answers."""

    first = Phase.QUEUED
    follows = {Phase.QUEUED: {Event.COMPLETE: Phase.GONE}}

    def __init__(self, leg: Leg, grace_s: float, sent: asyncio.Event) -> None:
        self.leg, self.grace_s, self.sent = leg, grace_s, sent

    async def queued(self) -> Event:
        worker = self.leg.services.fleet["d0"]
        self.leg.enter(worker, math.inf, self.grace_s)
        self.sent.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leg.leave(worker)
        return Event.COMPLETE


async def begun(grace_s: float = 0.0) -> tuple[Leg, asyncio.Task[None]]:
    """A leg whose request is at d0."""
    services, sent = a_router(), asyncio.Event()
    request = parse("completions", b'{"prompt": "a"}')
    leg = Leg(services, "r", request, PartAnswer(request), [], lambda leg: Stays(leg, grace_s, sent))
    task = asyncio.get_running_loop().create_task(leg.run())
    await sent.wait()
    return leg, task


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
@with_virtual_time
async def test_a_client_that_goes_ends_its_request_when_the_grace_of_the_try_is_over(grace_s: float) -> None:
    leg, task = await begun(grace_s)
    left_s = leg.services.ledger.now()
    leg.abandon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leg.services.ledger.now() - left_s == pytest.approx(grace_s)
    assert (leg.outcome, leg.services.legs, leg.services.fleet["d0"].in_use) == (Outcome.CANCELLED, set(), 0)
    leg.services.ledger.scheduler.snapshot.check_invariants()


@with_virtual_time
async def test_an_interrupted_request_raises_the_interruption_unless_it_is_also_cancelled() -> None:
    leg, task = await begun()
    leg.interrupt(WorkerSilent("silent", worker="d0", tier="decode"))
    with pytest.raises(WorkerSilent):
        await task
    leg, task = await begun()
    leg.interrupt(WorkerSilent("silent", worker="d0", tier="decode"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@with_virtual_time
async def test_a_refusal_ends_a_request_that_was_interrupted_for_another_try_in_the_same_turn() -> None:
    leg, task = await begun()
    leg.interrupt(WorkerSilent("silent", worker="d0", tier="decode"))
    leg.interrupt(Draining("The router is shutting down."))
    leg.interrupt(WorkerSilent("silent", worker="d0", tier="decode"))
    with pytest.raises(Draining):
        await task


@with_virtual_time
async def test_a_worker_is_late_after_its_deadline_or_a_too_long_gap_between_tokens() -> None:
    leg, task = await begun()
    leg.try_deadline_s = 5.0
    assert [leg.late(now) for now in (4.0, 6.0)] == [False, True]
    leg.ticket.last_token_s, leg.idle_s = 10.0, 3.0
    assert [leg.late(now) for now in (6.0, 12.0, 14.0)] == [False, False, True]
    task.cancel()


@with_virtual_time
async def test_tokens_are_expected_of_an_open_stream_but_not_during_its_prefill() -> None:
    """What waits for a long prefill elsewhere must not have its decode worker taken for a silent one."""

    class Open(Reply):
        """A worker's reply of which the head has come."""

        def __init__(self) -> None:
            self.paused = self.over = False

    services, sent = a_router(), asyncio.Event()
    request = parse("completions", b'{"prompt": "a", "stream": true}')
    leg = Leg(services, "r", request, PartAnswer(request), [], lambda leg: Stays(leg, 0.0, sent))
    leg.decoder_id = "d0"
    assert not leg.expects_tokens  # nothing is open
    leg.reply = Open()
    assert leg.expects_tokens
    leg.kv_due = True
    assert not leg.expects_tokens
    leg.kv_due = False
    leg.reply.paused = True  # type: ignore[union-attr]
    assert not leg.expects_tokens  # its client does not read


@pytest.mark.parametrize("lost", [False, True])
@with_virtual_time
async def test_remaining_kv_is_drained_unless_decode_workers_died_under_the_request(lost: bool) -> None:
    """A drain is the same request once more."""
    leg, task = await begun()
    if lost:
        dead = UpstreamStatus("dead", worker="d1", tier="decode", status=500, body=b"EngineDeadError")
        await leg.retries.suspect_loss(dead, leg.services.fleet["d1"], midway=False)
    leg.kv.params, leg.kv.pinned_s = b'{"x": 1}', leg.services.ledger.now()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await let_pass(1.0)
    asked = [asked for worker in leg.services.fleet for asked in worker.upstream.asked]  # type: ignore[attr-defined]
    assert len(asked) == (0 if lost else 1)
