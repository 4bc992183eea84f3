"""What our server does to a client's socket beyond uvicorn: one write for head and body, and a short way for streams.

`HeadAndBody` writes a response's head and its first body bytes together.

uvicorn writes the head when it is told the status, and uvloop sends what is written at once, so a client got two
packets and was woken twice. That second system call was the most expensive single thing in a short request: 14% of its
CPU (py-spy, 32 connections, whole answers of 16 tokens).

`BodyWriter` writes a part of a stream that is neither its first nor its last. An ASGI `send` is a coroutine, a message
and a dozen checks, which for an event of 200 bytes cost more than the write itself; where they would all pass, the
bytes can go straight to the socket. An application finds it in its scope's extensions under `BODY_WRITER`.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BODY_WRITER: Final = "balanceroute.body_writer"


class BodyWriter:
    """Calls write a part of one response's chunked body at once, as `send` with `more_body` would."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport

    def __call__(self, body: bytes) -> bool:
        """Whether `body` (never empty) was written; if not, nothing has happened and `send` is to be used."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


class HeadAndBody:
    """A transport that keeps a response's head back until the next write, or until the end of the loop's turn.

    What is kept back is told by the bytes alone; taking others for a head does no harm, as all leaves within the turn.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Write, together with a head that waits."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
