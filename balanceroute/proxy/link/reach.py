"""How a relay connects to the brain: at a socket of the run folder, or on one of a list of other machines; and when."""

import asyncio
import math
import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

from balanceroute.config.addresses import host_in_url

TRY_S: Final = 1.5  # for the TLS handshake with a brain of another machine
RETRY_S: Final = 0.05  # between two tries to connect to a brain
STEADY_S: Final = 5.0  # memberships of one brain that end sooner, one after another, end by a bug or a peer's fault
MAX_RETRY_S: Final = 2.0  # between two of those, or between two tries of a relay that is refused

P = TypeVar("P", bound=asyncio.Protocol)
Moved = Callable[[], bool]
"""Whether another brain listens by now where a connection was made."""


class UntrustedBrain(ConnectionError):
    """A brain was reached, but the handshake failed: to repeat it costs both sides CPU time."""


class Reach(Protocol):
    """The way to the leading brain."""

    @property
    def near(self) -> bool:
        """Whether the brain is on this machine, where its parent restarts it."""

    @property
    def name(self) -> str:
        """Where the brain is, for the log."""

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """Connect; the caller tries again after a failure. Raises: OSError."""

    def try_next_address(self) -> None:
        """The brain at this address does not lead; try the next address."""


class Pauses:
    """How long a relay waits before its next try to join a brain.

    Longer after each refusal in a row, because a handshake or a large Hello costs the brain; and while memberships of
    one brain end soon, one after another.
    """

    def __init__(self) -> None:
        self._joined_s = -math.inf
        self._left_epoch = 0  # of the brain whose last membership was short; 0: it was not
        self._lost_s = self._refused_s = RETRY_S  # after the loss of a brain, and after a refusal

    @property
    def next_s(self) -> float:
        """The pause before the next try."""
        return max(self._lost_s, self._refused_s)

    @property
    def growing(self) -> bool:
        """Whether one brain's memberships end soon, one after another."""
        return self._lost_s > RETRY_S

    @property
    def has_joined(self) -> bool:
        """Whether the relay has ever been a member."""
        return self._joined_s > -math.inf

    def refused(self) -> None:
        """A brain has not let it in."""
        self._refused_s = min(MAX_RETRY_S, 2 * self._refused_s)

    def joined(self, epoch: int, now: float) -> None:
        """The brain of this epoch has welcomed it."""
        self._joined_s, self._refused_s = now, RETRY_S
        if epoch != self._left_epoch:
            self._lost_s = RETRY_S

    def left(self, epoch: int, now: float) -> bool:
        """The membership is over; returns whether it was a long one."""
        if now - self._joined_s > STEADY_S:
            self._left_epoch, self._lost_s = 0, RETRY_S
            return True
        again, self._left_epoch = self._left_epoch == epoch, epoch
        self._lost_s = min(MAX_RETRY_S, 2 * self._lost_s) if again else RETRY_S
        return False


class SocketReach:
    """A brain on this machine. Each leader makes its own socket, at the same path."""

    near: Final = True

    def __init__(self, path: Path | str) -> None:
        self._path = self.name = str(path)

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`."""
        # the inode is not reused while the old socket is open, even if unlinked
        listening = os.stat(self._path).st_ino
        _, made = await asyncio.get_running_loop().create_unix_connection(protocol, self._path)
        return made, lambda: self._another_listens(listening)

    def try_next_address(self) -> None:
        """Nothing: there is no other address."""

    def _another_listens(self, listening: int) -> bool:
        try:
            return os.stat(self._path).st_ino != listening
        except OSError:
            return False  # there is no other address


class FarReach:
    """Brains of other machines: first the one that led last, then the next ones of the list.

    A standby accepts no connections. A deposed leader is recognised by its silence, and by the next one's larger epoch.
    """

    near: Final = False

    def __init__(self, addresses: Sequence[tuple[str, int]], context: Callable[[], ssl.SSLContext]) -> None:
        """`context` is called for each connection: the brain must show a certificate for its host."""
        self._addresses, self._context = addresses, context
        self._at = 0

    @property
    def address(self) -> tuple[str, int]:
        """The address of the brain that was connected last, or is tried next."""
        return self._addresses[self._at]

    @property
    def name(self) -> str:
        """See `Reach`."""
        host, port = self.address
        return f"{host_in_url(host)}:{port}"

    async def connect(self, protocol: Callable[[], P]) -> tuple[P, Moved]:
        """See `Reach`. Raises: UntrustedBrain; OSError."""
        (host, port), name = self.address, self.name
        try:
            async with asyncio.timeout(TRY_S):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(protocol, host, port, ssl=self._context(), server_hostname=host)
        except BaseException as error:
            self.try_next_address()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{name} does not answer") from None
            if isinstance(error, OSError):
                kind = UntrustedBrain if isinstance(error, ssl.SSLError) else ConnectionError
                raise kind(f"{name}: {_reason(error)}") from error
            raise
        return made, lambda: False

    def try_next_address(self) -> None:
        """See `Reach`."""
        self._at = (self._at + 1) % len(self._addresses)


def _reason(error: OSError) -> str:
    """Why there is no connection; the system's own texts also have numbers and the addresses of a name."""
    if isinstance(error, ssl.SSLError):
        return str(error)
    code = re.search(r"\[Errno (\d+)\]", str(error))  # the first one, where a name has several addresses
    return os.strerror(int(code[1])) if code is not None else error.strerror or str(error) or type(error).__name__
