"""How an answer is framed, and what may not be written into it."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from balanceroute.errors import InvariantError
from balanceroute.proxy.client.response import Response, check_headers
from tests.unit.proxy.client.connections import Connection
from tests.unit.proxy.client.listening import listening
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time


@pytest.mark.anyio
async def test_an_http_1_0_answer_is_unchunked_and_closes() -> None:
    async with listening() as server:
        for path, body in ((b"POST /hot", b"aaaend"), (b"GET /parts", b"ab")):
            client = await server.connect()
            client.send(path + b" HTTP/1.0\r\nx-do: stream\r\ncontent-length: 1\r\n\r\na")
            head, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
            assert b"chunked" not in head.lower() and b"connection: close" in head and rest == body


@pytest.mark.anyio
async def test_an_answer_that_is_not_completed_ends_uncleanly() -> None:
    async with listening() as server:
        client = await server.connect()
        client.post(b"half", b"x-do: break")
        assert (await client.reader.read()).endswith(b"4\r\nhalf\r\n")


@with_virtual_time
async def test_an_answer_that_breaks_off_before_its_first_part_has_its_head() -> None:
    connection = Connection()
    response = connection.response()
    response.start(200, [])
    response.break_off()
    assert connection.closed and connection.answer == (200, {"transfer-encoding": "chunked"}, b"")


@with_virtual_time
async def test_an_aborted_answer_accepts_no_more_bytes_while_its_buffer_drains() -> None:
    connection = Connection()
    response = connection.response()
    response.start(200, [])
    assert response.write(b"half")
    response.break_off()
    connection.write_paused = True
    assert connection.closed and response.write(b"late")
    connection.write_paused = False
    response.allow()
    assert response.write(b"later") and connection.transport.written.endswith(b"half\r\n")


@pytest.mark.parametrize("end", [Response.lost, Response.end, Response.break_off])
@with_virtual_time
async def test_nothing_is_counted_any_more_for_an_answer_that_is_over(end: Callable[[Response], None]) -> None:
    """Its connection has forgotten what it counted, and would count this for the next request."""
    connection = Connection()
    response = connection.response()
    response.start(200, [])
    response.keep(7)
    end(response)
    response.keep(-7)
    assert connection.kept_bytes == 7


@with_virtual_time
async def test_a_complete_answer_is_one_write_and_keeps_the_connection() -> None:
    connection = Connection()
    response = connection.response()
    response.respond(200, [(b"content-length", b"2")], b"hi")
    assert connection.answer == (200, {"content-length": "2"}, b"hi")
    assert connection.done == [True] and response.complete


@with_virtual_time
async def test_a_head_is_sent_with_the_first_part_or_alone_at_the_end_of_the_turn() -> None:
    for waits in (False, True):
        connection = Connection()
        response = connection.response()
        response.start(200, [])
        assert connection.transport.written == b""
        if waits:
            await asyncio.sleep(0)
            assert connection.transport.written.endswith(b"\r\n\r\n")
        assert response.write(b"abc")
        response.end(b"d")
        assert connection.answer[2] == b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n" and connection.done == [True]


@pytest.mark.parametrize(
    "use",
    [
        lambda response: response.write(b"x"),
        lambda response: response.end(),
        lambda response: (response.respond(200, [], b""), response.respond(200, [], b"")),
        lambda response: (response.start(200, []), response.start(200, [])),
        lambda response: (response.start(200, [(b"content-length", b"2")]), response.write(b"abc")),
        lambda response: (response.start(200, [(b"content-length", b"2")]), response.end(b"a")),
    ],
    ids=["write before a head", "end before a head", "two", "two heads", "longer than said", "shorter than said"],
)
@with_virtual_time
async def test_a_use_that_would_break_the_framing_raises_and_writes_nothing(use: Callable[[Response], object]) -> None:
    connection = Connection()
    with pytest.raises(InvariantError):
        use(connection.response())
    assert connection.transport.written.count(b"HTTP/1.1") <= 1 and b"abc" not in connection.transport.written


@with_virtual_time
async def test_writes_to_a_gone_client_are_dropped_and_its_handler_is_notified_once() -> None:
    connection, calls = Connection(), []
    response = connection.response()
    response.on_gone = lambda: calls.append("gone")
    response.start(200, [])
    response.lost()
    response.lost()
    assert response.write(b"x")
    response.end(b"y")
    await response.drained()
    await response.over()
    assert calls == ["gone"] and connection.transport.written == b"" and connection.done == []


@with_virtual_time
async def test_a_part_is_refused_while_the_socket_is_full_but_the_end_is_always_taken() -> None:
    connection = Connection()
    response = connection.response()
    response.start(200, [])
    connection.write_paused = True
    response.forbid()
    assert response.full and not response.write(b"x")
    waiting = asyncio.ensure_future(response.drained())
    await let_pass(1.0)
    assert not waiting.done()
    connection.write_paused = False
    response.allow()
    connection.room.set()
    await waiting
    assert response.write(b"x")
    connection.write_paused = True
    response.end(b"y")
    assert connection.answer[2] == b"1\r\nx\r\n1\r\ny\r\n0\r\n\r\n"


@pytest.mark.parametrize(("status", "head_only"), [(204, False), (304, False), (200, True)])
@with_virtual_time
async def test_an_answer_without_a_body_ignores_what_is_written(status: int, head_only: bool) -> None:
    connection = Connection()
    response = connection.response(head_only=head_only)
    response.start(status, [])
    assert response.write(b"x")
    response.end(b"y")
    assert connection.transport.written.endswith(b"\r\n\r\n") and connection.done == [True]


@pytest.mark.parametrize("name", [b"", b"x y", b"x:", "ä".encode()])
def test_a_header_name_cannot_contain_a_line_break(name: bytes) -> None:
    with pytest.raises(InvariantError):
        check_headers([(name, b"v")])


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\n", b"\x00", b"\x7f"])
def test_a_header_value_cannot_contain_a_line_break(value: bytes) -> None:
    with pytest.raises(InvariantError):
        check_headers([(b"x-name", value)])


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """What is freed in here is freed by the last reference to it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "in parts"])
@with_virtual_time
async def test_a_complete_response_is_freed_without_the_garbage_collector(streams: bool) -> None:
    connection = Connection()
    response = connection.response()
    if streams:
        response.start(200, [])
        await asyncio.sleep(0)
        response.write(b"a")
        response.end(b"b")
    else:
        response.respond(200, [], b"")
    assert response.complete
    left = weakref.ref(connection)  # which the response knows
    with no_search_for_garbage():
        del response, connection
        assert left() is None


@with_virtual_time
async def test_a_response_of_a_gone_client_is_freed_without_the_garbage_collector() -> None:
    connection = Connection()
    response = connection.response()
    response.start(200, [])
    await asyncio.sleep(0)
    response.write(b"a")
    response.lost()
    assert response.write(b"b")
    response.end(b"c")
    left = weakref.ref(connection)  # which the response knows
    with no_search_for_garbage():
        del response, connection
        assert left() is None
