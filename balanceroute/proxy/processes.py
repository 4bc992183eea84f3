"""A router of several processes: one that decides, relays that hold clients, and a parent that watches over them.

The parent binds the sockets that clients reach, before there are children, and every relay accepts on them. So a relay
that died, or stands still, leaves the connections that wait there to the others.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from balanceroute.config import Config
from balanceroute.errors import ConfigError, InputError
from balanceroute.proxy.brain import run_brain
from balanceroute.proxy.perimeter.gate import Perimeter
from balanceroute.proxy.perimeter.tls import Tls
from balanceroute.proxy.relay import run_relay
from balanceroute.proxy.reload import check_fixed
from balanceroute.proxy.run_folder import RunFolder, run_folder
from balanceroute.proxy.supervisor import Supervisor, be_called
from balanceroute.proxy.telemetry.logs import configure

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
BRAIN: Final = "brain"
STANDBY: Final = "standby"


def serve_processes(config: Config, load: Callable[[], Config], journal: Path | None = None) -> int:
    """Run until a signal ends it; returns the exit code.

    Args: load: reads the configuration anew. journal: a file for every decision; a brain that is started again writes
    one beside it, with its process id at the end of the name.

    Raises: ConfigError: the configuration, an address or the run folder can't be used.
    """
    Perimeter(config), Tls(config)  # one line of the parent, instead of one of each child
    with ExitStack() as held:
        sockets = [held.enter_context(sock) for sock in _listeners(config)]
        folder = run_folder(config, sockets[0].getsockname()[1], os.environ)
        folder.make()
        folder.forget_counts()
        if journal is not None:
            with suppress(OSError):  # the brain says what is wrong with it
                journal.unlink()
        processes = Processes(config, load, folder, sockets, journal)
        configure(config.log.level, config.log.format, process="parent")
        return Supervisor(
            processes.mains(),
            processes.brains,
            processes.reload,
            processes.stop_listening,
            lambda: processes.config.lifecycle.drain_timeout_s,
        ).run()


class Processes:
    """What the children run, and the configuration that the next one starts with."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        folder: RunFolder,
        sockets: list[socket.socket],
        journal: Path | None,
    ) -> None:
        self.config, self._load, self._folder, self._sockets = config, load, folder, sockets
        self._journal = journal

    @property
    def brains(self) -> list[str]:
        """The names of those that may lead."""
        return [BRAIN, *(f"{BRAIN}-{number + 2}" for number in range(self.config.listen.standbys))]

    @property
    def relays(self) -> list[str]:
        """The names of the relays."""
        return [f"relay-{number}" for number in range(self.config.listen.relays)]

    def mains(self) -> dict[str, Callable[[], None]]:
        """Every child's, by its name; the brains are first."""
        mains: dict[str, Callable[[], None]] = {name: partial(self._brain, name) for name in self.brains}
        return mains | {name: partial(self._relay, name) for name in self.relays}

    def reload(self) -> bool:
        """Read the configuration again; False if it can't be used, and nothing has changed."""
        try:
            new = self._load()
            check_fixed(self.config, new)
        except (ConfigError, InputError) as error:
            log.warning("reload refused", extra={"error": str(error)})
            return False
        self.config = new
        configure(new.log.level, new.log.format, process="parent")
        return True

    def stop_listening(self) -> None:
        """Leave the sockets to the relays that are there: connections are refused once the last one has ended."""
        for sock in self._sockets:
            sock.close()

    def _brain(self, name: str) -> None:
        """It is called after what it does, as any of them may lead."""
        self.stop_listening()
        be_called(STANDBY)
        run_brain(self.config, self._folder, self._begin(name), self._journal, lambda: be_called(BRAIN))

    def _relay(self, name: str) -> None:
        run_relay(self.config, self._sockets, self._folder, name, self._begin(name))

    def _begin(self, name: str) -> Callable[[], Config]:
        """Say in the log who this is; returns what reads the configuration anew."""

        def load() -> Config:
            new = self._load()
            configure(new.log.level, new.log.format, process=name)
            return new

        configure(self.config.log.level, self.config.log.format, process=name)
        return load


def _listeners(config: Config) -> Iterator[socket.socket]:
    """The clients' socket, and the operators' where they have one. Raises: ConfigError."""
    listen = config.listen
    yield _listener("listen", listen.host, listen.port)
    if listen.admin_address is not None:
        yield _listener("listen.admin", *listen.admin_address)


def _listener(name: str, host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises: ConfigError."""
    wrong = "there is no such address"
    with suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found)  # IPv4 first, where a name has both
        try:
            sock = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as error:
            wrong = os.strerror(error.errno) if error.errno else str(error)
    raise ConfigError(f"{name}: cannot listen on {host}:{port}: {wrong}")
