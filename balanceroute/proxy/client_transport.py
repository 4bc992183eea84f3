"""What our server does to a client's socket beyond uvicorn: one write for head and body, and a short way for streams.

`HeadAndBody` writes a response's head and its first body bytes together.

uvicorn writes the head when it is told the status, and uvloop sends what is written at once, so a client got two
packets and was woken twice. That second system call was the most expensive single thing in a short request: 14% of its
CPU (py-spy, 32 connections, whole answers of 16 tokens).

`ClientConnection` is what a request may ask of the connection it came by beyond ASGI; an application finds it in its
scope's extensions under `CLIENT_CONNECTION`. All of it saves what an event or a short request pays most for: an ASGI
`send` is a coroutine, a message and a dozen checks, which cost more than the write itself, `receive` is no less, and
waiting for the disconnect message takes two coroutines, an event and a future.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from balanceroute.proxy.hotpath import PartWriter
from balanceroute.proxy.responses import Headers

CLIENT_CONNECTION: Final = "balanceroute.client_connection"

Watches = dict["ClientConnection", Callable[[], None]]


class ClientConnection(PartWriter):
    """The connection of one request: its body, its response or parts of one at once, word of the client's leaving."""

    __slots__ = ("_watches",)

    def __init__(self, cycle: RequestResponseCycle, watches: Watches) -> None:
        """`watches` are those of all requests of the connection; its protocol calls them when it is lost."""
        super().__init__(cycle)
        self._watches = watches

    def respond(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole response now, as two `send`s would; `headers` have its length, and are well-formed.

        Returns whether it was written; if not, nothing has happened and `send` is to be used.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        fields = b"".join([b"%b: %b\r\n" % field for field in [*cycle.default_headers, *headers]])
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        cycle.response_started = cycle.response_complete = True
        self.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], fields, close, body))
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def body(self) -> bytes | None:
        """The request's body if all of it has come, for once; if not, `receive` is to be used."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Have `on_gone` called when the client disconnects. For when the request's body has been read."""
        if self.cycle.disconnected:
            on_gone()
            return
        self.flow.resume_reading()  # a large body may have paused it, and who doesn't read doesn't see the end
        self._watches[self] = on_gone

    def unwatch(self) -> None:
        """Stop watching. Idempotent."""
        self._watches.pop(self, None)


class HeadAndBody:
    """A transport that keeps a response's head back until the next write, or until the end of the loop's turn.

    What is kept back is told by the bytes alone; taking others for a head does no harm, as all leaves within the turn.
    """

    __slots__ = (
        "_loop",
        "_transport",
        "get_extra_info",
        "head",
        "is_closing",
        "pause_reading",
        "resume_reading",
        "send",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.head = b""  # what is kept back
        self.send = transport.write  # for who has seen that no head waits
        # The rest of what uvicorn's protocol asks a transport for. As attributes: a `__getattr__` would make every
        # other access slow too.
        self.is_closing, self.get_extra_info = transport.is_closing, transport.get_extra_info
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def write(self, data: bytes) -> None:
        """Write, together with a head that waits."""
        if self.head:
            data, self.head = self.head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self.head = data
            self._loop.call_soon(self._flush)
            return
        self.send(data)

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self.head:
            self.send(self.head)
            self.head = b""
