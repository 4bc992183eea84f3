"""The process around the application: uvicorn on uvloop, one worker, and what signals mean.

SIGTERM, SIGINT     drain: readiness fails, new requests get 503 with Retry-After, running ones may finish within
                    `lifecycle.drain_timeout_s`, then they are aborted
the same again      end now
SIGHUP              reload what may change (`reload.py`)
"""

import asyncio
import gc
import logging
import math
import signal
import sys
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from balanceroute.config import Config
from balanceroute.errors import ConfigError, Rejected
from balanceroute.proxy.app import RouterApp
from balanceroute.proxy.client_transport import CLIENT_CONNECTION, ClientConnection, HeadAndBody, Watches
from balanceroute.proxy.hotpath import COMPILED
from balanceroute.proxy.ledger import RETRY_AFTER_S
from balanceroute.proxy.responses import error_body, send_error
from balanceroute.proxy.services import Services

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001  # Python's own is 0.005
_LOOK_S = 0.05
_ABORT_S = 3.0


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """The application for connections above the limit: uvicorn's own answers in plain text and says no time."""
    text = "The router has as many client connections as it may have; try again shortly."
    await send_error(send, Rejected(text, retry_after_s=RETRY_AFTER_S), [(b"connection", b"close")])


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which waits for ever for a request that never comes, with an end to that wait.

    The timer runs from the connection, or from the first byte of a later request, to the end of its headers; where
    these come in one read, as they do, no timer is made.

    A connection that waits for its next request has no timer either: the server looks at all of them once per second
    (`close_if_idle`), where uvicorn makes and cancels one per request.

    Above `max_connections` everything but GET is refused; an operator and a liveness probe still see the router.
    """

    header_timeout_s = 30.0
    keep_alive_s = 75.0
    max_connections = 10_000

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first request must come."""
        super().connection_made(cast(asyncio.Transport, HeadAndBody(transport, self.loop)))
        self._watches: Watches = {}
        self._in_head = True
        self._idle_since_s = math.inf
        self._late: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._headers_are_here()
        super().connection_lost(exc)
        for on_gone in list(self._watches.values()):
            on_gone()
        self._watches.clear()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        super().data_received(data)
        if self._in_head and self._late is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        self._idle_since_s = math.inf
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers have come."""
        self._headers_are_here()
        self._idle_since_s = math.inf  # it may have begun while the last answer was under way, which ended since
        refused = len(self.connections) > self.max_connections and self.parser.get_method() != b"GET"
        self.app = too_many_connections if refused else self.config.loaded_app
        super().on_headers_complete()
        extensions: dict[str, Any] = {CLIENT_CONNECTION: ClientConnection(self.cycle, self._watches)}
        self.cycle.scope["extensions"] = extensions

    def on_response_complete(self) -> None:
        """The next request, if it is here already; else the client has `keep_alive_s` for it."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since_s = self.loop.time()

    def close_if_idle(self, now: float) -> None:
        """Close the connection if no request has begun for `keep_alive_s` after the last."""
        if now - self._idle_since_s > self.keep_alive_s:
            self._give_up()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP: an OpenAI error like every other, where uvicorn has plain text."""
        body = error_body(400, msg)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        self.transport.close()

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _headers_are_here(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server whose stop is a drain first."""

    def __init__(self, app: RouterApp, config: Config, on_reload: Callable[[Services], None] | None = None) -> None:
        listen, limits = config.listen, config.limits
        bounds = {
            "header_timeout_s": limits.client_header_timeout_s,
            "keep_alive_s": limits.client_keep_alive_s,
            "max_connections": limits.max_connections,
        }
        super().__init__(
            uvicorn.Config(
                app,
                host=listen.host,
                port=listen.port,
                loop="uvloop",
                http=type("Protocol", (ClientProtocol,), bounds),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                backlog=4096,
                timeout_graceful_shutdown=5,
            )
        )
        self._app, self._router_config, self._on_reload = app, config, on_reload
        self._drain: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's ten looks per second; every tenth is for connections that nobody uses."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                cast(ClientProtocol, connection).close_if_idle(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal drains, the second ends."""
        services = getattr(self._app, "services", None)
        if services is None or self._drain is not None or self.should_exit:
            log.warning("ending now", extra={"signal": sig})
            self.should_exit = self.force_exit = True
            return
        services.loop.call_soon_threadsafe(self._begin_drain, services)

    def _begin_drain(self, services: Services) -> None:
        if self._drain is None:
            services.ledger.scheduler.draining = True
            log.warning("draining", extra={"requests": services.exchanges})
            self._drain = services.loop.create_task(self._until_drained(services))

    async def _until_drained(self, services: Services) -> None:
        deadline = services.loop.time() + services.config.lifecycle.drain_timeout_s
        while (services.exchanges or services.drainer.pending) and services.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        if services.exchanges:
            log.warning("aborting requests", extra={"requests": services.exchanges})
            services.abort_all()
            deadline = services.loop.time() + _ABORT_S  # their error events go out, what they had pinned is drained
            while (services.exchanges or services.drainer.pending) and services.loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and say where."""
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            # What exists now stays: 53,000 objects that no full collection has to walk again, which stopped every
            # stream for some 20 ms (100 ms on a busy machine).
            gc.collect()
            gc.freeze()
            # A re-fit's thread may otherwise keep the interpreter for 5 ms whenever the loop comes back from a system
            # call, and an event takes several: gaps of 8 ms were seen.
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            sock = self.servers[0].sockets[0].getsockname()
            log.info("listening", extra={"host": sock[0], "port": sock[1], "hot_path_compiled": COMPILED})
            if self._on_reload is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        assert self._on_reload is not None
        try:
            self._on_reload(self._app.services)
        except ConfigError as error:
            log.warning("reload refused", extra={"error": str(error)})


def serve(app: RouterApp, config: Config, on_reload: Callable[[Services], None] | None = None) -> None:
    """Run until a signal ends it. Raises: ConfigError: the address cannot be listened on."""
    server = Server(app, config, on_reload)
    try:
        server.run()
    except SystemExit:
        raise ConfigError(f"listen: cannot listen on {config.listen.host}:{config.listen.port}") from None
    if not server.started:
        raise ConfigError(f"listen: cannot start on {config.listen.host}:{config.listen.port}")
