"""The process that decides for all relays of one router: ledger, dispatchers, health, polls, operators' routes.

It serves two sockets of the run folder: relays speak to the hub (`link/hub.py`) at one, and send operators' requests
to its application at the other. It leads while it holds the lock of the folder; another one that is started meanwhile
waits for that, and takes over within a fraction of a second once the leader has ended, however that ends. Nothing is
decided before the relays that are expected have told what they hold.

SIGTERM             drain: relays are told to refuse new requests; it ends when they have left
SIGINT              end now
SIGHUP              reload what may change (`reload.py`)
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette

from balanceroute.config import Config
from balanceroute.errors import NoHealthyWorkers
from balanceroute.proxy.admission.forecasts import build_forecasts
from balanceroute.proxy.app import HANDLERS, RouterApp, build_services, operator_parts, set_up, start, stop, supervised
from balanceroute.proxy.changes import KeptChanges
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.leadership import Leadership
from balanceroute.proxy.ops.dashboard import Dashboard
from balanceroute.proxy.ops.guard import trusted
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.reload import reload
from balanceroute.proxy.run_folder import RunFolder
from balanceroute.proxy.server import ChildServer
from balanceroute.proxy.workers.relay_reports import RelayReports

log = logging.getLogger(__name__)

STANDBY_LOOK_S: Final = 0.1
METRICS_RETRY_S: Final = 1.0


class BrainApp(RouterApp):
    """The brain's application. `hub` exists between startup and shutdown; `end` is called when another brain leads.

    `read` is the configuration as it was read last, without what operators have changed since.
    """

    read: Config
    hub: Hub
    end: Callable[[], None]


def run_brain(
    config: Config, folder: RunFolder, relays: int, load: Callable[[], Config], journal: Path | None = None
) -> None:
    """Wait for the lead, then decide until a signal ends it.

    Args: relays: how many are expected to join. load: reads the configuration anew, for SIGHUP. journal: a file for
    every decision.

    Raises: ConfigError: a file or socket of the folder can't be used.
    """
    folder.make()
    lead = Leadership(folder.lock)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    while not lead.take():
        time.sleep(STANDBY_LOOK_S)
    try:
        app = create_brain_app(config, folder, lead.epoch, relays, journal)

        async def on_reload() -> None:
            new = load()
            await reload(app.services, new)
            app.read = new

        server = BrainServer(app, config, on_reload, uds=str(folder.operators))
        app.end = server.end
        server.run()
    finally:
        lead.release()


def create_brain_app(read: Config, folder: RunFolder, epoch: int, relays: int, journal: Path | None = None) -> BrainApp:
    """The application that leads under this epoch, with what operators have changed under the one before.

    Raises: ConfigError: a file of the configuration is wrong.
    """
    kept = KeptChanges(folder.changes)
    config = kept.last.config(read)
    forecasts = build_forecasts(config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        assert isinstance(app, BrainApp)
        loop = asyncio.get_running_loop()
        services = app.services = build_services(config, loop, forecasts, False, journal, None, app.tls)

        def under_way(exchanges: int) -> None:
            services.exchanges = exchanges

        reports = RelayReports(services.fleet, loop, services.frozen, under_way)
        hub = app.hub = Hub(
            services.ledger,
            loop,
            epoch,
            relays,
            lambda other: app.end(),
            reports,
            lambda: None if services.forecasts is None else services.forecasts.salt,
        )

        def counts() -> list[bytes]:
            """Of all relays. Raises: NoHealthyWorkers: one has yet to tell them, and the sums would be too low."""
            if not hub.settled.is_set() or any(relay not in reports.counts for relay in hub.members):
                text = "What relays have counted is not known yet."
                raise NoHealthyWorkers(text, retry_after_s=METRICS_RETRY_S)
            return list(reports.counts.values())

        services.metrics.beside = counts
        reports.on_connector, reports.on_keys = services.note_connector, services.keys_elsewhere
        services.fleet.on_change = hub.workers_changed
        kept.last.apply(services)
        await hub.serve(str(folder.link))
        start(services, dashboard.recorder, hub.settled)
        watch = supervised(services, "changes", lambda: kept.watch(services, lambda: app.read))
        services.tasks["changes"] = loop.create_task(watch)
        try:
            yield
        finally:
            hub.close()
            await stop(services)

    dashboard = Dashboard(lambda: app.services)
    routes = [trusted(route) for part in operator_parts(lambda: app.services, dashboard) for route in part.routes()]
    app = BrainApp(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS)
    set_up(app, config, Tls(config))
    app.read = read
    return app


class BrainServer(ChildServer):
    """The server of the brain's process; it listens on a socket that is our user's alone."""

    def end(self) -> None:
        """Another brain leads."""
        self.should_exit = self.force_exit = True

    def busy(self, services: ClientServices) -> bool:
        """Whether relays are here still, or something is left to drain."""
        assert isinstance(self._app, BrainApp)
        return bool(self._app.hub.members) or super().busy(services)

    async def listening(self) -> dict[str, object]:
        """Say where."""
        assert isinstance(self._app, BrainApp) and self.config.uds is not None
        os.chmod(self.config.uds, 0o600)
        return {"socket": self.config.uds, "pid": os.getpid(), "epoch": self._app.hub.epoch}
