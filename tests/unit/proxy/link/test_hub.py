"""The brain's end of the link: who holds what, who is heard, and what is free when a relay is gone."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable

import msgspec
import pytest

from balanceroute.core.types import Outcome, Phase, RequestSpec, Role, Standing, WorkerSpec
from balanceroute.proxy.link.hub import MAX_NAME, Patience
from balanceroute.proxy.link.messages import (
    HEAD_BYTES,
    VERSION,
    Activity,
    Beat,
    CacheDoubted,
    Chosen,
    ConnectorDoubted,
    Counted,
    Explained,
    Farewell,
    Finding,
    FromRelay,
    Held,
    Hello,
    Judged,
    Learned,
    Prefilled,
    Progress,
    Report,
    Submit,
    Welcome,
    frame,
    table_of,
)
from balanceroute.proxy.link.token_counts import WrittenCounts
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.relay_reports import RelayReports
from tests.unit.proxy.link.brains import RawRelay, Stage, on, stream, with_stage
from tests.waiting import until


def test_the_log_distinguishes_a_relay_that_ends_from_a_lost_one(caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        brain = await stage.brain()
        ends = stage.relay("ends")
        await ends.decoding("a")
        lost = await RawRelay().connect(stage)
        lost.hello(stream(1, "b"), relay="lost")
        await until(lambda: brain.active == ["a", "b"])
        lost.frames.abort("its process is killed")
        await ends.end()
        await until(lambda: not brain.active)

    with caplog.at_level("INFO"):
        on(test)
    logged = {record.message: record for record in caplog.records if record.message in ("relay left", "relay lost")}
    assert {message: (record.levelname, record.__dict__["relay"]) for message, record in logged.items()} == {
        "relay left": ("INFO", "ends"),
        "relay lost": ("WARNING", "lost"),
    }


def test_a_brain_that_ends_reports_none_of_its_relays_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        brain = await stage.brain()
        await stage.relay("stays").decoding("a")
        await brain.end()
        assert not brain.active

    with caplog.at_level("INFO"):
        on(test)
    assert [record.levelname for record in caplog.records if record.message in ("relay left", "relay lost")] == ["INFO"]


def test_a_relay_that_has_left_before_its_hello_is_read_joins_no_brain(caplog: pytest.LogCaptureFixture) -> None:
    """A brain that was stopped for a minute found twenty of them, and logged each as joined and as lost."""

    async def test(stage: Stage) -> None:
        brain = await stage.brain()
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(stage.path)
                gone.sendall(frame([Hello(VERSION, "gone", 1, 0, (stream(1, "a"),))]))
        await stage.relay("stays").decoding("b")
        await until(lambda: not any(member is None for member in brain.hub._connections.values()))
        assert brain.active == ["b"]

    with caplog.at_level("INFO"):
        on(test)
    assert [record.__dict__["relay"] for record in caplog.records if "relay" in record.__dict__].count("gone") == 0


def test_the_log_says_that_a_relay_has_left_if_it_counts_for_another_brain_already(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A leader that was stopped, and deposed, reads counts that fit its successor's requests only."""

    async def test(stage: Stage) -> None:
        brain, counts = await stage.brain(), WrittenCounts()
        number = counts.number()
        queued = Held(number, 1, Standing(RequestSpec("a", 10), Phase.QUEUED, 0))
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(stage.path)
            gone.sendall(frame([Hello(VERSION, "gone", 1, 0, (queued,), counts.fd)]))
            await until(lambda: bool(brain.hub.members))
            counts.write(number, 5)
        brain.hub.collect()
        await until(lambda: not brain.hub.members)

    on(test)
    (lost,) = [record for record in caplog.records if record.message == "relay lost"]
    assert lost.__dict__["reason"] == "it has left"


@with_stage
async def test_slots_of_a_lost_relay_become_free_and_other_relays_are_unaffected(stage: Stage) -> None:
    brain = await stage.brain(slots=2)
    lost, stays = stage.relay("lost"), stage.relay("stays")
    await lost.decoding("a")
    kept = await stays.decoding("b")
    waiting = await stays.pooled("w")
    await lost.end()
    assert await waiting.admission() == "d0"
    assert brain.active == ["b", "w"] and kept.phase is Phase.DECODING
    for ticket in (kept, waiting):
        ticket.finish(Outcome.FINISHED)
    await until(lambda: not brain.scheduler.snapshot.requests)
    brain.scheduler.snapshot.check_invariants()


@with_stage
async def test_no_slot_is_reassigned_before_all_relays_have_reported(stage: Stage) -> None:
    first = await stage.brain(epoch=1, slots=1)
    holder, waiter = stage.relay("holder"), stage.relay("waiter")
    held = await holder.decoding("held")
    waiting = await waiter.pooled("waiting")
    await first.end()
    await until(lambda: holder.membership.member is None and waiter.membership.member is None)
    await holder.end()  # it comes later than the other
    second = await stage.brain(epoch=2, slots=1, relays=("holder", "waiter"), patience=Patience(grace_s=3600.0))
    await until(lambda: waiter.membership.member is not None)
    late = waiter.tickets.submit(RequestSpec("late", 1))
    await asyncio.sleep(0)
    assert not second.hub.settled.is_set() and not second.active
    holder.restart()
    assert await late.prefiller() == "p0"
    assert second.active == ["held"] and waiting.phase is Phase.POOLED
    held.finish(Outcome.FINISHED)
    assert await waiting.admission() == "d0"
    second.scheduler.snapshot.check_invariants()


@with_stage
async def test_a_relay_that_has_just_started_is_not_taken_for_one_that_has_not_reported_yet(stage: Stage) -> None:
    """At a takeover, where relays of both routers run."""
    first, slow = await stage.brain(epoch=1, slots=1), stage.relay("slow")
    await slow.decoding("held")
    await first.end()
    await until(lambda: slow.membership.member is None)
    await slow.end()
    second = await stage.brain(epoch=2, slots=1, relays=["slow"], patience=Patience(grace_s=3600.0))
    new = stage.relay("new")
    await until(lambda: new.membership.member is not None)
    assert not second.hub.settled.is_set()
    slow.restart()
    await until(second.hub.settled.is_set)
    assert second.active == ["held"]


@with_stage
async def test_no_worker_is_removed_before_all_relays_have_reported(stage: Stage) -> None:
    brain = await stage.brain(relays=["r0"], patience=Patience(grace_s=3600.0))
    assert not brain.ledger.remove_if_idle("d0", Role.DECODE)
    stage.relay()
    await brain.hub.settled.wait()
    assert brain.ledger.remove_if_idle("d0", Role.DECODE)


@with_stage
async def test_a_missing_relay_is_waited_for_for_a_limited_time(stage: Stage) -> None:
    brain, relay = await stage.brain(relays=("r0", "r1"), patience=Patience(grace_s=0.05)), stage.relay()
    ticket = relay.tickets.submit(RequestSpec("a", 1))
    assert await ticket.prefiller() == "p0" and brain.hub.settled.is_set()


def test_the_time_to_say_hello_ends_only_connections_that_have_not_said_it() -> None:
    errors: list[object] = []

    async def test(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        brain = await stage.brain(patience=Patience(hello_s=0.1))
        relay = stage.relay()
        await until(lambda: relay.membership.member is not None)
        joined = relay.membership.member
        gone = await RawRelay().connect(stage)
        gone.frames.abort("its process is killed")
        says_nothing = await RawRelay().connect(stage)
        await until(lambda: not says_nothing.frames.open)  # later than the time of the others
        assert brain.hub.members["r0"].number == relay.membership.member == joined

    on(test)
    assert not errors


@with_stage
async def test_a_hello_may_take_long_while_pieces_of_it_come(stage: Stage) -> None:
    brain = await stage.brain(patience=Patience(hello_s=3600.0))
    relay, hub = await RawRelay().connect(stage), brain.hub
    data = frame([Hello(VERSION, "raw", 1, 0, ())])
    assert relay.frames._transport is not None
    relay.frames._transport.write(data[:9])
    await until(lambda: any(frames.incomplete for frames in hub._connections))
    (frames,) = hub._connections
    for _ in range(3):
        hub._expect_hello(frames)  # as after its time
        await until(lambda: relay.received == [Beat()])
        relay.received.clear()
    relay.frames._transport.write(data[9:])
    await until(lambda: "raw" in hub.members)
    hub._expect_hello(frames)
    stays_away = await RawRelay().connect(stage)
    assert stays_away.frames._transport is not None
    stays_away.frames._transport.write(data[:9])
    await until(lambda: any(frames.incomplete for frames in hub._connections))
    other = next(frames for frames, member in hub._connections.items() if member is None)
    other.received_s -= 3601.0
    hub._expect_hello(other)
    await until(lambda: not stays_away.frames.open)
    assert relay.frames.open and not stays_away.received


@with_stage
async def test_key_use_is_forwarded_to_relays_that_do_not_share_memory_until_it_ends(stage: Stage) -> None:
    names = ("relay-0", "relay-10", "relay-1.2", "relay-0.2")
    await stage.brain(relays=names)
    relays = {name: stage.relay(name) for name in names}
    used: dict[str, dict[str, tuple[KeyUse, ...]]] = {name: {} for name in relays}
    messages: list[str] = []

    def receive_at(name: str) -> Callable[[str, tuple[KeyUse, ...]], None]:
        def receive(relay: str, keys: tuple[KeyUse, ...]) -> None:
            messages.append(relay)
            used[name][relay] = keys

        return receive

    for name, relay in relays.items():
        relay.heard.keys_elsewhere = receive_at(name)  # type: ignore[method-assign]
    await until(lambda: all(relay.membership.member is not None for relay in relays.values()))
    use = (KeyUse("a", 1, 1, 0),)
    for relay in relays.values():
        relay.brain.report(Activity(0, 0, (), use))
    one, other = dict.fromkeys(("relay-0", "relay-10"), use), dict.fromkeys(("relay-0.2", "relay-1.2"), use)
    await until(lambda: used == {"relay-0": other, "relay-10": other, "relay-0.2": one, "relay-1.2": one})
    relays["relay-10"].brain.report(Activity(0, 0, ()))
    await relays["relay-0"].end()
    one = {"relay-0": (), "relay-10": ()}
    await until(lambda: used["relay-0.2"] == used["relay-1.2"] == one)
    assert len(messages) == 8 + 4
    relays["relay-10"].brain.report(Activity(1, 0, ()))  # as before, it uses none
    relays["relay-0.2"].brain.report(Activity(1, 0, (), use))
    await until(lambda: len(messages) != 8 + 4)
    assert len(messages) == 8 + 4 + 1


@with_stage
async def test_only_our_user_can_connect_to_a_brain(stage: Stage) -> None:
    await stage.brain()
    assert stat.S_IMODE(os.stat(stage.path).st_mode) == 0o600


def test_relays_share_key_use_in_memory_per_machine() -> None:
    one, other = ("relay-0", "relay-12", "relay-0.2", "relay-1.2"), ("relay-0@a.b_1", "relay-1@a.b_1", "relay-0@c_2")
    assert [table_of(name) for name in one] == ["", "", ".2", ".2"]
    assert [table_of(name) for name in other] == ["@a.b_1", "@a.b_1", "@c_2"]


@with_stage
async def test_requests_of_all_relays_wait_at_a_new_brain_in_the_order_of_their_arrival(stage: Stage) -> None:
    def pooled(number: int, name: str, waited_s: float) -> Held:
        return Held(number, 1, Standing(RequestSpec(name, 10), Phase.POOLED, 10, waited_s, prefiller="p0"))

    brain = await stage.brain(slots=1, relays=("a", "b"), patience=Patience(grace_s=3600.0))
    relays = [await RawRelay().connect(stage) for _ in range(2)]
    relays[0].hello(stream(1, "a0"), pooled(2, "a5", 5.0), pooled(3, "a9", 9.0), relay="a")
    relays[1].hello(pooled(1, "b7", 7.0), pooled(2, "b1", 1.0), relay="b")
    await until(brain.hub.settled.is_set)
    pool = brain.scheduler.snapshot.pool
    assert [tracker.id for tracker in pool] == ["a9", "b7", "a5", "b1"]
    late = await RawRelay().connect(stage)
    late.hello(pooled(1, "c6", 6.0), relay="c")
    await until(lambda: len(pool) == 5)
    assert [tracker.id for tracker in pool] == ["a9", "b7", "c6", "a5", "b1"]
    brain.scheduler.snapshot.check_invariants()


@with_stage
async def test_a_silent_relay_is_dropped_and_may_rejoin(stage: Stage) -> None:
    brain = await stage.brain()
    silent = await RawRelay().connect(stage)
    silent.hello(stream(1, "a", tokens=4))
    await until(lambda: brain.load == 14)
    brain.hub.patience = Patience(silent_s=0.3)
    await until(lambda: not silent.frames.open)
    await until(lambda: not brain.hub.members)
    assert not brain.active
    brain.hub.patience = Patience()
    again = await RawRelay().connect(stage)
    again.hello(stream(1, "a", tokens=9))
    await until(lambda: brain.load == 19)


@with_stage
async def test_a_brain_that_was_stopped_takes_no_relay_for_silent(stage: Stage) -> None:
    brain, relay = await stage.brain(), stage.relay()
    await until(lambda: relay.membership.member is not None)
    member = brain.hub.members["r0"]
    stopped_s = 2 * brain.hub.patience.silent_s
    brain.hub.looks.last_s -= stopped_s
    member.frames.received_s -= stopped_s
    looked_s = brain.hub.looks.last_s
    await until(lambda: brain.hub.looks.last_s > looked_s)
    assert brain.hub.members["r0"] is member and not member.frames.ended_here


def test_a_relay_that_counts_tokens_of_a_request_in_no_slot_has_to_rejoin(caplog: pytest.LogCaptureFixture) -> None:
    async def test(stage: Stage) -> None:
        brain, relay = await stage.brain(slots=1), stage.relay()
        await relay.decoding("a")
        await relay.pooled("b")
        relay.brain.outbox.token_counts.write(relay.brain._open["b"].number, 7)
        brain.ledger.settle()
        await until(lambda: relay.membership.member == 2)
        assert brain.active == ["a"] and brain.load == 10

    on(test)
    (lost,) = [record.__dict__ for record in caplog.records if record.message == "relay lost"]
    assert "token counts of relay r0 are impossible" in lost["reason"]


@pytest.mark.parametrize(
    "report",
    [
        Learned("d0", "nixl"),
        CacheDoubted("d0", "salt"),
        ConnectorDoubted("d0", "it answers as another one does"),
        Judged("d0", Finding.SUCCESS),
    ],
    ids=lambda report: type(report).__name__,
)
@with_stage
async def test_what_a_relay_reports_of_a_worker_is_taken(
    stage: Stage, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Report] = []
    monkeypatch.setattr(RelayReports, "take", lambda _, relay, report: taken.append(report))
    await stage.brain()
    relay = stage.relay()
    await until(lambda: relay.membership.member is not None)
    relay.brain.report(report)
    await until(lambda: taken == [report])


@with_stage
async def test_a_rejoining_relay_holds_only_the_requests_that_it_reports(stage: Stage) -> None:
    brain = await stage.brain()
    before, after = await RawRelay().connect(stage), await RawRelay().connect(stage)
    before.hello(stream(1, "a"), stream(2, "b"))
    await until(lambda: brain.active == ["a", "b"])
    after.hello(stream(1, "b"), stream(2, "c"))
    await until(lambda: brain.active == ["b", "c"])
    await until(lambda: not before.frames.open)
    assert brain.active == ["b", "c"] and after.frames.open
    brain.scheduler.snapshot.check_invariants()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([Hello(VERSION + 1, "raw", 1, 0, ())], "version"),
        ([Hello(VERSION, "raw", 1, 99, ())], "another brain leads"),
        ([Beat()], None),
        ([Hello(VERSION, "raw", 1, 0, (stream(1, "a"),)), Prefilled(1, 10, None)], None),
        ([Hello(VERSION, "raw", 1, 0, (stream(1, "a"),)), Submit(1, RequestSpec("b", 1))], None),
        ([Hello(VERSION, name, 1, 0, (stream(1, name),)) for name in ("one", "two")], None),
        ([Hello(VERSION, "raw", 1, 0, (stream(1, "a"),)), Counted(b"{}")], None),
        ([Hello(VERSION, "raw", 1, 0, (stream(1, "a"),)), Counted(b"\xff")], None),
        ([Hello(VERSION, "line\nbreak", 1, 0, (stream(1, "a"),))], None),
        ([Hello(VERSION, (MAX_NAME + 1) * "r", 1, 0, (stream(1, "a"),))], None),
        ([Hello(VERSION, "r@elsewhere", 1, 0, (stream(1, "a"),))], None),
    ],
    ids=[
        "another version",
        "a later epoch",
        "no hello",
        "in the wrong phase",
        "a number twice",
        "two names",
        "no counts",
        "no text",
        "a name of two lines",
        "a long name",
        "a name of another machine",
    ],
)
@with_stage
async def test_a_peer_that_violates_the_protocol_is_dropped_and_holds_no_request(
    stage: Stage, messages: list[FromRelay], reason: str | None
) -> None:
    brain = await stage.brain(patience=Patience(hello_s=3600.0, silent_s=3600.0))  # its silence is no reason
    relay = await RawRelay().connect(stage)
    for message in messages:
        relay.frames.send(message)
    await until(lambda: not relay.frames.open)
    await until(lambda: not brain.hub.members)
    assert not brain.scheduler.snapshot.requests
    farewells = [message.reason for message in relay.received if isinstance(message, Farewell)]
    assert (not farewells) if reason is None else reason in farewells[0]


@pytest.mark.parametrize("fields", [[], ["new"]], ids=["the same fields", "another field"])
def test_a_relay_of_another_version_is_told_so_and_logged_once(
    caplog: pytest.LogCaptureFixture, fields: list[str]
) -> None:
    async def test(stage: Stage) -> None:
        brain = await stage.brain()
        hello = msgspec.msgpack.encode([[0, VERSION + 1, "later", 1, 0, [], None, *fields]])
        for _ in range(2):
            relay = await RawRelay().connect(stage)
            transport = relay.frames._transport
            assert transport is not None
            transport.write(len(hello).to_bytes(HEAD_BYTES, "big") + hello)
            await until(lambda: not relay.frames.open)  # noqa: B023
            assert [message.reason for message in relay.received if isinstance(message, Farewell)] == [reason]
        assert not brain.hub.members

    reason = f"this brain speaks version {VERSION} of the link, not {VERSION + 1}"
    on(test)
    refused = [record.__dict__ for record in caplog.records if record.message == "relay refused"]
    assert [(line["relay"], line["reason"]) for line in refused] == [("later", reason)]


@with_stage
async def test_a_relay_that_counts_more_tokens_than_a_frame_can_carry_does_not_keep_answers_from_others(
    stage: Stage,
) -> None:
    brain = await stage.brain(slots=8, patience=Patience(silent_s=3600.0))
    broken, sound = await RawRelay().connect(stage), stage.relay("sound")
    broken.hello(*(stream(number, str(number)) for number in range(4)))
    await until(lambda: len(brain.active) == 4)
    broken.frames.send(Progress(tuple(range(4)), (2**62,) * 4))
    await until(lambda: not broken.frames.open)
    await sound.decoding("c")
    await until(lambda: [worker.active for worker in sound.brain.view().decoders] == [1])


def test_a_message_that_the_brain_fails_on_ends_its_relay_and_not_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async def test(stage: Stage) -> None:
        brain = await stage.brain(relays=("first", "second", "third"), patience=Patience(grace_s=3600.0))
        monkeypatch.setattr(RelayReports, "take", fail)
        first, second = await RawRelay().connect(stage), await RawRelay().connect(stage)
        first.hello(relay="first")
        first.frames.send(Judged("d0", Finding.SUCCESS))
        await until(lambda: list(brain.hub.members) == ["first"])
        second.hello(relay="second")
        second.frames.send(Submit(1, RequestSpec("a", 1)))
        await until(lambda: list(brain.hub.members) == ["first", "second"])
        stage.relay("third")
        await until(lambda: any(isinstance(message, Chosen) for message in second.received))
        await until(lambda: not first.frames.open)
        assert brain.bugs == ["hub"]

    on(test)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.message == "internal error" and error.__dict__["relay"] == "first"


@with_stage
async def test_a_rejoining_relay_is_welcomed_before_it_gets_worker_states(stage: Stage) -> None:
    """Its former membership ends a trial, of which all members hear."""
    brain = await stage.brain()
    worker = brain.fleet.connect(WorkerSpec("d0", Role.DECODE, url="http://127.0.0.1:1", slots=4))
    before, anew = await RawRelay().connect(stage), await RawRelay().connect(stage)
    before.hello()
    await until(lambda: bool(before.received))
    worker.circuit.state = CircuitState.OPEN
    worker.circuit.reachable()
    worker.circuit.used()
    await until(lambda: CircuitState.TRIAL in before.circuits())
    anew.hello()
    await until(lambda: bool(anew.circuits()))
    assert isinstance(anew.received[0], Welcome)


@with_stage
async def test_the_hub_keeps_checking_after_a_check_that_raised(stage: Stage) -> None:
    failed: list[bool] = []
    asyncio.get_running_loop().set_exception_handler(lambda *_: failed.append(True))
    brain, relay = await stage.brain(), await RawRelay().connect(stage)
    relay.hello()
    await until(lambda: bool(relay.received))
    brain.frozen.append(None)  # type: ignore[arg-type]
    await until(lambda: bool(failed))
    brain.frozen.clear()
    relay.received.clear()
    await until(lambda: any(isinstance(message, Beat) for message in relay.received))


@with_stage
async def test_worker_deaths_explained_by_one_relay_reach_all_others(stage: Stage) -> None:
    await stage.brain(slots=2)
    tells, hears = stage.relay("tells"), stage.relay("hears")
    await until(lambda: tells.membership.member and hears.membership.member)
    explained = Explained(("d0", "d1"), (4.0, 0.5))
    tells.brain.report(explained)
    await until(lambda: explained in hears.heard.messages)
    assert explained not in tells.heard.messages
