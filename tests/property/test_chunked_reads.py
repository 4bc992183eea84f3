"""However a chunked body is cut into reads, the short way past the parser gives what the parser alone gives."""

import asyncio
from typing import Any
from unittest.mock import patch

import httptools
from hypothesis import example, given
from hypothesis import strategies as st

from balanceroute.errors import UpstreamError
from balanceroute.proxy.workers.connection import Connection
from balanceroute.proxy.workers.upstream import Upstream

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
chunks = st.lists(st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n"]))


class Transport:
    """Takes what is written and never closes by itself."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


class Body:
    """The oracle: httptools without any shortcut."""

    def __init__(self) -> None:
        self.data, self.complete = b"", False

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.complete = True


def framed(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def received(reads: list[bytes]) -> tuple[bytes, bool, bool]:
    """The body that a consumer gets of these reads, whether it ended, and whether it broke."""

    async def test() -> tuple[bytes, bool, bool]:
        connection = Connection(Upstream("http://127.0.0.1:1"), asyncio.get_running_loop())
        transport: Any = Transport()
        connection.connection_made(transport)
        reply = connection.send(b"")
        got: list[bytes] = []
        ends: list[UpstreamError | None] = []

        class Sink:
            def chunk(self, data: bytes) -> None:
                got.append(data)

            def ended(self, error: UpstreamError | None) -> None:
                ends.append(error)

        connection.data_received(HEAD)
        reply.attach(Sink())
        for read in reads:
            if not ends:
                connection.data_received(read)
        return b"".join(got), ends == [None], bool(ends) and ends[0] is not None

    return asyncio.run(test())


@given(chunks, st.lists(st.integers(0, 2000), max_size=12), st.booleans())
@example([b"a", b"b"], [6, 12], True)
def test_a_body_is_the_same_for_any_split_into_reads(parts: list[bytes], cuts: list[int], ends: bool) -> None:
    stream = framed(parts) + (b"0\r\n\r\n" if ends else b"")
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reads = [stream[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
    assert received(reads) == (b"".join(parts), ends, False)


@given(chunks, st.binary(max_size=30))
def test_a_body_that_the_parser_refuses_is_refused_on_the_fast_path_too(parts: list[bytes], tail: bytes) -> None:
    oracle = Body()
    parser = httptools.HttpResponseParser(oracle)
    broken = False
    try:
        parser.feed_data(HEAD)
        parser.feed_data(framed(parts) + tail)
    except httptools.HttpParserError:
        broken = True
    reads = [framed([part]) for part in parts] + ([tail] if tail else [])
    body, complete, failed = received(reads)
    assert (complete, failed) == (oracle.complete, broken) or oracle.complete
    assert body == oracle.data or broken


def seen(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes | None, bool, bool]:
    """Status, headers and body (None: not whole) after one read, whether the connection is kept, whether it is closed.

    A reply that broke is all the same, whatever was understood of it.
    """

    async def test() -> tuple[int, list[tuple[bytes, bytes]], bytes | None, bool, bool]:
        upstream = Upstream("http://127.0.0.1:1")
        connection = Connection(upstream, asyncio.get_running_loop())
        closed: list[bool] = []
        transport: Any = Transport()
        transport.abort = lambda: closed.append(True)
        connection.connection_made(transport)
        reply = connection.send(b"")
        connection.data_received(data)
        body = None
        if reply.over and reply._error is not None:
            return 0, [], None, False, bool(closed)
        if reply.over:
            body = await reply.read(10_000)
        return reply.status, reply.headers, body, upstream.idle_connections == 1, bool(closed)

    return asyncio.run(test())


lines = st.sampled_from(
    [
        b"content-length: 5",
        b"Content-Length: 5",
        b"content-length:5",
        b"content-length: 7",
        b"content-length: 05",
        b"content-length: x",
        b"content-type: application/json",
        b"X-Request-Id:  a b ",
        b"connection: close",
        b"Connection: keep-alive",
        b"transfer-encoding: chunked",
        b"date: Sat, 21 Nov 2026 18:00:00 GMT",
        b"empty:",
        b"empty: ",
        b"a b: c",
        b" folded",
        b"",
    ]
)
plain_lines = st.sampled_from([b"content-type: application/json", b"X-Request-Id:  a b ", b"date: today", b"server: a"])
heads = st.builds(  # most of which a reply may have that is decoded without the parser
    lambda plain, length, any_other: [*plain, length, *any_other],
    st.lists(plain_lines, max_size=3),
    st.sampled_from([b"content-length: 5", b"Content-Length: 5"]),
    st.lists(lines, max_size=1),
).flatmap(st.permutations)
starts = st.just(b"HTTP/1.1 200 OK") | st.sampled_from(
    [b"HTTP/1.1 200 OK", b"HTTP/1.1 200 ", b"HTTP/1.1 200", b"HTTP/1.0 200 OK", b"HTTP/1.1 503 Busy", b"HTTP/1.1 100 C"]
)


@given(starts, heads | st.lists(lines, max_size=5), st.just(b"hello") | st.binary(max_size=12))
@example(b"HTTP/1.1 200 OK", [b"content-type: application/json", b"Content-Length: 5"], b"hello")
@example(b"HTTP/1.1 200 OK", [b"content-length: 5"], b"hello!")
@example(b"HTTP/1.1 200 OK", [b"content-length: 5", b"X-Request-Id:  a b "], b"hello")
def test_a_reply_decoded_without_the_parser_equals_the_parsed_one(start: bytes, head: list[bytes], body: bytes) -> None:
    data = b"\r\n".join([start, *head, b"", body])
    with patch("balanceroute.proxy.workers.connection.plain_reply", lambda data: None):
        parsed = seen(data)
    assert seen(data) == parsed
