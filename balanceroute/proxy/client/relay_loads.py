"""Counts of each relay's client connections, bodies and unread answers, in memory that the relays on a machine share.

So `limits.max_connections`, `max_incoming_bytes` and `max_held_bytes` bound all relays together. Each relay writes its
own numbers, and the time when it last showed that it accepts, and reads those of all. The parent clears the numbers of
a dead relay.
"""

import mmap
from typing import Final

CONNECTIONS: Final = 0  # that have a place
INCOMING_BYTES: Final = 1
SERVED_BYTES: Final = 2
ACCEPTS: Final = 3  # when it last showed that it accepts, in ms of the machine's monotonic clock; 0: it does not
UNREAD_BYTES: Final = 4
FIELDS: Final = 5
SHOWN_S: Final = 2.5  # a relay shows every second that it accepts: after this time it counts as stopped
FEW: Final = 64  # streams of an event per 20 ms are a tenth of what a relay carries


class RelayLoads:
    """The memory; made before the processes that share it are forked."""

    def __init__(self, relays: int) -> None:
        self.relays = relays
        self.cells = memoryview(mmap.mmap(-1, 8 * FIELDS * relays)).cast("q")  # field by field, all relays' values

    @property
    def any_accepts(self) -> bool:
        """Whether any relay accepts; for the parent."""
        return any(self.cells[ACCEPTS * self.relays : (ACCEPTS + 1) * self.relays])


class Load:
    """The numbers of the relay at `place`, and sums of the others'."""

    __slots__ = ("_cells", "_place", "relays")

    def __init__(self, loads: RelayLoads, place: int) -> None:
        self._cells, self._place, self.relays = loads.cells, place, loads.relays

    def clear(self) -> None:
        """Clear the numbers of a relay that has died; for the parent."""
        for field in range(FIELDS):
            self.put(field, 0)

    def put(self, field: int, value: int) -> None:
        """Set a number of this relay."""
        self._cells[field * self.relays + self._place] = value

    def others(self, field: int) -> int:
        """The sum of all other relays."""
        if self.relays == 1:
            return 0
        cells = self._all(field)
        return sum(cells) - cells[self._place]

    def accept(self, now_s: float) -> None:
        """Show that this relay accepts; that holds for `SHOWN_S`."""
        self.put(ACCEPTS, round(1000 * now_s))

    def step_back(self, now_s: float) -> bool:
        """Stop accepting; False: no other relay accepts, so this one must continue.

        Each relay writes before it reads: if two stop at the same moment, at least one continues.
        """
        self.put(ACCEPTS, 0)
        if max(self._all(ACCEPTS)) > 1000 * (now_s - SHOWN_S):
            return True
        self.accept(now_s)
        return False

    def ahead(self, most: int, most_here: int) -> bool:
        """Whether another relay has fewer connections, by more than `FEW` or an eighth, whichever is larger.

        Near the bounds, `most` for all relays and `most_here` for this one, any difference counts: a relay without room
        closes a connection of its own.
        """
        cells = self._all(CONNECTIONS)
        own, least = cells[self._place], min(cells)
        if own + FEW >= most_here or sum(cells) + FEW >= most:
            return own > least
        return own > least + max(FEW, least // 8)

    def _all(self, field: int) -> list[int]:
        return self._cells[field * self.relays : (field + 1) * self.relays].tolist()


def alone() -> Load:
    """The `Load` of a process without other relays."""
    return Load(RelayLoads(1), 0)
