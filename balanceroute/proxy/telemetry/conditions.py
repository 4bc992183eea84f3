"""Conditions: faults that do not stop service. Each gets a log line when it begins and ends, and a reason in `/ready`.

A condition changes nothing by itself: it informs an operator. One that comes and goes (a worker that is often too busy
to be read) is logged once per `QUIET_S` at most; one that lasts is logged within that time.
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
SLOTS: Final = "slots"
KINDS: Final = (CONNECTOR, METRICS, PREFIX_CACHE, SLOTS)
QUIET_S: Final = 60.0
_NAMED: Final = 4  # workers named per reason; further ones are only counted


class Conditions:
    """At most one condition of each kind per worker."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: dict[tuple[str, str], str] = {}
        self._logged: set[tuple[str, str]] = set()  # those whose begin was logged
        self._logged_s: dict[tuple[str, str], float] = {}  # when that was

    def hold(self, kind: str, worker_id: str, reason: str) -> None:
        """Begin a condition. Idempotent: it is logged once, even if the reason changes."""
        key, now = (kind, worker_id), self._now()
        self._held[key] = reason
        if key not in self._logged and now - self._logged_s.get(key, -math.inf) >= QUIET_S:
            self._logged.add(key)
            self._logged_s[key] = now
            log.warning("degraded", extra={"worker": worker_id, "kind": kind, "reason": reason})

    def clear(self, kind: str, worker_id: str) -> None:
        """End a condition. Idempotent."""
        self._held.pop((kind, worker_id), None)
        if (kind, worker_id) in self._logged:
            self._logged.discard((kind, worker_id))
            log.info("no longer degraded", extra={"worker": worker_id, "kind": kind})

    def forget(self, worker_id: str, kinds: Iterable[str] = KINDS) -> None:
        """Drop the conditions of a worker that has left or is down, without a log line: nothing has improved."""
        for kind in kinds:
            self._held.pop((kind, worker_id), None)
            self._logged.discard((kind, worker_id))
            self._logged_s.pop((kind, worker_id), None)

    def count(self, kind: str) -> int:
        """How many workers are under a condition of this kind."""
        return sum(held == kind for held, _ in self._held)

    @property
    def reasons(self) -> list[str]:
        """The reasons, each with the workers that it holds for."""
        where: dict[str, list[str]] = defaultdict(list)
        for (_, worker_id), reason in self._held.items():
            where[reason].append(worker_id)
        return [f"{_names(workers)}: {reason}" for reason, workers in where.items()]


def _names(workers: list[str]) -> str:
    more = len(workers) - _NAMED
    return ", ".join(workers[:_NAMED]) + (f" and {more} more" if more > 0 else "")
