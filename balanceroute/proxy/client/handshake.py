"""The TLS handshake of a client's connection: within the edge's limits, and with a deadline.

The listener does not use TLS itself: a server with a TLS context reports a client only after its handshake, so
`max_connections` and deadlines would not bound unfinished ones.

uvloop begins to read as soon as `connection_made` returns, paused or not, so the client's first bytes may come before
`start_tls` has put its own protocol in place. That is an `asyncio.BufferedProtocol`; it gets these bytes before its
`connection_made`, which then reads them.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from balanceroute.proxy.client.edge import Edge

MAX_EARLY_BYTES: Final = 64 * 1024  # bytes of a ClientHello, and of what may follow before an answer
SHUTDOWN_S: Final = 2.0  # for the client's TLS close; until then the connection counts


class Handshake(asyncio.Protocol):
    """Hands its connection over to `protocol` once it is encrypted."""

    def __init__(
        self, edge: Edge, context: ssl.SSLContext, protocol: Callable[[asyncio.Transport], asyncio.Protocol]
    ) -> None:
        """`protocol` makes the protocol of the encrypted connection, from its transport."""
        self._edge, self._context, self._protocol = edge, context, protocol
        self._transport: asyncio.Transport = cast(Any, None)
        self._early = b""  # before the handshake has begun
        self._received = b""  # decrypted bytes right after the handshake
        self._begun = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake of a new connection."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._edge.join(self):
            self.abort()
            return
        self._transport.pause_reading()
        self._task = self._edge.loop.create_task(self._do_handshake())

    def data_received(self, data: bytes) -> None:
        """Keep bytes until the next protocol takes them."""
        if self._begun:
            self._received += data
        else:
            self._early += data
            if len(self._early) > MAX_EARLY_BYTES:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left during the handshake."""
        self._edge.leave(self)

    @property
    def unread_bytes(self) -> int:
        """None: the handshake is no answer."""
        return 0

    def look(self, now: float) -> None:
        """Nothing: the handshake has its own deadline."""

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

    async def _do_handshake(self) -> None:
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
        except OSError:  # all failures of TLS and of the network are OSErrors; no client is left to be told
            self.abort()
            return
        edge.leave(self)
        if transport is None or plain.is_closing():
            return
        protocol = self._protocol(plain)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._received:
            protocol.data_received(self._received)

    def _hand_over_early(self) -> None:
        tls: Any = self._transport.get_protocol()
        early, self._early = self._early, b""
        while early:
            room = memoryview(tls.get_buffer(len(early)))
            size = min(len(room), len(early))
            room[:size] = early[:size]
            tls.buffer_updated(size)
            early = early[size:]
