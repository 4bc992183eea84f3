"""The recent past of a predictor: a bounded ring of finished requests in flat arrays.

Arrays and not objects, because a re-fit takes a copy on the event loop: 100,000 rows are one 3 MB memcpy
there, not a walk over Python objects. Old rows go by count (the ring) and by age (when a copy is taken,
relative to the newest row, so that no clock is needed).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .contract import FinishedRequest, FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]

DEFAULT_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Observations:
    """Finished requests as arrays of one shape (n,), in the order they finished."""

    output_tokens: IntArray
    censored: BoolArray
    prompt_tokens: IntArray
    finished_s: FloatArray

    def __len__(self) -> int:
        return len(self.output_tokens)

    @classmethod
    def of(cls, rows: Iterable[FinishedRequest]) -> "Observations":
        """Collect `rows`."""
        kept = list(rows)
        return cls(
            np.array([row.output_tokens for row in kept], dtype=np.int64),
            np.array([row.censored for row in kept], dtype=np.bool_),
            np.array([row.prompt_tokens for row in kept], dtype=np.int64),
            np.array([row.finished_s for row in kept], dtype=np.float64),
        )


class ObservationRing:
    """The last `capacity` finished requests; `pending` counts those since the last copy was taken."""

    def __init__(self, capacity: int = DEFAULT_ROWS, max_age_s: float | None = None) -> None:
        self._capacity = max(1, capacity)
        self._max_age_s = max_age_s
        self._output = np.zeros(self._capacity, dtype=np.int64)
        self._censored = np.zeros(self._capacity, dtype=np.bool_)
        self._prompt = np.zeros(self._capacity, dtype=np.int64)
        self._finished = np.zeros(self._capacity, dtype=np.float64)
        self._added = 0
        self.pending = 0

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    def add(self, row: FinishedRequest) -> None:
        """Append one row, over the oldest one when full."""
        at = self._added % self._capacity
        self._output[at] = row.output_tokens
        self._censored[at] = row.censored
        self._prompt[at] = row.prompt_tokens
        self._finished[at] = row.finished_s
        self._added += 1
        self.pending += 1

    def take(self) -> Observations:
        """Copy the rows that are young enough, oldest first, and reset `pending`."""
        self.pending = 0
        if self._added <= self._capacity:
            order: slice | IntArray = slice(0, self._added)
        else:
            order = (np.arange(self._capacity) + self._added) % self._capacity
        finished = self._finished[order].copy()
        keep = np.ones(len(finished), dtype=np.bool_)
        if self._max_age_s is not None and len(finished):
            keep = finished >= finished.max() - self._max_age_s
        return Observations(
            self._output[order][keep], self._censored[order][keep], self._prompt[order][keep], finished[keep]
        )
