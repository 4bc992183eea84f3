"""The process that decides for all relays of one router: ledger, dispatchers, health, polls, operators' routes.

It serves two sockets of the run folder: relays speak to the hub (`link/hub.py`) at one, and send operators' requests
to its application at the other. It leads while it keeps the lead (`link/leadership.py`); another one that is started
meanwhile stands by, and takes over once the leader has ended, however that ends, or stands still. Nothing is decided
before the relays that live have told what they hold.

SIGTERM             drain: relays are told to refuse new requests; it ends when they have left
SIGINT              end now
SIGHUP              reload what may change (`reload.py`)
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.applications import Starlette

from balanceroute.config import Config
from balanceroute.errors import ConfigError, InputError, NoHealthyWorkers
from balanceroute.proxy.admission.forecasts import build_forecasts
from balanceroute.proxy.app import HANDLERS, RouterApp, build_services, operator_parts, set_up, start, stop, supervised
from balanceroute.proxy.changes import KeptChanges
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.configured import Configured
from balanceroute.proxy.link.far import FarListener, FarMembers
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.leadership import RENEW_S, FileLead, Lead
from balanceroute.proxy.ops.dashboard import Dashboard
from balanceroute.proxy.ops.guard import trusted
from balanceroute.proxy.reload import reload
from balanceroute.proxy.run_folder import RunFolder
from balanceroute.proxy.server import ChildServer
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.workers.relay_reports import RelayReports

log = logging.getLogger(__name__)

STANDBY_LOOK_S: Final = 0.25
METRICS_RETRY_S: Final = 1.0


class BrainApp(RouterApp):
    """The brain's application. `hub` exists between startup and shutdown; `end` is called when another brain leads.

    `read` is the configuration as it was read last, without what operators have changed since.
    """

    read: Config
    lead: Lead
    hub: Hub
    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """Who is told that a brain stands by, and that it leads."""

    by: Callable[[], None]
    leads: Callable[[], None]


def run_brain(
    configured: Configured,
    folder: RunFolder,
    load: Callable[[], Config],
    lineage: int,
    standing: Standing,
    journal: Path | None = None,
    link: socket.socket | None = None,
) -> None:
    """Stand by, then decide until a signal ends it, or another brain leads.

    Args: load: reads the configuration anew, for SIGHUP. lineage: of the router, as in `changes.py`. journal: a file
    for every decision; where one is there, a brain has led before, and this one writes beside it, with its process id
    at the end of the name. link: where relays of other machines are let in, bound.

    Raises: ConfigError: a file or socket of the folder can't be used.
    """
    folder.make()
    lead = the_lead(configured.config, folder)
    _stand_by(lead, configured, load, standing.by)
    try:
        standing.leads()
        if journal is not None and journal.exists():
            journal = journal.with_name(f"{journal.name}.{os.getpid()}")
        configured.tls.catch_up()
        app = create_brain_app(configured, folder, lead, folder.living(), lineage, journal)

        async def on_reload() -> None:
            new = await asyncio.to_thread(load)
            await reload(app.services, new)
            app.read = new

        server = BrainServer(app, configured.config, on_reload, uds=str(folder.operators))
        app.end, server.link = server.end, link
        server.run()
        if not server.leaves:
            lead.resign()
    finally:
        lead.release()


def the_lead(config: Config, folder: RunFolder) -> Lead:
    """What brains of this configuration and folder compete for. Raises: ConfigError: there is no such thing here."""
    listen = config.listen
    # relays of other machines remember an epoch that this machine may forget when it ends; a Lease remembers it, too
    forgettable = listen.link is not None and listen.lease is None
    local = FileLead(folder.lock, int(time.time()) if forgettable else 1)
    if listen.lease is None:
        return local
    from balanceroute.proxy.link.kubernetes import lease_api  # with httpx, which nothing else in this process needs
    from balanceroute.proxy.link.lease import LeaseLead

    patience_s = listen.lease_duration_s / 3  # so a leader gets a second try before it must step down
    api = lease_api(listen.lease, Path(listen.service_account), os.environ, patience_s)
    return LeaseLead(local, api, folder.identity, listen.lease_duration_s)


def _stand_by(lead: Lead, configured: Configured, load: Callable[[], Config], on_up: Callable[[], None]) -> None:
    """Wait for the lead."""
    asked: list[int] = []
    with _hearing(asked.append):
        on_up()
        while not lead.take():
            _reload_if(asked, configured, load)
            time.sleep(until_tick_s(time.monotonic(), STANDBY_LOOK_S))
    _reload_if(asked, configured, load)


def _reload_if(asked: list[int], configured: Configured, load: Callable[[], Config]) -> None:
    """Read the configuration again, if that was asked for."""
    if not asked:
        return
    asked.clear()
    try:
        configured.reload(load())
        log.info("configuration reloaded")
    except (ConfigError, InputError) as error:
        log.warning("reload refused", extra={"error": str(error)})


@contextmanager
def _hearing(on_reload: Callable[[int], None]) -> Iterator[None]:
    """As long as this process stands by SIGTERM and SIGUSR1 just end it, and SIGHUP, blocked otherwise, is told."""
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, _: on_reload(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until the server hears it
        for number, handler in before.items():
            signal.signal(number, handler)


def create_brain_app(
    configured: Configured, folder: RunFolder, lead: Lead, relays: int, lineage: int, journal: Path | None = None
) -> BrainApp:
    """The application of who has the lead, with what operators have changed under the one before.

    Args: relays: how many live, whose word is waited for. lineage: of the router, as in `changes.py`.

    Raises: ConfigError: a file of the configuration is wrong.
    """
    read = configured.config
    kept = KeptChanges(folder.changes, lineage)
    config = kept.last.config(read)
    forecasts = build_forecasts(config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        assert isinstance(app, BrainApp)
        loop = asyncio.get_running_loop()
        services = app.services = build_services(
            config, loop, forecasts, False, journal, configured.perimeter, configured.tls
        )

        def under_way(exchanges: int) -> None:
            services.exchanges = exchanges

        reports = RelayReports(services.fleet, loop, services.frozen, under_way)
        hub = app.hub = Hub(
            services.ledger,
            reports,
            loop,
            lead.epoch,
            relays,
            lambda other: app.end(),
            lambda: None if services.forecasts is None else services.forecasts.salt,
            None if read.listen.link is None else FarMembers(folder.far),
        )

        def counts() -> list[bytes]:
            """Of all relays, there or not. Raises: NoHealthyWorkers: one has yet to tell, and sums would be too low."""
            if not hub.settled.is_set() or any(relay not in reports.counts for relay in hub.members):
                text = "What relays have counted is not known yet."
                raise NoHealthyWorkers(text, retry_after_s=METRICS_RETRY_S)
            return [*reports.counts.values(), *folder.counts_of_others(reports.counts)]

        services.metrics.beside = counts
        reports.on_connector, reports.on_keys = services.note_connector, services.keys_elsewhere
        services.fleet.on_change = hub.workers_changed
        kept.last.apply(services)
        await hub.serve(str(folder.link))
        start(services, dashboard.recorder, hub.settled)
        coroutines: dict[str, Callable[[], Awaitable[None]]] = {
            "lead": lambda: _keep(lead, app),
            "changes": lambda: kept.watch(services, lambda: app.read),
        }
        for name, run in coroutines.items():
            services.tasks[name] = loop.create_task(supervised(services, name, run), name=name)
        try:
            yield
        finally:
            hub.close()
            await stop(services)

    dashboard = Dashboard(lambda: app.services)
    parts = operator_parts(lambda: app.services, dashboard, read)
    routes = [trusted(route) for part in parts for route in part.routes()]
    app = BrainApp(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS)
    set_up(app, config, configured.tls)
    app.read, app.lead = read, lead
    return app


async def _keep(lead: Lead, app: BrainApp) -> None:
    """Keep the lead until it is lost, or until cancelled."""
    while lead.renew():  # noqa: ASYNC110
        await asyncio.sleep(until_tick_s(time.monotonic(), RENEW_S))
    log.warning("another brain leads", extra={"epoch": lead.epoch})
    app.end()
    await asyncio.Event().wait()


class BrainServer(ChildServer):
    """The server of the brain's process; it listens on a socket that is our user's alone."""

    leaves = False
    link: socket.socket | None = None

    def _begin_drain(self, services: ClientServices) -> None:
        super()._begin_drain(services)
        assert isinstance(self._app, BrainApp)
        for listener in self.servers:
            if isinstance(listener, FarListener):
                listener.close()
        self._app.hub.dismiss_far()
        self._app.lead.resign()

    def leave(self) -> None:
        """The brain of another router is to lead."""
        self.leaves = True
        self.end()

    def end(self) -> None:
        """Another brain leads."""
        self.should_exit = self.force_exit = True

    def busy(self, services: ClientServices) -> bool:
        """Whether relays are here still, or something is left to drain."""
        assert isinstance(self._app, BrainApp)
        return bool(self._app.hub.near_members) or super().busy(services)

    async def listening(self) -> dict[str, object]:
        """Say where."""
        assert isinstance(self._app, BrainApp) and self.config.uds is not None
        os.chmod(self.config.uds, 0o600)
        told: dict[str, object] = {"socket": self.config.uds, "pid": os.getpid(), "epoch": self._app.hub.epoch}
        return told | self._listen_to_machines()

    def _listen_to_machines(self) -> dict[str, object]:
        """Let relays of other machines in, where there is to be a way; returns it. Raises: ConfigError."""
        app, address = self._app, self._router_config.listen.link
        if self.link is None:
            return {}
        assert isinstance(app, BrainApp)
        loop, link = asyncio.get_running_loop(), self.link.dup()  # the parent's is for the next brain
        try:
            far = FarListener(loop, link, lambda: app.tls.link.brain, app.hub.connected, self.connected)
        except OSError as error:
            raise ConfigError(f"listen.link: cannot listen on {address}: {error.strerror}") from None
        self.servers.append(far)  # type: ignore[arg-type]  # it is only closed
        return {"link": address}
