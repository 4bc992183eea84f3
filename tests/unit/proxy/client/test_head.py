"""Heads that are read, and heads that are refused with the status that says why."""

import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.client import head as heads
from balanceroute.proxy.client.head import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES, check_beginning, parse_head


def head(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in (*lines, b""))


def refusal(raw: bytes) -> int:
    with pytest.raises(InvalidRequest) as refused:
        parse_head(raw)
    return refused.value.status


GET = b"GET / HTTP/1.1"
POST = b"POST / HTTP/1.1"
HOST = b"host: x"


def test_a_head_is_its_method_target_and_fields() -> None:
    request = parse_head(head(b"POST /a%20b?c=%64 HTTP/1.1", b"Host: x:80", b"X-Odd:\t two words \t", b"x-empty:"))
    assert (request.method, request.path, request.raw_path, request.query) == ("POST", "/a b", b"/a%20b", b"c=%64")
    assert request.headers == [(b"host", b"x:80"), (b"x-odd", b"two words"), (b"x-empty", b"")]
    assert request.keep_alive and not request.http_1_0 and request.length == 0
    assert request.header(b"x-odd") == b"two words" and request.header(b"cookie") is None


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        ((GET, HOST), True),
        ((GET, HOST, b"Connection: Close"), False),
        ((GET, HOST, b"connection: upgrade, close"), False),
        ((GET, HOST, b"connection: keep-alive", b"connection: close"), False),
        ((b"GET / HTTP/1.0",), False),
        ((b"GET / HTTP/1.0", b"connection: keep-alive"), False),
    ],
    ids=["usual", "close", "among-others", "second-field", "1.0", "1.0-keep-alive"],
)
def test_a_connection_is_kept_alive_only_when_both_sides_support_it(lines: tuple[bytes, ...], keep_alive: bool) -> None:
    assert parse_head(head(*lines)).keep_alive is keep_alive


def test_a_body_is_delimited_by_its_length_or_its_coding() -> None:
    assert parse_head(head(POST, HOST, b"content-length: 007")).length == 7
    assert parse_head(head(POST, HOST, b"Transfer-Encoding: Chunked")).length is None
    assert parse_head(head(POST, HOST)).length == 0


@pytest.mark.parametrize(
    "lines",
    [
        (b"content-length: 5", b"transfer-encoding: chunked"),
        (b"transfer-encoding: chunked", b"content-length: 5"),
        (b"content-length: 5", b"content-length: 5"),
        (b"content-length: 5", b"content-length: 6"),
        (b"content-length: 5, 5",),
        (b"content-length: +5",),
        (b"content-length: -5",),
        (b"content-length: 0x5",),
        (b"content-length: 5 5",),
        (b"content-length: 1_0",),
        (b"content-length:",),
        (b"content-length: " + b"9" * 19,),
        (b"content-length: \xb2",),
        (b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
        (b"transfer-encoding: chunked", b"transfer-encoding: identity"),
        (b"transfer-encoding: chunked, chunked2",),
        (b"transfer-encoding: chunked, gzip",),
        (b"transfer-encoding: xchunked",),
        (b"transfer-encoding: chunked;q=1",),
        (b'transfer-encoding: "chunked"',),
        (b"transfer-encoding: \x0bchunked",),
        (b"transfer-encoding:",),
        (b"transfer-encoding : chunked",),
        (b"transfer-encoding\t: chunked",),
        (b"content-length : 5",),
        (b"x: y", b" transfer-encoding: chunked"),
        (b"x: y\n", b"z: a"),
        (b"x: y\rz: a",),
        (b"x: y\x00z",),
        (b"x: y\x7f",),
        (b"no colon",),
        (b": nameless",),
        (b"na me: x",),
        (b"na(me): x",),
        (b"n\xe9: x",),
    ],
    ids=lambda lines: repr(b"|".join(lines)[:40]),
)
def test_a_head_that_two_parsers_could_read_differently_is_refused(lines: tuple[bytes, ...]) -> None:
    assert refusal(head(POST, HOST, *lines)) == 400


@pytest.mark.parametrize(
    "line",
    [
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"GET /  HTTP/1.1",
        b" GET / HTTP/1.1",
        b"GET\t/ HTTP/1.1",
        b"GET / HTTP/1.1\x00",
        b"GET / http/1.1",
        b"GET /a b HTTP/1.1",
        b"GET /#a HTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1",
        b"GET /%zz HTTP/1.1",
        b"GET /%a HTTP/1.1",
        b"GET nowhere HTTP/1.1",
        b"GET ftp://x/ HTTP/1.1",
        b"GET http:///x HTTP/1.1",
        b"GET http://user@x/ HTTP/1.1",
        b"GET /",
        b"GET",
        b"",
        b"G(T / HTTP/1.1",
        b"GET / HTTP/11",
    ],
    ids=repr,
)
def test_a_request_line_is_parsed_strictly(line: bytes) -> None:
    assert refusal(head(line, HOST)) == 400


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((b"BREW / HTTP/1.1", HOST), 405),
        ((b"get / HTTP/1.1", HOST), 405),
        ((b"CONNECT x:80 HTTP/1.1", HOST), 405),
        ((POST, HOST, b"transfer-encoding: gzip, chunked"), 400),
        ((b"GET / HTTP/2.0", HOST), 505),
        ((b"PRI * HTTP/2.0",), 505),
        ((b"GET / HTTP/1.2", HOST), 505),
        ((b"GET / HTTP/0.9",), 505),
        ((POST, HOST, b"expect: coffee"), 417),
        ((GET,), 400),
        ((GET, HOST, b"host: y"), 400),
        ((GET, HOST, HOST), 400),
        ((GET, b"host: x y"), 400),
        ((GET, b"host: x/y"), 400),
        ((GET, b"host: x:y"), 400),
        ((GET, b"host: a@x"), 400),
        ((b"POST / HTTP/1.0", b"transfer-encoding: chunked"), 400),
    ],
    ids=lambda value: repr(b"|".join(value)[:30]) if isinstance(value, tuple) else str(value),
)
def test_a_refused_head_has_the_matching_status(lines: tuple[bytes, ...], status: int) -> None:
    assert refusal(head(*lines)) == status


@pytest.mark.parametrize("host", [b"x", b"x:1", b"", b"[::1]", b"[::1]:80", b"a-b.example.", b"10.0.0.1:65535"])
def test_every_valid_form_of_host_is_accepted(host: bytes) -> None:
    assert parse_head(head(GET, b"host: " + host)).header(b"host") == host


def test_http_1_0_needs_no_host() -> None:
    assert parse_head(head(b"GET / HTTP/1.0")).http_1_0


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [(b"http://a:8/b?c", "/b", b"c"), (b"HTTPS://a", "/", b""), (b"http://a?c", "/", b"c")],
    ids=["path", "bare", "query"],
)
def test_a_target_in_absolute_form_gives_path_and_host(target: bytes, path: str, query: bytes) -> None:
    request = parse_head(head(b"GET %b HTTP/1.1" % target, b"host: other"))
    assert (request.path, request.query) == (path, query)
    assert [value for name, value in request.headers if name == b"host"] in ([b"a:8"], [b"a"])


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.3"])
def test_an_upgrade_header_is_ignored(offer: bytes) -> None:
    lines = (
        b"connection: upgrade, http2-settings",
        b"upgrade: " + offer,
        b"http2-settings: AAMA",
        b"content-length: 3",
    )
    request = parse_head(head(POST, HOST, *lines))
    assert request.length == 3 and request.keep_alive


def test_only_an_http_1_1_client_gets_100_continue() -> None:
    assert parse_head(head(POST, HOST, b"expect: 100-Continue")).expects_continue
    assert not parse_head(head(b"POST / HTTP/1.0", b"expect: 100-continue")).expects_continue


def test_heads_are_taken_up_to_their_bounds_and_refused_beyond() -> None:
    fields = [b"x-%d: y" % n for n in range(MAX_FIELDS - 1)]
    assert len(parse_head(head(GET, HOST, *fields)).headers) == MAX_FIELDS
    assert refusal(head(GET, HOST, *fields, b"z: z")) == 431
    room = MAX_LINE_BYTES - len(b"GET / HTTP/1.1")
    assert parse_head(head(b"GET /%b HTTP/1.1" % (b"a" * room), HOST))
    assert refusal(head(b"GET /%b HTTP/1.1" % (b"a" * (room + 1)), HOST)) == 414
    room = MAX_HEAD_BYTES - len(head(GET, HOST, b"x: "))
    assert parse_head(head(GET, HOST, b"x: " + b"y" * room))
    assert refusal(head(GET, HOST, b"x: " + b"y" * (room + 1))) == 431


@pytest.mark.parametrize("room", [MAX_LINE_BYTES, MAX_LINE_BYTES - 1])
def test_a_request_line_as_long_as_it_may_be_is_taken_in_any_pieces(room: int) -> None:
    raw = head(b"GET /%b HTTP/1.1" % (b"a" * (room - len(b"GET / HTTP/1.1"))), HOST)
    for end in range(MAX_LINE_BYTES - 2, len(raw)):
        check_beginning(raw[:end], max(0, end - 3))
    assert parse_head(raw)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\n", 400),
        (b"GET /a b", 400),
        (b'{"a": 1}', 400),
        (b"GET /" + b"a" * MAX_LINE_BYTES, 414),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES, 431),
        (b"", None),
        (b"\r", None),
        (b"G", None),
        (b"GET /abc HT", None),
        (b"GET /abc HTTP/1.1\r", None),
        (b"GET /abc HTTP/1.1\r\nhost", None),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_bytes_that_cannot_begin_a_head_are_refused_before_its_end(raw: bytes, status: int | None) -> None:
    if status is None:
        check_beginning(raw, 0)
        return
    with pytest.raises(InvalidRequest) as refused:
        check_beginning(raw, 0)
    assert refused.value.status == status


@pytest.mark.parametrize("name", [b"Authorization", b"Cookie", b"Proxy-Authorization", b"X-Api-Key"])
def test_cached_lines_of_heads_contain_no_secret(name: bytes) -> None:
    parse_head(b"GET /kept HTTP/1.1\r\nHost: kept.example\r\n%b: a-secret\r\n\r\n" % name)
    assert b"Host: kept.example" in heads._known_fields
    assert not [line for line in heads._known_fields if b"a-secret" in line]
