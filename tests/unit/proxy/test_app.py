"""How the parts are put together: which routes are hot, what large bodies may be sent to, and what a bug ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import create_autospec

import pytest

from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.app import RouterApp, create_app, start
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.coroutines import start_refits, stop, supervised
from balanceroute.proxy.ops.dashboard.recorder import Recorder
from balanceroute.proxy.services import Services
from tests.unit.proxy.client.connections import Connection, a_request
from tests.unit.proxy.virtual_time import a_config, a_router, in_virtual_time, let_pass
from tests.waiting import until

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
def test_only_prompts_may_be_large(path: bytes, large: bool) -> None:
    async def test(app: RouterApp) -> None:
        request: Request = Request("POST", path, [], http_1_0=False)
        app.gate(request)
        assert (request.body_limit_bytes is None) == large

    living(test)


def test_prompts_are_served_without_asgi_between_startup_and_shutdown_alone() -> None:
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


def test_what_the_edge_refuses_is_counted() -> None:
    async def test(app: RouterApp) -> None:
        app.refused("overload")
        assert app.services.metrics.edge_refusals.value("overload") == 1

    living(test)


@pytest.mark.parametrize("strict", [False, True])
def test_a_coroutine_that_meets_a_bug_begins_anew_unless_bugs_are_fatal(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        services = a_router()
        services.strict = strict
        fails = [RuntimeError("a bug"), RuntimeError("another")]
        fold = services.metrics.fold

        def broken() -> None:
            if fails:
                raise fails.pop()
            fold()

        services.metrics.fold = broken  # type: ignore[method-assign]
        start(services, a_recorder(services))
        await let_pass(5.0)
        assert services.metrics.tasks_failed.value("pool_reaper") == (1 if strict else 2)
        assert services.tasks["pool_reaper"].done() == strict
        if strict:
            with pytest.raises(RuntimeError):
                await stop(services)
        else:
            await stop(services)
        assert all(task.done() for task in services.tasks.values())

    in_virtual_time(test)
    (record, *_) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["where"] == "pool_reaper" and "state" in vars(record)


def test_a_coroutine_begins_anew_also_after_a_bug_that_has_left_no_state_that_can_be_told() -> None:
    async def test() -> None:
        services, begun = a_router(), []
        services.strict = False
        services.ledger.state = None  # type: ignore[method-assign,assignment]

        async def run() -> None:
            begun.append(True)
            if len(begun) == 1:
                raise RuntimeError("a bug")
            await asyncio.Event().wait()

        task = services.loop.create_task(supervised(services, "mine", run))
        await let_pass(1.0)
        assert len(begun) == 2 and not task.done()
        task.cancel()

    in_virtual_time(test)


def a_recorder(services: Services) -> Recorder:
    return Recorder(lambda: services)


def test_another_predictor_s_refits_take_the_place_of_the_last_one_s() -> None:
    async def test() -> None:
        services, begun = a_router(), []

        async def refit() -> None:
            begun.append(True)
            await asyncio.Event().wait()

        services.ledger.forecasts = forecasts = create_autospec(Forecasts)
        forecasts.runner.return_value = refit
        start_refits(services)
        first = services.tasks["refits"]
        await until(lambda: len(begun) == 1)
        start_refits(services)
        await until(lambda: len(begun) == 2)
        assert first.cancelled() and not services.tasks["refits"].done()
        services.ledger.forecasts = None
        start_refits(services)
        assert "refits" not in services.tasks

    in_virtual_time(test)
