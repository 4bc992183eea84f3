"""Counters and histograms that cost a list access, exposed through `prometheus_client` only when scraped.

The client library takes a lock and walks the buckets on every observation; with five of those per request that is
more than the whole routing decision. All writers here are on one event loop, so plain integers are exact.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

CounterRow = Sequence[Any]
"""The values of the labels, and the count."""
HistogramRow = Sequence[Any]
"""The value of the label, how many fell in each bucket, and the sum."""

_WORTH_AN_ARRAY: Final = 32  # values; below, numpy's calls cost more than the loop
DECISION_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1)


class Histogram:
    """Observations in fixed buckets (upper bounds, ascending; +Inf is implied).

    `observe(value)` is the `append` of a list. Reading sorts the appended values into the buckets; if nothing reads,
    call `fold` from time to time.
    """

    __slots__ = ("_counts", "_taken_down", "_total", "bounds", "observe")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0
        self._taken_down: list[float] = []
        self.observe = self._taken_down.append

    def fold(self, at_least: int = 1) -> None:
        """Sort the appended values into the buckets, if there are `at_least` that many. O(values * log buckets)."""
        values = self._taken_down
        if len(values) < at_least:
            return
        if len(values) < _WORTH_AN_ARRAY:
            for value in values:
                self._counts[bisect_left(self.bounds, value)] += 1
        else:
            found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self._counts))
            self._counts = [count + more for count, more in zip(self._counts, found.tolist(), strict=True)]
        self._total += sum(values)
        values.clear()

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the observations of another histogram with the same buckets."""
        self._counts = [count + more for count, more in zip(self._counts, counts, strict=True)]
        self._total += total

    @property
    def counts(self) -> list[int]:
        """How many values fell in each bucket."""
        self.fold()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of all values."""
        self.fold()
        return self._total

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """The buckets as the exposition format wants them: (upper bound, values at most that)."""
        below = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows


class HistogramFamily:
    """Histograms of one name, one per label value."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], label: str | None = None) -> None:
        self.name, self.help_text, self._bounds, self._label = name, help_text, bounds, label
        self._children: dict[str, Histogram] = {}

    def child(self, value: str = "") -> Histogram:
        """The histogram of a label value, made on first use; keep it, don't look it up per observation."""
        child = self._children.get(value)
        if child is None:
            child = self._children[value] = Histogram(self._bounds)
        return child

    def rows(self) -> list[HistogramRow]:
        """All observations, as plain data."""
        return [(value, list(child.counts), child.total) for value, child in self._children.items()]

    def add(self, rows: Iterable[HistogramRow]) -> None:
        """Add observations of other processes; those of another version with other buckets are left out."""
        for value, counts, total in rows:
            if len(counts) == len(self._bounds) + 1:
                self.child(value).add(counts, total)

    def copy(self) -> "HistogramFamily":
        """A copy with the same observations."""
        other = HistogramFamily(self.name, self.help_text, self._bounds, self._label)
        other.add(self.rows())
        return other

    def fold(self, at_least: int) -> None:
        """As `Histogram.fold`, for each."""
        for child in self._children.values():
            child.fold(at_least)

    def family(self) -> HistogramMetricFamily:
        """For the exposition."""
        labels = None if self._label is None else [self._label]
        family = HistogramMetricFamily(self.name, self.help_text, labels=labels)
        for value, child in self._children.items():
            family.add_metric([] if labels is None else [value], child.cumulative(), child.total)
        return family


class StageClock:
    """Times the stages of a decision into one histogram each; the core, which has no clock, calls it as they end."""

    def __init__(self) -> None:
        self.stages = HistogramFamily(
            "balanceroute_decision_stage_seconds",
            "Parts of a decision of br_0, br_h, target_fit and level_fit: prepare, stage1, stage2.",
            DECISION_SECONDS,
            "stage",
        )
        self._observe: dict[str, Callable[[float], None]] = {}
        self._since = 0.0

    def begin(self) -> None:
        """Begin to time a decision."""
        self._since = perf_counter()

    def __call__(self, stage: str) -> None:
        """The stage has ended; the next one begins."""
        now = perf_counter()
        observe = self._observe.get(stage)
        if observe is None:
            observe = self._observe[stage] = self.stages.child(stage).observe
        observe(now - self._since)
        self._since = now


class CounterFamily:
    """Counters of one name, by label values (bounded sets only)."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help_text, self._labels = name, help_text, list(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def inc(self, *values: str, by: float = 1) -> None:
        """Count under these label values, in the order of the labels."""
        self._values[values] = self._values.get(values, 0) + by

    def value(self, *values: str) -> float:
        """The count so far; 0 where nothing was counted."""
        return self._values.get(values, 0)

    def rows(self) -> list[CounterRow]:
        """All counts, as plain data."""
        return [(list(values), count) for values, count in self._values.items()]

    def add(self, rows: Iterable[CounterRow]) -> None:
        """Add counts of other processes; those of another version with other labels are left out."""
        for values, count in rows:
            if len(values) == len(self._labels):
                self.inc(*values, by=count)

    def copy(self) -> "CounterFamily":
        """A copy with the same counts."""
        other = CounterFamily(self.name, self.help_text, self._labels)
        other.add(self.rows())
        return other

    def workers(self) -> set[str]:
        """The workers that have a series; none where there is no label `worker`."""
        return {values[self._labels.index("worker")] for values in self._values} if "worker" in self._labels else set()

    def forget_worker(self, worker_id: str) -> None:
        """Drop every series of a worker that has left, if there is a label `worker`."""
        if "worker" in self._labels:
            place = self._labels.index("worker")
            for key in [key for key in self._values if key[place] == worker_id]:
                del self._values[key]

    def family(self) -> CounterMetricFamily:
        """For the exposition."""
        family = CounterMetricFamily(self.name, self.help_text, labels=self._labels)
        for values, count in self._values.items():
            family.add_metric(list(values), count)
        return family
