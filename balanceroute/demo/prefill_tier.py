"""The demo of the prefill tier: the same conversations through several prefill policies, each on a cluster of its own.

Seeded conversations (`traces/conversations.py`) are made to fit two cores: prompts, answers and blocks shrink by
`factor`, time runs `speed` times as fast, and a prefiller computes as much faster, so that it is as busy as one of
6,000 tokens/s at full size. What the prefillers had cached comes from their own counters, what was predicted from the
router's /metrics, latencies are what the client saw.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from balanceroute.demo.processes import (
    DemoFailed,
    Progress,
    check_most,
    emulated,
    free_ports,
    page,
    process,
    temporary_folder,
    total,
    wait_ready,
)
from balanceroute.loadgen import LoadOptions, run_load
from balanceroute.loadgen.run import LoadReport
from balanceroute.traces import BLOCK_TOKENS, Trace, generate_conversations

TOKENS_PER_S = 6000.0  # of a prefiller at full size
RATE_PER_S = 0.55  # conversations' turns per prefiller at full size: two thirds busy where nothing is cached
POLL_S = 0.2  # of the router: the counters are read so often


@dataclass(frozen=True, slots=True)
class PrefixScale:
    """How conversations are made to fit two cores."""

    factor: int = 4
    speed: float = 10.0
    prefillers: int = 4
    workers: int = 4
    slots: int = 64
    cache_tokens: int = 512_000  # of one prefiller, at full size
    seconds: float = 28.0
    seed: int = 1

    @property
    def block_tokens(self) -> int:
        """Of the prompts' blocks, and of the engines'."""
        return BLOCK_TOKENS // self.factor

    @property
    def tokens_per_s(self) -> float:
        """Of a prefiller."""
        return TOKENS_PER_S / self.factor * self.speed

    def trace(self) -> Trace:
        """The conversations as they are sent. Raises: DemoFailed where these are more than can be sent."""
        rate_per_s = RATE_PER_S * self.prefillers
        sent = rate_per_s * self.speed * self.seconds
        check_most(sent, "--seconds")
        rows = max(1, round(sent))
        full = generate_conversations(rows, seed=self.seed, rate_per_s=rate_per_s)
        return replace(
            full,
            arrival_s=full.arrival_s / self.speed,
            prompt_tokens=np.maximum(1, full.prompt_tokens // self.factor),
            output_tokens=np.maximum(1, full.output_tokens // (4 * self.factor)),  # decode is not what is shown
        )


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """What one prefill policy did; ratios are shares of all prompt tokens."""

    policy: str
    report: LoadReport
    computed_ratio: float
    predicted_ratio: float
    hit_ratio: float
    busiest_ratio: float


def run_prefix_demo(scale: PrefixScale, policy: str, on_progress: Progress) -> PrefixRun:
    """A fresh cluster and router, the conversations, and what came of them. Raises: DemoFailed."""
    trace = scale.trace()
    with temporary_folder() as logs:
        with cluster(scale, logs) as (config, urls):
            (port,), log = free_ports(1), logs / "router.log"
            flags = ["--config", str(config), "--port", str(port), "--log-level", "warning"]
            flags += ["--set", f"prefill.policy={policy}", "--set", f"prefill.poll_interval_s={POLL_S}"]
            router_url = f"http://127.0.0.1:{port}"
            with process(["serve", *flags], log) as router:
                wait_ready(f"{router_url}/health", router, log)
                options = LoadOptions(router_url, block_tokens=scale.block_tokens)
                report = asyncio.run(run_load(trace, options, lambda sent, ended: on_progress(ended, len(trace))))
                predicted = total(page(router_url), "balanceroute_prefix_predicted_tokens_total")
                return figures(policy, report, [page(url) for url in urls], predicted)


def figures(policy: str, report: LoadReport, pages: list[str], predicted: float) -> PrefixRun:
    """From the prefillers' metrics. Raises: DemoFailed: no prompt has come to them."""
    queried = [total(text, "vllm:prefix_cache_queries_total") for text in pages]
    hits = [total(text, "vllm:prefix_cache_hits_total") for text in pages]
    computed = [asked - found for asked, found in zip(queried, hits, strict=True)]
    if not sum(queried):
        raise DemoFailed(f"none of {report.requests} requests has reached a prefiller: {report.errors}")
    return PrefixRun(
        policy,
        report,
        computed_ratio=sum(computed) / sum(queried),
        predicted_ratio=predicted / sum(queried),
        hit_ratio=sum(hits) / sum(queried),
        busiest_ratio=max(computed) * len(computed) / sum(computed),
    )


@contextmanager
def cluster(scale: PrefixScale, logs: Path) -> Iterator[tuple[Path, list[str]]]:
    """A running cluster with prefix caches: the configuration for `serve`, and the prefillers' URLs."""
    cache_blocks = scale.cache_tokens // scale.factor // scale.block_tokens
    flags = ["--prefix-caching", "--prefill-rate", repr(scale.tokens_per_s), "--prefill-kv-blocks", str(cache_blocks)]
    flags += ["--block-size", str(scale.block_tokens), "--max-model-len", "65536"]
    with emulated(scale.prefillers, scale.workers, scale.slots, flags, logs) as running:
        yield running
