"""The application of the process that decides for all relays: its services, with the hub that relays speak to.

It is made once the process has the lead (`brain.py`), with the changes that operators made under the brain before. If
the router has been up before, the application starts even where a file of the policy or of the predictor can't be used:
the brain leads under the default policy, or without a predictor, until a reload finds the file. It leads without a
journal, too, if none can be begun.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from starlette.applications import Starlette

from balanceroute.build import policy_settings
from balanceroute.config import Config, with_sections
from balanceroute.core.policies import make_policy
from balanceroute.errors import ConfigError, InputError, NoHealthyWorkers
from balanceroute.plugins import learn_policy
from balanceroute.proxy.admission.forecasts import Forecasts, build_forecasts
from balanceroute.proxy.app import RouterApp, build_services, operator_parts, start
from balanceroute.proxy.coroutines import start_all, stop
from balanceroute.proxy.link.far import FarMembers
from balanceroute.proxy.link.files import is_still
from balanceroute.proxy.link.hub import Hub
from balanceroute.proxy.link.leadership import RENEW_S, AnotherLeads, Lead
from balanceroute.proxy.link.messages import FAR, PromptKeys
from balanceroute.proxy.ops.dashboard import Dashboard
from balanceroute.proxy.ops.guard import trusted
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.reload import reload
from balanceroute.proxy.run_folder.changes import FIRST, KeptChanges
from balanceroute.proxy.run_folder.folder import RunFolder, cannot_listen
from balanceroute.proxy.run_folder.kept_counts import KeptCounts
from balanceroute.proxy.run_folder.leader_counts import LeaderCounts
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.process_gauges import all_processes
from balanceroute.proxy.telemetry.ticks import until_tick_s
from balanceroute.proxy.workers.relay_reports import RelayReports

log = logging.getLogger(__name__)

SOCKET_REMOVED: Final = "the brain's socket was removed; another brain is to lead"


class BrainApp(RouterApp):
    """The brain's application.

    Attributes:
        read: the configuration as it was read last, without the changes of operators since.
        without_predictor: whether the brain leads without a predictor, because a file of it can't be used.
        lead: what this brain holds while it leads.
        hub: the end of the link to relays; exists between startup and shutdown.
        end: called when another brain leads, or is to lead.
        folder: the run folder.
        kept: the changes of operators, which the next brain goes on with.
        sockets: the paths at which others find this brain, once it listens, and what it put there.
    """

    read: Config
    without_predictor = False
    lead: Lead
    hub: Hub
    end: Callable[[], None]
    folder: RunFolder
    kept: KeptChanges
    sockets: Mapping[Path, os.stat_result] = {}

    def superseded(self, epoch: int) -> int | None:
        """A relay has seen this epoch, which is above ours.

        Returns: the epoch to go on under; None: another brain leads, and this one ends.
        """
        if self.lead.raise_epoch(epoch):
            return self.lead.epoch
        self.end()
        return None


@dataclass(frozen=True, slots=True)
class BrainSetup:
    """What the parent tells a brain of the router.

    Attributes:
        lineage: of the router, as in `run_folder/changes.py`.
        journal: the file for every decision. If it exists, a brain has led before, and this one writes a file beside
            it, with its process id at the end of the name. A device or a pipe is written by every brain.
        link: the bound socket at which relays of other machines connect.
        again: the router has been up before, so a brain without a predictor is better than none.
        drains: the relays drain; so does this brain from its start.
        relays: the names of the router's own relays; a drain waits for them.
        generation: of the router, as in `parent/handover.py`.
    """

    lineage: int
    journal: Path | None = None
    link: socket.socket | None = None
    again: bool = False
    drains: bool = False
    relays: Collection[str] = ()
    generation: int = 1

    def as_leader(self, waited: bool) -> "BrainSetup":
        """The setup of a brain that has got the lead. `waited`: it stood by, so another brain has led before."""
        journal = self.journal
        if journal is not None and journal.is_file():
            journal = journal.with_name(f"{journal.name}.{os.getpid()}")
        return replace(self, journal=journal, again=self.again or waited)


def create_brain_app(
    configured: Configured, folder: RunFolder, lead: Lead, relays: Collection[str], setup: BrainSetup
) -> BrainApp:
    """The application of a brain that has the lead, with the changes that operators made under the one before.

    Args: relays: those of this machine that may run; nothing is decided before they have said what they hold.

    Raises: ConfigError: a file of the configuration is wrong.
    """
    read = _with_known_policy(configured.config, setup.again)
    kept = KeptChanges(folder.changes, setup.lineage, lead, configured.number)
    config = kept.last.config(read)
    forecasts, without_predictor = _forecasts(config, setup.again)
    if without_predictor:
        config = _without_predictor(config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop, perimeter, tls = asyncio.get_running_loop(), configured.perimeter, configured.tls

        def services_with(journal: Path | None) -> Services:
            return build_services(config, loop, forecasts, strict=False, journal=journal, perimeter=perimeter, tls=tls)

        services = app.services = _journalled(services_with, setup.journal)
        counted = _connect_hub(app, relays, setup.generation)
        kept.last.apply(services)
        services.keep_changes = lambda: kept.keep(services, app.read)
        services.forget_absent_workers()
        try:
            try:
                await app.hub.serve(str(folder.link))
            except OSError as error:
                raise cannot_listen(folder.link, error) from None
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
    app.read, app.lead, app.folder, app.kept = read, lead, folder, kept
    app.without_predictor = without_predictor
    return app


def _journalled(services_with: Callable[[Path | None], Services], journal: Path | None) -> Services:
    """The services that write the journal, or those without one if it can't be begun: its disk is full by now."""
    try:
        return services_with(journal)
    except InputError as error:
        if journal is None:
            raise
        log.warning("leading without the journal", extra={"error": str(error)})
        return services_with(None)


def _connect_hub(app: BrainApp, relays: Collection[str], generation: int) -> LeaderCounts:
    """Make the hub of an application, and connect it with the services; it does not listen yet.

    Args: relays: those that are waited for. generation: of the router. Returns: what brains have counted, this one too.
    """
    services, folder, far = app.services, app.folder, None
    if app.read.listen.link is not None:
        far = FarMembers(folder.far, others_led=bool(app.lead.others))

    def prompt_keys() -> PromptKeys:
        keys = None if services.forecasts is None else services.forecasts.keys
        return PromptKeys() if keys is None else PromptKeys(keys.salt, keys.by_header)

    def inherited(relay: str) -> None:
        reports.counts.pop(relay, None)
        services.forget_absent_workers()

    def left(worker_id: str) -> None:
        services.metrics.forget_worker(worker_id)
        reports.forget(worker_id)

    reports = RelayReports(services.fleet, services.loop, services.frozen, services)
    loop, epoch, on_bug = services.loop, app.lead.epoch, services.metrics.tasks_failed.inc
    hub = app.hub = Hub(services.ledger, reports, loop, epoch, relays, app.superseded, on_bug, prompt_keys, far)
    counted = LeaderCounts(folder, app.lead, services.metrics, inherited, generation)
    services.metrics.beside = partial(_counts_of_relays, folder, counted, hub, reports)
    services.metrics.before_page = partial(_store_shown_counts, counted)
    services.metrics.processes = all_processes
    services.fleet.on_leave, services.fleet.on_change = left, hub.news.workers_changed
    return counted


def _watch(app: BrainApp, counted: LeaderCounts, kept: KeptChanges) -> None:
    """Start the coroutines that only a brain has."""
    services = app.services
    coroutines: dict[str, Callable[[], Awaitable[None]]] = {
        "lead": lambda: _keep_lead(app),
        "counts": counted.watch,
        "changes": lambda: kept.watch(services, lambda: app.read),
    }
    start_all(services, coroutines)


async def _keep_lead(app: BrainApp) -> None:
    """Renew the lead until it is lost, or a socket at which this brain is found; then end. Until cancelled."""
    while app.lead.renew():
        lost = [str(path) for path, ours in app.sockets.items() if not is_still(path, ours)]
        if lost:
            log.warning(SOCKET_REMOVED, extra={"lost": lost})
            app.end()
            break
        await asyncio.sleep(until_tick_s(now_s(), RENEW_S))
    else:
        log.warning("this brain no longer leads", extra={"epoch": app.lead.epoch})
        app.hub.close()  # relays of other machines may not know the new leader yet: they get no decisions from here
        app.end()
    await asyncio.Event().wait()  # for the end: a coroutine that returns would be started again


def _store_shown_counts(counted: LeaderCounts) -> None:
    """Keep the counts that a page is about to show, so that none falls when this process ends.

    Raises: AnotherLeads.
    """
    if not counted.keep():
        raise AnotherLeads


def _counts_of_relays(folder: RunFolder, counted: LeaderCounts, hub: Hub, reports: RelayReports) -> list[bytes]:
    """What all relays have counted, those as well that have ended.

    Raises: NoHealthyWorkers: the counts of some are not known, so sums would be too low.
    """
    if not hub.settled.is_set() or any(relay not in reports.counts for relay in hub.members):
        raise NoHealthyWorkers("The relays' counts are not known yet; send the request again.")
    kept = KeptCounts(folder)
    try:
        for relay in [each for each in reports.counts if each not in hub.members and FAR not in each]:
            # the last counts that it sent may have reached nobody; the file has them
            reports.counts[relay] = kept.of(relay) or reports.counts[relay]
        return [*reports.counts.values(), *kept.of_others({*reports.counts, *counted.inherited})]
    except OSError as error:  # no descriptor is free, most likely
        raise NoHealthyWorkers(f"What relays have counted can't be read: {error.strerror}.") from None


def _with_known_policy(config: Config, again: bool) -> Config:
    """The configuration, with the default policy in place of one that can't be imported, or made, any more.

    Raises: ConfigError: likewise, and not `again`.
    """
    try:
        learn_policy(config.routing.policy)
        make_policy(policy_settings(config))
        return config
    except ConfigError as error:
        if not again:
            raise
        log.warning("leading with the default policy until SIGHUP finds the other", extra={"error": str(error)})
    return with_sections(config, routing=config.routing.model_dump(exclude_unset=True, exclude={"policy", "options"}))


def _forecasts(config: Config, again: bool) -> tuple[Forecasts | None, bool]:
    """The predictor, and whether it had to be left out. Raises: ConfigError, InputError: likewise, and not `again`."""
    try:
        return build_forecasts(config), False
    except (ConfigError, InputError) as error:
        if not again:
            raise
        _warn_of_lack(error)
        return None, True


def _without_predictor(config: Config) -> Config:
    return with_sections(config, predictor={"kind": "none"})


def _warn_of_lack(error: ConfigError | InputError) -> None:
    log.warning("leading without the predictor until SIGHUP finds it", extra={"error": str(error)})


async def reload_brain(app: BrainApp, new: Config, perimeter: Perimeter, number: int = FIRST) -> None:
    """Switch to another configuration. A brain that leads without a predictor may go on without one.

    Args: perimeter: made of the files that `new` names. number: of the reload.

    Raises: ConfigError, InputError: it can't be used; nothing has changed.
    """
    try:
        await reload(app.services, new, perimeter)
        app.without_predictor = False
    except (ConfigError, InputError) as error:
        if not app.without_predictor:
            raise
        await reload(app.services, _without_predictor(new), perimeter)
        _warn_of_lack(error)
    app.read, app.kept.number = new, number
    with suppress(AnotherLeads):  # this process is about to end
        app.services.keep_changes()
