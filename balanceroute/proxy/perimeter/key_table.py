"""The use of each client key, in memory that relays on a machine share, so that limits hold for all of them together.

The parent makes a `KeyTable` before it forks, and only the parent assigns slots to names. A relay writes only its own
row of a slot, and reads all rows, so no lock is needed. The rows outlive their relay: the parent clears the requests in
flight, and the restarted relay, which has the same `RelayRows`, continues with the rest. A router that takes over has
its own table, whose rates continue from the former's.

    FIELDS, relays, slots, how many have names | the names' digests | the slots, each: its fields, each: all relays'
"""

import hashlib
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final

from balanceroute.errors import ConfigError

SLOTS: Final = 2**17  # more keys than `SharedConfig` has room for; unused pages take no memory

IN_FLIGHT: Final = 0
REQUESTS: Final = 1  # the first of the fields of a rate
TOKENS: Final = 5
USED: Final = 0  # by clients of this relay, since the start
FAR: Final = 1  # by relays of other machines, since the start, as reported to this relay
PER_MINUTE: Final = 2  # the limit that LOST belongs to; 0: none
LOST: Final = 3  # see `Bucket`; -inf: no limit
FIELDS: Final = 9
_HEADER: Final = 4  # numbers before the digests

Memory = mmap.mmap | bytearray

_put: Final = struct.Struct("d").pack_into
_Reader = Callable[[Memory, int], tuple[float, ...]]


@cache  # to make them takes longer than all else of a row
def _readers(relays: int) -> tuple[_Reader, _Reader]:
    """Read the numbers of all relays: of one field, and of the four of a rate."""
    return struct.Struct(f"{relays}d").unpack_from, struct.Struct(f"{4 * relays}d").unpack_from


class Row:
    """A key's numbers of one relay, the one at `place` of `relays`.

    The key's part of `memory` begins at byte `start`, and has all relays' numbers of the first field, then those of the
    next.
    """

    __slots__ = ("_all", "_memory", "_own", "_place", "_rate", "_start", "relays")

    def __init__(self, memory: Memory, start: int, relays: int, place: int) -> None:
        self._memory, self._start, self.relays, self._place = memory, start, relays, place
        self._all, self._rate = _readers(relays)
        self._own: list[float] = [self.all(field)[place] for field in range(FIELDS)]  # only this relay writes them

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
    """A row of a process without other relays."""
    row = Row(bytearray(8 * FIELDS), 0, 1, 0)
    for rate in (REQUESTS, TOKENS):
        row.put(rate + LOST, -math.inf)
    return row


class KeyTable:
    """The shared memory, made before the fork. `fd`: its file, for a successor."""

    def __init__(self, relays: int, slots: int = SLOTS) -> None:
        self.relays, self._slots = relays, slots
        self.fd = os.memfd_create("balanceroute-keys")
        os.ftruncate(self.fd, _row_at(slots, relays, slots))
        self._memory = mmap.mmap(self.fd, 0)
        self._numbers = memoryview(self._memory).cast("q")
        weakref.finalize(self._numbers, os.close, self.fd)  # not `self`: a compiled object has no weak references
        for index, number in enumerate((FIELDS, relays, slots, 0)):
            self._numbers[index] = number

    def name(self, names: Iterable[str]) -> None:
        """Assign slots to these names; one process at a time. Raises: ConfigError: no slot is left."""
        known = _known(self._numbers)
        for digest in map(_digest, names):
            if digest in known:
                continue
            slot = len(known)
            if slot == self._slots:
                raise ConfigError(
                    f"auth.client_keys: {slot} names have been used since the router was started; restart it for more"
                )
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
        """For the parent: clear the requests in flight of the dead relay at `place`."""
        for slot in range(self._numbers[_HEADER - 1]):
            row = self._row(slot, place)
            row.put(IN_FLIGHT, 0.0)
            for rate in (REQUESTS, TOKENS):
                row.put(rate + FAR, max(row.all(rate + FAR)))

    def continue_from(self, fd: int) -> None:
        """Continue the rates of another router's table in this file; called before relays start. Raises: ValueError,
        OSError: it can't be used.
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
                _continue_rows(former, [self._row(known[digest], place) for place in range(self.relays)])

    def _row(self, slot: int, place: int) -> Row:
        return Row(self._memory, _row_at(self._slots, self.relays, slot), self.relays, place)


class RelayRows:
    """A relay's rows of a table."""

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


def _continue_rows(former: Row, rows: Sequence[Row]) -> None:
    """Set a key's rows to the limits and the buckets' levels of another table."""
    for rate in (REQUESTS, TOKENS):
        limits, losses = former.all(rate + PER_MINUTE), former.all(rate + LOST)
        if (limit := max(limits)) > 0:
            lost = max(lost for lost, each in zip(losses, limits, strict=True) if each == limit)
            for row in rows:
                row.put(rate + PER_MINUTE, limit)
                row.put(rate + LOST, lost)
            rows[0].put(rate + USED, sum(former.all(rate + USED)) + max(former.all(rate + FAR)))
