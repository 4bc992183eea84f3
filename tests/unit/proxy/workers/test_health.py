"""Who is taken out, and who is only too busy to answer."""

import asyncio
import math
from typing import Any

import pytest

from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import CannotConnect, ConnectFailed
from balanceroute.proxy.app import health_monitor
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.workers.connection import NO_REPLY
from balanceroute.proxy.workers.fleet import why_not_up
from balanceroute.proxy.workers.health import HealthMonitor
from tests.unit.proxy.virtual_time import (
    Answer,
    a_config,
    a_router,
    leaving,
    let_pass,
    script,
    stand_still,
    with_virtual_time,
)

HEALTH = {"interval_s": 2.0, "timeout_s": 3.0, "failure_threshold": 3}
REFUSED = ConnectFailed("refused", worker="d0", tier="decode")


async def seen_healthy(health: dict[str, float] = HEALTH, **config: Any) -> tuple[Services, HealthMonitor]:
    """A router and its monitor, after one round in which everybody answered."""
    services = a_router(a_config(health=health, **config))
    monitor = health_monitor(services)
    await rounds(monitor)
    return services, monitor


async def rounds(monitor: HealthMonitor, count: int = 1) -> None:
    for _ in range(count):
        await monitor.polling.once()


@pytest.mark.parametrize("answer", [500, REFUSED], ids=["5xx", "refused"])
@with_virtual_time
async def test_a_worker_without_other_progress_goes_down_after_consecutive_failures_and_up_after_one_answer(
    answer: Answer,
) -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", answer)
    await rounds(monitor, 2)
    assert services.fleet["d0"].state is WorkerState.UP
    await rounds(monitor)
    assert services.fleet["d0"].state is WorkerState.DOWN
    script(services, "d0", 200)
    await rounds(monitor)
    assert services.fleet["d0"].state is WorkerState.UP


@pytest.mark.parametrize(
    ("answer", "ended"),
    [(REFUSED, True), (503, True), (500, False), (None, False)],
    ids=["refused", "503", "500", "silent"],
)
@with_virtual_time
async def test_a_refused_port_or_a_dead_engine_means_that_the_process_has_ended(
    answer: Answer | None, ended: bool
) -> None:
    services, monitor = await seen_healthy()
    d0 = services.fleet["d0"]
    if answer is None:
        for _ in range(3):
            monitor._judge(d0, "no answer within 3 s", silent=True)
    else:
        script(services, "d0", answer)
        await rounds(monitor, 4)
    assert d0.state is WorkerState.DOWN and bool(d0.ended_at) == ended
    at = d0.ended_at
    script(services, "d0", 200)
    await rounds(monitor)
    assert d0.state is WorkerState.UP and d0.ended_at == at


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(REFUSED, "it has not answered /health yet (refused)"), (404, "its /health answers 404")],
    ids=["refused", "404"],
)
@with_virtual_time
async def test_a_worker_that_was_never_up_is_down_with_what_its_health_check_found(
    answer: Answer, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    services = a_router(a_config(health=HEALTH))
    script(services, "d0", answer)
    await rounds(health_monitor(services))
    assert why_not_up(services.fleet["d0"]) == expected
    assert [getattr(line, "reason", "") for line in caplog.records if line.msg == "worker unhealthy"] == [expected]


@pytest.mark.parametrize("seen", [False, True], ids=["never up", "was up"])
@with_virtual_time
async def test_a_worker_that_only_ever_closes_connections_may_speak_tls(seen: bool) -> None:
    services = a_router(a_config(health=HEALTH))
    monitor = health_monitor(services)
    if seen:
        await rounds(monitor)
    script(services, "d0", ConnectFailed(f"{NO_REPLY}: reset", worker="d0", tier="decode"))
    await rounds(monitor, 3)
    assert ("its URL must be https://" in why_not_up(services.fleet["d0"])) is not seen


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (REFUSED, "it does not answer /health (refused)"),
        (None, "it does not answer /health (no answer within 3 s)"),
        (503, "its /health answers 503"),
    ],
    ids=["refused", "silent", "503"],
)
@with_virtual_time
async def test_a_worker_that_goes_down_is_down_with_what_its_last_health_check_found(
    answer: Answer, expected: str
) -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", 500, answer)
    await rounds(monitor, 3)
    assert services.fleet["d0"].state is WorkerState.DOWN
    assert why_not_up(services.fleet["d0"]) == expected


@with_virtual_time
async def test_a_worker_that_reports_a_dead_engine_is_down_at_once() -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", 503)
    await rounds(monitor)
    assert services.fleet["d0"].state is WorkerState.DOWN


@with_virtual_time
async def test_a_silent_worker_gets_no_new_request_after_one_check_and_is_down_after_three() -> None:
    services, monitor = await seen_healthy()
    worker = services.fleet["d0"]
    script(services, "d0", None)
    began_s = services.ledger.now()
    looking = asyncio.ensure_future(rounds(monitor))
    await let_pass(HEALTH["timeout_s"] + 0.1)
    assert worker.state is WorkerState.DRAINING and worker.healthy
    await looking
    assert worker.state is WorkerState.DOWN
    assert services.ledger.now() - began_s < 3 * HEALTH["timeout_s"] + 0.5
    script(services, "d0", 200)
    await rounds(monitor)
    assert worker.state is WorkerState.UP


@with_virtual_time
async def test_a_rank_that_leaves_during_the_check_of_its_server_is_no_failure_of_the_other_ranks() -> None:
    ranks = [{"url": "http://d:1", "id": f"d{n}", "dp_rank": n} for n in range(2)]
    services, monitor = await seen_healthy(decode={"workers": ranks})
    asked = leaving(services, "d0")
    other = script(services, "d1", 200)
    await rounds(monitor)
    assert asked.asked and other.asked and "d0" not in services.fleet
    assert services.fleet["d1"].checks_failed == 0


@with_virtual_time
async def test_a_hanging_check_of_a_departed_worker_does_not_affect_its_namesake() -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", None)
    looking = asyncio.ensure_future(rounds(monitor))
    await let_pass(0.1)
    services.fleet.leave(services.fleet["d0"])
    services.fleet.sweep()
    services.fleet.add(WorkerSpec("d0", Role.DECODE, "http://another:1"), join_attempts=3)
    script(services, "d0", 200)
    await rounds(monitor)
    await looking
    view = services.ledger.view()
    assert next(worker.state for worker in view.decoders if worker.id == "d0") is WorkerState.UP
    assert services.fleet["d0"].checks_failed == 0


@with_virtual_time
async def test_one_answer_ends_the_doubts_about_a_worker() -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", None, 200)
    await rounds(monitor)
    assert services.fleet["d0"].state is WorkerState.UP
    assert services.fleet["d0"].checks_failed == 0


@with_virtual_time
async def test_a_worker_without_a_token_since_a_silent_check_gets_no_new_request() -> None:
    services, monitor = await seen_healthy()
    worker = services.fleet["d0"]
    script(services, "d0", None)
    worker.progress_s = services.ledger.now() - 0.01
    looking = asyncio.ensure_future(rounds(monitor))
    await let_pass(HEALTH["timeout_s"] + 0.1)
    assert worker.state is WorkerState.DRAINING and worker.checks_failed == 0
    await looking
    assert worker.state is WorkerState.DOWN


@pytest.mark.parametrize(
    ("answer", "state"),
    [(None, WorkerState.UP), (REFUSED, WorkerState.DOWN), (500, WorkerState.DOWN), (503, WorkerState.DOWN)],
    ids=["silent", "refused", "500", "503"],
)
@with_virtual_time
async def test_a_worker_with_recent_progress_may_miss_a_check_but_not_refuse_it(
    answer: Answer, state: WorkerState
) -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", answer)

    async def work() -> None:
        while True:
            services.fleet["d0"].progress_s = services.ledger.now()
            await let_pass(1.0)

    working = asyncio.ensure_future(work())
    await rounds(monitor, 10)
    working.cancel()
    assert services.fleet["d0"].state is state


@with_virtual_time
async def test_a_silent_worker_without_progress_on_its_request_is_down() -> None:
    services, monitor = await seen_healthy()
    worker = services.fleet["d0"]
    script(services, "d0", None)
    for _ in range(3):
        worker.in_use = 1
        await rounds(monitor)
    assert worker.state is WorkerState.DOWN


@with_virtual_time
async def test_a_health_timeout_noticed_late_by_a_stalled_loop_does_not_count() -> None:
    services, monitor = await seen_healthy()
    script(services, "d0", None)
    for _ in range(5):
        services.loop.call_later(2.0, stand_still, 30.0)  # as if a callback had run for so long
        await rounds(monitor)
    assert services.fleet["d0"].checks_failed == 0
    await rounds(monitor, 3)
    assert services.fleet["d0"].state is WorkerState.DOWN


@pytest.mark.parametrize("stall_s", [2.9, 3.3], ids=["within", "just-beyond"])
@with_virtual_time
async def test_a_pause_of_the_router_within_the_health_timeout_does_not_count(stall_s: float) -> None:
    services = a_router(a_config(health=HEALTH))
    script(services, "d0", None)  # never seen healthy: one verdict would take it out
    services.loop.call_later(0.05, stand_still, stall_s)
    await rounds(health_monitor(services))
    assert services.fleet["d0"].state is WorkerState.UP


@with_virtual_time
async def test_a_worker_that_was_never_healthy_is_out_at_once() -> None:
    services = a_router(a_config(health=HEALTH))
    script(services, "d0", REFUSED)
    await rounds(health_monitor(services))
    assert [worker.state for worker in services.fleet] == [WorkerState.UP, WorkerState.DOWN] + [WorkerState.UP] * 2


@with_virtual_time
async def test_a_worker_that_joins_and_never_answers_is_dropped_after_its_attempts_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lifecycle = {"join_attempts": 2, "join_interval_s": 10.0}
    services, monitor = await seen_healthy(lifecycle=lifecycle)
    spec = services.fleet["d0"].spec
    services.fleet.leave(services.fleet["d0"])
    assert services.fleet.sweep() == ["d0"]
    services.fleet.add(spec, join_attempts=2)
    script(services, "d0", REFUSED)
    await rounds(monitor)
    assert not services.fleet["d0"].leaving
    await let_pass(10.0)
    await rounds(monitor)
    assert services.fleet.sweep() == ["d0"] and "d0" not in services.fleet
    logged = [(line.msg, line.reason) for line in caplog.records if hasattr(line, "reason")]
    why = "it has not answered /health yet (refused)"
    assert logged == [
        ("worker state", "it has not answered /health yet"),
        ("worker unhealthy", why),
        ("worker not ready, dropped", why),
    ]


@with_virtual_time
async def test_a_health_check_without_a_free_descriptor_does_not_count() -> None:
    error = CannotConnect("cannot connect: too many open files", worker="d0", tier="decode")
    services, monitor = await seen_healthy()
    script(services, "d0", error)
    await rounds(monitor, 4)
    assert services.fleet["d0"].state is WorkerState.UP


@pytest.mark.parametrize("lately", ["token", "first request", "pause of ours", None])
@with_virtual_time
async def test_a_worker_is_stalled_without_any_recent_sign_of_progress(lately: str | None) -> None:
    """Its streams wait for tokens. The last token, its first request after idleness and our last pause are old."""
    services, monitor = await seen_healthy(HEALTH | {"stall_after_s": 30.0})
    worker = services.fleet["d0"]
    worker.take()
    await let_pass(100.0)
    now = services.loop.time()
    worker.progress_s = now - (30.0 if lately != "token" else 29.9)
    awaited_since_s = {"d0": now - (30.0 if lately != "first request" else 29.9)}
    monitor._awaited_since_s = lambda worker_id: awaited_since_s.get(worker_id, math.inf)
    for look_s in (now - 90.0, now - (30.0 if lately != "pause of ours" else 29.9)):
        services.attention.look(look_s, 0.25)
    await rounds(monitor)
    assert worker.stalled is (lately is None)


@with_virtual_time
async def test_a_worker_is_stalled_also_for_a_router_that_stands_still_now_and_then() -> None:
    services, monitor = await seen_healthy(HEALTH | {"stall_after_s": 30.0})
    services.fleet["d0"].take()
    began_s = services.loop.time()
    monitor._awaited_since_s = lambda worker_id: began_s
    while not services.fleet["d0"].stalled and services.loop.time() < began_s + 100.0:
        for _ in range(36):
            services.attention.look(services.loop.time(), 0.25)
            await let_pass(0.25)
        await rounds(monitor)
        stand_still(1.0)
    assert 30.0 < services.loop.time() - began_s < 45.0


@pytest.mark.parametrize("reason", ["idle", "nobody waits"])
@with_virtual_time
async def test_a_worker_without_expected_tokens_is_not_stalled(reason: str) -> None:
    services, monitor = await seen_healthy(HEALTH | {"stall_after_s": 30.0})
    monitor._awaited_since_s = lambda worker_id: 0.0 if reason == "idle" else math.inf
    if reason != "idle":
        services.fleet["d0"].take()
    await let_pass(100.0)
    await rounds(monitor)
    assert not services.fleet["d0"].stalled
