"""Which workers a forwarded call asks, in which order, and for how long a client waits for them."""

import asyncio
import tracemalloc
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from balanceroute.errors import InvalidRequest, NoHealthyWorkers
from balanceroute.proxy.life.errors import DeadlineExceeded
from balanceroute.proxy.ops.forwarding import GET_TIMEOUT_S, TIMEOUT_S, TRYING_S, WITNESSES, Forwarding
from balanceroute.proxy.ops.services import Services
from tests.unit.proxy.virtual_time import Answer, Page, ScriptedUpstream, a_config, a_router, script, with_virtual_time

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'


def a_call(path: str, timeout: bytes | None, method: str = "POST") -> Request:
    headers = [] if timeout is None else [(b"x-request-timeout", timeout)]

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY}

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    return Request(scope | {"balanceroute.route": path}, receive)


def with_silent_workers(**limits: float) -> Services:
    services = a_router(a_config(1, 2, limits=limits))
    for worker in services.fleet:
        script(services, worker.id, None)
    return services


@pytest.mark.parametrize(
    ("path", "method", "timeout", "limits", "after_s"),
    [
        ("/tokenize", "POST", b"2.5", {}, 2.5),
        ("/tokenize", "POST", b"40", {}, 40.0),
        ("/v1/models", "GET", b"2", {}, 2.0),
        ("/v1/messages/count_tokens", "POST", b"2", {}, 2.0),
        ("/tokenize", "POST", None, {"request_timeout_s": 45.0}, 45.0),
    ],
    ids=["first worker", "second worker", "models", "count tokens", "the router's own"],
)
@with_virtual_time
async def test_a_forwarded_request_ends_with_504_at_its_own_time_limit(
    path: str, method: str, timeout: bytes | None, limits: dict[str, float], after_s: float
) -> None:
    services, now = with_silent_workers(**limits), asyncio.get_running_loop().time
    forwarding, begun_s = Forwarding(lambda: services), now()
    handler = forwarding.count_tokens if path.endswith("count_tokens") else forwarding.forward
    with pytest.raises(DeadlineExceeded, match="X-Request-Timeout"):
        await handler(a_call(path, timeout, method))
    assert now() - begun_s == pytest.approx(after_s)


@with_virtual_time
async def test_a_call_to_every_worker_waits_no_longer_than_its_caller() -> None:
    services, now = with_silent_workers(), asyncio.get_running_loop().time
    begun_s = now()
    answer = await Forwarding(lambda: services).to_all(a_call("/start_profile", b"2"))
    assert answer.status_code == 500 and len(orjson.loads(answer.body)["failed"]) == 3
    assert now() - begun_s == pytest.approx(2.0)


@with_virtual_time
async def test_a_time_limit_that_is_no_number_of_seconds_is_refused_on_forwarded_routes_too() -> None:
    services = with_silent_workers()
    with pytest.raises(InvalidRequest) as refused:
        await Forwarding(lambda: services).forward(a_call("/tokenize", b"soon"))
    assert refused.value.param == "X-Request-Timeout"


def answering(services: Services, answer: Answer) -> dict[str, ScriptedUpstream]:
    """Have every worker answer so."""
    upstreams = {worker.id: ScriptedUpstream(answer) for worker in services.fleet}
    for worker in services.fleet:
        worker.upstream = upstreams[worker.id]  # type: ignore[assignment]
    return upstreams


def asked(upstreams: dict[str, ScriptedUpstream]) -> list[str]:
    return [worker_id for worker_id, upstream in upstreams.items() if upstream.asked]


@pytest.mark.parametrize(("method", "path", "each_s"), [("GET", "/v1/models", 3.0), ("POST", "/tokenize", 30.0)])
@with_virtual_time
async def test_a_call_ends_soon_although_hundreds_of_workers_are_silent(method: str, path: str, each_s: float) -> None:
    services = a_router(a_config(100, 100))
    answering(services, None)
    began_s = services.loop.time()
    with pytest.raises(NoHealthyWorkers):
        await Forwarding(lambda: services)._first_answer(method, path, b"{}", [])
    assert each_s == {"GET": GET_TIMEOUT_S, "POST": TIMEOUT_S}[method]
    assert services.loop.time() - began_s <= TRYING_S + each_s


@with_virtual_time
async def test_another_worker_is_asked_however_late_the_first_one_is() -> None:
    services = a_router(a_config(1, 1))
    answering(services, 200)["p0"].answers = [None]
    answer = await Forwarding(lambda: services)._first_answer("POST", "/tokenize", b"{}", [])
    assert answer.status_code == 200


@with_virtual_time
async def test_a_worker_that_operators_have_drained_is_asked_only_if_no_other_answers() -> None:
    services = a_router(a_config(2, 1))
    fleet, forwarding = services.fleet, Forwarding(lambda: services)
    fleet.drain(fleet["p0"])
    fleet.set_healthy(fleet["p1"], False)
    upstreams = answering(services, 200)
    await forwarding._first_answer("GET", "/v1/models", b"", [])
    assert asked(upstreams) == ["d0"]
    upstreams = answering(services, 200)
    upstreams["d0"].answers = [500]
    await forwarding._first_answer("GET", "/v1/models", b"", [])
    assert asked(upstreams) == ["p0", "d0"]


@pytest.mark.parametrize("odd", [401, 403, 404, 408, 429, 202, 307, 500])
@with_virtual_time
async def test_a_worker_that_is_busy_or_has_another_model_is_no_answer_while_another_one_has_it(odd: int) -> None:
    services = a_router(a_config(2, 1))
    upstreams = answering(services, Page(body=b'{"count":7}'))
    upstreams["p0"].answers = [Page(body=b'{"error":{"message":"not here"}}', status=odd)]
    answer = await Forwarding(lambda: services).count_tokens(a_call("/v1/messages/count_tokens", None))
    assert (answer.status_code, answer.body) == (200, b'{"input_tokens":7}')
    assert asked(upstreams) == ["p0", "p1"]


@pytest.mark.parametrize(
    ("status", "workers"), [(400, 1), (401, WITNESSES), (404, WITNESSES), (413, 1), (422, 1), (429, 4), (503, 4)]
)
@with_virtual_time
async def test_what_workers_refuse_is_asked_of_no_more_of_them_than_it_takes_to_be_sure(
    status: int, workers: int
) -> None:
    services = a_router(a_config(2, 2))
    upstreams = answering(services, Page(body=b'{"error":{"message":"no"}}', status=status))
    answer = await Forwarding(lambda: services)._first_answer("POST", "/tokenize", b"{}", [])
    assert answer.status_code == status and len(asked(upstreams)) == workers


@with_virtual_time
async def test_a_server_with_many_ranks_is_asked_once() -> None:
    ranks = [{"url": "http://d:1", "dp_rank": rank} for rank in range(16)]
    services = a_router(a_config(1, 1, decode={"workers": ranks, "max_num_seqs": 8}))
    upstreams = answering(services, None)
    with pytest.raises(NoHealthyWorkers):
        await Forwarding(lambda: services)._first_answer("POST", "/tokenize", b"{}", [])
    assert len(asked(upstreams)) == 2


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
@with_virtual_time
async def test_millions_of_token_ids_are_checked_without_an_object_for_each(path: str) -> None:
    """They took half a gigabyte, and stopped every stream meanwhile."""
    services = a_router(a_config(1, 1))
    ids = 200_000
    page = Page(body=b'{"count":%d,"tokens":[%b]}' % (ids, b",".join([b"12345"] * ids)))
    answering(services, 200)["p0"].answers = [page]
    forwarding = Forwarding(lambda: services)
    handler = forwarding.count_tokens if path.endswith("count_tokens") else forwarding.forward
    tracemalloc.start()
    try:
        answer = await handler(a_call(path, None))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(page.body)
    finally:
        tracemalloc.stop()
    assert answer.body == (page.body if path == "/tokenize" else b'{"input_tokens":%d}' % ids)
