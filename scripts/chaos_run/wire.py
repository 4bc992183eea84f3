"""One HTTP/1.1 exchange per request, on connections that are kept, with clients that misbehave as told.

No task or timer per event: a protocol object collects the body, and what the client does besides waiting hangs on the
read callback or on one `call_later`.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

import httptools

from scripts.chaos_run.asks import Ask

GRACE_S = 3.0  # beyond the request's own deadline, for the machine; an answer after that is late
PATIENCE_S = 40.0  # beyond the deadline; without an answer until then the request hangs
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST


class Ended(StrEnum):
    """How an exchange ended, seen from the client's socket."""

    WHOLE = "whole"  # the framing says that the answer is complete
    CUT = "cut"  # the connection ended before that
    LEFT = "left"  # the client went
    NEVER = "never"  # nothing ended it, long after the deadline
    REFUSED = "refused"  # no connection


@dataclass(slots=True)
class Answer:
    """What came back."""

    ended: Ended = Ended.CUT
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    elapsed_s: float = 0.0
    reason: str = ""


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time. The on_* methods are the parser's callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._parts: list[bytes] = []
        self._events = 0
        self._done: asyncio.Future[None] | None = None
        self._ask: Ask | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self.replied = False

    @property
    def usable(self) -> bool:
        """Whether another exchange may use it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    async def exchange(self, ask: Ask, request: bytes) -> Answer:
        """Send a request and behave as it says."""
        assert self._transport is not None
        loop, behaviour = self._loop, ask.behaviour
        self._ask, self._answer, self._parts, self._events, self.replied = ask, Answer(), [], 0, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = loop.create_future()
        started = loop.time()
        self._timers = [loop.call_later(ask.timeout_s + PATIENCE_S, self._leave, Ended.NEVER)]
        self._transport.write(request[: len(request) * 2 // 3] if behaviour.half_sent else request)
        if behaviour.half_sent:
            self._timers.append(loop.call_later(0.05, self._leave, Ended.LEFT))
        elif behaviour.leave_after_s is not None:
            self._timers.append(loop.call_later(behaviour.leave_after_s, self._leave, Ended.LEFT))
        try:
            await self._done
        finally:
            for timer in self._timers:
                timer.cancel()
            self._read_on()  # the answer may have ended within the read that began the pause
        answer = self._answer
        answer.body = b"".join(self._parts)
        answer.elapsed_s = loop.time() - started
        return answer

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.replied = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Ended.CUT, f"not HTTP: {error}")
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        ask = self._ask
        assert ask is not None
        behaviour = ask.behaviour
        if behaviour.leave_after_events is not None:
            self._events += body.count(b"\n\n")
            if self._events >= behaviour.leave_after_events:
                self._leave(Ended.LEFT)
        elif behaviour.pause_s and self._transport is not None and len(self._parts) == 1:
            self._transport.pause_reading()
            self._timers.append(self._loop.call_later(behaviour.pause_s, self._read_on))

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._end(Ended.WHOLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(Ended.CUT, str(exc) if exc else "closed")

    def _read_on(self) -> None:
        if self.usable:
            assert self._transport is not None
            self._transport.resume_reading()

    def _leave(self, how: Ended) -> None:
        self._end(how)
        transport = self._transport
        if transport is None:
            return
        if self._ask is not None and self._ask.behaviour.reset:
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        else:
            transport.close()

    def _end(self, how: Ended, reason: str = "") -> None:
        if self._done is not None and not self._done.done():
            self._answer.ended, self._answer.reason = how, reason
            self._done.set_result(None)


class Client:
    """Connections to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def send(self, ask: Ask) -> Answer:
        """One exchange. A kept connection that the server had closed meanwhile is replaced once."""
        request = request_bytes(ask, f"{self._host}:{self._port}")
        connection = self._take()
        if connection is not None:
            answer = await connection.exchange(ask, request)
            if answer.ended is not Ended.CUT or connection.replied:
                return self._put_back(connection, ask, answer)
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: Connection(loop), self._host, self._port)
        except OSError as error:
            return Answer(Ended.REFUSED, reason=str(error))
        return self._put_back(connection, ask, await connection.exchange(ask, request))

    def close(self) -> None:
        """Drop the kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    def _put_back(self, connection: Connection, ask: Ask, answer: Answer) -> Answer:
        if answer.ended is Ended.WHOLE and connection.usable and not ask.behaviour.half_sent:
            self._idle.append(connection)
        else:
            connection.close()
        return answer


def request_bytes(ask: Ask, host: str) -> bytes:
    """The request as it goes on the wire."""
    lines = [
        f"{ask.method} {ask.path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(ask.body)}",
        f"X-Request-Id: {ask.id}",
        f"X-Request-Timeout: {ask.timeout_header or ask.timeout_s}",
        *([f"Authorization: Bearer {ask.key}"] if ask.key else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + ask.body
