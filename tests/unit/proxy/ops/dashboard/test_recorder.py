"""The dashboard's memory: quantiles of buckets, and series that go round."""

import math

import numpy as np
import orjson
import pytest

from balanceroute.core.types import RequestSpec
from balanceroute.errors import NoHealthyWorkers
from balanceroute.proxy.link.remote import NOBODY
from balanceroute.proxy.ops.dashboard import overview
from balanceroute.proxy.ops.dashboard.recorder import POINTS, QUANTILE_S, SERIES, SPAN, Recorder, quantile
from balanceroute.proxy.telemetry.metrics import Metrics
from tests.unit.proxy.admission.ledgers import pooled
from tests.unit.proxy.reloading import apply
from tests.unit.proxy.virtual_time import a_config, a_router, with_virtual_time

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([0, 0, 0], 0.5, math.nan),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 2.0),
        ([1, 3, 0], 0.25, 1.0),
        ([0, 0, 5], 0.99, 3.0),  # beyond the last bucket: at least its bound
    ],
)
def test_a_quantile_is_linear_within_its_bucket_and_unknown_of_nothing(
    counts: list[int], q: float, expected: float
) -> None:
    found = quantile([1.0, 3.0], np.array(counts), q)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


async def test_the_history_is_bounded_and_ordered_oldest_first() -> None:
    now = [1000.0]
    router = a_router(a_config(decoders=2))
    recorder = Recorder(lambda: router, lambda: now[0], lambda: now[0])
    for _ in range(SPAN + 50):
        recorder.sample()
        now[0] += 1.0
    past = orjson.loads(orjson.dumps(recorder.past(), option=orjson.OPT_SERIALIZE_NUMPY))
    assert past["at"] == [1000.0 + i for i in range(50, SPAN + 50)]
    assert all(len(past["series"][name]) == SPAN for name in SERIES)
    assert past["series"]["tpot_p50_s"][-1] is None and past["series"]["running"][-1] == 0
    assert past["loads"].keys() == {"d0", "d1"} and past["stride"] == 1


async def test_a_worker_that_is_down_has_no_load_and_a_leaving_one_loses_its_history() -> None:
    router = a_router(a_config(decoders=2))
    recorder = Recorder(lambda: router)
    recorder.sample()
    router.fleet.set_healthy(router.fleet["d0"], False)
    recorder.sample()
    assert recorder.loads["d0"][0] == 0 and math.isnan(recorder.loads["d0"][1])
    router.fleet.leave(router.fleet["d1"])
    router.fleet.sweep()
    recorder.sample()
    assert recorder.loads.keys() == {"d0"}
    why = "it has not answered /health yet"
    assert [event.text for event in recorder.events][1:] == [f"d0 is down: {why}", "d1 has left"]
    router.fleet.set_healthy(router.fleet["d0"], True)
    recorder.sample()
    assert recorder.events[-1].text == "d0 is back" and recorder.loads["d0"][3] == 0


@pytest.mark.parametrize("after", ["level_fit", "pool_fifo"])
async def test_a_decision_gets_no_runner_up_of_a_policy_that_was_switched_to_since(after: str) -> None:
    router = a_router(a_config(decoders=2, routing={"policy": "level_fit"}))
    recorder = Recorder(lambda: router)
    router.decisions.watch()
    await pooled(router.tickets, "a")
    router.decisions.before()
    router.decisions.after(router.ledger.admit())
    await apply(router, a_config(decoders=2, routing={"policy": after}))
    await recorder._find_runners_up()
    (decision,) = router.decisions.rows
    assert decision.runner_up == ("a to d1" if after == "level_fit" else None)


async def test_rates_are_of_the_last_seconds_and_unknown_at_first() -> None:
    now = [0.0]
    router = a_router()
    recorder = Recorder(lambda: router, lambda: now[0], lambda: now[0])
    for second in range(20):
        now[0] = float(second)
        router.metrics.tokens.inc(by=100)
        recorder.sample()
    rates = recorder.series["tokens_per_s"]
    assert math.isnan(rates[0]) and all(rate == 100.0 for rate in rates[1:20])


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0, -1.5, 1.5, 0.0], ids=lambda by_s: f"{by_s:+g} s")
async def test_a_clock_that_is_set_moves_the_history_and_changes_no_rate(by_s: float) -> None:
    steady, set_by_s = [70.0], 0.0
    router = a_router(a_config(decoders=1))
    recorder = Recorder(lambda: router, lambda: 5000.0 + steady[0] + set_by_s, lambda: steady[0])
    for second in range(12):
        steady[0] += 1.0
        router.metrics.tokens.inc(by=100)
        if second == 4:
            router.fleet.set_healthy(router.fleet["d0"], False)
        if second == 7:
            set_by_s = by_s
            recorder.look()  # of a page, before the next sample
        recorder.sample()
    assert recorder.past()["at"].tolist() == [5071.0 + by_s + second for second in range(12)]
    assert recorder.series["tokens_per_s"][1:12].tolist() == [100.0] * 11
    down = recorder.events[-1]
    assert (down.kind, down.at) == ("down", 5075.0 + by_s) and recorder.states["d0"][1] == 5075.0 + by_s
    assert overview(router, recorder)["clock_sets"] == (1 if by_s else 0)


async def test_a_clock_that_is_slewed_leaves_the_samples_as_far_apart_as_they_are() -> None:
    steady = [70.0]
    router = a_router(a_config(decoders=1))
    recorder = Recorder(lambda: router, lambda: 5000.0 + 1.1 * steady[0], lambda: steady[0])
    for _ in range(40):
        steady[0] += 1.0
        router.metrics.tokens.inc(by=100)
        recorder.sample()
    assert np.diff(recorder.past()["at"]) == pytest.approx(1.0)
    assert recorder.series["tokens_per_s"][1:40] == pytest.approx(100.0)
    assert abs(recorder.at[39] - (5000.0 + 1.1 * steady[0])) <= 1.0


async def test_quantiles_cover_only_recent_requests() -> None:
    router = a_router()
    recorder = Recorder(lambda: router)
    recorder.sample()
    router.metrics.tpot.observe(0.02)
    for _ in range(QUANTILE_S + 1):
        recorder.sample()
    known = ~np.isnan(recorder.series["tpot_p50_s"])
    assert known[1 : 1 + QUANTILE_S].all() and not known[0] and not known[1 + QUANTILE_S]


async def test_client_figures_cover_all_processes_and_are_unknown_until_all_have_reported() -> None:
    now = [0.0]
    router = a_router()
    relay = Metrics(lambda: NOBODY, "br_0")
    relay.requests.inc("failed", by=7)
    relay.tokens.inc(by=1_000_000)  # in the life of the brain before this one
    relay.ttft.observe(3.0)
    silent = NoHealthyWorkers("The relays' counts are not known yet; send the request again.", retry_after_s=1.0)
    counts: list[bytes] = []

    def beside() -> list[bytes]:
        if not counts:
            raise silent
        return counts

    router.metrics.beside = beside
    recorder = Recorder(lambda: router, lambda: now[0], lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        if second > 2:
            counts[:] = [relay.counts()]
        recorder.sample()
        relay.tokens.inc(by=100)
        relay.requests.inc("finished", by=2)
        relay.ttft.observe(0.2)
        if second == 2:
            assert overview(router, recorder)["requests"]["failed"] is None
    series = recorder.series
    assert np.isnan(series["tokens_per_s"][:4]).all() and np.isnan(series["ttft_p50_s"][:4]).all()
    assert series["tokens_per_s"][11] == 100.0 and series["finished_per_s"][11] == 2.0
    assert 0.1 < series["ttft_p50_s"][11] < 0.25 and 0.1 < series["ttft_p99_s"][11] < 0.25
    assert overview(router, recorder)["requests"]["failed"] == 7


async def test_who_asks_for_a_prefill_is_queued_in_the_figures_as_in_the_chart() -> None:
    layerwise = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://router"}}
    router = a_router(a_config(**layerwise))
    ticket = router.tickets.submit(RequestSpec("a", 100))
    assert router.ledger.admit()
    router.fleet.set_healthy(router.fleet["p0"], False)
    ticket.request_prefill()
    recorder = Recorder(lambda: router)
    recorder.sample()
    assert overview(router, recorder)["waiting"]["queued"] == recorder.series["queued"][0] == 1


async def test_loads_of_many_workers_are_shown_with_fewer_samples() -> None:
    router = a_router(a_config(decoders=POINTS // SPAN + 1))
    recorder = Recorder(lambda: router)
    for _ in range(SPAN):
        recorder.sample()
    past = recorder.past()
    assert past["stride"] == 2
    assert sum(len(values) for values in past["loads"].values()) <= POINTS
    assert len(past["at"][:: -past["stride"]]) == len(past["loads"]["d0"])


async def test_prefix_hits_cover_the_last_seconds_and_are_unknown_without_counters() -> None:
    router = a_router(a_config(prefillers=2, prefill={"policy": "prefix_affinity"}))
    first, second = (prefiller.hits for prefiller in router.ledger.scheduler.snapshot.prefillers)
    recorder = Recorder(lambda: router)

    def sampled() -> tuple[float, float]:
        recorder.sample()
        row = (recorder.count - 1) % SPAN
        found, predicted = (float(recorder.series[name][row]) for name in ("hits_found", "hits_predicted"))
        return round(found, 3), round(predicted, 3)

    assert np.isnan(sampled()).all()
    second.answered(1000, 500, None)  # of an engine that tells no hits
    found, predicted = sampled()
    assert math.isnan(found) and predicted == 0.5
    first.answered(1000, 600, 400)
    assert sampled() == (0.4, 0.55)
    first.answered(1000, 1000, 2000)  # counters run ahead
    assert sampled() == (1.0, 0.7)
    for _ in range(QUANTILE_S):
        found, predicted = sampled()
    assert math.isnan(found) and math.isnan(predicted)


async def test_predicted_hits_are_unknown_where_the_prefill_policy_asks_for_none() -> None:
    router = a_router(a_config(prefill={"policy": "least_tokens"}))
    recorder = Recorder(lambda: router)
    recorder.sample()
    router.ledger.scheduler.snapshot.prefillers[0].hits.answered(100, 0, 60)
    recorder.sample()
    assert recorder.series["hits_found"][1] == np.float32(0.6) and math.isnan(recorder.series["hits_predicted"][1])


@with_virtual_time
async def test_only_a_reload_is_shown_as_one_and_not_what_a_workers_connector_changes() -> None:
    services = a_router()
    recorder = Recorder(lambda: services)
    recorder.look()
    services.note_connector(services.fleet["p0"], "nixl")
    recorder.look()
    assert [event.kind for event in recorder.events] == ["deploy"]
    await apply(services, a_config(queue={"max_queued": 1}))
    recorder.look()
    assert [event.kind for event in recorder.events] == ["deploy", "reload"]
