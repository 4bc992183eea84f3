"""Takes connections from a socket on which other processes accept as well, so that each gets its share.

*Bursts.* An event loop's own server takes all that wait when it wakes: of a burst of 400 connections one of two relays
got 319. Here a relay takes one and then does what else there is to do, and whoever has less to do takes more: 192 and
208. That costs 12 us more for each connection.

*One by one.* The kernel wakes all who wait, but in an order that does not change, so of connections that come when
everybody is idle one of two relays got 26 of 32. They stay where they are: a client's pool keeps them for hours. So a
relay that has many more connections than another leaves what comes to the others, and takes it after `LEAVE_S` if it is
there still. Few are left as they come: a relay carries them with ease, and two that wake up for a part each take more
CPU than one that wakes up for all. Each tells its number in memory that all share (`relay_loads.py`). A number may be
old, where a relay stands still or has died; so who was left a connection takes all that come for `TAKE_S`, and then
looks again.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

PAUSE_S: Final = 1.0  # while no connection can be taken: others may, and descriptors may be given back
LEAVE_S: Final = 0.002  # many times what a wakeup takes
TAKE_S: Final = 0.02  # others lose so little of their share while they are busy, and are not waited for often
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """A listening socket under an event loop; it stands for `asyncio.Server` where that is only closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sock` doesn't block, and is listened on. `ahead`: whether others should take more now."""
        self._loop, self._sock, self._protocol, self._ahead = loop, sock, protocol, ahead
        self.sockets = (sock,)
        self._opening: set[asyncio.Task[object]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._takes_until_s = 0.0
        loop.add_reader(sock, self._ready)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
        if self._resume is not None:
            self._resume.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until every connection that was taken has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _ready(self) -> None:
        if self._loop.time() > self._takes_until_s and self._ahead():
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(LEAVE_S, self._accept_what_is_left)
        else:
            self._accept()

    def _accept_what_is_left(self) -> None:
        self._loop.add_reader(self._sock, self._ready)
        if self._accept():
            self._takes_until_s = self._loop.time() + TAKE_S

    def _accept(self) -> bool:
        """Take one connection; returns whether there was one."""
        try:
            client, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has gone
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            log.warning("no connection can be taken", extra={"error": error.strerror})
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._sock, self._ready)
            return False
        client.setblocking(False)
        opening = self._loop.create_task(self._open(client))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError:
            client.close()  # it has gone meanwhile
