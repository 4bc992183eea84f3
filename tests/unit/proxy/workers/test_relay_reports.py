"""What the brain makes of what relays say of workers."""

import pytest

from balanceroute.core.types import WorkerState
from balanceroute.proxy.link.messages import (
    Activity,
    CacheDoubted,
    ConnectorDoubted,
    Counted,
    Finding,
    Judged,
    Learned,
    SilentGroup,
    Use,
    Workers,
)
from balanceroute.proxy.link.remote import NOBODY
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.fleet import FleetConfig, Worker, why_not_up
from balanceroute.proxy.workers.relay_fleet import RelayFleet
from balanceroute.proxy.workers.relay_reports import MOST_AWAY, RelayReports
from balanceroute.proxy.workers.silence import FrozenGroup
from tests.unit.proxy.link.brains import Heard
from tests.unit.proxy.virtual_time import a_router, let_pass, with_virtual_time

PIN_S = 60.0


def reports(services: Services) -> RelayReports:
    services.drainer.pin_s = PIN_S
    return RelayReports(services.fleet, services.loop, services.frozen, services)


def counts(services: Services) -> tuple[int, int, int]:
    """The numbers of all relays' client requests, drains and orphans."""
    return services.exchanges, services.drainer.elsewhere, services.metrics.orphaned_elsewhere


def use(in_use: int, peak: int = 0, *, awaits: bool = False, progress: float | None = None, age_s: float = 0.5) -> Use:
    return Use("d1", in_use, peak, awaits, progress, age_s)


def activity(exchanges: int, *uses: Use) -> Activity:
    return Activity(exchanges, 0, uses)


@with_virtual_time
async def test_findings_of_all_relays_count_as_consecutive() -> None:
    services = a_router()
    relay_reports, worker = reports(services), services.fleet["d1"]
    for _ in range(services.config.health.failure_threshold - 1):
        relay_reports.take("r0", Judged("d1", Finding.FAULT))
    assert worker.circuit.state is CircuitState.RESTING and worker.state is WorkerState.DRAINING
    assert relay_reports.standings()["d1"].doubtful
    relay_reports.take("r0", Judged("d1", Finding.FAULT, reason="status 500"))
    assert why_not_up(worker) == "requests to it fail (status 500)"
    assert worker.circuit.state is CircuitState.OPEN and relay_reports.standings()["d1"].state is WorkerState.DOWN
    relay_reports.take("r0", Judged("d1", Finding.SUCCESS))
    assert worker.state is WorkerState.UP and not relay_reports.standings()["d1"].doubtful
    relay_reports.take("r0", Judged("who is this", Finding.FAULT))


@with_virtual_time
async def test_relays_do_not_count_on_a_worker_that_operators_have_withdrawn() -> None:
    """As in one process: a request that all other workers refuse is no fault of theirs."""
    services = a_router()
    fleet, relay_reports = services.fleet, reports(services)
    relay = RelayFleet(services.loop, FleetConfig(), lambda message: None)
    for change, able in ((fleet.drain, False), (fleet.undrain, True), (fleet.leave, False)):
        change(fleet["d1"])
        relay.follow(Workers(tuple(relay_reports.standings().values()), ()), whole=True)
        assert fleet["d1"].able is able and [worker.id for worker in relay if not worker.able] == ["d1"] * (not able)


@with_virtual_time
async def test_a_busy_worker_rests_for_its_retry_after() -> None:
    services = a_router()
    relay_reports, worker = reports(services), services.fleet["d1"]
    relay_reports.take("r0", Judged("d1", Finding.BUSY, 5.0))
    await let_pass(4.5)
    assert worker.circuit.state is CircuitState.RESTING
    await let_pass(1.0)
    assert worker.circuit.state is CircuitState.HALF_OPEN


@with_virtual_time
async def test_the_trial_of_a_lost_relay_is_repeated() -> None:
    services = a_router()
    relay_reports, worker = reports(services), services.fleet["d1"]
    worker.circuit.state = CircuitState.HALF_OPEN
    relay_reports.take("r0", Judged("d1", Finding.USED))
    assert worker.circuit.state is CircuitState.TRIAL
    relay_reports.lost("r0")
    assert worker.circuit.state is CircuitState.HALF_OPEN


@with_virtual_time
async def test_a_trial_of_which_the_brain_hears_late_ends_all_the_same() -> None:
    """It had stood still for longer than the worker's rest, or the link to the relay is slow."""
    services = a_router()
    relay_reports, circuit = reports(services), services.fleet["d1"].circuit
    sent: list[Judged | CacheDoubted] = []
    relay = RelayFleet(services.loop, FleetConfig(), sent.append)

    def follow() -> None:
        relay.follow(Workers(tuple(relay_reports.standings().values()), ()), whole=True)

    relay_reports.take("r0", Judged("d1", Finding.BUSY))
    await let_pass(1.0)
    follow()
    relay["d1"].circuit.used()
    relay_reports.take("r0", Judged("d1", Finding.BUSY))  # of another relay's request from before
    follow()
    assert relay["d1"].circuit.state is CircuitState.RESTING
    relay["d1"].circuit.inconclusive()
    await let_pass(10.0)
    for message in sent:
        assert isinstance(message, Judged)
        relay_reports.take("r0", message)
    assert circuit.state is CircuitState.HALF_OPEN


@with_virtual_time
async def test_requests_under_way_at_relays_add_up_and_end_with_the_relay() -> None:
    services = a_router()
    relay_reports, worker = reports(services), services.fleet["d1"]
    worker.in_use += 1  # a drain of the brain's own
    relay_reports.take("r0", activity(5, use(3, 7, awaits=True)))
    assert counts(services) == (5, 0, 0)
    relay_reports.take("r1", activity(2, use(2, awaits=True)))
    assert worker.in_use == 6 and worker.take_peak() == 8 and len(worker.awaited) == 2
    assert counts(services) == (7, 0, 0)
    relay_reports.take("r0", activity(1, use(1)))
    assert worker.in_use == 4 and len(worker.awaited) == 1
    relay_reports.take("r0", activity(1, use(1, awaits=True)))
    assert len(worker.awaited) == 2
    relay_reports.lost("r1")
    assert worker.in_use == 2 and counts(services) == (1, 0, 0)
    relay_reports.lost("r0")
    relay_reports.lost("r0")
    assert worker.in_use == 1 and counts(services) == (0, 0, 0) and len(worker.awaited) == 0


@with_virtual_time
async def test_a_readded_worker_starts_without_use_reported_for_its_predecessor() -> None:
    """The relay had just begun when the brain saw it idle, and has not known it any more when that was over."""
    services = a_router()
    relay_reports, spec = reports(services), services.fleet["d1"].spec
    services.fleet.on_leave = relay_reports.forget

    def leaves() -> bool:
        services.fleet.leave(services.fleet["d1"])
        return services.fleet.sweep() == ["d1"]

    relay_reports.take("r0", activity(1, use(0)))
    assert leaves()
    relay_reports.take("r0", activity(1, use(1, awaits=True)))
    relay_reports.take("r0", activity(0))
    worker = services.fleet.add(spec, 1)
    relay_reports.take("r0", activity(2, use(2, awaits=True)))
    assert (worker.in_use, len(worker.awaited)) == (2, 1)
    relay_reports.take("r0", activity(0, use(0)))
    assert (worker.in_use, len(worker.awaited)) == (0, 0)
    assert leaves()


@with_virtual_time
async def test_drains_of_relays_add_up_and_end_with_the_relay_but_its_orphans_last_while_they_may_be_pinned() -> None:
    services = a_router()
    relay_reports = reports(services)
    relay_reports.take("r0", Activity(1, 2, (), orphans=3))
    relay_reports.take("r1", Activity(1, 1, (), orphans=1))
    assert counts(services) == (2, 3, 4)
    relay_reports.lost("r0")
    assert counts(services) == (1, 1, 4)
    relay_reports.take("r0", Activity(0, 0, ()))  # another process, after a restart
    relay_reports.take("r0", Activity(0, 0, (), orphans=2))
    assert counts(services) == (1, 1, 6)
    await let_pass(PIN_S + 1)
    assert counts(services) == (1, 1, 3)


@with_virtual_time
async def test_orphans_of_a_relay_that_joins_anew_count_once() -> None:
    services = a_router()
    relay_reports = reports(services)
    for _ in range(3):
        relay_reports.take("r0", Activity(1, 2, (), orphans=3))
        assert counts(services) == (1, 2, 3)
        relay_reports.lost("r0")
        assert counts(services) == (0, 0, 3)
    await let_pass(PIN_S + 1)
    assert counts(services) == (0, 0, 0)


def counting(services: Services) -> tuple[RelayReports, Metrics]:
    """Reports whose counts are on the brain's page, and the metrics of a relay that has repeated one prefill."""
    relay_reports, relay = reports(services), Metrics(lambda: NOBODY, "level_fit")
    services.metrics.beside = relay_reports.counts.values
    relay.retries.inc("prefill")
    return relay_reports, relay


@with_virtual_time
async def test_counters_of_a_lost_relay_do_not_fall() -> None:
    services = a_router()
    relay_reports, relay = counting(services)
    relay_reports.take("r0@elsewhere", Counted(relay.counts()))
    relay_reports.lost("r0@elsewhere")
    assert b'\nbalanceroute_retries_total{tier="prefill"} 1.0\n' in services.metrics.exposition()


@with_virtual_time
async def test_counts_of_far_relays_that_never_return_are_bounded_and_no_counter_falls() -> None:
    services = a_router()
    relay_reports, relay = counting(services)
    for _ in range(2):  # it has left, and has come back
        relay_reports.lost("r0@stays")
        relay_reports.take("r0@stays", Counted(relay.counts()))
    for number in range(2 * MOST_AWAY):
        relay_reports.take(f"r0@pod-{number}", Counted(relay.counts()))
        relay_reports.lost(f"r0@pod-{number}")
    assert len(relay_reports.counts) == MOST_AWAY + 1 and "r0@stays" in relay_reports.counts
    page = services.metrics.exposition().decode()
    assert f'balanceroute_retries_total{{tier="prefill"}} {2.0 * MOST_AWAY + 1}\n' in page


@with_virtual_time
async def test_a_returning_far_relay_is_not_counted_twice() -> None:
    services = a_router()
    relay_reports, relay = counting(services)
    for number in range(MOST_AWAY):
        for name in ("r0@returns", f"r0@pod-{number}"):
            relay_reports.take(name, Counted(relay.counts()))
            relay_reports.lost(name)
    assert len(relay_reports.counts) == MOST_AWAY
    page = services.metrics.exposition().decode()
    assert f'balanceroute_retries_total{{tier="prefill"}} {MOST_AWAY + 1.0}\n' in page


@with_virtual_time
async def test_the_newest_token_of_any_relay_is_the_workers_last_progress() -> None:
    services = a_router()
    relay_reports, worker = reports(services), services.fleet["d1"]
    await let_pass(10.0)
    now = services.loop.time()
    relay_reports.take("r0", activity(1, use(1, progress=1.0)))
    relay_reports.take("r1", activity(1, use(1, progress=4.0, awaits=True)))
    await let_pass(2.0)
    relay_reports.take("r0", activity(1, use(1, progress=4.0, awaits=True)))
    assert worker.progress_s == pytest.approx(now - 1.0) and services.awaited() == {"d1": pytest.approx(now - 0.5)}


@with_virtual_time
async def test_what_relays_learn_of_a_worker_is_taken_while_there_is_one_of_its_name() -> None:
    def learned(worker: Worker, connector: str | None) -> None:
        heard.append((worker.id, connector))
        raise WrongConnector("why", worker=worker.id, tier="prefill")

    services, heard, listener = a_router(), list[tuple[str, str | None]](), Heard()
    relay_reports = RelayReports(services.fleet, services.loop, services.frozen, listener)
    listener.note_connector = learned
    listener.doubt_connector = lambda worker, reason: heard.append((worker.id, reason))
    for name in ("d1", "who is this"):
        relay_reports.take("r0", Learned(name, "nixl"))
        relay_reports.take("r0", ConnectorDoubted(name, "why"))
        relay_reports.take("r0", CacheDoubted(name, "00000001a"))
    assert heard == [("d1", "nixl"), ("d1", "why")] and services.fleet["d1"].cache_salt == "00000001a"
    with pytest.raises(ValueError):
        relay_reports.take("r0", Counted(b"[1]"))
    assert not relay_reports.counts


@with_virtual_time
async def test_frozen_groups_are_reported_with_their_age() -> None:
    services = a_router()
    services.frozen.append(FrozenGroup("g", ("d0", "d1"), services.loop.time()))
    relay_reports = reports(services)
    await let_pass(3.0)
    assert relay_reports.silent() == (SilentGroup("g", ("d0", "d1"), pytest.approx(3.0)),)


@with_virtual_time
async def test_a_request_that_waits_no_more_has_no_part_in_how_long_a_worker_is_awaited() -> None:
    services = a_router()
    relay_reports = reports(services)
    await let_pass(100.0)
    now = services.loop.time()
    relay_reports.take("r0", activity(1, use(1, awaits=True, age_s=25.0)))
    relay_reports.take("r1", activity(1, use(1, awaits=True, age_s=9.0)))
    assert services.awaited() == {"d1": now - 25.0}
    relay_reports.take("r0", activity(1, use(1, awaits=True, age_s=5.0)))  # another request of the same relay
    assert services.awaited() == {"d1": now - 9.0}
    relay_reports.take("r1", activity(0, use(0)))
    assert services.awaited() == {"d1": now - 5.0}
