"""A process that holds clients and their streams; the brain decides."""

import socket
from collections.abc import Callable

from balanceroute.config import Config
from balanceroute.proxy.run_folder import RunFolder


def run_relay(
    config: Config, listeners: list[socket.socket], folder: RunFolder, name: str, load: Callable[[], Config]
) -> None:
    """Serve clients until a signal ends it: SIGTERM once stops accepting and finishes what is here, twice ends now;
    SIGHUP reloads.

    Args: listeners: bound sockets, shared with the other relays. name: one that no other living relay of the router
    has; the same after a restart. load: reads the configuration anew, for SIGHUP.

    Raises: ConfigError: a file that the configuration names is wrong.
    """
    raise NotImplementedError
