"""How the router of a new version takes over from the running one, on the same sockets.

    old parent                                   new parent, `serve --take-over`
        |<------------------------- connects -------|   to the socket `handover` of the run folder
        |-- state, lock, table of keys,             |
        |   listening sockets --------------------->|   starts its children: its relays accept beside the old ones,
        |                                           |   its brain stands by
        |<------------------------- GO -------------|   once all of them are up
        |   its brain ends, its relays accept no more and finish what they have, under the new brain; it ends with them

One queue of connections belongs to both, so none is lost. If the new parent ends before `GO`, nothing has happened. A
signal to drain meanwhile waits for the one or the other: relays of both are members of the old brain until `GO`.
A router that drains already can be taken over as well, as long as relays of its own refuse what comes.
The old one answers one successor at a time.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import BinaryIO, Final

import msgspec

from balanceroute.config.addresses import host_in_url
from balanceroute.errors import ConfigError

log = logging.getLogger(__name__)

GO: Final = b"go\n"
TIMEOUT_S: Final = 10.0  # for the answer of a parent, which has little else to do
_MOST_BYTES: Final = 4096
_MOST_DESCRIPTORS: Final = 16


class HandoverState(msgspec.Struct, frozen=True):
    """The data for a successor. `generation`: its predecessor's number. `lineage`: see `run_folder/changes.py`.
    `decode_first`: the order of the tiers.
    """

    lineage: int
    generation: int
    decode_first: bool


class Handover:
    """The old parent's side. The kernel sends SIGIO when `look` has something to do."""

    def __init__(
        self, path: Path, state: HandoverState, sockets: Sequence[socket.socket], lock: BinaryIO, keys: int
    ) -> None:
        """Listen at `path`, in place of an earlier router. `lock`: of the run folder. `keys`: the file of their table.

        Raises: ConfigError.
        """
        self._state, self._path = state, path
        self._descriptors = [lock.fileno(), keys, *(sock.fileno() for sock in sockets)]
        self._successor: socket.socket | None = None
        try:
            self._listener = _listener(path)
            self._inode = path.stat().st_ino  # identifies the socket while it is bound
        except OSError as error:
            raise ConfigError(f"{path}: cannot be used: {error.strerror}") from None

    def look(self) -> bool:
        """Answer all that have connected, the first one as the successor; True: it is ready to take over."""
        try:
            # two that connect at one moment may cause one SIGIO; without a free descriptor to accept fails in any case
            while select([self._listener], (), (), 0.0)[0]:
                self._accept_successor(self._listener.accept()[0])
        except BlockingIOError:
            pass  # no other one has connected
        except OSError as error:  # most likely no descriptor is free; the successor gives up and may try again
            log.warning("another router can't be answered", extra={"error": error.strerror})
        return self._successor is not None and self._receive_go(self._successor)

    def _accept_successor(self, successor: socket.socket) -> None:
        if self._successor is None:
            self._answer(successor)
        else:
            log.warning("another router is taking over already")
            successor.close()

    @property
    def has_successor(self) -> bool:
        """Whether a successor prepares: it has its data, and has neither gone nor said that it is ready."""
        return self._successor is not None

    @property
    def is_lost(self) -> bool:
        """Whether no successor can find this router: its socket was removed, or replaced by one that has died."""
        try:
            return self._path.stat().st_ino != self._inode
        except OSError:
            return True

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        if self._successor is not None:
            self._successor.close()

    def _answer(self, successor: socket.socket) -> None:
        signal_input(successor.fileno())
        try:
            socket.send_fds(successor, [msgspec.json.encode(self._state)], self._descriptors)
        except OSError:
            successor.close()  # the successor has gone
        else:
            self._successor = successor
            log.info("another router prepares to take over")

    def _receive_go(self, successor: socket.socket) -> bool:
        try:
            received = successor.recv(len(GO))
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        successor.close()
        self._successor = None
        if received != GO:
            log.warning("the router that was to take over has ended")
        return received == GO


def _listener(path: Path) -> socket.socket:
    """A socket at `path`, for our user alone; a connection to it causes SIGIO. Raises: OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        signal_input(listener.fileno())
    except OSError:
        listener.close()
        raise
    return listener


class Predecessor:
    """The new parent's side: the running router, and what it has sent."""

    def __init__(
        self,
        connection: socket.socket,
        state: HandoverState,
        sockets: list[socket.socket],
        lock: BinaryIO,
        keys: BinaryIO,
    ) -> None:
        self._connection, self.state, self._sockets, self.keys = connection, state, sockets, keys
        self._lock: BinaryIO | None = lock

    @classmethod
    def find(cls, path: Path) -> "Predecessor | None":
        """The router that answers at `path`; None: there is none. Raises: ConfigError: it can't be taken over."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except OSError as error:
            connection.close()
            raise ConfigError(f"--take-over: {path}: cannot be used: {error.strerror or error}") from None
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
            state = msgspec.json.decode(data, type=HandoverState)
            lock, keys, *listeners = descriptors
            sockets = [socket.socket(fileno=listener) for listener in listeners]
            return cls(connection, state, sockets, os.fdopen(lock, "rb"), os.fdopen(keys, "rb"))
        except (OSError, ValueError) as error:
            connection.close()
            why = "it does not answer" if isinstance(error, OSError) else "another router is taking over, or it ends"
            raise ConfigError(f"--take-over: the router that runs can't be taken over: {why}") from None

    def listener(self, host: str, port: int) -> socket.socket | None:
        """Hand over its socket that listens at this address, if it has one."""
        for sock in self._sockets:
            if sock.getsockname()[:2] == (host, port):
                self._sockets.remove(sock)
                return sock
        return None

    @property
    def abandoned(self) -> list[str]:
        """The addresses at which only the predecessor listens: they close when it leaves."""
        addresses = [sock.getsockname()[:2] for sock in self._sockets]
        return [f"{host_in_url(host)}:{port}" for host, port in addresses]

    @property
    def is_alive(self) -> bool:
        """Whether the predecessor runs. Its end is the only thing that the connection can still bring."""
        return not select([self._connection], [], [], 0)[0]

    def lock(self) -> BinaryIO:
        """Hand over the run folder's lock, once."""
        lock, self._lock = self._lock, None
        assert lock is not None
        return lock

    def go(self) -> None:
        """Tell the predecessor that this router is ready: it leaves."""
        with suppress(OSError):  # the predecessor has died meanwhile, and its relays with it
            self._connection.sendall(GO)
        self.close()

    def close(self) -> None:
        """End the connection; before `go`, the predecessor goes on as if nothing had happened."""
        self._connection.close()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self.keys.close()
        if self._lock is not None:
            self._lock.close()


def signal_input(descriptor: int) -> None:
    """Have the kernel send this process SIGIO when there is something to read; reads do not block."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
