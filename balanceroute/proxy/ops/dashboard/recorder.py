"""The dashboard's history: the last `SPAN` samples, one per second, in memory of fixed size.

A series is a ring buffer of `SPAN` numbers. A value that was not known is NaN, never 0: the load of a worker that is
down, a quantile of no request, a KV usage that no worker reports. A second in which the loop had no time has no sample,
and the page draws a gap.

The charts need times of day, and rates need a clock that nobody sets. So times are those of the steady clock, moved to
the time of day; when that is set, all of them move with it (`Recorder.clock_sets`).

Memory: 4 bytes per number, so 3.6 kB per series and worker; 144 workers take half a megabyte.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from balanceroute import __version__
from balanceroute.build import policy_settings
from balanceroute.core.policies import settings_to_dict
from balanceroute.core.types import WorkerState
from balanceroute.core.view import ClusterView, PrefillerView
from balanceroute.errors import ConfigError, InputError, Rejected
from balanceroute.explain import runners_up
from balanceroute.proxy.admission.decision_log import SAMPLES, Sample
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.instruments import Histogram
from balanceroute.proxy.telemetry.metrics import Served
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.workers.fleet import why_not_up

SPAN: Final = 900  # samples, one per second: 15 minutes
PERIOD_S: Final = 1.0
RATE_S: Final = 5  # samples over which rates are taken
QUANTILE_S: Final = 30  # samples over which quantiles are taken
EVENTS: Final = 200
CLOCK_SET_S: Final = 1.0  # the time of day was set if it has moved by more against the steady clock
WORK_S: Final = 0.1  # time of a thread, per sample, to work out runners-up
POINTS: Final = 40_000  # at most so many values, of all workers, go to a page at first

Column = NDArray[np.float32]
SERIES: Final = (
    "load_max",
    "load_mean",
    "load_min",
    "idle_ratio",
    "tokens_per_s",
    "finished_per_s",
    "running",
    "queued",
    "prefilling",
    "pooled",
    "oldest_wait_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "hits_found",
    "hits_predicted",
)


@dataclass(frozen=True, slots=True)
class Event:
    """A mark in the charts; `at` in Unix seconds."""

    at: float
    kind: str  # deploy, down, up, drain, reload, policy
    text: str


def column() -> Column:
    """An empty series: all NaN."""
    return np.full(SPAN, np.nan, dtype=np.float32)


def quantile(bounds: list[float], counts: NDArray[np.int64], q: float) -> float:
    """The q-quantile of values in buckets, linear within a bucket. NaN: no values; above the last bound: that bound."""
    total = int(counts.sum())
    if total <= 0:
        return math.nan
    wanted = q * total
    below = np.cumsum(counts)
    bucket = int(np.searchsorted(below, wanted))
    if bucket >= len(bounds):
        return bounds[-1]
    low = bounds[bucket - 1] if bucket else 0.0
    before = float(below[bucket - 1]) if bucket else 0.0
    return low + (bounds[bucket] - low) * (wanted - before) / max(1, int(counts[bucket]))


def _work_out(policy: dict[str, Any], samples: list[Sample]) -> None:
    """Write the runners-up into the decisions for `WORK_S` at most; the remaining ones never get any.

    `policy`: the policy and its params, as in a state document.
    """
    until = time.monotonic() + WORK_S
    for sample in samples:
        if time.monotonic() > until:
            return
        decided = {decision.admission.request: decision for decision in sample.decisions}
        try:
            found = runners_up({**policy, **sample.state}, SAMPLES)
        except (ConfigError, InputError):
            continue  # a policy that a state document can't name
        for admit, runner_up in found:
            decision = decided.get(admit.request)
            if decision is not None and decision.admission.worker == admit.worker:
                decision.runner_up, decision.runner_up_score = str(runner_up), runner_up.score


def _hits_since(before: PrefillerView, now: PrefillerView) -> tuple[int, int, int, int]:
    """Prompt tokens and predicted hits; then prompt tokens and hits at prefillers that report hits."""
    prompts, predicted = now.prompt_tokens - before.prompt_tokens, now.predicted_tokens - before.predicted_tokens
    if now.hit_tokens is None:
        return prompts, predicted, 0, 0
    return prompts, predicted, prompts, max(0, now.hit_tokens - (before.hit_tokens or 0))


class Recorder:
    """Samples the router once per `PERIOD_S`; pages read it and wait on it."""

    def __init__(
        self,
        services: Callable[[], Services],
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = now_s,
    ) -> None:
        self._services, self._wall, self._steady = services, wall, steady
        self._wall_ahead_s = wall() - steady()
        self.clock_sets = 0  # so often the time of day was set: a page that knows another number reads everything anew
        self.count = 0  # samples so far
        self.at = np.full(SPAN, np.nan)
        self.series = {name: column() for name in SERIES}
        self.loads: dict[str, Column] = {}  # by decode worker
        self.usage: dict[str, Column] = {}  # by prefiller
        self.events: deque[Event] = deque([Event(wall(), "deploy", f"router {__version__} started")], maxlen=EVENTS)
        self.event_count = 1
        self.states: dict[str, tuple[WorkerState, float]] = {}  # state and since when, Unix seconds
        self.new_sample = asyncio.Condition()
        self._drained: set[str] = set()
        self._reloads = 0
        self._policy = ""
        self._totals = np.full((SPAN, 2), np.nan)  # tokens and finished requests so far
        # prompt tokens so far: all, predicted hits; all at prefillers that report hits, hits
        self._hits = np.zeros((SPAN, 4))
        self._hits_of: dict[str, PrefillerView] = {}  # at the last sample
        self._counts: dict[str, NDArray[np.int64]] = {}  # of each histogram so far, by sample

    async def run(self) -> None:
        """Take a sample every `PERIOD_S`, until cancelled."""
        while True:
            self.sample()
            await self._find_runners_up()
            async with self.new_sample:
                self.new_sample.notify_all()
            await asyncio.sleep(until_tick_s(asyncio.get_running_loop().time(), PERIOD_S))

    def look(self) -> None:
        """Note what has changed since the last look: each change of a worker's state that a page shows is an event,
        too.
        """
        services = self._services()
        self._note_events(services, services.ledger.view(), self._now())

    def served(self) -> Served | None:
        """What clients have got so far; None: the counts of other processes are not known yet."""
        try:
            return self._services().metrics.served()
        except Rejected:
            return None

    def sample(self) -> None:
        """Record the present state. O(workers)."""
        services = self._services()
        services.ledger.settle()
        view, row, now = services.ledger.view(), self.count % SPAN, self._now()
        self.at[row] = now
        self._note_events(services, view, now)
        values = self._values(services, view, row)
        for name in SERIES:
            self.series[name][row] = values[name]
        down = WorkerState.DOWN
        loads = {w.id: math.nan if w.state is down else w.load_tokens + w.foreign_tokens for w in view.decoders}
        self.loads = self._write(self.loads, loads, row)
        usage = {p.id: math.nan if p.kv_usage is None or p.state is down else p.kv_usage for p in view.prefillers}
        self.usage = self._write(self.usage, usage, row)
        self.count += 1

    def _now(self) -> float:
        """The time, in Unix seconds. When the clock was set, all times so far move with it: they only grow, and stay as
        far apart as they are.
        """
        steady_s = self._steady()
        by_s = self._wall() - steady_s - self._wall_ahead_s
        if abs(by_s) > CLOCK_SET_S:
            self.clock_sets += 1
            self._wall_ahead_s += by_s
            self.at += by_s
            self.events = deque([replace(event, at=event.at + by_s) for event in self.events], maxlen=EVENTS)
            self.states = {worker_id: (state, since + by_s) for worker_id, (state, since) in self.states.items()}
        return steady_s + self._wall_ahead_s

    @staticmethod
    def _write(columns: dict[str, Column], values: dict[str, float], row: int) -> dict[str, Column]:
        """Write a value per worker; drop the series of workers that have left."""
        kept = {name: columns.get(name) for name in values}
        made = {name: column() if found is None else found for name, found in kept.items()}
        for name, value in values.items():
            made[name][row] = value
        return made

    def _values(self, services: Services, view: ClusterView, row: int) -> dict[str, float]:
        served, nan = self.served(), math.nan
        standing = [w for w in view.decoders if w.state is not WorkerState.DOWN]
        loads = [w.load_tokens + w.foreign_tokens for w in standing]
        most, mean = (max(loads), sum(loads) / len(loads)) if loads else (nan, nan)
        self._totals[row] = nan
        if served is not None:
            self._totals[row] = served.tokens, served.requests.value("finished")
        rates = self._rates(row)
        oldest = view.oldest_ready_s
        found, predicted = self._prefix_hits(services.knows_prefixes, view, row)
        ttft = self._quantiles("ttft", None if served is None else served.ttft, row)
        tpot = self._quantiles("tpot", None if served is None else served.tpot, row)
        return {
            "load_max": most,
            "load_mean": mean,
            "load_min": min(loads) if loads else nan,
            "idle_ratio": 1 - mean / most if loads and most else nan,
            "tokens_per_s": rates[0],
            "finished_per_s": rates[1],
            "running": sum(w.active for w in view.decoders),
            "queued": view.queued + view.asking,
            "prefilling": view.prefilling,
            "pooled": view.pooled,
            "oldest_wait_s": 0.0 if oldest is None else services.ledger.now() - oldest,
            "ttft_p50_s": ttft[0],
            "ttft_p99_s": ttft[1],
            "tpot_p50_s": tpot[0],
            "tpot_p99_s": tpot[1],
            "hits_found": found,
            "hits_predicted": predicted,
        }

    def _rates(self, row: int) -> NDArray[Any]:
        back = min(self.count, RATE_S)
        if not back:
            return np.full(2, np.nan)
        before = (self.count - back) % SPAN
        elapsed_s = self.at[row] - self.at[before]
        rates: NDArray[Any] = (self._totals[row] - self._totals[before]) / max(float(elapsed_s), 1e-3)
        return rates.clip(min=0.0)

    def _prefix_hits(self, asked: bool, view: ClusterView, row: int) -> tuple[float, float]:
        """Shares of the prompt tokens of the last `QUANTILE_S` samples: cached at prefillers, and predicted to be.

        NaN: no prefiller reports hits, nothing was prefilled, or the policy does not use predictions (`asked`). An
        engine's counters run a little ahead of its answers, so a share is cut at 1.
        """
        last = (self.count - 1) % SPAN
        self._hits[row] = self._hits[last] if self.count else 0.0
        for prefiller in view.prefillers:
            before = self._hits_of.get(prefiller.id)
            if before is not None and prefiller.prompt_tokens >= before.prompt_tokens:  # fewer: the worker has rejoined
                self._hits[row] += _hits_since(before, prefiller)
        self._hits_of = {prefiller.id: prefiller for prefiller in view.prefillers}
        since = self._hits[row] - self._hits[(row - min(self.count, QUANTILE_S)) % SPAN]
        prompts, predicted, reported, found = since.tolist()
        return (
            min(1.0, found / reported) if reported else math.nan,
            min(1.0, predicted / prompts) if asked and prompts else math.nan,
        )

    def _quantiles(self, name: str, histogram: Histogram | None, row: int) -> tuple[float, float]:
        """p50 and p99 of what the histogram has counted over the last `QUANTILE_S` samples, or since the first one."""
        if histogram is None:
            if name in self._counts:
                self._counts[name][row] = self._counts[name][(row - 1) % SPAN]
            return math.nan, math.nan
        counts = np.array(histogram.counts, dtype=np.int64)
        # the router is older than this process: what was counted before it is not new
        kept = self._counts.setdefault(name, np.tile(counts, (SPAN, 1)))
        kept[row] = counts
        since = (counts - kept[(row - QUANTILE_S) % SPAN]).clip(min=0)
        return quantile(histogram.bounds, since, 0.5), quantile(histogram.bounds, since, 0.99)

    # -- events

    def _note(self, at: float, kind: str, text: str) -> None:
        self.events.append(Event(at, kind, text))
        self.event_count += 1

    def _note_events(self, services: Services, view: ClusterView, now: float) -> None:
        states = {worker.id: worker.state for worker in view.decoders}
        states |= {prefiller.id: prefiller.state for prefiller in view.prefillers}
        self._note_states(services, states, now)
        self._note_drains(services, states.keys(), now)
        self._note_settings(services, now)

    def _note_states(self, services: Services, states: dict[str, WorkerState], now: float) -> None:
        for worker_id, state in states.items():
            before = self.states.get(worker_id)
            if before is not None and before[0] is state:
                continue
            self.states[worker_id] = (state, now)
            if state is WorkerState.DOWN:
                self._note(now, "down", f"{worker_id} is down: {why_not_up(services.fleet[worker_id])}")
            elif before is not None and before[0] is WorkerState.DOWN:
                self._note(now, "up", f"{worker_id} is back")
        for worker_id in [worker_id for worker_id in self.states if worker_id not in states]:
            del self.states[worker_id]
            self._note(now, "drain", f"{worker_id} has left")

    def _note_drains(self, services: Services, here: Collection[str], now: float) -> None:
        drained = services.fleet.withdrawn()
        for worker_id in sorted(drained ^ self._drained):
            if worker_id in here:
                what = "is drained" if worker_id in drained else "takes requests again"
                self._note(now, "drain", f"{worker_id} {what}")
        self._drained = drained

    def _note_settings(self, services: Services, now: float) -> None:
        policy = services.metrics.policy
        if self._policy and policy != self._policy:
            self._note(now, "policy", f"policy {self._policy} → {policy}")
        elif services.reloads != self._reloads:
            self._note(now, "reload", "configuration reloaded")
        self._policy, self._reloads = policy, services.reloads

    # -- decisions

    async def _find_runners_up(self) -> None:
        """Work out the runners-up of decisions whose states were kept, newest first."""
        log = self._services().decisions
        if not log.samples:
            return
        samples = list(reversed(log.samples))
        log.samples.clear()
        policy = settings_to_dict(policy_settings(self._services().config))
        await asyncio.to_thread(_work_out, policy, samples)

    # -- reading

    def order(self) -> NDArray[np.int64]:
        """The indices of the samples, oldest first."""
        first = max(0, self.count - SPAN)
        return np.arange(first, self.count, dtype=np.int64) % SPAN

    def past(self) -> dict[str, Any]:
        """The whole history; `orjson` writes NaN as null. Loads of many workers have only every `stride`-th sample."""
        order = self.order()
        stride = max(1, math.ceil(len(order) * len(self.loads) / POINTS))
        thin = order[(len(order) - 1) % stride :: stride] if len(order) else order
        return {
            "at": np.round(self.at[order], 2),
            "series": {name: values[order] for name, values in self.series.items()},
            "stride": stride,
            "loads": {name: values[thin] for name, values in self.loads.items()},
            "usage": {name: values[order] for name, values in self.usage.items()},
        }

    def newest(self) -> dict[str, Any]:
        """The last sample."""
        row = (self.count - 1) % SPAN
        return {
            "at": round(float(self.at[row]), 2),
            "series": {name: values[row] for name, values in self.series.items()},
            "loads": {name: values[row] for name, values in self.loads.items()},
            "usage": {name: values[row] for name, values in self.usage.items()},
        }
