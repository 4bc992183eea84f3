"""The sockets of a router of several processes, which its parent binds before the fork, or takes from a predecessor."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from balanceroute.config import Config
from balanceroute.config.addresses import NO_ADDRESS, host_in_url
from balanceroute.errors import ConfigError
from balanceroute.proxy.client.acceptor import BACKLOG
from balanceroute.proxy.parent.handover import Predecessor
from balanceroute.proxy.run_folder.folder import run_folder

AT_WORK: Final = "a router with relays runs there; --take-over replaces it"


def listeners(config: Config, predecessor: Predecessor | None) -> Iterator[socket.socket]:
    """The clients' socket, and the operators' where they have one. Raises: ConfigError."""
    listen = config.listen
    try:
        clients = _listener("listen", listen.host, listen.port, predecessor)
    except ConfigError as error:
        if predecessor is None and listen.port and run_folder(config, listen.port, os.environ).is_claimed:
            raise ConfigError(f"{error}: {AT_WORK}") from None
        raise
    yield clients
    if listen.admin_address is not None:
        yield _listener("listen.admin", *listen.admin_address, predecessor)


def _listener(name: str, host: str, port: int, predecessor: Predecessor | None) -> socket.socket:
    """A socket that listens at this address, the predecessor's if it has one. Raises: ConfigError."""
    sock = bound(name, host, port, predecessor)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(name, host, port, os.strerror(error.errno or 0)) from None
    return sock


def bound(name: str, host: str, port: int, predecessor: Predecessor | None) -> socket.socket:
    """A socket that is bound to this address, the predecessor's if it has one. Raises: ConfigError."""
    wrong = NO_ADDRESS
    with suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found)  # IPv4 first, if a name has both
        if predecessor is not None and (taken := predecessor.listener(str(address[0]), port)) is not None:
            return taken
        try:
            return _bind(family, (str(address[0]), port))
        except OSError as error:
            wrong = os.strerror(error.errno) if error.errno else str(error)
    raise _cannot_listen(name, host, port, wrong)


def _bind(family: int, address: tuple[str, int]) -> socket.socket:
    """As `socket.create_server`, without listening yet. Raises: OSError."""
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _cannot_listen(name: str, host: str, port: int, wrong: str) -> ConfigError:
    return ConfigError(f"{name}: cannot listen on {host_in_url(host)}:{port}: {wrong}")
