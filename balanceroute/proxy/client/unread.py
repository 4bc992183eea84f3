"""What is written to a client and not taken by its socket; and whether the client reads it fast enough."""

import asyncio

from balanceroute.proxy.client.edge import ClientLimits


class Unread:
    """The unread bytes of one connection."""

    __slots__ = ("_before", "_below", "_dropped", "_transport")

    def __init__(self, transport: asyncio.Transport, below: asyncio.Transport | None) -> None:
        """`below`: the TCP transport under TLS, which buffers what is written; None: plain."""
        self._transport, self._below = transport, below
        self._before: tuple[float, int] | None = None  # a time, and the bytes that were unread then
        self._dropped = False

    @property
    def size(self) -> int:
        """Their number."""
        if self._dropped:  # uvloop counts them for another turn
            return 0
        below = 0 if self._below is None else self._below.get_write_buffer_size()
        return below + self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """The connection is aborted: nobody will read them."""
        self._dropped = True

    def in_time(self) -> None:
        """The client reads fast enough: judge it anew from the next bytes on."""
        self._before = None

    def stalled(self, now: float, limits: ClientLimits) -> bool:
        """Whether too few of them were read in the time that a client has for it."""
        size = self.size
        if not size:
            self._before = None
            return False
        if self._before is None:
            self._before = (now, size)
        since_s, before = self._before
        if now - since_s < limits.stall_timeout_s:
            return False
        self._before = (now, size)
        return before - size < limits.min_rate_bytes_per_s * (now - since_s)
