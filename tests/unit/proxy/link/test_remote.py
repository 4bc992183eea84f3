"""A relay's end of the link: its requests go their way, whoever decides, and outlive him."""

import asyncio

import pytest

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from balanceroute.errors import QueueFull
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import (
    MAX_FRAME_BYTES,
    VERSION,
    Chosen,
    FromBrain,
    FromRelay,
    Held,
    Hello,
    Requeue,
    Submit,
    Welcome,
    frame,
    read_from_relay,
)
from balanceroute.proxy.link.token_counts import PLACES
from balanceroute.proxy.wire.prompt_blocks import MAX_BLOCKS
from tests.unit.proxy.link.brains import Stage, with_stage
from tests.waiting import until


@with_stage
async def test_a_request_passes_every_phase_over_the_link(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    ticket = await relay.decoding("a")
    ticket.progress(3)
    await until(lambda: brain.load == 13)
    ticket.progress(2)
    ticket.requeue()
    assert await ticket.prefiller() == "p0"
    assert brain.scheduler.snapshot.requests["a"].earlier_tokens == 5
    ticket.prefilled(15)
    assert await ticket.admission() == "d0" and brain.load == 15
    ticket.put_back()
    assert await ticket.admission() == "d0"
    ticket.finish(Outcome.FINISHED, "stop")
    await until(lambda: not brain.scheduler.snapshot.requests)
    brain.scheduler.snapshot.check_invariants()


@with_stage
async def test_a_decode_first_request_passes_every_phase_over_the_link(stage: Stage) -> None:
    stage.config = SchedulerConfig(decode_first=True)
    brain, relay = await stage.brain(), stage.relay()
    ticket = relay.tickets.submit(RequestSpec("a", 5))
    assert await ticket.admission() == "d0"
    ticket.request_prefill()
    assert await ticket.prefiller() == "p0"
    ticket.push_failed()
    assert await ticket.prefiller() == "p0"
    ticket.pushed(10)
    ticket.progress(3)
    await until(lambda: brain.load == 13)
    assert not brain.scheduler.snapshot.requests["a"].pushing
    ticket.finish(Outcome.FINISHED, "stop")
    await until(lambda: not brain.scheduler.snapshot.requests)
    brain.scheduler.snapshot.check_invariants()


@with_stage
async def test_an_answer_that_begins_anew_has_its_own_prompt_at_the_brain_and_at_the_next_one(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    ticket = await relay.decoding("a")
    ticket.progress(5)
    ticket.requeue(anew=True)
    assert await ticket.prefiller() == "p0"
    tracker, standing = brain.scheduler.snapshot.requests["a"], ticket.standing(0.0)
    for each in (tracker, standing):
        assert (each.prompt_tokens, each.earlier_tokens) == (10, 0)


@with_stage
async def test_a_refusal_crosses_with_its_cause(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    brain.ledger.configure(SchedulerConfig(max_queued=0))
    ticket = relay.tickets.submit(RequestSpec("a", 1))
    with pytest.raises(QueueFull):
        await ticket.prefiller()
    assert ticket.left and not relay.tickets.by_id and not relay.brain._open


@with_stage
async def test_a_request_that_finds_no_brain_waits_for_one(stage: Stage) -> None:
    relay = stage.relay()
    ticket = relay.tickets.submit(RequestSpec("a", 1))
    gone = relay.tickets.submit(RequestSpec("gone", 1))
    gone.finish(Outcome.CANCELLED)
    brain = await stage.brain()
    assert await ticket.prefiller() == "p0"
    assert list(brain.scheduler.snapshot.requests) == ["a"]


@with_stage
async def test_a_new_brain_gets_every_living_request_with_all_its_tokens(stage: Stage) -> None:
    first, relay = await stage.brain(epoch=1), stage.relay()
    streams = [await relay.decoding(f"s{n}") for n in range(4)]
    waiting = await relay.pooled("w")
    streams[0].progress(5)
    await first.end()
    await until(lambda: relay.membership.member is None)
    streams[0].progress(7)
    streams[1].progress(1)
    relay.tickets.settle()  # as the reaper does
    streams[3].finish(Outcome.FINISHED)
    second = await stage.brain(epoch=2)
    assert await waiting.admission() == "d0"  # the slot that came free meanwhile
    assert second.active == ["s0", "s1", "s2", "w"]
    streams[2].progress(2)
    await until(lambda: second.load == 5 * 10 - 10 + 12 + 1 + 2)
    for ticket in (*streams[:3], waiting):
        ticket.finish(Outcome.FINISHED)
    await until(lambda: not second.scheduler.snapshot.requests)
    second.scheduler.snapshot.check_invariants()


@with_stage
async def test_a_new_brain_gets_a_prompts_blocks_when_it_must_choose_a_prefiller_again(stage: Stage) -> None:
    first, relay = await stage.brain(epoch=1), stage.relay()
    tickets = [relay.tickets.submit(RequestSpec(name, 8, prefix=[7, 2**64 - 1], block_tokens=4)) for name in "ab"]
    for ticket in tickets:
        assert await ticket.prefiller() == "p0"
    streams, prefills = tickets
    streams.prefilled(8)
    assert await streams.admission() == "d0"
    streams.progress(3)
    await until(lambda: first.load == 11)
    await first.end()
    second = await stage.brain(epoch=2)
    await until(lambda: second.load == 11)
    requests = second.scheduler.snapshot.requests
    assert [list(requests[name].prefix) for name in "ab"] == [[], [7, 2**64 - 1]]
    streams.requeue()
    assert await streams.prefiller() == "p0"
    assert list(requests["a"].prefix) == [7, 2**64 - 1]
    assert second.scheduler.snapshot.prefillers[0].cache.matched([7, 2**64 - 1]) == 2
    second.scheduler.snapshot.check_invariants()


@with_stage
async def test_all_streams_of_a_full_relay_fit_into_one_hello(stage: Stage) -> None:
    relay = stage.relay()  # there is no brain
    held, blocks = [], [2**64 - 1 - n for n in range(100)]
    for number in range(20_000):
        ticket = relay.tickets.submit(RequestSpec(f"0-{number:032}", 10_000, 0, "k" * 16, 4096, blocks, 100))
        ticket.answer("192.168.100.100:8100")
        ticket.prefilled(10_000)
        ticket.answer("192.168.100.100:9000@15")
        ticket.progress(700)
        held.append(Held(number * PLACES, 2, ticket.standing(relay.tickets.now())))
        assert ticket.spec.prefix is blocks, "a prefill that it needs again is told of them"
    assert PLACES / len(held) * len(frame([Hello(VERSION, "r0", 1, 1, tuple(held))])) < MAX_FRAME_BYTES / 2


@with_stage
async def test_a_relay_joins_with_any_number_of_waiting_choices_of_the_largest_prompts(stage: Stage) -> None:
    """32 requests of 64 choices each, whose 4 MB of text a relay has once, are 75 MB of hashes to a brain."""
    relay = stage.relay()  # there is no brain
    blocks = [2**64 - 1 - n for n in range(MAX_BLOCKS)]
    for number in range(2048):
        relay.tickets.submit(RequestSpec(f"{number}", 1_000_000, prefix=blocks, block_tokens=200))
    for number, entry in enumerate(relay.brain._open.values()):
        entry.submitted = number % 2 == 0  # a former brain knew them
    brain = await stage.brain(relays=["r0"])
    await until(lambda: len(brain.scheduler.snapshot.requests) == 2048)
    prefixes = [len(request.prefix) for request in brain.scheduler.snapshot.requests.values()]
    assert prefixes[0] == MAX_BLOCKS and prefixes[-1] == 0


@with_stage
async def test_a_new_brain_adopts_all_running_requests_even_if_it_would_not_admit_them(stage: Stage) -> None:
    first, relay = await stage.brain(epoch=1, slots=3), stage.relay()
    streams = [await relay.decoding(f"s{n}") for n in range(3)]
    await first.end()
    await until(lambda: relay.membership.member is None)
    second = await stage.brain(epoch=2, slots=2)
    waiting = await relay.pooled("w")
    assert second.active == ["s0", "s1", "s2"] and not relay.heard.messages_of(frozenset)
    streams[0].finish(Outcome.FINISHED)
    streams[1].finish(Outcome.FINISHED)
    assert await waiting.admission() == "d0"
    assert second.active == ["s2", "w"]


@with_stage
async def test_an_answer_to_an_outdated_call_is_dropped(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    received: list[FromRelay] = []
    made: list[Frames[FromBrain]] = []

    def brain() -> Frames[FromBrain]:
        made.append(Frames(loop, lambda _, body: received.extend(read_from_relay(body)), lambda *_: None))
        return made[-1]

    server = await loop.create_unix_server(brain, stage.path)
    relay = stage.relay()
    await until(lambda: any(isinstance(message, Hello) for message in received))
    made[0].send(Welcome(VERSION, 1, 1, (), 0))
    ticket, other = relay.tickets.submit(RequestSpec("a", 1)), relay.tickets.submit(RequestSpec("b", 1))
    await until(lambda: sum(isinstance(message, Submit) for message in received) == 2)
    first, second = (message.ticket for message in received if isinstance(message, Submit))
    made[0].send(Chosen(first, 1, "p0"))
    assert await ticket.prefiller() == "p0"
    ticket.prefill_failed()
    ticket.prefiller_id = ""
    other.finish(Outcome.CANCELLED)
    for answer in (Chosen(first, 1, "p1"), Chosen(second, 1, "p1"), Chosen(first, 2, "p2")):
        made[0].send(answer)
    assert await ticket.prefiller() == "p2"
    assert not any(isinstance(message, Requeue) for message in received)
    server.close()
