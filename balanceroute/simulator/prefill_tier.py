"""The simulated prefill tier, and a replay through it alone.

A prefiller computes one prompt at a time, in the order in which they were sent to it, and skips the leading blocks that
its prefix cache holds. So what a prompt finds cached is what those sent there before it have left, and its end is known
when it is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from balanceroute import report
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.prefill import PrefillPolicy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec
from balanceroute.engine import PrefixCache
from balanceroute.errors import InputError
from balanceroute.traces import BLOCK_TOKENS, Trace


class PrefillTier:
    """The prefillers: when each is free, and what its cache holds.

    Args: tokens_per_s: of one prefiller; cache_tokens: size of one prefix cache, 0 for none.
    """

    def __init__(self, n_prefillers: int, tokens_per_s: float, cache_tokens: int) -> None:
        self.tokens_per_s = tokens_per_s
        self.names = [f"p{index}" for index in range(n_prefillers)]
        self.free_s = dict.fromkeys(self.names, 0.0)
        self.caches = {name: PrefixCache(cache_tokens // BLOCK_TOKENS) for name in self.names}
        self.computed = dict.fromkeys(self.names, 0)  # tokens
        self.prompt_tokens = 0

    def uncached(self, name: str, prefix: Sequence[int], prompt_tokens: int) -> int:
        """Tokens that this prefiller would compute of a prompt sent to it now; one at least."""
        return max(1, prompt_tokens - self.caches[name].found(prefix) * BLOCK_TOKENS)

    def compute(self, name: str, prefix: Sequence[int], prompt_tokens: int, now: float) -> tuple[float, int]:
        """Send a prompt: (when its prefill ends, how many of its tokens were cached)."""
        tokens = self.uncached(name, prefix, prompt_tokens)
        self.caches[name].compute(prefix)
        done = self.free_s[name] = max(now, self.free_s[name]) + tokens / self.tokens_per_s
        self.computed[name] += tokens
        self.prompt_tokens += prompt_tokens
        return done, prompt_tokens - tokens

    @property
    def computed_ratio(self) -> float:
        """Share of the prompt tokens that were computed, not found cached."""
        return sum(self.computed.values()) / self.prompt_tokens if self.prompt_tokens else 1.0


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """The figures of a replay through the prefill tier.

    `computed_ratio`: share of prompt tokens computed; latencies from arrival to the end of the prefill, seconds;
    `busiest_ratio`: tokens computed by the busiest prefiller over the mean; `predicted_hit_ratio`, `hit_ratio`: shares
    of prompt tokens that the router thought cached and that were.
    """

    computed_ratio: float
    latency_p50_s: float
    latency_p99_s: float
    busiest_ratio: float
    predicted_hit_ratio: float
    hit_ratio: float


Chooser = Callable[[PrefillTier], PrefillPolicy]
"""Makes a policy that may look at the true caches, as no router can."""


def replay_prefill(
    trace: Trace, policy: str | Chooser, n_prefillers: int, tokens_per_s: float, cache_tokens: int
) -> PrefillFigures:
    """Send a trace through the scheduler's prefill dispatch; a request leaves when its prefill has ended.

    Raises: InputError for a trace that says nothing of prefixes.
    """
    if not trace.prefix:
        raise InputError("the trace has no prefix_blocks: convert one that has hash_ids, of Mooncake")
    tier = PrefillTier(n_prefillers, tokens_per_s, cache_tokens)
    if isinstance(policy, str):
        scheduler = _scheduler_of(tier, SchedulerConfig(prefill_policy=policy))
    else:
        scheduler = _scheduler_of(tier, SchedulerConfig())
        scheduler.prefills.policy = policy(tier)
    for name in tier.names:
        scheduler.report_prefix_cache(name, cache_tokens, 0.0)
    arrivals, prompts = trace.arrival_s.tolist(), trace.prompt_tokens.tolist()
    latency_s = np.zeros(len(trace))
    predicted = 0
    for request, _, done in _sent(tier, scheduler, arrivals, prompts, trace.full_blocks):
        predicted += prompts[request] - scheduler.snapshot.requests[str(request)].uncached_tokens
        latency_s[request] = done - arrivals[request]
    scheduler.snapshot.check_invariants()
    computed = list(tier.computed.values())
    return PrefillFigures(
        computed_ratio=tier.computed_ratio,
        latency_p50_s=report.percentile(latency_s, 50),
        latency_p99_s=report.percentile(latency_s, 99),
        busiest_ratio=max(computed) * len(computed) / sum(computed),
        predicted_hit_ratio=predicted / tier.prompt_tokens,
        hit_ratio=1.0 - tier.computed_ratio,
    )


def replay_queue(
    arrival_s: Sequence[float],
    prompt_tokens: Sequence[int],
    config: SchedulerConfig,
    n_prefillers: int,
    tokens_per_s: float,
) -> NDArray[np.float64]:
    """How long each prompt waits in the router for a prefiller, seconds; nothing is cached."""
    tier = PrefillTier(n_prefillers, tokens_per_s, 0)
    wait_s = np.zeros(len(arrival_s))
    for request, now, _ in _sent(tier, _scheduler_of(tier, config), arrival_s, prompt_tokens, lambda request: ()):
        wait_s[request] = now - arrival_s[request]
    return wait_s


def _scheduler_of(tier: PrefillTier, config: SchedulerConfig) -> Scheduler:
    """With the tier's prefillers, and a decode worker, without which nothing would be let in."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="pool_fifo")), config)
    for name in tier.names:
        scheduler.add_worker(WorkerSpec(name, Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    return scheduler


def _sent(
    tier: PrefillTier,
    scheduler: Scheduler,
    arrival_s: Sequence[float],
    prompt_tokens: Sequence[int],
    prefix_of: Callable[[int], Sequence[int]],
) -> Iterator[tuple[int, float, float]]:
    """Each request as it is sent to its prefiller: (its number, when, when its prefill will have ended)."""
    running: list[tuple[float, int, int]] = []  # (when its prefill ends, request, cached tokens)
    coming = list(zip(arrival_s, range(len(arrival_s)), strict=True))[::-1]
    while coming or running:
        if running and (not coming or running[0][0] <= coming[-1][0]):
            now, request, cached = heappop(running)
            scheduler.prefilled(str(request), prompt_tokens[request], now, None, cached)
            scheduler.finish(str(request), Outcome.FINISHED, now)
        else:
            now, request = coming.pop()
            prefix = prefix_of(request)
            spec = RequestSpec(str(request), prompt_tokens[request], prefix=prefix, block_tokens=BLOCK_TOKENS)
            scheduler.submit(spec, now)
        for prefill in scheduler.dispatch(now):
            number = int(prefill.request)
            done, cached = tier.compute(prefill.worker, prefix_of(number), prompt_tokens[number], now)
            heappush(running, (done, number, cached))
            yield number, now, done
