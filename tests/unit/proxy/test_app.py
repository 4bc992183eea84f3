"""How the parts are put together: which routes are hot, and what large bodies may be sent to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from balanceroute.errors import InvariantError
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.client.head import Request
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.virtual_time import a_config, with_virtual_time

COROUTINES = {
    "prefill_dispatcher",
    "decode_dispatcher",
    "metrics_poller",
    "pool_reaper",
    "health",
    "recorder",
    "certificates",
}


@asynccontextmanager
async def living() -> AsyncIterator[RouterApp]:
    """An application between its startup and its shutdown."""
    app = create_app(a_config(), strict=True)
    async with app.router.lifespan_context(app):
        yield app


@with_virtual_time
@pytest.mark.parametrize(
    ("path", "large"),
    [
        (b"/v1/completions", True),
        (b"/v1/messages", True),
        (b"/v1/metaserver/token", True),
        (b"/tokenize", True),
        (b"/detokenize", True),
        (b"/instances/add", False),
        (b"/routing/policy", False),
        (b"/v1", False),
        (b"/nothing", False),
    ],
)
async def test_only_prompt_routes_accept_large_bodies(path: bytes, large: bool) -> None:
    async with living() as app:
        request: Request = Request("POST", path, [], http_1_0=False)
        app.gate(request)
        assert (request.body_limit_bytes is None) == large


@with_virtual_time
async def test_prompts_bypass_asgi_only_between_startup_and_shutdown() -> None:
    async with living() as app:
        assert set(app.hot) == {"/v1/completions", "/v1/chat/completions", "/v1/messages"}
        for path, make in app.hot.items():
            connection = Connection()
            handler = make(a_request(b"", path.encode()), connection.response())
            handler.check()
            handler.abandoned()
        assert app.services.metrics.requests.value("cancelled") == 3
        assert set(app.services.tasks) == COROUTINES
    assert all(task.done() for task in app.services.tasks.values())


@with_virtual_time
async def test_requests_that_the_edge_refuses_are_counted() -> None:
    async with living() as app:
        app.refused("overload")
        assert app.services.metrics.edge_refusals.value("overload") == 1


@with_virtual_time
async def test_a_bug_in_a_route_of_operators_is_counted_as_one() -> None:
    def broken() -> None:
        raise InvariantError("a bug")

    async with living() as app:
        app.services.keep_changes = broken
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            reply = await client.post("/instances/drain", json={"type": "decode", "instances": "d0:1"})
        assert reply.status_code == 500 and app.services.metrics.tasks_failed.value("request") == 1
