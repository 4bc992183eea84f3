"""A worker's reply as its consumer sees it: a status, headers, then a body, read once.

Bytes of the body reach the consumer by one of two ways. `next_chunk()` waits and returns everything that has come since
the last call; once `high_water_bytes` wait for the consumer the socket is no longer read, so a slow client holds back
its own worker connection and nothing else. `attach(sink)` hands each read's bytes to a callback at once, without waking
a task; the sink pauses and resumes the reading itself. Bytes that have come are never lost to an error: the consumer
gets the bytes first, then the error.

`abort()` closes the socket at once; a vLLM notices and frees the request.

Answers in one piece are kept until they are complete. Those of one worker may take `Owner.max_read_bytes` together, so
a broken worker does not fill the memory; smaller ones than `SMALL_BYTES` always have room.
"""

import asyncio
from typing import Final, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from balanceroute.errors import ConnectFailed, ReplyTooLarge, UpstreamError

SMALL_BYTES: Final = 2**20
_Error = TypeVar("_Error", bound=UpstreamError)


class Sink(Protocol):
    """Takes a reply's body within the event loop's read callback; must not block or raise."""

    def chunk(self, data: bytes) -> None:
        """More bytes, never empty."""

    def ended(self, error: UpstreamError | None) -> None:
        """The body is complete (None) or broken; called once, after the last `chunk`."""


class Carrier(Protocol):
    """The connection of a reply, as the reply uses it: `connection.Connection`."""

    def deliver(self, sink: Sink) -> None:
        """Hand the body to `sink` from now on."""

    def pause(self) -> None:
        """Stop reading the socket."""

    def resume(self) -> None:
        """Read the socket again."""

    def give_up(self) -> None:
        """Close: the rest of the reply is not needed."""


class Owner(Protocol):
    """The owner of a reply's connection: `upstream.Upstream`.

    Attributes: `read_bytes`: of all its answers that are being read by `Reply.read`; at most `max_read_bytes`.
    """

    high_water_bytes: int
    max_read_bytes: int
    read_bytes: int

    def failure(self, kind: type[_Error], text: str) -> _Error:
        """An error that names the worker."""


class _Discard:
    """A sink that drops the rest of a reply."""

    def chunk(self, data: bytes) -> None:
        pass

    def ended(self, error: UpstreamError | None) -> None:
        pass


_DISCARD: Final = _Discard()


@mypyc_attr(allow_interpreted_subclasses=True)
class Reply:
    """A worker's reply, for one consumer.

    Attributes: `head`: done when status and headers are here. `started`: they are. `over`: it is complete or broken.
    `paused`: reading is paused because the consumer takes no more. `undelivered`: whether a relay of this body dropped
    events whose tokens it had counted; set by the relay (`life/streaming.py`).
    """

    __slots__ = (
        "_connection",
        "_error",
        "_headers",
        "_lines",
        "_owner",
        "_parts",
        "_parts_bytes",
        "_sink",
        "_waiter",
        "head",
        "loop",
        "over",
        "paused",
        "started",
        "status",
        "undelivered",
    )

    def __init__(self, owner: Owner, connection: Carrier, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines = b""  # the raw headers, parsed on first use
        self.loop = loop  # before Python 3.12 `get_running_loop` takes a system call
        self.head: asyncio.Future[None] = self.loop.create_future()
        self.started = False
        self.undelivered = False
        self._connection: Carrier | None = connection
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        self._error: UpstreamError | None = None
        self.paused = False

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

    async def next_chunk(self) -> bytes | None:
        """All body bytes since the last call, as soon as there are any; None at the end.

        Raises: BadUpstreamReply: the body broke off (after the bytes before it were returned).
        """
        while not self._parts:
            if self.over:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    async def read(self, limit: int, *, cut: bool = False) -> bytes:
        """The whole body, for answers that are not streamed.

        `cut`: of a body that is longer than `limit` bytes take the first `limit`, and close the connection.

        Raises: BadUpstreamReply: it broke off. ReplyTooLarge: it is longer than `limit` bytes, or all of this worker's
        that are being read than `max_read_bytes`, and the connection is closed.
        """
        if self.over and self._error is None and self._parts_bytes <= limit:
            return self._take()
        parts = []
        total, owner = 0, self._owner
        try:
            while (chunk := await self.next_chunk()) is not None:
                parts.append(chunk)
                total += len(chunk)
                owner.read_bytes += len(chunk)
                if total > limit and cut:
                    self.abort()
                    return b"".join(parts)[:limit]
                if total > limit:
                    raise owner.failure(ReplyTooLarge, f"the body is longer than {limit} bytes")
                if total > SMALL_BYTES and owner.read_bytes > owner.max_read_bytes:
                    text = f"its answers together are longer than {owner.max_read_bytes} bytes"
                    raise owner.failure(ReplyTooLarge, text)
        except BaseException:
            self.abort()
            raise
        finally:
            owner.read_bytes -= total
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def attach(self, sink: Sink) -> None:
        """Hand the body to `sink` from now on; what has come already is handed over within this call."""
        self._sink = sink
        if self._connection is not None:
            self._connection.deliver(sink)
        if self._parts:
            sink.chunk(self._take())
        if self.over:
            self._end_sink()

    def pause(self) -> None:
        """Stop reading the socket: for a sink that cannot take more."""
        if not self.paused and self._connection is not None:
            self.paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self.paused and self._connection is not None:
            self._connection.resume()
        self.paused = False

    def abort(self) -> None:
        """Close the connection, unless the reply is complete. Idempotent."""
        connection = self._connection
        if connection is not None:
            self._connection = None
            self._sink = None
            self.finish(self._owner.failure(ConnectFailed, "the request was aborted by the router"))
            connection.give_up()

    def discard(self, grace_s: float) -> None:
        """Drop the rest as it comes, so that the connection can serve again; close it after `grace_s`."""
        if self._connection is None:
            return
        self._sink = _DISCARD
        self._connection.deliver(_DISCARD)
        self._parts.clear()
        self._parts_bytes = 0
        self.resume()
        self.loop.call_later(grace_s, self.abort)

    # ------------------------------------------------------------------------------------ called by the connection

    def keep(self, data: bytes) -> None:
        """Keep bytes of the body, because there is no sink."""
        self._parts.append(data)
        self._parts_bytes += len(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if not self.paused and self._parts_bytes > self._owner.high_water_bytes:
            self.pause()

    def begin_and_finish(self, lines: bytes, body: bytes) -> None:
        """Take a whole reply that has come at once: a 200 with these header lines and this body."""
        self.status, self._lines = 200, lines
        self.started = self.over = True
        self._connection = None
        if body:
            self._parts, self._parts_bytes = [body], len(body)
        if not self.head.done():
            self.head.set_result(None)

    def finish(self, error: UpstreamError | None) -> None:
        """Note that the reply is complete (None) or broken; only the first call counts."""
        if self.over:
            return
        self.over = True
        self._error = error
        self._connection = None
        if not self.head.done():
            if error is None:
                self.head.set_result(None)
            else:
                self.head.set_exception(error)
                self.head.exception()  # marks the exception as retrieved: a cancelled caller will not
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._end_sink()

    def _end_sink(self) -> None:
        """Tell the sink. Sink and reply refer to each other: if neither let go, only the garbage collector would free
        them.
        """
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.ended(self._error)

    def _take(self) -> bytes:
        """All bytes of the body that wait for the consumer."""
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self.paused:
            self.resume()
        return data
