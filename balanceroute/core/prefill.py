"""Chooses the prefiller for the next probe, or none (KV back-pressure).

    least_tokens      the fewest prompt tokens in flight
    prefix_affinity   the least work: the tokens in flight there that it does not have cached, and those of this
                      prompt. Affinity and balance are one number: a prefix that many conversations begin with spreads
                      to others as soon as its holder has more to do than computing it again costs. What is one
                      conversation's own counts `LONE_WEIGHT` times where caches are known to hit, so that it stays
                      where it is. With nothing shared it is least_tokens.
    round_robin       the one used longest ago

Ties go to the one used longest ago. A policy says what each prefiller would cost, so that the choice can be explained.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from balanceroute.core.prefix import leading
from balanceroute.core.tracker import PrefillerBudget, RequestTracker
from balanceroute.core.types import UP

# probes at once on a prefiller that does not report its KV usage: enough to batch prompts of 1,000 tokens into vLLM's
# steps of 8,192, and few enough that their KV fits beside other KV
UNKNOWN_USAGE_INFLIGHT: Final = 8

LONE_WEIGHT: Final = 32
"""What computing a token of a conversation's own again costs, in tokens in flight: everybody who comes after waits for
it, it takes the place of another one in the cache, and nobody will use the second copy. The largest weight at which no
slow prompt on Mooncake's conversations gets slower than by least_tokens; `reproduce prefix` has others beside it."""

SHARED_BY: Final = 2
"""Conversations per prefiller that begin with a prefix, from which on a copy on each will be of use: it counts once."""

PrefillPolicy = Callable[[Sequence[PrefillerBudget], RequestTracker], Sequence[float]]
"""What a request would cost on each of these prefillers, which may all take it; the cheapest gets it."""


def least_tokens(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """Prompt tokens in flight."""
    return [prefiller.inflight_tokens for prefiller in ready]


def prefix_affinity(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """Tokens of work, in flight and of this request.

    Before answers or counters have shown a hit on one of these, a conversation's own tokens count once, not
    `LONE_WEIGHT` times, so that no prompt waits longer for a cache than its computation takes.
    """
    hits = [prefiller for prefiller in ready if prefiller.hits.real_tokens]
    return affinity_costs(ready, request, LONE_WEIGHT if hits else 1)


def affinity_costs(ready: Sequence[PrefillerBudget], request: RequestTracker, lone_weight: int) -> list[int]:
    """Tokens of work, in which each token of one conversation only counts `lone_weight` times."""
    lone_tokens = lone_tokens_of(request)
    unknown = new_work(request.prompt_tokens, lone_tokens, lone_weight)
    costs = []
    for prefiller in ready:
        held = leading(request.prefix, prefiller.cache.blocks)
        new = new_work(request.uncached_after(held), lone_tokens, lone_weight) if held else unknown
        costs.append(prefiller.inflight_uncached_tokens + new)
    return costs


def lone_tokens_of(request: RequestTracker) -> int:
    """The tokens at the prompt's end that few other conversations share."""
    tokens = request.prompt_tokens - request.shared_blocks * request.block_tokens
    return tokens if tokens > 0 else 0


def new_work(uncached_tokens: int, lone_tokens: int, lone_weight: int) -> int:
    """Tokens to compute of a prompt, of which the last `lone_tokens` belong to one conversation."""
    lone = uncached_tokens if uncached_tokens < lone_tokens else lone_tokens
    return uncached_tokens + (lone_weight - 1) * lone


def round_robin(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
    """0 for all: the tie goes to the one used longest ago."""
    return [0] * len(ready)


def cheapest(ready: Sequence[PrefillerBudget], costs: Sequence[float]) -> PrefillerBudget:
    """The prefiller with the least cost; of equal ones the one used longest ago."""
    best, least = ready[0], costs[0]
    for prefiller, cost in zip(ready, costs, strict=True):
        if cost < least or (cost == least and prefiller.last_used < best.last_used):
            best, least = prefiller, cost
    return best


PREFILL_POLICIES: Final[dict[str, PrefillPolicy]] = {
    "least_tokens": least_tokens,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
}


def usage_allows(kv_usage: float | None, kv_usage_limit: float) -> bool:
    """Whether a prefiller's KV usage (ratio), if it reports one, allows another probe."""
    return kv_usage is None or kv_usage <= kv_usage_limit


def ready_prefillers(
    prefillers: Sequence[PrefillerBudget],
    kv_usage_limit: float,
    max_inflight: int | None,
    prompt_s: float = math.inf,
) -> list[PrefillerBudget]:
    """The prefillers that may take a probe now.

    One whose KV usage is above `kv_usage_limit` (ratio) is skipped: pinned KV that no decoder has pulled yet would
    block it (paper, section "In-band telemetry"), and so is one with `max_inflight` probes under way, or with as many
    expected seconds as so many mean prompts of `prompt_s` take; where that is None, one that does not tell its usage
    has a bound of its own.
    """
    most, most_untold, most_s = math.inf, float(UNKNOWN_USAGE_INFLIGHT), math.inf
    if max_inflight is not None:
        most, most_untold, most_s = float(max_inflight), float(max_inflight), max_inflight * prompt_s
    return [
        prefiller
        for prefiller in prefillers
        if prefiller.state is UP
        and usage_allows(prefiller.kv_usage, kv_usage_limit)
        and prefiller.inflight < (most_untold if prefiller.kv_usage is None else most)
        and (most_s == math.inf or not prefiller.inflight or prefiller.inflight_s < most_s)
    ]
