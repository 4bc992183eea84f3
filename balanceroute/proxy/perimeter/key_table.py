"""What relays on one machine have used of each client key, in memory that they share, so that a limit is the router's.

The parent makes a `KeyTable` before it forks, and alone gives names their slots. A relay writes only its own row of a
slot, and reads all rows: no lock is needed, and no sum is older than a store takes to be seen. The rows outlive their
relay: the parent clears what was in flight, and its next life, which has the same `Seat`, goes on with all else.
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Iterable
from typing import Final

SLOTS: Final = 2**14  # pages that no key has are not there; more names than these are told over the link

IN_FLIGHT: Final = 0
REQUESTS: Final = 1  # the first of the fields of a rate
TOKENS: Final = 5
USED: Final = 0  # by clients of this relay, ever
FAR: Final = 1  # by relays of other machines, ever, as far as this one has heard: each hears the same
PER_MINUTE: Final = 2  # the limit that LOST is about; 0: none
LOST: Final = 3  # see `Bucket`; -inf where there is no limit
FIELDS: Final = 9

Memory = mmap.mmap | bytearray

_put: Final = struct.Struct("d").pack_into


class Row:
    """What one relay, at `place` of so many, has of a key. The key's part of `memory` begins at byte `start`, and has
    all relays' numbers of the first field, then those of the next.
    """

    __slots__ = ("_all", "_memory", "_own", "_place", "_rate", "_start", "relays", "shared")

    def __init__(self, memory: Memory, start: int, relays: int, place: int, shared: bool) -> None:
        self._memory, self._start, self.relays, self._place, self.shared = memory, start, relays, place, shared
        self._all = struct.Struct(f"{relays}d").unpack_from
        self._rate = struct.Struct(f"{4 * relays}d").unpack_from
        self._own: list[float] = [self.all(field)[place] for field in range(FIELDS)]  # nobody else writes them

    def own(self, field: int) -> float:
        """This relay's."""
        return self._own[field]

    def put(self, field: int, value: float) -> None:
        """This relay has so many."""
        self._own[field] = value
        _put(self._memory, self._start + 8 * (field * self.relays + self._place), value)

    def add(self, field: int, amount: float) -> None:
        """This relay has so many more."""
        self.put(field, self._own[field] + amount)

    def all(self, field: int) -> tuple[float, ...]:
        """Every relay's."""
        return self._all(self._memory, self._start + 8 * field * self.relays)

    def rate(self, first: int) -> tuple[float, ...]:
        """Every relay's USED, then every relay's FAR, PER_MINUTE and LOST, of a rate."""
        return self._rate(self._memory, self._start + 8 * first * self.relays)


def row_alone() -> Row:
    """A row that nobody else sees."""
    row = Row(bytearray(8 * FIELDS), 0, 1, 0, False)
    for rate in (REQUESTS, TOKENS):
        row.put(rate + LOST, -math.inf)
    return row


class KeyTable:
    """The memory; made before the processes that share it are forked."""

    def __init__(self, relays: int, slots: int = SLOTS) -> None:
        self.relays = relays
        self._digests = memoryview(mmap.mmap(-1, 8 * slots)).cast("q")  # of the slots' names; 0: none yet
        self._memory = mmap.mmap(-1, 8 * slots * FIELDS * relays)

    def name(self, names: Iterable[str]) -> None:
        """Give these their slots, as long as there are some; for the parent alone."""
        known = self._known()
        for digest in map(_digest, names):
            if digest not in known and len(known) < len(self._digests):
                slot = known[digest] = len(known)
                for row in (self._row(slot, place) for place in range(self.relays)):
                    for rate in (REQUESTS, TOKENS):
                        row.put(rate + LOST, -math.inf)
                self._digests[slot] = digest

    def rows(self, names: Iterable[str], place: int) -> dict[str, Row]:
        """That relay's rows of those names that have a slot."""
        known = self._known()
        digests = {name: _digest(name) for name in names}
        return {name: self._row(known[digest], place) for name, digest in digests.items() if digest in known}

    def clear(self, place: int) -> None:
        """The relay there has died: what it had in flight is over. For the parent."""
        for slot in self._known().values():
            row = self._row(slot, place)
            row.put(IN_FLIGHT, 0.0)
            for rate in (REQUESTS, TOKENS):
                row.put(rate + FAR, max(row.all(rate + FAR)))

    def _row(self, slot: int, place: int) -> Row:
        return Row(self._memory, 8 * slot * FIELDS * self.relays, self.relays, place, True)

    def _known(self) -> dict[int, int]:
        """The slots, by their names' digests."""
        digests = self._digests.tolist()
        return {digest: slot for slot, digest in enumerate(digests) if digest}


class Seat:
    """A relay's place at a table; `near` are the names, on the link, of all who have one."""

    __slots__ = ("_place", "_rows", "_table", "near")

    def __init__(self, table: KeyTable, place: int, near: Iterable[str]) -> None:
        self._table, self._place, self.near = table, place, frozenset(near)
        self._rows: dict[str, Row] = {}

    def rows(self, names: Iterable[str]) -> dict[str, Row]:
        """This relay's rows of those names that have one, the same each time."""
        names = tuple(names)
        self._rows |= self._table.rows([name for name in names if name not in self._rows], self._place)
        return {name: self._rows[name] for name in names if name in self._rows}


def _digest(name: str) -> int:
    """Not 0, and another one for another name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True) | 1
