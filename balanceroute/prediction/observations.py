"""The recent past of a predictor: a bounded run of finished requests in flat arrays.

Arrays and not objects, and arrays in chunks: a full chunk is never written again, so what a re-fit works on
is a list of references and one copy of the open chunk (`freeze`, 20 us on the event loop however long the
history is). Joining them into long arrays, which touches megabytes of fresh memory (5 ms for 200,000 rows),
is the worker's business. Old rows go by count (whole chunks from the front) and by age (when joined, relative
to the last row: that needs no clock, and rows of one that was ahead for a while make no others look old).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.arrays import BoolArray, FloatArray, IntArray

from .contract import FinishedRequest

DEFAULT_ROWS = 100_000
CHUNK = 2048  # rows


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

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All of them, in their order."""
        return self.output_tokens, self.censored, self.prompt_tokens, self.finished_s, self.key_ids

    def where(self, keep: BoolArray) -> "Observations":
        """Return the rows that `keep` marks."""
        return Observations(*(column[keep] for column in self.columns))

    def head(self, n: int) -> "Observations":
        """Copy the first `n` rows."""
        return Observations(*(column[:n].copy() for column in self.columns))

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


@dataclass(frozen=True, slots=True)
class Recent:
    """A frozen view of a ring: immutable chunks, oldest first, and the bounds that joining applies."""

    chunks: tuple[Observations, ...]
    capacity: int
    max_age_s: float | None

    @property
    def n_rows(self) -> int:
        """Rows in the view, before those beyond the bounds are left out."""
        return sum(len(chunk) for chunk in self.chunks)

    def joined(self) -> Observations:
        """Join the chunks and leave out what is too old or too much; any thread."""
        columns = zip(*(chunk.columns for chunk in self.chunks), strict=True)
        rows = Observations(*(np.concatenate(parts)[-self.capacity :] for parts in columns))
        if self.max_age_s is None or not len(rows):
            return rows
        return rows.where(rows.finished_s >= rows.finished_s[-1] - self.max_age_s)


class ObservationRing:
    """The last `capacity` finished requests; `pending` counts those since the last view was taken.

    `added` counts all so far; the first `of_model` came from a model file.
    """

    def __init__(self, capacity: int, max_age_s: float | None = None) -> None:
        self._capacity = max(1, capacity)
        self._max_age_s = max_age_s
        self._full: deque[Observations] = deque()
        self._open = _empty_chunk()
        self._fill = 0
        self.pending = self.added = self.of_model = 0

    def __len__(self) -> int:
        return min(len(self._full) * CHUNK + self._fill, self._capacity)

    def add(self, row: FinishedRequest) -> None:
        """Append one row; 1 us."""
        chunk, at = self._open, self._fill
        chunk.output_tokens[at] = row.output_tokens
        chunk.censored[at] = row.censored
        chunk.prompt_tokens[at] = row.prompt_tokens
        chunk.finished_s[at] = row.finished_s
        chunk.key_ids[at] = key_id(row.prompt_key)
        self._fill += 1
        self.pending += 1
        self.added += 1
        if self._fill == CHUNK:
            self._full.append(chunk)
            self._open, self._fill = _empty_chunk(), 0
            while (len(self._full) - 1) * CHUNK >= self._capacity:
                self._full.popleft()

    def freeze(self, running: "Sequence[tuple[int, int]] | IntArray" = ()) -> Recent:
        """Return a view that later rows don't change, and reset `pending`.

        `running` are (age, prompt tokens) of the requests that run now, as pairs or an array (n, 2). They join
        the view as cut short at their age: without them a cold start knows only those that were quick to finish,
        and takes every request for a short one.
        """
        self.pending = 0
        newest_s = float(self._open.finished_s[self._fill - 1]) if self._fill else float("-inf")
        if not self._fill and self._full:
            newest_s = float(self._full[-1].finished_s[-1])
        pairs = np.asarray(running, dtype=np.int64).reshape(-1, 2)
        n = len(pairs)
        still = Observations(
            pairs[:, 0], np.ones(n, dtype=np.bool_), pairs[:, 1], np.full(n, newest_s), np.zeros(n, dtype=np.int64)
        )
        chunks = (*self._full, self._open.head(self._fill), still)
        return Recent(chunks, self._capacity + len(still), self._max_age_s)

    def take(self) -> Observations:
        """Join a frozen view here and now; milliseconds when the history is long."""
        return self.freeze().joined()


def _empty_chunk() -> Observations:
    return Observations(
        np.zeros(CHUNK, dtype=np.int64),
        np.zeros(CHUNK, dtype=np.bool_),
        np.zeros(CHUNK, dtype=np.int64),
        np.zeros(CHUNK, dtype=np.float64),
        np.zeros(CHUNK, dtype=np.int64),
    )
