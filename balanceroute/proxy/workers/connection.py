"""One connection to a worker: a transport, with the parser of the reply that comes over it.

A connection serves one request at a time and is either busy, idle or closed. When a reply ends, its pool takes the
connection back (`Pool.release`) or closes it.

**Ends.** A body ends by its length, by its last chunk, or by the close if it has neither. Any other close is a
`ConnectionLost`: a truncated answer never looks complete.

**Ways around the parser.** A read of a stream is nearly always one whole chunk. Such a read would leave the parser
where it was, between two chunks, so the parser never sees it (`hotpath.ChunkReader`). A short answer is nearly always
one read from its status to its end; such an answer never gets a parser (`plain_reply`). The parser gets everything
else.

**One read per turn.** uvloop reads on within a turn of the loop while a worker fills its buffer, up to 8 MiB. Their
events would keep all other streams waiting for a second, so nothing is read after a large read until the next turn.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from balanceroute.errors import BadUpstreamReply, ConnectFailed, ConnectionLost, UpstreamError
from balanceroute.proxy.hotpath import ChunkReader
from balanceroute.proxy.hotpath.events import LARGE_READ_BYTES
from balanceroute.proxy.workers.reply import Owner, Reply, Sink

NO_REPLY: Final = "the connection closed before the reply"
MAX_HEAD_BYTES: Final = 64 * 1024  # also of bytes without body between two parts of one; engines send some hundred
_TLS_ALERT: Final = b"\x15\x03"  # begins what some TLS servers answer to plain HTTP
_OTHER_FIELD: Final = rb"(?!content-length|transfer-encoding|connection|upgrade|trailer)[\w-]+:[^\r\n]*\r\n"
_PLAIN: Final = re.compile(
    rb"HTTP/1\.1 200 [^\r\n]*\r\n((?:%b)*content-length: (\d{1,12})\r\n(?:%b)*)\r\n" % (_OTHER_FIELD, _OTHER_FIELD),
    re.IGNORECASE | re.ASCII,
)
_LOST: Final = ChunkReader(lambda data: None)  # the reader of every connection that is lost


class Pool(Owner, Protocol):
    """The owner of a connection: `upstream.Upstream`."""

    def release(self, connection: "Connection", *, reusable: bool) -> None:
        """Take the connection back; called once per request."""


def plain_reply(data: bytes) -> tuple[bytes, bytes] | None:
    """Header lines and body of `data` if that is one 200 of known length, whole and kept alive; else None."""
    plain = _PLAIN.match(data)
    if plain is None:
        return None
    lines, length = plain.groups()
    body = data[plain.end() :]
    return (lines, body) if len(body) == int(length) else None


class Connection(asyncio.Protocol):
    """One transport, which serves one request at a time, and the parser of the reply under way."""

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
        "idle_since",
        "loop",
        "reply",
        "reply_begun",
    )

    def __init__(self, owner: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._reader = ChunkReader(self.parse)
        self.data_received = self._reader.data_received
        self.reply: Reply | None = None
        self.loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None  # made when the reply needs one
        self._over = False  # the parser has come to the reply's end
        self._buffered: list[bytes] = []  # parts of the body in the read that is being parsed
        self._chunk_ended = False  # the parser's last event was the end of a chunk's data
        self._framed = False  # the body's end is known from its framing, not from the close
        self._keep_alive = False  # the reply allows another request
        self._silent_bytes = 0  # read since the last byte of the body: head, trailers, chunk extensions
        self._refused = ""  # why the parser was stopped
        self.reply_begun = False  # a byte of the reply under way has come
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether a request may be written."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the request that the worker has not taken. A worker that has answered may never take them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: bytes) -> Reply:
        """Write a request; returns its reply, of which nothing has come yet."""
        assert self._transport is not None
        self.reply_begun = False
        if self._parser is not None:
            self._parser = None
            self._silent_bytes, self._refused = 0, ""
            self._chunk_ended = self._over = False
        reply = self.reply = Reply(self._owner, self, self.loop)
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

    def _read_on(self) -> None:
        """Read on in another turn than that of a large read."""
        if self.reply is None or not self.reply.paused:
            self.resume()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """The reply is unwanted: close before its end."""
        self._end_request()
        self._owner.release(self, reusable=False)

    def _end_request(self) -> None:
        """No reply is under way any more."""
        self.reply = None
        self._reader.release()

    # ------------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def parse(self, data: bytes) -> None:
        """Bytes of the worker that `ChunkReader` did not take past the parser."""
        reply = self.reply
        if reply is None:  # the connection is idle: these bytes answer no request
            self.abort()
            return
        self.reply_begun = True
        if len(data) >= LARGE_READ_BYTES:
            self.pause()
            self.loop.call_soon(self._read_on)
        parser = self._parser
        if parser is None:
            plain = plain_reply(data)
            if plain is not None:
                self._complete_at_once(reply, *plain)
                return
            parser = self._parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._over:
                not_http = "its URL is http, and it speaks TLS" if data.startswith(_TLS_ALERT) else f"not HTTP: {exc}"
                self._fail(reply, self._owner.failure(BadUpstreamReply, self._refused or not_http))
                return
            self._keep_alive = False  # the reply is complete; what follows it belongs to no request
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
                self._fail(reply, self._owner.failure(BadUpstreamReply, text))
                return
        if self.reply is reply:
            self._reader.between_chunks = self._chunk_ended and data.endswith(b"\r\n")
            if self._over:
                self._complete(reply)

    def _complete_at_once(self, reply: Reply, lines: bytes, body: bytes) -> None:
        """The reply has come in one read; `lines` are those of its headers."""
        self._end_request()
        self.idle_since = self.loop.time()
        self._owner.release(self, reusable=True)
        reply.begin_and_finish(lines, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end_reply(exc)
        self._reader = _LOST  # the connection's own refers to it: only the garbage collector would free the two
        self.data_received = _LOST.data_received

    def _end_reply(self, exc: Exception | None) -> None:
        """The connection is lost: the reply under way breaks off, or is complete if only the close can end it."""
        reply = self.reply
        if reply is None:
            return
        how = f": {exc}" if exc else ""
        error: UpstreamError | None = None
        if not reply.started:
            error = self._owner.failure(ConnectFailed, f"{NO_REPLY}{how}")
        elif self._framed:
            error = self._owner.failure(ConnectionLost, f"the connection closed inside the reply{how}")
        elif exc is not None:
            error = self._owner.failure(ConnectionLost, f"the connection broke{how}")
        self._fail(reply, error)

    def _complete(self, reply: Reply) -> None:
        """The parser has come to the reply's end, and all of its body is handed on."""
        self._end_request()
        transport = self._transport
        reusable = self._keep_alive and transport is not None and not transport.is_closing()
        if reusable and reply.paused:
            self.resume()
        self.idle_since = self.loop.time()
        self._owner.release(self, reusable=reusable)
        reply.finish(None)

    def _fail(self, reply: Reply, error: UpstreamError | None) -> None:
        """The reply ends with this error (None: its close is its end), and the connection is closed."""
        self._end_request()
        self._buffered.clear()
        self._owner.release(self, reusable=False)
        reply.finish(error)

    # ------------------------------------------------------------------------------------ parser

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self.reply
        if reply is not None and not reply.started:
            reply.headers.append((name.lower(), value.rstrip(b" \t")))  # the parser leaves blanks behind a value

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
            raise ValueError(self._refused)  # stops the parser
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
            self._over = True  # `parse` ends the reply once the last bytes of the body are handed on
