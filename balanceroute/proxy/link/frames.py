"""Frames on a stream socket: a side sends all messages of one turn of its event loop as one frame."""

import asyncio
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar, cast

from balanceroute.proxy.link.messages import HEAD_BYTES, MAX_FRAME_BYTES, LinkError, frame

READ_BYTES: Final = 256 * 1024
MAX_UNSENT_BYTES: Final = 64 * 2**20  # the connection to a peer that leaves more unread is ended

Sent = TypeVar("Sent")


class Frames(asyncio.Protocol, Generic[Sent]):
    """One connection. On the loop, it calls `on_frame` with the body of each frame, and `on_lost` once at the end.

    A LinkError from `on_frame` ends the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[["Frames[Sent]", bytes], None],
        on_lost: Callable[["Frames[Sent]", str], None],
    ) -> None:
        self._loop, self._on_frame, self._on_lost = loop, on_frame, on_lost
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []  # the pieces of an incomplete frame, joined once it is complete
        self._held_bytes, self._needed_bytes = 0, HEAD_BYTES
        self._unsent: list[Sent] = []
        self._flushes = False  # to be sent at the end of this turn
        self._reason = ""  # why this side ends the connection
        self.received_s = self.sent_s = loop.time()

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return self._transport is not None

    @property
    def incomplete(self) -> bool:
        """Whether a part of a frame has come."""
        return self._held_bytes > 0

    @property
    def ended_here(self) -> bool:
        """Whether this side has ended the connection, or is about to."""
        return bool(self._reason)

    @property
    def socket(self) -> socket.socket | None:
        """The socket; None: the transport has none, or is closed."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def left(self) -> bool:
        """Whether the peer has closed the connection; this loop may not have read that yet."""
        end, waits = self.socket, select.poll()
        if end is None:
            return True
        waits.register(end.fileno(), select.POLLRDHUP)
        return bool(waits.poll(0))

    @property
    def far(self) -> bool:
        """Whether the peer is on another machine: only those connections use TLS."""
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    def send(self, message: Sent) -> None:
        """Send a message at the end of the loop's turn, after earlier ones; dropped if the connection is closed."""
        if self._transport is None:
            return
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send the messages of this turn."""
        self._flushes = False
        unsent, transport = self._unsent, self._transport
        if not unsent or transport is None:
            return
        self._unsent = []
        self.sent_s = self._loop.time()
        transport.write(frame(unsent))  # type: ignore[arg-type]  # one of the two kinds of lists
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("it does not read")

    def close(self, reason: str) -> None:
        """Send the messages of this turn, then close."""
        self._reason = reason
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio.Transport

    def data_received(self, data: bytes) -> None:
        """Split the received bytes into frames. O(bytes), however many pieces a frame comes in."""
        self.received_s = self._loop.time()
        self._pieces.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._needed_bytes:
            return
        data, at = b"".join(self._pieces), 0
        try:
            while self._transport is not None and len(data) >= at + self._needed_bytes:
                if self._needed_bytes == HEAD_BYTES:
                    self._needed_bytes = HEAD_BYTES + _size_of(data[at : at + HEAD_BYTES])
                if len(data) >= at + self._needed_bytes:
                    end, self._needed_bytes = at + self._needed_bytes, HEAD_BYTES
                    self._on_frame(self, data[at + HEAD_BYTES : end])
                    at = end
        except LinkError as error:
            self.abort(str(error))
            at = len(data)
        self._pieces, self._held_bytes = [data[at:]], len(data) - at

    def connection_lost(self, error: Exception | None) -> None:
        """End, whichever side closed the connection."""
        if isinstance(error, BrokenPipeError) and not self.far:
            self._read_rest()
        self._transport, self._unsent = None, []
        why = getattr(error, "strerror", None) or str(error or "the connection was closed")
        self._on_lost(self, self._reason or why)

    def _read_rest(self) -> None:
        """Read what the peer sent before it closed: the loop reads no more after a write that failed."""
        end = self.socket
        with suppress(OSError):
            while end is not None and not self._reason and (data := os.read(end.fileno(), READ_BYTES)):
                self.data_received(data)


def _size_of(head: bytes) -> int:
    """The size of a frame's body, from its header. Raises: LinkError: too large."""
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {size} bytes is larger than any may be")
    return size
