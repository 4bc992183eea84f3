"""Finds decode workers whose engine has fewer slots than the configuration says (`decode.max_num_seqs`).

The router then sends requests that queue inside the engine, where no policy can move them, and nothing else shows it.
In `POLLS` reports in a row such an engine lets requests wait for capacity while it runs fewer than its configured slots
and most of its KV cache is free. What it runs then is what it has. That holds in quiet times, too, until it runs more.

An engine reports at the end of a step, without the requests that finished in it, whose slots the waiting ones are about
to get. So it must run fewer by more than those may be. One that an operator has paused lets requests wait beside free
slots as well, but its KV usage stays the same: such reports do not count.

`waiting_for_capacity` excludes requests whose KV is on its way. Engines that do not report it are not judged.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

POLLS: Final = 10
_AMPLE: Final = 0.5  # KV usage below this: no usual request waits for memory
_FEWER: Final = 0.75  # of the configured slots; even of answers of 5 tokens a fifth finishes in a step


@dataclass(slots=True)
class _Shown:
    """What an engine has shown."""

    full: deque[int] = field(default_factory=lambda: deque(maxlen=POLLS))  # what it ran while others waited
    usage: float = 1.0  # of its KV cache, at the last report
    slots: int = 0  # 0: not known to be fewer than configured


class EngineSlots:
    """The slots that engines have shown, by worker."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = defaultdict(_Shown)

    def see(self, worker_id: str, samples: Mapping[str, float], slots: int) -> int:
        """Take a report; returns the engine's slots if they are fewer than `slots`, which are configured; else 0.

        Reads `num_requests_running`, `waiting_for_capacity` and `kv_cache_usage_perc`.
        """
        shown, running = self._shown[worker_id], int(samples.get("num_requests_running", 0.0))
        usage_before, shown.usage = shown.usage, samples.get("kv_cache_usage_perc", 1.0)
        if running > shown.slots:
            shown.slots = 0
        waits = samples.get("waiting_for_capacity", 0.0) > 0.0 and shown.usage < _AMPLE
        if not (waits and 0 < running < _FEWER * slots):
            shown.full.clear()
        elif shown.usage != usage_before:
            shown.full.append(running)
            if len(shown.full) == POLLS:
                shown.slots = max(shown.full)
        return shown.slots

    def forget(self, worker_id: str) -> None:
        """Drop what a worker has shown that has left or is down: its engine may start with other flags."""
        self._shown.pop(worker_id, None)
