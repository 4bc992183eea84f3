"""The server process: uvicorn on uvloop, one worker, and the handling of signals.

SIGTERM, SIGINT     drain: readiness fails, new requests get 503 with Retry-After, running ones may finish within
                    `lifecycle.drain_timeout_s`, then they are aborted
the same again      end now
SIGHUP              reload what may change (`reload.py`)
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from balanceroute import native
from balanceroute.config import Config
from balanceroute.config.addresses import NO_ADDRESS, host_in_url
from balanceroute.errors import ConfigError, InputError
from balanceroute.proxy.app import ClientApp
from balanceroute.proxy.client.acceptor import BACKLOG, Acceptor
from balanceroute.proxy.client.edge import limits_of
from balanceroute.proxy.client.relay_loads import alone
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.client.uvicorn_protocol import protocol_factory
from balanceroute.proxy.hotpath import COMPILED, STALE
from balanceroute.proxy.telemetry.clock import Loop

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001  # Python's own is 0.005
YOUNG_OBJECTS = 20_000  # new objects between two runs of the cyclic garbage collector; Python's default is 700
MIDDLE_RUNS = 2  # until what these have left is walked, too; with Python's 10 that stopped all streams for 0.1 s
OLD_RUNS = 40  # of those, until all is walked: as seldom as with Python's 10 and 10
CANNOT_START = 3  # exit code, as uvicorn's
PARENT_S = 0.5  # to wait for the parent's signal; the parent has nothing else to do
_LOOK_S = 0.05
_ABORT_S = 3.0
LAST_S = 0.25  # after the last listener is closed: a client that has just connected is about to send its request

Reload = Callable[[], Awaitable[None]]


class Server(uvicorn.Server):
    """uvicorn's server that drains before it stops."""

    _exits = False
    _asked_to_drain = False  # by a signal; the drain begins in the loop's next turn
    _wake: Callable[[], object] | None = None  # futures that wait for the end

    def __init__(self, app: ClientApp, config: Config, uds: str | None = None) -> None:
        """`uds`: a unix socket to listen on, instead of `listen.host` and `listen.port`."""
        listen = config.listen
        self.load = alone()
        super().__init__(
            uvicorn.Config(
                app,
                host=listen.host,
                port=listen.port,
                uds=uds,
                loop="none",
                http=protocol_factory(  # type: ignore[arg-type]  # uvicorn only calls it
                    app,
                    limits_of(lambda: app.services.config),
                    lambda: app.tls.server if uds is None else None,
                    lambda: self.load,
                    lambda where: app.services.metrics.tasks_failed.inc(where),
                ),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=5,
            )
        )
        self._app, self._router_config = app, config
        self._drain: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Run to the end on `telemetry.clock.Loop`. Raises: `app.failure`; SystemExit: it can't start."""
        its_log = logging.getLogger("uvicorn.error")
        its_log.addFilter(self._is_worth_a_line)
        try:
            with asyncio.Runner(loop_factory=Loop) as runner:
                runner.run(self.serve(sockets=sockets))
        except SystemExit:
            if self._app.failure is None:
                raise
        finally:
            its_log.removeFilter(self._is_worth_a_line)
        if self._app.failure is not None:
            raise self._app.failure
        if not self.started:  # older versions of uvicorn return where they can't start
            sys.exit(CANNOT_START)

    def _is_worth_a_line(self, record: logging.LogRecord) -> bool:
        """Whether uvicorn's line says more than ours: addresses, or the error that ends this process, which is last."""
        told = isinstance(record.msg, OSError) or str(record.msg).startswith("Uvicorn running on ")
        return self._app.failure is None and not told

    @property
    def should_exit(self) -> bool:
        """Whether the end was requested, by uvicorn or here."""
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._wake is not None:
            self._wake()

    async def main_loop(self) -> None:
        """Wait for the end, without waking ten times per second as uvicorn's own loop does."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(ended.set)  # also from a signal's handler
        while not await self.on_tick(0):  # updates the Date header, once per second
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 1.0)
        self._wake = None

    def handle_exit(self, sig: int, frame: object) -> None:
        """Drain at the first signal, end at the second."""
        services = getattr(self._app, "services", None)
        if services is None or self._asked_to_drain or self.should_exit:
            log.warning("ending now", extra={"signal": sig})
            self.should_exit = self.force_exit = True
            return
        self._asked_to_drain = True
        services.loop.call_soon_threadsafe(self._begin_drain, services)

    def _begin_drain(self, services: ClientServices) -> None:
        if self._drain is None:
            services.begin_drain()
            log.warning("draining", extra={"requests": services.exchanges, "kv_drains": services.drainer.pending})
            self._drain = services.loop.create_task(self._until_drained(services))

    def busy(self, services: ClientServices) -> bool:
        """Whether requests or drains are under way."""
        return bool(services.exchanges or services.drainer.pending)

    async def _until_drained(self, services: ClientServices) -> None:
        deadline = services.loop.time() + services.config.lifecycle.drain_timeout_s
        while self.busy(services) and services.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        services.begin_drain()  # a relay that leaves has served its connected clients until now
        if services.exchanges:
            log.warning("aborting requests", extra={"requests": services.exchanges})
            services.abort_all()
            deadline = services.loop.time() + _ABORT_S  # time to send error events, and to drain pinned KV
            while self.busy(services) and services.loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await super().startup(sockets=sockets)
        if self.started:
            try:
                fields = await self.listening()
            except BaseException:
                await self.lifespan.shutdown()
                raise
            log.info("listening", extra={**fields, "hot_path_compiled": COMPILED, "core_compiled": native.COMPILED})
            if STALE or native.STALE:
                log.warning("the compiled modules are of another version and not used; install balanceroute again")

    async def listening(self) -> dict[str, object]:
        """Listen at further addresses; returns them, for the log. Raises: ConfigError."""
        sock = self.servers[0].sockets[0].getsockname()
        fields: dict[str, object] = {"host": sock[0], "port": sock[1], "tls": self._app.tls.server is not None}
        address = self._router_config.listen.admin_address
        if address is not None:
            fields["admin_port"] = self._app.services.perimeter.admin_port = await self._listen_for_operators(address)
        return fields

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. Unlike uvicorn, a forced end also shuts the application down, within a short time."""
        if not self.force_exit:
            await self._answer_last_requests()
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_S):
                    await self.lifespan.shutdown()

    async def _answer_last_requests(self) -> None:
        """Close the listeners, and give clients that have connected by then a moment for their requests. They are
        answered with `Connection: close`. The kernel would reset connections that wait at a listener at its end.
        """
        loop = asyncio.get_running_loop()
        for listener in self.servers:
            last: list[Acceptor] = []
            with contextlib.suppress(OSError):  # no descriptor is free
                listening = [_duplicate(sock) for sock in listener.sockets if sock.fileno() >= 0]
                last += [Acceptor(loop, sock, self.connected) for sock in listening]
            listener.close()
            for acceptor in last:
                acceptor.take_rest()
                acceptor.close()
                await acceptor.wait_closed()
        until_s = loop.time() + LAST_S
        while self.server_state.connections and loop.time() < until_s and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def connected(self) -> asyncio.Protocol:
        """Make the protocol of a new connection."""
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(self.config, self.server_state, self.lifespan.state)
        return protocol

    async def _listen_for_operators(self, address: tuple[str, int]) -> int:
        """A second listener with the same protocol; returns its port. Raises: ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self.connected, *address, backlog=self.config.backlog)
        except OSError as error:
            raise ConfigError(
                f"listen.admin: cannot listen on {host_in_url(address[0])}:{address[1]}: {_reason(error)}"
            ) from None
        self.servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port


class ProcessServer(Server):
    """The server of a process of its own, which it sets up for streams; it reloads on SIGHUP."""

    def __init__(self, app: ClientApp, config: Config, on_reload: Reload | None = None, uds: str | None = None) -> None:
        super().__init__(app, config, uds)
        self._on_reload = on_reload
        self._reload_asked = False
        self._reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tune the interpreter."""
        if self._on_reload is not None:  # before it can be known to listen: SIGHUP would end it
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # see `parent/supervisor.py`
        await super().startup(sockets=sockets)
        if self.started:
            # Present objects stay: a full collection of these 53,000 objects stopped every
            # stream for some 20 ms (100 ms on a busy machine).
            gc.collect()
            gc.freeze()
            # Reference counts free what a request leaves. With Python's default, a garbage collection after every 700
            # objects would walk the requests under way again and again.
            gc.set_threshold(YOUNG_OBJECTS, MIDDLE_RUNS, OLD_RUNS)
            # A re-fit's thread may otherwise keep the interpreter for 5 ms whenever the loop comes back from a system
            # call, and an event takes several: gaps of 8 ms were seen.
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            if self._reload_asked:
                self._reload()

    def _reload(self) -> None:
        self._reload_asked = True
        if self.started and (self._reloading is None or self._reloading.done()):
            self._reloading = asyncio.get_running_loop().create_task(self._reload_as_asked())

    async def _reload_as_asked(self) -> None:
        """Reload, again if another signal came meanwhile."""
        assert self._on_reload is not None
        while self._reload_asked:
            self._reload_asked = False
            try:
                await self._on_reload()
            except (ConfigError, InputError) as error:
                log.warning("reload refused", extra={"error": str(error)})
            except Exception as error:  # for example, no thread can be started: no stream should end for that
                log.error("reload failed", exc_info=error, extra={"error": repr(error)})


class ChildServer(ProcessServer):
    """The server of a child process, controlled by its parent's signals.

    SIGUSR2: drain. SIGINT: end now. SIGUSR1: another router takes over. SIGTERM is not from the parent. If it went to
    all processes, the parent sends its own signal soon, which is waited for. If not, SIGTERM was for this process only:
    it leaves without loss of requests, and the parent starts it again.
    """

    _sigterm_received = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, also for the parent's signals."""
        await super().startup(sockets=sockets)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.leave)
        loop.add_signal_handler(signal.SIGUSR2, self.drain)

    def leave(self) -> None:
        """Another process takes over."""
        raise NotImplementedError

    def drain(self) -> None:
        """The router ends."""
        self._begin_drain(self._app.services)

    def handle_exit(self, sig: int, frame: object) -> None:
        """See the class."""
        services = getattr(self._app, "services", None)
        if sig == signal.SIGINT or services is None:
            log.warning("ending now", extra={"signal": sig})
            self.should_exit = self.force_exit = True  # no drain: a brain that drains makes all relays refuse requests
        elif not self._sigterm_received:
            self._sigterm_received = True
            services.loop.call_soon_threadsafe(services.loop.call_later, PARENT_S, self._leave_when_possible)

    def _leave_when_possible(self) -> None:
        if self._drain is None and not self.should_exit:
            log.warning("told to end by another process than the parent", extra={"pid": os.getpid()})
            self.leave()


def serve(app: ClientApp, config: Config, on_reload: Reload | None = None) -> None:
    """Run until a signal ends it. Raises: ConfigError: the address cannot be listened on; `app.failure`."""
    server, address = ProcessServer(app, config, on_reload), f"{host_in_url(config.listen.host)}:{config.listen.port}"
    try:
        server.run()
    except SystemExit as error:
        cause = error.__context__  # uvicorn's own exit
        if isinstance(cause, OSError):
            raise ConfigError(f"listen: cannot listen on {address}: {_reason(cause)}") from None
        raise ConfigError(f"listen: cannot start on {address}") from None


def _duplicate(listener: socket.socket) -> socket.socket:
    """A socket of our own that listens there, too."""
    own = socket.socket(fileno=os.dup(listener.fileno()))
    own.setblocking(False)
    return own


def _reason(error: OSError) -> str:
    """The error's text without the address, which asyncio repeats."""
    if isinstance(error, socket.gaierror):
        return NO_ADDRESS
    return os.strerror(error.errno) if error.errno else str(error)
