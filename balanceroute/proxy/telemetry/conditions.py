"""What is wrong although requests are served: one log line when it begins and one when it ends, `/ready`.

A condition is a diagnosis and stops nothing by itself: an operator reads of it, and may act. One that comes and goes,
as of a worker that is often too busy to be read, is logged once in `QUIET_S`; one that stays is logged by then.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

log = logging.getLogger(__name__)

CONNECTOR: Final = "connector"
METRICS: Final = "metrics"
PREFIX_CACHE: Final = "prefix_cache"
KINDS: Final = (CONNECTOR, METRICS, PREFIX_CACHE)
QUIET_S: Final = 60.0
_NAMED: Final = 4  # workers of one reason that are named; the rest is counted


class Conditions:
    """At most one condition of each kind per worker."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: dict[tuple[str, str], str] = {}
        self._told: set[tuple[str, str]] = set()  # of which the log says that they hold
        self._told_s: dict[tuple[str, str], float] = {}  # when the log said so last

    def hold(self, kind: str, worker_id: str, reason: str) -> None:
        """From now on; told once, however often it is said again, and whatever the reason becomes."""
        key, now = (kind, worker_id), self._now()
        self._held[key] = reason
        if key not in self._told and now - self._told_s.get(key, -math.inf) >= QUIET_S:
            self._told.add(key)
            self._told_s[key] = now
            log.warning("degraded", extra={"worker": worker_id, "kind": kind, "reason": reason})

    def clear(self, kind: str, worker_id: str) -> None:
        """The condition is over. Idempotent."""
        self._held.pop((kind, worker_id), None)
        if (kind, worker_id) in self._told:
            self._told.discard((kind, worker_id))
            log.info("no longer degraded", extra={"worker": worker_id, "kind": kind})

    def forget(self, worker_id: str, kinds: Iterable[str] = KINDS) -> None:
        """The worker has left, or is down, which says more: nothing is better than before, so nothing is logged."""
        for kind in kinds:
            self._held.pop((kind, worker_id), None)
            self._told.discard((kind, worker_id))
            self._told_s.pop((kind, worker_id), None)

    def count(self, kind: str) -> int:
        """How many workers are under a condition of this kind."""
        return sum(held == kind for held, _ in self._held)

    @property
    def reasons(self) -> list[str]:
        """What is wrong, and at which workers; workers with the same reason are named together."""
        where: dict[str, list[str]] = defaultdict(list)
        for (_, worker_id), reason in self._held.items():
            where[reason].append(worker_id)
        return [f"{_names(workers)}: {reason}" for reason, workers in where.items()]


def _names(workers: list[str]) -> str:
    more = len(workers) - _NAMED
    return ", ".join(workers[:_NAMED]) + (f" and {more} more" if more > 0 else "")
