"""A response's head and its first body bytes in one write.

uvicorn writes the head when it is told the status, and uvloop sends what is written at once, so a client got two
packets and was woken twice. That second system call was the most expensive single thing in a short request: 14% of its
CPU (py-spy, 32 connections, whole answers of 16 tokens).
"""

import asyncio
from typing import Any


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
