"""A minimal streaming HTTP/1.1 client for one endpoint, for measurements: few microseconds per event.

General clients cost 1.7 ms of CPU per request and 70-280 us per event of a stream (measured with httpx
0.28), more than the router under test. Here httptools parses, the body is never decoded while it streams,
and an event costs one count of lines of data (comments that keep a connection alive are none) and one time stamp. The
end of each stream is kept and parsed once, when the stream is over.

One `Connection` carries one exchange at a time. A reused connection that the server closed before the first
byte of an answer is replaced once by a fresh one; nothing else is retried, because a retry would hide a
failure from the report.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

from balanceroute.errors import InputError

TAIL_BYTES = 8192  # enough for the last token, the usage and the end marker of a stream
DOCUMENT_BYTES = 1 << 20  # bytes of a fetched body, such as a list of models
EVENT_DATA = b"\ndata:"  # one line an event, whichever of the line ends of SSE it has
HEADER_TEXT = re.compile(r"[!-~]+")  # what a header's value takes everywhere, also in config.values


class ExchangeFailed(Exception):
    """The connection broke or could not be made; `before_reply` tells whether any byte of an answer had come."""

    def __init__(self, reason: str, *, before_reply: bool) -> None:
        super().__init__(reason)
        self.before_reply = before_reply


@dataclass(slots=True)
class Reply:
    """The reply to a request: status, times of the events, and the last bytes of the body."""

    status: int = 0
    event_times_s: list[float] = field(default_factory=list)  # one entry per event of data, by `monotonic`
    tail: bytes = b""  # the whole body where it is short


class Connection(asyncio.Protocol):
    """One connection to the endpoint; the methods named on_* are called by the parser."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.reply = Reply()
        self.done: asyncio.Future[Reply] | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0.0
        self.replying = False  # whether any byte of an answer has come
        self.begun = b"\n"  # what may be the first part of EVENT_DATA
        self.keep_bytes = TAIL_BYTES

    @property
    def reusable(self) -> bool:
        """Whether another exchange may use the connection."""
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes, so there is nothing to check
        self.transport = cast(asyncio.Transport, transport)

    def exchange(self, request: bytes) -> asyncio.Future[Reply]:
        """Send a request; the future ends with its whole reply."""
        assert self.transport is not None
        self.reply = Reply()
        self.keep_bytes = DOCUMENT_BYTES if request.startswith(b"GET ") else TAIL_BYTES
        self.parser = httptools.HttpResponseParser(self)
        self.replying, self.begun = False, b"\n"
        self.done = self.loop.create_future()
        self.transport.write(request)
        return self.done

    def close(self) -> None:
        """Drop the connection, whatever is under way on it."""
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.now = monotonic()  # uvloop's own clock counts milliseconds
        self.replying = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")
            self.close()

    def on_body(self, body: bytes) -> None:
        reply = self.reply
        text = self.begun + body
        events = text.count(EVENT_DATA)
        start = text.rfind(b"\n", -len(EVENT_DATA) + 1)
        self.begun = text[start:] if start >= 0 else b""
        if events:
            reply.event_times_s.extend([self.now] * events)
        reply.tail = body if len(body) >= self.keep_bytes else (reply.tail + body)[-self.keep_bytes :]

    def on_message_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()
        if not self.parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        if self.done is not None and not self.done.done():
            self.done.set_result(self.reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.fail(f"connection lost: {exc}" if exc else "connection closed before the end of the answer")

    def fail(self, reason: str) -> None:
        """End the exchange under way, if any."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(ExchangeFailed(reason, before_reply=not self.replying))


class Client:
    """Connections to one endpoint, the most recently used first."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = checked(base_url)
        self.loop = asyncio.get_running_loop()
        self.idle: list[Connection] = []
        lines = {"Host": self.url.netloc, "Content-Type": "application/json", **(headers or {})}
        self.head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a JSON body; returns when the answer, streamed or not, is whole. Raises: ExchangeFailed."""
        return await self.request("POST", path, body)

    async def get(self, path: str) -> Reply:
        """Fetch a document. Raises: ExchangeFailed."""
        return await self.request("GET", path, b"")

    async def request(self, method: str, path: str, body: bytes) -> Reply:
        """One exchange, on an idle connection where there is one."""
        target = self.url.path.rstrip("/") + path
        head = f"{method} {target} HTTP/1.1\r\n{self.head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while (connection := self.take_idle()) is not None:
            try:
                return await self.exchange(connection, request)
            except ExchangeFailed as error:
                if not error.before_reply:
                    raise
        return await self.exchange(await self.connect(), request)

    def take_idle(self) -> Connection | None:
        """The most recently used connection that is still open."""
        while self.idle:
            connection = self.idle.pop()
            if connection.reusable:
                return connection
        return None

    async def exchange(self, connection: Connection, request: bytes) -> Reply:
        """One exchange on a given connection, which goes back to the idle ones if it can."""
        try:
            reply = await connection.exchange(request)
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.reusable:
            self.idle.append(connection)
        return reply

    async def connect(self) -> Connection:
        """Open a connection. Raises: ExchangeFailed."""
        secure = self.url.scheme == "https"
        try:
            _, connection = await self.loop.create_connection(
                lambda: Connection(self.loop),
                self.url.hostname or "",
                self.url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        except OSError as error:
            raise ExchangeFailed(f"cannot connect: {error.strerror or error}", before_reply=True) from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self.idle:
            connection.close()
        self.idle.clear()


def checked(base_url: str) -> SplitResult:
    """The parts of an http or https URL. Raises: InputError."""
    try:
        url = urlsplit(base_url)
        host = (url.hostname or "").encode("idna")
        usable = url.scheme in {"http", "https"} and bool(host) and (url.port is None or url.port > 0)
    except ValueError:  # a port that is not a number, half an IPv6 address, a name with an empty or too long part
        usable = False
    if not usable or not HEADER_TEXT.fullmatch(base_url):
        raise InputError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000")
    if "@" in url.netloc:  # not shown: it is in the log of whatever runs this
        raise InputError("the URL: leave out user and password; what is sent as authorisation is an option of its own")
    if url.query or url.fragment:
        raise InputError(f"{base_url!r}: leave out the {'query' if url.query else 'fragment'}, it would not be sent")
    if url.path.rstrip("/").endswith("/v1"):
        raise InputError(f"{base_url!r}: leave out /v1, it is added")
    return url


def checked_secret(name: str, value: str | None) -> None:
    """Raises: InputError: it cannot go into a header."""
    if value is not None and not HEADER_TEXT.fullmatch(value):
        raise InputError(f"{name}: accepted are printable ASCII characters without spaces, at least one")
