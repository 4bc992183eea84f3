"""A router of several processes: a brain that decides, relays that serve clients, and a parent that supervises them.

The parent binds clients' sockets before it forks, and every relay accepts on them. So connections that wait there are
accepted by the other relays if one dies or stops.
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from balanceroute.config import Config
from balanceroute.errors import ConfigError
from balanceroute.proxy.admission.forecasts import build_forecasts
from balanceroute.proxy.brain import BrainCallbacks, run_brain
from balanceroute.proxy.brain_app import BrainSetup
from balanceroute.proxy.client.descriptors import warn_if_few
from balanceroute.proxy.client.relay_loads import Load, RelayLoads
from balanceroute.proxy.link.files import locked
from balanceroute.proxy.ops.reload_checks import asks_another_predictor, check_added, check_taken_over, check_workers
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.parent.handover import Handover, HandoverState, Predecessor
from balanceroute.proxy.parent.listeners import bound, listeners
from balanceroute.proxy.parent.supervisor import Main, Supervisor, be_called, try_apart
from balanceroute.proxy.parent.trial import WITHIN_S
from balanceroute.proxy.perimeter.key_table import KeyTable, RelayRows
from balanceroute.proxy.perimeter.perimeter import Perimeter, warn_of_exposures
from balanceroute.proxy.relay import RelaySetup, run_relay
from balanceroute.proxy.run_folder.changes import saved_changes
from balanceroute.proxy.run_folder.folder import RunFolder, run_folder
from balanceroute.proxy.run_folder.kept_counts import KeptCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks, relay_name
from balanceroute.proxy.telemetry.logs import configure
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

LINEAGE_BITS: Final = 48  # not the process id: in a container it is the same after each restart
BRAIN: Final = "brain"
STANDBY: Final = "standby"


def serve_processes(
    config: Config, load: Callable[[], Config], journal: Path | None = None, take_over: bool = False
) -> int:
    """Run until a signal ends it, or another router takes over; returns the exit code.

    Args: load: reads the configuration anew. journal: a file for every decision; a brain that is started again writes
    one beside it, with its process id at the end of the name. take_over: from the router that runs with the same run
    folder, if one does.

    Raises: ConfigError: the configuration, an address or the run folder can't be used.
    """
    # what is wrong with the files is said once here, not by every child
    configured = Configured.read(config)
    if config.listen.lease is not None:
        from balanceroute.proxy.link.kubernetes import lease_api  # with httpx, which the parent needs only for this

        lease_api(config.listen.lease, Path(config.listen.service_account), os.environ, 1.0)
    with ExitStack() as held:
        predecessor = _predecessor(config) if take_over else None
        if predecessor is not None:
            held.callback(predecessor.close)
            try_apart(partial(_try_forecasts, config), WITHIN_S)  # meanwhile the router that runs does not drain
        sockets = [held.enter_context(sock) for sock in listeners(config, predecessor)]
        folder = run_folder(config, sockets[0].getsockname()[1], os.environ)
        folder.make()
        lock = held.enter_context(folder.claim(unanswered=take_over) if predecessor is None else predecessor.lock())
        link = None
        if config.listen.link_address is not None:
            link = held.enter_context(bound("listen.link", *config.listen.link_address, predecessor))
        if config.listen.brains or config.listen.lease is not None:
            folder.identity()  # made by one process only
        processes = Processes(configured, load, folder, lock, sockets, journal, predecessor, link)
        if predecessor is None:
            KeptCounts(folder).forget()
            if journal is not None:
                begin_anew(journal)
        configure(config.log.level, config.log.format, process="parent")
        warn_if_few(config)
        if predecessor is not None and predecessor.abandoned:
            fields = {"addresses": predecessor.abandoned}
            log.warning("the router that is taken over listens elsewhere, where clients will be refused", extra=fields)
        return Supervisor(processes.mains(), processes.brains, processes).run()


class Processes:
    """What the children run, and the configuration with its files that a child starts with."""

    def __init__(
        self,
        configured: Configured,
        load: Callable[[], Config],
        folder: RunFolder,
        lock: BinaryIO,
        sockets: list[socket.socket],
        journal: Path | None,
        predecessor: Predecessor | None,
        link: socket.socket | None = None,
    ) -> None:
        self._link, self._lock = link, lock
        self._links = [] if link is None else [link]  # the socket for relays of other machines, if there is one
        self._configured, self._load, self._folder, self._sockets = configured, load, folder, sockets
        self._journal, self._predecessor = journal, predecessor
        self.loads = RelayLoads(self.config.listen.relays)
        self._table = KeyTable(self.config.listen.relays)
        self._name_keys(configured.perimeter)
        relay_locks = RelayLocks(folder)
        if predecessor is None:  # relays of a router that has left may run, although its successor has died
            lineage, generation = secrets.randbits(LINEAGE_BITS), relay_locks.next_generation()
        else:
            # new names: others may still finish
            lineage = predecessor.state.lineage
            generation = 1 + max(predecessor.state.generation, relay_locks.newest_generation())
            _continue_key_rates(self._table, predecessor)
        self._handover_state = HandoverState(lineage, generation, decode_first=self.config.decode_first)
        self.lineage = self._handover_state.lineage  # shared with successors, see `run_folder/changes.py`
        self._handover: Handover | None = None
        self._was_up = False  # all children have been up
        self._ends = False
        self._trouble = Trouble(log, "no other router can take over from this one")

    @property
    def config(self) -> Config:
        """The configuration that is in force."""
        return self._configured.config

    @property
    def brains(self) -> list[str]:
        """The names of the brains; none if a brain of another machine leads."""
        if self.config.listen.brains:
            return []
        return [BRAIN, *(f"{BRAIN}-{number + 2}" for number in range(self.config.listen.standbys))]

    @property
    def relays(self) -> list[str]:
        """The names of the relays; no relay of a predecessor has one of them."""
        return [relay_name(number, self._handover_state.generation) for number in range(self.config.listen.relays)]

    def mains(self) -> dict[str, Main]:
        """What each child runs, by its name; the brains are first."""
        mains: dict[str, Main] = {name: partial(self._brain, name) for name in self.brains}
        return mains | {name: partial(self._relay, name) for name in self.relays}

    # -- what the supervisor asks

    @property
    def drain_timeout_s(self) -> float:
        """See `Owner`."""
        return self.config.lifecycle.drain_timeout_s

    def try_reload(self) -> None:
        """See `Owner`. It imports the policy that the configuration names, which may take long or do anything.

        Raises: ConfigError, InputError.
        """
        self._close_listeners()  # the process of the trial must not keep the sockets open
        for link in self._links:
            link.close()
        self._close_handles()
        new = self._load()
        if self.brains:
            self._check_for_brain(new)
        self._name_keys(self._configured.propose(new))

    def reload(self, failure: ConfigError | None) -> bool:
        """See `Owner`; if the configuration can't be used nothing changes."""
        if failure is not None:
            log.warning("reload refused", extra={"error": str(failure)})
            return False
        before = self.config
        try:
            self._configured.accept()
            configure(self.config.log.level, self.config.log.format, process="parent")
            if not self.brains:  # else the brain warns
                warn_of_exposures(before, self.config)
                warn_if_few(self.config, before)
        except Exception as error:  # otherwise all streams would end with this process
            log.error("reload failed", exc_info=error, extra={"error": repr(error)})
            return False
        return True

    def _name_keys(self, perimeter: Perimeter) -> None:
        """Put all keys into the table before a relay uses them. Raises: ConfigError: the table is full."""
        if perimeter.keys is not None:
            self._table.name(key.name for key in perimeter.keys)

    def _check_for_brain(self, new: Config) -> None:
        """Refuse a configuration that the leading brain would refuse: relays must not use what the brain does not.

        Raises: ConfigError, InputError.
        """
        changes = saved_changes(self._folder.changes, self.lineage)
        check_workers(changes.in_use(self.config), self.config, new)
        check_added(changes.added, self.config, new)
        try:
            self._configured.learn()
            asked = asks_another_predictor(changes.config(self.config), new)
        except ConfigError:  # the brain's policy can't be imported any more
            asked = True
        if asked:
            _try_forecasts(new)

    def begin_drain(self) -> None:
        """See `Owner`. The sockets stay open, for a successor and for relays that refuse new requests."""
        self._ends = True

    def stop_listening(self) -> None:
        """Leave the sockets to the relays: connections are refused once the last relay has ended."""
        self._ends = True
        self._close_listeners()
        if self._predecessor is not None:
            self._predecessor.close()  # this router will never take over

    @property
    def accepts(self) -> bool:
        """See `Owner`."""
        return self.loads.any_accepts

    def _close_listeners(self) -> None:
        self._end_handover()
        for sock in self._sockets:
            sock.close()

    def all_up(self) -> None:
        """Answer successors, and have the predecessor leave."""
        self._was_up = True
        self.repair()
        if self._predecessor is not None:
            log.info("taking over", extra={"generation": self._handover_state.generation})
            self._predecessor.go()

    def died(self, name: str) -> None:
        """See `Owner`; clears what a dead relay has written into shared memory."""
        if name in self.relays:
            place = self.relays.index(name)
            Load(self.loads, place).clear()
            self._table.clear(place)

    def repair(self) -> None:
        """See `Owner`. While a successor prepares, the files that it was given stay as they are."""
        if self.has_successor:
            return
        try:
            if self._folder.claim_again(self._lock):
                log.warning("files of the run folder were removed, and are restored")
            if self.config.listen.brains or self.config.listen.lease is not None:
                self._folder.identity()
            if self._was_up and (self._handover is None or self._handover.is_lost):
                self._end_handover()
                sockets = [*self._sockets, *self._links]
                self._handover = Handover(
                    self._folder.handover, self._handover_state, sockets, self._lock, self._table.fd
                )
        except ConfigError as error:
            self._trouble.begin(error=str(error))
        else:
            self._trouble.end()

    def succeeded(self) -> bool:
        """See `Owner`. From then on the run folder belongs to the successor."""
        if self._handover is None or not self._handover.look():
            return False
        self._lock.close()
        return True

    @property
    def has_successor(self) -> bool:
        """See `Owner`."""
        return self._handover is not None and self._handover.has_successor

    @property
    def has_predecessor(self) -> bool:
        """See `Owner`."""
        return self._predecessor is not None and not self._was_up and self._predecessor.is_alive

    def _end_handover(self) -> None:
        if self._handover is not None:
            self._handover.close()
            self._handover = None

    # -- the children

    def _brain(self, name: str, on_up: Callable[[], None]) -> None:
        """Run a brain; the name of its process says whether it leads: brain-2 is called standby-2 before."""
        self._close_listeners()
        be_called(name.replace(BRAIN, STANDBY))
        follow = self._begin(name)
        callbacks = BrainCallbacks(on_up, lambda: be_called(name), follow)
        setup = BrainSetup(
            self.lineage,
            self._journal,
            self._link,
            again=self._was_up,
            drains=self._ends,
            relays=self.relays,
            generation=self._handover_state.generation,
        )
        run_brain(self._configured, self._folder, setup, callbacks)

    def _relay(self, name: str, on_up: Callable[[], None]) -> None:
        self._end_handover()
        for link in self._links:
            link.close()
        follow, place = self._begin(name), self.relays.index(name)
        load, relay_rows = Load(self.loads, place), RelayRows(self._table, place)
        setup = RelaySetup(name, self._sockets, load, relay_rows, self._was_up)
        run_relay(self._configured, self._folder, setup, follow, on_up)

    def _begin(self, name: str) -> Callable[[], None]:
        """Name this child in its log; returns the function that makes it follow a reload of the parent."""
        self._close_handles()

        def follow() -> None:
            self._configured.follow()
            configure(self.config.log.level, self.config.log.format, process=name)

        configure(self.config.log.level, self.config.log.format, process=name)
        return follow

    def _close_handles(self) -> None:
        """Close what only the parent may hold."""
        self._lock.close()
        if self._predecessor is not None:
            self._predecessor.close()


def _predecessor(config: Config) -> Predecessor | None:
    """The router that runs with this run folder; None: there is none.

    Raises: ConfigError: also where its relays could not finish their requests: it asks the tiers in the other order, or
    has other servers by the same ids.
    """
    if not config.listen.port and config.listen.run_folder is None:
        raise ConfigError("--take-over: needs listen.run_folder where listen.port is 0, to find the router that runs")
    folder = run_folder(config, config.listen.port, os.environ)
    found = Predecessor.find(folder.handover)
    if found is None:
        return None
    try:
        if found.state.decode_first is not config.decode_first:
            raise ConfigError(
                "connector: cannot change to or from mooncake_layerwise with --take-over; stop the router that runs "
                "first"
            )
        check_taken_over(saved_changes(folder.changes, found.state.lineage).workers, config)
    except ConfigError:
        found.close()
        raise
    return found


def _continue_key_rates(table: KeyTable, predecessor: Predecessor) -> None:
    """Take over the key use of the predecessor's clients."""
    try:
        table.continue_from(predecessor.keys.fileno())
    except (ValueError, TypeError, OSError) as error:
        log.warning(
            "use of client keys is not known: each begins with a full minute's allowance", extra={"error": str(error)}
        )


def _try_forecasts(config: Config) -> None:
    """Find out whether the predictor can be used; for a process of its own. Raises: ConfigError, InputError."""
    forecasts = build_forecasts(config)
    if forecasts is not None:
        forecasts.close()


def begin_anew(journal: Path) -> None:
    """Remove the last router's journal, a file, and find out whether a new one can be written. Raises: ConfigError."""
    try:
        if journal.is_file() and _is_written(journal):
            raise ConfigError(f"{journal}: another process writes it")
        journal.unlink(missing_ok=True)
        try:
            journal.write_bytes(b"\n")  # a full disk lets a file be made
        finally:
            journal.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{journal}: {error.strerror}") from None


def _is_written(journal: Path) -> bool:
    """Whether a router still writes this journal (`journal.claim`)."""
    try:
        file = locked(journal)
    except OSError:  # a file system without locks, or an error that opening the journal will report
        return False
    if file is not None:
        os.close(file)
    return file is None
