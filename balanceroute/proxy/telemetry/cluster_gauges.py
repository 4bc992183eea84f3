"""Gauges of the cluster's state, read from a view at each scrape. Each gauge is a row of a table.

`L_g` and `M` count the router's own requests, in KV tokens of its ledger. Decisions also weigh other routers' requests,
`decode.request_tokens` and a worker's `slowdown` (`DecodeInstanceState.step_load`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from balanceroute.core.types import WorkerState
from balanceroute.core.view import ClusterView, DecoderView, PrefillerView
from balanceroute.proxy.telemetry.instruments import CounterFamily

_View = TypeVar("_View", DecoderView, PrefillerView)

_STATES: Final = {WorkerState.DOWN: 0.0, WorkerState.DRAINING: 1.0, WorkerState.UP: 2.0}

PER_DECODER: Final[tuple[tuple[str, str, Callable[[DecoderView], float]], ...]] = (
    ("decode_load_tokens", "L_g: KV tokens of our requests on a worker.", lambda worker: worker.load_tokens),
    ("decode_active_requests", "Our requests on a worker.", lambda worker: worker.active),
    ("decode_slots", "How many requests a worker runs at a time: its `max_num_seqs`.", lambda worker: worker.slots),
    (
        "decode_overlap_requests",
        "Requests that a worker may be sent beyond its slots, to have their KV moved meanwhile.",
        lambda worker: worker.ahead,
    ),
    (
        "decode_foreign_requests",
        "Requests on a worker that others sent there.",
        lambda worker: worker.foreign_requests,
    ),
    (
        "decode_foreign_tokens",
        "KV tokens on a worker of what others sent there.",
        lambda worker: worker.foreign_tokens,
    ),
)
"""A gauge of each decode worker: name, meaning, value."""

PER_PREFILLER: Final[tuple[tuple[str, str, Callable[[PrefillerView], float]], ...]] = (
    (
        "prefill_kv_usage_ratio",
        "KV usage of a prefiller; 1 if its metrics can't be reached, NaN if they lack it.",
        lambda worker: math.nan if worker.kv_usage is None else worker.kv_usage,
    ),
    ("prefill_pinned_tokens", "KV tokens pinned on a prefiller for us.", lambda worker: worker.pinned_tokens),
    (
        "prefill_inflight_seconds",
        "Expected seconds of the prefills under way.",
        lambda worker: worker.inflight_s,
    ),
    (
        "prefix_cache_tokens",
        "Prompt tokens that a prefiller is thought to have cached.",
        lambda worker: worker.cache_tokens,
    ),
)
"""A gauge of each prefiller: name, meaning, value."""

COUNTED_PER_PREFILLER: Final[tuple[tuple[str, str, Callable[[PrefillerView], float | None]], ...]] = (
    (
        "prefill_prompt_tokens",
        "Prompt tokens of the prefills that are done.",
        lambda worker: worker.prompt_tokens,
    ),
    (
        "prefix_predicted_tokens",
        "Prompt tokens that the prefiller was thought to have cached when it was chosen.",
        lambda worker: worker.predicted_tokens,
    ),
    (
        "prefix_hit_tokens",
        "Prompt tokens that the prefiller had cached, by its own counters or else by its answers; no series where "
        "it reports neither.",
        lambda worker: worker.hit_tokens,
    ),
)
"""A counter of each prefiller: name, meaning, value; None: no series."""


def prefiller_counters(prefillers: Iterable[PrefillerView]) -> Iterator[CounterFamily]:
    """Counters of these prefillers, since this process has known them."""
    for name, meaning, counted in COUNTED_PER_PREFILLER:
        counter = CounterFamily(f"balanceroute_{name}", meaning, ["worker"])
        for prefiller in prefillers:
            if (count := counted(prefiller)) is not None:
                counter.inc(prefiller.id, by=count)
        yield counter


def gauge_by(label: str, name: str, meaning: str, values: Iterable[tuple[str, float]]) -> Metric:
    """A gauge with one series for each value of its label."""
    gauge = GaugeMetricFamily(name, meaning, labels=[label])
    for labelled, value in values:
        gauge.add_metric([labelled], value)
    return gauge


def _per_worker(
    rows: Iterable[tuple[str, str, Callable[[_View], float]]], workers: Iterable[_View]
) -> Iterator[Metric]:
    for name, meaning, value in rows:
        yield gauge_by("worker", f"balanceroute_{name}", meaning, ((worker.id, value(worker)) for worker in workers))


def cluster_gauges(view: ClusterView, withdrawn: Collection[str]) -> Iterator[Metric]:
    """All of them. `withdrawn`: the workers that operators have drained or removed."""
    yield from _per_worker(PER_DECODER, view.decoders)
    states = GaugeMetricFamily(
        "balanceroute_worker_state",
        "2 up, 1 drained by an operator (it may be down meanwhile) or resting, 0 down.",
        labels=["worker", "tier"],
    )
    for tier, workers in (("decode", view.decoders), ("prefill", view.prefillers)):
        for worker in workers:
            states.add_metric(
                [worker.id, tier], _STATES[WorkerState.DRAINING if worker.id in withdrawn else worker.state]
            )
    yield states
    yield gauge_by(
        "tier",
        "balanceroute_workers_up",
        "Workers of a tier that take requests; 0 also where it has none.",
        (
            ("decode", sum(worker.state is WorkerState.UP for worker in view.decoders)),
            ("prefill", sum(worker.state is WorkerState.UP for worker in view.prefillers)),
        ),
    )
    yield from _per_worker(PER_PREFILLER, view.prefillers)
    loads = [decoder.load_tokens for decoder in view.decoders if decoder.state is not WorkerState.DOWN]
    envelope = max(loads, default=0)
    yield GaugeMetricFamily(
        "balanceroute_decode_envelope_tokens", "M: the largest L_g of the workers that are not down.", envelope
    )
    yield GaugeMetricFamily(
        "balanceroute_decode_imbalance_tokens", "I = G * M - sum(L).", len(loads) * envelope - sum(loads)
    )
    waiting = (
        ("queued", view.queued),
        ("prefilling", view.prefilling),
        ("pooled", view.pooled),
        ("asking", view.asking),  # layerwise: they have a decode worker, but no prefiller may take them
    )
    yield gauge_by(
        "phase", "balanceroute_waiting_requests", "Requests that wait, or are at a prefiller (prefilling).", waiting
    )
