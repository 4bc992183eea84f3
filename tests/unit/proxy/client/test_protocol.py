"""The client protocol on a real socket: what is served, what is refused, what is bounded."""

import asyncio
import logging
import os
import socket
import ssl
from contextlib import suppress

import pytest

from balanceroute.proxy.client import handshake, inbox, protocol
from tests.unit.proxy.client.listening import listening, served
from tests.unit.proxy.servers import on_both_loops
from tests.waiting import pace, until

pytestmark = pytest.mark.anyio


async def test_requests_of_one_connection_are_answered_in_sequence() -> None:
    async with listening() as server:
        client = await server.connect()
        for body in (b"", b"one", b"x" * 300_000):
            client.post(body)
            status, headers, answer = await client.answer()
            assert (status, answer) == (200, body) and "date" in headers


@pytest.mark.parametrize("step", [1, 7, 50])
async def test_a_request_in_pieces_is_the_same_request(step: int) -> None:
    async with listening() as server:
        client = await server.connect()
        chunked = b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
        whole = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd\r\n" + chunked
        for at in range(0, len(whole), step):
            client.send(whole[at : at + step])
            await client.writer.drain()
            await asyncio.sleep(0)
        for _ in range(2):
            assert (await client.answer())[2] == b"abcd"


async def test_pipelined_requests_are_answered_in_order_across_routes() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"GET /?0.05 HTTP/1.1\r\nhost: x\r\n\r\n")
        client.post(b"first")
        client.post(b"", b"authorization: Bearer wrong")
        client.post(b"third", b"x-do: stream")
        answers = [await client.answer() for _ in range(4)]
        assert [status for status, _, _ in answers] == [200, 200, 401, 200]
        assert [answers[0][2], answers[1][2], answers[3][2]] == [b"hi", b"first", b"third" * 3 + b"end"]


async def test_many_requests_pipelined_behind_a_completion_are_dropped_and_its_answer_is_the_last() -> None:
    async with listening() as server:
        client = await server.connect()
        client.post(b"", b"x-do: wait")
        await until(lambda: server.site.served)
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100_000)
        (connection,) = server.connections
        await until(lambda: client.writer.transport.get_write_buffer_size() == 0)
        assert connection._inbox.raw == b""
        await served(server)
        client.writer.close()
        await until(lambda: not server.connections)  # although it had sent so much more


@pytest.mark.parametrize("behind", [b"", b"x" * 70_000], ids=["nothing-behind", "much-behind"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_client_that_half_closes_and_reads_nothing_counts_as_gone_at_once(
    encrypted: bool, behind: bytes
) -> None:
    """Its answer is under way, and there is more of it than its sockets take. The end of TLS does not come."""
    async with listening(encrypted=encrypted, stall_timeout_s=3600.0, receive_timeout_s=2.0) as server:
        client = await server.connect()
        client.post(b"", b"x-do: flood")
        await until(lambda: server.site.full)
        client.send(behind)
        (connection,) = server.connections
        await until(lambda: connection._inbox.dropping is bool(behind))
        with socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno())) as below:
            below.shutdown(socket.SHUT_WR)
        await until(lambda: not server.connections)


async def test_a_client_that_closes_only_tls_counts_as_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SHUTDOWN_S", 3600.0)
    async with listening(encrypted=True) as server:
        assert server.trusted is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        come, left = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = server.trusted.wrap_bio(come, left, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        writer.write(left.read())
        while not tls.version() or left.pending == 0:
            come.write(await reader.read(2**16))
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
        tls.write(b"POST /hot HTTP/1.1\r\nhost: x\r\nx-do: wait\r\ncontent-length: 0\r\n\r\n")
        writer.write(left.read())
        await until(lambda: server.site.served)
        with pytest.raises(ssl.SSLWantReadError):
            tls.unwrap()
        writer.write(left.read())
        await until(lambda: server.site.abandoned)
        writer.close()


async def test_a_long_pipeline_gets_every_answer() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
        for _ in range(2000):
            assert (await client.answer())[2] == b"hi"


async def test_refusals_of_a_pipeline_leave_others_their_turns() -> None:
    """One read may hold thousands: together they stopped everybody's stream for a second."""
    async with listening() as server:
        client, errors = await server.connect(), server.site.errors
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n" * 500)
        client.writer.write_eof()
        before = 0
        while before < 500:
            await asyncio.sleep(0)
            assert len(errors) <= before + 1
            before = len(errors)
        assert [await client.error() for _ in range(500)] == [401] * 500
        assert await client.closed()


async def test_of_a_pipeline_longer_than_may_wait_the_rest_is_read_once_there_is_room() -> None:
    requests, request = 2500, b"GET / HTTP/1.1\r\nhost: x\r\nx: %b\r\n\r\n" % (b"x" * 80)  # more than one read takes
    async with listening() as server:
        client = await server.connect()
        client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.site.scopes)
        client.send(request * requests)
        (connection,) = server.connections
        await until(lambda: server.edge.incoming_bytes > inbox.MAX_WAITING_BYTES)
        await served(server)
        assert not connection.transport.is_reading()
        server.site.going_on.set()
        for _ in range(1 + requests):
            assert (await client.answer())[2] == b"hi"
        assert server.edge.incoming_bytes == 0 and connection.transport.is_reading()


async def test_a_large_request_behind_another_one_is_read_to_its_end_when_its_turn_comes() -> None:
    body = b"x" * 2**20
    async with listening() as server:
        client = await server.connect()
        client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.site.scopes)
        client.post(body)
        (connection,) = server.connections
        await until(lambda: not connection.transport.is_reading())
        server.site.going_on.set()
        assert [(await client.answer())[2] for _ in range(2)] == [b"hi", body]


async def test_a_client_that_sends_on_behind_its_last_request_can_read_the_answer_and_send_all() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await until(lambda: server.site.scopes)
        client.send(b"x" * 2**24)
        (connection,) = server.connections
        await until(lambda: not connection.transport.is_reading())
        server.site.going_on.set()
        assert (await client.answer())[2] == b"hi"
        await until(lambda: client.writer.transport.get_write_buffer_size() == 0)
        assert not client.writer.transport.is_closing()


async def test_a_request_behind_an_answer_that_was_not_read_yet_is_served_when_it_is() -> None:
    async with listening() as server:
        client = await server.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        (connection,) = server.connections
        await until(lambda: connection.write_paused)
        await served(server)
        assert len([scope for scope in server.site.scopes if scope["path"] == "/large"]) == 1
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(2):
            assert len((await client.answer())[2]) == 2**24


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_connection_after_its_last_answer_ends_as_soon_as_its_client_ends_it(
    encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 3600.0)
    async with listening(encrypted=encrypted) as server:
        client = await server.connect()
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nauthorization: Bearer wrong\r\n\r\n")
        assert (await client.answer())[0] == 401
        client.writer.close()
        await until(lambda: not server.connections)


async def test_the_bound_of_bytes_after_the_last_answer_is_none_of_the_requests_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_DROPPED_BYTES", 5000)
    monkeypatch.setattr(protocol, "LINGER_S", 3600.0)
    async with listening() as server:
        client = await server.connect()
        for _ in range(10):
            client.post(b"x" * 1000)
            assert (await client.answer())[0] == 200
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\nauthorization: Bearer wrong\r\n\r\n")
        assert (await client.answer())[0] == 401
        client.send(b"x" * 4000)
        await until(lambda: [each._inbox.dropped_bytes for each in server.connections] == [4000])
        client.send(b"x" * 2000)
        await until(lambda: not server.connections)


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"body")
        assert (await client.answer())[2] == b"body"


@pytest.mark.parametrize("line", [b"x-do: refuse", b"authorization: Bearer wrong"], ids=["handler", "gate"])
async def test_a_request_is_refused_by_its_head_before_its_body_is_read(line: bytes) -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(
            b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n", line, b"\r\n\r\n"
        )
        assert await client.error() == 401
        assert await client.closed() and server.site.served == 0
        assert [str(error) for error in server.site.errors] in (["no"], ["who are you?"])


async def test_a_refused_request_that_has_arrived_completely_keeps_the_connection_open() -> None:
    async with listening() as server:
        client = await server.connect()
        client.post(b"secret", b"x-do: refuse")
        assert await client.error() == 401
        client.post(b"public")
        assert (await client.answer())[2] == b"public"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02", 400),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70_000, 431),
        (b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 1000001\r\n\r\n", 413),
        (b"POST /any HTTP/1.1\r\nhost: x\r\ncontent-length: 1000001\r\n\r\n", 413),
        (b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfffff\r\n", 413),
        (b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nz\r\n", 400),
        (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else str(value),
)
async def test_an_invalid_request_gets_an_openai_error_and_the_connection_closes(request_: bytes, status: int) -> None:
    async with listening(max_body_bytes=1_000_000) as server:
        client = await server.connect()
        client.send(request_)
        assert await client.error() == status
        assert await client.closed()
        await served(server)


async def test_bytes_that_are_no_request_are_logged_with_the_id_that_their_answer_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    async with listening() as server:
        client = await server.connect()
        client.send(b"nonsense\r\n\r\n")
        status, headers, _ = await client.answer()
        (line,) = [vars(record) for record in caplog.records if record.message == "no request"]
        assert status == 400 and line["request"] == headers["x-request-id"] and line["peer"] == "127.0.0.1"


async def test_a_client_that_is_still_sending_can_read_its_refusal() -> None:
    async with listening(max_body_bytes=1000) as server:
        client = await server.connect()
        client.post(b"x" * 3_000_000)
        assert await client.error() == 413
        assert await client.closed()


async def test_trailers_are_dropped() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(
            b"POST /asgi HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-evil\r\n\r\n",
            b"1\r\na\r\n0\r\nx-evil: 1\r\nauthorization: Bearer stolen\r\n\r\n",
        )
        assert (await client.answer())[2] == b"a"
        assert {name for name, _ in server.site.scopes[0]["headers"]} == {b"host", b"transfer-encoding", b"trailer"}


# -- time


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (b"POST /hot HT", b"408"),
        (b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n", b"408"),
        (b"POST /any HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab", b"408"),
        (b"POST /hot HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab", b"408"),
    ],
    ids=["nothing", "half-a-head", "head", "half-a-body", "half-a-chunk"],
)
async def test_a_request_that_arrives_too_slowly_is_refused(sent: bytes, expected: bytes) -> None:
    async with listening(receive_timeout_s=0.2) as server:
        client = await server.connect()
        client.send(sent)
        answer = await client.reader.read()
        assert answer[9:12] == expected and server.site.served == 0
        assert not server.connections or server.edge.incoming_bytes == 0


async def test_a_slow_body_is_refused_and_a_steady_one_may_take_longer() -> None:
    async with listening(receive_timeout_s=0.3, min_rate_bytes_per_s=1000) as server:
        slow, steady = await server.connect(), await server.connect()
        for client in (slow, steady):
            client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n")

        async def trickle() -> int:
            while slow.reader._buffer == b"":
                slow.send(b"x")
                await pace(0.02)
            return await slow.error()

        async def flow() -> int:
            for _ in range(10):
                steady.send(b"x" * 1000)
                await pace(0.1)
            return (await steady.answer())[0]

        assert await asyncio.gather(trickle(), flow()) == [408, 200]


async def test_an_idle_connection_is_closed_after_keep_alive_s_and_a_busy_one_is_not() -> None:
    async with listening(keep_alive_s=1.0) as server:
        idle, used = await server.connect(), await server.connect()
        idle.post()
        assert (await idle.answer())[0] == 200
        ended = asyncio.ensure_future(idle.closed())
        while not ended.done():
            used.post()
            assert (await used.answer())[0] == 200
            await pace(0.02)
        used.post()
        assert (await used.answer())[0] == 200


async def test_a_request_that_began_during_the_last_answer_has_its_full_time_limit() -> None:
    async with listening(keep_alive_s=0.2, receive_timeout_s=3600.0) as server:
        client, idle = await server.connect(), await server.connect()
        client.send(b"GET /?0.1 HTTP/1.1\r\nhost: x\r\n\r\nGET /?0.2 HT")
        assert (await client.answer())[2] == b"hi"
        idle.post()
        assert (await idle.answer())[0] == 200
        assert await idle.closed()  # the time of connections without a request is over
        client.send(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"hi"
        assert await client.closed()


@pytest.mark.parametrize("path", [b"/hot", b"/large"])
async def test_a_client_that_reads_nothing_is_cut_off(path: bytes) -> None:
    async with listening(stall_timeout_s=0.4) as server:
        client = await server.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post(b"x", b"x-do: flood", path=path)
        await until(lambda: server.connections)
        await until(lambda: not server.connections)
        await served(server)


async def test_a_client_that_reads_a_byte_now_and_then_is_disconnected() -> None:
    async with listening(stall_timeout_s=0.5, min_rate_bytes_per_s=100_000) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            reader.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: server.connections)
            while server.connections:
                try:
                    reader.recv(1)
                except BlockingIOError:
                    pass
                await pace(0.02)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_of_many_large_answers_that_nobody_reads_the_last_one_is_kept(encrypted: bool) -> None:
    async with listening(encrypted=encrypted, stall_timeout_s=3600.0, max_held_bytes=2**20) as server:
        clients = [await server.connect() for _ in range(3)]
        for client in clients:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(server.site.scopes) == 3)
        await until(lambda: len(server.connections) == 1)
        looked_s = server.edge.looks.last_s
        await until(lambda: server.edge.looks.last_s > looked_s)
        assert len(server.connections) == 1, "one answer may have any size"


@pytest.mark.parametrize("line", [b"connection: close", b"x: y"], ids=["last answer", "then nothing"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_large_answer_is_sent_to_a_slow_but_steady_reader(
    encrypted: bool, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    monkeypatch.setattr(handshake, "SHUTDOWN_S", 0.05)
    async with listening(encrypted=encrypted, keep_alive_s=0.2) as server:
        client = await server.connect()
        client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % line)
        left = int((await client.reader.readuntil(b"\r\n\r\n")).partition(b"content-length: ")[2].split()[0])
        while left:
            left -= len(await client.reader.readexactly(min(left, 2**19)))
            await pace(0.02)
        assert await client.closed()
        await until(lambda: not server.connections)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_unread_bytes_of_an_aborted_answer_are_dropped_after_the_stall_timeout(encrypted: bool) -> None:
    """Also where it is so little that the client's socket does not count as full."""
    async with listening(encrypted=encrypted, stall_timeout_s=0.4) as server:
        client = await server.connect()
        client.post(b"well?")
        assert (await client.answer())[2] == b"well?"
        (connection,) = server.connections
        for transport in {connection.transport, connection._below or connection.transport}:
            transport.set_write_buffer_limits(high=2**26)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post(b"x" * 2**24, b"x-do: break")
        await until(lambda: not server.connections)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
@on_both_loops
async def test_what_the_client_of_an_aborted_connection_has_not_read_counts_no_more(encrypted: bool) -> None:
    """Where clients leave too much unread, no other client is closed for it."""
    async with listening(encrypted=encrypted) as server:
        client = await server.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: any(connection.unread_bytes for connection in server.connections))
        (connection,) = server.connections
        connection.abort()
        assert not connection.unread_bytes


async def test_a_client_that_reads_no_unstreamed_answer_is_disconnected_over_tls_too() -> None:
    async with listening(encrypted=True, stall_timeout_s=0.4) as server:
        client = await server.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.site.scopes)
        await until(lambda: not server.connections)
        await served(server)


async def test_a_close_delimited_answer_ends_at_once_and_cleanly_over_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 3600.0)

    def answer_to_http_1_0(port: int, trusted: ssl.SSLContext) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            trusted.wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as client,
        ):
            client.sendall(b"POST /hot HTTP/1.0\r\nx-do: stream\r\ncontent-length: 1\r\n\r\nx")
            return b"".join(iter(lambda: client.recv(4096), b""))

    async with listening(encrypted=True) as server:
        assert server.trusted is not None
        answer = await asyncio.to_thread(answer_to_http_1_0, server.port, server.trusted)
        assert answer.partition(b"\r\n\r\n")[2] == b"xxxend"


# -- who leaves


async def test_a_client_that_leaves_during_its_request_cancels_it() -> None:
    async with listening() as server:
        client = await server.connect()
        client.post(b"", b"x-do: wait")
        await until(lambda: server.site.served)
        client.writer.close()
        await until(lambda: server.site.abandoned)


async def test_a_client_that_leaves_before_its_body_was_complete_is_accounted_for() -> None:
    async with listening() as server:
        client = await server.connect()
        client.send(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
        await until(lambda: server.connections and server.edge.incoming_bytes == 2)
        edge = server.edge
        client.writer.transport.abort()
        await until(lambda: server.site.abandoned)
        assert server.site.served == 0 and edge.incoming_bytes == 0 and not edge.waiting


@pytest.mark.parametrize("hot", [False, True], ids=["asgi", "hot"])
async def test_a_half_closed_client_is_answered_except_for_completions(hot: bool) -> None:
    async with listening() as server:
        client = await server.connect()
        if hot:
            client.post(b"", b"x-do: wait")
            await until(lambda: server.site.served)
        else:
            client.send(b"GET /?0.1 HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        client.writer.write_eof()
        if hot:
            await until(lambda: server.site.abandoned)
        else:
            assert [(await client.answer())[2] for _ in range(2)] == [b"hi", b"hi"]
        assert await client.closed()


async def test_a_half_close_inside_a_request_is_a_400() -> None:
    async with listening() as server:
        for part in (b"GET / HT", b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"):
            client = await server.connect()
            client.send(part)
            client.writer.write_eof()
            assert await client.error() == 400
            assert await client.closed()


async def test_clients_that_leave_between_requests_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as server:
        caplog.clear()
        for n in range(30):
            client = await server.connect()
            client.post(b"x")
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * n)
            if n % 2:
                await client.answer()
            client.writer.transport.abort()
        await until(lambda: not server.connections)
        assert caplog.records == []


# -- what goes wrong behind it


async def test_an_exception_in_a_handler_is_a_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as server:
        client = await server.connect()
        client.post(b"", b"x-do: fail")
        assert await client.error() == 500
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["internal error"]
