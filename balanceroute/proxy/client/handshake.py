"""A connection that is not encrypted yet: it counts as one of the edge's, gives way as one, and has a deadline.

The listener itself knows nothing of TLS. A server that is given a context shakes hands before anybody here hears of the
client, so that neither `max_connections` nor a deadline of ours would hold for those that never finish.

uvloop begins to read as soon as `connection_made` returns, paused or not, so the client's first bytes may come before
`start_tls` has put its own protocol in place. That one is a buffered protocol (`asyncio.BufferedProtocol`); it is
given them before it is told of the connection, and takes them up when it is.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from balanceroute.proxy.client.edge import Edge

MAX_EARLY_BYTES: Final = 64 * 1024  # of a ClientHello, and what may follow it before an answer
SHUTDOWN_S: Final = 2.0  # for the client's last word of TLS; until then it has its place


class Handshake(asyncio.Protocol):
    """Hands its connection over to `protocol` once it is encrypted."""

    def __init__(
        self, edge: Edge, context: ssl.SSLContext, protocol: Callable[[asyncio.Transport], asyncio.Protocol]
    ) -> None:
        """`protocol` is made of what carries the encrypted connection."""
        self._edge, self._context, self._protocol = edge, context, protocol
        self._transport: asyncio.Transport = cast(Any, None)
        self._early = b""  # before the handshake has begun
        self._come = b""  # plain text right behind its end
        self._begun = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and begins."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._edge.join(self):
            self.abort()
            return
        self._transport.pause_reading()
        self._task = self._edge.loop.create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        """What nobody else takes yet."""
        if self._begun:
            self._come += data
        else:
            self._early += data
            if len(self._early) > MAX_EARLY_BYTES:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left before it was handed over."""
        self._edge.leave(self)

    def look(self, now: float) -> None:
        """The deadline is that of the handshake."""

    def give_way(self) -> None:
        """Another client needs the place."""
        self.abort()

    def shutdown(self) -> None:
        """The server stops."""
        self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._edge.leave(self)
        self._transport.abort()

    async def _shake_hands(self) -> None:
        edge, plain = self._edge, self._transport
        self._begun = True
        if plain.is_closing():
            return
        if self._early:
            edge.loop.call_soon(self._hand_over_early)
        try:
            transport = await edge.loop.start_tls(
                plain,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=edge.limits.receive_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # as every failure of TLS and of the network: nobody is there who could be told
            self.abort()
            return
        edge.leave(self)
        if transport is None or plain.is_closing():
            return
        protocol = self._protocol(plain)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._come:
            protocol.data_received(self._come)

    def _hand_over_early(self) -> None:
        tls: Any = self._transport.get_protocol()
        early, self._early = self._early, b""
        while early:
            room = memoryview(tls.get_buffer(len(early)))
            size = min(len(room), len(early))
            room[:size] = early[:size]
            tls.buffer_updated(size)
            early = early[size:]
