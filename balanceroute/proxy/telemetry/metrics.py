"""The metrics of one router, in their own registry.

A request updates a handful of counters and histograms (`instruments.py`); a token updates none. States (loads, slots,
waiting requests) are read from the ledger at each scrape, so they can't drift, and a worker's series end with the
worker.

In a router of several processes each counts for itself, and passes its counts on as plain data (`counts`): to the
process that serves the page (`beside`), and to its own successor after a restart (`continue_from`), so that no counter
falls. States come from the process that decides.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute import __version__, native
from balanceroute.core.types import Outcome
from balanceroute.core.view import ClusterView
from balanceroute.proxy.hotpath import COMPILED
from balanceroute.proxy.telemetry.cluster_gauges import cluster_gauges, gauge_by, prefiller_counters
from balanceroute.proxy.telemetry.conditions import KINDS, Conditions
from balanceroute.proxy.telemetry.divergence import Divergence
from balanceroute.proxy.telemetry.engine_slots import EngineSlots
from balanceroute.proxy.telemetry.forecast_metrics import ForecastCounts, ForecastMetrics
from balanceroute.proxy.telemetry.instruments import (
    DECISION_SECONDS,
    CounterFamily,
    CounterRow,
    Histogram,
    HistogramFamily,
    StageClock,
)
from balanceroute.proxy.telemetry.process_gauges import process_families
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_LIVES_SECONDS = (*_SECONDS, 500.0, 1000.0, 2500.0, 5000.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_MANY = 1024  # values of a histogram
_SERIES = 1000  # in a piece of the page
_TIERS = ("prefill", "decode")
FAILURES = ("connect", "timeout", "bad_reply", "foreign_reply", "status_4xx", "status_5xx")
"""How a worker fails a request."""
REFUSALS = (
    "no_key",
    "wrong_key",
    "key_limit",
    "no_token",
    "wrong_token",
    "not_loopback",
    "proxied",
    "foreign_host",
    "foreign_origin",
    "content_type",
)
"""Why one is refused for who asks: `AccessDenied.reason`."""
EDGE_REFUSALS = (
    "malformed",
    "method",
    "slow",
    "body_too_large",
    "line_too_long",
    "expectation",
    "head_too_large",
    "version",
    "overload",
)
"""Why one is refused for what it is: `client/labels.py`."""


Counts = TypeVar("Counts", CounterFamily, HistogramFamily)


@dataclass(frozen=True, slots=True)
class Served:
    """What clients have got so far, from all processes of a router."""

    requests: CounterFamily
    tokens: float
    ttft: Histogram
    tpot: Histogram


_Count = Annotated[int, msgspec.Meta(ge=0)]
_CounterRows = dict[str, list[tuple[tuple[str, ...], Annotated[float, msgspec.Meta(ge=0)]]]]
_HistogramRows = list[tuple[str, list[_Count], float]]


class _Predicted(msgspec.Struct):
    """The counts of predictors: see `ForecastCounts.as_data`."""

    counters: _CounterRows
    errors: _HistogramRows


class _Counts(msgspec.Struct):
    """The counts of a process, by the names of the families; validated when read."""

    counters: _CounterRows
    histograms: dict[str, _HistogramRows]
    forecasts: _Predicted | None = None


_decoder: Final = msgspec.json.Decoder(_Counts)


class Metrics(Collector):
    """Every metric of one router; `registry` is what the exposition is made from."""

    def __init__(self, view: Callable[[], ClusterView], policy: str, stage_clock: StageClock | None = None) -> None:
        """`view`: the cluster at the moment of a scrape."""
        self._view, self.policy = view, policy
        self._counters: list[CounterFamily] = []
        self._histograms: list[HistogramFamily] = []
        self.requests = self._counter("requests", "Client requests that ended.", "outcome")
        self.tokens = self._counter("generated_tokens", "Tokens generated for clients, counted as they come.")
        self.admissions = self._counter(
            "admissions", "Requests bound to a decode worker, by stage of the decision.", "worker", "kind"
        )
        self.upstream_errors = self._counter(
            "upstream_errors",
            "Failures of workers, by tier and kind; `drain_` before the kind: of a request that only frees pinned KV.",
            "worker",
            "tier",
            "kind",
        )
        self.retries = self._counter("retries", "Second and later tries, by tier.", "tier")
        self.recomputes = self._counter(
            "recomputes", "Requests sent back through prefill with what they had generated.", "kind"
        )
        self.resumes = self._counter(
            "resumes",
            "Answers cut off after their first token: continued exactly, with adjusted limits or approximately "
            "(state of the engine begins anew, such as penalties); restarted unseen; ended with an error.",
            "fidelity",
        )
        self.given_up_requests = self._counter(
            "given_up_requests",
            "Requests given up because decode workers died under them: two before their first token, or three after.",
        )
        self.moves = self._counter("moves", "Requests taken off a worker that had fallen silent, by its tier.", "tier")
        self.drains = self._counter(
            "kv_drains", "Pinned prefill KV pulled and dropped for requests that left.", "outcome"
        )
        self.scrapes_failed = self._counter("scrape_failures", "Reads of a worker's /metrics that failed.", "worker")
        self.callbacks = self._counter(
            "metaserver_callbacks", "Decode workers that asked for a prefill (layerwise).", "outcome"
        )
        self.edge_refusals = self._counter(
            "edge_refusals",
            "Requests refused for what they are: malformed, too large, too slow, or one too many.",
            "reason",
        )
        self.refusals = self._counter(
            "refusals", "Requests refused for who asked: no key, a wrong one, a key's limit.", "reason"
        )
        self.tasks_failed = self._counter("internal_errors", "Bugs of ours: logged with a state snapshot.", "where")
        self.restarts = self._counter(
            "restarts", "Relays and leading brains that took the place of one that had ended.", "process"
        )
        self._ttft = self._histogram(
            "request_ttft_seconds",
            "Arrival to first token, or to the end of an answer that its worker gives in one piece: one that is not "
            "streamed, of up to 64 tokens or with a rare field.",
            _SECONDS,
        )
        self._tpot = self._histogram(
            "request_tpot_seconds", "(last token - first token) / (tokens - 1).", _TOKEN_SECONDS
        )
        self.ttft, self.tpot = self._ttft.child(), self._tpot.child()
        self.duration = self._histogram(
            "request_duration_seconds", "Arrival to end of the requests that finished.", _LIVES_SECONDS
        ).child()
        waits = self._histogram(
            "wait_seconds",
            "Waits in the router: for a prefiller, for a slot; those as well that ended without one.",
            _SECONDS,
            "tier",
        )
        self.prefill_wait, self.decode_wait = waits.child("prefill"), waits.child("decode")
        self.admit_duration = self._histogram(
            "admit_duration_seconds", "One decision over the whole pool.", DECISION_SECONDS
        ).child()
        self._histograms.append((stage_clock or StageClock()).stages)
        self.prompt_estimate_error = self._histogram(
            "prompt_estimate_error_ratio",
            "Prompts by how far their estimated tokens were from those that a prefiller counted, as a share of these.",
            (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0),
        ).child()
        self._forecasts: ForecastMetrics | None = None
        self._former_forecasts = ForecastCounts()
        self._former_prefills = {family.name: family for family in prefiller_counters(())}
        self.beside: Callable[[], Iterable[bytes]] = lambda: ()
        self.before_page: Callable[[], None] = lambda: None
        self.catch_up: Callable[[], None] = lambda: None
        self.withdrawn: Callable[[], Collection[str]] = lambda: ()  # workers that operators have drained or removed
        self.processes: Callable[[], Mapping[str, int]] = dict  # process ids of the router, by name
        self.expiries: Callable[[], Mapping[str, float]] = dict  # of the router's certificates, by setting: Unix s
        self._unread = Trouble(log, "counters of another process cannot be read")
        self._begin_at_zero()
        self.orphaned_kv = self.orphaned_elsewhere = 0  # requests with undrainable KV, here and at relays
        self.divergence = Divergence()
        self.engine_slots = EngineSlots()
        self.conditions = Conditions()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def _begin_at_zero(self) -> None:
        """Show series at 0 before their first event: Prometheus sees no increase in a series that begins at 1."""
        for family, values in (
            (self.requests, [outcome.value for outcome in Outcome]),
            (self.retries, _TIERS),
            (self.moves, _TIERS),
            (self.recomputes, ("recomputed", "worker_lost", "pulled_late")),
            (self.resumes, ("exact", "adjusted", "approximate", "restarted", "ended")),
            (self.drains, ("drained", "orphaned")),
            (self.callbacks, ("accepted", "repeated", "refused", "malformed", "unknown")),
            (self.refusals, REFUSALS),
            (self.edge_refusals, EDGE_REFUSALS),
            (self.restarts, ("relay", "brain")),
            # coroutines get theirs when they start
            (self.tasks_failed, ("request", "drainer", "push", "client connections", "link", "hub")),
        ):
            for value in values:
                family.inc(value, by=0)

    def _zero_of_workers(self) -> dict[str, list[CounterRow]]:
        """Show a worker's series at 0 from the start: if it fails all its requests at once, a rate needs the value
        before.
        """
        view = self._view()
        workers = [("prefill", w.id) for w in view.prefillers] + [("decode", w.id) for w in view.decoders]
        return {
            self.upstream_errors.name: [((w, tier, kind), 0) for tier, w in workers for kind in FAILURES],
            self.scrapes_failed.name: [((w,), 0) for _, w in workers],
        }

    def _counter(self, name: str, meaning: str, *labels: str) -> CounterFamily:
        """A counter of ours; one per worker has the label `worker` and loses its series when the worker leaves."""
        family = CounterFamily(f"balanceroute_{name}", meaning, labels)
        if not labels:
            family.inc(by=0)
        self._counters.append(family)
        return family

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float], label: str | None = None) -> HistogramFamily:
        """A histogram of ours."""
        family = HistogramFamily(f"balanceroute_{name}", meaning, bounds, label)
        self._histograms.append(family)
        return family

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that has left."""
        for family in (*self._counters, *self._former_prefills.values()):
            family.forget_worker(worker_id)
        self.divergence.forget(worker_id)
        self.engine_slots.forget(worker_id)
        self.conditions.forget(worker_id)

    def forget_workers_but(self, known: Collection[str]) -> None:
        """Drop the series of all workers but these: a former process may have left some."""
        for family in (*self._counters, *self._former_prefills.values()):
            _forget_workers_but(family, known)

    def include(self, forecasts: ForecastMetrics) -> None:
        """Add a predictor's series; they continue those of earlier predictors."""
        forecasts.former = self._former_forecasts
        self.registry.register(forecasts)
        self._forecasts = forecasts

    def leave_out(self, forecasts: ForecastMetrics) -> None:
        """Remove the predictor's series: another one takes its place."""
        self.registry.unregister(forecasts)
        self._former_forecasts, self._forecasts = forecasts.whole(), None

    def fold(self) -> None:
        """Fold all histograms, so that appended values do not pile up while nothing scrapes."""
        for histogram in (*self._histograms, *([] if self._forecasts is None else [self._forecasts.errors])):
            histogram.fold(_MANY)

    def counts(self) -> bytes:
        """The counts of this process, for another one's `beside` or `continue_from`."""
        self.catch_up()
        forecasts = self._former_forecasts if self._forecasts is None else self._forecasts.whole()
        counts = {
            "counters": {family.name: family.rows() for family in (*self._counters, *self._prefills())},
            "histograms": {family.name: family.rows() for family in self._histograms},
            "forecasts": forecasts.as_data(),
        }
        return orjson.dumps(counts)

    def continue_from(self, counts: bytes) -> None:
        """Continue from the counts of this process's former runs, if they can be read; if not, begin at 0."""
        if not counts:
            return
        try:
            former = read_counts(counts)
        except ValueError as error:
            log.warning("counters of the previous process cannot be read", extra={"error": str(error)})
            return
        for counter in (*self._counters, *self._former_prefills.values()):
            counter.add(former.counters.get(counter.name, ()))
        for histogram in self._histograms:
            histogram.add(former.histograms.get(histogram.name, ()))
        if former.forecasts is not None:
            self._former_forecasts.add(former.forecasts.counters, former.forecasts.errors)

    def continue_former(self, process: str, counts: bytes) -> None:
        """Carry on what a former process of this name has counted, if there was one; `process`: what it is."""
        self.continue_from(counts)
        if counts:
            self.restarts.inc(process)

    def _prefills(self) -> Iterator[CounterFamily]:
        """The counters of prefillers, with those of former runs."""
        for family in prefiller_counters(self._view().prefillers):
            family.add(self._former_prefills[family.name].rows())
            yield family

    def exposition(self) -> bytes:
        """All metrics in the text format. Raises: Rejected: the counts of others are not known yet."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The same, piece by piece: with 1,000 workers the whole would hold the event loop for 0.13 s.

        All counts are taken before the first piece, as `before_page` has kept them. Raises: Rejected, before it, too.
        """
        self.before_page()
        collecting = [iter(each.collect()) for each in (self, self._forecasts) if each is not None]
        begun = [next(each) for each in collecting]
        for family in chain(*(chain([first], rest) for first, rest in zip(begun, collecting, strict=True))):
            series = family.samples
            for start in range(0, max(1, len(series)), _SERIES):
                family.samples = series[start : start + _SERIES]
                text = generate_latest(_Alone(family))
                yield text.split(b"\n", 2)[2] if start else text  # HELP and TYPE only once

    def served(self) -> Served:
        """What clients have got, from all processes. Raises: Rejected: the counts of others are not known yet."""
        self.catch_up()
        others = self._others()
        counters, histograms = [other.counters for other in others], [other.histograms for other in others]
        return Served(
            _summed(self.requests, counters),
            _summed(self.tokens, counters).value(),
            _summed(self._ttft, histograms).child(),
            _summed(self._tpot, histograms).child(),
        )

    def _others(self) -> list[_Counts]:
        """The counts of other processes; those that can't be read are left out."""
        others, unread = [], ""
        for counts in self.beside():
            try:
                others.append(read_counts(counts))
            except ValueError as error:
                unread = str(error)
        if unread:
            self._unread.begin(error=unread)
        else:
            self._unread.end()
        return others

    def collect(self) -> Iterator[Metric]:
        """The present values of all families; all counts are taken before the first one."""
        self.catch_up()
        others = self._others()
        counters: list[Mapping[str, Any]] = [self._zero_of_workers(), *(other.counters for other in others)]
        histograms = [other.histograms for other in others]
        counted = [_summed(counter, counters) for counter in self._counters]
        timed = [_summed(histogram, histograms) for histogram in self._histograms]
        prefills, view = list(self._prefills()), self._view()
        here = {prefiller.id for prefiller in view.prefillers} | {worker.id for worker in view.decoders}
        for counter in counted:
            _forget_workers_but(counter, here)  # other processes may have series of a worker that has left
            yield counter.family()
        for histogram in timed:
            yield histogram.family()
        yield from cluster_gauges(view, self.withdrawn())
        for prefilled in prefills:
            yield prefilled.family()
        yield from self._own_states()
        yield from process_families(self.processes())
        build = InfoMetricFamily("balanceroute_build", "What runs.")
        hot_path = "compiled" if COMPILED else "python"
        core = "compiled" if native.COMPILED else "python"
        build.add_metric([], {"version": __version__, "policy": self.policy, "hot_path": hot_path, "core": core})
        yield build

    def _own_states(self) -> Iterator[Metric]:
        """What this process knows beside the ledger: faults, and what will become one."""
        yield GaugeMetricFamily(
            "balanceroute_kv_orphans",
            "Undrainable prefill KV that no decoder is known to have pulled: pinned at worst until the timeout.",
            self.orphaned_kv + self.orphaned_elsewhere,
        )
        yield gauge_by(
            "worker",
            "balanceroute_ledger_divergence",
            "What a worker reports beyond our ledger in every one of the last polls: requests of a decoder, KV usage "
            "(ratio) of a prefiller that holds nothing for us. 0 is well.",
            ((worker_id, self.divergence.lasting(worker_id)) for worker_id in self.divergence.workers()),
        )
        yield gauge_by(
            "kind",
            "balanceroute_degraded_workers",
            "Workers with something wrong although requests are served; /ready says what.",
            ((kind, self.conditions.count(kind)) for kind in KINDS),
        )
        yield gauge_by(
            "setting",
            "balanceroute_certificate_expiry_timestamp_seconds",
            "When a certificate that the router shows expires; of a chain the first, which is its own; of several "
            "machines those of the brain's.",
            self.expiries().items(),
        )


@dataclass(frozen=True, slots=True)
class _Alone(Collector):
    """One family."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def read_counts(counts: bytes) -> _Counts:
    """The counts of a process. Raises: ValueError: `counts` contains none."""
    try:
        return _decoder.decode(counts)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _forget_workers_but(family: CounterFamily, known: Collection[str]) -> None:
    """Drop the series of other workers."""
    for worker_id in family.workers().difference(known):
        family.forget_worker(worker_id)


def _summed(family: Counts, others: Sequence[Mapping[str, Any]]) -> Counts:
    """A copy of the family with the counts of others added."""
    whole = family.copy()
    for other in others:
        whole.add(other.get(family.name, ()))
    return whole
