"""The brain's end of the link to other machines: TLS 1.3, where both sides show a certificate of the link's own CA.

A peer has `HANDSHAKE_S` for its handshake, and `MAX_HANDSHAKES` may be in one at a time; nothing that a peer without a
certificate sends is read as a frame. A peer with one is a process of the router: it joins as a relay, or passes on
operators' requests that its relay has let through. ALPN tells which.

A far relay (of another machine) has no file here, by which a new brain could see that it runs. So a brain writes down
the names of its far members, and the next brain of this machine waits for them.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from balanceroute.proxy.link.files import replace_content
from balanceroute.proxy.perimeter.tls import LINK

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 3.0
MAX_HANDSHAKES: Final = 64  # peers that have not shown a certificate yet; at one more, the oldest is dropped
BACKLOG: Final = 1024
PAUSE_S: Final = 1.0  # before the next try, if no connection can be accepted
LOG_EVERY_S: Final = 10.0  # between two log lines about refused peers

Protocols = Callable[[], asyncio.Protocol]


class FarListener:
    """Accepts connections of other machines that have a certificate."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        context: Callable[[], ssl.SSLContext],
        link: Protocols,
        operators: Protocols,
    ) -> None:
        """Listen on `sock`, which is bound. `context` is asked for each connection; `link` and `operators` make the
        protocols of those that are let in. Raises: OSError: somebody else listens there.
        """
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop, self._sock, self._context = loop, sock, context
        self._link, self._operators = link, operators
        self.sockets = (sock,)
        self._handshakes: dict[asyncio.Task[None], str] = {}  # handshakes under way: their peers' hosts, oldest first
        self._resume: asyncio.TimerHandle | None = None
        self._refused, self._logged_s = 0, loop.time() - LOG_EVERY_S
        loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more, and have the kernel refuse who comes: others hold this socket open for the next brain, and a
        relay would wait for an answer instead of trying the next address. Idempotent.
        """
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            with suppress(OSError):  # another brain has done so
                self._sock.shutdown(socket.SHUT_RDWR)
        if self._resume is not None:
            self._resume.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        try:
            peer, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the peer has gone
        except OSError as error:
            log.warning("connections cannot be accepted", extra={"error": error.strerror})
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(PAUSE_S, self._accept_again)
            return
        peer.setblocking(False)
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._give_way()
        task = self._loop.create_task(self._let_in(peer, str(address[0])))
        self._handshakes[task] = str(address[0])
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def _accept_again(self) -> None:
        with suppress(OSError):  # if that fails, so does the next `accept`
            self._sock.listen(BACKLOG)  # a former brain that was stopped has ended by now, and closed its own
        self._loop.add_reader(self._sock, self._accept)

    def _give_way(self) -> None:
        """End the oldest handshake: a genuine one takes some milliseconds, so it is hardly ever the oldest of many."""
        oldest = next(iter(self._handshakes))
        self._refuse(self._handshakes.pop(oldest), "too many handshakes at a time")
        oldest.cancel()

    async def _let_in(self, peer: socket.socket, host: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: _LetIn(self._link, self._operators),
                peer,
                ssl=self._context(),
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except asyncio.CancelledError:
            peer.close()
            raise
        except OSError as error:  # all failures of TLS and of the network are OSErrors
            peer.close()
            self._refuse(host, _reason(error))

    def _refuse(self, host: str, reason: str) -> None:
        """Log a refusal, at most every `LOG_EVERY_S`."""
        self._refused += 1
        now = self._loop.time()
        if now - self._logged_s >= LOG_EVERY_S:
            log.warning(
                "connections to listen.link refused", extra={"count": self._refused, "last": host, "reason": reason}
            )
            self._refused, self._logged_s = 0, now


def _reason(error: OSError) -> str:
    """Why a handshake failed: OpenSSL's name for it, and what is wrong with the certificate."""
    name = getattr(error, "reason", None) or str(error) or type(error).__name__
    return f"{name}: {error.verify_message}" if isinstance(error, ssl.SSLCertVerificationError) else name


class _LetIn(asyncio.Protocol):
    """The protocol of a peer with a certificate until the end of the handshake; then ALPN selects its real one."""

    def __init__(self, link: Protocols, operators: Protocols) -> None:
        self._link, self._operators = link, operators

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is over."""
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        protocol = self._link() if chosen == LINK else self._operators()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class FarMembers:
    """The names of the far members of a brain's leaderships, in a file that outlives it."""

    def __init__(self, path: Path, others_led: bool = False) -> None:
        """Read the names that the former brain of this folder has left. `others_led`: another machine's brain has led
        since. Its relays may be others, and have lost it by now.
        """
        self._path = path
        self.known, self.names = False, frozenset[str]()  # not known: there may be far relays, of any name
        if not others_led:
            with suppress(OSError, UnicodeDecodeError):  # there is no file, or it is damaged
                self.names, self.known = frozenset(path.read_text(encoding="utf-8").split("\n")) - {""}, True

    def keep(self, names: Iterable[str]) -> None:
        """Keep the names of the present members."""
        try:
            replace_content(self._path, "\n".join(names).encode())
        except OSError as error:
            log.warning("names of far relays cannot be saved", extra={"error": error.strerror})

    def forget(self) -> None:
        """Forget all names: the relays turn to a brain of another machine."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # harmless: the next brain waits some seconds for nothing
            log.warning("names of far relays cannot be removed", extra={"error": error.strerror})
