"""A reload changes what may change, all of it or nothing."""

import asyncio
import math
import threading
from pathlib import Path

import orjson
import pytest

from balanceroute.build import worker_specs
from balanceroute.config import Config
from balanceroute.config.sections.failures import Health
from balanceroute.config.sections.limits import Limits
from balanceroute.config.sections.operation import Layerwise
from balanceroute.config.values import KV_PIN_S
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.state import state_from_dict
from balanceroute.core.target_fit import TargetFit
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import ConfigError, ConnectFailed, InputError, KeyLimit, QueueFull
from balanceroute.journal import RecordingScheduler, rerun
from balanceroute.proxy import reload as module
from balanceroute.proxy.admission.forecasts import LiveForecasts, build_forecasts
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.app import build_services, health_monitor
from balanceroute.proxy.ops.admin import state
from balanceroute.proxy.ops.steering import with_policy
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.workers.circuit import CircuitState
from tests.unit.proxy.reloading import apply
from tests.unit.proxy.virtual_time import a_config, a_router, let_pass, script, with_virtual_time
from tests.waiting import PATIENCE_S, block_until


def with_decoders(config: Config, *names: str, slots: int = 64) -> Config:
    workers = [{"url": f"http://{name}:1", "id": name} for name in names]
    return a_config(decode={"workers": workers, "max_num_seqs": slots}, queue=config.queue.model_dump())


@with_virtual_time
async def test_reloaded_bounds_and_times_take_effect_at_once() -> None:
    services = a_router()
    changed = await apply(services, a_config(queue={"max_queued": 0, "deadline_s": 5.0}, retry={"max_attempts": 9}))
    assert changed == ["queue", "retry"] and services.config.retry.max_attempts == 9
    assert services.ledger.scheduler.config.queue_deadline_s == 5.0
    with pytest.raises(QueueFull):
        await services.tickets.submit(RequestSpec("r", 1)).prefiller()


@with_virtual_time
async def test_a_reload_reports_whether_the_client_keys_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    config = a_config(auth={"client_keys": str(file)})
    file.write_text(f"- {{name: a, sha256: {'a' * 64}}}\n")
    services = a_router(config)
    assert await apply(services, config) == []
    for content in (
        f"- {{name: a, sha256: {'b' * 64}}}\n",
        f"- {{name: a, sha256: {'b' * 64}, max_in_flight: 3}}\n",
        "[]",
    ):
        file.write_text(content)
        assert await apply(services, config) == ["auth.client_keys"]
        assert await apply(services, config) == []


@with_virtual_time
async def test_a_reload_that_opens_the_router_to_everybody_warns_as_a_start_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "keys.yaml").write_text("[]")
    keys, open_to_all = {"client_keys": str(file), "worker_api_key": "secret"}, {"worker_api_key": "secret"}
    services = a_router(a_config(listen={"host": "0.0.0.0"}, auth=keys))
    for auth in (keys, open_to_all, open_to_all):
        await apply(services, a_config(listen={"host": "0.0.0.0"}, auth=auth))
    texts = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert texts == [
        "whoever can connect uses the workers' key: auth.worker_api_key (or OPENAI_API_KEY) is set without "
        "auth.client_keys",
        "whoever reaches 0.0.0.0:8000 may use the cluster: auth.client_keys is not set",
    ]


@with_virtual_time
async def test_a_reload_warns_if_open_files_are_not_enough_for_the_connections_that_it_allows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balanceroute.proxy.client.descriptors.limit", lambda: 65_536)
    services = a_router()
    for most in (20_000, 50_000, 50_000):
        await apply(services, a_config(limits={"max_connections": most}))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert vars(record)["max_connections"] == 50_000 > vars(record)["clients"]


@with_virtual_time
async def test_a_reload_keeps_what_keys_have_used_and_which_port_is_the_operators(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: a, sha256: {'a' * 64}, requests_per_minute: 1}}\n")
    services = a_router(a_config(auth={"client_keys": str(file)}))
    services.perimeter.admin_port = 8001

    def enter() -> None:
        assert services.perimeter.keys is not None
        for key in services.perimeter.keys:
            key.enter(services.loop.time())

    enter()
    await apply(services, services.config)
    with pytest.raises(KeyLimit):
        enter()
    assert services.perimeter.admin_port == 8001


@with_virtual_time
async def test_a_reload_keeps_kv_times_that_a_workers_connector_has_shortened() -> None:
    services = a_router()
    services.note_connector(services.fleet["p0"], "nixl")
    changed = await apply(services, a_config(queue={"max_queued": 1}))
    assert services.config.kv_pin_s == services.drainer.pin_s == KV_PIN_S["nixl"][0]
    assert changed == ["queue"]  # it names none that the file left as it was


@with_virtual_time
async def test_a_connector_that_shortens_kv_times_shortens_the_policys_longest_wait_at_once() -> None:
    services = a_router(a_config(routing={"policy": "level_fit"}))
    services.note_connector(services.fleet["p0"], "nixl")
    policy = services.ledger.scheduler.policy
    assert isinstance(policy, TargetFit)
    assert policy.params.max_wait_s == services.config.max_wait_s < a_config().max_wait_s


@with_virtual_time
async def test_a_connector_that_shortens_kv_times_leaves_a_policy_alone_that_has_no_longest_wait() -> None:
    services = a_router(a_config(routing={"policy": "pool_fifo"}))
    policy = services.ledger.scheduler.policy
    services.note_connector(services.fleet["p0"], "nixl")
    assert services.ledger.scheduler.policy is policy


@with_virtual_time
async def test_a_reload_that_allows_more_prefills_lets_waiting_requests_go_on() -> None:
    services = a_router(a_config(prefill={"max_inflight": 1}))
    dispatcher = asyncio.ensure_future(PrefillDispatcher(services.ledger).run())
    first, second = (services.tickets.submit(RequestSpec(name, 100)) for name in ("a", "b"))
    assert await first.prefiller() == "p0"
    waiting = asyncio.ensure_future(second.prefiller())
    await let_pass(1.0)
    assert not waiting.done()
    await apply(services, a_config(prefill={"max_inflight": 2}))
    assert await waiting == "p0"
    dispatcher.cancel()


@with_virtual_time
async def test_reloaded_health_and_buffer_limits_apply_to_old_and_new_workers() -> None:
    services = a_router(a_config(health={"failure_threshold": 9}))
    new = with_decoders(services.config, "d0", "d1", "d2", "d9")
    health, limits = Health(failure_threshold=2, open_for_s=5.0), Limits(client_buffer_bytes=4096)
    await apply(services, new.model_copy(update={"health": health, "limits": limits}))
    for name in ("d0", "d9"):
        worker = services.fleet[name]
        assert worker.upstream.high_water_bytes == 4096
        for _ in range(2):
            worker.circuit.fault(services.ledger.now(), "status 500")
        assert worker.circuit.state is CircuitState.OPEN
    await let_pass(6.0)
    assert services.fleet["d0"].circuit.state is CircuitState.HALF_OPEN


@with_virtual_time
async def test_a_reload_adds_and_removes_workers_of_the_file_and_keeps_operator_added_ones() -> None:
    services = a_router()
    services.fleet.add(WorkerSpec("hand", Role.DECODE, "http://hand:1"), join_attempts=3)
    await apply(services, with_decoders(services.config, "d1", "d2", "d9"))
    services.fleet.sweep()
    assert {worker.id for worker in services.fleet} == {"p0", "d1", "d2", "d9", "hand"}
    assert not services.fleet["d9"].healthy  # it has to answer first


@with_virtual_time
async def test_a_worker_added_by_a_reload_is_never_dropped_while_its_engine_starts() -> None:
    services = a_router()
    monitor = health_monitor(services)
    await apply(services, with_decoders(services.config, "d0", "d9"))
    script(services, "d9", ConnectFailed("refused", worker="d9", tier="decode"))
    for _ in range(services.config.lifecycle.join_attempts + 1):
        await monitor.polling.once()
        await let_pass(services.config.lifecycle.join_interval_s)
    services.fleet.sweep()
    script(services, "d9", 200)
    await monitor.polling.once()
    assert services.fleet["d9"].state is WorkerState.UP


@with_virtual_time
async def test_an_operator_removed_worker_stays_removed_when_the_policy_changes() -> None:
    services = a_router()
    services.fleet.leave(services.fleet["d0"])
    services.fleet.sweep()
    await apply(services, with_policy(services.config, "least_kv"))
    assert services.config.routing.policy == "least_kv" and "d0" not in services.fleet


@with_virtual_time
async def test_an_operator_removed_worker_returns_when_the_file_describes_it_differently() -> None:
    services = a_router()
    services.fleet.leave(services.fleet["d0"])
    services.fleet.sweep()
    await apply(services, with_decoders(services.config, "d0", "d1", "d2"))
    assert "d0" not in services.fleet
    larger = [
        {"url": "http://d0:1", "id": "d0", "max_num_seqs": 7},
        *({"url": f"http://d{n}:1", "id": f"d{n}"} for n in (1, 2)),
    ]
    await apply(services, a_config(decode={"workers": larger}))
    assert services.fleet["d0"].spec.slots == 7


@pytest.mark.parametrize("by_hand", [False, True], ids=["entered", "added by hand before"])
@with_virtual_time
async def test_a_worker_of_the_file_whose_engine_takes_long_to_start_is_waited_for(by_hand: bool) -> None:
    services = a_router(a_config(lifecycle={"join_attempts": 1, "join_interval_s": 1.0}))
    new = with_decoders(services.config, "d0", "d1", "d2", "d9")
    if by_hand:
        services.fleet.add(next(spec for spec in worker_specs(new) if spec.id == "d9"), join_attempts=1)
    await apply(services, new.model_copy(update={"lifecycle": services.config.lifecycle}))
    upstream = script(services, "d9", ConnectFailed("refused", worker="d9", tier="decode"))
    monitor = health_monitor(services)
    for _ in range(60):
        await monitor.polling.once()
        services.fleet.sweep()
        await let_pass(10.0)
    assert len(upstream.asked) == 60 and not services.fleet["d9"].healthy
    upstream.answers = [200]
    await monitor.polling.once()
    assert services.fleet["d9"].state is WorkerState.UP


@with_virtual_time
async def test_a_worker_that_is_leaving_stays_when_the_file_names_it_again() -> None:
    services = a_router()
    worker = services.fleet["d0"]
    worker.in_use = 1  # so that it can't go at once
    await apply(services, with_decoders(services.config, "d1", "d2"))
    assert worker.leaving
    await apply(services, with_decoders(services.config, "d0", "d1", "d2"))
    worker.in_use = 0
    assert services.fleet.sweep() == [] and services.fleet["d0"] is worker


@pytest.mark.parametrize(("leaves", "accepted"), [(False, False), (True, True)], ids=["stays", "leaves"])
@with_virtual_time
async def test_an_operator_added_server_changes_its_name_only_after_it_has_left(leaves: bool, accepted: bool) -> None:
    services = a_router()
    hand = services.fleet.add(WorkerSpec("hand", Role.DECODE, "http://d9:1"), join_attempts=3)
    hand.in_use = 1  # so that it can't go at once
    if leaves:
        services.fleet.leave(hand)
    try:
        await apply(services, with_decoders(services.config, "d0", "d9"))
    except ConfigError as error:
        assert "worker d9: is the server of worker hand, which was added at run time" in str(error)
    assert ("d9" in services.fleet) is accepted and "hand" in services.fleet


@with_virtual_time
async def test_an_operator_renamed_server_does_not_block_reloads() -> None:
    services = a_router()
    url = services.fleet["d0"].spec.url
    services.fleet.leave(services.fleet["d0"])
    assert services.fleet.sweep() == ["d0"]
    services.fleet.add(WorkerSpec("hand", Role.DECODE, url), join_attempts=3)
    await apply(services, with_policy(services.config, "least_kv"))
    assert "d0" not in services.fleet and not services.fleet["hand"].leaving


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL], ids=["other slots", "another role"])
@with_virtual_time
async def test_an_operator_replaced_worker_does_not_block_reloads(
    role: Role,
) -> None:
    services = a_router()
    services.fleet.leave(services.fleet["d0"])
    assert services.fleet.sweep() == ["d0"]
    hand = WorkerSpec("d0", role, services.fleet["d1"].spec.url.replace("d1", "d0"), slots=4)
    services.fleet.add(hand, join_attempts=3)
    await apply(services, with_policy(services.config, "least_kv"))
    assert services.fleet["d0"].spec == hand and not services.fleet["d0"].leaving
    with pytest.raises(ConfigError, match="worker d0: .*max_num_seqs from 4 to 9, .*cannot change while it is in use"):
        await apply(services, with_decoders(services.config, "d0", slots=9))


@with_virtual_time
async def test_a_worker_of_the_file_is_renamed_by_a_reload() -> None:
    services = a_router()
    services.fleet["d0"].in_use = 1
    renamed = [{"url": services.fleet["d0"].spec.url, "id": "new"}]
    await apply(services, a_config(decode={"workers": renamed}))
    assert services.fleet["d0"].leaving and not services.fleet["new"].leaving


@pytest.mark.parametrize("removed", [False, True])
@with_virtual_time
async def test_a_drained_server_stays_drained_under_another_name_unless_it_was_removed(removed: bool) -> None:
    services = a_router()
    d0, d1 = services.fleet["d0"], services.fleet["d1"]
    services.fleet.drain(d0)
    if removed:
        services.fleet.leave(d0)
    workers = [{"url": d0.spec.url, "id": "new-0"}, {"url": d1.spec.url, "id": "new-1"}]
    await apply(services, a_config(decode={"workers": workers}))
    assert (services.fleet["new-0"].drained, services.fleet["new-1"].drained) == (not removed, False)


@pytest.mark.parametrize(
    ("new", "named"),
    [
        (a_config(queue={"max_queued": 1}).model_copy(update={"connector": "nixl"}), "connector"),
        (
            a_config(queue={"max_queued": 1}).model_copy(update={"layerwise": Layerwise(callback_url="http://r:1")}),
            "^layerwise.callback_url: cannot",
        ),
        (a_config(listen={"port": 1, "standbys": 0}, queue={"max_queued": 1}), "^listen.port, listen.standbys: cannot"),
        (a_config(lifecycle={"pins_file": "pins"}, queue={"max_queued": 1}), "lifecycle.pins_file"),
        (
            a_config(decode={"max_num_seqs": 7}, queue={"max_queued": 1}),
            "worker d0: max_num_seqs from [0-9]+ to 7: cannot",
        ),
        (a_config(decode={"shared_barrier": False}), "worker d0: barrier_group from decode to '': cannot"),
    ],
    ids=["connector", "callback address", "listen", "record of pins", "slots of a worker in use", "its group"],
)
@with_virtual_time
async def test_a_reload_that_needs_a_restart_is_refused_as_a_whole(new: Config, named: str) -> None:
    services = a_router()
    before, bounds = services.config, services.ledger.scheduler.config
    with pytest.raises(ConfigError, match=named):
        await apply(services, new)
    assert services.config is before and services.ledger.scheduler.config == bounds


@pytest.mark.anyio
async def test_a_reload_that_meets_a_conflict_after_it_has_read_its_files_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, read, others = a_router(), threading.Event(), history_writers()
    before = services.config

    def long_read(config: Config) -> Perimeter:
        assert read.wait(PATIENCE_S)
        return Perimeter(config)

    monkeypatch.setattr(module, "Perimeter", long_read)
    predictor = {"kind": "survival", "history": str(tmp_path / "history.sqlite3")}
    new = with_decoders(before, "d9").model_copy(update={"predictor": a_config(predictor=predictor).predictor})
    reloading = asyncio.ensure_future(module.reload(services, new))
    await asyncio.sleep(0)
    services.fleet.add(WorkerSpec("hand", Role.DECODE, "http://d9:1"), join_attempts=3)
    read.set()
    with pytest.raises(ConfigError, match="worker d9: is the server of worker hand"):
        await reloading
    assert services.config is before and services.forecasts is None
    assert history_writers() <= others


def history_writers() -> set[threading.Thread]:
    """Threads that write a prediction history; those of a former test may not have ended yet."""
    return {thread for thread in threading.enumerate() if thread.name == "prediction-history"}


@with_virtual_time
async def test_a_journal_over_a_reload_reruns_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    services = build_services(a_config(), asyncio.get_running_loop(), None, True, path)
    scheduler = services.ledger.scheduler
    assert isinstance(scheduler, RecordingScheduler)
    for index in range(6):
        scheduler.submit_prefilled(RequestSpec(f"r{index}", 100 + index), 1.0, 3.0)
    scheduler.admit(1.0)
    await apply(services, a_config(queue={"max_queued": 0}))
    with pytest.raises(QueueFull):
        await services.tickets.submit(RequestSpec("r", 1)).prefiller()
    for policy in ("br_0", "br_h", "target_fit", "join_shortest_queue"):
        await apply(services, a_config(queue={"max_queued": 0}, routing={"policy": policy, "max_wait_s": math.inf}))
        scheduler.submit_prefilled(RequestSpec(policy, 77), 2.0, 2.0)
        assert scheduler.admit(2.0)
    scheduler.close()
    assert rerun(path).difference is None


POLICIES = ("br_0", "br_h", "target_fit", "pool_fifo", "join_shortest_queue", "least_kv")


@pytest.mark.parametrize("before", POLICIES)
@pytest.mark.parametrize("after", POLICIES)
@with_virtual_time
async def test_a_new_policy_keeps_bound_requests_and_decides_on_waiting_ones(before: str, after: str) -> None:
    services = a_router(a_config(routing={"policy": before}, decode={"max_num_seqs": 2}))
    scheduler = services.ledger.scheduler
    for index in range(9):
        scheduler.submit_prefilled(RequestSpec(f"r{index}", 100 + 50 * index), services.loop.time())
    scheduler.admit(services.loop.time())
    bound = {tracker.id: tracker.worker for tracker in scheduler.snapshot.decoding()}
    await apply(services, a_config(routing={"policy": after, "horizon_steps": 5}, decode={"max_num_seqs": 2}))
    snapshot = scheduler.snapshot
    snapshot.check_invariants()
    assert scheduler.policy.name == after and snapshot.horizon_steps == (5 if after == "br_h" else 0)
    assert {tracker.id: tracker.worker for tracker in snapshot.decoding()} == bound
    assert len(snapshot.requests) == 9
    for tracker in list(snapshot.decoding()):
        scheduler.finish(tracker.id, Outcome.FINISHED, services.loop.time())
    policy, written, _ = state_from_dict(orjson.loads(orjson.dumps(state(services))))
    fresh = Scheduler(policy)
    fresh.snapshot = written
    assert scheduler.admit(services.loop.time()) == fresh.admit(services.loop.time())


@with_virtual_time
async def test_a_new_predictor_learns_from_the_rows_of_the_last_one() -> None:
    services = a_router(a_config(routing={"policy": "br_h"}, predictor={"kind": "survival"}))
    services.forecasts = services.ledger.forecasts = build_forecasts(services.config)
    services.metrics.include(services.forecasts.metrics)
    scheduler = services.ledger.scheduler
    for index in range(20):
        scheduler.submit_prefilled(RequestSpec(f"r{index}", 100), 0.0)
    scheduler.admit(0.0)
    running = [tracker.id for tracker in scheduler.snapshot.decoding()]
    for request in running[1:]:
        scheduler.progress(request, 30, 0.0)
        services.forecasts.finished(scheduler.snapshot.requests[request], "stop")
        scheduler.finish(request, Outcome.FINISHED, 0.0)
    changed = await apply(
        services, a_config(predictor={"kind": "exact_match"}, routing={"policy": "br_h", "horizon_steps": 40})
    )
    assert changed == ["routing", "predictor"]
    assert isinstance(services.forecasts, LiveForecasts) and services.ledger.forecasts is services.forecasts
    assert services.keyer is services.forecasts.keys is not None  # of requests to come
    tracker = scheduler.snapshot.requests[running[0]]
    assert tracker.remaining(40) == 40
    services.forecasts.renew(scheduler)
    assert tracker.remaining(40) == 29  # 30 tokens to go, the last of them 29 ahead
    scheduler.snapshot.check_invariants()
    assert b"predictor_gate" in services.metrics.exposition()
    await apply(services, a_config(routing={"policy": "br_0"}))
    assert services.forecasts is services.ledger.forecasts is services.keyer is None
    assert b"predictor_gate" not in services.metrics.exposition()


@with_virtual_time
async def test_a_predictor_can_replace_a_bare_history_and_back(tmp_path: Path) -> None:
    kept, others = {"kind": "survival", "history": str(tmp_path / "history.sqlite3")}, history_writers()
    config = a_config(predictor=kept)
    services = build_services(config, asyncio.get_running_loop(), build_forecasts(config), True)
    for policy, predicts in (("br_h", True), ("level_fit", False)):
        await apply(services, a_config(predictor=kept, routing={"policy": policy}))
        assert isinstance(services.forecasts, LiveForecasts) is predicts
        assert (b"predictor_gate" in services.metrics.exposition()) is predicts
        assert b"predictor_history" in services.metrics.exposition()
    assert services.forecasts is not None
    block_until(lambda: len(history_writers() - others) == 1)  # those of the former ones end
    services.forecasts.close()


@with_virtual_time
async def test_a_predictor_is_made_anew_only_for_other_settings() -> None:
    config = a_config(routing={"policy": "br_h"}, predictor={"kind": "survival"})
    services = build_services(config, asyncio.get_running_loop(), build_forecasts(config), True)
    made = services.forecasts
    await apply(services, config.model_copy(update={"queue": a_config(queue={"max_queued": 1}).queue}))
    assert services.forecasts is made is not None


@with_virtual_time
async def test_a_history_that_could_not_be_opened_at_the_start_is_used_after_a_reload(tmp_path: Path) -> None:
    """A brain that took the lead while the disk was full never used its history again."""
    folder = tmp_path / "later"
    config = a_config(predictor={"kind": "survival", "history": str(folder / "history.sqlite3")})
    services = build_services(config, asyncio.get_running_loop(), build_forecasts(config), True)
    assert services.forecasts is not None and services.forecasts.history.path is None
    folder.mkdir()
    await apply(services, config)
    made = services.forecasts
    assert made is not None and made.history.path is not None
    await apply(services, config)
    assert services.forecasts is made  # it is made anew only if it must be
    made.close()


@with_virtual_time
async def test_a_reload_without_a_predictor_works_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    services = a_router(a_config(routing={"policy": "br_h"}, predictor={"kind": "survival"}))
    services.forecasts = services.ledger.forecasts = build_forecasts(services.config)
    services.metrics.include(services.forecasts.metrics)
    monkeypatch.setattr(threading.Thread, "start", start)
    new = a_config(1, 1, routing={"policy": "br_0"})
    await apply(services, new)
    assert services.forecasts is None and len([worker for worker in services.fleet if not worker.leaving]) == 2


@with_virtual_time
async def test_a_predictor_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    services = a_router()
    before, policy = services.config, services.ledger.scheduler.policy
    with pytest.raises(InputError):
        await apply(
            services,
            a_config(
                predictor={"kind": "survival", "model": str(tmp_path / "none.npz")},
                routing={"policy": "br_h"},
                queue={"max_queued": 1},
            ),
        )
    assert services.config is before and services.ledger.scheduler.policy is policy


@with_virtual_time
async def test_a_shorter_pool_ttl_shortens_the_patience_of_waiting_requests() -> None:
    services = a_router()
    scheduler, now = services.ledger.scheduler, services.loop.time()
    scheduler.submit_prefilled(RequestSpec("r", 100), now)
    (tracker,) = scheduler.snapshot.pool
    assert tracker.overdue_s == pytest.approx(now + 60 * 1.1)  # the mean prompt waits a tenth longer
    await apply(services, a_config(pool={"ttl_s": 20.0}))
    assert tracker.overdue_s == pytest.approx(now + 10 * 1.1)


@with_virtual_time
async def test_shorter_deadlines_apply_to_waiting_requests_from_their_arrival() -> None:
    services = a_router()
    scheduler = services.ledger.scheduler
    scheduler.submit_prefilled(RequestSpec("pooled", 100), services.loop.time())
    scheduler.submit(RequestSpec("queued", 100), services.loop.time())
    await let_pass(10.0)
    assert scheduler.expire(services.loop.time()) == []
    await apply(services, a_config(pool={"ttl_s": 9.0}, queue={"deadline_s": 9.0}))
    assert [release.request for release in scheduler.expire(services.loop.time())] == ["pooled", "queued"]
