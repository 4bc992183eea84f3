"""What relays on one machine have used of each client key, in memory that they share, so that a limit is the router's.

The parent makes a `KeyTable` before it forks, and alone gives names their slots. A relay writes only its own row of a
slot, and reads all rows: no lock is needed, and no sum is older than a store takes to be seen. The rows outlive their
relay: the parent clears what was in flight, and its next life, which has the same `Seat`, goes on with all else.
Relays of a router that takes over have a table of their own; its rates go on from those of the table before it.

    FIELDS, relays, slots, how many have names | the names' digests | the slots, each: its fields, each: all relays'
"""

import hashlib
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

from balanceroute.errors import ConfigError

SLOTS: Final = 2**17  # more than keys that a router can agree on; pages that no key has are not there

IN_FLIGHT: Final = 0
REQUESTS: Final = 1  # the first of the fields of a rate
TOKENS: Final = 5
USED: Final = 0  # by clients of this relay, ever
FAR: Final = 1  # by relays of other machines, ever, as far as this one has heard: each hears the same
PER_MINUTE: Final = 2  # the limit that LOST is about; 0: none
LOST: Final = 3  # see `Bucket`; -inf where there is no limit
FIELDS: Final = 9
_HEADER: Final = 4  # numbers before the digests

Memory = mmap.mmap | bytearray

_put: Final = struct.Struct("d").pack_into


class Row:
    """What one relay, at `place` of so many, has of a key. The key's part of `memory` begins at byte `start`, and has
    all relays' numbers of the first field, then those of the next.
    """

    __slots__ = ("_all", "_memory", "_own", "_place", "_rate", "_start", "relays")

    def __init__(self, memory: Memory, start: int, relays: int, place: int) -> None:
        self._memory, self._start, self.relays, self._place = memory, start, relays, place
        self._all = struct.Struct(f"{relays}d").unpack_from
        self._rate = struct.Struct(f"{4 * relays}d").unpack_from
        self._own: list[float] = [self.all(field)[place] for field in range(FIELDS)]  # nobody else writes them

    def own(self, field: int) -> float:
        """This relay's number."""
        return self._own[field]

    def put(self, field: int, value: float) -> None:
        """Set this relay's number."""
        self._own[field] = value
        _put(self._memory, self._start + 8 * (field * self.relays + self._place), value)

    def add(self, field: int, amount: float) -> None:
        """Add to this relay's number."""
        self.put(field, self._own[field] + amount)

    def all(self, field: int) -> tuple[float, ...]:
        """The numbers of all relays."""
        return self._all(self._memory, self._start + 8 * field * self.relays)

    def rate(self, first: int) -> tuple[float, ...]:
        """Every relay's USED, then every relay's FAR, PER_MINUTE and LOST, of a rate."""
        return self._rate(self._memory, self._start + 8 * first * self.relays)


def row_alone() -> Row:
    """A row that nobody else sees."""
    row = Row(bytearray(8 * FIELDS), 0, 1, 0)
    for rate in (REQUESTS, TOKENS):
        row.put(rate + LOST, -math.inf)
    return row


class KeyTable:
    """The memory; made before the processes that share it are forked. `fd`: its file, for a successor."""

    def __init__(self, relays: int, slots: int = SLOTS) -> None:
        self.relays, self._slots = relays, slots
        self.fd = os.memfd_create("balanceroute-keys")
        os.ftruncate(self.fd, _row_at(slots, relays, slots))
        self._memory = mmap.mmap(self.fd, 0)
        self._numbers = memoryview(self._memory).cast("q")
        weakref.finalize(self._numbers, os.close, self.fd)  # a compiled object has no weak references
        for index, number in enumerate((FIELDS, relays, slots, 0)):
            self._numbers[index] = number

    def name(self, names: Iterable[str]) -> None:
        """Give these names slots; only one process at a time may do so. Raises: ConfigError: no slot is left."""
        known = _known(self._numbers)
        for digest in map(_digest, names):
            if digest in known:
                continue
            slot = len(known)
            if slot == self._slots:
                raise ConfigError(f"auth.client_keys: {slot} names since the router was started; restart it for more")
            for row in (self._row(slot, place) for place in range(self.relays)):
                for rate in (REQUESTS, TOKENS):
                    row.put(rate + LOST, -math.inf)
            known[digest] = slot
            self._numbers[_HEADER + slot] = digest
            self._numbers[_HEADER - 1] = slot + 1

    def rows(self, names: Iterable[str], place: int) -> dict[str, Row]:
        """The rows of the relay at `place`; all names must have slots."""
        known = _known(self._numbers)
        return {name: self._row(known[_digest(name)], place) for name in names}

    def clear(self, place: int) -> None:
        """The relay at `place` has died: nothing of it is in flight any more. For the parent."""
        for slot in range(self._numbers[_HEADER - 1]):
            row = self._row(slot, place)
            row.put(IN_FLIGHT, 0.0)
            for rate in (REQUESTS, TOKENS):
                row.put(rate + FAR, max(row.all(rate + FAR)))

    def go_on(self, fd: int) -> None:
        """Have rates go on from those of another router on this machine, whose table is in that file; before any relay
        is here. Raises: ValueError, OSError: it is of no use.
        """
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        numbers = memoryview(memory).cast("q")
        fields, relays, slots, used = numbers[:_HEADER].tolist()
        if fields != FIELDS or len(memory) != _row_at(slots, relays, slots) or used > slots:
            raise ValueError("it is another version's")
        known = _known(self._numbers)
        for digest, slot in _known(numbers).items():
            if digest in known:
                former = Row(memory, _row_at(slots, relays, slot), relays, 0)
                _go_on(former, [self._row(known[digest], place) for place in range(self.relays)])

    def _row(self, slot: int, place: int) -> Row:
        return Row(self._memory, _row_at(self._slots, self.relays, slot), self.relays, place)


class Seat:
    """A relay's place at a table."""

    __slots__ = ("_place", "_rows", "_table")

    def __init__(self, table: KeyTable, place: int) -> None:
        self._table, self._place = table, place
        self._rows: dict[str, Row] = {}

    def rows(self, names: Iterable[str]) -> dict[str, Row]:
        """This relay's rows of those names; the same objects each time."""
        names = tuple(names)
        self._rows |= self._table.rows([name for name in names if name not in self._rows], self._place)
        return {name: self._rows[name] for name in names}


def _digest(name: str) -> int:
    """The digest of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


def _known(numbers: memoryview) -> dict[int, int]:
    """A table's slots, by their names' digests."""
    digests = numbers[_HEADER : _HEADER + numbers[_HEADER - 1]].tolist()
    return {digest: slot for slot, digest in enumerate(digests)}


def _row_at(slots: int, relays: int, slot: int) -> int:
    """The byte where a slot begins."""
    return 8 * (_HEADER + slots + slot * FIELDS * relays)


def _go_on(former: Row, rows: Sequence[Row]) -> None:
    """Have all relays' rows of a key be at the limits, and at the level of the buckets, of those at another table."""
    for rate in (REQUESTS, TOKENS):
        limits, losses = former.all(rate + PER_MINUTE), former.all(rate + LOST)
        if (limit := max(limits)) > 0:
            lost = max(lost for lost, each in zip(losses, limits, strict=True) if each == limit)
            for row in rows:
                row.put(rate + PER_MINUTE, limit)
                row.put(rate + LOST, lost)
            rows[0].put(rate + USED, sum(former.all(rate + USED)) + max(former.all(rate + FAR)))
