"""What a client has sent and is not parsed yet: the beginning of a request, or what waits behind the one under way.

While bytes wait, `Edge` counts them with those of bodies. Where too many wait, the socket is not read. Behind the last
request that is served, what has come is dropped, and so is what follows.
"""

import asyncio
import re
from typing import Final

from balanceroute.proxy.client.edge import Edge
from balanceroute.proxy.client.head import Request, check_beginning, parse_head

MAX_WAITING_BYTES: Final = 64 * 1024  # behind the request under way; then the socket is not read
_BLANK_LINES: Final = re.compile(rb"(?:\r\n)+")


class Inbox:
    """The bytes in `raw`.

    Attributes: `counted_bytes`: as `Edge` has them. `paused`: the socket is not read. `dropping`: none are kept
    any more. `dropped_bytes`: that came since then.
    """

    __slots__ = ("_edge", "_scanned", "_transport", "counted_bytes", "dropped_bytes", "dropping", "paused", "raw")

    def __init__(self, edge: Edge, transport: asyncio.Transport) -> None:
        self._edge, self._transport = edge, transport
        self.raw = b""
        self.counted_bytes = 0
        self._scanned = 0  # bytes of an incomplete head that were searched for its end
        self.paused = self.dropping = False
        self.dropped_bytes = 0

    def take_head(self) -> Request | None:
        """Take a head, if one has come whole. Raises: InvalidRequest: it is none, or can't become one."""
        raw = self.raw
        if not self._scanned and (blank := _BLANK_LINES.match(raw)):
            raw = self.raw = raw[blank.end() :]  # some clients send a blank line after a body (RFC 9112 section 2.2)
        end = raw.find(b"\r\n\r\n", self._scanned) + 4
        if end < 4:
            check_beginning(raw, self._scanned)
            self._scanned = max(0, len(raw) - 3)
            return None
        request = parse_head(raw[:end])
        self.raw, self._scanned = raw[end:], 0
        return request

    def count(self, size: int) -> None:
        """Count so many of the bytes as waiting."""
        if size != self.counted_bytes:
            self._edge.incoming_bytes += size - self.counted_bytes
            self.counted_bytes = size

    @property
    def many(self) -> bool:
        """Whether more bytes wait than may."""
        return len(self.raw) > MAX_WAITING_BYTES

    def bound(self) -> None:
        """Read the socket, unless too many bytes wait."""
        if self.many is not self.paused:
            self.paused = not self.paused
            if self.paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def drop(self) -> None:
        """Drop what has come and what will."""
        self.dropping = True
        self.forget()
        self.bound()

    def forget(self) -> None:
        """Drop what has come."""
        self.raw = b""
        self.count(0)
