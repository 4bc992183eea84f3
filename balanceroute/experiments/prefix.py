"""What a prefill tier gains by knowing its caches: our prefill policies beside what other routers do.

Eight prefillers of 6,000 tokens/s, each with a prefix cache of 2M or 512k tokens, and nothing else: a request leaves
when its prefill has ended. The rivals are our own versions, by what their documentation says of them:

    random, round robin   caches are ignored
    consistent hash       of the prompt's first blocks, where one session's prompts differ from another's
    longest match         the most cached blocks, whatever waits there
    match, load gate      the longest match if it is at least 0.3 of the prompt, unless the loads differ too much
    exact knowledge       prefix_affinity that looks into the caches themselves, as no router can

And who waits for whom: short prompts and a few huge ones, by how much a request's own prefill counts in the queue.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from balanceroute.core.prefill import PrefillPolicy, cheapest, least_tokens, work
from balanceroute.core.scheduler import SchedulerConfig
from balanceroute.core.tracker import PrefillerBudget, RequestTracker
from balanceroute.errors import InputError
from balanceroute.experiments.jobs import Results, whole_trace
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table
from balanceroute.simulator import PrefillFigures, PrefillTier, replay_prefill, replay_queue
from balanceroute.traces import Trace, generate_conversations

PREFILLERS = 8
TOKENS_PER_S = 6000.0
CACHES = (2_000_000, 512_000)  # tokens of one prefiller's prefix cache
ROWS = 12_000  # of the synthetic conversations
SESSION_BLOCKS = 4  # hashed by the consistent hash of a session: past most system prompts
HUGE_TOKENS, HUGE_SHARE, SHORT_TOKENS = 200_000, 1 / 200, 1_500
QUEUE_LOAD = 0.8
AGEINGS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
MATCH_RATIO = 0.3  # of the prompt: a shorter match is left to the loads
GATE_RATIO, GATE_TOKENS = 1.5, 65_536  # the loads differ too much: by this factor and by so many tokens


Choose = Callable[[Sequence[PrefillerBudget], RequestTracker], PrefillerBudget]
"""A policy that says whom it takes, and not what the others would cost."""


def by_choice(choose: Choose) -> PrefillPolicy:
    """The one that is taken costs nothing, every other the same."""

    def costs(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
        chosen = choose(ready, request)
        return [prefiller is not chosen for prefiller in ready]

    return costs


def random_choice(tier: PrefillTier) -> PrefillPolicy:
    """Any of them, seeded."""
    rng = random.Random(0)
    return by_choice(lambda ready, request: rng.choice(ready))


def consistent_hash(blocks: int) -> Callable[[PrefillTier], PrefillPolicy]:
    """The one with the highest hash together with the prompt's first blocks (rendezvous hashing)."""

    def choose(ready: Sequence[PrefillerBudget], request: RequestTracker) -> PrefillerBudget:
        first = request.prefix[min(blocks, len(request.prefix)) - 1] if request.prefix else request.id
        return max(ready, key=lambda p: hashlib.blake2b(f"{first}/{p.spec.id}".encode(), digest_size=8).digest())

    return lambda tier: by_choice(choose)


def best_match(ready: Sequence[PrefillerBudget], request: RequestTracker) -> PrefillerBudget:
    """The most cached blocks; of equal ones the fewest tokens in flight."""
    return min(ready, key=lambda p: (-p.cache.matched(request.prefix), p.inflight_tokens, p.last_used))


def longest_match(tier: PrefillTier) -> PrefillPolicy:
    """The most cached blocks, whatever waits there."""
    return by_choice(best_match)


def gated_match(tier: PrefillTier) -> PrefillPolicy:
    """The longest match where it is long and the loads are level; else the fewest tokens in flight."""

    def choose(ready: Sequence[PrefillerBudget], request: RequestTracker) -> PrefillerBudget:
        loads = [prefiller.inflight_tokens for prefiller in ready]
        uneven = max(loads) > GATE_RATIO * min(loads) and max(loads) - min(loads) > GATE_TOKENS
        best = best_match(ready, request)
        short = best.cache.matched(request.prefix) < MATCH_RATIO * len(request.prefix)
        return cheapest(ready, least_tokens(ready, request)) if uneven or short else best

    return by_choice(choose)


def exact_knowledge(tier: PrefillTier) -> PrefillPolicy:
    """`prefix_affinity` on the true caches."""

    def costs(ready: Sequence[PrefillerBudget], request: RequestTracker) -> list[int]:
        lone_tokens = request.prompt_tokens - request.shared_blocks * request.block_tokens
        return [
            work(
                prefiller.inflight_uncached_tokens,
                tier.uncached(prefiller.spec.id, request.prefix, request.prompt_tokens),
                lone_tokens,
            )
            for prefiller in ready
        ]

    return costs


RIVALS: dict[str, str | Callable[[PrefillTier], PrefillPolicy]] = {
    "least_tokens": "least_tokens",
    "round_robin": "round_robin",
    "random": random_choice,
    "consistent hash, first block": consistent_hash(1),
    "consistent hash, session": consistent_hash(SESSION_BLOCKS),
    "longest match": longest_match,
    "match, load gate": gated_match,
    "prefix_affinity": "prefix_affinity",
    "exact knowledge": exact_knowledge,
}


@dataclass(frozen=True, slots=True)
class PrefixJob:
    """One policy on one size of cache; `source`: a trace file, or None for synthetic conversations."""

    source: str | None
    rows: int
    policy: str
    cache_tokens: int
    timed: bool = False

    @property
    def cost(self) -> float:
        """All take about as long."""
        return 5.0 * self.rows

    def run(self) -> PrefillFigures:
        """Simulate in this process."""
        return replay_prefill(
            workload(self.source, self.rows), RIVALS[self.policy], PREFILLERS, TOKENS_PER_S, self.cache_tokens
        )


@dataclass(frozen=True, slots=True)
class QueueJob:
    """Short and huge prompts through prefillers that take one at a time; `ageing`: of the scheduler."""

    ageing: float
    rows: int
    timed: bool = False

    @property
    def cost(self) -> float:
        """Seconds of a simulation are all alike."""
        return 5.0 * self.rows

    def run(self) -> "QueueFigures":
        """Simulate in this process."""
        rng = np.random.default_rng(0)
        huge = rng.random(self.rows) < HUGE_SHARE
        tokens = np.where(huge, HUGE_TOKENS, np.maximum(1, rng.exponential(SHORT_TOKENS, self.rows))).astype(int)
        rate = QUEUE_LOAD * PREFILLERS * TOKENS_PER_S / tokens.mean()
        arrivals = np.cumsum(rng.exponential(1.0 / rate, self.rows))
        config = SchedulerConfig(max_prefill_inflight=1, ageing=self.ageing)
        wait_s = replay_queue(arrivals.tolist(), tokens.tolist(), config, PREFILLERS, TOKENS_PER_S)
        (short_p50, short_p99), (huge_p50, huge_p99) = (np.percentile(wait_s[of], (50, 99)) for of in (~huge, huge))
        return QueueFigures(float(short_p50), float(short_p99), float(huge_p50), float(huge_p99), float(wait_s.mean()))


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """Waits for a prefiller, seconds."""

    short_p50_s: float
    short_p99_s: float
    huge_p50_s: float
    huge_p99_s: float
    mean_s: float


def workload(source: str | None, rows: int) -> Trace:
    """The user's trace at its own rate, or synthetic conversations. Raises: InputError where prefixes are unknown."""
    if source is None:
        return generate_conversations(rows)
    trace = whole_trace(source).head(rows)
    if not trace.prefix:
        raise InputError(f"{source}: no column prefix_blocks; convert a trace that has hash_ids, one of Mooncake's")
    return trace


def plan(scope: Scope) -> list[PrefixJob | QueueJob]:
    """Every policy on every cache."""
    rows = rows_of(scope)
    workload(scope.trace, 1)
    jobs: list[PrefixJob | QueueJob] = [
        PrefixJob(scope.trace, rows, policy, cache) for cache in CACHES for policy in RIVALS
    ]
    return jobs + [QueueJob(ageing, rows) for ageing in AGEINGS]


def rows_of(scope: Scope) -> int:
    """Fewer in a quick look."""
    return min(ROWS, scope.rows) // 4 if scope.quick else ROWS + 1000


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    return [*(f"prefix_{cache // 1000}k.csv" for cache in CACHES), "prefix_queue.csv"]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """One table per size of cache."""
    section = Section("The prefill tier: what knowing its caches is worth")
    source = f"the trace {Path(scope.trace).name}" if scope.trace else "synthetic conversations"
    section.text(
        f"{PREFILLERS} prefillers of {TOKENS_PER_S:,.0f} tokens/s, {source} at its own rate. `computed`: share of"
        " prompt tokens that no cache had. Latency is from arrival to the end of the prefill; `p50 saved`: against"
        " least_tokens. `busiest`: tokens computed by the busiest prefiller over the mean. Rivals are our own versions."
    )
    for cache in CACHES:
        section.text(f"### Caches of {cache:,} tokens")
        section.table(cache_table(scope, results, cache))
    section.text("### A huge prompt among short ones")
    section.text(
        f"One in {1 / HUGE_SHARE:.0f} prompts has {HUGE_TOKENS:,} tokens, the others {SHORT_TOKENS:,} on average;"
        f" {PREFILLERS} prefillers that take one at a time are {QUEUE_LOAD:.0%} busy. Waits in the router, seconds;"
        " ageing 0 is first come first served."
    )
    section.table(queue_table(scope, results))
    return section


def queue_table(scope: Scope, results: Results) -> Table:
    """Waits by ageing."""
    columns = ["ageing", "short p50 s", "short p99 s", "huge p50 s", "huge p99 s", "mean s"]
    table = Table("prefix_queue", columns, digits=dict.fromkeys(columns, 2))
    for ageing in AGEINGS:
        f: QueueFigures = results[QueueJob(ageing, rows_of(scope))]
        table.add(ageing, f.short_p50_s, f.short_p99_s, f.huge_p50_s, f.huge_p99_s, f.mean_s)
    return table


def cache_table(scope: Scope, results: Results, cache: int) -> Table:
    """Every policy on one size of cache."""
    table = Table(
        f"prefix_{cache // 1000}k",
        ["policy", "computed", "p50 s", "p50 saved %", "p99 s", "busiest", "hits predicted", "hits real"],
        digits={"computed": 3, "p50 s": 2, "p50 saved %": 1, "p99 s": 1, "busiest": 2, "hits predicted": 3,
                "hits real": 3},
    )  # fmt: skip
    found: dict[str, PrefillFigures] = {
        policy: results[PrefixJob(scope.trace, rows_of(scope), policy, cache)] for policy in RIVALS
    }
    base = found["least_tokens"].latency_p50_s
    for policy, f in found.items():
        saved = 100.0 * (1.0 - f.latency_p50_s / base)
        table.add(policy, f.computed_ratio, f.latency_p50_s, saved, f.latency_p99_s, f.busiest_ratio,
                  f.predicted_hit_ratio, f.hit_ratio)  # fmt: skip
    return table
