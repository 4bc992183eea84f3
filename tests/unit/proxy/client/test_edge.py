"""Which connections there is room for, and how much they may hold."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from balanceroute.errors import EdgeFull
from balanceroute.proxy.client.edge import RESERVE, ClientLimits, Edge, limits_of
from balanceroute.proxy.client.relay_loads import Load, RelayLoads
from tests.unit.proxy.client.listening import Client, EchoSite, an_edge, listening, served
from tests.unit.proxy.virtual_time import a_config, let_pass, stand_still, with_virtual_time
from tests.waiting import until


@pytest.mark.anyio
async def test_above_the_bound_the_connection_that_waits_longest_makes_room() -> None:
    async with listening(max_connections=3) as server:
        clients: list[Client] = []
        for sent in (b"", b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n", b""):
            clients.append(await server.connect())
            clients[-1].send(sent)
            await until(lambda: len(server.connections) == len(clients))
        clients[2].post(b"mine")
        assert (await clients[2].answer())[2] == b"mine"
        for victim in clients[:2]:
            await served(server)
            newcomer = await server.connect()
            newcomer.post(b"", b"x-do: wait")
            assert await victim.closed()


@pytest.mark.anyio
async def test_at_max_connections_clients_get_503_with_retry_after() -> None:
    async with listening(max_connections=2) as server:
        for n in range(2):
            (await server.connect()).post(b"", b"x-do: wait")
            await until(lambda: server.site.served == n + 1)  # noqa: B023
        third = await server.connect()
        third.post(b"x")
        status, headers, _ = await third.answer()
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert await third.closed()
        probe = await server.connect()
        probe.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await probe.answer())[2] == b"hi"


@pytest.mark.anyio
async def test_a_body_counts_until_its_answer_is_complete() -> None:
    async with listening(max_held_bytes=100_000) as server:
        held = await server.connect()
        held.post(b"x" * 60_000, b"x-do: wait")
        await until(lambda: server.site.served)
        assert (server.edge.incoming_bytes, server.edge.served_bytes) == (0, 60_000)
        for chunked in (False, True):
            other = await server.connect()
            length = b"transfer-encoding: chunked" if chunked else b"content-length: 50000"
            body = b"c350\r\n%b\r\n0\r\n\r\n" % (b"y" * 50_000) if chunked else b"y" * 50_000
            other.send(b"POST /hot HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n" + body)
            assert await other.error() == 503
        small = await server.connect()
        small.post(b"z" * 1000)
        assert (await small.answer())[0] == 200
        await until(lambda: server.edge.served_bytes == 60_000)
        held.writer.transport.abort()
        await until(lambda: server.edge.served_bytes == 0)
        small.post(b"z" * 60_000)
        assert (await small.answer())[0] == 200
        assert (server.edge.incoming_bytes, server.edge.served_bytes) == (0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("length", "body"),
    [(b"content-length: 9", b"x" * 9), (b"transfer-encoding: chunked", b"9\r\nxxxxxxxxx\r\n0\r\n\r\n")],
    ids=["sized", "chunked"],
)
async def test_a_body_that_comes_after_its_head_counts_until_its_client_has_gone(length: bytes, body: bytes) -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\nx-do: wait\r\nexpect: 100-continue\r\n", length, b"\r\n\r\n")
        assert b"100" in await client.reader.readuntil(b"\r\n\r\n")
        client.send(body)
        await until(lambda: server.site.served)
        edge = server.edge
        assert (edge.incoming_bytes, edge.served_bytes) == (0, 9)
        client.writer.transport.abort()
        await until(lambda: not server.connections)
        assert (edge.incoming_bytes, edge.served_bytes) == (0, 0)


@pytest.mark.anyio
async def test_bodies_of_one_connection_count_one_after_the_other() -> None:
    async with listening() as server:
        client = await server.connect()
        for size in (9, 90_000, 0, 9):
            client.post(b"x" * size)
            assert (await client.answer())[0] == 200
            assert (server.edge.incoming_bytes, server.edge.served_bytes) == (0, 0)


@pytest.mark.anyio
async def test_one_clients_bodies_take_at_most_half_of_max_held_bytes() -> None:
    async with listening(max_held_bytes=400_000) as server:
        greedy = [await server.connect() for _ in range(3)]
        for client in greedy[:2]:
            client.post(b"x" * 90_000, b"x-do: wait")
        await until(lambda: server.site.served == 2)
        greedy[2].post(b"x" * 90_000)
        status, _, answer = await greedy[2].answer()
        assert status == 503 and b"This client's requests" in answer
        incoming = await server.connect()
        incoming.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n" + b"x" * 80_000)
        assert await incoming.error() == 503
        other = await server.connect("127.0.0.2")
        other.post(b"y" * 90_000)
        assert (await other.answer())[0] == 200
        for client in greedy[:2]:
            client.writer.transport.abort()
        await until(lambda: not server.edge.held)
        again = await server.connect()
        again.post(b"x" * 90_000)
        assert (await again.answer())[0] == 200
        await until(lambda: not server.edge.held)
        assert set(server.site.reasons) == {"overload"}


@pytest.mark.anyio
async def test_what_is_kept_of_answers_counts_like_bodies_for_its_client_and_for_all() -> None:
    async with listening(max_held_bytes=400_000) as server:
        greedy = [await server.connect() for _ in range(2)]
        greedy[0].post(b"150000", b"x-do: keep")
        await until(lambda: server.edge.served_bytes > 150_000)
        greedy[1].post(b"60000", b"x-do: keep")
        assert await greedy[1].error() == 503
        other = await server.connect("127.0.0.2")
        other.post(b"150000", b"x-do: keep")
        await until(lambda: server.edge.served_bytes > 300_000)
        last = await server.connect("127.0.0.3")
        last.post(b"110000", b"x-do: keep")
        status, _, answer = await last.answer()
        assert status == 503 and b"The router holds" in answer
        for client in (greedy[0], other):
            client.writer.transport.abort()
        await until(lambda: not server.edge.held)
        assert server.edge.served_bytes == 0


@pytest.mark.anyio
async def test_what_is_kept_counts_for_the_client_of_each_request_of_a_connection() -> None:
    async with listening() as server:
        gateway = await server.connect()
        gateway.post(b"x", b"x-do: drop", b"x-holder: one")
        assert (await gateway.answer())[0] == 200
        gateway.post(b"x" * 100_000, b"x-do: wait", b"x-holder: other")
        await until(lambda: server.edge.served_bytes == 100_000)
        assert server.edge.held == {"other": 100_000}


@pytest.mark.anyio
async def test_incoming_bodies_share_max_incoming_bytes() -> None:
    async with listening(max_incoming_bytes=100_000) as server:
        clients = [await server.connect() for _ in range(3)]
        for client in clients:
            client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"x" * 50_000)
        answers = [asyncio.ensure_future(client.error()) for client in clients]
        done, waiting = await asyncio.wait(answers, return_when="FIRST_COMPLETED")
        assert done.pop().result() == 503 and server.edge.incoming_bytes <= 100_000
        for answer in waiting:
            answer.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"POST /hot HTTP/1.1\r\nhost: x\r\nx-do: wait\r\n\r\n", id="behind-a-completion"),
        pytest.param(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n", id="behind-another-request"),
        pytest.param(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", id="behind-an-answer-that-nobody-reads"),
        pytest.param(b"", id="of-a-head"),
    ],
)
async def test_buffered_bytes_count_with_incoming_bodies(first: bytes) -> None:
    """10,000 clients could have the router keep 320 KiB each, beside all bodies that it has room for."""
    async with listening(max_incoming_bytes=150_000) as server:
        for number in range(4):
            client = await server.connect()
            client.send(first)
            begun = number + 1 if first else 0
            await until(lambda: len(server.site.scopes) + server.site.served == begun)  # noqa: B023
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 50_000)
            await until(lambda: len(server.connections) == number + 1)  # noqa: B023
            if number < 2:
                await until(lambda: server.edge.incoming_bytes > 50_000 * (number + 1))  # noqa: B023
            else:
                await until(lambda: [each._inbox.dropping for each in server.connections].count(True) == number - 1)  # noqa: B023
        edge = server.edge
        assert 100_000 < edge.incoming_bytes < 101_000
        server.site.going_on.set()
        server.close()
        await until(lambda: not server.connections)
        assert edge.incoming_bytes == 0


class Seat:
    """A connection, as far as the edge knows it."""

    def __init__(self, fails: bool = False, unread: int = 0) -> None:
        self.looks: list[float] = []
        self.gave_way = self.aborted = False
        self.fails, self.unread = fails, unread

    @property
    def unread_bytes(self) -> int:
        return 0 if self.aborted else self.unread

    def look(self, now: float) -> None:
        if self.fails:
            raise RuntimeError("a bug")
        self.looks.append(now)

    def give_way(self) -> None:
        self.gave_way = True

    def abort(self) -> None:
        self.aborted = True


@with_virtual_time
async def test_far_above_the_bound_a_connection_is_closed_unread() -> None:
    edge = an_edge(max_connections=2)
    busy = [Seat() for _ in range(2 + RESERVE)]
    for seat in busy:
        assert edge.join(seat)
        edge.waiting.pop(seat)
    assert not edge.join(Seat())
    for seat in busy:
        edge.leave(seat)


@pytest.mark.anyio
async def test_a_probe_at_max_connections_is_answered_although_others_come_before_its_request() -> None:
    """Each newcomer closed the one before: where clients tried again and again, no probe was answered."""
    async with listening(max_connections=2) as server:
        for n in range(2):
            (await server.connect()).post(b"", b"x-do: wait")
            await until(lambda: server.site.served == n + 1)  # noqa: B023
        probe = await server.connect()
        await until(lambda: len(server.connections) == 3)
        for n in range(3):
            await server.connect()
            await until(lambda: len(server.connections) == 4 + n)  # noqa: B023
        probe.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await probe.answer())[2] == b"hi"


@with_virtual_time
async def test_connections_that_came_without_a_place_give_way_when_there_is_no_room_to_refuse_others() -> None:
    edge = an_edge(max_connections=2)
    busy, silent = [Seat() for _ in range(2)], [Seat() for _ in range(RESERVE + 2)]
    for seat in busy:
        assert edge.join(seat)
        edge.waiting.pop(seat)
    assert all(map(edge.join, silent))
    assert [seat.gave_way for seat in silent] == [True] * 2 + [False] * RESERVE
    for seat in (*busy, *silent):
        edge.leave(seat)


@with_virtual_time
async def test_silent_connections_that_came_without_a_place_keep_no_other_out_when_places_are_free_again() -> None:
    edge = an_edge(max_connections=2)
    busy, silent, late = [Seat() for _ in range(2)], [Seat() for _ in range(8)], [Seat() for _ in range(2)]
    for seat in busy:
        assert edge.join(seat)
        edge.waiting.pop(seat)
    assert all(map(edge.join, silent))
    for seat in busy:
        edge.leave(seat)
    for seat in late:
        assert edge.join(seat)
        edge.check_place(seat, "POST")
        edge.waiting.pop(seat)
    with pytest.raises(EdgeFull):
        edge.check_place(silent[0], "POST")
    edge.leave(late[0])
    edge.check_place(silent[0], "POST")
    for seat in (late[1], *silent):
        edge.leave(seat)


@with_virtual_time
async def test_the_longest_waiting_connection_gives_way_and_frees_its_place_at_once() -> None:
    edge = an_edge(max_connections=2)
    seats = [Seat() for _ in range(4)]
    for seat in seats:
        assert edge.join(seat) and not edge.full
    assert [seat.gave_way for seat in seats] == [True, True, False, False]
    assert list(edge.waiting) == seats[2:]


@with_virtual_time
async def test_every_connection_is_checked_several_times_within_the_shortest_time_limit() -> None:
    edge, seat = an_edge(receive_timeout_s=2.0, keep_alive_s=75.0), Seat()
    assert edge.join(seat)
    await let_pass(2.1)
    assert len(seat.looks) >= 4 and edge.date_line.startswith(b"date: ")
    edge.leave(seat)
    await let_pass(1.0)
    looks = len(seat.looks)
    await let_pass(10.0)
    assert len(seat.looks) == looks, "an edge without connections sleeps"
    assert edge.join(seat)
    await let_pass(1.0)
    assert len(seat.looks) > looks


@with_virtual_time
async def test_changed_limits_apply_at_once_to_existing_connections_too() -> None:
    config = a_config()
    limits = limits_of(lambda: config)
    edge = Edge(EchoSite(), limits, asyncio.get_running_loop(), set(), set(), {})
    seats = [Seat() for _ in range(3)]
    for seat in seats:
        assert edge.join(seat)
    edge.check_held_bytes("client", 2 * 2**20)
    assert limits() is limits() and not edge.full and edge.period_s == 1.0
    config = a_config(limits={"max_connections": 2, "max_held_bytes": 2**20, "client_keep_alive_s": 1.0})
    assert edge.full and edge.period_s == 0.25
    with pytest.raises(EdgeFull):
        edge.check_held_bytes("client", 2 * 2**20)
    await let_pass(2.0)
    assert len(seats[0].looks) > 4
    for seat in seats:
        edge.leave(seat)


class StoppedLoop:
    """A loop of a process that stands still as long as the test likes."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.looks: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, look: Callable[[], None]) -> None:
        self.looks.append(look)

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds
        self.looks.pop()()


def test_a_client_is_not_late_when_the_router_itself_was_stopped() -> None:
    loop, seat = StoppedLoop(), Seat()
    edge = Edge(EchoSite(), ClientLimits, cast(Any, loop), set(), set(), {})
    assert edge.join(seat)
    loop.pass_(edge.period_s)
    assert seat.looks == [100.0, 100.0 + edge.period_s]
    loop.pass_(20.0)
    assert len(seat.looks) == 2, "what has come meanwhile is read first"
    loop.pass_(edge.period_s)
    assert seat.looks[2:] == [loop.now_s]


@with_virtual_time
async def test_a_connection_whose_check_raises_is_closed_and_the_others_are_checked() -> None:
    bugs: list[str] = []
    loop = asyncio.get_running_loop()
    edge = Edge(EchoSite(), ClientLimits, loop, set(), set(), {}, on_bug=bugs.append)
    broken, well = Seat(fails=True), Seat()
    for seat in (broken, well):
        edge.join(seat)
    await let_pass(2.0)
    assert broken.aborted and not well.aborted and well.looks
    assert bugs and set(bugs) == {"client connections"}


@pytest.mark.parametrize(
    ("unread", "aborted"),
    [
        ([400, 600, 0], []),
        ([400, 601, 300], [601]),
        ([500, 800, 700], [800, 700]),
        ([1500, 0, 0], []),
    ],
    ids=["room", "too much", "far too much", "a single answer"],
)
@with_virtual_time
async def test_the_connections_with_most_unread_are_closed_where_clients_leave_too_much_unread(
    caplog: pytest.LogCaptureFixture, unread: list[int], aborted: list[int]
) -> None:
    """At a rate that was enough for each, they could keep any number of large answers in memory for hours."""
    edge = an_edge(max_held_bytes=1000)
    seats = seated(edge, *unread)
    await let_pass(1.5)
    assert sorted(seat.unread for seat in seats if seat.aborted) == sorted(aborted)
    assert sum(line.__dict__["closed"] for line in caplog.records) == len(aborted) and len(caplog.records) <= 1


def seated(edge: Edge, *unread: int) -> list[Seat]:
    """Connections that leave so many bytes unread."""
    seats = [Seat(unread=size) for size in unread]
    for seat in seats:
        assert edge.join(seat)
    return seats


@with_virtual_time
async def test_clients_of_a_relay_may_leave_unread_what_those_of_others_do_not() -> None:
    one, other = edges(2, max_held_bytes=1000)
    large, small = seated(one, 600, 300)
    await let_pass(1.5)
    assert not large.aborted  # although it is more than the relay's part
    elsewhere = seated(other, 200, 150)
    await let_pass(2.5)
    assert large.aborted and not small.aborted and not any(seat.aborted for seat in elsewhere)
    for seat in elsewhere:
        other.leave(seat)
    await let_pass(1.5)
    more, _ = seated(one, 600, 50)
    await let_pass(1.5)
    assert not more.aborted


@with_virtual_time
async def test_the_clients_of_a_relay_may_leave_its_part_unread_whatever_those_of_others_do() -> None:
    one, other = edges(2, max_held_bytes=1000)
    seated(one, 1500)  # a single answer may have any size
    seats = seated(other, 300, 200)
    await let_pass(3.0)
    assert not any(seat.aborted for seat in seats)


@with_virtual_time
async def test_what_a_relay_has_just_dropped_leaves_room_to_the_others_at_once() -> None:
    one, other, _, _ = edges(4, max_held_bytes=1000)
    large, _ = seated(one, 700, 50)
    await let_pass(0.5)
    elsewhere = seated(other, 290, 110)
    await let_pass(3.0)
    assert large.aborted and not any(seat.aborted for seat in elsewhere)


@with_virtual_time
async def test_what_was_unread_is_forgotten_with_a_relay_s_last_connection_also_after_the_relay_stood_still() -> None:
    one, other = edges(2, max_held_bytes=1000)
    for seat in seated(one, 900):
        await let_pass(1.5)
        one.leave(seat)
    stand_still(5.0)
    await let_pass(1.0)
    large, _ = seated(other, 600, 100)
    await let_pass(1.5)
    assert not large.aborted


def lacks_room(edge: Edge, complete: bool) -> bool:
    try:
        (edge.check_held_bytes if complete else edge.check_incoming_bytes)("client")
    except EdgeFull:
        return True
    return False


@pytest.mark.parametrize(
    ("incoming", "served", "held", "complete", "laden"),
    [
        (900, 0, 0, False, False),
        (1100, 0, 0, False, True),
        (1100, 0, 0, True, False),
        (500, 1600, 0, False, True),
        (500, 1600, 0, True, True),
        (0, 0, 900, True, False),
        (0, 0, 1100, True, True),
    ],
    ids=["room", "too much coming", "come whole", "too much held", "whole, too much held", "half", "one holder's"],
)
@with_virtual_time
async def test_incoming_and_held_bodies_have_bounds_and_one_client_has_half(
    incoming: int, served: int, held: int, complete: bool, laden: bool
) -> None:
    edge = an_edge(max_incoming_bytes=1000, max_held_bytes=2000)
    edge.incoming_bytes, edge.served_bytes = incoming, served
    edge.hold("client", held)
    assert lacks_room(edge, complete) is laden
    edge.hold("client", -held)
    assert not edge.held


def edges(relays: int, **limits: Any) -> list[Edge]:
    """Of relays on one machine."""
    table, loop = RelayLoads(relays), asyncio.get_running_loop()
    loads = [Load(table, place) for place in range(relays)]
    return [Edge(EchoSite(), lambda: ClientLimits(**limits), loop, set(), set(), {}, load) for load in loads]


@with_virtual_time
async def test_one_relay_may_use_the_part_of_the_bounds_that_another_does_not_need() -> None:
    one, other = edges(2, max_connections=40, max_held_bytes=64_000_000, max_incoming_bytes=30_000_000)
    seats = [Seat() for _ in range(41)]
    for seat in seats[:38]:
        assert one.join(seat) and not one.full
    for seat in seats[38:40]:
        assert other.join(seat) and not other.full
    assert other.join(seats[40]) and seats[38].gave_way
    assert not any(seat.gave_way for seat in seats[:38])
    one.incoming_bytes = 20_000_000
    one.hold("client", 20_000_000)
    assert not lacks_room(one, False) and not lacks_room(other, False)
    other.incoming_bytes = 11_000_000
    assert lacks_room(one, False) and lacks_room(other, False) and not lacks_room(other, True)
    one.incoming_bytes, one.served_bytes = 0, 54_000_000
    one.hold("client", -20_000_000)
    assert lacks_room(other, True)
    one.served_bytes = 50_000_000
    assert not lacks_room(other, True)
    for edge in (one, other):
        for seat in list(edge.connections):
            edge.leave(seat)


@with_virtual_time
async def test_a_connection_for_which_there_was_no_place_takes_none_from_those_of_any_relay() -> None:
    one, other = edges(2, max_connections=2)
    first, second, late = (Seat() for _ in range(3))
    for edge, seat in ((one, first), (other, second), (other, late)):
        assert edge.join(seat)
        edge.waiting.pop(seat)  # each has a complete request
    one.check_place(first, "POST")
    other.check_place(second, "POST")
    other.check_place(late, "GET")
    with pytest.raises(EdgeFull):
        other.check_place(late, "POST")
    one.leave(first)
    other.check_place(late, "POST")
    assert one.join(first)
    with pytest.raises(EdgeFull):
        one.check_place(first, "POST")
    other.check_place(late, "POST")
    for edge, seat in ((one, first), (other, second), (other, late)):
        edge.leave(seat)


@with_virtual_time
async def test_silent_connections_without_a_place_at_one_relay_keep_no_probe_from_another() -> None:
    one, other = edges(2, max_connections=1)
    busy, silent, probe = Seat(), [Seat() for _ in range(RESERVE)], Seat()
    assert other.join(busy)
    other.waiting.pop(busy)
    assert all(map(other.join, silent)) and one.join(probe)
    one.check_place(probe, "GET")
    one.leave(probe)
    for seat in (busy, *silent):
        other.leave(seat)


@with_virtual_time
async def test_a_relay_takes_no_more_connections_than_it_has_descriptors_for_although_others_have_few() -> None:
    one, other = edges(2, max_connections=40, max_connections_here=20)
    busy = [Seat() for _ in range(20)]
    for seat in busy:
        assert one.join(seat) and not one.full
        one.waiting.pop(seat)
    for edge, refused in ((one, pytest.raises(EdgeFull)), (other, nullcontext())):
        late = Seat()
        assert edge.join(late)
        with refused:
            edge.check_place(late, "POST")
    for edge in (one, other):
        for seat in list(edge.connections):
            edge.leave(seat)


@pytest.mark.parametrize("relays", [1, 2, 8, 33, 64])
def test_a_body_of_max_body_bytes_is_accepted_with_any_number_of_relays(relays: int) -> None:
    limits = ClientLimits()
    assert limits.max_body_bytes <= limits.one_holder_bytes(relays, limits.max_held_bytes) <= limits.max_held_bytes // 2


@pytest.mark.parametrize("narrow", [{"max_held_bytes": 2**21}, {"max_incoming_bytes": 2**20}])
def test_a_body_that_would_never_find_room_is_too_large(narrow: dict[str, int]) -> None:
    limits = ClientLimits.of(a_config(limits=narrow))
    assert limits.max_body_bytes == 2**20
    assert limits.max_body_bytes <= limits.one_holder_bytes(1, 0)


def test_one_clients_share_shrinks_with_the_relays_but_not_below_one_body() -> None:
    limits = ClientLimits(max_held_bytes=1000, max_body_bytes=100)
    assert [limits.one_holder_bytes(relays, 1000) for relays in (1, 2, 4, 8)] == [500, 250, 125, 100]
    assert ClientLimits(max_held_bytes=1000, max_body_bytes=900).one_holder_bytes(8, 1000) == 500


def test_one_client_may_use_what_it_cannot_use_at_other_relays() -> None:
    limits = ClientLimits(max_held_bytes=1000, max_body_bytes=100)
    assert [limits.one_holder_bytes(4, elsewhere) for elsewhere in (0, 200, 400, 900)] == [500, 300, 125, 125]
