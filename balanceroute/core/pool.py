"""`PromptPool`: prefilled requests that wait for a decode slot (R_wait).

Three orders over the same entries, each kept by insertion so that a decision never sorts:
waiting order (priority, then arrival), prompt size (for the best single request of the whole pool), and the time at
which an entry has waited too long. Insertion and removal cost two binary searches and a memmove of at most the pool's
size (a few hundred entries).
"""

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.errors import InvariantError

if TYPE_CHECKING:
    from balanceroute.core.snapshot import RequestTracker


class PromptPool:
    """Waiting requests in priority and arrival order, with their sizes and waiting times as arrays."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._trackers: list[RequestTracker] = []
        self._prompt_tokens = array("d")
        self._ready_s = array("d")
        self._by_size: list[tuple[int, int, int, RequestTracker]] = []
        self._overdue: list[tuple[float, int, RequestTracker]] = []
        self.tokens = 0  # sum of the prompt tokens waiting

    def __len__(self) -> int:
        return len(self._trackers)

    def __iter__(self) -> Iterator["RequestTracker"]:
        return iter(self._trackers)

    def __contains__(self, tracker: "RequestTracker") -> bool:
        position = bisect_left(self._keys, (tracker.priority, tracker.order))
        return position < len(self._keys) and self._trackers[position] is tracker

    def __getitem__(self, position: int) -> "RequestTracker":
        return self._trackers[position]

    def head(self, count: int) -> list["RequestTracker"]:
        """The first `count` entries in waiting order."""
        return self._trackers[:count]

    def add(self, tracker: "RequestTracker") -> None:
        """Take in an entry whose prompt size, priority, ready time and overdue time are set and stay so."""
        key = (tracker.priority, tracker.order)
        position = bisect_left(self._keys, key)
        self._keys.insert(position, key)
        self._trackers.insert(position, tracker)
        self._prompt_tokens.insert(position, tracker.prompt_tokens)
        self._ready_s.insert(position, tracker.ready_s)
        insort(self._by_size, (tracker.prompt_tokens, *key, tracker))
        if tracker.overdue_s < math.inf:
            heappush(self._overdue, (tracker.overdue_s, tracker.order, tracker))
        self.tokens += tracker.prompt_tokens

    def remove(self, tracker: "RequestTracker") -> None:
        """Take out an entry. Raises InvariantError when it is not in the pool."""
        key = (tracker.priority, tracker.order)
        position = bisect_left(self._keys, key)
        if position == len(self._keys) or self._trackers[position] is not tracker:
            raise InvariantError(f"{tracker.id} is not in the pool")
        del self._keys[position], self._trackers[position]
        del self._prompt_tokens[position], self._ready_s[position]
        del self._by_size[bisect_left(self._by_size, (tracker.prompt_tokens, *key))]
        self.tokens -= tracker.prompt_tokens

    def prompt_tokens(self) -> NDArray[np.float64]:
        """Prompt sizes in waiting order, shape (len,), tokens; a copy."""
        return np.frombuffer(self._prompt_tokens, dtype=np.float64).copy() if self._trackers else np.empty(0)

    def ready_s(self) -> NDArray[np.float64]:
        """When each entry became ready, in waiting order, shape (len,), seconds; a copy."""
        return np.frombuffer(self._ready_s, dtype=np.float64).copy() if self._trackers else np.empty(0)

    def largest_at_most(self, tokens: float) -> "RequestTracker | None":
        """The first in waiting order among the largest prompts of at most `tokens`; O(log n)."""
        after = bisect_left(self._by_size, (tokens, math.inf))
        if after == 0:
            return None
        return self._by_size[bisect_left(self._by_size, (self._by_size[after - 1][0],))][3]

    def smallest_above(self, tokens: float) -> "RequestTracker | None":
        """The first in waiting order among the smallest prompts of more than `tokens`; O(log n)."""
        after = bisect_left(self._by_size, (tokens, math.inf))
        return self._by_size[after][3] if after < len(self._by_size) else None

    def first_between(self, low_tokens: float, high_tokens: float) -> "RequestTracker | None":
        """The first in waiting order with a prompt of these sizes, both included; O(n)."""
        return next((each for each in self._trackers if low_tokens <= each.prompt_tokens <= high_tokens), None)

    def by_size(self, count: int, *, descending: bool) -> list["RequestTracker"]:
        """The `count` smallest (or largest) prompts; equal ones in waiting order."""
        if not descending:
            return [entry[3] for entry in self._by_size[:count]]
        return sorted(self._trackers, key=lambda tracker: -tracker.prompt_tokens)[:count]

    def most_overdue(self, now: float) -> "RequestTracker | None":
        """The entry that passed its patience first, if any has; amortised O(log n)."""
        while self._overdue:
            overdue_s, _, tracker = self._overdue[0]
            if tracker in self and tracker.overdue_s == overdue_s:
                return tracker if overdue_s <= now else None
            heappop(self._overdue)
        return None
