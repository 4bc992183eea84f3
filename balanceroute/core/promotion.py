"""`Promotion`: bounds how long one priority class keeps another waiting in the pool.

Lower classes go first, and no class ages into another by itself. So a flood of one class could keep the next class
waiting until it expires, and its prefills would be lost. A request that has waited `PATIENCE_SHARE` of the pool's TTL
behind another class therefore joins the class in front. At most one in `PROMOTION_PERIOD` admissions is such a request;
the other slots stay with the class that goes first. Without a TTL classes are strict.
"""

from operator import attrgetter

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import RequestTracker

PATIENCE_SHARE = 0.75  # of the pool's TTL: the rest is for a slot to free and the transfer to begin
PROMOTION_PERIOD = 16  # admissions: 6 % of the slots, about what Linux keeps free of realtime tasks for all others


class Promotion:
    """Moves overdue requests to the front class, and counts admissions since the last one."""

    def __init__(self) -> None:
        self._since_promotion = 0  # admissions

    def count_admissions(self, count: int) -> None:
        """So many requests were admitted since the last call."""
        self._since_promotion += count

    def promote(self, snapshot: ClusterSnapshot, now: float) -> None:
        """Move the request that is due, if there is one, to the front class."""
        starving = self.due(snapshot, now)
        if starving is not None:
            pool = snapshot.pool
            pool.remove(starving)
            starving.priority = pool.front[0].priority
            pool.add(starving)
            self._since_promotion = 0

    def due(self, snapshot: ClusterSnapshot, now: float) -> RequestTracker | None:
        """The request that has waited longest behind another class, if it has waited long enough, else None."""
        pool = snapshot.pool
        if self._since_promotion < PROMOTION_PERIOD or not pool.behind:
            return None
        starving_s = now - snapshot.longest_wait_s
        longest = [waiting.longest_waiting() for waiting in pool.behind]
        return min((t for t in longest if t.ready_s <= starving_s), key=attrgetter("ready_s"), default=None)
