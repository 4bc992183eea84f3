"""What `/metrics` says of a cluster, and what it no longer says of a worker that has left."""

import re
from pathlib import Path

import orjson
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from balanceroute import errors
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import Role, WorkerSpec
from balanceroute.core.view import view_cluster
from balanceroute.errors import (
    BadUpstreamReply,
    ConnectFailed,
    EdgeFull,
    ForeignReply,
    InvalidRequest,
    UpstreamError,
    UpstreamStatus,
    UpstreamTimeout,
)
from balanceroute.prediction import History
from balanceroute.proxy import perimeter
from balanceroute.proxy.admission.forecasts import LiveForecasts
from balanceroute.proxy.client.labels import reason_of
from balanceroute.proxy.coroutines import supervised
from balanceroute.proxy.life.resumption import Fidelity
from balanceroute.proxy.link.callbacks import REFUSED
from balanceroute.proxy.telemetry.conditions import METRICS
from balanceroute.proxy.telemetry.forecast_metrics import ForecastMetrics
from balanceroute.proxy.telemetry.metrics import Metrics, read_counts
from balanceroute.proxy.telemetry.process_gauges import this_process
from tests.unit.proxy.virtual_time import a_config, a_router, with_virtual_time


def metrics_of(snapshot: ClusterSnapshot | None = None, policy: str = "br_0") -> Metrics:
    cluster = snapshot or ClusterSnapshot()
    return Metrics(lambda: view_cluster(cluster), policy)


def a_cluster() -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.add_worker(WorkerSpec("d0", Role.DECODE))
    snapshot.add_worker(WorkerSpec("p0", Role.PREFILL))
    return snapshot


def test_observations_do_not_pile_up_without_a_scrape() -> None:
    metrics = metrics_of()
    for _ in range(5000):
        metrics.ttft.observe(0.3)
        metrics.fold()
    assert len(metrics.ttft._taken_down) < 1100 and metrics.ttft.count == 5000


def test_the_exposition_is_valid_and_holds_a_series_per_worker_that_is_there() -> None:
    snapshot = a_cluster()
    metrics = metrics_of(snapshot)
    metrics.ttft.observe(0.3)
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    assert {s.labels["worker"] for s in families["balanceroute_decode_load_tokens"].samples} == {"d0"}
    assert families["balanceroute_request_ttft_seconds"].type == "histogram"
    assert families["balanceroute_build_info"].samples[0].labels["policy"] == "br_0"
    snapshot.remove_worker("d0")
    assert b'worker="d0"' not in metrics.exposition()
    assert generate_latest(metrics.registry) == metrics.exposition()


def test_a_page_of_many_workers_comes_in_pieces_of_a_thousand_series() -> None:
    snapshot = ClusterSnapshot()
    for number in range(400):
        snapshot.add_worker(WorkerSpec(f"d{number}", Role.DECODE))
    metrics = metrics_of(snapshot)
    pieces = list(metrics.pieces())
    assert max(piece.count(b"\n") for piece in pieces) <= 1002  # with HELP and TYPE
    assert b"".join(pieces) == generate_latest(metrics.registry)


def test_all_counts_of_a_page_are_those_of_its_beginning_when_they_were_kept_for_the_next_brain() -> None:
    metrics = metrics_of()
    metrics.include(forecasts := ForecastMetrics(history := History(None)))
    pieces = metrics.pieces()
    page = next(pieces)
    metrics.restarts.inc("brain")
    metrics.prefill_wait.observe(1.0)
    history.dropped += 1
    page += b"".join(pieces)
    assert b'balanceroute_restarts_total{process="brain"} 0.0' in page
    assert b'balanceroute_wait_seconds_count{tier="prefill"} 0.0' in page
    assert b"balanceroute_predictor_history_dropped_total 0.0" in page
    metrics.leave_out(forecasts)


def samples_of(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by its labels' values."""
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in families[name].samples}


@with_virtual_time
async def test_metrics_omit_a_departed_worker_although_a_former_relay_counted_for_it() -> None:
    metrics, relay = a_router().metrics, metrics_of()
    for worker in ("d0", "left"):
        relay.upstream_errors.inc(worker, "decode", "timeout")
    metrics.upstream_errors.inc("late", "decode", "timeout")  # of one that had left before it failed
    metrics.beside = lambda: [relay.counts()]
    errors = {labels: n for labels, n in samples_of(metrics, "balanceroute_upstream_errors").items() if n}
    assert errors == {("timeout", "decode", "d0"): 1.0}
    assert b'worker="left"' not in metrics.exposition() and b'worker="late"' not in metrics.exposition()


@with_virtual_time
async def test_metrics_omit_a_worker_that_has_left() -> None:
    services = a_router()
    metrics = services.metrics
    metrics.upstream_errors.inc("d0", "decode", "timeout")
    metrics.admissions.inc("d0", "stage_1")
    metrics.conditions.hold(METRICS, "d0", "x")
    services.fleet.leave(services.fleet["d0"])
    assert services.fleet.sweep() == ["d0"]
    assert b'"d0"' not in metrics.exposition()


@pytest.mark.parametrize("outcome", ["finished", "rejected", "cancelled", "failed", "expired"])
def test_every_outcome_has_a_series_before_the_first_request_has_it(outcome: str) -> None:
    metrics = metrics_of()
    assert (outcome,) in samples_of(metrics, "balanceroute_requests")


def test_the_first_refusal_of_every_reason_is_an_increase_to_prometheus() -> None:
    raised = re.compile(r'reason="(\w+)"|_(?:forbidden|unauthorized)\(.*"(\w+)"\)$|^    reason = "(\w+)"$', re.M)
    sources = [*Path(perimeter.__path__[0]).glob("*.py"), Path(errors.__file__)]
    reasons = {"".join(found) for source in sources for found in raised.findall(source.read_text())}
    metrics = metrics_of()
    assert samples_of(metrics, "balanceroute_refusals") == {(reason,): 0.0 for reason in reasons}


@with_virtual_time
async def test_the_first_failure_of_a_task_is_visible_as_an_increase() -> None:
    services = a_router()

    async def run() -> None:
        raise NotImplementedError

    coroutine = supervised(services, "mine", run)
    coroutine.close()
    assert samples_of(services.metrics, "balanceroute_internal_errors")["mine",] == 0.0


def test_the_default_request_timeout_is_within_the_duration_buckets() -> None:
    metrics = metrics_of()
    longest_s = a_config().limits.request_timeout_s
    assert metrics.duration.bounds[-2] < longest_s <= metrics.duration.bounds[-1]


def test_the_first_refusal_of_invalid_http_is_visible_as_an_increase() -> None:
    refusals = [EdgeFull("x"), *(InvalidRequest("x", status=status) for status in range(400, 600))]
    reasons = {reason_of(error) for error in refusals} - {""}
    metrics = metrics_of()
    assert samples_of(metrics, "balanceroute_edge_refusals") == {(reason,): 0.0 for reason in reasons}


def test_every_counter_begins_at_zero_but_those_by_worker() -> None:
    metrics = metrics_of()
    metrics.processes = this_process
    families = text_string_to_metric_families(metrics.exposition().decode())
    begun_later = {family.name for family in families if family.type == "counter" and not family.samples}
    by_worker = {"admissions", "upstream_errors", "scrape_failures"}
    by_worker |= {"prefill_prompt_tokens", "prefix_hit_tokens", "prefix_predicted_tokens"}
    assert begun_later == {f"balanceroute_{name}" for name in by_worker}


def test_the_first_failure_of_a_worker_is_an_increase_to_prometheus_until_it_leaves() -> None:
    snapshot = a_cluster()
    metrics = metrics_of(snapshot)
    plain = (ConnectFailed, UpstreamTimeout, BadUpstreamReply, ForeignReply)
    failures: list[UpstreamError] = [error("x", worker="d0", tier="decode") for error in plain]
    failures += [UpstreamStatus("x", worker="d0", tier="decode", status=status, body=b"") for status in (429, 500)]
    kinds = {error.kind for error in failures}
    expected = {(kind, tier, worker): 0.0 for kind in kinds for tier, worker in (("decode", "d0"), ("prefill", "p0"))}
    assert samples_of(metrics, "balanceroute_upstream_errors") == expected
    assert samples_of(metrics, "balanceroute_scrape_failures") == {("d0",): 0.0, ("p0",): 0.0}
    metrics.upstream_errors.inc("d0", "decode", "bad_reply", by=64)
    assert samples_of(metrics, "balanceroute_upstream_errors")["bad_reply", "decode", "d0"] == 64.0
    snapshot.remove_worker("d0")
    metrics.forget_worker("d0")
    assert {worker for _, _, worker in samples_of(metrics, "balanceroute_upstream_errors")} == {"p0"}


def test_every_resume_and_callback_outcome_is_a_series_from_the_start() -> None:
    metrics = metrics_of()
    ways = {fidelity.name.lower() for fidelity in Fidelity} - {"invalid"}
    assert samples_of(metrics, "balanceroute_resumes") == dict.fromkeys(
        ((way,) for way in (*ways, "restarted", "ended")), 0
    )
    ended = ("accepted", "repeated", "unknown", "malformed", REFUSED)
    assert samples_of(metrics, "balanceroute_metaserver_callbacks") == dict.fromkeys(((how,) for how in ended), 0)


# -- several processes


def line(page: bytes, series: str) -> float:
    """The value of a series."""
    return next(float(row.rpartition(b" ")[2]) for row in page.splitlines() if row.startswith(series.encode() + b" "))


def a_relay() -> Metrics:
    """Which has counted something of every kind."""
    snapshot = ClusterSnapshot()
    snapshot.add_worker(WorkerSpec("d0", Role.DECODE))
    relay = metrics_of(snapshot)
    relay.requests.inc("finished", by=3)
    relay.upstream_errors.inc("d0", "decode", "timeout")
    relay.ttft.observe(0.02)
    relay.ttft.observe(70.0)
    relay.decode_wait.observe(0.3)
    relay.orphaned_kv += 2
    return relay


def test_a_metrics_page_sums_counts_of_all_processes_and_shows_its_own_gauges() -> None:
    brain, relays = a_relay(), [a_relay(), a_relay()]
    brain.beside = lambda: [relay.counts() for relay in relays]
    brain.orphaned_elsewhere = 4
    for _ in range(2):  # it adds to nothing that stays
        page = brain.exposition()
        assert line(page, 'balanceroute_requests_total{outcome="finished"}') == 9
        assert line(page, 'balanceroute_upstream_errors_total{kind="timeout",tier="decode",worker="d0"}') == 3
        assert line(page, 'balanceroute_request_ttft_seconds_bucket{le="0.025"}') == 3
        assert line(page, "balanceroute_request_ttft_seconds_count") == 6
        assert line(page, "balanceroute_request_ttft_seconds_sum") == pytest.approx(3 * 70.02)
        assert line(page, 'balanceroute_wait_seconds_count{tier="decode"}') == 3
        assert line(page, "balanceroute_kv_orphans") == 6


def test_client_figures_are_summed_over_all_processes() -> None:
    brain = a_relay()
    brain.beside = lambda: [a_relay().counts()]
    brain.tokens.inc(by=5)
    served = brain.served()
    assert (served.requests.value("finished"), served.tokens, served.ttft.count, served.tpot.count) == (6, 5, 4, 0)
    assert brain.requests.value("finished") == 3


def test_histograms_with_other_buckets_are_left_out() -> None:
    other, brain = orjson.loads(a_relay().counts()), a_relay()
    other["histograms"]["balanceroute_request_ttft_seconds"] = [["", [1, 2], 3.0]]
    brain.beside = lambda: [orjson.dumps(other)]
    page = brain.exposition()
    assert line(page, "balanceroute_request_ttft_seconds_count") == 2
    assert line(page, 'balanceroute_requests_total{outcome="finished"}') == 6


def test_a_restarted_process_continues_its_counters_but_not_its_gauges() -> None:
    before, after = a_relay(), metrics_of()
    after.continue_from(b"")
    after.continue_from(before.counts())
    after.requests.inc("finished")
    after.ttft.observe(0.02)
    page = after.exposition()
    assert line(page, 'balanceroute_requests_total{outcome="finished"}') == 4
    assert line(page, "balanceroute_request_ttft_seconds_count") == 3
    assert line(page, "balanceroute_kv_orphans") == 0
    after.forget_worker("d0")
    assert b'worker="d0"' not in after.exposition()


def a_predictor(metrics: Metrics, finished: int) -> LiveForecasts:
    """One that is shown, and has been wrong by five tokens about so many requests."""
    forecasts = LiveForecasts(a_config(routing={"policy": "br_h"}, predictor={"kind": "survival"}))
    metrics.include(forecasts.metrics)
    forecasts.forecaster.failures = finished
    for _ in range(finished):
        forecasts.metrics.error_tokens.observe(5.0)
    return forecasts


def test_predictor_counters_fall_neither_with_a_new_brain_nor_with_a_new_predictor() -> None:
    failed, errors = "balanceroute_predictor_failures_total", "balanceroute_predictor_error_tokens_count"
    before = metrics_of(policy="br_h")
    first = a_predictor(before, 3)
    before.leave_out(first.metrics)
    assert failed.encode() not in before.exposition()
    a_predictor(before, 4)
    after = metrics_of(policy="br_h")
    a_predictor(after, 5)
    after.continue_from(before.counts())
    without = metrics_of()  # its model can't be read
    without.continue_from(after.counts())
    last = metrics_of(policy="br_h")
    last.continue_from(without.counts())
    a_predictor(last, 1)
    for metrics, count in ((before, 7), (after, 12), (last, 13)):
        page = metrics.exposition()
        assert line(page, failed) == line(page, errors) == count


def prefilled(tokens: int) -> Metrics:
    """Of a brain whose prefiller p0 has had prompts of so many tokens."""
    snapshot = ClusterSnapshot()
    snapshot.add_worker(WorkerSpec("p0", Role.PREFILL))
    snapshot.prefillers[0].hits.answered(tokens, tokens // 2, tokens // 4)
    return metrics_of(snapshot)


def test_a_restarted_process_continues_a_prefillers_counters_until_the_worker_leaves() -> None:
    middle, after = prefilled(300), prefilled(5)
    middle.continue_from(prefilled(100).counts())
    after.continue_from(middle.counts())
    for _ in range(2):
        page = after.exposition()
        assert line(page, 'balanceroute_prefill_prompt_tokens_total{worker="p0"}') == 405
        assert line(page, 'balanceroute_prefix_predicted_tokens_total{worker="p0"}') == 202
        assert line(page, 'balanceroute_prefix_hit_tokens_total{worker="p0"}') == 101
    after.forget_worker("p0")
    assert line(after.exposition(), 'balanceroute_prefill_prompt_tokens_total{worker="p0"}') == 5


def test_series_of_workers_that_left_before_the_restart_end() -> None:
    after = prefilled(5)
    after.continue_from(a_relay().counts())
    after.forget_workers_but(["p0"])
    page = after.exposition()
    assert b'worker="d0"' not in page and b'worker="p0"' in page
    assert line(page, 'balanceroute_requests_total{outcome="finished"}') == 3


def test_counts_of_another_version_with_other_buckets_and_labels_leave_a_page_with_all_the_rest() -> None:
    """A relay of the former version, under a brain of the next one that has taken over."""
    counts = orjson.loads(a_relay().counts())
    counts["histograms"]["balanceroute_request_ttft_seconds"][0][1].append(7)
    counts["counters"]["balanceroute_retries"].append([["prefill", "of its own"], 5])
    brain, next_brain = prefilled(5), prefilled(5)
    brain.beside = lambda: [orjson.dumps(counts)]
    next_brain.continue_from(orjson.dumps(counts))
    for page in (brain.exposition(), next_brain.exposition()):
        assert line(page, 'balanceroute_requests_total{outcome="finished"}') == 3
        assert line(page, "balanceroute_request_ttft_seconds_count") == 0
        assert line(page, 'balanceroute_retries_total{tier="prefill"}') == 0


DAMAGED = {
    "no JSON": b"{",
    "no object": b"[]",
    "too little": b'{"counters":{}}',
    "a list of families": b'{"counters":[],"histograms":{}}',
    "a label that is no text": b'{"counters":{"balanceroute_requests":[[[1],5]]},"histograms":{}}',
    "a count that is none": b'{"counters":{"balanceroute_requests":[[["failed"],-5]]},"histograms":{}}',
    "no UTF-8": b'{"counters":{"balanceroute_requests":[[["\xff"],5]]},"histograms":{}}',
    "no end of brackets": b'{"more":' + b"[" * 100_000,
    "a predictor's": b'{"counters":{},"histograms":{},"forecasts":{"counters":[],"errors":[]}}',
}


@pytest.mark.parametrize("counts", DAMAGED.values(), ids=DAMAGED)
def test_unreadable_former_counts_do_not_prevent_a_start(counts: bytes, caplog: pytest.LogCaptureFixture) -> None:
    after = prefilled(5)
    after.continue_from(counts)
    assert "counters of the previous process cannot be read" in caplog.text
    assert line(after.exposition(), 'balanceroute_requests_total{outcome="failed"}') == 0


@pytest.mark.parametrize("counts", [b"", *DAMAGED.values()], ids=["nothing", *DAMAGED])
def test_counts_of_another_process_that_cannot_be_read_take_nothing_from_the_page(
    counts: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    brain = prefilled(5)
    brain.beside = lambda: [counts, a_relay().counts()]
    assert line(brain.exposition(), 'balanceroute_requests_total{outcome="finished"}') == 3
    assert brain.served().requests.value("finished") == 3
    assert "counters of another process cannot be read" in caplog.text


@pytest.mark.parametrize("counts", DAMAGED.values(), ids=DAMAGED)
def test_invalid_counts_of_a_relay_are_refused(counts: bytes) -> None:
    with pytest.raises(ValueError):
        read_counts(counts)
