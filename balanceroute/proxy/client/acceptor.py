"""Takes connections from a socket on which other processes accept as well, so that each gets its share.

*Bursts.* An event loop's own server accepts all waiting connections when it wakes: of a burst of 400 one of two relays
got 319. Here a relay accepts one, then does its other work, so a relay with less work accepts more: 192 and 208. That
costs 12 us more per connection.

*One by one.* The kernel wakes all waiting relays, but always in the same order: of connections that came while all were
idle one of two relays got 26 of 32, and a client's pool keeps them for hours. So a relay with many more connections
than another leaves new ones to the others, and accepts one after `LEAVE_S` if it still waits. A small difference is
left: two relays that wake for a part each take more CPU than one that wakes for all. Each relay writes its number of
connections to shared memory (`relay_loads.py`). The number of a stopped or dead relay is stale; so a relay that had to
accept a connection left to others accepts all for `TAKE_S`, and then checks again.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

BACKLOG: Final = 4096  # connections that wait to be accepted
PAUSE_S: Final = 1.0  # before the next try, if no connection can be accepted
LEAVE_S: Final = 0.002  # many times the duration of a wakeup
TAKE_S: Final = 0.02  # short enough that busy relays lose little of their share
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts on a listening socket in an event loop; replaces an `asyncio.Server` that is only closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """`sock` is listening and non-blocking. `ahead`: whether other relays should accept more now."""
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

    def take_rest(self) -> None:
        """Take all connections that wait, before a close after which nobody accepts: the kernel would reset them."""
        while self._sock.fileno() >= 0 and self._accept():
            pass

    @property
    def opening(self) -> bool:
        """Whether an accepted connection has no protocol yet."""
        return bool(self._opening)

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has its protocol."""
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
            log.warning("connections cannot be accepted", extra={"error": error.strerror})
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
            client.close()  # the client has gone meanwhile
