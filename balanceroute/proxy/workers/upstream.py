"""The connections to one worker: HTTP/1.1 with keep-alive, made for thousands of long streams.

    Upstream --request()--> _Connection (one transport, one parser) --> Reply (status, headers, then bytes)
       ^                                                                  |
       '---- idle stack <---- reply complete and keep-alive allowed ------'

A connection serves one request at a time and is either busy, idle or closed. The idle ones are a stack:
taking and returning is O(1) however many streams run, and the most recently used connection, the least
likely to be closed under our hands, is taken first. One that has been idle for `keepalive_s` is not used
again, and closed when another one becomes idle: uvicorn (so vLLM) closes after 5 s, and a request that crosses that
close is in doubt.

**The request in doubt.** A reused connection that ends before one byte of the reply came is retried once on
a fresh connection. The server had closed it while idle, so it has not seen the request; that is the rule of
RFC 9110 section 9.2.2 for a close "prior to any response", and what Envoy calls reset-before-request. It
cannot be told from a server that took the request and died. For a prefill probe that means: in the worst
case a probe runs twice and its KV stays pinned until the connector's timeout. `retry_stale=False` turns it
off, and takes a connection only if it has been idle for at most `FRESH_S`: a server that is stalled may close one
of 4 s under a request that came in time, but for one of 1 s it would have to be stalled for 4.

**Reading.** Bytes reach the consumer by one of two ways. `next_chunk()` waits and returns everything that
has come since the last call; behind `high_water_bytes` the socket is no longer read, so a slow client holds
back its own worker connection and nothing else. `attach(sink)` hands each read's bytes to a callback at
once, without a task waking up; the sink pauses and resumes by itself. What has come is never lost to an
error: the bytes first, then the error.

**Ends.** A body ends by its length, by its last chunk, or by the close if it has neither. Any other close
is `BadUpstreamReply`: a truncated answer never looks complete. `abort()` closes the socket at once; a vLLM
notices and frees the request.

**Short ways.** A read of a stream is nearly always one whole chunk. Such a read would leave the parser where it was,
between two chunks, so the parser never sees it (`hotpath.ChunkReader`). A short answer is nearly always one read from
status to end; it never gets a parser (`plain_reply`). All else is the parser's business.

Errors of the network leave this module as `ConnectFailed`, `UpstreamTimeout` or `BadUpstreamReply`. The
environment (`http_proxy`) is not consulted; `accept-encoding` is `identity` and a body is passed on as it is.

Pool, connection and reply are one machine in one file: each byte that comes may end the reply, and that end gives the
connection back to the pool or closes it.
"""

import asyncio
import errno
import re
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httptools
from mypy_extensions import mypyc_attr

from balanceroute.errors import (
    BadUpstreamReply,
    CannotConnect,
    ConnectFailed,
    ConnectionLost,
    UpstreamError,
    UpstreamTimeout,
)
from balanceroute.proxy.hotpath import ChunkReader
from balanceroute.proxy.wire.responses import Headers, header_lines
from balanceroute.proxy.workers.addresses import Addresses
from balanceroute.proxy.workers.fair_timeout import FairTimeout

KEEPALIVE_S: Final = 4.0  # below the 5 s after which uvicorn closes an idle connection
FRESH_S: Final = 1.0  # idle time up to which a request that can't be repeated may use a connection
HIGH_WATER_BYTES: Final = 256 * 1024
MAX_IDLE: Final = 4096  # connections to one worker that wait for a request
CONNECT_TIMEOUT_S: Final = 5.0
_OUR_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_STARTS: Final = 16  # request lines kept ready: the router asks a worker for a handful of paths
_OTHER_FIELD: Final = rb"(?!content-length|transfer-encoding|connection|upgrade|trailer)[\w-]+:[^\r\n]*\r\n"
_PLAIN: Final = re.compile(
    rb"HTTP/1\.1 200 [^\r\n]*\r\n((?:%b)*content-length: (\d{1,12})\r\n(?:%b)*)\r\n" % (_OTHER_FIELD, _OTHER_FIELD),
    re.IGNORECASE | re.ASCII,
)
_BODILESS: Final = frozenset(("GET", "HEAD", "DELETE"))
_Error = TypeVar("_Error", bound=UpstreamError)


class Sink(Protocol):
    """Takes a reply's body from within the event loop's read callback; must not block or raise."""

    def chunk(self, data: bytes) -> None:
        """More bytes, never empty."""

    def ended(self, error: UpstreamError | None) -> None:
        """The body is complete (None) or broken; called once, after the last `chunk`."""


class Connections(Protocol):
    """What the router asks of an `Upstream`. Compiled code takes a protocol from anything that has its methods."""

    high_water_bytes: int

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers | bytes = (),
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        first_byte_timeout_s: float | None = None,
        retry_stale: bool = True,
    ) -> "Reply":
        """As `Upstream.request`."""

    def drop_idle(self) -> None:
        """As `Upstream.drop_idle`."""

    def close(self) -> None:
        """As `Upstream.close`."""


@mypyc_attr(native_class=False)
class Upstream:
    """One worker's connections; `worker` and `tier` name it in errors."""

    def __init__(
        self,
        url: str,
        *,
        worker: str = "",
        tier: str = "decode",
        ssl_context: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
        keepalive_s: float = KEEPALIVE_S,
        high_water_bytes: int = HIGH_WATER_BYTES,
        socket_path: str | None = None,
        fresh_s: float = FRESH_S,
    ) -> None:
        """`url` is http(s)://host[:port][/prefix]; IPv6 hosts in brackets. Nothing is connected yet.

        `ssl_context` is for https URLs; a callable is asked for each new connection. `socket_path`: of a unix socket
        that is connected to instead of the URL's host.

        Raises: ValueError: the URL is not of that form.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL with a host")
        self.url = url
        self.worker = worker or url
        self.tier = tier
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._addresses = Addresses(self.host)
        self.high_water_bytes = high_water_bytes
        self._prefix = parts.path.rstrip("/")
        self._ssl: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None
        if parts.scheme == "https":
            self._ssl = ssl_context or ssl.create_default_context()
        self._host_header = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        self._socket_path = socket_path
        self._starts: dict[tuple[str, str], bytes] = {}
        self._keepalive_s = keepalive_s
        self._fresh_s = fresh_s
        self._idle: deque[_Connection] = deque()  # the one that has been idle for longest first
        self._busy: set[_Connection] = set()
        self._closed = False

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def busy_connections(self) -> int:
        """Connections with a request under way."""
        return len(self._busy)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers | bytes = (),
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        first_byte_timeout_s: float | None = None,
        retry_stale: bool = True,
    ) -> "Reply":
        """Send one request; returns when the reply's head is here.

        The caller must read the reply to its end or `abort()` it. Cancelling this call closes the connection.
        `headers` are sent as they are beside host and content-length; they must not frame the message. Who sends the
        same ones often makes their `checked_lines` once.

        Raises: ConnectFailed, UpstreamTimeout, BadUpstreamReply.
        """
        message = self._message(method, path, body, headers)
        while True:
            connection = self._reused(self._keepalive_s if retry_stale else min(self._fresh_s, self._keepalive_s))
            reused = connection is not None
            if connection is None:
                connection = await self._connected(connect_timeout_s)
            self._busy.add(connection)
            reply = connection.send(message)
            try:
                await self._head(reply, first_byte_timeout_s)
            except ConnectFailed:
                if not (reused and retry_stale) or connection.heard:
                    raise
                retry_stale = False
            else:
                return reply

    async def _head(self, reply: "Reply", timeout_s: float | None) -> None:
        """Wait for the reply's head; a reply whose head did not come is aborted."""
        delivered = False
        try:
            if timeout_s is None:
                await reply.head
            else:
                async with asyncio.timeout(timeout_s):
                    await reply.head
            delivered = True
        except TimeoutError as exc:
            raise self.failure(UpstreamTimeout, f"no answer within {timeout_s:g} s") from exc
        finally:
            if not delivered:  # a head that comes in the moment of a cancellation reaches nobody
                reply.abort()

    def drop_idle(self) -> None:
        """Close the connections that wait for a request: one of them may be about to say what nobody asked."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        """Close every connection; replies under way end with `ConnectFailed` or `BadUpstreamReply`."""
        self._closed = True
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        self._idle.clear()

    # ------------------------------------------------------------------------------------ pool

    def _reused(self, idle_s: float) -> "_Connection | None":
        """A connection that has been idle for so long at most."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.loop.time() - connection.idle_since > idle_s:
                connection.abort()  # those below it in the stack are older still
                while idle:
                    idle.pop().abort()
            elif connection.usable:
                return connection
        return None

    async def _connected(self, connect_timeout_s: float) -> "_Connection":
        """A new connection."""
        if self._closed:
            raise self._unsent(ConnectFailed, "the worker has been removed")
        loop = asyncio.get_running_loop()
        limit = FairTimeout(connect_timeout_s)
        try:
            async with limit:
                connection = await self._connect(loop, connect_timeout_s)
        except TimeoutError as exc:
            self._addresses.doubt()
            kind = CannotConnect if limit.ours else ConnectFailed
            raise self._unsent(kind, f"no connection within {connect_timeout_s:g} s") from exc
        except (OSError, ssl.SSLError, UnicodeError) as exc:
            ours = isinstance(exc, OSError) and exc.errno in _OUR_SHORTAGES
            raise self._unsent(CannotConnect if ours else ConnectFailed, f"cannot connect: {exc}") from exc
        return connection

    async def _connect(self, loop: asyncio.AbstractEventLoop, connect_timeout_s: float) -> "_Connection":
        """At the first address that answers; silent ones before the last take less than half of the time."""
        if self._socket_path is not None:
            _, connection = await loop.create_unix_connection(partial(_Connection, self, loop), self._socket_path)
            return connection
        error: OSError | None = None
        addresses = list(await self._addresses.get())
        patience_s = connect_timeout_s / 2 / len(addresses)  # a health check ends after half of its own (`health.py`)
        for left in range(len(addresses), 0, -1):
            address = addresses[-left]
            try:
                async with asyncio.timeout(patience_s if left > 1 else None):
                    connection = await self._connect_to(address, loop)
                if error is not None:
                    self._addresses.prefer(address)
                return connection
            except ssl.SSLError:
                raise
            except OSError as exc:
                if exc.errno in _OUR_SHORTAGES:
                    raise
                error = exc
        self._addresses.doubt()
        assert error is not None, "a name that was found has an address"
        raise error

    async def _connect_to(self, address: str, loop: asyncio.AbstractEventLoop) -> "_Connection":
        context = self._ssl() if callable(self._ssl) else self._ssl
        name = None if context is None else self.host
        _, connection = await loop.create_connection(
            partial(_Connection, self, loop), address, self.port, ssl=context, server_hostname=name
        )
        return connection

    def failure(self, kind: type[_Error], text: str) -> _Error:
        """An error that names the worker."""
        return kind(text, worker=self.worker, tier=self.tier)

    def _unsent(self, kind: type[ConnectFailed], text: str) -> ConnectFailed:
        """A failure before the worker can have seen anything of the request."""
        error = self.failure(kind, text)
        error.sent = False
        return error

    def _message(self, method: str, path: str, body: bytes, headers: Headers | bytes) -> bytes:
        """Head and body as one write."""
        start = self._starts.get((method, path))
        if start is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: ".encode("ascii")
            start = line + self._host_header + b"\r\naccept-encoding: identity\r\n"
            if len(self._starts) < _MAX_STARTS:
                self._starts[method, path] = start
        lines = headers if isinstance(headers, bytes) else checked_lines(headers)
        if body or method not in _BODILESS:
            return b"".join((start, lines, b"content-length: %d\r\n\r\n" % len(body), body))
        return b"%s%s\r\n" % (start, lines)

    def _release(self, connection: "_Connection", *, reusable: bool) -> None:
        """A connection's request is over; called once per request."""
        self._busy.discard(connection)
        idle = self._idle
        while idle and connection.idle_since - idle[0].idle_since > self._keepalive_s:
            idle.popleft().abort()  # a burst has left it, and it would stay below those that are used now
        if reusable and not connection.unsent_bytes and not self._closed and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.abort()


def checked_lines(headers: Headers) -> bytes:
    """Headers as they are sent. Raises: ValueError: one of them holds a line break."""
    lines = header_lines(headers)
    if not lines.count(b"\n") == lines.count(b"\r") == len(headers):
        raise ValueError(f"one of the headers {[name for name, _ in headers]!r} holds a line break")
    return lines


def plain_reply(data: bytes) -> tuple[bytes, bytes] | None:
    """Header lines and body of `data` if that is one 200 of known length, whole and kept alive; else None."""
    plain = _PLAIN.match(data)
    if plain is None:
        return None
    lines, length = plain.groups()
    body = data[plain.end() :]
    return (lines, body) if len(body) == int(length) else None


class _Discard:
    """The sink of a reply whose rest does not matter."""

    def chunk(self, data: bytes) -> None:
        pass

    def ended(self, error: UpstreamError | None) -> None:
        pass


_DISCARD: Final = _Discard()


@mypyc_attr(allow_interpreted_subclasses=True)
class Reply:
    """A worker's answer: `status`, its headers, then its body, once, for one consumer."""

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_headers",
        "_lines",
        "_owner",
        "_parts",
        "_parts_bytes",
        "_paused",
        "_sink",
        "_waiter",
        "head",
        "loop",
        "started",
        "status",
        "undelivered",
    )

    def __init__(self, owner: Upstream, connection: "_Connection") -> None:
        self._owner = owner
        self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines = b""  # headers that nobody has asked for yet
        self.loop = connection.loop  # asking for the running one takes a system call, on every Python before 3.12
        self.head: asyncio.Future[None] = self.loop.create_future()
        self.started = False  # the head is complete
        self.undelivered = False  # a relay dropped events that it had counted
        self._connection: _Connection | None = connection
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: UpstreamError | None = None
        self._paused = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names, in lower case, and values."""
        if self._lines:
            fields = [line.partition(b":") for line in self._lines.split(b"\r\n")[:-1]]
            self._headers = [(name.lower(), value.strip(b" \t")) for name, _, value in fields]
            self._lines = b""
        return self._headers

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        if self._lines and self._lines.lower().find(name) < 0:
            return None
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def buffered_bytes(self) -> int:
        """Body bytes that have come and are not consumed."""
        return self._parts_bytes

    @property
    def paused(self) -> bool:
        """Whether the socket is not read at the moment, because the consumer can't take more."""
        return self._paused

    @property
    def over(self) -> bool:
        """Whether all that the worker will send has come."""
        return self._ended

    async def next_chunk(self) -> bytes | None:
        """All body bytes since the last call, as soon as there are any; None at the end.

        Raises: BadUpstreamReply: the body broke off (after the bytes before it were returned).
        """
        while not self._parts:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    async def read(self, limit: int) -> bytes:
        """The whole body, for answers that are not streamed.

        Raises: BadUpstreamReply: it broke off, or is longer than `limit` bytes; the connection is closed.
        """
        if self._ended and self._error is None and self._parts_bytes <= limit:
            return self._take()
        parts = []
        total = 0
        try:
            while (chunk := await self.next_chunk()) is not None:
                parts.append(chunk)
                total += len(chunk)
                if total > limit:
                    raise self._owner.failure(BadUpstreamReply, f"the body is longer than {limit} bytes")
        except BaseException:
            self.abort()
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def attach(self, sink: Sink) -> None:
        """Give the body to `sink` from now on, first what has come already (all within this call)."""
        self._sink = sink
        if self._connection is not None:
            self._connection.deliver(sink)
        if self._parts:
            sink.chunk(self._take())
        if self._ended:
            self._end_sink()

    def pause(self) -> None:
        """Stop reading the socket: for a sink that cannot take more."""
        if not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self._connection is not None:
            self._connection.resume()
        self._paused = False

    def abort(self) -> None:
        """Close the connection unless the reply is complete: nobody wants the rest. Idempotent."""
        connection = self._connection
        if connection is not None:
            self._connection = None
            self._sink = None
            self._finish(self._owner.failure(ConnectFailed, "the request was aborted by the router"))
            connection.give_up()

    def discard(self, grace_s: float) -> None:
        """The rest does not matter: let the reply end by itself within `grace_s`, else close the connection.

        What is left is read and dropped, so that the connection can serve again.
        """
        if self._connection is None:
            return
        self._sink = _DISCARD
        self._connection.deliver(_DISCARD)
        self._parts.clear()
        self._parts_bytes = 0
        self.resume()
        self.loop.call_later(grace_s, self.abort)

    # ------------------------------------------------------------------------------------ connection's side

    def keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._parts_bytes += len(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if not self._paused and self._parts_bytes > self._owner.high_water_bytes:
            self.pause()

    def _fill(self, lines: bytes, body: bytes) -> None:
        """All of it has come at once, and is a 200."""
        self.status, self._lines = 200, lines
        self.started = self._ended = True
        self._connection = None
        if body:
            self._parts, self._parts_bytes = [body], len(body)
        if not self.head.done():
            self.head.set_result(None)

    def _finish(self, error: UpstreamError | None) -> None:
        """The reply is over, well or not; the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._connection = None
        if not self.head.done():
            if error is None:
                self.head.set_result(None)
            else:
                self.head.set_exception(error)
                self.head.exception()  # a caller that was cancelled will not look at it
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._end_sink()

    def _end_sink(self) -> None:
        """Tell the consumer, and forget it: it knows the reply, and would be freed only where rings are looked for."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.ended(self._error)

    def _take(self) -> bytes:
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._paused:
            self.resume()
        return data


_NOTHING_READ: Final = ChunkReader(lambda data: None)  # of connections that are lost


class _Connection(asyncio.Protocol):
    """One transport to the worker; owns the parser of the reply under way."""

    data_received: Callable[[bytes], None]  # type: ignore[assignment] # the reader's; asyncio names no argument

    __slots__ = (
        "_buffered",
        "_chunk_ended",
        "_framed",
        "_keep_alive",
        "_over",
        "_owner",
        "_parser",
        "_reader",
        "_refused",
        "_silent_bytes",
        "_transport",
        "data_received",
        "heard",
        "idle_since",
        "loop",
        "reply",
    )

    def __init__(self, owner: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._reader = ChunkReader(self.parse)
        self.data_received = self._reader.data_received
        self.reply: Reply | None = None
        self.loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None  # made when the reply needs one
        self._over = False  # the parser has seen the reply's end
        self._buffered: list[bytes] = []
        self._chunk_ended = False  # the last that the parser saw was the end of a chunk's data
        self._framed = False  # the body's end is known from its framing, not from the close
        self._keep_alive = False  # the reply allows another request
        self._silent_bytes = 0  # that have come since the last byte of a body: head, trailers, chunk extensions
        self._refused = ""  # why the parser was stopped
        self.heard = False  # a byte of the reply under way has come
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether a request may be written."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """What of a request its worker has not taken; one that answers before may never take it."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: bytes) -> Reply:
        """Write a request; its reply will fill the returned object."""
        assert self._transport is not None
        self.heard = False
        if self._parser is not None:
            self._parser = None
            self._silent_bytes, self._refused = 0, ""
            self._chunk_ended = self._over = False
        reply = self.reply = Reply(self._owner, self)
        self._reader.take = reply.keep
        self._transport.write(message)
        return reply

    def deliver(self, sink: Sink) -> None:
        """The body goes to `sink` from now on."""
        self._reader.take = sink.chunk

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """The reply is unwanted: close, out of turn."""
        self._forget()
        self._owner._release(self, reusable=False)

    def _forget(self) -> None:
        """The reply under way is over."""
        self.reply = None
        self._reader.release()

    # ------------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def parse(self, data: bytes) -> None:
        reply = self.reply
        if reply is None:  # idle: bytes that answer no request
            self.abort()
            return
        self.heard = True
        parser = self._parser
        if parser is None:
            plain = plain_reply(data)
            if plain is not None:
                self._take(reply, *plain)
                return
            parser = self._parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._over:
                self._fail(self._owner.failure(BadUpstreamReply, self._refused or f"not HTTP: {exc}"))
                return
            self._keep_alive = False  # the answer is complete; what follows it belongs to no request
        buffered = self._buffered
        if buffered:
            body = buffered[0] if len(buffered) == 1 else b"".join(buffered)
            buffered.clear()
            self._reader.take(body)
            self._silent_bytes = 0
        else:
            self._silent_bytes += len(data)
            if self._silent_bytes > MAX_HEAD_BYTES:
                part = "body" if reply.started else "head"
                text = f"more than {MAX_HEAD_BYTES} bytes of the reply's {part} say nothing"
                self._fail(self._owner.failure(BadUpstreamReply, text))
                return
        if self.reply is reply:
            self._reader.between_chunks = self._chunk_ended and data.endswith(b"\r\n")
            if self._over:
                self._complete(reply)

    def _take(self, reply: Reply, lines: bytes, body: bytes) -> None:
        """The whole of a plain reply."""
        self._forget()
        self.idle_since = self.loop.time()
        self._owner._release(self, reusable=True)
        reply._fill(lines, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end_reply(exc)
        self._reader = _NOTHING_READ  # ours knows us, and would keep us until rings are looked for
        self.data_received = _NOTHING_READ.data_received

    def _end_reply(self, exc: Exception | None) -> None:
        """The connection is lost, and with it the reply under way, unless it ends by that."""
        reply = self.reply
        if reply is None:
            return
        how = f": {exc}" if exc else ""
        error: UpstreamError | None = None
        if not reply.started:
            error = self._owner.failure(ConnectFailed, f"the connection closed before the reply{how}")
        elif self._framed:
            error = self._owner.failure(ConnectionLost, f"the connection closed inside the reply{how}")
        elif exc is not None:
            error = self._owner.failure(ConnectionLost, f"the connection broke{how}")
        self._fail(error)

    def _complete(self, reply: Reply) -> None:
        self._forget()
        transport = self._transport
        reusable = self._keep_alive and transport is not None and not transport.is_closing()
        if reusable and reply._paused:
            self.resume()
        self.idle_since = self.loop.time()
        self._owner._release(self, reusable=reusable)
        reply._finish(None)

    def _fail(self, error: UpstreamError | None) -> None:
        """The reply ends with this error, or by its close, and the connection with it."""
        reply = self.reply
        self._forget()
        self._buffered.clear()
        self._owner._release(self, reusable=False)
        if reply is not None:
            reply._finish(error)

    # ------------------------------------------------------------------------------------ parser

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self.reply
        if reply is not None and not reply.started:
            reply.headers.append((name.lower(), value.rstrip(b" \t")))  # the parser leaves what follows a value

    def on_headers_complete(self) -> None:
        reply, parser = self.reply, self._parser
        if reply is None or parser is None or self._over:
            return
        status = parser.get_status_code()
        if 100 <= status < 200:
            reply.headers.clear()
            return
        if not 200 <= status < 600:
            self._refused = f"status {status:03}"
            raise ValueError(self._refused)  # which stops the parser
        reply.status = status
        reply.started = True
        self._keep_alive = parser.should_keep_alive()
        self._framed = status in (204, 304) or any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in reply.headers
        )
        if not reply.head.done():
            reply.head.set_result(None)

    def on_message_begin(self) -> None:
        if self._over:  # bytes after the reply's end belong to no request
            self._keep_alive = False

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = not self._over

    def on_body(self, body: bytes) -> None:
        if not self._over:
            self._buffered.append(body)

    def on_message_complete(self) -> None:
        reply = self.reply
        if reply is not None and reply.started:
            self._over = True  # read by parse, once the last bytes are handed on
