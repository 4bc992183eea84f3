"""What `/metrics` shows, in a registry of its own.

Per request: a handful of counters and histograms, bound once (`instruments.py`). Per token: nothing. Everything that
is a state (loads, slots, waiting requests) is read from the ledger at the moment of the scrape, so it can't drift
and a worker's series go when the worker goes.

Where a router has several processes, each counts for itself. What they have counted is told as plain data (`counts`) to
the one that shows it (`beside`), and to the next life of one that has ended (`carry_on`), so that no sum ever falls.
States are those of the process that decides.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute import __version__
from balanceroute.core.types import Outcome, WorkerState
from balanceroute.core.view import ClusterView
from balanceroute.proxy.hotpath import COMPILED
from balanceroute.proxy.telemetry.conditions import KINDS, Conditions
from balanceroute.proxy.telemetry.divergence import Divergence
from balanceroute.proxy.telemetry.forecast_metrics import ForecastMetrics
from balanceroute.proxy.telemetry.instruments import DECISION_SECONDS, CounterFamily, HistogramFamily, StageClock

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_MANY = 1024  # values of a histogram
_STATES = {WorkerState.DOWN: 0.0, WorkerState.DRAINING: 1.0, WorkerState.UP: 2.0}


Counts = TypeVar("Counts", CounterFamily, HistogramFamily)


class Metrics(Collector):
    """Every metric of one router; `registry` is what the exposition is made from."""

    def __init__(self, view: Callable[[], ClusterView], policy: str, stage_clock: StageClock | None = None) -> None:
        """`view`: the cluster at the moment of a scrape."""
        self._view, self.policy = view, policy
        self._stage_clock = stage_clock or StageClock()
        self.requests = CounterFamily("balanceroute_requests", "Client requests that ended.", ["outcome"])
        self.tokens = CounterFamily("balanceroute_generated_tokens", "Tokens generated for clients.")
        self.admissions = CounterFamily(
            "balanceroute_admissions",
            "Requests bound to a decode worker, by stage of the decision.",
            ["worker", "kind"],
        )
        self.upstream_errors = CounterFamily(
            "balanceroute_upstream_errors", "Failures of workers, by tier and kind.", ["worker", "tier", "kind"]
        )
        self.retries = CounterFamily("balanceroute_retries", "Second and later tries, by tier.", ["tier"])
        self.recomputes = CounterFamily(
            "balanceroute_recomputes", "Requests sent back through prefill with what they had generated.", ["kind"]
        )
        self.resumes = CounterFamily(
            "balanceroute_resumes",
            "Answers cut off after their first token: continued exactly, with adjusted limits or approximately "
            "(state of the engine begins anew, such as penalties); restarted unseen; ended with an error.",
            ["fidelity"],
        )
        self.given_up_requests = CounterFamily(
            "balanceroute_given_up_requests",
            "Requests given up because decode workers died under them: two before their first token, or three after.",
        )
        self.moves = CounterFamily(
            "balanceroute_moves", "Requests taken off a worker that had fallen silent, by its tier.", ["tier"]
        )
        self.drains = CounterFamily(
            "balanceroute_kv_drains", "Pinned prefill KV pulled and dropped for requests that left.", ["outcome"]
        )
        self.scrapes_failed = CounterFamily(
            "balanceroute_scrape_failures", "Reads of a worker's /metrics that failed.", ["worker"]
        )
        self.callbacks = CounterFamily(
            "balanceroute_metaserver_callbacks", "Decode workers that asked for a prefill (layerwise).", ["outcome"]
        )
        self.edge_refusals = CounterFamily(
            "balanceroute_edge_refusals",
            "Requests refused for what they are: malformed, too large, too slow, or one too many.",
            ["reason"],
        )
        self.refusals = CounterFamily(
            "balanceroute_refusals", "Requests refused for who asked: no key, a wrong one, a key's limit.", ["reason"]
        )
        self.tasks_failed = CounterFamily(
            "balanceroute_internal_errors", "Bugs of ours: logged with a state snapshot.", ["where"]
        )
        self._ttft = HistogramFamily("balanceroute_request_ttft_seconds", "Arrival to first token.", _SECONDS)
        self._tpot = HistogramFamily(
            "balanceroute_request_tpot_seconds", "(last token - first token) / (tokens - 1).", _TOKEN_SECONDS
        )
        self._duration = HistogramFamily("balanceroute_request_duration_seconds", "Arrival to end.", _SECONDS)
        self._waits = HistogramFamily(
            "balanceroute_wait_seconds", "Waits in the router: for a prefiller, for a slot.", _SECONDS, "tier"
        )
        self._admit = HistogramFamily(
            "balanceroute_admit_duration_seconds", "One decision over the whole pool.", DECISION_SECONDS
        )
        self._prompt_estimates = HistogramFamily(
            "balanceroute_prompt_estimate_error_ratio",
            "Prompts by how far their estimated tokens were from those that a prefiller counted, as a share of these.",
            (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0),
        )
        self.prompt_estimate_error = self._prompt_estimates.child()
        self.ttft, self.tpot = self._ttft.child(), self._tpot.child()
        self.duration, self.admit_duration = self._duration.child(), self._admit.child()
        self.prefill_wait, self.decode_wait = self._waits.child("prefill"), self._waits.child("decode")
        stages = self._stage_clock.stages
        self._histograms = [
            self._ttft,
            self._tpot,
            self._duration,
            self._waits,
            self._admit,
            stages,
            self._prompt_estimates,
        ]
        self._counters = [
            self.requests,
            self.tokens,
            self.admissions,
            self.upstream_errors,
            self.retries,
            self.recomputes,
            self.resumes,
            self.given_up_requests,
            self.moves,
            self.drains,
            self.scrapes_failed,
            self.callbacks,
            self.edge_refusals,
            self.refusals,
            self.tasks_failed,
        ]
        self._others: list[HistogramFamily] = []
        self.beside: Callable[[], Iterable[bytes]] = _nobody
        for outcome in Outcome:
            self.requests.inc(outcome.value, by=0)
        self.orphaned_kv = 0
        self.divergence = Divergence()
        self.conditions = Conditions()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def forget_worker(self, worker_id: str) -> None:
        """A worker has left: its series end."""
        for family in (self.admissions, self.upstream_errors, self.scrapes_failed):
            family.forget(worker_id)
        self.divergence.forget(worker_id)
        self.conditions.forget(worker_id)

    def orphan(self, requests: int) -> None:
        """So many requests' pinned KV has been given up; negative: its prefiller has dropped it by now."""
        self.orphaned_kv += requests

    def include(self, forecasts: ForecastMetrics) -> None:
        """Show the predictor's series too."""
        self.registry.register(forecasts)
        self._others.append(forecasts.errors)

    def leave_out(self, forecasts: ForecastMetrics) -> None:
        """The predictor is another one now."""
        self.registry.unregister(forecasts)
        self._others.remove(forecasts.errors)

    def fold(self) -> None:
        """Count what histograms have taken down, so that it doesn't pile up while nobody scrapes."""
        for histogram in (*self._histograms, *self._others):
            histogram.fold(_MANY)

    def counts(self) -> bytes:
        """What this process has counted, for `beside` or `carry_on` of another one."""
        told = {
            "counters": {family.name: family.rows() for family in self._counters},
            "histograms": {family.name: family.rows() for family in self._histograms},
            "orphaned_kv": self.orphaned_kv,
        }
        return orjson.dumps(told)

    def carry_on(self, counts: bytes) -> None:
        """Go on from what former lives of this process have counted, if anything."""
        if not counts:
            return
        told = orjson.loads(counts)
        for counter in self._counters:
            counter.add(told["counters"].get(counter.name, ()))
        for histogram in self._histograms:
            histogram.add(told["histograms"].get(histogram.name, ()))

    def exposition(self) -> bytes:
        """The text format of all metrics. Raises: Rejected: others' counts are not known yet."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Names and helps, for documentation tests."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        others = [orjson.loads(counts) for counts in self.beside()]
        for counter in self._counters:
            yield _summed(counter, [told["counters"] for told in others]).family()
        for histogram in self._histograms:
            yield _summed(histogram, [told["histograms"] for told in others]).family()
        yield from self._cluster_gauges()
        yield _gauge(
            "balanceroute_kv_orphans",
            "Undrainable prefill KV that no decoder is known to have pulled: pinned at worst until the timeout.",
            self.orphaned_kv + sum(told["orphaned_kv"] for told in others),
        )
        divergence = GaugeMetricFamily(
            "balanceroute_ledger_divergence",
            "What a worker reports beyond our ledger in every one of the last polls: requests of a decoder, KV usage "
            "(ratio) of a prefiller that holds nothing for us. 0 is well.",
            labels=["worker"],
        )
        for worker_id in self.divergence.workers():
            divergence.add_metric([worker_id], self.divergence.lasting(worker_id))
        yield divergence
        degraded = GaugeMetricFamily(
            "balanceroute_degraded_workers",
            "Workers with something wrong although requests are served; /ready says what.",
            labels=["kind"],
        )
        for kind in KINDS:
            degraded.add_metric([kind], self.conditions.count(kind))
        yield degraded
        build = InfoMetricFamily("balanceroute_build", "What runs.")
        hot_path = "compiled" if COMPILED else "python"
        build.add_metric([], {"version": __version__, "policy": self.policy, "hot_path": hot_path})
        yield build

    def _cluster_gauges(self) -> Iterator[Metric]:
        view = self._view()
        load = GaugeMetricFamily("balanceroute_decode_load_tokens", "L_g: KV tokens on a worker.", labels=["worker"])
        active = GaugeMetricFamily("balanceroute_decode_active_requests", "Requests on a worker.", labels=["worker"])
        ahead = GaugeMetricFamily(
            "balanceroute_decode_overlap_requests",
            "Requests that a worker may be sent beyond its slots, to have their KV moved meanwhile.",
            labels=["worker"],
        )
        foreign = GaugeMetricFamily(
            "balanceroute_decode_foreign_requests", "Requests on a worker that others sent there.", labels=["worker"]
        )
        foreign_load = GaugeMetricFamily(
            "balanceroute_decode_foreign_tokens", "KV tokens on a worker of what others sent there.", labels=["worker"]
        )
        states = GaugeMetricFamily(
            "balanceroute_worker_state", "2 up, 1 draining or resting, 0 down.", labels=["worker", "tier"]
        )
        usage = GaugeMetricFamily(
            "balanceroute_prefill_kv_usage_ratio",
            "KV usage of a prefiller; 1 if its metrics can't be reached, NaN if they don't tell.",
            labels=["worker"],
        )
        pinned = GaugeMetricFamily(
            "balanceroute_prefill_pinned_tokens", "KV tokens pinned on a prefiller for us.", labels=["worker"]
        )
        prefill_s = GaugeMetricFamily(
            "balanceroute_prefill_inflight_seconds", "Expected seconds of the prefills under way.", labels=["worker"]
        )
        cached = GaugeMetricFamily(
            "balanceroute_prefix_cache_tokens", "Prompt tokens that a prefiller is thought to have cached.",
            labels=["worker"],
        )  # fmt: skip
        prompts = CounterMetricFamily(
            "balanceroute_prefill_prompt_tokens", "Prompt tokens of the prefills that are done.", labels=["worker"]
        )
        predicted = CounterMetricFamily(
            "balanceroute_prefix_predicted_tokens",
            "Prompt tokens that the prefiller was thought to have cached when it was chosen.",
            labels=["worker"],
        )
        hits = CounterMetricFamily(
            "balanceroute_prefix_hit_tokens",
            "Prompt tokens that the prefiller had cached, by its own counters or else by its answers; no series where "
            "it tells neither.",
            labels=["worker"],
        )
        for worker in view.decoders:
            load.add_metric([worker.id], worker.load_tokens)
            active.add_metric([worker.id], worker.active)
            ahead.add_metric([worker.id], worker.ahead)
            foreign.add_metric([worker.id], worker.foreign_requests)
            foreign_load.add_metric([worker.id], worker.foreign_tokens)
            states.add_metric([worker.id, "decode"], _STATES[worker.state])
        for prefiller in view.prefillers:
            usage.add_metric([prefiller.id], math.nan if prefiller.kv_usage is None else prefiller.kv_usage)
            pinned.add_metric([prefiller.id], prefiller.pinned_tokens)
            states.add_metric([prefiller.id, "prefill"], _STATES[prefiller.state])
            prefill_s.add_metric([prefiller.id], prefiller.inflight_s)
            cached.add_metric([prefiller.id], prefiller.cache_tokens)
            prompts.add_metric([prefiller.id], prefiller.prompt_tokens)
            predicted.add_metric([prefiller.id], prefiller.predicted_tokens)
            if prefiller.hit_tokens is not None:
                hits.add_metric([prefiller.id], prefiller.hit_tokens)
        yield from (load, active, ahead, foreign, foreign_load, states, usage, pinned, prefill_s, cached)
        yield from (prompts, predicted, hits)
        loads = [worker.load_tokens for worker in view.decoders if worker.state is not WorkerState.DOWN]
        envelope = max(loads, default=0)
        yield _gauge("balanceroute_decode_envelope_tokens", "M: the largest load.", envelope)
        yield _gauge("balanceroute_decode_imbalance_tokens", "I = G * M - sum(L).", len(loads) * envelope - sum(loads))
        waiting = GaugeMetricFamily(
            "balanceroute_waiting_requests", "Requests that wait in the router.", labels=["phase"]
        )
        for phase, count in (
            ("queued", view.queued),
            ("prefilling", view.prefilling),
            ("pooled", view.pooled),
            ("asking", view.asking),  # layerwise: at a decode worker, and no prefiller may take them
        ):
            waiting.add_metric([phase], count)
        yield waiting


def _nobody() -> Iterable[bytes]:
    """No other process counts."""
    return ()


def _summed(family: Counts, others: list[dict[str, Any]]) -> Counts:
    """The family with what others have counted under its name."""
    if not others:
        return family
    whole = family.copy()
    for told in others:
        whole.add(told.get(family.name, ()))
    return whole


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)
