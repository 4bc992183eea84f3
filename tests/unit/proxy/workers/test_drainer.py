"""Pinned KV is pulled once, by somebody who has room, while it is still there, and counted when it can't be."""

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from balanceroute.core.types import Role, WorkerState
from balanceroute.core.view import ClusterView
from balanceroute.errors import BadUpstreamReply, CannotConnect, ConnectFailed
from balanceroute.proxy.admission.tickets import Tickets
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.workers import pins
from balanceroute.proxy.workers.drainer import LOOK_S, MAX_CONCURRENT, SAFE_SHARE, TIMEOUT_S, Drain, DrainGroup
from balanceroute.proxy.workers.pins import PinRecord
from balanceroute.proxy.workers.relay_fleet import ReportedCircuit
from tests.unit.proxy.virtual_time import (
    ScriptedUpstream,
    a_config,
    a_router,
    let_pass,
    script,
    with_virtual_time,
)
from tests.waiting import until

REQUEST = parse("completions", b'{"model":"m","prompt":"a","max_tokens":50,"stream":true}')
PARAMS = b'{"remote_request_id":"once"}'
P0_URL = "http://p0:1"
UNSENT = ConnectFailed("nobody listens", worker="d", tier="decode")
UNSENT.sent = False


def a_job(services: Services, age_s: float = 0.0) -> Drain:
    return Drain("r", REQUEST, PARAMS, b"", services.ledger.now() - age_s)


async def drained(services: Services) -> None:
    await until(lambda: not services.drainer.pending)


async def drain_one(services: Services, age_s: float = 0.0) -> None:
    services.drainer.drain(a_job(services, age_s))
    await drained(services)


def asked(services: Services) -> list[str]:
    """Which workers were asked, in the order of time."""
    upstreams = {worker.id: cast(ScriptedUpstream, worker.upstream) for worker in services.fleet}
    return [name for _, name in sorted((one.number, name) for name, up in upstreams.items() for one in up.asked)]


def outcomes(services: Services) -> tuple[float, float, int]:
    metrics = services.metrics
    return metrics.drains.value("drained"), metrics.drains.value("orphaned"), metrics.orphaned_kv


@with_virtual_time
async def test_kv_is_pulled_by_one_worker_with_one_token_and_its_own_parameters() -> None:
    services = a_router()
    upstream = script(services, "d0")
    await drain_one(services)
    assert asked(services) == ["d0"]
    body = orjson.loads(upstream.asked[0].body)
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert body["kv_transfer_params"] == orjson.loads(PARAMS)
    assert outcomes(services) == (1, 0, 0)


@pytest.mark.parametrize("refusal", [429, 503, 401, 403, 404, UNSENT], ids=str)
@with_virtual_time
async def test_a_drain_moves_to_the_next_worker_when_the_first_surely_did_not_take_it(
    refusal: int | ConnectFailed,
) -> None:
    services = a_router()
    script(services, "d0", refusal)
    script(services, "d1", refusal)
    await drain_one(services)
    assert asked(services) == ["d0", "d1", "d2"]
    assert outcomes(services) == (1, 0, 0)


@pytest.mark.parametrize(
    ("refusal", "failures"),
    [(UNSENT, 1), (CannotConnect("Too many open files", worker="d", tier="decode"), 0)],
    ids=["of the worker", "of the router itself"],
)
@with_virtual_time
async def test_a_drain_that_could_not_be_sent_counts_as_a_failure_of_the_worker_unless_it_was_the_routers_own(
    refusal: ConnectFailed, failures: int
) -> None:
    services = a_router()
    script(services, "d0", refusal)
    await drain_one(services)
    assert asked(services) == ["d0", "d1"] and outcomes(services) == (1, 0, 0)
    assert services.metrics.upstream_errors.value("d0", "decode", "drain_connect") == failures


@pytest.mark.parametrize(
    "end",
    [500, BadUpstreamReply("cut", worker="d", tier="decode"), ConnectFailed("cut", worker="d", tier="decode"), None],
    ids=["500", "cut off", "reset after sending", "silence"],
)
@with_virtual_time
async def test_a_drain_that_a_worker_may_have_taken_is_not_repeated(
    end: int | BadUpstreamReply | ConnectFailed | None,
) -> None:
    services = a_router()
    script(services, "d0", end)
    await drain_one(services)
    assert asked(services) == ["d0"]
    assert outcomes(services) == (0, 1, 1)
    pin_s = services.config.kv_pin_s
    assert pin_s is not None
    await let_pass(pin_s + 1)
    assert services.metrics.orphaned_kv == 0  # the prefiller has dropped it by itself


@with_virtual_time
async def test_kv_that_no_worker_takes_counts_as_orphaned_only_until_its_prefiller_drops_it() -> None:
    services = a_router()
    for name in ("d0", "d1", "d2"):
        script(services, name, 503)
    pin_s = services.config.kv_pin_s
    assert pin_s is not None
    services.drainer.drain(a_job(services))
    await let_pass(pin_s - 1)
    assert outcomes(services) == (0, 1, 1)
    await let_pass(2)
    assert services.metrics.orphaned_kv == 0


@with_virtual_time
async def test_a_worker_that_has_just_left_is_not_used_for_a_drain() -> None:
    """A relay hears at once that a worker has left, and within a quarter of a second how the cluster looks then."""
    services = a_router()
    services.fleet.forget(services.fleet["d0"])
    await drain_one(services)
    assert asked(services) == ["d1"]
    assert outcomes(services) == (1, 0, 0)


@with_virtual_time
async def test_a_drain_waits_while_every_worker_refuses_it() -> None:
    services = a_router()
    for name in ("d0", "d1"):
        script(services, name, 503)
    services.fleet["d2"].state = WorkerState.DOWN
    services.drainer.drain(a_job(services))
    await let_pass(60)
    assert services.drainer.pending == 1 and outcomes(services) == (0, 0, 0)
    services.fleet["d2"].state = WorkerState.UP
    await drained(services)
    assert asked(services)[-1] == "d2" and outcomes(services) == (1, 0, 0)
    assert len(asked(services)) < 2 * 25  # rounds come ever more rarely


@with_virtual_time
async def test_a_drain_of_a_model_that_no_decode_worker_has_is_given_up_unless_a_busy_one_may_have_it() -> None:
    services = a_router()
    script(services, "d0", 404)
    script(services, "d1", 503, 503, 404)
    services.fleet["d2"].state = WorkerState.DOWN
    await drain_one(services)
    assert asked(services) == ["d0", "d1", "d1", "d1"] and outcomes(services) == (0, 1, 1)


@with_virtual_time
async def test_kv_that_no_worker_takes_in_time_is_left_to_its_timeout() -> None:
    services = a_router(a_config(prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 50.0}))
    upstreams = [script(services, name, 503) for name in ("d0", "d1", "d2")]
    job = a_job(services, age_s=30.0)
    services.drainer.drain(job)
    await drained(services)
    last_s = max(upstream.asked[-1].at_s for upstream in upstreams)
    assert last_s <= job.pinned_s + 100.0 * SAFE_SHARE
    assert outcomes(services) == (0, 1, 1)


@with_virtual_time
async def test_kv_older_than_its_safe_share_is_never_pulled() -> None:
    services = a_router(a_config(prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 50.0}))
    await drain_one(services, age_s=81.0)
    assert asked(services) == [] and outcomes(services) == (0, 1, 1)


@with_virtual_time
async def test_a_drain_uses_the_freest_worker_first_and_a_resting_one_last() -> None:
    services = a_router()
    services.fleet["d0"].circuit.busy(services.loop.time())
    services.fleet["d1"].state = WorkerState.DOWN
    services.ledger.report_decoder("d2", 10_000, 10_000, 0)  # it is full, but does not rest
    script(services, "d2", 503)
    await drain_one(services)
    assert asked(services) == ["d2", "d0"]  # d2 said no, so the resting one, and never the one that is down
    assert outcomes(services) == (1, 0, 0)


@with_virtual_time
async def test_a_drain_waits_for_a_worker_that_has_answered_a_health_check() -> None:
    services = a_router()
    script(services, "d0", None)  # it answers nothing
    for worker in services.fleet:
        services.fleet.await_answer(worker)
    services.drainer.drain(a_job(services))
    await let_pass(1.0)
    assert asked(services) == []
    services.fleet["d1"].doubted = False
    services.fleet.update(services.fleet["d1"])
    await drained(services)
    assert asked(services) == ["d1"] and outcomes(services) == (1, 0, 0)


@with_virtual_time
async def test_a_relay_drains_where_no_request_has_failed_since_the_view_that_it_has() -> None:
    services = a_router()
    busy, resting = services.fleet["d0"], services.fleet["d1"]
    busy.circuit = ReportedCircuit("d0", lambda message: None, lambda wake_in_s: None)
    busy.circuit.busy(services.loop.time())
    resting.state = WorkerState.DRAINING
    for worker in ("d0", "d1", "d2"):
        script(services, worker)
    await drain_one(services)
    assert asked(services) == ["d2"]


@with_virtual_time
async def test_drains_are_limited_in_parallel_and_all_complete() -> None:
    services = a_router(a_config(decoders=1))
    gate = asyncio.Event()
    upstream = script(services, "d0", gate)
    for _ in range(3 * MAX_CONCURRENT):
        services.drainer.drain(a_job(services))
    await let_pass(TIMEOUT_S / 2)
    assert upstream.under_way == services.fleet["d0"].in_use == MAX_CONCURRENT
    gate.set()
    await drained(services)
    assert outcomes(services) == (3 * MAX_CONCURRENT, 0, 0)
    assert upstream.most_under_way == MAX_CONCURRENT and services.fleet["d0"].in_use == 0


@with_virtual_time
async def test_a_drain_added_while_the_last_ones_end_starts_at_once() -> None:
    services = a_router()

    def drain_one_more() -> None:
        """Once all have been counted: their tasks have ended, and nobody has been told so."""
        if sum(outcomes(services)) < MAX_CONCURRENT:
            services.loop.call_soon(drain_one_more)
        else:
            services.drainer.drain(a_job(services))

    for _ in range(MAX_CONCURRENT):
        services.drainer.drain(a_job(services))
    drain_one_more()
    await let_pass(1)
    assert not services.drainer.pending and outcomes(services) == (MAX_CONCURRENT + 1, 0, 0)


@with_virtual_time
async def test_choices_of_one_request_are_drained_in_sequence_until_a_worker_dies() -> None:
    services, group = a_router(), DrainGroup()
    broken = ConnectFailed("reset", worker="d", tier="decode")
    upstreams = [script(services, f"d{n}", broken) for n in range(3)]
    for _ in range(MAX_CONCURRENT):
        services.drainer.drain(replace(a_job(services), group=group))
    await drained(services)
    assert sum(len(upstream.asked) for upstream in upstreams) == 1
    assert outcomes(services) == (0, MAX_CONCURRENT, MAX_CONCURRENT)


@with_virtual_time
async def test_choices_that_kill_no_worker_are_all_drained() -> None:
    services, group = a_router(), DrainGroup()
    for _ in range(2 * MAX_CONCURRENT):
        services.drainer.drain(replace(a_job(services), group=group))
    services.drainer.drain(a_job(services))
    await drained(services)
    assert outcomes(services) == (2 * MAX_CONCURRENT + 1, 0, 0)


@with_virtual_time
async def test_closing_gives_up_what_is_left_and_holds_no_worker() -> None:
    services = a_router(a_config(decoders=1))
    script(services, "d0", None)
    for _ in range(MAX_CONCURRENT + 1):
        services.drainer.drain(a_job(services))
    await let_pass(1)
    await services.drainer.close()
    assert services.drainer.pending == 0 and services.fleet["d0"].in_use == 0


# -- what another router has left


def a_record(path: Path, *ages_s: float, prefiller_url: str = P0_URL) -> PinRecord:
    """The record of a router that was killed."""
    before = PinRecord(path)
    for number, age_s in enumerate(ages_s):
        before.pin(f"r{number}", prefiller_url, PARAMS, 300, "m", age_s)
    before.close()
    return PinRecord(path)


@with_virtual_time
async def test_kv_left_by_a_killed_router_is_drained_with_a_prompt_of_its_size(tmp_path: Path) -> None:
    services, record = a_router(), a_record(tmp_path / "pins", 3.0)
    upstream = script(services, "d0")
    services.drainer.drain_left(record.left, b"authorization: Bearer k\r\n")
    await drained(services)
    body = orjson.loads(upstream.asked[0].body)
    assert len(body["prompt"]) == 300 and (body["model"], body["max_tokens"], body["stream"]) == ("m", 1, False)
    assert body["kv_transfer_params"] == orjson.loads(PARAMS)
    assert outcomes(services) == (1, 0, 0) and len(record) == 0


@with_virtual_time
@pytest.mark.parametrize(
    ("left_at", "url"), [(P0_URL, P0_URL), ("http://localhost", "http://127.0.0.1:80")], ids=["id", "url"]
)
async def test_kv_left_at_a_prefiller_that_has_another_name_now_is_drained(
    tmp_path: Path, left_at: str, url: str
) -> None:
    services = a_router(a_config(prefill={"workers": [{"url": url, "id": "renamed"}]}))
    script(services, "d0")
    services.drainer.drain_left(a_record(tmp_path / "pins", 3.0, prefiller_url=left_at).left, b"")
    await drained(services)
    assert outcomes(services) == (1, 0, 0)


@with_virtual_time
async def test_kv_left_at_a_server_whose_name_another_one_has_now_is_not_drained(tmp_path: Path) -> None:
    services = a_router(a_config(prefill={"workers": [{"url": "http://other:1", "id": "p0"}]}))
    record = a_record(tmp_path / "pins", 3.0)
    services.drainer.drain_left(record.left, b"")
    await drained(services)
    assert asked(services) == [] and len(record) == 0


@with_virtual_time
async def test_kv_that_may_be_gone_is_never_drained(tmp_path: Path) -> None:
    services = a_router(a_config(prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 50.0}))
    too_old, set_back = 81.0, -3600.0
    records = [
        a_record(tmp_path / "old", too_old, set_back),
        a_record(tmp_path / "gone", 1.0, prefiller_url="http://p9:1"),
    ]
    for record in records:
        services.drainer.drain_left(record.left, b"")
    await drained(services)
    assert asked(services) == [] and outcomes(services) == (0, 0, 0)
    assert [len(record) for record in records] == [0, 0]


@with_virtual_time
async def test_too_old_kv_is_not_drained_even_if_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = a_router(a_config(prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 50.0}))
    script(services, "d0")
    record, unix_s = a_record(tmp_path / "pins", 90.0, 70.0), time.time()
    monkeypatch.setattr(pins.time, "time", lambda: unix_s - 60.0)
    services.drainer.drain_left(record.left, b"")
    await drained(services)
    assert outcomes(services) == (1, 0, 0) and len(record) == 0


@with_virtual_time
async def test_a_pin_is_released_as_its_parameters_are_sent_and_restored_if_no_engine_saw_them(tmp_path: Path) -> None:
    services, record = a_router(), a_record(tmp_path / "pins", 1.0)
    connecting: list[int] = []
    held: list[int] = []

    class Watching(ScriptedUpstream):
        async def request(self, *given: Any, about_to_send: Any, **options: Any) -> Any:
            def watched() -> None:
                about_to_send()
                held.append(len(record))

            connecting.append(len(record))
            return await super().request(*given, about_to_send=watched, **options)

    for worker in services.fleet.of(Role.DECODE):
        worker.upstream = Watching(503)  # type: ignore[assignment]
    services.drainer.drain_left(record.left, b"")
    await let_pass(0.1)
    assert set(connecting) == {1} and set(held) == {0} and len(record) == 1 and services.drainer.pending == 1
    for worker in services.fleet.of(Role.DECODE):
        worker.upstream = Watching(500)  # type: ignore[assignment]
    await drained(services)
    assert set(connecting) == {1} and set(held) == {0} and len(record) == 0 and outcomes(services) == (0, 1, 1)


@with_virtual_time
async def test_drains_that_are_not_finished_at_the_end_are_left_to_the_next_router(tmp_path: Path) -> None:
    services, record = a_router(), a_record(tmp_path / "pins", 1.0, 2.0)
    for name in ("d0", "d1", "d2"):
        script(services, name, 503)
    services.drainer.drain_left(record.left, b"")
    await let_pass(1.0)
    await services.drainer.close()
    record.close()
    assert len(PinRecord(tmp_path / "pins").left) == 2


class Watched:
    """The tickets of a router, and when somebody has looked at all workers."""

    def __init__(self, tickets: Tickets) -> None:
        self._tickets, self.loop, self.now, self.looks = tickets, tickets.loop, tickets.now, list[float]()

    def view(self) -> ClusterView:
        self.looks.append(self.now())
        return self._tickets.view()


@with_virtual_time
async def test_many_drains_look_at_the_cluster_once_in_a_while_and_not_each(monkeypatch: pytest.MonkeyPatch) -> None:
    services = a_router()
    watched = Watched(services.tickets)
    monkeypatch.setattr(services.drainer, "_tickets", watched)
    for _ in range(50):
        services.drainer.drain(a_job(services))
    await drained(services)
    assert outcomes(services) == (50, 0, 0)
    looks = watched.looks
    assert all(later - earlier >= LOOK_S for earlier, later in pairwise(looks)) and 0 < len(looks) < 5
