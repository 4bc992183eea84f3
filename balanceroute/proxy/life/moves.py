"""Which requests leave a silent worker, and how many at a time.

A request that leaves a decoder needs its prompt, and what it has generated, prefilled once more; on the silent worker
it loses nothing by waiting while no prefiller could take it. So at most as many are on their way back through the
prefill tier as its prefillers keep busy with (`room`), and those go first that have nothing to lose: without a token,
then streams, each in the order of arrival. A stream waits `resume_after_silence_s` first, for a worker that has only
paused.

Pure: what is stuck and how long comes in, ids come out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from balanceroute.core.prefill import usage_allows
from balanceroute.core.types import WorkerState
from balanceroute.core.view import PrefillerView

LANES: Final = 4  # prompts that keep a prefiller busy from one look to the next, where its limit is not configured


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
