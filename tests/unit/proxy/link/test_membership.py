"""How a relay finds a brain, joins it and leaves it, and what waits meanwhile."""

import asyncio
import logging
import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Phase, RequestSpec
from balanceroute.errors import Draining, NoHealthyWorkers, QueueTimeout
from balanceroute.proxy.admission.decider import MOST_ENDED
from balanceroute.proxy.link.frames import Frames
from balanceroute.proxy.link.messages import (
    BEAT_S,
    SILENT_S,
    VERSION,
    Beat,
    CacheDoubted,
    Chosen,
    Farewell,
    FromBrain,
    FromRelay,
    Welcome,
    frame,
)
from balanceroute.proxy.link.reach import MAX_RETRY_S, RETRY_S, STEADY_S, Moved, P, SocketReach, UntrustedBrain
from tests.unit.proxy.link.brains import Brain, Relay, Stage, on, with_stage
from tests.unit.proxy.virtual_time import in_virtual_time, let_pass, stand_still
from tests.waiting import until


@with_stage
async def test_a_request_that_waits_too_long_for_a_brain_is_refused_and_streams_are_not(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    stream, again = await relay.decoding("s"), await relay.decoding("b")
    await brain.end()
    await until(lambda: relay.membership.member is None)
    relay.brain.configure(SchedulerConfig(queue_deadline_s=0.05))
    ticket = relay.tickets.submit(RequestSpec("a", 1))
    again.requeue()
    for waits in (ticket, again):
        with pytest.raises(QueueTimeout, match="not there"):
            await waits.prefiller()
    assert list(relay.tickets.by_id) == ["s"] and not stream.left


@with_stage
async def test_requests_that_have_waited_too_long_are_refused_over_many_turns_of_the_loop(stage: Stage) -> None:
    """In one turn, thousands of them would delay all streams of the relay."""
    relay = stage.relay()  # there is no brain
    await relay.end()
    for number in range(3 * MOST_ENDED):
        relay.tickets.submit(RequestSpec(f"{number}", 1))
    relay.brain.configure(SchedulerConfig(queue_deadline_s=-1.0))
    left = [len(relay.tickets.by_id)]
    relay.membership._expire()
    while relay.tickets.by_id:
        left.append(len(relay.tickets.by_id))
        await asyncio.sleep(0)
    assert all(before - after <= MOST_ENDED for before, after in pairwise([*left, 0]))


@with_stage
async def test_a_request_that_waits_too_long_for_a_brain_without_a_hello_is_refused(stage: Stage) -> None:
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(lambda _, writer: silent.append(writer), stage.path)
    relay = stage.relay()
    relay.membership.silent_s = 3600.0
    relay.brain.configure(SchedulerConfig(queue_deadline_s=0.05))
    with pytest.raises(QueueTimeout, match="not there"):
        await relay.tickets.submit(RequestSpec("a", 1)).prefiller()
    assert len(silent) == 1
    await relay.end()
    server.close()
    for writer in silent:
        writer.close()
        await writer.wait_closed()


@with_stage
async def test_a_request_that_waits_too_long_for_a_stopped_brain_is_refused_and_released_when_it_resumes(
    stage: Stage,
) -> None:
    brain, relay = await stage.brain(slots=1), stage.relay()
    await relay.decoding("s")
    relay.brain.configure(SchedulerConfig(pool_ttl_s=0.05))
    waiting = await relay.pooled("w")
    relay.membership.frozen_s = 0.0  # as if the brain had said nothing for longer
    with pytest.raises(QueueTimeout, match="not there"):
        await waiting.admission()
    await until(lambda: list(brain.scheduler.snapshot.requests) == ["s"])
    assert relay.membership.member is not None and brain.active == ["s"]


@with_stage
async def test_all_void_streams_are_ended_at_once(stage: Stage) -> None:
    """To look for each among all streams of a relay would take seconds for thousands."""
    brain, away, stays = await stage.brain(slots=2), stage.relay("away"), stage.relay("stays")
    for name in ("a", "b"):
        await away.decoding(name)
    waiting = [await stays.pooled(name) for name in ("c", "d")]
    brain.hub.members["away"].frames.abort("the connection breaks")
    for ticket in waiting:
        assert await ticket.admission() == "d0"
    await until(lambda: away.heard.messages_of(frozenset))
    assert away.heard.messages_of(frozenset) == [{"a", "b"}] and not away.tickets.by_id


@with_stage
async def test_thousands_of_void_streams_are_ended_over_several_turns_of_the_loop(stage: Stage) -> None:
    """In one turn, the streams that the relay keeps would stand still meanwhile."""
    count = 3 * MOST_ENDED
    brain, away, stays = await stage.brain(slots=count), stage.relay("away"), stage.relay("stays")
    names = {f"a{number}" for number in range(count)}
    for name in sorted(names):
        await away.decoding(name)
    waiting = [await stays.pooled(f"w{number}") for number in range(count)]
    left: list[int] = []

    def listen(request_ids: frozenset[str]) -> None:
        left.append(len(away.tickets.by_id))
        away.heard.note(request_ids)

    away.heard.void = listen  # type: ignore[method-assign]
    brain.hub.members["away"].frames.abort("the connection breaks")
    for ticket in waiting:
        assert await ticket.admission() == "d0"
    await until(lambda: not away.tickets.by_id)
    assert left == [2 * MOST_ENDED, MOST_ENDED, 0]
    assert set().union(*away.heard.messages_of(frozenset)) == names


@with_stage
async def test_what_one_brain_calls_void_goes_on_once_another_is_connected(stage: Stage) -> None:
    """The other one may take it over; the first one's judgement ended only what had had its turn."""
    count = 2 * MOST_ENDED
    brain, away, stays = await stage.brain(slots=count), stage.relay("away"), stage.relay("stays")
    for number in range(count):
        await away.decoding(f"a{number}")
    waiting = [await stays.pooled(f"w{number}") for number in range(count)]
    others_frames = away.brain.outbox.frames

    def listen(request_ids: frozenset[str]) -> None:
        away.heard.note(request_ids)
        away.brain.outbox.frames = others_frames  # any but the ones that named them

    away.heard.void = listen  # type: ignore[method-assign]
    brain.hub.members["away"].frames.abort("the connection breaks")
    for ticket in waiting:
        assert await ticket.admission() == "d0"
    await until(lambda: bool(away.heard.messages_of(frozenset)))
    for _ in range(3):
        await asyncio.sleep(0)
    [ended] = away.heard.messages_of(frozenset)
    assert len(ended) == MOST_ENDED == len(away.tickets.by_id)


@with_stage
async def test_a_stream_whose_slot_was_reassigned_is_void_and_the_others_go_on(stage: Stage) -> None:
    brain, away, stays = await stage.brain(slots=2), stage.relay("away"), stage.relay("stays")
    kept, lost = await away.decoding("kept"), await away.decoding("lost")
    waiting = await stays.pooled("w")
    brain.hub.members["away"].frames.abort("the connection breaks")
    assert await waiting.admission() == "d0"
    await until(lambda: away.heard.messages_of(frozenset))
    assert away.heard.messages_of(frozenset) == [{"lost"}] and lost.left and lost.phase is Phase.GONE
    with pytest.raises(NoHealthyWorkers, match="lost its hold"):
        lost.check()
    lost.progress(1)  # what was under way
    away.tickets.settle()
    kept.progress(1)
    await until(lambda: brain.load == 21)
    assert brain.active == ["kept", "w"]


@with_stage
async def test_a_request_that_waits_too_long_in_the_pool_without_a_brain_is_refused(stage: Stage) -> None:
    brain, relay = await stage.brain(slots=1), stage.relay()
    stream, pooled = await relay.decoding("s"), await relay.pooled("p")
    await brain.end()
    await until(lambda: relay.membership.member is None)
    relay.brain.configure(SchedulerConfig(pool_ttl_s=0.05))
    with pytest.raises(QueueTimeout, match="not there"):
        await pooled.admission()
    assert list(relay.tickets.by_id) == ["s"] and not stream.left


@with_stage
async def test_a_brain_with_certain_lead_continues_above_a_lost_epoch(stage: Stage) -> None:
    first, relay = await stage.brain(epoch=7), stage.relay()
    stream = await relay.decoding("s")
    await first.end()
    await until(lambda: relay.membership.member is None)
    brain = Brain(stage.config, 1, 4, ["r0"])
    brain.goes_on = True
    await brain.hub.serve(stage.path)
    await until(lambda: relay.membership.member is not None)
    assert relay.membership.epoch == brain.hub.epoch == 8 and brain.superseded == [7]
    assert brain.active == ["s"] and not stream.left
    await brain.end()


class ReplacedSocket(SocketReach):
    """The way to a brain whose socket is replaced while the relay connects, so many times (`left`)."""

    left = 3

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        made, moved = await super().connect(protocol)
        self.left -= 1
        return (made, lambda: True) if self.left >= 0 else (made, moved)


@with_stage
async def test_a_relay_whose_brain_is_replaced_while_it_connects_tries_again_at_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    brain, reach = await stage.brain(), ReplacedSocket(stage.path)
    ticket = stage.relay(reach=reach).tickets.submit(RequestSpec("a", 1))
    assert await ticket.prefiller() == "p0" and reach.left == -1
    await until(lambda: len(brain.hub._connections) == 1)
    assert not caplog.records, "it is nobody's fault"


@with_stage
async def test_a_brain_with_an_old_epoch_is_ignored(stage: Stage) -> None:
    first, relay = await stage.brain(epoch=7), stage.relay()
    await until(lambda: relay.membership.member is not None)
    await first.end()
    await until(lambda: relay.membership.member is None)
    past = await stage.brain(epoch=6)
    await until(lambda: bool(past.superseded))
    assert past.superseded[0] == 7 and relay.membership.member is None and not past.hub.members
    await past.end()
    await stage.brain(epoch=8)
    await until(lambda: relay.membership.member is not None)
    assert relay.membership.epoch == 8


class Scripted(asyncio.Transport):
    """A brain's socket without its brain: it welcomes the relay, then beats while `beats`."""

    def __init__(self, frames: Frames[FromRelay], epoch: int | None) -> None:
        super().__init__()
        self.frames, self.beats, self.loop = frames, True, asyncio.get_running_loop()
        frames.connection_made(self)
        if epoch is None:
            return
        self.loop.call_soon(frames.data_received, frame([Welcome(VERSION, epoch, 1, (), 0)]))
        self.loop.call_later(BEAT_S, self.beat)

    def beat(self) -> None:
        if self.beats and self.frames.open:
            self.frames.data_received(frame([Beat()]))
            self.loop.call_later(BEAT_S, self.beat)

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.loop.call_soon(self.frames.connection_lost, None)

    close = abort


class ScriptedReach:
    """The way to brains that are there by script.

    `epoch`: of all of them; None: each leads under the next one. While there is a `trouble`, no brain can be reached.
    """

    near, name = True, "there:1"

    def __init__(self, epoch: int | None = None) -> None:
        self.brains: list[Scripted] = []
        self.epoch, self.trouble = epoch, ""

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        if self.trouble:
            raise OSError(self.trouble)
        made = protocol()
        assert isinstance(made, Frames)
        self.brains.append(Scripted(made, self.epoch or len(self.brains) + 1))
        return made, lambda: False

    def try_next_address(self) -> None:
        """See `Reach`."""


def test_a_relay_leaves_a_brain_that_falls_silent_and_keeps_one_that_beats() -> None:
    async def test() -> None:
        reach = ScriptedReach()
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(20 * SILENT_S)
        assert relay.membership.epoch == len(reach.brains) == 1
        reach.brains[0].beats = False
        await let_pass(2 * SILENT_S)
        assert relay.membership.epoch == len(reach.brains) == 2
        await relay.end()

    in_virtual_time(test)


class ReadingReach(ScriptedReach):
    """The way to a brain that reads a Hello for long, and beats meanwhile."""

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        made = protocol()
        assert isinstance(made, Frames)
        brain = Scripted(made, None)
        self.brains.append(brain)
        brain.loop.call_later(BEAT_S, brain.beat)
        return made, lambda: False


def test_a_relay_waits_for_the_welcome_of_a_brain_that_beats() -> None:
    async def test() -> None:
        reach = ReadingReach()
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(5 * SILENT_S)
        (brain,) = reach.brains
        assert relay.membership.member is None
        brain.frames.data_received(frame([Welcome(VERSION, 1, 1, (), 0)]))
        assert relay.membership.member == 1
        brain.abort()
        await let_pass(BEAT_S)
        reach.brains[1].beats = False
        await let_pass(2 * SILENT_S)
        assert relay.membership.member is None and len(reach.brains) > 2
        await relay.end()

    in_virtual_time(test)


def test_a_relay_that_was_stopped_itself_keeps_its_brain() -> None:
    async def test() -> None:
        reach = ScriptedReach()
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(3 * BEAT_S + 0.1)
        reach.brains[0].beats = False  # what it sent meanwhile is read after the look
        stand_still(10 * SILENT_S)
        await let_pass(SILENT_S / 2)
        reach.brains[0].frames.data_received(frame([Beat()]))
        await let_pass(SILENT_S / 2)
        assert relay.membership.epoch == len(reach.brains) == 1
        await relay.end()

    in_virtual_time(test)


@with_stage
async def test_a_relay_keeps_checking_its_brain_after_a_check_that_raised(stage: Stage) -> None:
    looks: list[bool] = []

    class Failing(SocketReach):
        async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
            made, moved = await super().connect(protocol)

            def look() -> bool:
                looks.append(moved())
                if len(looks) == 2:  # the first one is made before it is greeted
                    raise RuntimeError("a bug")
                return looks[-1]

            return made, look

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await stage.brain()
    stage.relay("r0", Failing(stage.path))
    await until(lambda: len(looks) > 3)


@pytest.mark.parametrize("end", ["relay", "brain"])
def test_a_relay_whose_memberships_end_by_a_bug_rejoins_after_growing_pauses_and_at_once_for_the_next_brain(
    end: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balanceroute.proxy.link.reach.STEADY_S", math.inf)  # a busy machine may take so long
    tries_s: list[float] = []

    class Timed(SocketReach):
        async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
            tries_s.append(asyncio.get_running_loop().time())
            return await super().connect(protocol)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async def test(stage: Stage) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        brain = await stage.brain()
        relay = stage.relay("r0", Timed(stage.path))
        if end == "relay":
            relay.heard.name_workers = fail  # type: ignore[method-assign]
        else:
            brain.hub._reports.take = fail  # type: ignore[method-assign]
            relay.heard.joined = lambda _: relay.brain.report(CacheDoubted("d0", "1"))  # type: ignore[method-assign]
        await until(lambda: len(tries_s) == 6)
        assert tries_s[5] - tries_s[4] >= 8 * RETRY_S
        await brain.end()
        relay.heard.name_workers = lambda *_: None  # type: ignore[method-assign]
        await stage.brain(epoch=2)
        await until(lambda: relay.membership.epoch == 2 and relay.membership.member is not None)
        found = [vars(line)["epoch"] for line in caplog.records if line.message == "brain found"]
        assert found == [1, 1, 2]
        bugs = [line for line in caplog.records if vars(line).get("where") == "link"]
        assert len(bugs) == (end == "relay")
        assert len(relay.bugs if end == "relay" else brain.bugs) >= 5, "each is counted, and only the first is logged"

    caplog.set_level(logging.INFO)
    on(test)


def test_a_relay_rejoins_at_once_after_a_membership_that_lasted_whatever_became_of_earlier_ones() -> None:
    async def test() -> None:
        reach = ScriptedReach(epoch=1)
        relay = Relay(SchedulerConfig(), reach, "r0")
        for short in range(1, 6):
            await let_pass(MAX_RETRY_S)
            assert len(reach.brains) == short
            reach.brains[-1].abort()
        await let_pass(MAX_RETRY_S + 2 * STEADY_S)
        reach.brains[-1].abort()
        await let_pass(2 * RETRY_S)
        assert len(reach.brains) == 7
        await relay.end()

    in_virtual_time(test)


class RefusingReach(ScriptedReach):
    """The way to brains that refuse a relay while `refuses`, with this message or, without one, by closing."""

    near = False

    def __init__(self, farewell: FromBrain | None) -> None:
        super().__init__(epoch=1)
        self.refuses, self.farewell, self.tries_s = True, farewell, list[float]()

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        self.tries_s.append(asyncio.get_running_loop().time())
        if not self.refuses:
            return await super().connect(protocol)
        made = protocol()
        assert isinstance(made, Frames)
        refusing, loop = Scripted(made, None), asyncio.get_running_loop()
        if self.farewell is None:
            loop.call_soon(refusing.abort)
        else:
            loop.call_soon(made.data_received, frame([self.farewell]))
        return made, lambda: False

    @property
    def pauses_s(self) -> list[float]:
        return [later - before for before, later in pairwise(self.tries_s)]


@pytest.mark.parametrize(
    ("farewell", "reason"),
    [
        (Farewell(1, "not this version"), "there:1: not this version"),
        (
            None,
            "there:1: the connection was closed; the brain's log says why if it has refused this relay",
        ),
    ],
    ids=["with a reason", "by its certificate"],
)
def test_a_relay_that_is_refused_tries_again_after_growing_pauses_and_says_by_whom(
    farewell: Farewell | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        reach = RefusingReach(farewell)
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(20 * MAX_RETRY_S)
        assert reach.pauses_s[0] < 4 * RETRY_S and reach.pauses_s[-1] >= MAX_RETRY_S
        assert [vars(line)["reason"] for line in caplog.records] == [reason]
        reach.refuses = False
        await until(lambda: relay.membership.member is not None)
        reach.refuses, tried = True, len(reach.tries_s)
        reach.brains[-1].abort()
        await until(lambda: len(reach.tries_s) == tried + 2)
        assert reach.pauses_s[-1] < 4 * RETRY_S
        await relay.end()

    in_virtual_time(test)


@pytest.mark.parametrize(
    "message",
    [
        Chosen(1, 1, "d0"),
        Welcome(VERSION + 1, 1, 1, (), 0),
        Welcome(VERSION, 0, 1, (), 0),
        Farewell(7, "another leads"),
    ],
    ids=["an answer", "of another version", "of an old epoch", "farewell"],
)
def test_a_relay_joins_no_brain_that_begins_with(message: FromBrain) -> None:
    async def test() -> None:
        reach = RefusingReach(message)
        relay = Relay(SchedulerConfig(), reach, "r0")
        relay.membership.epoch = 1
        await let_pass(STEADY_S)
        assert relay.membership.member is None and len(reach.tries_s) > 2
        reach.refuses, reach.epoch = False, relay.membership.epoch
        await let_pass(STEADY_S)
        assert relay.membership.member == 1
        assert relay.membership.epoch == (7 if isinstance(message, Farewell) else 1)
        await relay.end()

    in_virtual_time(test)


def test_a_relay_whose_successor_is_of_another_version_refuses_at_once_what_waits_for_a_worker() -> None:
    """After an upgrade no brain of its own version will come."""

    async def test() -> None:
        reach = RefusingReach(Farewell(1, "not this version", VERSION + 1))
        reach.near, reach.refuses = True, False
        relay = Relay(SchedulerConfig(), reach, "r0")
        await until(lambda: relay.membership.member is not None)
        reach.refuses = True
        reach.brains[-1].abort()
        for request_id in ("that waits already", "of a connection that is kept"):
            with pytest.raises(Draining):
                async with asyncio.timeout(MAX_RETRY_S):
                    await relay.tickets.submit(RequestSpec(request_id, 1)).prefiller()
            assert relay.tickets.draining
        reach.refuses = False  # the operators have gone back to its version
        await let_pass(MAX_RETRY_S)
        assert relay.membership.member is not None and not relay.tickets.draining
        await relay.end()

    in_virtual_time(test)


def test_a_decode_first_relay_whose_successor_is_of_another_version_refuses_what_waits_for_a_prefiller() -> None:
    """Else its decode worker would wait for the KV until the queue's deadline."""

    async def test() -> None:
        reach = RefusingReach(Farewell(1, "not this version", VERSION + 1))
        reach.near, reach.refuses = True, False
        relay = Relay(SchedulerConfig(decode_first=True), reach, "r0")
        await until(lambda: relay.membership.member is not None)
        ticket = relay.tickets.submit(RequestSpec("r", 1))
        ticket.answer("d0")
        assert await ticket.admission() == "d0"
        ticket.request_prefill()
        reach.refuses = True
        reach.brains[-1].abort()
        with pytest.raises(Draining):
            async with asyncio.timeout(MAX_RETRY_S):
                await ticket.prefiller()
        await relay.end()

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("near", "version", "new"),
    [(False, VERSION + 1, False), (True, VERSION, False), (True, VERSION + 1, True)],
    ids=["a brain elsewhere", "another reason", "a relay of the successor"],
)
def test_what_waits_for_a_worker_waits_on_where_another_brain_may_come(near: bool, version: int, new: bool) -> None:
    """Relays of a router that takes over accept clients while the brain that they find is still their predecessor's."""

    async def test() -> None:
        reach = RefusingReach(Farewell(1, "not this relay", version))
        reach.near, reach.refuses = near, new
        relay = Relay(SchedulerConfig(), reach, "r0")
        if not new:
            await until(lambda: relay.membership.member is not None)
            reach.refuses = True
            reach.brains[-1].abort()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5 * MAX_RETRY_S):
                await relay.tickets.submit(RequestSpec("r", 1)).prefiller()
        assert not relay.tickets.draining
        await relay.end()

    in_virtual_time(test)


def test_a_relay_that_ends_before_its_brain_has_answered_does_not_say_that_it_cannot_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Late(ScriptedReach):
        async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
            made = protocol()
            assert isinstance(made, Frames)
            Scripted(made, None)
            return made, lambda: False

    async def test() -> None:
        relay = Relay(SchedulerConfig(), Late(), "r0")
        await let_pass(RETRY_S)
        await relay.end()
        await let_pass(RETRY_S)
        assert not caplog.records

    in_virtual_time(test)


def test_a_relay_that_does_not_trust_the_brain_tries_again_after_growing_pauses() -> None:
    class Untrusted(RefusingReach):
        async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
            self.tries_s.append(asyncio.get_running_loop().time())
            raise UntrustedBrain("there:1: its certificate has expired")

    async def test() -> None:
        reach = Untrusted(None)
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(20 * MAX_RETRY_S)
        assert reach.pauses_s[0] < 4 * RETRY_S and reach.pauses_s[-1] >= MAX_RETRY_S
        await relay.end()

    in_virtual_time(test)


def test_the_reason_for_finding_no_brain_is_logged_once_per_search(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> int:
        return sum(vars(line).get("reason") == "no route" for line in caplog.records)

    async def test() -> None:
        reach = ScriptedReach()
        reach.near, reach.trouble = False, "no route"
        relay = Relay(SchedulerConfig(), reach, "r0")
        await let_pass(20 * RETRY_S)
        assert logged() == 1
        reach.trouble = ""
        await until(lambda: relay.membership.member is not None)
        reach.trouble = "no route"
        reach.brains[0].abort()
        await let_pass(20 * RETRY_S)
        assert logged() == 2
        await relay.end()

    in_virtual_time(test)
