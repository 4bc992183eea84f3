"""How long a client waits for workers on the routes that any one of them answers."""

import asyncio
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.life.errors import DeadlineExceeded
from balanceroute.proxy.ops.forwarding import Forwarding
from balanceroute.proxy.ops.services import Services
from tests.unit.proxy.virtual_time import a_config, a_router, script, with_virtual_time

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
