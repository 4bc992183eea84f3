"""What operator, health and circuit say of a worker together, and how workers come and go."""

import gc
from dataclasses import replace
from typing import cast

import pytest

from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import InvalidRequest
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.circuit import REST_S, CircuitState
from balanceroute.proxy.workers.fleet import MAX_MODELS, Worker
from tests.unit.proxy.virtual_time import (
    ScriptedUpstream,
    a_config,
    a_router,
    let_pass,
    with_virtual_time,
)

UP, DRAINING, DOWN = WorkerState.UP, WorkerState.DRAINING, WorkerState.DOWN
NEW = WorkerSpec("new", Role.DECODE, "http://new:1", slots=4)


def scheduler_state(services: Services, worker: Worker) -> WorkerState:
    """What the scheduler has been told."""
    snapshot = services.ledger.scheduler.snapshot
    if worker.spec.role is Role.DECODE:
        return snapshot.worker(worker.id).state
    return snapshot.prefiller(worker.id).state


def holding(services: Services, worker: Worker) -> str:
    """Bind a request to that decode worker; its id."""
    scheduler, now = services.ledger.scheduler, services.ledger.now()
    for other in services.fleet.of(Role.DECODE):
        (services.fleet.undrain if other is worker else services.fleet.drain)(other)
    services.tickets.submit(RequestSpec("held", 10))
    services.ledger.dispatch()
    scheduler.prefilled("held", 10, now)
    assert [admission.worker for admission in services.ledger.admit()] == [worker.id]
    return "held"


@pytest.mark.parametrize(
    ("healthy", "stalled", "circuit", "drained", "state"),
    [
        (True, False, CircuitState.CLOSED, False, UP),
        (True, False, CircuitState.HALF_OPEN, False, UP),
        (True, False, CircuitState.RESTING, False, DRAINING),
        (True, False, CircuitState.TRIAL, False, DRAINING),
        (True, False, CircuitState.OPEN, False, DOWN),
        (True, False, CircuitState.CLOSED, True, DRAINING),
        (True, False, CircuitState.OPEN, True, DOWN),
        (False, False, CircuitState.CLOSED, False, DOWN),
        (False, False, CircuitState.CLOSED, True, DOWN),
        (True, True, CircuitState.CLOSED, False, DOWN),
    ],
)
@with_virtual_time
async def test_the_worst_finding_determines_a_workers_state(
    healthy: bool, stalled: bool, circuit: CircuitState, drained: bool, state: WorkerState
) -> None:
    services = a_router()
    worker = services.fleet["d1"]
    worker.circuit.state, worker.stalled, worker.drained = circuit, stalled, drained
    worker.healthy = healthy
    services.fleet.update(worker)
    assert worker.state is scheduler_state(services, worker) is state


@pytest.mark.parametrize("name", ["p0", "d0"])
@with_virtual_time
async def test_an_operators_drain_lasts_until_it_is_undone_and_both_changes_reach_the_scheduler_and_the_relays(
    name: str,
) -> None:
    services = a_router()
    fleet, told = services.fleet, list[bool]()
    worker = fleet[name]
    fleet.on_change = lambda: told.append(worker.drained)
    fleet.drain(worker)
    fleet.set_healthy(worker, True)
    assert scheduler_state(services, worker) is DRAINING
    fleet.undrain(worker)
    assert scheduler_state(services, worker) is UP
    assert told == [True, True, False]


@pytest.mark.parametrize("name", ["p0", "d0"])
@with_virtual_time
async def test_a_rest_ends_by_itself_and_both_changes_reach_the_scheduler(name: str) -> None:
    services = a_router()
    worker = services.fleet[name]
    worker.circuit.fault(services.ledger.now(), "status 500")
    assert scheduler_state(services, worker) is DRAINING
    await let_pass(REST_S * 1.01)
    assert scheduler_state(services, worker) is UP


@with_virtual_time
async def test_an_answered_health_check_brings_the_trial_forward_unless_the_worker_stalls() -> None:
    services = a_router(a_config(health={"failure_threshold": 1, "open_for_s": 600.0}))
    worker = services.fleet["d0"]
    worker.circuit.fault(services.ledger.now(), "status 500")
    worker.stalled = True
    services.fleet.set_healthy(worker, True)
    assert worker.circuit.state is CircuitState.OPEN
    worker.stalled = False
    services.fleet.set_healthy(worker, True)
    assert worker.circuit.state is CircuitState.HALF_OPEN and scheduler_state(services, worker) is UP


@with_virtual_time
async def test_what_the_router_learned_of_a_workers_version_is_forgotten_when_it_goes_down() -> None:
    services = a_router()
    worker = services.fleet["d0"]
    worker.echoes_ids, worker.kv_connector, worker.given_back = True, "nixl", 2
    services.fleet.set_healthy(worker, True)
    assert (worker.echoes_ids, worker.kv_connector, worker.given_back) == (True, "nixl", 2)
    services.fleet.set_healthy(worker, False)
    assert worker.echoes_ids is worker.kv_connector is None
    assert worker.given_back == 0, "else one more would have the new process rest"


@with_virtual_time
async def test_the_later_of_two_cache_salts_holds_in_any_order_of_arrival() -> None:
    """A relay hears of its own earlier doubt again while the brain has not heard of its later one."""
    fleet = a_router().fleet
    worker, salts = fleet["d0"], [""]
    for _ in range(20):
        fleet.doubt_cache(worker)
        salts.append(worker.cache_salt)
    assert salts == sorted(set(salts))
    fleet.salt_cache(worker, salts[-2])
    assert worker.cache_salt == salts[-1]
    fleet.salt_cache(fleet["d1"], salts[-1])
    fleet.salt_cache(fleet["d1"], salts[1])
    assert fleet["d1"].cache_salt == salts[-1]


@with_virtual_time
async def test_a_doubt_of_a_cache_holds_for_the_server_whatever_its_name() -> None:
    fleet = a_router().fleet
    worker = fleet["d0"]
    fleet.doubt_cache(worker)
    worker.take()
    fleet.leave(worker)
    renamed = fleet.add(replace(worker.spec, id="renamed"))
    assert renamed.cache_salt == worker.cache_salt and fleet["d1"].cache_salt == ""
    fleet.doubt_cache(worker)  # by a request that it still has
    assert renamed.cache_salt == worker.cache_salt
    worker.in_use = 0
    fleet.leave(renamed)
    fleet.sweep()
    assert [each.id for each in fleet.of(Role.DECODE)] == ["d1", "d2"]
    assert fleet.add(worker.spec).cache_salt == worker.cache_salt


@with_virtual_time
async def test_a_worker_that_joins_gets_nothing_before_it_has_answered() -> None:
    services = a_router()
    worker = services.fleet.add(NEW, join_attempts=3)
    assert scheduler_state(services, worker) is DOWN
    services.fleet.set_healthy(worker, True)
    assert scheduler_state(services, worker) is UP
    with pytest.raises(InvalidRequest, match="here already"):
        services.fleet.add(NEW, join_attempts=3)


@with_virtual_time
async def test_a_worker_that_leaves_goes_when_it_holds_nothing_and_its_connections_with_it() -> None:
    services = a_router()
    worker = services.fleet["d1"]
    upstream = cast(ScriptedUpstream, worker.upstream)
    held = holding(services, worker)
    services.fleet.leave(worker)
    assert scheduler_state(services, worker) is DRAINING and services.fleet.sweep() == []
    services.tickets.by_id[held].finish(Outcome.FINISHED)
    worker.in_use = 1  # a drain is still running there
    assert services.fleet.sweep() == [] and not upstream.closed
    worker.in_use = 0
    assert services.fleet.sweep() == ["d1"]
    assert upstream.closed and "d1" not in services.fleet
    assert [state.spec.id for state in services.ledger.scheduler.snapshot.workers] == ["d0", "d2"]


@with_virtual_time
async def test_a_prefiller_that_leaves_stays_while_it_keeps_kv_for_us() -> None:
    services = a_router(a_config(prefillers=2))
    ticket = services.tickets.submit(RequestSpec("r", 10))
    name = await ticket.prefiller()
    ticket.prefilled(10)
    services.fleet.leave(services.fleet[name])
    assert services.fleet.sweep() == []
    ticket.finish(Outcome.CANCELLED)
    assert services.fleet.sweep() == [name]


@with_virtual_time
async def test_a_leaving_worker_that_is_added_again_keeps_its_requests() -> None:
    services = a_router()
    worker = services.fleet["d1"]
    holding(services, worker)
    services.fleet.leave(worker)
    assert services.fleet.add(worker.spec, join_attempts=3) is worker
    assert scheduler_state(services, worker) is UP and services.fleet.sweep() == []


@with_virtual_time
async def test_a_workers_name_becomes_free_when_the_worker_has_left() -> None:
    services = a_router()
    worker = services.fleet["d1"]
    other = WorkerSpec("d1", Role.PREFILL, worker.spec.url)
    holding(services, worker)
    services.fleet.leave(worker)
    with pytest.raises(InvalidRequest, match="^worker d1 is here already, until it has finished what it has$"):
        services.fleet.add(other, join_attempts=3)
    services.ledger.finish("held", Outcome.FINISHED)
    services.fleet.sweep()
    assert services.fleet.add(other, join_attempts=3).spec.role is Role.PREFILL


@with_virtual_time
async def test_a_worker_that_is_added_again_takes_requests() -> None:
    services = a_router()
    for name, held in (("d0", False), ("d1", True)):
        worker = services.fleet[name]
        if held:
            holding(services, worker)
        services.fleet.drain(worker)
        services.fleet.leave(worker)
        services.fleet.sweep()
        assert (name in services.fleet) is held
        again = services.fleet.add(worker.spec, join_attempts=3)
        services.fleet.set_healthy(again, True)
        assert scheduler_state(services, again) is UP


@with_virtual_time
async def test_findings_on_a_departed_worker_do_not_affect_its_namesake() -> None:
    services = a_router()
    left = services.fleet["d1"]
    services.fleet.leave(left)
    assert services.fleet.sweep() == ["d1"]
    worker = services.fleet.add(WorkerSpec("d1", Role.DECODE, "http://another:1"), join_attempts=3)
    services.fleet.set_healthy(worker, True)
    services.fleet.set_healthy(left, False)
    assert worker.state is scheduler_state(services, worker) is UP


@with_virtual_time
async def test_findings_on_a_departed_worker_have_no_effect() -> None:
    services = a_router()
    worker = services.fleet["d1"]
    worker.circuit.fault(services.ledger.now(), "status 500")
    services.fleet.leave(worker)
    assert services.fleet.sweep() == ["d1"]
    await let_pass(10 * REST_S)  # the end of its rest
    worker.circuit.fault(services.ledger.now(), "status 500")


@with_virtual_time
async def test_a_departed_worker_is_freed_without_the_garbage_collector() -> None:
    services = a_router()
    known = workers()
    gc.disable()
    try:
        services.fleet.leave(services.fleet.add(NEW, 1))
        assert services.fleet.sweep() == ["new"]
        assert workers() <= known
    finally:
        gc.enable()


def workers() -> set[int]:
    """All that are alive, by identity."""
    return {id(each) for each in gc.get_objects() if isinstance(each, Worker)}


@with_virtual_time
async def test_the_models_that_a_worker_has_served_are_bounded_in_number_and_length() -> None:
    """Servers that are no vLLM may take any name that a client sends."""
    worker = a_router().fleet["d1"]
    worker.has_served(None)
    worker.has_served("m" * 10_000)
    assert worker.served_models == {None}
    for name in map(str, range(MAX_MODELS)):
        worker.has_served(name)
    assert worker.served_models == {str(MAX_MODELS - 1)}, "in place of all before"
