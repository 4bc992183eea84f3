"""The client protocol against h11, which was written by others from the same RFCs.

The same bytes, in any pieces, are the same requests to both, or both refuse them. Where ours is stricter, `STRICTER`
says so and why; there is nothing that h11 refuses and ours takes but what `LENIENT` names.
"""

import asyncio
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balanceroute.proxy.client.head import Request, read_any, read_plain
from balanceroute.proxy.client.inbox import MAX_WAITING_BYTES
from scripts.chaos_run.edge_stage import Outcome, Stage, Taken
from scripts.chaos_run.fuzz_http import check, one_input, pieces, same, stream

HEAD_BYTES = 64 * 1024


@dataclass(slots=True)
class Oracle:
    """What h11 made of some bytes; `refused`, that it met what is no request, or only half of one."""

    requests: list[Taken] = field(default_factory=list)
    refused: bool = False

    @classmethod
    def of(cls, data: bytes) -> "Oracle":
        """All that a server on h11 would serve of them, to a client that then half-closes.

        Empty lines before a request are taken away first: RFC 9112 2.2 has servers overlook them, which h11 does not.
        """
        oracle = cls()
        try:
            while data := re.sub(rb"\A(\r\n)+", b"", data):
                connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
                connection.receive_data(data)
                connection.receive_data(b"")
                oracle.requests.append(_one_request(connection))
                if connection.our_state is h11.MUST_CLOSE:
                    break
                data = connection.trailing_data[0]
        except h11.RemoteProtocolError:
            oracle.refused = True
        return oracle


def _one_request(connection: h11.Connection) -> Taken:
    """The request that a connection holds, which is answered. Raises: RemoteProtocolError."""
    request, body = None, b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            status = 405 if request.method == b"CONNECT" else 200  # else it would become a tunnel
            connection.send(h11.Response(status_code=status, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            headers = tuple((bytes(name), bytes(value)) for name, value in request.headers)
            return Taken(request.method.decode(), bytes(request.target), headers, body)
        else:
            raise AssertionError(f"h11 met {event}")


# what h11 takes and we refuse: a sign of it in the bytes, and why
STRICTER: dict[str, tuple[bytes, str]] = {
    "bare LF": (
        rb"(?<!\r)\n",
        "RFC 9112 2.2 lets a recipient take it for a line end; whoever does not, frames otherwise",
    ),
    "folded line": (rb"\r\n[ \t]", "RFC 9112 5.2 lets a server refuse it; a proxy before us may have joined it"),
    "text and framing": (
        rb"(?i)transfer-encoding",
        "RFC 9112 6.1: a length beside a coding ought to be handled as an error",
    ),
    "expectation": (rb"(?i)\nexpect:", "RFC 9110 10.1.1: 417 for one that cannot be met"),
    "host": (
        rb"(?i)\nhost:|http://",
        "RFC 9112 3.2: a Host field that is no host is a 400; h11 looks at their number only",
    ),
    "method": (rb"(?m)^(?!(GET|HEAD|POST|PUT|OPTIONS) )", "405 for what nobody has heard of, and for CONNECT"),
    "target": (
        rb"(?m)^[A-Z]+ (?!/|\*|https?://)|%(?![0-9A-Fa-f]{2})|[\x80-\xff]",
        "RFC 9112 3.2: none of the four forms",
    ),
    "version": (rb"HTTP/(?!1\.[01]\r)", "505 for what we do not speak"),
    "line": (rb"[^\n]{8192}", "414: h11 bounds the whole head only"),
    "fields": (rb"([^\n]*\n){128}", "431: h11 bounds their size only"),
    "chunk": (rb"(?i)\n[0-9a-f]+[ \t]*(;|[ \t]+\r|[0-9a-f]{15})", "extensions, white space and zeros are bounded"),
    "length": (rb"(?i)content-length:", "one plain number; h11 takes a list of the same ones"),
    "trailers": (rb"\n0+[ \t]*(;[^\n]*)?\r\n[^\r]", "bounded apart from heads, and read by the letter"),
    "control": (
        rb"[\x01-\x08\x0b-\x1f\x7f]",
        "RFC 9110 5.5: characters that are dangerous elsewhere; h11 minds NUL only",
    ),
}
# what h11 refuses and we take
LENIENT: dict[str, tuple[bytes, str]] = {
    "chunk": (rb"(?i)\n[0-9a-f]+[ \t]+;", "RFC 9112 7.1.1: white space before an extension must be taken and dropped"),
}


def shown_in(data: bytes, kinds: dict[str, tuple[bytes, str]]) -> list[str]:
    """The kinds that some bytes have a sign of."""
    return [name for name, (sign, _) in kinds.items() if re.search(sign, data)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


def served(runner: asyncio.Runner, parts: list[bytes]) -> Outcome:
    """What ours made of the pieces; nothing is left of them."""
    stage = Stage(runner.get_loop())
    outcome = runner.run(stage.connection(parts))
    check(outcome)
    assert stage.left() == {}
    return outcome


def agree(data: bytes, ours: Outcome) -> None:
    """Compare an outcome with the oracle's."""
    oracle = Oracle.of(data)
    mine, theirs = ours.requests, [comparable(request) for request in oracle.requests]
    assert [comparable(request) for request in mine[: len(theirs)]] == theirs[: len(mine)]
    if len(data) > MAX_WAITING_BYTES and ours.closed and ours.refusal is None:
        return  # so much behind a request under way that its answer is the connection's last
    if len(mine) > len(theirs) or (oracle.refused and ours.refusal is None):
        assert shown_in(data, LENIENT), f"h11 refuses it: {data[:400]!r}"
    if len(mine) < len(theirs) or (ours.refusal is not None and not oracle.refused):
        assert ours.refusal is not None, f"{len(theirs) - len(mine)} requests are missing: {data[:400]!r}"
        assert shown_in(data, STRICTER), f"h11 takes it, we say {ours.refusal}: {data[:400]!r}"


def comparable(request: Taken) -> Taken:
    """Without what the two write differently by intent: a target in absolute form gives path and Host, and h11 writes
    the name of a coding in lower case.
    """
    target = re.sub(rb"(?i)^https?://[^/?]*", b"", request.target) or b"/"
    headers = tuple(
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in request.headers
        if name != b"host"
    )
    return Taken(request.method, target, headers, request.body)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**53))
@example(seed=2340)  # the name of a coding in capitals
@example(seed=44129)  # white space before a chunk's extension
def test_router_and_h11_read_the_same_requests_or_both_refuse(runner: asyncio.Runner, seed: int) -> None:
    draw = random.Random(seed)
    data = stream(draw)
    ours = served(runner, [data])
    agree(data, ours)
    same(ours, served(runner, pieces(draw, data)), ended=True, large=len(data) > MAX_WAITING_BYTES)


PARTS = st.sampled_from(
    [b"GET / HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\n", b"Host: a\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello"]
    + [
        b"Transfer-Encoding: chunked\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"0\r\n",
        b"X: y\r\n",
        b" ",
        b"\n",
        b"\r",
        b"\t",
    ]
    + [
        b"5",
        b"0",
        b";",
        b":",
        b",",
        b"+",
        b"\x00",
        b"\x0b",
        b"\xa0",
        b"chunked",
        b"Connection: close\r\n",
        b"HTTP/1.0\r\n",
    ]
    + [b"5;a=b\r\nhello\r\n", b"Expect: 100-continue\r\n", b"Content-Length: 05\r\n", b"Transfer-Encoding:", b"gzip"]
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, min_size=1, max_size=14), start=st.sampled_from([b"", b"POST /a HTTP/1.1\r\nHost: a\r\n"]))
def test_router_and_h11_agree_on_random_bytes_or_both_refuse(
    runner: asyncio.Runner, parts: list[bytes], start: bytes
) -> None:
    data = start + b"".join(parts)
    ours = served(runner, [data])
    agree(data, ours)
    same(ours, served(runner, [start, *parts]), ended=True, large=len(data) > MAX_WAITING_BYTES)
    same(
        ours,
        served(runner, [data[at : at + 1] for at in range(len(data))]),
        ended=True,
        large=len(data) > MAX_WAITING_BYTES,
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**53))
def test_no_damaged_request_raises_or_leaks(runner: asyncio.Runner, seed: int) -> None:
    """Some of the inputs that `scripts/fuzz_http` feeds by the million, and CI by the thousand."""
    runner.run(one_input(Stage(runner.get_loop()), seed))


HEAD_LINES = st.builds(
    lambda name, colon, value: name + colon + value,
    st.sampled_from(
        [
            b"Host",
            b"content-length",
            b"Connection",
            b"x-request-id",
            b"Expect",
            b"upgrade",
            b"Transfer-Encoding",
            b"a b",
        ]
        + [b"proxy-connection", b"Cookie", b"", b"x{"]
    ),
    st.sampled_from([b":", b": ", b":\t ", b" : ", b""]),
    st.sampled_from(
        [b"a", b"a:80", b"a/b", b"12", b"007", b"+1", b"1,2", b"keep-alive", b"close", b"upgrade", b"chunked"]
    )
    | st.binary(max_size=4),
)


PLAIN_HEAD_LINES = st.sampled_from(
    [b"content-length: 12", b"Cookie: a", b"x-request-id: a", b"X-A:b c", b"accept: */*"]
)


@settings(max_examples=1000, deadline=None)
@given(
    line=st.sampled_from([b"POST /v1/x?y=%41 HTTP/1.1", b"POST /v1/x HTTP/1.1", b"GET /?a HTTP/1.1", b"GET * HTTP/1.1"])
    | st.builds(lambda target: b"GET /" + target + b" HTTP/1.1", st.binary(max_size=6)),
    plain=st.lists(PLAIN_HEAD_LINES, max_size=3, unique=True),
    lines=st.lists(HEAD_LINES, max_size=1) | st.lists(HEAD_LINES, max_size=4),
)
def test_a_head_read_by_the_fast_path_equals_that_of_the_full_parser(
    line: bytes, plain: list[bytes], lines: list[bytes]
) -> None:
    raw = b"".join(part + b"\r\n" for part in (line, b"Host: h", *plain, *lines, b""))
    short = read_plain(raw)
    if short is None:
        return
    long = read_any(raw)
    names = getattr(Request, "__mypyc_attrs__", None) or Request.__slots__
    assert {name: getattr(short, name) for name in names} == {name: getattr(long, name) for name in names}
