"""A relay's workers: what they tell the brain of findings, and how they follow what the brain says."""

import asyncio
from dataclasses import replace

import pytest

from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.proxy.link.messages import CacheDoubted, Finding, Judged, Use, Workers, WorkerStanding
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.fleet import FleetConfig, Worker
from balanceroute.proxy.workers.relay_fleet import RelayFleet
from tests.unit.proxy.virtual_time import ScriptedUpstream

pytestmark = pytest.mark.anyio

D0 = WorkerSpec("d0", Role.DECODE, "http://d0:1", slots=4)
D1 = WorkerSpec("d1", Role.DECODE, "http://d1:1", slots=4)


def standing(
    spec: WorkerSpec = D0,
    state: WorkerState = WorkerState.UP,
    circuit: CircuitState = CircuitState.CLOSED,
    *,
    doubtful: bool = False,
    out: bool = False,
) -> WorkerStanding:
    return WorkerStanding(spec, state, circuit.value, doubtful, out)


@pytest.fixture
def reported() -> list[Judged]:
    """What the fleet has said to the brain."""
    return []


@pytest.fixture
async def fleet(reported: list[Judged]) -> RelayFleet:
    return RelayFleet(asyncio.get_running_loop(), FleetConfig(), reported.append)


def follow(fleet: RelayFleet, *standings: WorkerStanding, gone: tuple[str, ...] = (), whole: bool = False) -> None:
    fleet.follow(Workers(standings, gone), whole)


async def test_a_relays_workers_and_states_are_those_of_the_brain(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), standing(D1, WorkerState.DOWN, out=True), whole=True)
    assert [(worker.id, worker.state, worker.out) for worker in fleet] == [
        ("d0", WorkerState.UP, False),
        ("d1", WorkerState.DOWN, True),
    ]
    follow(fleet, standing(D0, WorkerState.DRAINING))
    assert [worker.state for worker in fleet] == [WorkerState.DRAINING, WorkerState.DOWN] and not fleet["d1"].leaving
    follow(fleet, standing(D1), gone=("d0",))
    assert [(worker.id, worker.state) for worker in fleet] == [("d1", WorkerState.UP)]
    follow(fleet, standing(D0), whole=True)  # another brain, which knows that one alone
    assert [worker.id for worker in fleet] == ["d0"]


async def test_a_departed_worker_is_kept_for_its_remaining_requests(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), whole=True)
    worker = fleet["d0"]
    worker.in_use += 1
    follow(fleet, gone=("d0",))
    assert "d0" in fleet and worker.state is WorkerState.DOWN
    worker.in_use -= 1
    assert fleet.sweep() == ["d0"] and "d0" not in fleet


async def test_requests_continue_on_a_worker_that_a_new_router_gives_other_slots(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), whole=True)
    worker = fleet["d0"]
    worker.upstream = upstream = ScriptedUpstream(200)
    worker.in_use += 1
    more = replace(D0, slots=8)
    follow(fleet, standing(more), whole=True)
    assert fleet["d0"] is worker and worker.spec == more and not upstream.closed


async def test_requests_continue_on_a_server_whose_name_another_server_has_now(
    fleet: RelayFleet, reported: list[Judged]
) -> None:
    follow(fleet, standing(D0), whole=True)
    before = fleet["d0"]
    before.upstream = upstream = ScriptedUpstream(200)
    before.in_use += 1
    follow(fleet, standing(replace(D0, url="http://d0:2")), whole=True)
    assert fleet["d0"] is not before and not upstream.closed
    before.circuit.fault(1.0, "status 500")
    assert reported == []  # it would count against the other server
    fleet["d0"].circuit.fault(1.0, "status 500")
    assert reported == [Judged("d0", Finding.FAULT, reason="status 500")]


async def test_a_worker_that_was_down_may_return_as_another_version(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), whole=True)
    fleet["d0"].echoes_ids, fleet["d0"].kv_connector, fleet["d0"].differs_from = True, "nixl", {"d1"}
    follow(fleet, standing(D0, doubtful=True))
    assert fleet["d0"].echoes_ids
    follow(fleet, standing(D0, WorkerState.DOWN, out=True))
    assert fleet["d0"].echoes_ids is None and fleet["d0"].kv_connector is None and not fleet["d0"].differs_from


async def test_a_worker_that_ended_while_the_relay_was_away_may_be_another_version(fleet: RelayFleet) -> None:
    back = WorkerStanding(D0, WorkerState.UP, CircuitState.CLOSED.value, False, False, "", 2.0)
    follow(fleet, standing(D0), whole=True)
    for connector in ("nixl", "mooncake_v1"):
        fleet["d0"].echoes_ids, fleet["d0"].kv_connector = True, connector
        follow(fleet, back, whole=True)
        assert fleet["d0"].kv_connector == (None if connector == "nixl" else connector)


async def test_a_relay_keeps_ended_processes_and_cache_salts_over_a_change_of_brain(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), whole=True)
    follow(fleet, WorkerStanding(D0, WorkerState.UP, CircuitState.CLOSED.value, False, False, "00000001a", 2.0))
    follow(fleet, standing(D0), whole=True)  # another brain, which has found nothing yet
    assert (fleet["d0"].cache_salt, fleet["d0"].ended_at) == ("00000001a", 2.0)


async def test_a_relay_tells_every_brain_the_salt_of_a_server_that_was_away_meanwhile(
    fleet: RelayFleet, reported: list[Judged | CacheDoubted]
) -> None:
    follow(fleet, standing(D0), whole=True)
    fleet.doubt_cache(fleet["d0"])
    salt = fleet["d0"].cache_salt
    follow(fleet, standing(D1), whole=True)  # another brain, under which operators have removed the worker
    follow(fleet, standing(D0))
    assert fleet["d0"].cache_salt == salt and reported == [CacheDoubted("d0", salt)] * 2
    known = standing(D0)
    follow(fleet, WorkerStanding(D0, known.state, known.circuit, False, False, salt), whole=True)
    assert reported == [CacheDoubted("d0", salt)] * 2


async def test_a_relay_hears_of_an_ended_process_although_the_clock_was_set_back_since_the_last_one(
    fleet: RelayFleet,
) -> None:
    """Another version may have started since, and pinned KV is gone (`life/held_kv.py`)."""
    follow(fleet, standing(D0), whole=True)
    for at in (3600.0, 2.0):
        fleet["d0"].kv_connector = "nixl"
        follow(fleet, WorkerStanding(D0, WorkerState.UP, CircuitState.CLOSED.value, False, False, "", at))
        assert fleet["d0"].ended_at == at and fleet["d0"].kv_connector is None


def findings(reported: list[Judged]) -> list[Finding]:
    found = [message.finding for message in reported]
    reported.clear()
    return found


async def test_failures_are_always_reported_and_successes_only_when_they_change_something(
    fleet: RelayFleet, reported: list[Judged]
) -> None:
    follow(fleet, standing(D0), whole=True)
    circuit = fleet["d0"].circuit
    circuit.used()
    circuit.success()
    circuit.inconclusive()
    assert findings(reported) == []
    circuit.fault(1.0, "status 500")
    assert reported == [Judged("d0", Finding.FAULT, reason="status 500")]
    circuit.success()
    assert findings(reported) == [Finding.FAULT, Finding.SUCCESS]
    follow(fleet, standing(D0))
    circuit.success()
    assert findings(reported) == []
    circuit.busy(1.0, 7.5)
    assert reported == [Judged("d0", Finding.BUSY, 7.5)]
    circuit.success()
    assert findings(reported) == [Finding.BUSY, Finding.SUCCESS]
    follow(fleet, standing(D0, doubtful=True))
    reported.clear()
    circuit.success()
    assert findings(reported) == [Finding.SUCCESS]


async def test_one_request_alone_is_the_trial_of_a_half_open_circuit(fleet: RelayFleet, reported: list[Judged]) -> None:
    follow(fleet, standing(D0, circuit=CircuitState.HALF_OPEN, doubtful=True), whole=True)
    circuit = fleet["d0"].circuit
    circuit.used()
    circuit.used()
    assert findings(reported) == [Finding.USED]
    circuit.inconclusive()
    assert findings(reported) == [Finding.INCONCLUSIVE]


async def test_a_relay_sends_no_second_request_beside_a_trial_that_the_brain_has_yet_to_hear_of(
    fleet: RelayFleet,
) -> None:
    """A decision may have chosen the worker for as many requests as it has slots."""
    follow(fleet, standing(D0, circuit=CircuitState.HALF_OPEN, doubtful=True), standing(D1), whole=True)
    for worker in fleet:
        worker.circuit.used()
    assert [worker.state for worker in fleet] == [WorkerState.DRAINING, WorkerState.UP]
    follow(fleet, standing(D0))
    assert fleet["d0"].state is WorkerState.UP


@pytest.mark.parametrize("ends", ["success", "inconclusive"])
@pytest.mark.parametrize("crossing", list(CircuitState))
async def test_the_end_of_a_trial_is_reported_whatever_state_has_crossed_its_beginning(
    fleet: RelayFleet, reported: list[Judged], crossing: CircuitState, ends: str
) -> None:
    follow(fleet, standing(D0, circuit=CircuitState.HALF_OPEN, doubtful=True), whole=True)
    circuit = fleet["d0"].circuit
    circuit.used()
    follow(fleet, standing(D0, circuit=crossing))
    for _ in range(2):
        getattr(circuit, ends)()
    assert findings(reported) == [Finding.USED, Finding[ends.upper()]]


def uses(fleet: RelayFleet, now: float, **awaited_since_s: float) -> list[Use]:
    return list(fleet.uses(now, awaited_since_s))


async def test_use_of_a_worker_is_reported_until_it_ends_and_once_more(fleet: RelayFleet) -> None:
    follow(fleet, standing(D0), standing(D1), whole=True)
    assert uses(fleet, 10.0) == []
    worker: Worker = fleet["d0"]
    worker.take()
    worker.take()
    worker.in_use -= 1
    assert uses(fleet, 10.0, d0=9.0) == [Use("d0", 1, 2, True, None, 1.0)]
    worker.progress_s = 11.5
    assert uses(fleet, 12.0, d0=9.0) == [Use("d0", 1, 1, True, 0.5, 3.0)]
    worker.in_use -= 1
    assert uses(fleet, 13.0) == [Use("d0", 0, 1, False, 1.5, None)]
    assert uses(fleet, 14.0) == [Use("d0", 0, 0, False, 2.5, None)]
    assert uses(fleet, 15.0) == []
