"""The demo of the decode tier: the same scaled trace through several policies, each on a cluster of its own.

Two cores cannot carry a production cluster in real time, so the workload is scaled by one factor k: prompts, outputs,
horizon and slots' worth of steps shrink by k, and the cost of a KV token grows so that the reading of KV takes the same
share of a step as in the reference setting (8 workers of 64 slots, 1.2e-7 s per token, 25 ms a step). What the barrier
does to an uneven placement is then what it does at full size.

Loads come from the emulated engines (summed over every step), latencies from what the client saw, the cost of a
decision from the router's own /metrics.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from balanceroute.core.knobs import PolicySettings
from balanceroute.demo.processes import (
    DemoFailed,
    Progress,
    check_most,
    emulated,
    free_ports,
    page,
    process,
    temporary_folder,
    wait_ready,
)
from balanceroute.loadgen import LoadOptions, run_load
from balanceroute.loadgen.run import LoadReport
from balanceroute.traces import Trace
from balanceroute.traces.capacity import ReferenceSetting, ideal_capacity, mean_kv_tokens
from balanceroute.traces.generate import generate_trace

REFERENCE = ReferenceSetting()
LEAST_REQUESTS = 20  # of a trace, to measure anything
ROWS = 8000  # that are drawn, unless the demo takes longer than these
SAMPLE_S = 0.25
WARM_UP_RATIO = 0.3  # of the requests sent before the figures of the loads begin, as in the simulator


@dataclass(frozen=True, slots=True)
class DemoScale:
    """How the production workload is made to fit two cores."""

    factor: float = 16.0
    prefillers: int = 2
    workers: int = 8
    slots: int = 32
    step_overhead_s: float = 0.025
    seconds: float = 28.0
    load: float = 1.15
    longest_outputs: float = 5.0  # means; the tail beyond would only make the demo wait for its last answers
    seed: int = 1

    def trace(self) -> Trace:
        """The heavy-tailed workload with lengths divided by the factor, at `load` of what perfect balance carries.

        Raises: DemoFailed where that is more than can be sent.
        """
        cut = self._requests(ROWS)
        rate = self.load * ideal_capacity(cut, self.setting(cut))
        check_most(rate * self.seconds, "--seconds, --load or --slots")
        rows = max(1, round(rate * self.seconds))
        if rows > ROWS:
            cut = self._requests(rows)
        return cut.head(rows).at_rate(rate)

    def _requests(self, rows: int) -> Trace:
        full = generate_trace("heavy_tailed", rows=rows, seed=self.seed).with_lengths(1 / self.factor, 1 / self.factor)
        longest = int(self.longest_outputs * full.output_tokens.mean())
        return replace(full, output_tokens=np.minimum(full.output_tokens, longest))

    def setting(self, trace: Trace) -> ReferenceSetting:
        """The emulated cluster: reading KV takes the same share of a full step as in the reference setting."""
        full_load = REFERENCE.slots * mean_kv_tokens(generate_trace("heavy_tailed", rows=ROWS, seed=self.seed))
        share = REFERENCE.step_cost_s * full_load / REFERENCE.step_overhead_s
        step_cost_s = share * self.step_overhead_s / (self.slots * mean_kv_tokens(trace))
        return ReferenceSetting(self.workers, self.slots, step_cost_s, self.step_overhead_s)

    def checked(self) -> Trace:
        """The trace, if the demo can be run with these numbers. Raises: DemoFailed that names what is wrong."""
        trace = self.trace()
        if len(trace) < LEAST_REQUESTS:
            raise DemoFailed(
                f"{len(trace)} requests in {self.seconds:g} s are too few to measure, {LEAST_REQUESTS} are needed:"
                " raise --seconds, --load or --slots"
            )
        return trace

    @property
    def horizon_steps(self) -> int:
        """The default H in steps of the shortened outputs."""
        return max(1, round(PolicySettings().horizon_steps / self.factor))


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What one router did with the trace; loads are means over the steps of the steady window."""

    policy: str
    report: LoadReport
    load_spread_tokens: float
    excess_tokens: float
    step_s: float
    slots_used_ratio: float
    tokens_per_s: float
    decision_mean_us: float
    decisions: int


def run_demo(scale: DemoScale, policy: str, on_progress: Progress) -> PolicyRun:
    """Start a cluster and a router with this policy, play the trace, and measure.

    Raises: DemoFailed when a process does not come up, or ends.
    """
    trace = scale.trace()
    with temporary_folder() as logs:
        with emulated_cluster(scale, scale.setting(trace), logs) as (config, cluster_url):
            return one_policy(policy, scale, trace, config, cluster_url, logs / "router.log", on_progress)


def one_policy(
    policy: str, scale: DemoScale, trace: Trace, config: Path, cluster_url: str, log: Path, on_progress: Progress
) -> PolicyRun:
    """Play the trace through a fresh router with this policy."""
    (port,) = free_ports(1)
    flags = ["--config", str(config), "--policy", policy, "--port", str(port), "--log-level", "warning"]
    if policy == "br_h":
        flags += ["--set", f"routing.horizon_steps={scale.horizon_steps}", "--set", "predictor.kind=survival"]
    router_url = f"http://127.0.0.1:{port}"
    with process(["serve", *flags], log) as router:
        wait_ready(f"{router_url}/health", router, log)
        report, window = asyncio.run(play(trace, router_url, cluster_url, on_progress))
        mean_s, decisions = decision_cost(page(router_url))
    steps = max(1.0, window["steps"])
    return PolicyRun(
        policy=policy,
        report=report,
        load_spread_tokens=window["load_spread_tokens"] / steps,
        excess_tokens=window["excess_tokens"] / steps,
        step_s=window["step_s"] / steps,
        slots_used_ratio=window["running"] / steps / (scale.workers * scale.slots),
        tokens_per_s=window["running"] / window["step_s"] if window["step_s"] else 0.0,
        decision_mean_us=mean_s * 1e6,
        decisions=decisions,
    )


async def play(
    trace: Trace, router_url: str, cluster_url: str, on_progress: Progress
) -> tuple[LoadReport, dict[str, float]]:
    """Send the trace; the report, and the engine's sums over the steps of the steady window.

    Raises: DemoFailed: there were too few; InputError: the router does not answer.
    """
    sent = 0
    samples: list[tuple[int, dict[str, float]]] = []

    def tell(now_sent: int, ended: int) -> None:
        nonlocal sent
        sent = now_sent
        on_progress(ended, len(trace))

    async def sample() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                with suppress(httpx.TransportError):  # late, on a busy machine; one that has ended shows by its answers
                    state = (await client.get(f"{cluster_url}/_emulator/state")).json()
                    samples.append((sent, state["step_totals"]))
                await asyncio.sleep(SAMPLE_S)

    sampler = asyncio.ensure_future(sample())
    try:
        report = await run_load(trace, LoadOptions(router_url), tell)
    finally:
        sampler.cancel()
        await asyncio.wait((sampler,))
    steady = [totals for count, totals in samples if WARM_UP_RATIO * len(trace) <= count < len(trace)]
    if len(steady) < 2:
        raise DemoFailed(f"the run of {len(trace)} requests was too short to measure: give it more seconds")
    return report, {name: steady[-1][name] - steady[0][name] for name in steady[0]}


def decision_cost(metrics: str) -> tuple[float, int]:
    """Mean seconds of a decision over the whole pool, and how many there were, from the router's /metrics."""
    found = dict(re.findall(r"^balanceroute_admit_duration_seconds_(sum|count) (\S+)$", metrics, re.M))
    count = int(float(found.get("count", 0)))
    return (float(found["sum"]) / count if count else 0.0), count


@contextmanager
def emulated_cluster(scale: DemoScale, setting: ReferenceSetting, logs: Path) -> Iterator[tuple[Path, str]]:
    """A running cluster: the configuration for `serve`, and the URL of a worker that tells the cluster's state."""
    flags = ["--step-cost", repr(setting.step_cost_s), "--step-overhead", repr(setting.step_overhead_s)]
    with emulated(scale.prefillers, scale.workers, scale.slots, flags, logs) as (config, urls):
        yield config, urls[0]
