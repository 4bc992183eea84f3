"""Which prefiller takes the next probe, and when none may (KV back-pressure)."""

from collections.abc import Sequence

from balanceroute.core.snapshot import PrefillerBudget
from balanceroute.core.types import WorkerState


def choose_prefiller(
    prefillers: Sequence[PrefillerBudget], kv_usage_limit: float, max_inflight: int | None = None
) -> PrefillerBudget | None:
    """The prefiller with the fewest prompt tokens in flight; tie: the one used longest ago. None: all must rest.

    One whose KV usage is above `kv_usage_limit` (ratio) is skipped: pinned KV that no decoder has pulled yet would
    block it (paper, section "In-band telemetry"), and so is one with `max_inflight` probes under way.
    """
    ready = [
        prefiller
        for prefiller in prefillers
        if prefiller.state is WorkerState.UP
        and prefiller.kv_usage <= kv_usage_limit
        and (max_inflight is None or prefiller.inflight < max_inflight)
    ]
    return min(ready, key=lambda prefiller: (prefiller.inflight_tokens, prefiller.last_used), default=None)
