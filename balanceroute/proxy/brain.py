"""The process that decides for all relays of one router: ledger, dispatchers, health, polls, operators' routes.

It serves two sockets of the run folder: relays speak to the hub (`link/hub.py`) at one, and send operators' requests
to its application at the other. It leads while it keeps the lead (`link/leadership.py`); another one that is started
meanwhile stands by, and takes over once the leader has ended, however that ends, or stands still. Nothing is decided
before the relays that live have told what they hold.

SIGUSR2             drain: relays are told to refuse new requests; it ends when they have left
SIGTERM, SIGUSR1    end now, and let the standby lead; SIGTERM unless SIGUSR2 follows
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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from starlette.applications import Starlette

from balanceroute.config import Config, with_sections
from balanceroute.config.patience import off_the_loop
from balanceroute.errors import ConfigError, InputError, NoHealthyWorkers
from balanceroute.plugins import learn_policy
from balanceroute.proxy.admission.forecasts import Forecasts, build_forecasts
from balanceroute.proxy.app import RouterApp, build_services, operator_parts, start
from balanceroute.proxy.changes import FIRST, KeptChanges
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.configured import Configured
from balanceroute.proxy.coroutines import start_all, stop
from balanceroute.proxy.leader_counts import LeaderCounts
from balanceroute.proxy.link.far import FarListener, FarMembers
from balanceroute.proxy.link.files import is_still
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.leadership import RENEW_S, FileLead, Lead
from balanceroute.proxy.link.messages import FAR
from balanceroute.proxy.ops.dashboard import Dashboard
from balanceroute.proxy.ops.guard import trusted
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.reload import reload
from balanceroute.proxy.run_folder import RunFolder
from balanceroute.proxy.server import ChildServer, Reload
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.workers.relay_reports import RelayReports

log = logging.getLogger(__name__)

STANDBY_LOOK_S: Final = 0.25
METRICS_RETRY_S: Final = 1.0
LOST: Final = 1  # exit code: relays need another brain, while they drain as well


class BrainApp(RouterApp):
    """The brain's application. `hub` exists between startup and shutdown; `end` is called when another brain leads,
    `leave` when another one of this run folder is to lead. `sockets`: at which others find it, once it listens.

    `read` is the configuration as it was read last, without what operators have changed since. `without_predictor`:
    it leads without one, because a file of it can't be used.
    """

    read: Config
    without_predictor = False
    lead: Lead
    hub: Hub
    end: Callable[[], None]
    leave: Callable[[], None]
    folder: RunFolder
    kept: KeptChanges
    sockets: Mapping[Path, os.stat_result] = {}

    def superseded(self, epoch: int) -> int | None:
        """A relay has seen this epoch above ours: the number to go on under, or None and the end, as another leads."""
        if self.lead.outrank(epoch):
            return self.lead.epoch
        self.end()
        return None


@dataclass(frozen=True, slots=True)
class BrainCallbacks:
    """Who is told that a brain stands by, or listens as the first one, and that it leads; `follow` has `configured` be
    what the parent has reloaded, for SIGHUP.
    """

    on_standby: Callable[[], None]
    on_lead: Callable[[], None]
    follow: Callable[[], None]


@dataclass(frozen=True, slots=True)
class BrainSetup:
    """What the parent says of the router to a brain that starts.

    `lineage`: of the router, as in `changes.py`. `journal`: a file for every decision; where one is there, a brain has
    led before, and this one writes beside it, with its process id at the end of the name. `link`: where relays of other
    machines are let in, bound. `again`: the router has been up, so that a brain without a predictor is better than
    none. `drains`: so do the relays, and this brain from its beginning. `relays`: the router's own, by name, which a
    drain waits for.
    """

    lineage: int
    journal: Path | None = None
    link: socket.socket | None = None
    again: bool = False
    drains: bool = False
    relays: Collection[str] = ()

    def as_leader(self, waited: bool) -> "BrainSetup":
        """The same once it leads; `waited`: another brain has led before."""
        journal = self.journal
        if journal is not None and journal.exists():
            journal = journal.with_name(f"{journal.name}.{os.getpid()}")
        return replace(self, journal=journal, again=self.again or waited)


def run_brain(configured: Configured, folder: RunFolder, setup: BrainSetup, callbacks: BrainCallbacks) -> None:
    """Stand by, then decide until a signal ends it, or another brain leads.

    Raises: ConfigError: a file or socket of the folder can't be used.
    """
    folder.make(setup.again)
    lead = the_lead(configured.config, folder, setup.again)

    def follow_now() -> None:
        with suppress(ConfigError):  # that is for when it leads
            configured.learn()
        callbacks.follow()

    with suppress(ConfigError):
        configured.learn()  # now, as it may take long
    waited = stand_by(lead, follow_now, callbacks.on_standby)
    try:
        callbacks.on_lead()
        server = _leading_server(configured, folder, lead, setup, callbacks, waited)
        server.run()
        if not server.leaves:
            lead.resign()
        if server.lost:
            sys.exit(LOST)
    finally:
        lead.release()


def _leading_server(
    configured: Configured, folder: RunFolder, lead: Lead, setup: BrainSetup, callbacks: BrainCallbacks, waited: bool
) -> "BrainServer":
    """The server of who has got the lead; `waited`: not at once. Raises: ConfigError."""
    if waited:
        folder.make(again=True)  # a standby may have looked at it days ago
    configured.tls.catch_up()
    expected = len(folder.living())
    if setup.again and not expected:  # the folder was emptied
        expected = configured.config.listen.relays
    app = create_brain_app(configured, folder, lead, expected, setup.as_leader(waited))

    async def on_reload() -> None:
        await off_the_loop(configured.learn)
        async with app.services.changing:
            callbacks.follow()
            await reload_brain(app, configured.config, configured.perimeter, configured.number)

    return BrainServer(app, configured.config, setup, on_reload, (lambda: None) if waited else callbacks.on_standby)


def the_lead(config: Config, folder: RunFolder, again: bool = False) -> Lead:
    """What brains of this configuration and folder compete for; `again`: others have.

    Raises: ConfigError: there is no such thing here.
    """
    listen = config.listen
    # relays of other machines remember an epoch that this machine may forget when it ends; a Lease remembers it, too
    forgettable = listen.link is not None and listen.lease is None
    local = FileLead(folder.lock, int(time.time()) if forgettable else 1, again)
    if listen.lease is None:
        return local
    from balanceroute.proxy.link.kubernetes import lease_api  # with httpx, which nothing else in this process needs
    from balanceroute.proxy.link.lease import LeaseLead

    patience_s = listen.lease_duration_s / 3  # so a leader gets a second try before it must step down
    api = lease_api(listen.lease, Path(listen.service_account), os.environ, patience_s)
    return LeaseLead(local, api, folder.identity, listen.lease_duration_s, again=again)


def stand_by(lead: Lead, follow: Callable[[], None], on_wait: Callable[[], None]) -> bool:
    """Wait for the lead, if it is not free at once; returns whether it was not.

    SIGHUP stays blocked, for the thread as well that the lead may start: what comes until the server hears it waits.
    """
    waited = False
    with _ended_by_signals():
        while not lead.take():
            if not waited:
                on_wait()
            waited = True
            if signal.sigtimedwait({signal.SIGHUP}, until_tick_s(time.monotonic(), STANDBY_LOOK_S)) is not None:
                _reload(follow)
    return waited


def _reload(follow: Callable[[], None]) -> None:
    """Follow the parent."""
    try:
        follow()
        log.info("configuration reloaded")
    except ConfigError as error:
        log.warning("reload refused", extra={"error": str(error)})


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """As long as this process stands by signals just end it."""
    ends = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def create_brain_app(configured: Configured, folder: RunFolder, lead: Lead, relays: int, setup: BrainSetup) -> BrainApp:
    """The application of who has the lead, with what operators have changed under the one before.

    Args: relays: how many live, whose word is waited for.

    Raises: ConfigError: a file of the configuration is wrong.
    """
    read = _known(configured.config, setup.again)
    kept = KeptChanges(folder.changes, setup.lineage, lead, configured.number)
    config = kept.last.config(read)
    forecasts, lacking = _forecasts(config, setup.again)
    if lacking:
        config = _without_predictor(config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop, perimeter, tls = asyncio.get_running_loop(), configured.perimeter, configured.tls
        services = app.services = build_services(config, loop, forecasts, False, setup.journal, perimeter, tls)
        counted = _put_hub_in(app, relays)
        kept.last.apply(services)
        services.keep_changes = lambda: kept.keep(services, app.read)
        services.metrics.forget_workers_but([worker.id for worker in services.fleet])
        try:
            await app.hub.serve(str(folder.link))
            start(services, dashboard.recorder, app.hub.settled)
            _watch(app, counted, kept)
            yield
        finally:
            app.hub.close()
            try:
                await stop(services)
            finally:
                counted.keep()

    dashboard = Dashboard(lambda: app.services)
    parts = operator_parts(lambda: app.services, dashboard, read)
    routes = [trusted(route) for part in parts for route in part.routes()]
    app = BrainApp(config, configured.tls, routes, lifespan)
    app.read, app.lead, app.folder, app.without_predictor, app.kept = read, lead, folder, lacking, kept
    return app


def _put_hub_in(app: BrainApp, relays: int) -> LeaderCounts:
    """Make the hub of an application, and have its services and the relays hear of each other; it does not listen yet.

    Returns: what brains have counted, this one included. `relays`: how many are waited for.
    """
    services, folder, far = app.services, app.folder, None
    if app.read.listen.link is not None:
        far = FarMembers(folder.far)

    def under_way(exchanges: int) -> None:
        services.exchanges = exchanges

    def salt() -> bytes | None:
        return None if services.forecasts is None else services.forecasts.salt

    def inherited(relay: str) -> None:
        reports.counts.pop(relay, None)
        services.metrics.forget_workers_but([worker.id for worker in services.fleet])

    def given_up(counts: bytes) -> None:
        services.metrics.carry_on(counts)
        services.metrics.forget_workers_but([worker.id for worker in services.fleet])

    def left(worker_id: str) -> None:
        services.metrics.forget_worker(worker_id)
        reports.forget(worker_id)

    reports = RelayReports(services.fleet, services.loop, services.frozen, under_way)
    hub = app.hub = Hub(services.ledger, reports, services.loop, app.lead.epoch, relays, app.superseded, salt, far)
    counted = LeaderCounts(folder, app.lead, services.metrics, inherited)
    services.metrics.beside = partial(_counts_of_relays, folder, counted, hub, reports)
    services.metrics.before_page = partial(_keep_what_is_shown, counted)
    reports.on_connector, reports.on_keys = services.note_connector, services.keys_elsewhere
    reports.on_given_up = given_up
    services.fleet.on_leave, services.fleet.on_change = left, hub.workers_changed
    return counted


def _watch(app: BrainApp, counted: LeaderCounts, kept: KeptChanges) -> None:
    """Start what only a brain watches."""
    services = app.services
    coroutines: dict[str, Callable[[], Awaitable[None]]] = {
        "lead": lambda: _keep_lead(app),
        "counts": counted.watch,
        "changes": lambda: kept.watch(services, lambda: app.read),
    }
    start_all(services, coroutines)


def _keep_what_is_shown(counted: LeaderCounts) -> None:
    """No count of a page may fall with this process. Raises: NoHealthyWorkers: another brain leads."""
    if not counted.keep():
        raise NoHealthyWorkers("Another brain leads.", retry_after_s=METRICS_RETRY_S)


def _counts_of_relays(folder: RunFolder, counted: LeaderCounts, hub: Hub, reports: RelayReports) -> list[bytes]:
    """What all relays have counted, there or not.

    Raises: NoHealthyWorkers: not all of it is known, and sums would be too low.
    """
    if not hub.settled.is_set() or any(relay not in reports.counts for relay in hub.members):
        raise NoHealthyWorkers("What relays have counted is not known yet.", retry_after_s=METRICS_RETRY_S)
    try:
        for relay in [each for each in reports.counts if each not in hub.members and FAR not in each]:
            # its last words may have reached nobody, but it has kept them
            reports.counts[relay] = folder.counts(relay) or reports.counts[relay]
        return [*reports.counts.values(), *folder.counts_of_others({*reports.counts, *counted.inherited})]
    except OSError as error:  # no descriptor is free, most likely
        text = f"What relays have counted can't be read: {error.strerror}."
        raise NoHealthyWorkers(text, retry_after_s=METRICS_RETRY_S) from None


def _known(config: Config, again: bool) -> Config:
    """The configuration, under the default policy where its own can't be imported any more.

    Raises: ConfigError: it can't be, and not `again`.
    """
    try:
        learn_policy(config.routing.policy)
        return config
    except ConfigError as error:
        if not again:
            raise
        log.warning("leading with the default policy until SIGHUP finds the other", extra={"error": str(error)})
    return with_sections(config, routing=config.routing.model_dump(exclude_unset=True, exclude={"policy", "options"}))


def _forecasts(config: Config, again: bool) -> tuple[Forecasts | None, bool]:
    """The predictor, and whether it is lacking. Raises: ConfigError, InputError: it can't be used, and not `again`."""
    try:
        return build_forecasts(config), False
    except (ConfigError, InputError) as error:
        if not again:
            raise
        _tell_lack(error)
        return None, True


def _without_predictor(config: Config) -> Config:
    return with_sections(config, predictor={"kind": "none"})


def _tell_lack(error: ConfigError | InputError) -> None:
    log.warning("leading without the predictor until SIGHUP finds it", extra={"error": str(error)})


async def reload_brain(app: BrainApp, new: Config, perimeter: Perimeter, number: int = FIRST) -> None:
    """Switch to another configuration, with what its files held; where the predictor was lacking it may still be.

    Raises: ConfigError, InputError: it can't be used; nothing changed.
    """
    try:
        await reload(app.services, new, perimeter)
        app.without_predictor = False
    except (ConfigError, InputError) as error:
        if not app.without_predictor:
            raise
        await reload(app.services, _without_predictor(new), perimeter)
        _tell_lack(error)
    app.read, app.kept.number = new, number
    with suppress(NoHealthyWorkers):  # another brain leads: this process is about to end
        app.services.keep_changes()


async def _keep_lead(app: BrainApp) -> None:
    """Keep the lead until it is lost, or a socket of ours is, or until cancelled."""
    while app.lead.renew():
        lost = [str(path) for path, ours in app.sockets.items() if not is_still(path, ours)]
        if lost:
            log.warning("nobody finds this brain any more; another one is to lead", extra={"lost": lost})
            app.leave()
            break
        await asyncio.sleep(until_tick_s(time.monotonic(), RENEW_S))
    else:
        log.warning("this brain leads no more", extra={"epoch": app.lead.epoch})
        app.hub.close()  # it decides nothing more, for relays of other machines either, who see no other one yet
        app.end()
    await asyncio.Event().wait()


class BrainServer(ChildServer):
    """The server of the brain's process; it listens on a socket that is our user's alone."""

    _app: BrainApp
    leaves = lost = False

    def __init__(
        self,
        app: BrainApp,
        config: Config,
        setup: BrainSetup,
        on_reload: Reload | None = None,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(app, config, on_reload, uds=str(app.folder.operators))
        self._setup, self._on_up = setup, on_up
        app.end, app.leave = self.end, self.leave

    def _begin_drain(self, services: ClientServices) -> None:
        super()._begin_drain(services)
        for listener in self.servers:
            if isinstance(listener, FarListener):
                listener.close()
        self._app.hub.dismiss_far()
        self._app.lead.resign()

    def leave(self) -> None:
        """Another brain is to lead."""
        self.leaves = True
        self.end()

    def end(self) -> None:
        """Another brain leads, or is to."""
        self.lost = True
        self.should_exit = self.force_exit = True

    def busy(self, services: ClientServices) -> bool:
        """Whether relays are here still, or live and may come, or something is left to drain."""
        hub = self._app.hub
        return not hub.settled.is_set() or bool(hub.near_members) or super().busy(services) or self._relays_live()

    def _relays_live(self) -> bool:
        """Whether a relay of this router lives; one that is no member stood still, or has lost its connection."""
        try:
            return not set(self._setup.relays).isdisjoint(self._app.folder.living())
        except OSError:  # no descriptor is free, most likely
            return True

    async def listening(self) -> dict[str, object]:
        """Say where."""
        assert self.config.uds is not None
        os.chmod(self.config.uds, 0o600)
        self._app.sockets = {path: path.stat() for path in (self._app.folder.link, self._app.folder.operators)}
        told: dict[str, object] = {"socket": self.config.uds, "pid": os.getpid(), "epoch": self._app.hub.epoch}
        told |= self._listen_to_machines()
        if self._setup.drains:
            self._begin_drain(self._app.services)
        self._on_up()
        return told

    def _listen_to_machines(self) -> dict[str, object]:
        """Let relays of other machines in, where there is to be a way; returns it. Raises: ConfigError."""
        app, address = self._app, self._router_config.listen.link
        if self._setup.link is None:
            return {}
        loop, link = asyncio.get_running_loop(), self._setup.link.dup()  # the parent's is for the next brain
        try:
            far = FarListener(loop, link, lambda: app.tls.link.brain, app.hub.connected, self.connected)
        except OSError as error:
            link.close()
            raise ConfigError(f"listen.link: cannot listen on {address}: {error.strerror}") from None
        self.servers.append(far)  # type: ignore[arg-type]  # it is only closed
        return {"link": address}
