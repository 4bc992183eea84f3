"""How the parts are put together: which routes are hot, and what large bodies may be sent to."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.client.head import Request
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.virtual_time import a_config, in_virtual_time

COROUTINES = {
    "prefill_dispatcher",
    "decode_dispatcher",
    "metrics_poller",
    "pool_reaper",
    "health",
    "recorder",
    "certificates",
}


def living(test: Callable[[RouterApp], Awaitable[None]], **sections: Any) -> None:
    """Run a test between startup and shutdown of an application."""

    async def test_() -> None:
        app = create_app(a_config(**sections), strict=True)
        async with app.router.lifespan_context(app):
            await test(app)

    in_virtual_time(test_)


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
def test_only_prompt_routes_accept_large_bodies(path: bytes, large: bool) -> None:
    async def test(app: RouterApp) -> None:
        request: Request = Request("POST", path, [], http_1_0=False)
        app.gate(request)
        assert (request.body_limit_bytes is None) == large

    living(test)


def test_prompts_bypass_asgi_only_between_startup_and_shutdown() -> None:
    seen: list[RouterApp] = []

    async def test(app: RouterApp) -> None:
        seen.append(app)
        assert set(app.hot) == {"/v1/completions", "/v1/chat/completions", "/v1/messages"}
        for path, make in app.hot.items():
            connection = Connection()
            handler = make(a_request(b"", path.encode()), connection.response())
            handler.check()
            handler.abandoned()
        assert app.services.metrics.requests.value("cancelled") == 3
        assert set(app.services.tasks) == COROUTINES

    living(test)
    assert all(task.done() for task in seen[0].services.tasks.values())


def test_requests_that_the_edge_refuses_are_counted() -> None:
    async def test(app: RouterApp) -> None:
        app.refused("overload")
        assert app.services.metrics.edge_refusals.value("overload") == 1

    living(test)
