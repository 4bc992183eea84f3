"""Tokens that a relay's requests have generated, in memory that a brain on the same machine reads when it decides.

To say them takes a frame every few milliseconds, for which both processes have to wake up, although they matter only
when somebody looks. So the relay writes the sum of each ticket to the ticket's place in a file without a name
(memfd_create(2)), and the brain compares the whole file with what it has read before. No process wakes up for that, and
the brain knows each token that the relay has counted.

A place is eight bytes: the life of the ticket above, its tokens since the relay's last Hello below. They are written by
one store, so who reads finds the old or the new. A ticket's number is its life times `PLACES` plus its place: what a
place says of another life is about a ticket that the reader does not know yet, or not any more.
"""

import mmap
import os
import socket
import stat
import struct
import weakref
from array import array
from typing import Final

from balanceroute.proxy.hotpath import grown_counts

PLACES: Final = 2**16  # of tickets at a time; the tokens of further ones are sent as messages
NOWHERE: Final = 0  # the place of tickets whose tokens are sent as messages
_BYTES: Final = 8 * PLACES
_LIVES: Final = 2**31
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: unix(7)


def place_of(number: int) -> int:
    """The place of the tokens of the ticket with this number."""
    return number % PLACES


class WrittenCounts:
    """A relay's side: numbers its tickets, and writes what they have generated."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("balanceroute-tokens")
        os.ftruncate(self.fd, _BYTES)
        self._places = memoryview(mmap.mmap(self.fd, _BYTES)).cast("q")
        weakref.finalize(self._places, os.close, self.fd)  # a compiled object has no weak references
        self._free: list[int] = []
        self._used = NOWHERE
        self._lives = 0

    def number(self) -> int:
        """A number for a new ticket, which no other ticket has had."""
        self._lives += 1
        place = NOWHERE
        if self._free:
            place = self._free.pop()
        elif self._used + 1 < PLACES:
            place = self._used = self._used + 1
        return self._lives * PLACES + place

    def leave(self, number: int) -> None:
        """The ticket of this number has left."""
        place = place_of(number)
        if place != NOWHERE:
            self._free.append(place)

    def write(self, number: int, tokens: int) -> bool:
        """Write what the ticket has generated; False: it has no place, and that has to be said."""
        place = number % PLACES
        if place == NOWHERE:
            return False
        self._places[place] = (number // PLACES % _LIVES) << 32 | tokens
        return True


class ReadCounts:
    """The brain's side."""

    def __init__(self, pid: int, fd: int) -> None:
        """`fd` of that process is the file. Raises: OSError: it can't be read here, or is something else."""
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != _BYTES:
                raise OSError(f"file {fd} of process {pid} counts no tokens")
            self._places = memoryview(mmap.mmap(file, _BYTES, prot=mmap.PROT_READ)).cast("q")
        finally:
            os.close(file)
        self._known = array("q", [0]) * PLACES

    def news(self, used: int) -> list[int]:
        """Each place below `used` whose value is new, followed by the value (see `life_of`, `tokens_of`). O(used)."""
        return grown_counts(self._places, self._known, used)


def life_of(said: int) -> int:
    """The life (31 bits) in the value of a place."""
    return said >> 32


def tokens_of(said: int) -> int:
    """The tokens in the value of a place."""
    return said & 0xFFFFFFFF


def same_life(number: int, life: int) -> bool:
    """Whether the value of a place, of that life, belongs to the ticket with this number."""
    return number // PLACES % _LIVES == life


def peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end, as the kernel knows it; None: it is on another machine, or out of sight."""
    if connection.family != socket.AF_UNIX:
        return None
    pid: int = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid or None
