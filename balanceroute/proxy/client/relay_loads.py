"""What the client connections of each relay on one machine take, in memory that all of them share.

So `limits.max_connections`, `max_incoming_bytes` and `max_held_bytes` are bounds of the router: what one relay does not
need another may use. Each relay writes its own numbers and reads those of all, also when it last showed that it
accepts. The parent clears those of one that has died.
"""

import mmap
from typing import Final

CONNECTIONS: Final = 0
INCOMING_BYTES: Final = 1
SERVED_BYTES: Final = 2
ACCEPTS: Final = 3  # when it last showed that it does, in milliseconds of the machine's monotonic clock; 0: it does not
FIELDS: Final = 4
SHOWN_S: Final = 2.5  # a relay shows every second that it accepts: one that has not for so long stands still
FEW: Final = 64  # streams of an event per 20 ms are a tenth of what a relay carries


class RelayLoads:
    """The memory; made before the processes that share it are forked."""

    def __init__(self, relays: int) -> None:
        self.relays = relays
        self.cells = memoryview(mmap.mmap(-1, 8 * FIELDS * relays)).cast("q")  # all relays', field after field


class Load:
    """What the relay at `place` has, and what the others have."""

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
        """Stop accepting; returns False if no other relay accepts, so that this one must go on.

        If two relays stop in the same moment, both may have to go on, but never neither: each writes before it reads.
        """
        self.put(ACCEPTS, 0)
        if max(self._all(ACCEPTS)) > 1000 * (now_s - SHOWN_S):
            return True
        self.accept(now_s)
        return False

    def ahead(self, most: int) -> bool:
        """Whether another relay has fewer connections, by more than `FEW`, or an eighth where that is more; near the
        bound of `most` on all, by any: who has no room for a new one closes one of its own.
        """
        cells = self._all(CONNECTIONS)
        own, least = cells[self._place], min(cells)
        return own > least and (own > least + max(FEW, least // 8) or sum(cells) + FEW >= most)

    def _all(self, field: int) -> list[int]:
        return self._cells[field * self.relays : (field + 1) * self.relays].tolist()


def alone() -> Load:
    """The load of a process that accepts alone."""
    return Load(RelayLoads(1), 0)
