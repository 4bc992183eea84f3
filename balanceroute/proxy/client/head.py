"""Parses a request's head, or refuses it.

`httptools` checks the syntax. What its versions treat differently, and what two parsers might read differently, is
refused here, so that a proxy before the router and a worker behind it read the same message:

    400  a control character, a CR or LF of its own, a folded line, a name or a host that is none, spaces around the
         parts of the request line, no Host or two, a Content-Length that is not one plain number, one beside a
         Transfer-Encoding, a Transfer-Encoding other than chunked, or in HTTP/1.0
    414  a request line above `MAX_LINE_BYTES`
    431  a head above `MAX_HEAD_BYTES`, or with more than `MAX_FIELDS` fields
    417  an Expect other than 100-continue
    405  an unknown method, CONNECT
    505  a version other than HTTP/1.0 and HTTP/1.1

RFC 9110 and 9112 suggest 501 for a method and a coding that are not implemented; clients of the OpenAI API send a
request again after any 5xx, and these would never be served.

Nearly every head is plain: a GET or POST in HTTP/1.1, fields strictly by RFC 9110, in ASCII, none twice, none with a
special meaning. `read_plain` reads it without a parser, with the same result.

An offer to upgrade (h2c, websocket) is ignored, as RFC 9110 section 7.8 allows. The host of a target in absolute form
replaces the Host field (RFC 9112 section 3.2.2).
"""

import re
from typing import Final, TypeVar
from urllib.parse import unquote

import httptools

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.responses import Headers

MAX_LINE_BYTES: Final = 8 * 1024
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 128

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_REQUEST_LINE: Final = re.compile(rb"(%b{1,64}) ([!\"$-~]+) HTTP/([0-9])\.([0-9])\r\n" % _TOKEN)
_BEGINNING: Final = re.compile(rb"\r?\Z|%b{1,64}(?: [!-~]*(?: [HTP/0-9.]*)?)?\r?\Z" % _TOKEN)  # of a request line
_LONE_LF: Final = re.compile(rb"(?<!\r)\n")
_NO_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_PLAIN_LINE: Final = re.compile(rb"(GET|POST) (/[A-Za-z0-9._~!$&'()*+,;=:@/?-]*) HTTP/1\.1")
_PLAIN_FIELD: Final = re.compile(rb"(%b+): ?([!-~](?:[\t -~]*[!-~])?)" % _TOKEN)
_JUDGED: Final = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
_REQUIRED: Final = {b"host": _HOST, b"content-length": _LENGTH, b"connection": re.compile(rb"keep-alive")}
_MAX_KNOWN: Final = 1024  # plain lines that are kept, and the longest of them
_MAX_KNOWN_BYTES: Final = 256
_SECRET: Final = frozenset(
    (b"authorization", b"cookie", b"proxy-authorization", b"x-api-key")
)  # of their request alone
_T = TypeVar("_T")
_ORDINARY: Final = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])  # what a line may hold beside its end


class Request:
    """One request: its head, and its body once that is `complete`.

    Attributes: `path`: decoded, without its query. `headers`: names in lower case. `length`: of the body; None:
    chunked. `body_limit_bytes`: the route's bound below the general one. `peer`, `local`: the connection's two
    addresses, host and port. `scheme`: http or https. `holder`: the client whose share of the memory for bodies it
    takes; empty: the peer. `refusal_headers`: of the edge's own refusal, if ASGI serves the route. `has_room`: it is
    served also where there is no place or room for another one.
    """

    __slots__ = (
        "body",
        "body_limit_bytes",
        "complete",
        "expects_continue",
        "has_room",
        "headers",
        "holder",
        "http_1_0",
        "keep_alive",
        "length",
        "local",
        "method",
        "path",
        "peer",
        "query",
        "raw_path",
        "refusal_headers",
        "scheme",
    )

    def __init__(self, method: str, target: bytes, headers: Headers, *, http_1_0: bool) -> None:
        self.method, self.headers, self.http_1_0 = method, headers, http_1_0
        self.raw_path, _, self.query = target.partition(b"?")
        path = self.raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.length: int | None = 0
        self.keep_alive = not http_1_0
        self.expects_continue = False
        self.body, self.complete = b"", False
        self.body_limit_bytes: int | None = None
        self.peer: tuple[str, int] | None = None
        self.local: tuple[str, int] | None = None
        self.scheme = "http"
        self.holder = ""
        self.has_room = False
        self.refusal_headers: Headers = ()

    def header(self, name: bytes) -> bytes | None:
        """The first value of a field; `name` in lower case."""
        return next((value for field, value in self.headers if field == name), None)


class _Fields:
    """Collects the fields that the parser reports."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))


def check_beginning(raw: bytes, scanned: int) -> None:
    """Refuse a head that is not complete yet as soon as it can't become one; `raw` was looked at up to `scanned`.

    Raises: InvalidRequest.
    """
    line_end = raw.find(b"\r\n", 0, MAX_LINE_BYTES + 2)
    if line_end < 0 and len(raw) > MAX_LINE_BYTES + raw.endswith(b"\r"):  # it may be part of the end
        raise _line_too_long()
    if len(raw) > MAX_HEAD_BYTES:
        raise _head_too_large()
    if _LONE_LF.search(raw, scanned) or (line_end < 0 and not _BEGINNING.match(raw)):
        raise InvalidRequest("This is not an HTTP request.")


def path_asked(raw: bytes) -> str:
    """The path in the first line of `raw`, if it has one; it selects the form of the refusal."""
    words = raw[:MAX_LINE_BYTES].split(b"\r\n", 1)[0].split(b" ")
    return words[1].partition(b"?")[0].decode("latin-1") if len(words) > 1 else ""


def parse_head(raw: bytes) -> Request:
    """The request of a complete head; `raw` ends with its empty line.

    Raises: InvalidRequest: with the status that says why.
    """
    if len(raw) > MAX_HEAD_BYTES:
        raise _head_too_large()
    return read_plain(raw) or read_any(raw)


# a cache of plain lines: clients repeat them
_known_lines: dict[bytes, tuple[str, bytes]] = {}
_known_fields: dict[bytes, tuple[bytes, bytes]] = {}


def read_plain(raw: bytes) -> Request | None:
    """Parse a head that is plain in every line; None: it is not, so use `read_any`."""
    lines = raw.split(b"\r\n")
    line = _known_lines.get(lines[0]) or _plain_line(lines[0])
    n_fields = len(lines) - 3  # the empty line leaves two behind it
    if line is None or not 0 < n_fields <= MAX_FIELDS or lines[-1] or lines[-2]:
        return None
    headers: list[tuple[bytes, bytes]] = []
    for index in range(1, n_fields + 1):
        field = _known_fields.get(lines[index]) or _plain_field(lines[index])
        if field is None:
            return None
        headers.append(field)
    by_name = dict(headers)
    if len(by_name) != n_fields or b"host" not in by_name or not _JUDGED.isdisjoint(by_name):
        return None
    request = Request(line[0], line[1], headers, http_1_0=False)
    request.length = int(by_name.get(b"content-length", b"0"))
    return request


def _plain_line(line: bytes) -> tuple[str, bytes] | None:
    """Method and target of a plain request line."""
    plain = _PLAIN_LINE.fullmatch(line) if len(line) <= MAX_LINE_BYTES else None
    if plain is None:
        return None
    asked = (plain[1].decode(), plain[2])
    _keep(_known_lines, line, asked)
    return asked


def _plain_field(line: bytes) -> tuple[bytes, bytes] | None:
    """Name and value of a plain field."""
    plain = _PLAIN_FIELD.fullmatch(line)
    if plain is None:
        return None
    name, value = plain[1].lower(), plain[2]
    required = _REQUIRED.get(name)
    if required is not None and not required.fullmatch(value):
        return None
    if name not in _SECRET:
        _keep(_known_fields, line, (name, value))
    return name, value


def _keep(known: dict[bytes, _T], line: bytes, meaning: _T) -> None:
    if len(line) > _MAX_KNOWN_BYTES:
        return
    if len(known) >= _MAX_KNOWN:
        known.clear()  # a client sends ever new lines; common ones return with the next requests
    known[line] = meaning


def read_any(raw: bytes) -> Request:
    """The request of any head. Raises: InvalidRequest."""
    line = _REQUEST_LINE.match(raw)
    if raw.find(b"\r\n") > MAX_LINE_BYTES:
        raise _line_too_long()
    line_ends = raw.translate(None, _ORDINARY)
    n_lines = raw.count(b"\r\n")
    if line is None or len(line_ends) != 2 * n_lines or b"\n " in raw or b"\n\t" in raw:
        raise InvalidRequest("This is not an HTTP request.")
    if n_lines - 2 > MAX_FIELDS:
        raise InvalidRequest(f"The request has more than {MAX_FIELDS} header fields.", status=431)
    method, target, major, minor = line.groups()
    if major != b"1" or minor not in b"01":
        raise InvalidRequest("The router speaks HTTP/1.1 and HTTP/1.0.", status=505)
    if method == b"CONNECT":
        raise InvalidRequest("CONNECT is not served: the router is not a tunnel.", status=405)
    headers = _parsed(raw)
    request = Request(method.decode(), *_targeted(target, headers, required=minor == b"1"), http_1_0=minor == b"0")
    _read_fields(request)
    return request


def _parsed(raw: bytes) -> Headers:
    fields = _Fields()
    try:
        httptools.HttpRequestParser(fields).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an offer that is not taken up; the head has been read
    except httptools.HttpParserInvalidMethodError:
        raise InvalidRequest("The method is not served.", status=405) from None
    except httptools.HttpParserError as error:
        raise InvalidRequest(f"This is not an HTTP request: {error}.") from None
    if any(not name or b" " in name for name, _ in fields.headers):  # older parsers let them pass
        raise InvalidRequest("The request has a header field with an invalid name.")
    return fields.headers


def _targeted(target: bytes, headers: Headers, *, required: bool) -> tuple[bytes, Headers]:
    """The target in origin form, and the fields with the host that the target names, if it does."""
    absolute = None
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None and target != b"*":
            raise InvalidRequest("The request's target is neither a path nor an http URL.")
    if absolute is not None:
        host, target = absolute.groups()
        if not host or b"@" in host:
            raise InvalidRequest("The request's target has no valid host.")
        target = target if target.startswith(b"/") else b"/" + target
        _check_host(headers, required=required)
        headers = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    if _NO_ESCAPE.search(target):
        raise InvalidRequest("The request's target has a % without two hexadecimal digits.")
    return target, headers


def _check_host(headers: Headers, *, required: bool) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (required and not hosts):
        raise InvalidRequest("A request must have one Host field, and no second one.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidRequest("The Host field is not a valid host.")


def _read_fields(request: Request) -> None:
    """Read framing and connection handling from the fields."""
    lengths, codings = [], []
    options: bytes = b""
    for name, value in request.headers:
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
        elif name == b"connection":
            options += b"," + value
        elif name == b"expect" and not request.http_1_0:
            if value.lower() != b"100-continue":
                raise InvalidRequest("The only value of Expect that is served is 100-continue.", status=417)
            request.expects_continue = True
    _check_host(request.headers, required=not request.http_1_0)
    if options:
        connection_options = [option.strip(b" \t").lower() for option in options.split(b",")]
        request.keep_alive = request.keep_alive and b"close" not in connection_options
    if codings:
        _check_codings(request, codings, lengths)
        request.length = None
    elif lengths:
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise InvalidRequest("Content-Length must be one number of decimal digits.")
        request.length = int(lengths[0])


def _check_codings(request: Request, codings: list[bytes], lengths: list[bytes]) -> None:
    if lengths or request.http_1_0 or len(codings) > 1:
        raise InvalidRequest("A body needs a Content-Length or, in HTTP/1.1, one Transfer-Encoding, not both.")
    coding = codings[0].lower()
    if coding != b"chunked":
        raise InvalidRequest("The only transfer coding that the router takes is chunked.")


def _line_too_long() -> InvalidRequest:
    return InvalidRequest(f"The request line is longer than {MAX_LINE_BYTES} bytes.", status=414)


def _head_too_large() -> InvalidRequest:
    return InvalidRequest(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", status=431)
