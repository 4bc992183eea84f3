"""Bodies in any pieces: the same bytes, the same rest, the same refusal."""

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client.body import MAX_EXTENSION_BYTES, MAX_TRAILER_BYTES, Body, ChunkedBody, SizedBody

NEXT = b"GET / HTTP/1.1\r\n"


def fed(body: Body, pieces: list[bytes]) -> tuple[bytes, bytes]:
    """What the body is, and what came after it."""
    rest = b""
    for piece in pieces:
        rest = rest + piece if body.complete else body.feed(piece)
    assert body.complete
    return body.whole(), rest


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def refusal(*pieces: bytes, limit: int = 1000) -> int:
    body = ChunkedBody(limit)
    with pytest.raises(InvalidRequest) as refused:
        for piece in pieces:
            body.feed(piece)
    return refused.value.status


parts = st.lists(st.binary(min_size=1, max_size=30), max_size=5)
extensions = st.sampled_from([b"", b";a=b", b' ; a="b c"', b";"])
trailers = st.sampled_from([b"", b"x: y\r\n", b"transfer-encoding: chunked\r\nhost: evil\r\n"])


@given(parts, extensions, trailers, st.lists(st.integers(0, 10_000), max_size=8))
def test_a_chunked_body_is_the_same_in_any_pieces(
    chunks: list[bytes], extension: bytes, trailer: bytes, at: list[int]
) -> None:
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    data = framed + b"0%b\r\n%b\r\n" % (extension, trailer) + NEXT
    assert fed(ChunkedBody(1000), cut(data, at)) == (b"".join(chunks), NEXT)


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 10_000), max_size=8))
def test_a_body_of_known_length_is_the_same_in_any_pieces(body: bytes, at: list[int]) -> None:
    assert fed(SizedBody(len(body), 100), cut(body + NEXT, at)) == (body, NEXT)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1\na\n",
        b"1\r\na\n",
        b"1\r\nab\r\n",
        b"1\r\na0\r\n\r\n",
        b"1;a\x00\r\na\r\n",
        b"1;a\nb\r\na\r\n",
        b"1,2\r\na\r\n",
        b"1" * 16 + b"\r\n",
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nx: y\nz: a\r\n\r\n",
        b"0\r\nx : y\r\n\r\n",
    ],
    ids=repr,
)
def test_a_chunked_body_is_parsed_strictly(data: bytes) -> None:
    assert refusal(data) == 400
    assert refusal(*(data[i : i + 1] for i in range(len(data)))) == 400


def test_a_body_above_its_limit_is_refused_before_it_has_arrived() -> None:
    assert refusal(b"3e9\r\n") == 413
    assert refusal(b"5\r\nhello\r\n3e4\r\n") == 413
    assert refusal(b"7fffffffffffffff"[:15] + b"\r\n") == 413
    with pytest.raises(InvalidRequest) as refused:
        SizedBody(1001, 1000)
    assert refused.value.status == 413


def test_chunk_extensions_and_trailers_have_their_own_bounds() -> None:
    assert refusal(b"1;" + b"a" * 600) == 400
    chunk = b"1;%b\r\nx\r\n" % (b"a" * 400)
    assert refusal(*[chunk] * (MAX_EXTENSION_BYTES // 400 + 1)) == 400
    assert refusal(b"0\r\n", *[b"x: y\r\n"] * (MAX_TRAILER_BYTES // 6 + 1)) == 431
    assert refusal(b"0\r\nx: ", b"y" * MAX_TRAILER_BYTES) == 431


@pytest.mark.parametrize("data", [b"5\r\nhel", b"5\r\nhello\r\n0\r\n\r\n"], ids=["cut", "complete"])
def test_a_chunked_body_is_freed_without_the_garbage_collector(data: bytes) -> None:
    gc.collect()
    known = chunked_bodies()  # other tests may still hold some
    gc.disable()
    try:
        body = ChunkedBody(10)
        body.feed(data)
        del body
        assert chunked_bodies() <= known
    finally:
        gc.enable()


def chunked_bodies() -> set[int]:
    """All that are alive, by identity."""
    return {id(one) for one in gc.get_objects() if isinstance(one, ChunkedBody)}


def test_a_body_in_pieces_of_two_bytes_takes_hardly_more_memory_than_its_bytes() -> None:
    body, pieces = SizedBody(200_000, 200_000), 100_000
    tracemalloc.start()
    try:
        for _ in range(pieces - 1):
            body.feed(bytes((97, 98)))
        assert tracemalloc.get_traced_memory()[0] < 1.5 * body.size
    finally:
        tracemalloc.stop()
    body.feed(b"ab")
    assert body.whole() == b"ab" * pieces
