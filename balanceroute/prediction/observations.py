"""The recent past of a predictor: a bounded ring of finished requests in flat arrays.

Arrays and not objects, because a re-fit takes a copy on the event loop: 100,000 rows are one 3 MB memcpy
there, not a walk over Python objects. Old rows go by count (the ring) and by age (when a copy is taken,
relative to the newest row, so that no clock is needed).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .contract import FinishedRequest, FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

DEFAULT_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Observations:
    """Finished requests as arrays of one shape (n,), in the order they finished.

    `key_ids` tells equal keys apart within one process and is 0 where the key is unknown.
    """

    output_tokens: IntArray
    censored: BoolArray
    prompt_tokens: IntArray
    finished_s: FloatArray
    key_ids: IntArray

    def __len__(self) -> int:
        return len(self.output_tokens)

    def where(self, keep: BoolArray) -> "Observations":
        """Return the rows that `keep` marks."""
        return Observations(
            self.output_tokens[keep],
            self.censored[keep],
            self.prompt_tokens[keep],
            self.finished_s[keep],
            self.key_ids[keep],
        )

    @classmethod
    def of(cls, rows: Iterable[FinishedRequest]) -> "Observations":
        """Collect `rows`."""
        kept = list(rows)
        return cls(
            np.array([row.output_tokens for row in kept], dtype=np.int64),
            np.array([row.censored for row in kept], dtype=np.bool_),
            np.array([row.prompt_tokens for row in kept], dtype=np.int64),
            np.array([row.finished_s for row in kept], dtype=np.float64),
            np.array([key_id(row.prompt_key) for row in kept], dtype=np.int64),
        )


def key_id(key: str) -> int:
    """Return a number for `key` that is only good for comparing within this process; 0 for the unknown key."""
    return hash(key) if key else 0


class ObservationRing:
    """The last `capacity` finished requests; `pending` counts those since the last copy was taken."""

    def __init__(self, capacity: int = DEFAULT_ROWS, max_age_s: float | None = None) -> None:
        self._capacity = max(1, capacity)
        self._max_age_s = max_age_s
        self._output = np.zeros(self._capacity, dtype=np.int64)
        self._censored = np.zeros(self._capacity, dtype=np.bool_)
        self._prompt = np.zeros(self._capacity, dtype=np.int64)
        self._finished = np.zeros(self._capacity, dtype=np.float64)
        self._key = np.zeros(self._capacity, dtype=np.int64)
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
        self._key[at] = key_id(row.prompt_key)
        self._added += 1
        self.pending += 1

    def take(self) -> Observations:
        """Copy the rows that are young enough, oldest first, and reset `pending`."""
        self.pending = 0
        taken = Observations(
            self._unrolled(self._output),
            self._unrolled(self._censored),
            self._unrolled(self._prompt),
            self._unrolled(self._finished),
            self._unrolled(self._key),
        )
        if self._max_age_s is None or not len(taken):
            return taken
        young = taken.finished_s >= taken.finished_s.max() - self._max_age_s
        return taken if young.all() else taken.where(young)

    def _unrolled(self, column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Copy a column, oldest row first."""
        if self._added <= self._capacity:
            return column[: self._added].copy()
        at = self._added % self._capacity
        return np.concatenate((column[at:], column[:at]))
