"""What a relay sends to its brain: how, and when."""

import asyncio
import math
import os
from pathlib import Path

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from balanceroute.proxy.link.token_counts import NOWHERE, place_of
from tests.unit.proxy.link.brains import HoldingReach, Stage, on, with_stage
from tests.waiting import until


@with_stage
async def test_a_brain_on_the_same_machine_reads_tokens_from_memory(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    tickets = [await relay.decoding(f"r{n}") for n in range(3)]
    place = place_of(relay.brain._open["r0"].number)
    for n, ticket in enumerate(tickets):
        ticket.progress(n + 1)
    assert brain.load == 3 * 10 + 6
    tickets[0].progress(4)
    tickets[0].finish(Outcome.FINISHED)
    again = relay.tickets.submit(RequestSpec("again", 1))  # before the brain hears of either
    assert place_of(relay.brain._open["again"].number) == place
    assert brain.load == 3 * 10 + 10
    assert await again.prefiller() == "p0"
    assert "r0" not in brain.scheduler.snapshot.requests and brain.load == 2 * 10 + 5


@with_stage
async def test_tokens_that_come_while_a_relay_joins_are_counted_once(stage: Stage) -> None:
    reach = HoldingReach(stage.path)
    first, relay = await stage.brain(epoch=1), stage.relay(reach=reach)
    ticket = await relay.decoding("a")
    ticket.progress(3)
    await first.end()
    await until(lambda: relay.membership.member is None)
    reach.holds = True
    second = await stage.brain(epoch=2)
    await until(lambda: bool(reach.held))  # the brain has heard Hello; its Welcome is on the way
    ticket.progress(2)
    await until(lambda: second.scheduler.snapshot.workers[0].load == 15)  # said
    assert second.load == 15  # what is read now is older
    assert second.hub.members["r0"].frames.open
    reach.let_go()
    ticket.progress(4)
    assert second.load == 19  # read
    await until(lambda: relay.membership.member is not None)
    assert second.hub.members["r0"].frames.open


@with_stage
async def test_tokens_of_tickets_beyond_the_shared_places_are_sent_by_message(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    while place_of(relay.brain.outbox.token_counts.number()) != NOWHERE:
        pass
    ticket = await relay.decoding("a")
    ticket.progress(3)
    await until(lambda: brain.load == 13)
    ticket.progress(2)
    await until(lambda: brain.load == 15)


def test_tokens_of_all_streams_are_sent_in_one_message_to_a_brain_without_shared_memory() -> None:
    async def test(stage: Stage) -> None:
        relay = stage.relay()
        relay.brain.outbox.token_counts.fd = nothing.fileno()  # what Hello will tell
        brain = await stage.brain(slots=8)
        tickets = [await relay.decoding(f"r{n}") for n in range(8)]
        sent_by_turn: list[list[str]] = []
        turn: list[str] = []

        def counted(request_id: str) -> None:
            if not turn:
                asyncio.get_running_loop().call_soon(lambda: (sent_by_turn.append(list(turn)), turn.clear()))
            turn.append(request_id)

        brain.scheduler.generates = counted
        for ticket in tickets:
            ticket.progress(1)
            ticket.progress(1)
        await until(lambda: brain.load == 8 * 12)
        assert sent_by_turn == [[ticket.id for ticket in tickets]]

    with Path(os.devnull).open() as nothing:
        on(test)


def test_a_brain_without_shared_memory_decides_on_a_call_with_all_tokens_from_before_it() -> None:
    async def test(stage: Stage) -> None:
        relay = stage.relay()
        relay.brain.outbox.token_counts.fd = nothing.fileno()
        brain = await stage.brain()
        ticket = await relay.decoding("a")
        ticket.progress(3)
        await relay.tickets.submit(RequestSpec("b", 1)).prefiller()
        assert brain.load == 13

    with Path(os.devnull).open() as nothing:
        on(test)


@with_stage
async def test_an_unneeded_free_slot_is_reported_with_the_next_call(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    relay.brain.outbox.soon_s = 3600.0
    leaves = await relay.decoding("a")
    leaves.progress(1)
    leaves.finish(Outcome.FINISHED)
    await asyncio.sleep(0)
    assert brain.active == ["a"]
    await relay.decoding("b")
    assert brain.active == ["b"]


@with_stage
async def test_an_unneeded_free_slot_is_reported_soon_without_a_next_call(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    leaves = await relay.decoding("a")
    leaves.progress(1)
    leaves.finish(Outcome.FINISHED)
    await until(lambda: brain.active == [])


@with_stage
async def test_a_relay_that_ends_has_sent_its_delayed_reports(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    relay.brain.outbox.soon_s = 3600.0
    leaves = await relay.decoding("a")
    leaves.progress(5)
    leaves.finish(Outcome.FINISHED, "stop")
    await relay.end()
    await until(lambda: brain.active == [])
    assert brain.scheduler.snapshot.means.answer_tokens == 5  # it did not fail with its relay


@with_stage
async def test_a_delayed_report_keeps_its_original_time(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    brain.scheduler.configure(SchedulerConfig(overlap_requests=None), 0.0)
    relay.brain.configure(SchedulerConfig(overlap_requests=None))
    relay.brain.outbox.soon_s = delayed_s = 1.0
    ticket = await relay.decoding("a")
    started_s = relay.tickets.now()
    ticket.progress(1)
    ticket.began()
    tracker = brain.scheduler.snapshot.requests["a"]
    await until(lambda: tracker.began_s < math.inf)
    assert started_s <= tracker.began_s <= relay.tickets.now() - 0.99 * delayed_s
    relay.brain.outbox.soon_s = 3600.0
    ticket.progress(1)
    ended_s = relay.tickets.now()
    ticket.finish(Outcome.FINISHED, "stop")
    reported_s = relay.tickets.now()
    await until(lambda: relay.tickets.now() > reported_s + delayed_s)
    await relay.decoding("b")
    token_s = brain.scheduler.snapshot.overlap.token_s
    assert ended_s <= tracker.began_s + token_s <= relay.tickets.now() - 0.99 * delayed_s


@with_stage
async def test_a_free_slot_that_a_request_waits_for_is_reported_at_once(stage: Stage) -> None:
    _, relay = await stage.brain(slots=1), stage.relay()
    relay.brain.outbox.soon_s = 3600.0
    runs, waits = await relay.decoding("runs"), await relay.pooled("waits")
    await until(lambda: relay.brain.view().pooled == 1)
    runs.progress(1)
    runs.finish(Outcome.FINISHED)
    assert await waits.admission() == "d0"
