"""What the consumer of a reply gets: its head, its body by chunks or by a sink, and its end."""

import asyncio
import os
import socket
from contextlib import suppress

import pytest

from balanceroute.errors import ReplyTooLarge, UpstreamError
from balanceroute.proxy.workers.reply import SMALL_BYTES
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.servers import (
    CHUNKED_HEAD,
    answering,
    chunked,
    falling_silent,
    on_both_loops,
    plain,
    post,
    read_request,
    worker,
)
from tests.waiting import until


@on_both_loops
async def test_a_reply_has_status_headers_and_body() -> None:
    async with worker(answering(plain(b"hello", b"404 Not Found"))) as server:
        upstream = Upstream(server.url, worker="d0")
        reply = await post(upstream)
        assert (reply.status, reply.header(b"content-type")) == (404, b"text/plain")
        assert await reply.read(100) == b"hello"
        upstream.close()


@on_both_loops
async def test_abort_closes_a_stream_at_once_and_is_idempotent() -> None:
    async with worker(falling_silent(CHUNKED_HEAD + chunked(b"x", last=False))) as server:
        upstream = Upstream(server.url)
        reply = await post(upstream)
        assert await reply.next_chunk() == b"x"
        reply.abort()
        reply.abort()
        await server.closed.wait()
        assert (upstream.busy_connections, upstream.idle_connections) == (0, 0)


@on_both_loops
async def test_read_refuses_a_body_above_its_limit_and_says_whose_it_is() -> None:
    async with worker(answering(plain(b"x" * 1000))) as server:
        upstream = Upstream(server.url, worker="p0", tier="prefill")
        with pytest.raises(ReplyTooLarge, match="longer than 999") as refused:
            await (await post(upstream)).read(999)
        assert (refused.value.worker, refused.value.tier) == ("p0", "prefill")
        upstream.close()


@on_both_loops
async def test_read_cuts_a_body_above_its_limit_where_its_beginning_is_enough() -> None:
    async with worker(answering(plain(b"x" * 999 + b"yz"))) as server:
        upstream = Upstream(server.url, worker="p0", tier="prefill")
        assert await (await post(upstream)).read(1000, cut=True) == b"x" * 999 + b"y"
        assert await (await post(upstream)).read(1001, cut=True) == b"x" * 999 + b"yz"
        upstream.close()


@on_both_loops
async def test_answers_of_one_worker_that_are_read_at_once_are_bounded_together() -> None:
    """A worker may send the longest answer to each of hundreds of requests; small answers always have room."""
    size, ends = 2 * SMALL_BYTES, asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if b" /small " in head:
            writer.write(plain(b"x" * SMALL_BYTES))
            return
        writer.write(plain(b"x" * size)[:-1])
        await ends.wait()
        writer.write(b"x")

    async with worker(script) as server:
        upstream = Upstream(server.url)
        upstream.max_read_bytes = 5 * SMALL_BYTES

        async def read(path: str) -> int:
            return len(await (await upstream.request("POST", path)).read(2**30))

        reads = [asyncio.get_running_loop().create_task(read("/large")) for _ in range(2)]
        await until(lambda: upstream.read_bytes == 2 * (size - 1))
        with pytest.raises(ReplyTooLarge, match="its answers together are longer than"):
            await read("/large")
        assert await read("/small") == SMALL_BYTES
        ends.set()
        assert await asyncio.gather(*reads) == [size, size]
        assert upstream.read_bytes == 0
        upstream.close()


@on_both_loops
async def test_a_consumer_that_lags_stops_the_worker_and_loses_nothing() -> None:
    total = 8 * 1024 * 1024
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(CHUNKED_HEAD)
        while sent < total:
            writer.write(chunked(b"y" * 65536, last=False))
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with worker(script) as server:
        upstream = Upstream(server.url, high_water_bytes=100_000)
        reply = await post(upstream)
        await until(lambda: reply.paused)
        assert sent < total
        got = []
        while (chunk := await reply.next_chunk()) is not None:
            got.append(len(chunk))
        assert got[0] < 100_000 + 512 * 1024  # the mark and one read of the loop
        assert sum(got) == total
        assert upstream.idle_connections == 1
        upstream.close()


class Recorder:
    """A sink that writes down what it was told."""

    def __init__(self) -> None:
        self.data = b""
        self.ends: list[UpstreamError | None] = []
        self.over = asyncio.Event()

    def chunk(self, data: bytes) -> None:
        assert data
        self.data += data

    def ended(self, error: UpstreamError | None) -> None:
        self.ends.append(error)
        self.over.set()


@pytest.mark.parametrize("late", [False, True], ids=["early", "after-the-end"])
@on_both_loops
async def test_a_sink_gets_every_byte_and_one_end(late: bool) -> None:
    async with worker(answering(CHUNKED_HEAD + chunked(*(b"%d," % i for i in range(500))))) as server:
        upstream = Upstream(server.url)
        reply = await post(upstream)
        if late:
            await until(lambda: reply.over)
        sink = Recorder()
        reply.attach(sink)
        await sink.over.wait()
        assert sink.data == b"".join(b"%d," % i for i in range(500))
        assert sink.ends == [None]
        upstream.close()


class Turns(Recorder):
    """A sink that counts the most bytes that it got in one turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = self._bytes = 0

    def chunk(self, data: bytes) -> None:
        if not self._bytes:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._bytes += len(data)
        self.most_bytes = max(self.most_bytes, self._bytes)
        super().chunk(data)

    def _next_turn(self) -> None:
        self._bytes = 0


@pytest.mark.parametrize("chunk_bytes", [1000, 64_000 - 8], ids=["across-reads", "within-reads"])
@on_both_loops
async def test_a_fast_worker_is_read_once_per_turn(chunk_bytes: int) -> None:
    """All other streams wait for what is read in a turn. Four of the larger chunks fill uvloop's buffer exactly."""
    sent, attached = chunked(*[b"y" * chunk_bytes] * (2**23 // chunk_bytes)), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED_HEAD + chunked(b"x", last=False))
        await attached.wait()
        at, descriptor = 0, writer.get_extra_info("socket").fileno()
        with suppress(BlockingIOError):  # before the router's side of this loop can read
            while at < len(sent):
                at += os.write(descriptor, sent[at:])
        writer.write(sent[at:])
        await reader.read()

    async with worker(script) as server:
        upstream = Upstream(server.url)
        reply, sink = await post(upstream), Turns()
        reply.attach(sink)
        (connection,) = upstream._busy
        assert connection._transport is not None
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        attached.set()
        await sink.over.wait()
        assert sink.ends == [None] and len(sink.data) == 1 + 2**23 // chunk_bytes * chunk_bytes
        assert sink.most_bytes <= 2**18
        upstream.close()


@on_both_loops
async def test_a_consumer_that_stops_after_a_large_read_is_not_read_for() -> None:
    async with worker(answering(CHUNKED_HEAD + chunked(b"y" * 2**23))) as server:
        upstream = Upstream(server.url, high_water_bytes=1)
        reply = await post(upstream)
        await until(lambda: reply.paused)
        for _ in range(10):
            before = reply._parts_bytes
            await asyncio.sleep(0)
            assert reply._parts_bytes == before
        reply.abort()
        upstream.close()


@on_both_loops
async def test_a_discarded_reply_that_ends_gives_its_connection_back() -> None:
    async with worker(answering(CHUNKED_HEAD + chunked(b"a" * 100_000))) as server:
        upstream = Upstream(server.url)
        reply = await post(upstream)
        reply.discard(5.0)
        await until(lambda: not upstream.busy_connections)
        assert upstream.idle_connections == 1
        upstream.close()


@on_both_loops
async def test_a_discarded_reply_that_does_not_end_is_closed() -> None:
    async with worker(falling_silent(CHUNKED_HEAD)) as server:
        upstream = Upstream(server.url)
        (await post(upstream)).discard(0.02)
        await server.closed.wait()
        assert upstream.busy_connections == 0
