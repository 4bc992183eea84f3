"""Writes one line per engine step: its end, duration and batch.

A step is seen from two sides. `scheduled` is called when the engine's scheduler has put a batch together: that is when
its load is known, after new requests have joined and before any of it finishes. `completed` is called when a batch's
result is in. With asynchronous scheduling the next batch is put together before the last one's result: batches complete
in the order in which they were scheduled, and a step costs the time since its scheduling or since the end of the step
before it, whichever is later, so that costs add up to the time that passed and overlap is not counted twice.

The file is a CSV with a header; times are Unix seconds, so that ranks on several machines can be laid over each other.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

COLUMNS = ("time", "step_cost_ms", "running_reqs", "total_tokens", "waiting_reqs", "kv_cache_usage")
PREFILL_NAME = "steps-prefill-"  # what the name of a prefiller's file begins with
FLUSH_EVERY_S = 1.0  # a killed engine loses about that much
_LONGEST_LINE = 1024  # bytes; the longest of ours has a tenth


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch: requests, their KV tokens, waiting requests, KV usage (ratio)."""

    running_reqs: int
    total_tokens: int
    waiting_reqs: int
    kv_cache_usage: float
    empty: bool = False  # nothing to compute: its completion is no step


class StepLog:
    """The file of one DP rank; opened at the first step, so in the process that steps.

    Args: folder: created if missing. rank: of the name. clock: monotonic seconds; wall: Unix seconds. prefills: whether
    the engine computes prompts for others to decode.
    """

    def __init__(
        self,
        folder: Path,
        rank: str,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
        *,
        prefills: bool = False,
    ) -> None:
        self._folder, self._rank, self._clock, self._wall = folder, rank, clock, wall
        self._name = PREFILL_NAME if prefills else "steps-"
        self._file: TextIO | None = None
        self._under_way: deque[tuple[float, Batch]] = deque()
        self._ended = self._flushed = float("-inf")

    @property
    def path(self) -> Path:
        """Kind, rank and process: servers of one machine may both have a rank 0."""
        return self._folder / f"{self._name}dp{self._rank}-{os.getpid()}.csv"

    def scheduled(self, batch: Batch, began: float) -> None:
        """A batch was put together by a call that began at `began` (of `clock`)."""
        self._under_way.append((began, batch))

    def completed(self) -> None:
        """The oldest batch's result is in: a step has ended."""
        if not self._under_way:
            return
        began, batch = self._under_way.popleft()
        if not batch.empty:
            self._step(began, batch)

    def dummy(self, began: float) -> None:
        """Note a step without own requests, computed only for the other ranks (expert parallelism)."""
        self._step(began, Batch(0, 0, 0, 0.0))

    def close(self) -> None:
        """Write what is buffered."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _step(self, began: float, batch: Batch) -> None:
        now = self._clock()
        cost_ms = 1e3 * (now - max(began, self._ended))
        self._ended = now
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = _continued(self.path)
            if self._file.tell() == 0:
                self._file.write(",".join(COLUMNS) + "\n")
        self._file.write(
            f"{self._wall():.6f},{cost_ms:.4f},{batch.running_reqs},{batch.total_tokens},"
            f"{batch.waiting_reqs},{batch.kv_cache_usage:.6f}\n"
        )
        if now - self._flushed >= FLUSH_EVERY_S:
            self._file.flush()
            self._flushed = now


def _continued(path: Path) -> TextIO:
    """The file, to be appended to, without half a last line.

    In a container an engine has the process id of the one before it, and so its file; that one may have been killed
    while it wrote.
    """
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - _LONGEST_LINE))
        tail = file.read()
        file.truncate(file.tell() - len(tail) + tail.rfind(b"\n") + 1)
    return path.open("a", encoding="ascii")
