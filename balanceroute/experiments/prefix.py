"""The gain of prefix-cache awareness in the prefill tier: the prefill policies beside other routers'.

Eight prefillers of 6,000 tokens/s, each with a prefix cache of 2M or 512k tokens, and nothing else: a request leaves
when its prefill has ended. The rivals are our own versions, by what their documentation says of them:

    random, round robin   caches are ignored
    consistent hash       of the prompt's first blocks, where one session's prompts differ from another's
    longest match         the most cached blocks, whatever waits there
    match, load gate      the longest match if it is at least 0.3 of the prompt, unless the loads differ too much
    exact knowledge       prefix_affinity that looks into the caches themselves, as no router can

On the user's trace or synthetic conversations, and on synthetic agent loops. Beside them what the weight of a
conversation's own tokens trades (`core.prefill.LONE_WEIGHT`): tokens computed against waits for those that are cached.

And who waits for whom: short prompts and a few huge ones, by how much a request's own prefill counts in the queue.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from balanceroute.core.prefill import (
    LONE_WEIGHT,
    PrefillPolicy,
    affinity_costs,
    cheapest,
    least_tokens,
    lone_tokens_of,
    new_work,
)
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.tracker import PrefillerBudget, RequestTracker
from balanceroute.errors import InputError
from balanceroute.experiments.jobs import Results, Task, whole_trace
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table
from balanceroute.simulator import PrefillFigures, PrefillTier, replay_prefill, replay_queue
from balanceroute.traces import AGENTS, CHATS, Trace, generate_conversations

PREFILLERS = 8
TOKENS_PER_S = 6000.0
CACHES = (2_000_000, 512_000)  # tokens of one prefiller's prefix cache
ROWS = 13_000
SYNTHETIC = {"conversations": CHATS, "agents": AGENTS}
WEIGHTS = (1, 2, 4, 8, 16, 32, 64)
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
        lone_tokens = lone_tokens_of(request)
        uncached = [tier.uncached(prefiller.spec.id, request.prefix, request.prompt_tokens) for prefiller in ready]
        return [
            prefiller.inflight_uncached_tokens + new_work(tokens, lone_tokens, LONE_WEIGHT)
            for prefiller, tokens in zip(ready, uncached, strict=True)
        ]

    return costs


def weighted(weight: int) -> Callable[[PrefillTier], PrefillPolicy]:
    """`prefix_affinity` with another weight of a conversation's own tokens."""
    return lambda tier: lambda ready, request: affinity_costs(ready, request, weight)


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
POLICIES = RIVALS | {f"weight {weight}": weighted(weight) for weight in WEIGHTS}


@dataclass(frozen=True, slots=True)
class PrefixJob(Task):
    """One of `POLICIES` on one size of cache; `source`: a trace file, or one of `SYNTHETIC`."""

    source: str
    rows: int
    policy: str
    cache_tokens: int

    @property
    def cost(self) -> float:
        """All take about as long."""
        return 5.0 * self.rows

    def run(self) -> PrefillFigures:
        """Simulate in this process."""
        return replay_prefill(
            workload(self.source, self.rows), POLICIES[self.policy], PREFILLERS, TOKENS_PER_S, self.cache_tokens
        )


@dataclass(frozen=True, slots=True)
class QueueJob(Task):
    """Short and huge prompts through prefillers that take one at a time; `ageing`: of the scheduler."""

    ageing: float
    rows: int

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


def workload(source: str, rows: int) -> Trace:
    """The user's trace or a synthetic one, at its own rate. Raises: InputError where prefixes are unknown."""
    if source in SYNTHETIC:
        return generate_conversations(rows, shape=SYNTHETIC[source])
    trace = whole_trace(source).head(rows)
    if not trace.prefix:
        raise InputError(f"{source}: no column prefix_blocks; convert a trace that has hash_ids, one of Mooncake's")
    return trace


def plan(scope: Scope) -> list[PrefixJob | QueueJob]:
    """Every policy on every cache."""
    rows = rows_of(scope)
    first, agents = sources(scope)
    workload(first, 1)
    jobs: list[PrefixJob | QueueJob] = [
        PrefixJob(source, rows, policy, cache)
        for cache in CACHES
        for source, policies in ((first, POLICIES), (agents, RIVALS))
        for policy in policies
    ]
    return jobs + [QueueJob(ageing, rows) for ageing in AGEINGS]


def sources(scope: Scope) -> tuple[str, str]:
    """What is replayed: the user's trace or conversations, and agents."""
    return scope.trace or "conversations", "agents"


def rows_of(scope: Scope) -> int:
    """Fewer in a quick look."""
    return min(ROWS, scope.rows) // 4 if scope.quick else ROWS


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    caches = [table_name(source, cache) for source in sources(scope) for cache in CACHES]
    return [f"{name}.csv" for name in (*caches, "prefix_weights", "prefix_queue")]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """One table per workload and size of cache."""
    section = Section("The prefill tier: what knowing its caches is worth")
    section.text(
        f"{PREFILLERS} prefillers of {TOKENS_PER_S:,.0f} tokens/s, each workload at its own rate. `computed`: share of"
        " prompt tokens that no cache had. Latency is from arrival to the end of the prefill; `p50 saved`: against"
        " least_tokens. `busiest`: tokens computed by the busiest prefiller over the mean. Rivals are our own versions."
    )
    for source in sources(scope):
        title = f"synthetic {source}" if source in SYNTHETIC else f"the trace {Path(source).name}"
        for cache in CACHES:
            section.text(f"### {title[0].upper()}{title[1:]}, caches of {cache:,} tokens")
            section.table(cache_table(scope, results, source, cache))
    section.text("### The weight of a conversation's own tokens")
    section.text(
        "What `prefix_affinity` counts a token as that only one conversation begins with, in tokens in flight"
        f" ({LONE_WEIGHT} outside of this table): the first workload above."
    )
    section.table(weight_table(scope, results))
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


def table_name(source: str, cache: int) -> str:
    """Of a workload's table: the first workload's have only their size."""
    return f"prefix_agents_{cache // 1000}k" if source == "agents" else f"prefix_{cache // 1000}k"


def weight_table(scope: Scope, results: Results) -> Table:
    """What is computed and how soon, by the weight of a conversation's own tokens."""
    figures = [
        (f"computed, {cache // 1000}k", f"p50 s, {cache // 1000}k", f"p99 s, {cache // 1000}k") for cache in CACHES
    ]
    digits = {name: digit for names in figures for name, digit in zip(names, (3, 2, 1), strict=True)}
    table = Table("prefix_weights", ["weight", *digits], digits=digits)
    for weight in WEIGHTS:
        row: list[float] = []
        for cache in CACHES:
            f = results[PrefixJob(sources(scope)[0], rows_of(scope), f"weight {weight}", cache)]
            row += [f.computed_ratio, f.latency_p50_s, f.latency_p99_s]
        table.add(weight, *row)
    return table


def cache_table(scope: Scope, results: Results, source: str, cache: int) -> Table:
    """Every policy on one size of cache."""
    table = Table(
        table_name(source, cache),
        ["policy", "computed", "p50 s", "p50 saved %", "p99 s", "busiest", "hits predicted", "hits real"],
        digits={"computed": 3, "p50 s": 2, "p50 saved %": 1, "p99 s": 1, "busiest": 2, "hits predicted": 3,
                "hits real": 3},
    )  # fmt: skip
    found: dict[str, PrefillFigures] = {
        policy: results[PrefixJob(source, rows_of(scope), policy, cache)] for policy in RIVALS
    }
    base = found["least_tokens"].latency_p50_s
    for policy, f in found.items():
        saved = 100.0 * (1.0 - f.latency_p50_s / base)
        table.add(policy, f.computed_ratio, f.latency_p50_s, saved, f.latency_p99_s, f.busiest_ratio,
                  f.predicted_hit_ratio, f.hit_ratio)  # fmt: skip
    return table
