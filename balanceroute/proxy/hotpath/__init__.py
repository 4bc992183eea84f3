"""The code that runs for every byte of streams' events and of prompts: `events.py`, compiled or not (setup.py).

Both behave alike. The Python form is used with `BALANCEROUTE_PURE_PYTHON=1` in the environment, and if the compiled
module was made from other sources (`STALE`), as after a new checkout until the next install.
"""

import os
from typing import TYPE_CHECKING, Final

from balanceroute.proxy.hotpath import events

__all__ = [
    "COMPILED",
    "STALE",
    "ChunkReader",
    "EventMatcher",
    "Flusher",
    "PartWriter",
    "Pump",
    "count_pairs",
    "grown_counts",
    "weigh_pairs",
]

_form = events
if not TYPE_CHECKING and not os.environ.get("BALANCEROUTE_PURE_PYTHON"):
    try:
        from balanceroute.proxy.hotpath import compiled as _form
    except ImportError:
        _form = events

STALE: Final = getattr(_form, "SOURCE", "") != events.SOURCE

if TYPE_CHECKING or STALE or _form is events:
    from balanceroute.proxy.hotpath.events import (
        ChunkReader,
        EventMatcher,
        Flusher,
        PartWriter,
        Pump,
        count_pairs,
        grown_counts,
        weigh_pairs,
    )
else:
    from balanceroute.proxy.hotpath.compiled import (
        ChunkReader,
        EventMatcher,
        Flusher,
        PartWriter,
        Pump,
        count_pairs,
        grown_counts,
        weigh_pairs,
    )

COMPILED: Final = EventMatcher.__module__.endswith("compiled")
