"""Which prefiller takes the next probe, and when none may (KV back-pressure).

    least_tokens      the fewest prompt tokens in flight
    prefix_affinity   the least work: the tokens in flight there that it does not have cached, and those of this
                      prompt. Affinity and balance are one number: a prefix that many share spreads to others as soon
                      as its holder has more to do than computing it again costs. What nobody else is asking for right
                      now counts `LONE_WEIGHT` times, so that a conversation stays where it is a little longer. With
                      nothing shared it is least_tokens.
    round_robin       the one used longest ago

Ties go to the one used longest ago. A policy says what each prefiller would cost, so that the choice can be explained.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from balanceroute.core.tracker import PrefillerBudget, RequestTracker
from balanceroute.core.types import WorkerState

# probes at once on a prefiller that does not tell its KV usage: enough to batch prompts of 1,000 tokens into vLLM's
# steps of 8,192, and little enough to be pinned beside whatever else is there
UNKNOWN_USAGE_INFLIGHT: Final = 8

LONE_WEIGHT: Final = 2
"""What computing a token again costs that this request alone will use, in tokens in flight: its own time and that of
those who come after it. On Mooncake's conversations the time alone (1) leaves 2 to 3 % more to compute. A prefix that
others are asking for at the same time pays for its second copy, and counts once."""

PrefillPolicy = Callable[[Sequence[PrefillerBudget], RequestTracker], Sequence[float]]
"""What a request would cost on each of these prefillers, which may all take it; the cheapest gets it."""


def least_tokens(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """Prompt tokens in flight."""
    return [prefiller.inflight_tokens for prefiller in ready]


def prefix_affinity(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """Tokens of work, in flight and of this request."""
    tokens = request.prompt_tokens
    lone_tokens = max(0, tokens - request.shared_blocks * request.block_tokens)
    unknown = work(0, tokens, lone_tokens)
    first = request.prefix[0] if request.prefix else None
    return [
        work(prefiller.inflight_uncached_tokens, request.uncached_on(prefiller), lone_tokens)
        if first in prefiller.cache.blocks
        else prefiller.inflight_uncached_tokens + unknown  # most prefillers have nothing of most prompts
        for prefiller in ready
    ]


def work(inflight_tokens: int, uncached_tokens: int, lone_tokens: int) -> int:
    """Tokens in flight and to compute, of which the last `lone_tokens` are nobody else's."""
    return inflight_tokens + uncached_tokens + (LONE_WEIGHT - 1) * min(uncached_tokens, lone_tokens)


def round_robin(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """Nothing: only how long ago each was used tells them apart."""
    return [0] * len(ready)


def cheapest(ready: Sequence[PrefillerBudget], costs: Sequence[float]) -> PrefillerBudget:
    """The one with the least cost; of equal ones the one used longest ago."""
    return min(zip(costs, ready, strict=True), key=lambda offer: (offer[0], offer[1].last_used))[1]


PREFILL_POLICIES: Final[dict[str, PrefillPolicy]] = {
    "least_tokens": least_tokens,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
}


def usage_allows(kv_usage: float | None, kv_usage_limit: float) -> bool:
    """Whether a prefiller's KV usage (ratio), as far as it tells, is no reason against another probe."""
    return kv_usage is None or kv_usage <= kv_usage_limit


def ready_prefillers(
    prefillers: Sequence[PrefillerBudget],
    kv_usage_limit: float,
    max_inflight: int | None = None,
    prompt_s: float = math.inf,
) -> list[PrefillerBudget]:
    """The prefillers that may take a probe now; none: all must rest.

    One whose KV usage is above `kv_usage_limit` (ratio) is skipped: pinned KV that no decoder has pulled yet would
    block it (paper, section "In-band telemetry"), and so is one with `max_inflight` probes under way, or with as many
    expected seconds as so many mean prompts of `prompt_s` take; where that is None, one that does not tell its usage
    has a bound of its own.
    """
    most_s = math.inf if max_inflight is None else max_inflight * prompt_s
    return [
        prefiller
        for prefiller in prefillers
        if prefiller.state is WorkerState.UP
        and usage_allows(prefiller.kv_usage, kv_usage_limit)
        and prefiller.inflight < _most_inflight(prefiller, max_inflight)
        and (most_s == math.inf or not prefiller.inflight or prefiller.inflight_s < most_s)
    ]


def _most_inflight(prefiller: PrefillerBudget, max_inflight: int | None) -> float:
    if max_inflight is not None:
        return max_inflight
    return UNKNOWN_USAGE_INFLIGHT if prefiller.kv_usage is None else math.inf
