"""What members of a router are told of workers, silent groups and the brain's view, and when."""

import asyncio

import pytest

from balanceroute.core.types import Role, WorkerSpec
from balanceroute.proxy.link.messages import Finding, Judged, Silent
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.silence import FrozenGroup
from tests.unit.proxy.link.brains import RawRelay, Relay, Stage, with_stage
from tests.waiting import until


@with_stage
async def test_a_new_relay_is_sent_the_present_view_although_nothing_changes(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    await until(lambda: relay.brain.view() == brain.ledger.view())


@with_stage
async def test_every_relay_hears_of_groups_that_fell_silent_together_and_one_that_joins_at_once(stage: Stage) -> None:
    def groups(relay: Relay) -> list[list[str]]:
        return [[group.name for group in message.groups] for message in relay.heard.messages_of(Silent)]

    brain, first = await stage.brain(), stage.relay("first")
    await until(lambda: groups(first) == [[]])
    brain.frozen.append(FrozenGroup("group", ("d0", "d1"), asyncio.get_running_loop().time()))
    await until(lambda: groups(first) == [[], ["group"]])
    second = stage.relay("second")
    await until(lambda: groups(second) == [["group"]])
    brain.frozen.clear()
    await until(lambda: groups(first) == [[], ["group"], []] and groups(second) == [["group"], []])


@with_stage
async def test_every_change_of_a_worker_is_sent_before_the_next_check(stage: Stage) -> None:
    brain = await stage.brain()
    worker = brain.fleet.connect(WorkerSpec("d0", Role.DECODE, url="http://127.0.0.1:1", slots=4))
    relay = await RawRelay().connect(stage)
    relay.hello()
    await until(lambda: bool(relay.circuits()))
    brain.hub._timers["look"].cancel()
    worker.circuit.open(0.0, "it fails")
    await until(lambda: relay.circuits()[-1] == CircuitState.OPEN)
    worker.circuit.reachable()
    await until(lambda: relay.circuits()[-1] == CircuitState.HALF_OPEN)


@pytest.mark.parametrize(
    ("before", "findings"),
    [
        (CircuitState.HALF_OPEN, [Finding.USED, Finding.INCONCLUSIVE]),
        (CircuitState.CLOSED, [Finding.FAULT, Finding.SUCCESS]),
    ],
)
@with_stage
async def test_a_relay_hears_of_a_worker_as_it_was_before_when_it_takes_back_what_it_has_reported(
    stage: Stage, before: CircuitState, findings: list[Finding]
) -> None:
    """It has taken the worker for changed already: with a trial under way, or doubtful."""
    brain = await stage.brain()
    worker = brain.fleet.connect(WorkerSpec("d0", Role.DECODE, url="http://127.0.0.1:1", slots=4))
    relay = await RawRelay().connect(stage)
    worker.circuit.state = before
    relay.hello()
    await until(lambda: relay.circuits() == [before])
    relay.received.clear()
    for finding in findings:
        relay.frames.send(Judged("d0", finding))
    await until(lambda: relay.circuits() == [before])
