"""Where one reply ends, and whether the connection serves another one."""

import asyncio

import pytest

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.servers import (
    CHUNKED_HEAD,
    answering,
    chunked,
    on_both_loops,
    plain,
    post,
    read_request,
    worker,
)


@pytest.mark.parametrize(
    "head",
    [b"connection: close\r\ncontent-length: 2\r\n", b"connection: close\r\n", b""],
    ids=["close-with-length", "close-without-length", "ended-by-close"],
)
@on_both_loops
async def test_a_reply_that_forbids_reuse_closes_its_connection(head: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n%s\r\nok" % head)

    async with worker(script) as server:
        upstream = Upstream(server.url)
        for _ in range(2):
            assert await (await post(upstream)).read(9) == b"ok"
        assert server.connections == 2
        assert upstream.busy_connections == 0


@on_both_loops
async def test_interim_responses_are_skipped() -> None:
    reply_bytes = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + plain(b"ok")
    async with worker(answering(reply_bytes)) as server:
        upstream = Upstream(server.url)
        for _ in range(2):
            reply = await post(upstream)
            assert (reply.status, reply.header(b"link"), await reply.read(9)) == (200, None, b"ok")
        assert server.connections == 1
        upstream.close()


@on_both_loops
async def test_bytes_after_a_reply_are_not_read_as_the_next_reply() -> None:
    async with worker(answering(plain(b"ok") + plain(b"evil"))) as server:
        upstream = Upstream(server.url)
        for _ in range(2):
            assert await (await post(upstream)).read(9) == b"ok"
        assert server.connections == 2
        upstream.close()


@on_both_loops
async def test_a_gzip_body_passes_untouched() -> None:
    body = b"\x1f\x8b\x08not really"
    raw = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with worker(answering(raw)) as server:
        upstream = Upstream(server.url)
        reply = await post(upstream)
        assert (reply.header(b"content-encoding"), await reply.read(99)) == (b"gzip", body)
        upstream.close()


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED_HEAD + chunked(b"abc", last=False),
        CHUNKED_HEAD + b"5\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        CHUNKED_HEAD + chunked(b"abc", last=False) + b"zz\r\n",
    ],
    ids=["before-last-chunk", "inside-a-chunk", "short-of-length", "broken-framing"],
)
@on_both_loops
async def test_a_truncated_body_is_an_error_after_its_bytes(sent: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)

    async with worker(script) as server:
        upstream = Upstream(server.url, worker="d7")
        reply = await post(upstream)
        with pytest.raises(BadUpstreamReply) as caught:
            while await reply.next_chunk() is not None:
                pass
        assert caught.value.worker == "d7"
        assert (upstream.busy_connections, upstream.idle_connections) == (0, 0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(b"SSH-2.0-OpenSSH\r\n", "not HTTP"), (b"\x15\x03\x01\x00\x02\x02\x46", "^its URL is http, and it speaks TLS$")],
    ids=["garbage", "a TLS alert"],
)
@on_both_loops
async def test_what_is_not_http_is_a_bad_reply(answer: bytes, error: str) -> None:
    async with worker(answering(answer)) as server:
        with pytest.raises(BadUpstreamReply, match=error):
            await post(Upstream(server.url))


@on_both_loops
async def test_an_endless_head_is_a_bad_reply() -> None:
    async with worker(answering(b"HTTP/1.1 200 OK\r\n" + b"a: " + b"x" * 200_000)) as server:
        with pytest.raises(BadUpstreamReply):
            await post(Upstream(server.url))
