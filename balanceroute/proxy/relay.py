"""A relay: the process that serves clients and their streams, while the brain decides (`brain.py`).

It parses, sends probes and decode requests, streams and counts, as a router in one process does. It does not judge
workers, and does not decide: its tickets ask the brain over the link. It keeps its streams while there is no brain, and
tells the next brain which requests it holds.

SIGUSR2             drain: new requests get 503, running ones may finish within `lifecycle.drain_timeout_s`
SIGINT              end now
SIGUSR1             leave: accept no more connections, answer at most once more on each present one
SIGTERM             leave as soon as another relay of this machine accepts, unless SIGUSR2 follows
SIGHUP              use a new configuration: limits, keys, certificates; the brain changes workers
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.build import bounds
from balanceroute.config import Config
from balanceroute.errors import ConfigError, NoHealthyWorkers
from balanceroute.proxy.app import (
    ClientApp,
    drain_left,
    guarded_routes,
    hot_routes,
    methods_served,
)
from balanceroute.proxy.client.acceptor import Acceptor
from balanceroute.proxy.client.descriptors import most_clients, most_clients_here
from balanceroute.proxy.client.relay_loads import ACCEPTS, Load
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.coroutines import start_all, stop_tasks
from balanceroute.proxy.link.callbacks import CallbackListener, OtherRelays
from balanceroute.proxy.link.membership import Membership
from balanceroute.proxy.link.messages import FAR
from balanceroute.proxy.link.reach import FarReach, Reach, SocketReach
from balanceroute.proxy.link.remote import NOBODY, RemoteBrain
from balanceroute.proxy.ops.admin import json_response
from balanceroute.proxy.ops.forwarding import Forwarding
from balanceroute.proxy.ops.guard import READY, error_response
from balanceroute.proxy.ops.metaserver import Metaserver
from balanceroute.proxy.ops.to_brain import ToBrain, through_socket, to_machine
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.perimeter.key_table import RelayRows
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.routes import ACCESS, Access
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.relay_services import RelayServices
from balanceroute.proxy.run_folder.folder import RunFolder, cannot_listen
from balanceroute.proxy.run_folder.kept_counts import CountsFile
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.server import ChildServer
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.troubles import Trouble
from balanceroute.proxy.wire.connectors import Callbacks
from balanceroute.proxy.workers.connector_check import shortened
from balanceroute.proxy.workers.drainer import Drainer
from balanceroute.proxy.workers.fleet import FleetConfig
from balanceroute.proxy.workers.pins import PinRecord
from balanceroute.proxy.workers.relay_fleet import RelayFleet

log = logging.getLogger(__name__)

PINS_TRIES: Final = 10
PINS_PAUSE_S: Final = 0.05
LEFT_S: Final = 5.0  # between two searches for pin records of relays that are gone
PARENT_CLOSES_S: Final = 0.05  # in which the parent closes its own sockets, so that none accepts after the relays'
ANOTHER_S: Final = 1.0  # between two checks whether another relay accepts
ALIVE: Final = ("/health", "/ping")  # answered by the relay itself
NOT_FOUND: Final = "No process decides for this router yet: it is starting, or stands by (`listen.lease`)."
NOT_JOINED: Final = "This process has not joined the one that decides for the router (the brain); its log says why."


class RelayApp(ClientApp):
    """A relay's application."""

    services: RelayServices


@dataclass(frozen=True, slots=True)
class RelaySetup:
    """What the parent gives to a relay that starts.

    `name`: unique among running relays of the router, and the same after a restart. `listeners`: bound sockets that
    relays share: the clients', and the operators' if `listen.admin` is set. `load`, `relay_rows`: its place in the
    relays' shared memory. `again`: the router has been up, so files in the way are moved aside.
    """

    name: str
    listeners: list[socket.socket]
    load: Load
    relay_rows: RelayRows
    again: bool


def run_relay(
    configured: Configured,
    folder: RunFolder,
    setup: RelaySetup,
    follow: Callable[[], None],
    on_up: Callable[[], None],
) -> None:
    """Serve clients until a signal ends it.

    Args: follow: on SIGHUP, updates `configured` to what the parent has reloaded. on_up: called when it accepts, and
    before it accepts no more.

    Raises: ConfigError: a file of the folder can't be used.
    """
    folder.make(setup.again)
    lock = RelayLocks(folder).lock(setup.name)
    configured.tls.catch_up()
    configured.perimeter.share_keys(setup.relay_rows)
    app = create_relay_app(configured, folder, setup.name, lock, setup.again)

    async def on_reload() -> None:
        await configured.fetch()
        follow()
        reload_relay(app.services, configured.config, configured.perimeter)

    server = RelayServer(app, configured.config, on_reload)
    server.on_up, server.load = on_up, setup.load
    server.run(sockets=setup.listeners)


def create_relay_app(configured: Configured, folder: RunFolder, name: str, lock: int, again: bool = False) -> RelayApp:
    """The application of a relay. `lock`: of its name, from `RelayLocks.lock`. `again`: see `RelaySetup`.

    Raises: ConfigError: a file of the folder can't be used.
    """
    config, tls = configured.config, configured.tls
    reach, to_brain = _ways_to_brain(config, folder, tls, lambda: app.services.membership.member is not None)
    pins = None if config.kv_pin_s is None else _own_pins(folder.pins(name), again)
    closing: list[Callable[[], None]] = [to_brain.close]
    metaserver = None
    if config.decode_first:
        metaserver = Metaserver(lambda: app.services, OtherRelays(name, folder.callbacks))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        services = app.services = build_relay(configured, loop, folder, name, pins, reach, to_brain)
        app.hot = hot_routes(services)
        coroutines = _coroutines(services, lock)
        try:
            if metaserver is not None:
                listener = CallbackListener(folder.callbacks(name), metaserver.answer)
                try:
                    await listener.serve()
                except OSError as error:
                    raise cannot_listen(folder.callbacks(name), error) from None
                services.callbacks.arrive = lambda: listener.is_reached or services.brain.relays <= 1
                closing.append(listener.close)
                coroutines["callbacks"] = listener.watch
            start_all(services, coroutines)
            yield
        finally:
            for close in closing:
                close()
            services.send_counts()
            await stop_tasks(services)

    routes = _routes(lambda: app.services, to_brain, methods_served(config))
    if metaserver is not None:
        routes += metaserver.routes()
    app = RelayApp(config, tls, guarded_routes(lambda: app.services, routes), lifespan)
    return app


def _coroutines(services: RelayServices, lock: int) -> dict[str, Callable[[], Awaitable[None]]]:
    """The coroutines of a relay, by name. `lock`: see `create_relay_app`."""
    coroutines: dict[str, Callable[[], Awaitable[None]]] = {
        "link": partial(services.membership.run, services),
        "pool_reaper": services.look,
        "counts": services.count,
        "run_folder": services.renew_times,
        "life": partial(services.renew_lock, lock),
        "certificates": services.tls.watch,
    }
    if services.pins is not None:
        coroutines |= {"left": partial(_drain_left, services, services.pins), "pins": services.pins.watch}
    return coroutines


def _ways_to_brain(config: Config, folder: RunFolder, tls: Tls, joined: Callable[[], bool]) -> tuple[Reach, ToBrain]:
    """The ways to the brain: for the link, and for operators' requests."""
    if not config.listen.brains:
        return SocketReach(folder.link), ToBrain(lambda: through_socket(str(folder.operators)), joined)
    reach = FarReach(config.listen.brain_addresses, lambda: tls.link.relay)
    return reach, ToBrain(lambda: to_machine(reach.address, lambda: tls.link.operators), joined)


def _name_on_link(config: Config, folder: RunFolder, name: str) -> str:
    """The relay's name on the link; if the brain is on another machine, one that no other machine's relay has.

    Raises: ConfigError.
    """
    return f"{name}{FAR}{folder.identity()}" if config.listen.brains else name


async def _drain_left(services: RelayServices, pins: PinRecord) -> None:
    """Drain the KV that a former process of this relay has left pinned, once the workers are known; and from time to
    time that of relays that are gone for good. Until cancelled.
    """
    await services.known.wait()
    left, pins.left = pins.left, ()
    drain_left(services, left)
    trouble = Trouble(log, "pin records of other relays cannot be read", "pin records of other relays are read again")
    while True:
        try:
            found = [pin for path in services.folder.other_pins(services.name) for pin in pins.take_over(path)]
        except OSError as error:  # most likely no descriptor is free; clients give theirs back
            found = []
            trouble.begin(error=error.strerror)
        else:
            trouble.end()
        if found:
            log.info("draining KV that another relay left behind", extra={"requests": len(found)})
            drain_left(services, found)
        await asyncio.sleep(LEFT_S)


def _own_pins(path: Path, again: bool) -> PinRecord:
    """This relay's record of pinned KV. `again`: the router has been up, so the relay starts even if the file can't be
    used.

    Raises: ConfigError.
    """
    for _ in range(PINS_TRIES):
        with suppress(ConfigError):
            return PinRecord(path, named=False)
        time.sleep(PINS_PAUSE_S)  # another relay may just be taking it over
    return PinRecord(path, named=False, needed=not again)


def _routes(
    services: Callable[[], RelayServices], to_brain: ToBrain, methods: Mapping[str, Sequence[str]]
) -> list[Route]:
    """All routes but the hot ones: those that any worker can answer are sent to a worker, the others to the brain.

    `methods`: of each route, by its path; other methods are refused here, as in a router of one process.
    """

    readiness = to_brain.shared(READY)

    async def ready(request: Request) -> Response:
        if services().brain.leaving:  # the brain may continue: it is on another machine, or belongs to the successor
            return json_response({"status": "draining"}, 503)
        if services().membership.member is None:  # at once: a dead machine, or a stopped brain, would not even refuse
            return error_response(NoHealthyWorkers(NOT_JOINED if services().membership.logged_why else NOT_FOUND))
        return await readiness(request)

    async def call_workers(request: Request) -> Response:
        """Have the brain call all workers, because it must know of the call.

        This relay knows the admin token, so it decides which credential the workers get.
        """
        own = services().perimeter.authorization_for(request.headers.raw) is None
        return await to_brain.answer(request, authorization=own)

    forwarded = Forwarding(services).routes()
    here = [route for route in forwarded if ACCESS[route.path] is not Access.ADMIN]
    to_all = {route.path for route in forwarded} - {route.path for route in here}
    shared = {path: to_brain.shared(path) for path in methods if ACCESS[path] is Access.OPEN}
    answers = {**shared, READY: ready, **dict.fromkeys(ALIVE, _alive), **dict.fromkeys(to_all, call_workers)}
    known = {route.path for route in here}
    others = [path for path in methods if path not in known]
    return [*here, *(Route(path, answers.get(path, to_brain.answer), methods=methods[path]) for path in others)]


async def _alive(request: Request) -> Response:
    return json_response({"status": "ok"})


def build_relay(
    configured: Configured,
    loop: asyncio.AbstractEventLoop,
    folder: RunFolder,
    name: str,
    pins: PinRecord | None,
    reach: Reach,
    to_brain: ToBrain,
) -> RelayServices:
    """Make the services of a relay; nothing runs yet."""
    config, perimeter, tls = configured.config, configured.perimeter, configured.tls
    metrics = Metrics(lambda: NOBODY, config.routing.policy)
    brain = RemoteBrain(loop, bounds(config))
    on_link = _name_on_link(config, folder, name)
    counts_file = CountsFile(folder, name)
    metrics.continue_former("relay", counts_file.last())
    fleet = RelayFleet(loop, FleetConfig.of(config, tls.for_workers), brain.report, metrics.forget_worker)
    perimeter.apply_limits(loop.time())
    return RelayServices(
        config=config,
        tickets=brain.tickets,
        fleet=fleet,
        metrics=metrics,
        drainer=Drainer(fleet, brain.tickets, metrics, config.kv_pin_s),
        callbacks=Callbacks(config.callback_url, name),
        pins=pins,
        perimeter=perimeter,
        tls=tls,
        brain=brain,
        membership=Membership(loop, reach, on_link, brain, metrics.tasks_failed.inc),
        to_brain=to_brain,
        folder=folder,
        name=name,
        counts_file=counts_file,
    )


def reload_relay(services: RelayServices, new: Config, perimeter: Perimeter) -> None:
    """Switch a relay to another configuration. `perimeter`: made from the files that it names, with the relay's rows of
    the key table.
    """
    perimeter.inherit(services.perimeter)
    perimeter.apply_limits(services.loop.time())
    services.perimeter = perimeter
    services.configure(shortened(new, [worker.kv_connector for worker in services.fleet]))
    log.info("configuration reloaded")


class RelayServer(ChildServer):
    """The server of a relay's process, on sockets that relays share."""

    _app: RelayApp
    listeners: Sequence[socket.socket] = ()
    stays_until_another = False  # it was told to leave, and waits until another relay accepts
    on_up: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on these sockets, beside other relays."""
        self.listeners = sockets or ()
        await super().startup(sockets=[])

    async def listening(self) -> dict[str, object]:
        """Begin to accept, and return where, for the log."""
        loop, services = asyncio.get_running_loop(), self._app.services
        for listener in self.listeners:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self.servers.append(Acceptor(loop, listener, self.connected, self.ahead))  # type: ignore[arg-type]  # it is only closed
        fields: dict[str, object] = {
            "relay": services.name,
            "pid": os.getpid(),
            "tls": self._app.tls.server is not None,
        }
        ports = [listener.getsockname() for listener in self.listeners]
        fields |= {"host": ports[0][0], "port": ports[0][1]}
        if len(ports) > 1:
            fields["admin_port"] = services.perimeter.admin_port = ports[1][1]
        self.load.accept(time.monotonic())
        self.on_up()
        return fields

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server`; every second."""
        if not self._app.handed_over:
            self.load.accept(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Connections that come between the ends of relay and parent would be reset."""
        self.load.put(ACCEPTS, 0)
        self.on_up()
        if not self.force_exit:
            await asyncio.sleep(PARENT_CLOSES_S)
        await super().shutdown(sockets)

    def ahead(self) -> bool:
        """Whether another relay has fewer connections."""
        config = self._app.services.config
        return self.load.ahead(most_clients(config), most_clients_here(config))

    def leave(self) -> None:
        """Leave the sockets to other relays, and finish the requests of connected clients.

        A relay that drains already no longer refuses new requests itself, and keeps its deadline.
        """
        self.load.put(ACCEPTS, 0)
        for acceptor in self.servers:
            acceptor.close()
        self._app.handed_over = True
        services = self._app.services
        services.brain.leaving = False
        log.warning("leaving", extra={"connections": len(self.server_state.connections)})
        if self._drain is None:
            self._drain = services.loop.create_task(self._until_drained(services))

    def _leave_when_possible(self) -> None:
        """Leave once another relay accepts: the parent replaces this process only after its end."""
        if self._drain is not None or self.should_exit or self.load.step_back(time.monotonic()):
            super()._leave_when_possible()
            return
        services = self._app.services
        if not self.stays_until_another:
            self.stays_until_another = True
            log.warning("not leaving before another relay accepts", extra={"relay": services.name, "pid": os.getpid()})
        services.loop.call_later(ANOTHER_S, self._leave_when_possible)

    def drain(self) -> None:
        """The router ends: refuse new requests. A relay that leaves already keeps its deadline."""
        self._app.services.begin_drain()
        super().drain()

    def busy(self, services: ClientServices) -> bool:
        """Whether requests or drains are under way. A relay that leaves also waits for connections that are idle, or
        just being opened: a request may be on its way.
        """
        coming = self._app.handed_over and (bool(self.server_state.connections) or self._opens())
        return super().busy(services) or coming

    def _opens(self) -> bool:
        """Whether a connection is accepted, and not among those of the server yet."""
        return any(isinstance(acceptor, Acceptor) and acceptor.opening for acceptor in self.servers)
