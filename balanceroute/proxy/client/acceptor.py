"""Takes connections from a socket on which other processes accept as well: one at a time, so that each gets some.

An event loop's own server takes all that wait when it wakes: of a burst of 400 connections one of two relays got 319.
Here a relay takes one and then does what else there is to do, and whoever has less to do takes more: 192 and 208. That
costs 12 us more for each connection.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

PAUSE_S: Final = 1.0  # while no connection can be taken: others may, and descriptors may be given back
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """A listening socket under an event loop; it stands for `asyncio.Server` where that is only closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """`sock` doesn't block, and is listened on."""
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self.sockets = (sock,)
        self._opening: set[asyncio.Task[object]] = set()
        self._resume: asyncio.TimerHandle | None = None
        loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Take no more. Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
        if self._resume is not None:
            self._resume.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until every connection that was taken has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        try:
            client, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            log.warning("no connection can be taken", extra={"error": error.strerror})
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._sock, self._accept)
            return
        client.setblocking(False)
        opening = self._loop.create_task(self._open(client))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError:
            client.close()  # it has gone meanwhile
