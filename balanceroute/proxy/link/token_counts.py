"""Counts of a relay's generated tokens, in shared memory that a brain on the same machine reads when it decides.

To send them would take a frame every few milliseconds, for which both processes wake up, although only decisions need
them. So the relay writes the sum of each ticket to the ticket's place in an anonymous file (memfd_create(2)), and the
brain compares the file with what it read before. That wakes no process, and the brain has every token that the relay
has counted.

A place is eight bytes, written by one store: the upper half is the ticket's serial number, the lower half its tokens
since the relay's last Hello. A ticket's number is its serial number times `PLACES` plus its place. A place with another
serial number than expected belongs to an earlier or a later ticket.
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

PLACES: Final = 2**16  # tickets at a time; the tokens of further ones are sent as messages
NOWHERE: Final = 0  # the place of tickets whose tokens are sent as messages
_BYTES: Final = 8 * PLACES
_SERIALS: Final = 2**31
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: unix(7)


def place_of(number: int) -> int:
    """The place of the tokens of the ticket with this number."""
    return number % PLACES


class WrittenCounts:
    """A relay's side: it numbers tickets and writes their counts."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("balanceroute-tokens")
        os.ftruncate(self.fd, _BYTES)
        self._places = memoryview(mmap.mmap(self.fd, _BYTES)).cast("q")
        weakref.finalize(self._places, os.close, self.fd)  # not `self`: a compiled object has no weak references
        self._free: list[int] = []
        self._used = NOWHERE
        self._last_serial = 0

    def number(self) -> int:
        """A new ticket's number, never used before."""
        self._last_serial += 1
        place = NOWHERE
        if self._free:
            place = self._free.pop()
        elif self._used + 1 < PLACES:
            place = self._used = self._used + 1
        return self._last_serial * PLACES + place

    def leave(self, number: int) -> None:
        """Free the place of a ticket that has ended."""
        place = place_of(number)
        if place != NOWHERE:
            self._free.append(place)

    def write(self, number: int, tokens: int) -> bool:
        """Write a ticket's sum; False: it has no place, so the sum must be sent."""
        place = number % PLACES
        if place == NOWHERE:
            return False
        self._places[place] = (number // PLACES % _SERIALS) << 32 | tokens
        return True


class ReadCounts:
    """The brain's side."""

    def __init__(self, pid: int, fd: int) -> None:
        """Open the descriptor `fd` of that process. Raises: OSError: it can't be read, or is another kind of file."""
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != _BYTES:
                raise OSError(f"file {fd} of process {pid} counts no tokens")
            self._places = memoryview(mmap.mmap(file, _BYTES, prot=mmap.PROT_READ)).cast("q")
        finally:
            os.close(file)
        self._known = array("q", [0]) * PLACES

    def changed(self, used: int) -> list[int]:
        """Each place below `used` whose value is new, followed by the value (see `serial_of`, `tokens_of`). O(used)."""
        return grown_counts(self._places, self._known, used)


def serial_of(value: int) -> int:
    """The serial number (31 bits) in the value of a place."""
    return value >> 32


def tokens_of(value: int) -> int:
    """The tokens in the value of a place."""
    return value & 0xFFFFFFFF


def same_serial(number: int, serial: int) -> bool:
    """Whether the value of a place, with that serial number, belongs to the ticket with this number."""
    return number // PLACES % _SERIALS == serial


def peer_pid(connection: socket.socket) -> int | None:
    """The process id of the peer, from the kernel; None: it is on another machine, or in a foreign pid namespace."""
    if connection.family != socket.AF_UNIX:
        return None
    pid: int = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid or None
