"""The perimeter of one router: its keys, its admin token, and the credential that goes to the workers."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from balanceroute.config import Config, KeyEntry, is_loopback, read_client_keys
from balanceroute.config.addresses import host_in_url
from balanceroute.errors import AccessDenied, ConfigError, InvalidRequest
from balanceroute.proxy.perimeter.access import AdminGate, Visit
from balanceroute.proxy.perimeter.key_table import RelayRows
from balanceroute.proxy.perimeter.keys import ClientKey, ClientKeys
from balanceroute.proxy.perimeter.pages import Pages
from balanceroute.proxy.perimeter.routes import Access
from balanceroute.proxy.wire.responses import Headers

log = logging.getLogger(__name__)


class Perimeter:
    """The access control of one configuration; a reload makes a new one.

    `admin_port`: the only port for admin routes; None: all ports. `relay_rows`: of the key table of this machine's
    relays; None: there are no others.
    """

    __slots__ = ("admin", "admin_port", "keys", "pages", "public_metrics", "relay_rows", "_worker_authorization")

    def __init__(
        self, config: Config, entries: Iterable[KeyEntry] | None = None, relay_rows: RelayRows | None = None
    ) -> None:
        """`entries`: the contents of the key file, read by another process; None: the file is read here.

        Raises: ConfigError: the file of keys is wrong.
        """
        auth = config.auth
        self.relay_rows = relay_rows
        self.keys: ClientKeys | None = None
        if auth.client_keys is not None:
            self.keys = ClientKeys(_entries(auth.client_keys) if entries is None else entries, relay_rows)
        token = auth.admin_token
        self.admin = AdminGate(None if token is None else token.get_secret_value())
        self.pages = Pages(auth.allowed_origins)
        self.public_metrics = config.metrics.public
        address = config.listen.admin_address
        self.admin_port = None if address is None else address[1]  # the server sets it if it is 0
        key = auth.worker_api_key
        if key is not None:
            self._worker_authorization: bytes | None = b"Bearer " + key.get_secret_value().encode()
        else:
            self._worker_authorization = None if self.keys is None else b""

    @property
    def entries(self) -> tuple[KeyEntry, ...] | None:
        """The contents of the key file; None: there are no keys."""
        return None if self.keys is None else tuple(key.entry for key in self.keys)

    def share_keys(self, relay_rows: RelayRows) -> None:
        """In a relay: share key use with all relays on this machine, at the table that it was forked with."""
        self.relay_rows = relay_rows
        if self.keys is not None:
            self.keys = ClientKeys((key.entry for key in self.keys), relay_rows)

    def inherit(self, before: "Perimeter") -> None:
        """Replace another perimeter: past use of its keys still counts."""
        self.admin_port = before.admin_port
        if self.keys is not None and before.keys is not None:
            self.keys.inherit(before.keys)

    def apply_limits(self, now: float) -> None:
        """Change all keys to the limits of this configuration."""
        if self.keys is not None:
            self.keys.apply_limits(now)

    def check_listener(self, access: Access, port: int | None) -> None:
        """Whether a route of this class is served on this port. Raises: InvalidRequest: 404, as if there were none."""
        if self.admin_port is None or access is Access.OPEN:
            return
        if (access is Access.ADMIN) is not (port == self.admin_port):
            raise InvalidRequest("There is no such route on this listener.", status=404)

    def may_see_workers(self, visit: Visit, now_unix_s: float) -> bool:
        """Whether a caller of an open route may learn how workers are called, as everybody may of public metrics."""
        if self.public_metrics:
            return True
        try:
            self.admin.admit(visit, now_unix_s)
        except AccessDenied:
            return False
        return True

    def authorization_for(self, headers: Headers) -> bytes | None:
        """The Authorization for workers; None: the request's own; empty: none.

        The admin token is never passed on.
        """
        if self._worker_authorization is None and self.admin.is_shown(headers):
            return b""
        return self._worker_authorization

    def holder(self, headers: Headers) -> str:
        """The name under which the edge counts the memory of a client's bodies; empty: its address."""
        if self.keys is None:
            return ""
        try:
            return self.keys.of(headers).holder
        except AccessDenied:
            return ""  # its body will not be read

    def client(self, headers: Headers, now: float) -> ClientKey | None:
        """Admit a client's request; call `leave` of the returned key at its end. None: there are no keys.

        Raises: AccessDenied: 401, or 403 to a page of another site. KeyLimit: 429.
        """
        if self.keys is None:
            self.pages.check(headers)
            return None
        key = self.keys.of(headers)
        key.enter(now)
        return key


def exposures(config: Config) -> Iterator[str]:
    """Warnings about open access in this configuration, a line each."""
    listen, auth = config.listen, config.auth
    if auth.client_keys is not None or config.tls.client_ca_file is not None:
        return
    if auth.worker_api_key is not None:
        yield (
            "whoever can connect uses the workers' key: auth.worker_api_key (or OPENAI_API_KEY) is set without "
            "auth.client_keys"
        )
    if not is_loopback(listen.host):
        address = f"{host_in_url(listen.host)}:{listen.port}"
        yield f"whoever reaches {address} may use the cluster: auth.client_keys is not set"


def warn_of_exposures(old: Config, new: Config) -> None:
    """After a reload: the warnings that did not hold before, as at the start."""
    for text in sorted(set(exposures(new)).difference(exposures(old))):
        log.warning(text)


def _entries(file: str) -> tuple[KeyEntry, ...]:
    """Raises: ConfigError."""
    try:
        return read_client_keys(Path(file))
    except ConfigError as error:
        raise ConfigError(f"auth.client_keys: {error}") from None
