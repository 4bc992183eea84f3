"""The application: routes and lifespan, nothing else.

The two hot routes are looked up before Starlette's middleware, whose wrappers around `send` would cost every event of
every stream two more coroutines.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from balanceroute.build import build_scheduler, worker_specs
from balanceroute.config import Config
from balanceroute.core.types import Admit
from balanceroute.journal import RecordingScheduler
from balanceroute.proxy.admin import Admin, http_error, state
from balanceroute.proxy.circuit import CircuitConfig
from balanceroute.proxy.connectors import connector_for
from balanceroute.proxy.dashboard import Dashboard
from balanceroute.proxy.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.drainer import Drainer
from balanceroute.proxy.exchange import CompletionsRoute
from balanceroute.proxy.fleet import Fleet, FleetConfig
from balanceroute.proxy.forecasts import Forecasts, build_forecasts
from balanceroute.proxy.forwarding import Forwarding
from balanceroute.proxy.health import HealthMonitor
from balanceroute.proxy.instruments import StageClock
from balanceroute.proxy.layerwise import Metaserver
from balanceroute.proxy.ledger import Ledger
from balanceroute.proxy.metrics import Metrics
from balanceroute.proxy.metrics_poller import MetricsPoller
from balanceroute.proxy.pool_reaper import PoolReaper
from balanceroute.proxy.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.services import Services

log = logging.getLogger(__name__)

_RESTART_S = 0.1


class RouterApp(Starlette):
    """Starlette, with the hot routes in front of it; `services` exist between startup and shutdown."""

    services: Services
    hot: dict[str, CompletionsRoute]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self.hot.get(scope["path"])
            if route is not None:
                await route(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(
    config: Config, *, forecasts: Forecasts | None = None, journal: Path | None = None, strict: bool = False
) -> RouterApp:
    """The router as an ASGI application.

    Args: forecasts: the predictor; None for the configuration's. journal: a file for every decision. strict: our own
    bugs end the application (tests).
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        assert isinstance(app, RouterApp)
        predictor = forecasts or build_forecasts(config)
        services = app.services = build_services(config, asyncio.get_running_loop(), predictor, strict, journal)
        app.hot = {
            "/v1/completions": CompletionsRoute(services, "completions"),
            "/v1/chat/completions": CompletionsRoute(services, "chat"),
        }
        tasks = start(services)
        try:
            yield
        finally:
            await stop(services, tasks)

    routes = [part for kind in (Admin, Forwarding, Dashboard) for part in kind(lambda: app.services).routes()]
    if config.connector == "mooncake_layerwise":
        routes += Metaserver(lambda: app.services).routes()
    app = RouterApp(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: http_error})
    app.hot = {}
    return app


def build_services(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    forecasts: Forecasts | None,
    strict: bool,
    journal: Path | None = None,
) -> Services:
    """Put the parts together; nothing runs yet."""
    stage_clock = StageClock()
    scheduler = build_scheduler(config, loop.time(), stage_clock, journal)
    ledger = Ledger(scheduler, loop, forecasts, stage_clock)
    metrics = Metrics(scheduler.snapshot, config.routing.policy, stage_clock)
    if forecasts is not None:
        metrics.include(forecasts.metrics)
    circuit = CircuitConfig(config.health.failure_threshold, config.health.open_for_s)
    fleet = Fleet(ledger, FleetConfig(circuit, config.limits.client_buffer_bytes), metrics.forget_worker)
    for spec in worker_specs(config):
        fleet.connect(spec)
    connector = connector_for(config)
    drainer = Drainer(fleet, ledger, metrics, connector, config.kv_pin_s)
    return Services(config, ledger, fleet, metrics, drainer, connector, forecasts, strict=strict)


def start(services: Services) -> list[asyncio.Task[None]]:
    """Start the coroutines."""

    def admitted(admission: Admit) -> None:
        services.metrics.admissions.inc(admission.worker, f"stage_{admission.stage}")

    coroutines: dict[str, Callable[[], Awaitable[None]]] = {
        "prefill_dispatcher": PrefillDispatcher(services.ledger).run,
        "decode_dispatcher": DecodeDispatcher(services.ledger, services.metrics.admit_duration, admitted).run,
        "metrics_poller": MetricsPoller(services).run,
        "pool_reaper": PoolReaper(services).run,
        "health": HealthMonitor(services).run,
    }
    if services.forecasts is not None:
        refits = services.forecasts.runner(services.ledger.scheduler.snapshot)
        if refits is not None:
            coroutines["refits"] = refits
    return [services.loop.create_task(_supervised(services, name, run), name=name) for name, run in coroutines.items()]


async def stop(services: Services, tasks: list[asyncio.Task[None]]) -> None:
    """End everything; what still runs is cut off."""
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await services.drainer.close()
    services.fleet.close()
    if services.forecasts is not None:
        services.forecasts.close()
    if isinstance(services.ledger.scheduler, RecordingScheduler):
        services.ledger.scheduler.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


def _supervised(services: Services, name: str, run: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
    async def forever() -> None:
        while True:
            try:
                await run()
            except Exception:
                # a router that decides nothing any more is worse than one that has met a bug of its own
                services.metrics.tasks_failed.inc(name)
                log.exception("internal error", extra={"where": name, "state": state(services)})
                if services.strict:
                    raise
                await asyncio.sleep(_RESTART_S)

    return forever()
