"""Look-ups of workers' host names, which survive outages of the name server.

A name is looked up once per `FRESH_S` at most, for all waiting connections together: a look-up costs as much as a
connection. While a look-up fails or takes long, the last addresses are used, as in Envoy, so an outage of the cluster's
DNS takes no worker out. If the addresses refuse connections, the name is looked up again at once, because a restarted
pod has another address. If the name is gone by then, the addresses are dropped: another pod may have them. Of several
addresses the last one that answered comes first, so that health checks do not wait for a silent one.

Each look-up has a thread of its own. A name server that is silent holds one for 10 s and more: in a pool the other
names would wait for a free thread, and the process could not end before the last one in the queue.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Iterable
from threading import Thread
from typing import Final

from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

FRESH_S: Final = 5.0
PATIENCE_S: Final = 1.0  # for a look-up, if older addresses are known
_GONE: Final = (socket.EAI_NONAME, socket.EAI_NODATA)  # answers of name servers; EAI_AGAIN: none could tell


class Addresses:
    """The addresses of one host, a name or itself an address."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known = [host] if _is_address(host) else []
        self._fresh_until_s = float("inf") if self._known else float("-inf")
        self._lookup: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._trouble = Trouble(log, "name not found: its last addresses are used", "name found again")
        self._preferred = ""

    def prepare(self) -> None:
        """Begin to look the name up, so that its addresses are known if no name server answers later."""
        if not self._known and self._lookup is None:
            self._lookup = asyncio.get_running_loop().create_task(self._look())

    async def get(self) -> list[str]:
        """All addresses, in the system's order, but the preferred one first.

        Raises: OSError, UnicodeError: no address is known.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._fresh_until_s:
            return self._known
        if self._lookup is None or self._lookup.done():
            self._lookup = loop.create_task(self._look())
        await asyncio.wait((self._lookup,), timeout=PATIENCE_S if self._known else None)
        if not self._known:
            assert self._error is not None, "a lookup finds addresses or fails"
            raise self._error
        if not self._lookup.done():
            self._keep(loop, "no answer")
        return self._known

    def prefer(self, address: str) -> None:
        """Put an address first, because it answered where others did not."""
        self._preferred = address
        self._known = self._in_order(self._known)

    def _in_order(self, addresses: Iterable[str]) -> list[str]:
        return sorted(addresses, key=lambda address: address != self._preferred)

    def doubt(self) -> None:
        """Look the name up before the next connection: no address could be reached."""
        if self._fresh_until_s < float("inf"):
            self._fresh_until_s = float("-inf")

    @property
    def _in_doubt(self) -> bool:
        return self._fresh_until_s == float("-inf")

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await look_up(self._host)
        except (OSError, UnicodeError) as error:
            self._error = error
            if self._in_doubt and isinstance(error, socket.gaierror) and error.errno in _GONE:
                self._known = []
            elif self._known:
                self._keep(loop, getattr(error, "strerror", None) or str(error))
            return
        self._trouble.end(host=self._host)
        self._known = self._in_order(found)
        self._fresh_until_s = loop.time() + FRESH_S

    def _keep(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """Keep the known addresses after a failed look-up."""
        self._trouble.begin(host=self._host, error=reason)
        self._fresh_until_s = loop.time() + FRESH_S


async def look_up(host: str) -> list[str]:
    """The addresses of a name, by the system. Raises: OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def take(found: list[str], error: Exception | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def ask() -> None:
        found, failed = list[str](), None
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(take, found, failed)

    try:
        Thread(target=ask, name="look-up", daemon=True).start()  # the process ends without it
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, "no thread can be started") from error
    return await answer


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
