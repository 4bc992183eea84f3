"""What is done to the bytes of every single event of a stream, twice: in Python and compiled.

`reference.py` says what is done; `compiled.pyx` does the same in about a fifth of the time, and is what runs if the
installation could build it (Cython, so a C compiler: see pyproject.toml). Nothing else depends on which of the two is
there. `BALANCEROUTE_PURE_PYTHON=1` in the environment keeps to Python.
"""

import os
from typing import TYPE_CHECKING, Final

__all__ = ["COMPILED", "ChunkReader", "EventMatcher", "EventPump", "Flusher", "PartWriter", "unchunked"]

if TYPE_CHECKING or os.environ.get("BALANCEROUTE_PURE_PYTHON"):
    from balanceroute.proxy.hotpath.reference import (
        ChunkReader,
        EventMatcher,
        EventPump,
        Flusher,
        PartWriter,
        unchunked,
    )
else:
    try:
        from balanceroute.proxy.hotpath.compiled import (
            ChunkReader,
            EventMatcher,
            EventPump,
            Flusher,
            PartWriter,
            unchunked,
        )
    except ImportError:
        from balanceroute.proxy.hotpath.reference import (
            ChunkReader,
            EventMatcher,
            EventPump,
            Flusher,
            PartWriter,
            unchunked,
        )

COMPILED: Final = EventMatcher.__module__.endswith("compiled")
