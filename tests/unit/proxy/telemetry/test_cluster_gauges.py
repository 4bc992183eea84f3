"""What a scrape says of the cluster as it is."""

import math

from balanceroute.core.types import RequestSpec, WorkerState
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.telemetry.cluster_gauges import cluster_gauges, prefiller_counters
from tests.unit.proxy.admission.ledgers import pooled
from tests.unit.proxy.virtual_time import a_router, with_virtual_time


def samples_of(services: Services, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by its labels' values."""
    view = services.ledger.view()
    counted = [counter.family() for counter in prefiller_counters(view.prefillers)]
    gauges = cluster_gauges(view, services.metrics.withdrawn())
    families = {family.name: family for family in (*gauges, *counted)}
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in families[name].samples}


@with_virtual_time
async def test_a_worker_s_state_is_a_number_that_an_alarm_can_be_set_on() -> None:
    services = a_router()
    for name, state in (("d0", WorkerState.DOWN), ("d1", WorkerState.DRAINING)):
        services.ledger.set_worker_state(name, state)
    found = samples_of(services, "balanceroute_worker_state")
    assert found == {("prefill", "p0"): 2, ("decode", "d0"): 0, ("decode", "d1"): 1, ("decode", "d2"): 2}


@with_virtual_time
async def test_a_worker_that_an_operator_has_drained_is_no_failure_while_its_engine_is_restarted() -> None:
    services = a_router()
    drained, leaving, down = (services.fleet[name] for name in ("d0", "d1", "d2"))
    services.fleet.drain(drained)
    services.fleet.leave(leaving)
    for worker in (drained, leaving, down):
        services.fleet.set_healthy(worker, False)
    found = samples_of(services, "balanceroute_worker_state")
    assert found == {("prefill", "p0"): 2, ("decode", "d0"): 1, ("decode", "d1"): 1, ("decode", "d2"): 0}


@with_virtual_time
async def test_a_tier_without_a_worker_that_takes_requests_is_zero_also_once_all_were_removed() -> None:
    services = a_router()
    assert samples_of(services, "balanceroute_workers_up") == {("decode",): 3, ("prefill",): 1}
    services.fleet.drain(services.fleet["d0"])
    services.fleet.set_healthy(services.fleet["d1"], False)
    assert samples_of(services, "balanceroute_workers_up") == {("decode",): 1, ("prefill",): 1}
    for worker in services.fleet:
        services.fleet.leave(worker)
    services.fleet.sweep()
    assert samples_of(services, "balanceroute_workers_up") == {("decode",): 0, ("prefill",): 0}


@with_virtual_time
async def test_an_unknown_usage_is_no_number_and_never_zero() -> None:
    services = a_router()
    services.ledger.report_prefiller("p0", None)
    assert math.isnan(samples_of(services, "balanceroute_prefill_kv_usage_ratio")[("p0",)])
    services.ledger.report_prefiller("p0", 0.5)
    assert samples_of(services, "balanceroute_prefill_kv_usage_ratio") == {("p0",): 0.5}


@with_virtual_time
async def test_the_imbalance_leaves_out_workers_that_are_down() -> None:
    services = a_router()
    await pooled(services.tickets, "a", 100)
    (admission,) = services.ledger.admit()
    assert samples_of(services, "balanceroute_decode_envelope_tokens") == {(): 100}
    assert samples_of(services, "balanceroute_decode_imbalance_tokens") == {(): 200}
    other = next(worker for worker in ("d0", "d1", "d2") if worker != admission.worker)
    services.ledger.set_worker_state(other, WorkerState.DOWN)
    assert samples_of(services, "balanceroute_decode_imbalance_tokens") == {(): 100}


@with_virtual_time
async def test_waiting_requests_are_counted_by_their_phase() -> None:
    services = a_router()
    await services.tickets.submit(RequestSpec("a", 10)).prefiller()
    await pooled(services.tickets, "b")
    found = samples_of(services, "balanceroute_waiting_requests")
    assert found == {("queued",): 0, ("prefilling",): 1, ("pooled",): 1, ("asking",): 0}


@with_virtual_time
async def test_cached_tokens_are_counted_only_when_a_prefiller_reports_them() -> None:
    services = a_router()
    await pooled(services.tickets, "a", 100)
    assert samples_of(services, "balanceroute_prefill_prompt_tokens") == {("p0",): 100}
    assert samples_of(services, "balanceroute_prefix_hit_tokens") == {}
    ticket = services.tickets.submit(RequestSpec("b", 100))
    await ticket.prefiller()
    ticket.prefilled(100, 64)
    assert samples_of(services, "balanceroute_prefix_hit_tokens") == {("p0",): 64}
