"""`PromptPool`: prefilled requests that wait for a decode slot (R_wait), class by class.

A class is one `priority`; lower goes first, as in vLLM. Policies look at `front`, the lowest class that waits, and come
to the next one when it is empty: so no request is admitted while one of a lower class waits, and within a class each
policy balances as if there were no other. What bounds the wait of a class that others precede is the scheduler's
business (`core.promotion`).

A class keeps three orders over its entries, each by insertion, so that a decision never sorts: waiting order (arrival),
prompt size (for the best single request of the class), and the time at which an entry has waited too long. Insertion
and removal cost two binary searches and a memmove of at most the pool's size (a few hundred entries). The order by
size, and sizes and times as arrays, are kept from when a policy first asks for them: no policy asks for both, and where
nothing has to wait for a slot, none for either.
"""

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from balanceroute.core.tracker import RequestTracker
from balanceroute.errors import InvariantError

SPARE_ENTRIES: Final = 64  # kept entries of requests that have left, beyond one per waiting request


class WaitingClass:
    """Waiting requests of one priority in arrival order."""

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._trackers: list[RequestTracker] = []
        self._overdue: list[tuple[float, int, RequestTracker]] = []
        self.sizes: list[tuple[int, int, RequestTracker]] | None = None
        self._arrays: tuple[array[float], array[float]] | None = None  # prompt tokens and when each became ready

    def __len__(self) -> int:
        return len(self._trackers)

    def __iter__(self) -> Iterator[RequestTracker]:
        return iter(self._trackers)

    def __contains__(self, tracker: RequestTracker) -> bool:
        position = bisect_left(self._orders, tracker.order)
        return position < len(self._orders) and self._trackers[position] is tracker

    def __getitem__(self, position: int) -> RequestTracker:
        return self._trackers[position]

    def head(self, count: int) -> list[RequestTracker]:
        """The first `count` entries in waiting order."""
        return self._trackers[:count]

    def add(self, tracker: RequestTracker) -> None:
        """Take in an entry."""
        position = bisect_left(self._orders, tracker.order)
        self._orders.insert(position, tracker.order)
        self._trackers.insert(position, tracker)
        if self.sizes is not None:
            insort(self.sizes, (tracker.prompt_tokens, tracker.order, tracker))
        if self._arrays is not None:
            prompt_tokens, ready_s = self._arrays
            prompt_tokens.insert(position, tracker.prompt_tokens)
            ready_s.insert(position, tracker.ready_s)
        if tracker.overdue_s < math.inf:
            heappush(self._overdue, (tracker.overdue_s, tracker.order, tracker))

    def remove(self, tracker: RequestTracker) -> None:
        """Take out an entry. Raises InvariantError when it is not here."""
        position = bisect_left(self._orders, tracker.order)
        if position == len(self._orders) or self._trackers[position] is not tracker:
            raise InvariantError(f"{tracker.id} is not in the pool")
        del self._orders[position], self._trackers[position]
        if self.sizes is not None:
            del self.sizes[bisect_left(self.sizes, (tracker.prompt_tokens, tracker.order))]
        if self._arrays is not None:
            prompt_tokens, ready_s = self._arrays
            del prompt_tokens[position], ready_s[position]
        if len(self._overdue) > 2 * len(self._trackers) + SPARE_ENTRIES:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Drop the entries of requests that have left. O(1) per removal on average."""
        self._overdue = [(each.overdue_s, each.order, each) for each in self._trackers if each.overdue_s < math.inf]
        heapify(self._overdue)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Prompt sizes and when each entry became ready, in waiting order, shape (len,), tokens and seconds; copies."""
        if not self._trackers:
            return np.empty(0), np.empty(0)
        if self._arrays is None:
            prompt_tokens = array("d", [tracker.prompt_tokens for tracker in self._trackers])
            self._arrays = prompt_tokens, array("d", [tracker.ready_s for tracker in self._trackers])
        sizes, times = self._arrays
        return np.frombuffer(sizes).copy(), np.frombuffer(times).copy()

    def longest_waiting(self) -> RequestTracker:
        """The entry that became ready first; O(n). The class is not empty."""
        return min(self._trackers, key=attrgetter("ready_s"))

    def largest_at_most(self, tokens: float) -> RequestTracker | None:
        """The first in waiting order among the largest prompts of at most `tokens`; O(log n)."""
        sizes = self._ascending()
        after = bisect_left(sizes, (tokens, math.inf))
        if after == 0:
            return None
        return sizes[bisect_left(sizes, (sizes[after - 1][0],))][2]

    def smallest_above(self, tokens: float) -> RequestTracker | None:
        """The first in waiting order among the smallest prompts of more than `tokens`; O(log n)."""
        sizes = self._ascending()
        after = bisect_left(sizes, (tokens, math.inf))
        return sizes[after][2] if after < len(sizes) else None

    def first_between(self, low_tokens: float, high_tokens: float) -> RequestTracker | None:
        """The first in waiting order with a prompt of these sizes, both included; O(n)."""
        return next((each for each in self._trackers if low_tokens <= each.prompt_tokens <= high_tokens), None)

    def by_size(self, count: int, *, descending: bool) -> list[RequestTracker]:
        """The `count` smallest (or largest) prompts; equal ones in waiting order."""
        if len(self._trackers) == 1:
            return self._trackers[:count]
        if not descending:
            return [entry[2] for entry in self._ascending()[:count]]
        return sorted(self._trackers, key=attrgetter("prompt_tokens"), reverse=True)[:count]

    def most_overdue(self, now: float) -> RequestTracker | None:
        """The entry that passed its patience first, if any has; amortised O(log n)."""
        while self._overdue:
            overdue_s, _, tracker = self._overdue[0]
            if tracker in self and tracker.overdue_s == overdue_s:
                return tracker if overdue_s <= now else None
            heappop(self._overdue)
        return None

    def _ascending(self) -> list[tuple[int, int, RequestTracker]]:
        """By prompt size, then by arrival."""
        if self.sizes is None:
            self.sizes = sorted((tracker.prompt_tokens, tracker.order, tracker) for tracker in self._trackers)
        return self.sizes


class PromptPool:
    """All waiting requests; iterates in waiting order: by priority, then by arrival. `size` is how many, as `len`."""

    def __init__(self) -> None:
        self._classes: dict[int, WaitingClass] = {}  # those that hold something
        self._priorities: list[int] = []  # theirs, ascending
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[RequestTracker]:
        return chain.from_iterable([self._classes[priority] for priority in self._priorities])

    def __contains__(self, tracker: RequestTracker) -> bool:
        waiting = self._classes.get(tracker.priority)
        return waiting is not None and tracker in waiting

    @property
    def tokens(self) -> int:
        """Sum of the prompt tokens waiting. O(n)."""
        return sum([tracker.prompt_tokens for tracker in self])

    @property
    def front(self) -> WaitingClass:
        """The class that is served now: the lowest priority that waits. The pool is not empty."""
        return self._classes[self._priorities[0]]

    @property
    def behind(self) -> list[WaitingClass]:
        """The classes that wait for the front one, in the order in which they will be served."""
        return [self._classes[priority] for priority in self._priorities[1:]]

    def add(self, tracker: RequestTracker) -> None:
        """Take in an entry whose prompt size, priority, ready time and overdue time are set and stay so."""
        waiting = self._classes.get(tracker.priority)
        if waiting is None:
            waiting = self._classes[tracker.priority] = WaitingClass()
            insort(self._priorities, tracker.priority)
        waiting.add(tracker)
        self.size += 1

    def remove(self, tracker: RequestTracker) -> None:
        """Take out an entry. Raises InvariantError when it is not in the pool."""
        waiting = self._classes.get(tracker.priority)
        if waiting is None:
            raise InvariantError(f"{tracker.id} is not in the pool")
        waiting.remove(tracker)
        if not waiting._trackers:
            del self._classes[tracker.priority]
            self._priorities.remove(tracker.priority)
        self.size -= 1
