"""Writes the answer to one request: at once, or a head and then parts, with as few writes as possible.

A head waits for the first part of its body, at most to the end of the loop's turn: a second write wakes the client
twice, and was the most expensive step of a short request.

Nothing here blocks. `write` takes a part, or returns False if the client's socket is full; then await `drained`. Writes
for a client that has gone are dropped; `on_gone` reports it.

A body is framed by its Content-Length if the headers have one, else by chunks, else (HTTP/1.0) by the close.
"""

import asyncio
import http
import re
from collections.abc import Callable
from typing import Final, Protocol

from balanceroute.errors import BalanceRouteError, InvariantError
from balanceroute.proxy.hotpath import PartWriter
from balanceroute.proxy.wire.responses import Headers, header_lines, refusal

_NOT_IN_NAMES: Final = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUES: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS: Final = frozenset((204, 304))


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES: Final = {status: _status_line(status) for status in range(200, 600)}


class Connection(Protocol):
    """What a response needs of the connection that it goes to."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    write_paused: bool

    @property
    def date_line(self) -> bytes:
        """The Date field of a response that is made now."""

    @property
    def receiving(self) -> bool:
        """Whether the request is incomplete: then its response is the connection's last."""

    async def drained(self) -> None:
        """Wait until more may be written, or the connection is lost."""

    def keep(self, more_bytes: int) -> None:
        """Count bytes that are kept of the answer. Raises: EdgeFull."""

    def response_done(self, keep_alive: bool) -> None:
        """The response is complete; called once."""

    def close(self) -> None:
        """Close once everything is written."""


def _not_under_way(body: bytes) -> bool:
    raise InvariantError("a part of a body that is not under way")


# Writer and response form a reference cycle: a response has its own only while parts may be written. These never open.
_NO_PARTS: Final = PartWriter(lambda body: None, _not_under_way)  # for a response without a head, or a complete one
_LOST_PARTS: Final = PartWriter(
    lambda body: None, lambda body: True
)  # for a broken response, or one whose client has gone


class Response:
    """One answer; `keep_alive` says whether the connection may serve another request after it.

    Attributes: `started`: the head is made. `complete`: the body has ended, or was broken off. `gone`: the client has
    left. `on_gone`: called once when it leaves before the answer is complete; check `gone` before you set it.
    `on_last`: called before the last bytes are written, because the client may send its next request then. `refusal`:
    makes the answer to an error, by default in OpenAI's form. `write`: takes a part of the body, not empty and not the
    last; False: the client's socket is full, and nothing was written.
    """

    __slots__ = (
        "_bodiless",
        "_connection",
        "_http_1_0",
        "_left",
        "_over",
        "_parts",
        "_send",
        "complete",
        "gone",
        "keep_alive",
        "on_gone",
        "on_last",
        "refusal",
        "started",
        "write",
    )

    def __init__(self, connection: Connection, *, head_only: bool, http_1_0: bool, keep_alive: bool) -> None:
        self._send: Callable[[bytes], None] = connection.transport.write
        self._parts = _NO_PARTS
        self.write: Callable[[bytes], bool] = _NO_PARTS.write
        self._connection = connection
        self._bodiless, self._http_1_0, self.keep_alive = head_only, http_1_0, keep_alive
        self._left: int | None = None  # bytes left of a body of known length
        self.started = self.complete = self.gone = False
        self.on_gone: Callable[[], None] | None = None
        self.on_last: Callable[[], None] | None = None
        self._over: asyncio.Event | None = None
        self.refusal = refusal

    @property
    def full(self) -> bool:
        """Whether the client's socket takes no part now."""
        return self._connection.write_paused and not self.gone

    # -- for handlers of a request

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response in one write; `headers` are well-formed and have its length."""
        if self.gone:
            return
        if self.started:
            raise InvariantError("a second response to one request")
        self.started = True
        self._is_last()
        self._send(self._head(status, headers) + (b"" if self._bodiless else body))
        self._finish()

    def refuse(self, error: BalanceRouteError, headers: Headers = ()) -> None:
        """An error as its status and an error body."""
        self.respond(*self.refusal(error, headers))

    def start(self, status: int, headers: Headers) -> None:
        """Make the head of a response whose body comes in parts; it is sent with the first part."""
        if self.started:
            raise InvariantError("a second response to one request")
        self.started = True
        if self.gone:
            return
        self._parts = PartWriter(self._send, self._write_other)
        self.write = self._parts.write
        length = next((value for name, value in headers if name == b"content-length"), None)
        if status in _BODILESS:
            self._bodiless = True
        elif length is not None:
            self._left = int(length)
        elif self._http_1_0:
            self._parts.chunked = self.keep_alive = False
        else:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._parts.head = self._head(status, headers)
        self._connection.loop.call_soon(self._flush)
        self.allow()

    def _write_other(self, body: bytes) -> bool:
        """`write`, if the part can't simply be written."""
        if self.gone or self._bodiless:
            return True
        if self._connection.write_paused:
            return False
        if self.complete or self._left is None:
            return _not_under_way(body)
        self._left -= len(body)
        if self._left < 0:
            raise InvariantError("a body longer than its Content-Length")
        self._write(body)
        return True

    def end(self, body: bytes = b"") -> None:
        """Write the last part, even if the client's socket is full."""
        if self.gone:
            return
        if not self.started or self.complete:
            raise InvariantError("the end of a body that is not under way")
        self._is_last()
        if self._bodiless:
            self._write(b"")
        elif self._left is not None:
            self._left -= len(body)
            if self._left:
                raise InvariantError("a body of another length than its Content-Length")
            self._write(body)
        elif self._parts.chunked:
            part = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(part + b"0\r\n\r\n")
        else:
            self._write(body)
        self._finish()

    def break_off(self) -> None:
        """End uncleanly: send what is written, then close the connection inside the body."""
        self._is_last()
        self._flush()
        self._parts.open = False
        self._parts, self.write, self.complete = _LOST_PARTS, _LOST_PARTS.write, True
        self._connection.close()

    async def drained(self) -> None:
        """Wait until the client's socket takes more, or the client has gone."""
        if not self.gone:
            await self._connection.drained()

    def keep(self, more_bytes: int) -> None:
        """Count so many more bytes (or fewer, if negative) that are kept of the answer, until the response is complete.

        Raises: EdgeFull: there is no room for them.
        """
        if not (self.complete or self.gone):
            self._connection.keep(more_bytes)

    async def over(self) -> None:
        """Wait until the response is complete, or the client has gone."""
        if not (self.complete or self.gone):
            self._over = self._over or asyncio.Event()
            await self._over.wait()

    # -- for the connection

    def allow(self) -> None:
        """The client's socket takes more: allow parts, if the response is under way."""
        self._parts.open = (
            self.started
            and not (self.complete or self.gone or self._bodiless or self._connection.write_paused)
            and self._left is None
        )

    def forbid(self) -> None:
        """The client's socket is full."""
        self._parts.open = False

    def lost(self) -> None:
        """The client has gone."""
        self.gone, self._parts.open = True, False
        self._parts, self.write = _LOST_PARTS, _LOST_PARTS.write
        on_gone, self.on_gone, self.on_last = self.on_gone, None, None
        if self._over is not None:
            self._over.set()
        if on_gone is not None:
            on_gone()

    # --

    def _is_last(self) -> None:
        on_last, self.on_last = self.on_last, None
        if on_last is not None:
            on_last()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.keep_alive = self.keep_alive and not self._connection.receiving
        close = b"" if self.keep_alive else b"connection: close\r\n"
        return b"".join((_STATUS_LINES[status], self._connection.date_line, header_lines(headers), close, b"\r\n"))

    def _write(self, data: bytes) -> None:
        head, self._parts.head = self._parts.head, b""
        if head or data:
            self._send(head + data)

    def _flush(self) -> None:
        if self._parts.head and not self.gone:
            self._write(b"")

    def _finish(self) -> None:
        self.complete, self._parts.open, self.on_gone = True, False, None
        self._parts, self.write = _NO_PARTS, _NO_PARTS.write
        if self._over is not None:
            self._over.set()
        self._connection.response_done(self.keep_alive)


def check_headers(headers: Headers) -> None:
    """Check an application's headers. Raises: InvariantError: one would break the response's framing."""
    for name, value in headers:
        if not name or _NOT_IN_NAMES.search(name) or _NOT_IN_VALUES.search(value):
            raise InvariantError(f"the header {name!r} is malformed")
