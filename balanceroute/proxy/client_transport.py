"""What our server does to a client's socket beyond uvicorn: one write for head and body, and a short way for streams.

`HeadAndBody` writes a response's head and its first body bytes together.

uvicorn writes the head when it is told the status, and uvloop sends what is written at once, so a client got two
packets and was woken twice. That second system call was the most expensive single thing in a short request: 14% of its
CPU (py-spy, 32 connections, whole answers of 16 tokens).

`ClientConnection` is what a request may ask of the connection it came by beyond ASGI; an application finds it in its
scope's extensions under `CLIENT_CONNECTION`. Both things save what an event or a short request pays most for: an ASGI
`send` is a coroutine, a message and a dozen checks, which cost more than the write itself, and waiting for the
disconnect message takes two coroutines, an event and a future.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CLIENT_CONNECTION: Final = "balanceroute.client_connection"

Watches = dict["ClientConnection", Callable[[], None]]


class ClientConnection:
    """The connection of one request: parts of its streamed body at once, and word of the client's leaving."""

    __slots__ = ("_cycle", "_flow", "_transport", "_watches")

    def __init__(self, cycle: RequestResponseCycle, watches: Watches) -> None:
        """`watches` are those of all requests of the connection; its protocol calls them when it is lost."""
        self._cycle, self._flow, self._transport, self._watches = cycle, cycle.flow, cycle.transport, watches

    def write(self, body: bytes) -> bool:
        """Write a part (never empty, neither first nor last) of the chunked body now, as `send` would.

        Returns whether it was written; if not, nothing has happened and `send` is to be used.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Have `on_gone` called when the client disconnects. For when the request's body has been read."""
        if self._cycle.disconnected:
            on_gone()
            return
        self._flow.resume_reading()  # a large body may have paused it, and who doesn't read doesn't see the end
        self._watches[self] = on_gone

    def unwatch(self) -> None:
        """Stop watching. Idempotent."""
        self._watches.pop(self, None)


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
