"""The process that decides for all relays of one router: ledger, dispatchers, health, polls, operators' routes.

It serves two sockets of the run folder: at one, relays speak to the hub (`link/hub.py`); at the other, they send
operators' requests to its application (`brain_app.py`). It decides while it has the lead (`link/leadership.py`).
Another brain that is started meanwhile stands by, and takes over when the leader has ended or stands still. A new
leader decides nothing before the relays that run have said what they hold.

SIGUSR2             drain: relays are told to refuse new requests; the brain ends when they have left
SIGTERM, SIGUSR1    end now, and let the standby lead; SIGTERM does so unless SIGUSR2 follows
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from balanceroute.config import Config
from balanceroute.config.patience import off_the_loop
from balanceroute.errors import ConfigError
from balanceroute.proxy.brain_app import SOCKET_REMOVED, BrainApp, BrainSetup, create_brain_app, reload_brain
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.link.far import FarListener
from balanceroute.proxy.link.leadership import FileLead, Lead
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.run_folder.folder import RunFolder, cannot_listen
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.server import ChildServer, Reload
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.ticks import until_tick_s

log = logging.getLogger(__name__)

STANDBY_LOOK_S: Final = 0.25  # between two tries of a standby to get the lead
LOST: Final = 1  # exit code of a brain that does not lead: relays need another one, also while they drain


@dataclass(frozen=True, slots=True)
class BrainCallbacks:
    """What a brain tells its process.

    Attributes:
        on_up: it stands by, or listens as the first leader.
        on_lead: it leads.
        follow: asked for at SIGHUP: make `configured` the configuration that the parent has reloaded.
    """

    on_up: Callable[[], None]
    on_lead: Callable[[], None]
    follow: Callable[[], None]


def run_brain(configured: Configured, folder: RunFolder, setup: BrainSetup, callbacks: BrainCallbacks) -> None:
    """Run a brain: stand by, then decide until a signal ends it or another brain leads.

    Raises: ConfigError: a file or socket of the folder can't be used.
    """
    folder.make(setup.again)
    lead = the_lead(configured.config, folder, setup.again, setup.drains)

    def follow_now() -> None:
        with suppress(ConfigError):  # it is raised again when this brain leads
            configured.learn()
        callbacks.follow()

    with suppress(ConfigError):
        configured.learn()  # before it leads, because it may take long
    waited = stand_by(lead, follow_now, callbacks.on_up)
    try:
        callbacks.on_lead()
        server = _leading_server(configured, folder, lead, setup, callbacks, waited)
        server.run()
        if server.lost:
            sys.exit(LOST)
        lead.resign()  # not before: the next brain of this run folder is to lead, and no other folder's
    finally:
        lead.release()


def _leading_server(
    configured: Configured, folder: RunFolder, lead: Lead, setup: BrainSetup, callbacks: BrainCallbacks, waited: bool
) -> "BrainServer":
    """The server of a brain that has got the lead. `waited`: it stood by before. Raises: ConfigError."""
    if waited:
        folder.make(again=True)  # a standby may have checked it days ago
    configured.tls.catch_up()
    leading = setup.as_leader(waited)
    app = create_brain_app(configured, folder, lead, relays_awaited(folder, leading), leading)

    async def on_reload() -> None:
        await off_the_loop(configured.learn)
        async with app.services.changing:
            callbacks.follow()
            await reload_brain(app, configured.config, configured.perimeter, configured.number)

    return BrainServer(app, configured.config, setup, on_reload, (lambda: None) if waited else callbacks.on_up)


def relays_awaited(folder: RunFolder, setup: BrainSetup) -> set[str]:
    """The relays of this machine that a brain that has got the lead waits for.

    After another brain also those of its router that do not seem to run: somebody may have emptied the folder, or one
    is just being restarted, whose report must not be taken for the last one.
    """
    own = setup.relays if setup.again else ()
    return {*RelayLocks(folder).running(), *own}


def the_lead(config: Config, folder: RunFolder, again: bool = False, drains: bool = False) -> Lead:
    """What brains of this configuration and folder compete for. `again`: one of them has led before.

    `drains`: the router drains, and has given up its Lease; its own requests need a brain to their end.

    Raises: ConfigError: the Lease of the configuration can't be used here.
    """
    listen = config.listen
    # relays of other machines remember epochs, but this machine forgets its own at its end, unless a Lease keeps it;
    # one that begins at the present second is above all before
    forgettable = listen.link is not None and listen.lease is None
    local = FileLead(folder.lead, int(time.time()) if forgettable else 1, again)
    if listen.lease is None or drains:
        return local
    from balanceroute.proxy.link.kubernetes import lease_api  # with httpx, which nothing else in this process needs
    from balanceroute.proxy.link.lease import LeaseLead

    patience_s = listen.lease_duration_s / 3  # of one try, so that a leader has a second one before it must step down
    api = lease_api(listen.lease, Path(listen.service_account), os.environ, patience_s)
    return LeaseLead(local, api, folder.identity, listen.lease_duration_s, again=again)


def stand_by(lead: Lead, follow: Callable[[], None], on_wait: Callable[[], None]) -> bool:
    """Wait for the lead; returns whether it was not free at once.

    SIGHUP stays blocked, also in a thread that the lead may start: a signal waits until the server has its handler.
    """
    waited = False
    with _ended_by_signals():
        while not lead.take():
            if not waited:
                on_wait()
            waited = True
            time.sleep(until_tick_s(now_s(), STANDBY_LOOK_S))
            if signal.sigtimedwait({signal.SIGHUP}, 0) is not None:  # see `next_signal` in `parent/supervisor.py`
                _reload(follow)
    return waited


def _reload(follow: Callable[[], None]) -> None:
    """Follow a reload of the parent, and log whether that worked."""
    try:
        follow()
        log.info("configuration reloaded")
    except ConfigError as error:
        log.warning("reload refused", extra={"error": str(error)})


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within this context (a standby), each signal to end or drain ends the process at once."""
    ends = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class BrainServer(ChildServer):
    """The server of the brain's process. It listens on a socket that only our user may connect to.

    Attributes: `lost`: another brain leads or is to lead.
    """

    _app: BrainApp
    lost = False

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
        self._far: FarListener | None = None  # none of `servers`, whose connections are let in without a certificate
        app.end = self.leave

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; if somebody empties the run folder meanwhile, another brain is to lead. Raises: ConfigError."""
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            if isinstance(error, FileNotFoundError):
                log.warning(SOCKET_REMOVED, extra={"lost": [str(error.filename)]})
                sys.exit(LOST)
            raise cannot_listen(self._app.folder.operators, error) from None

    def _begin_drain(self, services: ClientServices) -> None:
        super()._begin_drain(services)
        if self._far is not None:
            self._far.close()
        self._app.hub.dismiss_far()
        self._app.lead.resign()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        if self._far is not None:
            self._far.close()
            await self._far.wait_closed()
        await super().shutdown(sockets)

    def leave(self) -> None:
        """End: another brain leads, or is to lead."""
        self.lost = True
        self.should_exit = self.force_exit = True

    def busy(self, services: ClientServices) -> bool:
        """Whether relays are connected, or run and may connect, or pinned KV is left to drain."""
        hub = self._app.hub
        return not hub.settled.is_set() or bool(hub.near_members) or super().busy(services) or self._relays_run()

    def _relays_run(self) -> bool:
        """Whether a relay of this router runs; it may have lost its connection for a moment."""
        try:
            return not set(self._setup.relays).isdisjoint(RelayLocks(self._app.folder).running())
        except OSError:  # most likely no descriptor is free
            return True

    async def listening(self) -> dict[str, object]:
        """Begin to be found, and return where, for the log."""
        assert self.config.uds is not None
        os.chmod(self.config.uds, 0o600)
        self._app.sockets = {path: path.stat() for path in (self._app.folder.link, self._app.folder.operators)}
        fields: dict[str, object] = {"socket": self.config.uds, "pid": os.getpid(), "epoch": self._app.hub.epoch}
        fields |= self._listen_to_machines()
        if self._setup.drains:
            self._begin_drain(self._app.services)
        self._on_up()
        return fields

    def _listen_to_machines(self) -> dict[str, object]:
        """Listen for relays of other machines, if so configured; returns the address. Raises: ConfigError."""
        app, address = self._app, self._router_config.listen.link
        if self._setup.link is None:
            return {}
        loop, link = asyncio.get_running_loop(), self._setup.link.dup()  # the parent's is for the next brain
        try:
            self._far = FarListener(loop, link, lambda: app.tls.link.brain, app.hub.connected, self.connected)
        except OSError as error:
            link.close()
            raise ConfigError(f"listen.link: cannot listen on {address}: {error.strerror}") from None
        return {"link": address}
