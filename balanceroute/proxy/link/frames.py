"""Frames on a stream socket: each side writes at the end of its loop's turn what it has to say, as one frame."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

from balanceroute.proxy.link.messages import HEAD_BYTES, MAX_FRAME_BYTES, LinkError, frame

MAX_UNSENT_BYTES: Final = 64 * 2**20  # a peer that leaves more unread is given up

Said = TypeVar("Said")


class Frames(asyncio.Protocol, Generic[Said]):
    """One connection. `on_frame` gets the body of each frame, `on_lost` the end; both once per event, on the loop.

    What `on_frame` raises as LinkError ends the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[["Frames[Said]", bytes], None],
        on_lost: Callable[["Frames[Said]", str], None],
    ) -> None:
        self._loop, self._on_frame, self._on_lost = loop, on_frame, on_lost
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []  # of a frame that is not whole, put together once
        self._held_bytes, self._needed_bytes = 0, HEAD_BYTES
        self._unsaid: list[Said] = []
        self._flushes = False  # at the end of this turn
        self._reason = "the connection was closed"
        self.heard_s = self.said_s = loop.time()

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return self._transport is not None

    @property
    def socket(self) -> socket.socket | None:
        """What it goes over; None where that is no socket, or it is closed."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def far(self) -> bool:
        """Whether it goes to another machine: that is always under TLS."""
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    def say(self, message: Said) -> None:
        """Send a message at the end of the loop's turn, after earlier ones; dropped if the connection is closed."""
        if self._transport is None:
            return
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)
        self._unsaid.append(message)

    def flush(self) -> None:
        """Send the messages of this turn."""
        self._flushes = False
        unsaid, transport = self._unsaid, self._transport
        if not unsaid or transport is None:
            return
        self._unsaid = []
        self.said_s = self._loop.time()
        transport.write(frame(unsaid))  # type: ignore[arg-type]  # one of the two kinds of lists
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
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Cut what has come into frames. O(bytes), in however many pieces a frame comes."""
        self.heard_s = self._loop.time()
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
        """The end, whoever made it."""
        self._transport, self._unsaid = None, []
        self._on_lost(self, str(error) if error is not None else self._reason)


def _size_of(head: bytes) -> int:
    """Of a frame's body. Raises: LinkError."""
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {size} bytes is larger than any may be")
    return size
