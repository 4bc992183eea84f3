"""Chooses which requests leave a silent worker, and how many at a time.

A request that leaves a decoder is prefilled again, with the tokens it has generated. While no prefiller could take it,
it loses nothing by waiting on the silent worker. So only as many leave at a time as keep the prefillers busy (`room`):
first requests without a token, then streams, each in order of arrival. A stream first waits `resume_after_silence_s`,
because the worker may only have paused.

Pure: from stuck requests with their times to ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from balanceroute.core.prefill import usage_allows
from balanceroute.core.types import WorkerState
from balanceroute.core.view import PrefillerView

LANES: Final = 4  # prompts that keep a prefiller busy between two looks, if `max_inflight` is not set


@dataclass(frozen=True, slots=True)
class Stuck:
    """A request on a silent worker; `order` is its arrival, `waited_s` how long the worker has been judged down."""

    id: str
    has_tokens: bool
    order: int
    waited_s: float


def room(
    prefillers: Iterable[PrefillerView],
    kv_usage_limit: float,
    max_inflight: int | None,
    pool_room: int,
    moving: int,
    relays: int = 1,
) -> int:
    """How many more requests may go back through the prefill tier now.

    Args: kv_usage_limit, max_inflight: as in `SchedulerConfig`. pool_room: entries that the prompt pool may still take.
    moving: requests that have left a silent worker and are not prefilled again yet. relays: processes that share what
    may go; each moves its own.
    """
    lanes = LANES if max_inflight is None else max_inflight
    ready = sum(p.state is WorkerState.UP and usage_allows(p.kv_usage, kv_usage_limit) for p in prefillers)
    return max(0, min(-(-ready * lanes // relays) - moving, -(-pool_room // relays)))


def choose(stuck: Sequence[Stuck], room: int, resume_after_silence_s: float) -> list[str]:
    """The requests that leave now, at most `room`."""
    ready = [one for one in stuck if not one.has_tokens or one.waited_s >= resume_after_silence_s]
    ready.sort(key=lambda one: (one.has_tokens, one.order))
    return [one.id for one in ready[:room]]
