"""The application: routes and lifespan, nothing else."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from balanceroute.build import worker_specs
from balanceroute.config import Config
from balanceroute.core.types import Admit
from balanceroute.errors import BalanceRouteError, InvariantError
from balanceroute.proxy.admission.decision_log import DecisionLog
from balanceroute.proxy.admission.decode_dispatcher import DecodeDispatcher
from balanceroute.proxy.admission.forecasts import Forecasts, build_forecasts
from balanceroute.proxy.admission.ledger import open_ledger
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from balanceroute.proxy.admission.tickets import Tickets
from balanceroute.proxy.client.edge import Handler
from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.messages_exchange import MessagesExchange
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.coroutines import after, start_all, start_refits, stop
from balanceroute.proxy.life.pool_reaper import PoolReaper
from balanceroute.proxy.ops.admin import Admin, http_error, internal_error
from balanceroute.proxy.ops.dashboard import SIGN_IN, Dashboard
from balanceroute.proxy.ops.dashboard.recorder import Recorder
from balanceroute.proxy.ops.forwarding import Forwarding
from balanceroute.proxy.ops.guard import ERROR_HANDLERS, guarded, with_message_errors, with_request_id
from balanceroute.proxy.ops.metaserver import Metaserver
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.ops.steering import Steering
from balanceroute.proxy.perimeter.access import DASHBOARD_PATH
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.reload import reload
from balanceroute.proxy.telemetry.instruments import StageClock
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.process_gauges import this_process
from balanceroute.proxy.wire.connectors import METASERVER_PATH, Callbacks
from balanceroute.proxy.wire.message_errors import MESSAGES_PATH, is_messages_path, message_refusal
from balanceroute.proxy.workers.drainer import Drainer
from balanceroute.proxy.workers.fleet import Fleet, FleetConfig
from balanceroute.proxy.workers.health import HealthMonitor
from balanceroute.proxy.workers.metrics_poller import MetricsPoller
from balanceroute.proxy.workers.pins import Pin, PinRecord
from balanceroute.proxy.workers.upstream import checked_lines

log = logging.getLogger(__name__)

_LARGE = ("/v1/", "/tokenize", "/detokenize")
_SMALL_BYTES = 2**20  # bytes of a body: the URLs of ten thousand workers


class ClientApp(Starlette):
    """A `Site` of the edge: Starlette, and the hot routes, which bypass ASGI.

    `config`: its configuration. `services` and the handlers in `hot` exist between startup and shutdown. `handed_over`:
    another process accepts clients in place of this one. `failure`: why the startup failed.
    """

    services: ClientServices
    handed_over = False
    failure: BalanceRouteError | None = None

    def __init__(
        self,
        config: Config,
        tls: Tls,
        routes: Sequence[Route],
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    ) -> None:
        handlers: dict[Any, Callable[..., Any]] = {HTTPException: http_error, Exception: internal_error}

        @asynccontextmanager
        async def noted(app: Starlette) -> AsyncIterator[None]:
            async with AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(lifespan(app))
                except BalanceRouteError as error:
                    self.failure = error
                    raise
                yield

        super().__init__(routes=routes, lifespan=noted, exception_handlers=handlers | ERROR_HANDLERS)
        self.config, self.tls = config, tls
        self.hot: Mapping[str, Callable[[Request, Response], Handler]] = {}
        self.router.redirect_slashes = False  # Starlette would redirect to the client's Host; see `http_error`

    @property
    def leaving(self) -> bool:
        """See `Site`. A client that keeps its connection in a drain might send its next request as that is closed."""
        return self.handed_over or self.services.tickets.draining

    def gate(self, request: Request) -> None:
        """Set the limit of the body (large only for prompts), its holder, and the headers of a refusal.

        A decode worker's callback always finds room: it is not made again, and those who hold the room may wait for it.
        """
        request.has_room = request.path.startswith(METASERVER_PATH)
        if not request.path.startswith(_LARGE):
            request.body_limit_bytes = _SMALL_BYTES
        elif request.path not in self.hot:  # hot routes do so themselves
            perimeter = self.services.perimeter
            request.holder = perimeter.holder(request.headers)
            request.refusal_headers = perimeter.pages.answer_headers(request.header(b"origin"))

    def refused(self, reason: str) -> None:
        """Count a request that the edge has refused."""
        self.services.metrics.edge_refusals.inc(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "http":
            send = with_request_id(scope, send)
            if is_messages_path(scope["path"]):
                send = with_message_errors(scope, send)
        await super().__call__(scope, receive, send)


class RouterApp(ClientApp):
    """The application of a process that decides."""

    services: Services


def create_app(
    config: Config, *, forecasts: Forecasts | None = None, journal: Path | None = None, strict: bool = False
) -> RouterApp:
    """The router as an ASGI application.

    Args: forecasts: the predictor; None for the configuration's. journal: a file for every decision. strict: our own
    bugs end the application (tests).

    Raises: ConfigError: a file that the configuration names is wrong.
    """

    perimeter, tls = Perimeter(config), Tls(config)
    pins = None
    if config.lifecycle.pins_file is not None and config.kv_pin_s is not None:
        pins = PinRecord(config.lifecycle.pins_file)
    dashboard = Dashboard(lambda: app.services)
    parts = operator_parts(lambda: app.services, dashboard, config)
    if config.decode_first:
        parts.append(Metaserver(lambda: app.services))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        predictor = forecasts or build_forecasts(config)
        loop = asyncio.get_running_loop()
        services = app.services = build_services(config, loop, predictor, strict, journal, perimeter, tls, pins)
        app.hot = hot_routes(services)
        for worker in services.fleet:
            services.fleet.await_answer(worker)  # it may be down
        start(services, dashboard.recorder)
        try:
            yield
        finally:
            await stop(services)

    routes = guarded_routes(lambda: app.services, (route for part in parts for route in part.routes()))
    app = RouterApp(config, tls, routes, lifespan)
    return app


def guarded_routes(services: Callable[[], ClientServices], routes: Iterable[Route]) -> list[Route]:
    """The routes behind their classes; `services` exist once a request comes. Raises: KeyError: see `guarded`."""
    return [
        guarded(
            route,
            lambda: services().perimeter,
            lambda: services().metrics.refusals,
            SIGN_IN if route.path == DASHBOARD_PATH else None,
        )
        for route in routes
    ]


def hot_routes(services: ClientServices) -> Mapping[str, Callable[[Request, Response], Handler]]:
    """The handlers of the hot routes."""

    def messages(request: Request, response: Response) -> Handler:
        response.refusal = message_refusal
        return MessagesExchange(services, request, response)

    return {
        "/v1/completions": partial(Exchange, services, "completions"),
        "/v1/chat/completions": partial(Exchange, services, "chat"),
        MESSAGES_PATH: messages,
    }


Part = Admin | Forwarding | Dashboard | Metaserver | Steering


def operator_parts(services: Callable[[], Services], dashboard: Dashboard, read: Config) -> list[Part]:
    """The operators' routes of a process that decides; `read`: its configuration as it was read."""

    async def switch(new: Config) -> None:
        await reload(services(), new, services().perimeter)  # no file is read again for a change of policy

    return [
        Admin(services),
        Forwarding(services, lambda worker_id: services().ledger.forget_prefixes(worker_id)),
        dashboard,
        Steering(services, switch, read),
    ]


def methods_served(config: Config) -> dict[str, list[str]]:
    """The methods of each route of a process that decides, by path, for a relay that passes requests on to it."""

    def nobody() -> Services:
        raise InvariantError("these routes are asked for their methods alone")

    parts = operator_parts(nobody, Dashboard(nobody), config)
    return {route.path: sorted(route.methods or ()) for part in parts for route in part.routes()}


def build_services(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    forecasts: Forecasts | None,
    strict: bool,
    journal: Path | None = None,
    perimeter: Perimeter | None = None,
    tls: Tls | None = None,
    pins: PinRecord | None = None,
) -> Services:
    """Make the services; nothing runs yet."""
    stage_clock = StageClock()
    ledger = open_ledger(config, loop, forecasts, stage_clock, journal)
    metrics = Metrics(ledger.view, config.routing.policy, stage_clock)
    if forecasts is not None:
        metrics.include(forecasts.metrics)
    tls = tls or Tls(config)
    fleet = Fleet(ledger, FleetConfig.of(config, tls.for_workers), metrics.forget_worker)
    metrics.withdrawn, metrics.processes, metrics.expiries = fleet.withdrawn, this_process, tls.expiries
    for spec in worker_specs(config):
        fleet.connect(spec)
    tickets = Tickets(ledger, loop)
    drainer = Drainer(fleet, tickets, metrics, config.kv_pin_s)
    perimeter = perimeter or Perimeter(config)
    return Services(
        config=config,
        tickets=tickets,
        ledger=ledger,
        fleet=fleet,
        metrics=metrics,
        drainer=drainer,
        callbacks=Callbacks(config.callback_url),
        pins=pins,
        perimeter=perimeter,
        tls=tls,
        decisions=DecisionLog(ledger),
        forecasts=forecasts,
        keyer=None if forecasts is None else forecasts.keys,
        strict=strict,
    )


def health_monitor(services: Services) -> HealthMonitor:
    """The monitor of a router's workers."""
    return HealthMonitor(
        services.fleet,
        services.loop,
        lambda: services.config,
        services.attention,
        lambda worker_id: services.awaited().get(worker_id, math.inf),
        services.internal_error,
    )


def metrics_poller(services: Services) -> MetricsPoller:
    """The poller of a router's workers."""
    return MetricsPoller(
        services.fleet,
        services.ledger,
        services.metrics,
        services.drainer,
        lambda: services.config,
        services.internal_error,
    )


def start(services: Services, recorder: Recorder, settled: asyncio.Event | None = None) -> None:
    """Start the coroutines. `settled`: nothing is decided before it is set."""
    monitor = health_monitor(services)
    services.check_health = monitor.check_now

    def admitted(admission: Admit) -> None:
        services.metrics.admissions.inc(admission.worker, f"stage_{admission.stage}")

    dispatcher = DecodeDispatcher(services.ledger, services.metrics.admit_duration, admitted, services.decisions)
    coroutines: dict[str, Callable[[], Awaitable[None]]] = {
        "prefill_dispatcher": after(settled, PrefillDispatcher(services.ledger).run),
        "decode_dispatcher": after(settled, dispatcher.run),
        "metrics_poller": metrics_poller(services).run,
        "pool_reaper": PoolReaper(services, services.ledger.expire).run,
        "health": monitor.run,
        "recorder": recorder.run,
        "certificates": services.tls.watch,
    }
    if services.pins is not None:
        coroutines["pins"] = services.pins.watch
    start_all(services, coroutines)
    start_refits(services)
    if services.pins is not None:
        drain_left(services, services.pins.left)


def drain_left(services: ClientServices, pins: Iterable[Pin]) -> None:
    """Drain the KV that a former process has left pinned."""
    authorization = services.perimeter.authorization_for([])
    headers = [(b"authorization", authorization)] if authorization else []
    services.drainer.drain_left(pins, checked_lines(headers))
