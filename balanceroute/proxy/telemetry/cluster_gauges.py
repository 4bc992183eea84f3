"""States of the cluster as metrics, read from a view at the moment of a scrape: a row of a table for each.

`L_g` and `M` are of our own requests alone, in KV tokens, as our ledger counts them. Decisions also weigh the requests
of others, `decode.request_tokens` and a worker's `slowdown` (`DecodeInstanceState.step_load`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from balanceroute.core.types import WorkerState
from balanceroute.core.view import ClusterView, DecoderView, PrefillerView
from balanceroute.proxy.telemetry.instruments import CounterFamily

_STATES: Final = {WorkerState.DOWN: 0.0, WorkerState.DRAINING: 1.0, WorkerState.UP: 2.0}

PER_DECODER: Final[tuple[tuple[str, str, Callable[[DecoderView], float]], ...]] = (
    ("decode_load_tokens", "L_g: KV tokens of our requests on a worker.", lambda worker: worker.load_tokens),
    ("decode_active_requests", "Our requests on a worker.", lambda worker: worker.active),
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
        "KV usage of a prefiller; 1 if its metrics can't be reached, NaN if they don't tell.",
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
        "it tells neither.",
        lambda worker: worker.hit_tokens,
    ),
)
"""A counter of each prefiller: name, meaning, value; None: no series."""


def prefiller_counters(prefillers: Iterable[PrefillerView]) -> Iterator[CounterFamily]:
    """What is counted of these prefillers, since this process has known them."""
    for name, meaning, counted in COUNTED_PER_PREFILLER:
        counter = CounterFamily(f"balanceroute_{name}", meaning, ["worker"])
        for prefiller in prefillers:
            if (count := counted(prefiller)) is not None:
                counter.inc(prefiller.id, by=count)
        yield counter


def cluster_gauges(view: ClusterView) -> Iterator[Metric]:
    """All of them."""
    for name, meaning, of_decoder in PER_DECODER:
        gauge = GaugeMetricFamily(f"balanceroute_{name}", meaning, labels=["worker"])
        for decoder in view.decoders:
            gauge.add_metric([decoder.id], of_decoder(decoder))
        yield gauge
    states = GaugeMetricFamily(
        "balanceroute_worker_state", "2 up, 1 draining or resting, 0 down.", labels=["worker", "tier"]
    )
    for decoder in view.decoders:
        states.add_metric([decoder.id, "decode"], _STATES[decoder.state])
    for prefiller in view.prefillers:
        states.add_metric([prefiller.id, "prefill"], _STATES[prefiller.state])
    yield states
    for name, meaning, of_prefiller in PER_PREFILLER:
        gauge = GaugeMetricFamily(f"balanceroute_{name}", meaning, labels=["worker"])
        for prefiller in view.prefillers:
            gauge.add_metric([prefiller.id], of_prefiller(prefiller))
        yield gauge
    loads = [decoder.load_tokens for decoder in view.decoders if decoder.state is not WorkerState.DOWN]
    envelope = max(loads, default=0)
    yield GaugeMetricFamily(
        "balanceroute_decode_envelope_tokens", "M: the largest L_g of the workers that are not down.", envelope
    )
    yield GaugeMetricFamily(
        "balanceroute_decode_imbalance_tokens", "I = G * M - sum(L).", len(loads) * envelope - sum(loads)
    )
    waiting = GaugeMetricFamily(
        "balanceroute_waiting_requests", "Requests that wait, or are at a prefiller (prefilling).", labels=["phase"]
    )
    for phase, requests in (
        ("queued", view.queued),
        ("prefilling", view.prefilling),
        ("pooled", view.pooled),
        ("asking", view.asking),  # layerwise: at a decode worker, and no prefiller may take them
    ):
        waiting.add_metric([phase], requests)
    yield waiting
