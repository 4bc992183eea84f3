"""Finds decode workers whose engine has fewer slots than the configuration says (`decode.max_num_seqs`).

The router then sends requests that queue inside the engine, where no policy can move them, and nothing else shows it.
In `POLLS` reports in a row such an engine lets requests wait for capacity while it runs fewer than its configured slots
and most of its KV cache is free. What it runs then is what it has. That holds in quiet times, too, until it runs more.

`waiting_for_capacity` excludes requests whose KV is on its way. Engines that do not report it are not judged.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Final

POLLS: Final = 10
_AMPLE: Final = 0.5  # KV usage below this: no usual request waits for memory


class EngineSlots:
    """The slots that engines have shown, by worker."""

    def __init__(self) -> None:
        self._full: dict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=POLLS)
        )  # what they ran while others waited
        self._found: dict[str, int] = {}

    def see(self, worker_id: str, samples: Mapping[str, float], slots: int) -> int:
        """Take a report; returns the engine's slots if they are fewer than `slots`, which are configured; else 0.

        Reads `num_requests_running`, `waiting_for_capacity` and `kv_cache_usage_perc`.
        """
        running = int(samples.get("num_requests_running", 0.0))
        waits = samples.get("waiting_for_capacity", 0.0) > 0.0 and samples.get("kv_cache_usage_perc", 1.0) < _AMPLE
        if running > self._found.get(worker_id, running):
            del self._found[worker_id]
        if not (waits and 0 < running < slots):
            self._full.pop(worker_id, None)
        else:
            full = self._full[worker_id]
            full.append(running)
            if len(full) == POLLS:
                self._found[worker_id] = max(full)
        return self._found.get(worker_id, 0)

    def forget(self, worker_id: str) -> None:
        """Drop what a worker has shown that has left or is down: its engine may start with other flags."""
        self._full.pop(worker_id, None)
        self._found.pop(worker_id, None)
