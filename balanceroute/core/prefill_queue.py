"""`PrefillQueue`: the order in which waiting requests get a prefiller.

Lower priority first; within a priority by arrival plus `ageing` times the expected seconds of the own prefill: a short
prompt passes long ones that came shortly before, and a long one waits in proportion to its length.

To compute a place takes a look-up in every prefiller's cache, so it is computed only if a request must wait; most get a
prefiller at once. It is computed once, and a request that comes back keeps it. Requests leave from the middle as well;
their entries stay until they are at the head, or until they are the larger part.
"""

import math
from heapq import heapify, heappop, heappush

from balanceroute.core.pool import SPARE_ENTRIES
from balanceroute.core.prefill_work import work_tokens
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import RequestTracker
from balanceroute.core.types import QUEUED

AGEING = 1.0  # `reproduce prefix` measures it
MOST_AHEAD = 0.5  # of the queue's deadline: nobody expires for being long


class PrefillQueue:
    """The order only; `ClusterSnapshot.queued` and the phase of each request say which ones wait."""

    def __init__(self) -> None:
        self._ageing, self._most_ahead_s = AGEING, math.inf
        self._incoming: list[RequestTracker] = []  # arrivals whose places are not computed yet
        self._ordered: list[tuple[int, float, int, RequestTracker]] = []  # a heap

    def configure(self, ageing: float, deadline_s: float) -> None:
        """Use another `ageing` (seconds of waiting per second of the own prefill) and deadline of arrivals."""
        self._ageing, self._most_ahead_s = ageing, MOST_AHEAD * deadline_s

    def add(self, tracker: RequestTracker, n_queued: int) -> None:
        """Add a request, as one of `n_queued`. O(1) on average."""
        self._incoming.append(tracker)
        if len(self._incoming) + len(self._ordered) > 2 * n_queued + SPARE_ENTRIES:
            self._forget_gone()

    def head(self, snapshot: ClusterSnapshot) -> RequestTracker | None:
        """The next request to get a prefiller. If more than one waits, their places are computed."""
        incoming, ordered = self._incoming, self._ordered
        if not ordered and len(incoming) == 1 and incoming[0].phase is QUEUED:
            return incoming[0]
        for tracker in incoming:
            self._put_in_order(tracker, snapshot)
        incoming.clear()
        while ordered and ordered[0][-1].phase is not QUEUED:
            heappop(ordered)
        return ordered[0][-1] if ordered else None

    def pop(self) -> None:
        """Remove the request that `head` has just returned."""
        if self._incoming:
            self._incoming.clear()
        else:
            heappop(self._ordered)

    def order_anew(self) -> None:
        """Order the waiting requests again by new arrival numbers."""
        self._incoming += [entry[-1] for entry in self._ordered]
        self._ordered.clear()

    def _put_in_order(self, tracker: RequestTracker, snapshot: ClusterSnapshot) -> None:
        if tracker.queue_s is None:
            ahead_s = self._ageing * expected_prefill_s(tracker, snapshot)
            tracker.queue_s = tracker.arrived_s + min(ahead_s, self._most_ahead_s)
        heappush(self._ordered, (tracker.priority, tracker.queue_s, tracker.order, tracker))

    def _forget_gone(self) -> None:
        """Drop the entries of requests that left from the middle."""
        self._incoming = [tracker for tracker in self._incoming if tracker.phase is QUEUED]
        self._ordered = [entry for entry in self._ordered if entry[-1].phase is QUEUED]
        heapify(self._ordered)


def expected_prefill_s(tracker: RequestTracker, snapshot: ClusterSnapshot) -> float:
    """Seconds of its prefill where most of it is cached, at the prefillers' mean pace."""
    uncached = tracker.prompt_tokens
    if tracker.prefix:
        uncached = min(map(tracker.uncached_on, snapshot.prefillers), default=uncached)
    return work_tokens(tracker.prompt_tokens, uncached) * snapshot.prefill_s_per_token
