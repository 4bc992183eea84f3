"""TLS contexts: for clients (with client certificates if required), for workers, and for the link between machines.

Every handshake uses the present context (`client/handshake.py`). Whether TLS is on, and whether clients must show a
certificate, changes only at a restart, so that no change of a file opens a router.

Between machines the link between brain and relays has a CA of its own, and both sides show a certificate of it. One
port carries the link and operators' requests, which ALPN tells apart.

Files are read again on SIGHUP and when they change; open connections keep the old ones. Sessions are never resumed, so
that a client of a removed CA can't come back.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from balanceroute.config import Config
from balanceroute.config.patience import off_the_loop
from balanceroute.config.sections.access import TlsFiles
from balanceroute.errors import ConfigError
from balanceroute.proxy.perimeter.certificate_expiry import expiry_s

log = logging.getLogger(__name__)

LOOK_S: Final = 60.0

LINK: Final = "balanceroute-link"  # ALPN
HTTP: Final = "http/1.1"

Stamp = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LinkTls:
    """TLS 1.3 of the link between machines: a brain takes connections under `brain`; a relay opens some under `relay`
    for the link and under `operators` for operators' requests.
    """

    brain: ssl.SSLContext
    relay: ssl.SSLContext
    operators: ssl.SSLContext


class _Contexts:
    """The contexts made from the files of `settings` as of `stamp`."""

    def __init__(self, settings: TlsFiles) -> None:
        """Raises: ConfigError: a file cannot be used."""
        self.settings, self.stamp = settings, _stamp(settings)
        self.server, self.workers = _server_context(settings), _worker_context(settings)
        self.link, self.expiries = _link_contexts(settings), _expiries(settings)


class Tls:
    """The contexts of one router; `server` is for the next connection of a client, None for plain HTTP."""

    _workers: ssl.SSLContext | None

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError: a file cannot be used; nothing is half done."""
        self._use(_Contexts(config.tls))

    def for_workers(self) -> ssl.SSLContext:
        """For the next connection to an https worker."""
        if self._workers is None:
            self._workers = ssl.create_default_context()  # imported only if needed: it takes time and memory
        return self._workers

    def expiries(self) -> dict[str, float]:
        """When each certificate that the router shows expires (Unix s), by the setting that names its file."""
        return self._expiries

    @property
    def link(self) -> LinkTls:
        """The contexts of the link between machines, which must be configured."""
        assert self._link is not None
        return self._link

    def reload(self, config: Config) -> None:
        """Read the files again. Raises: ConfigError: one is invalid, or needs a restart; nothing has changed."""
        for name in ("cert_file", "client_ca_file", "link_ca_file", "link_cert_file"):
            if (getattr(config.tls, name) is None) is not (getattr(self._settings, name) is None):
                raise ConfigError(f"tls.{name}: cannot be set or unset while the router runs; restart it")
        self._use(_Contexts(config.tls))

    def follow(self, config: Config) -> None:
        """As `reload`, after another process has checked the files; one that is invalid by now is left to `watch`."""
        stamp = _stamp(config.tls)  # before the files are read: a later change must count as another
        try:
            self.reload(config)
        except ConfigError as error:
            self._settings = config.tls
            self._refused(stamp, error)

    def _use(self, found: _Contexts) -> None:
        self._settings, self._stamp = found.settings, found.stamp
        self.server, self._link = found.server, found.link
        self._workers, self._expiries = found.workers, found.expiries

    def catch_up(self) -> None:
        """Read the files again that have changed since, for a process that did not `watch`; blocks."""
        stamp = _stamp(self._settings)
        if stamp == self._stamp:
            return
        try:
            self._use(_Contexts(self._settings))
        except ConfigError as error:
            self._refused(stamp, error)

    def _refused(self, stamp: Stamp, error: ConfigError) -> None:
        self._stamp = stamp  # logged once; the next change is another try
        log.warning("certificates not reloaded", extra={"error": str(error)})

    async def watch(self, period_s: float = LOOK_S) -> None:
        """Read files again when they have changed, as renewed certificates do; until cancelled.

        A file system that does not answer delays only the next check.
        """
        while True:
            await asyncio.sleep(period_s)
            settings = self._settings
            stamp = await off_the_loop(partial(_stamp, settings))
            if settings is not self._settings or stamp == self._stamp:
                continue
            try:
                found = await off_the_loop(partial(_Contexts, settings))
                if settings is self._settings:  # otherwise they were reloaded meanwhile
                    self._use(found)
            except ConfigError as error:
                self._refused(stamp, error)
            else:
                log.info("certificates reloaded")


def _server_context(settings: TlsFiles) -> ssl.SSLContext | None:
    if settings.cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL 1.1 lets a client of TLS 1.2 ask for one expensive handshake after the other over one connection
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    context.set_alpn_protocols([HTTP])
    _load_chain(context, "tls.cert_file", settings.cert_file, settings.key_file)
    if settings.client_ca_file is not None:
        _load_ca(context, "tls.client_ca_file", settings.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _worker_context(settings: TlsFiles) -> ssl.SSLContext | None:
    """The context for workers; None: the system's default."""
    if settings.worker_ca_file is None and settings.worker_cert_file is None:
        return None
    if settings.worker_ca_file is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only this CA
        _load_ca(context, "tls.worker_ca_file", settings.worker_ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.worker_cert_file is not None:
        _load_chain(context, "tls.worker_cert_file", settings.worker_cert_file, settings.worker_key_file)
    return context


def _link_contexts(settings: TlsFiles) -> LinkTls | None:
    if settings.link_cert_file is None or settings.link_ca_file is None:
        return None

    def made(protocol: int, *alpn: str) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        context.set_alpn_protocols(alpn)
        context.verify_mode = ssl.CERT_REQUIRED
        assert settings.link_cert_file is not None and settings.link_ca_file is not None
        _load_chain(context, "tls.link_cert_file", settings.link_cert_file, settings.link_key_file)
        _load_ca(context, "tls.link_ca_file", settings.link_ca_file)
        return context

    brain = made(ssl.PROTOCOL_TLS_SERVER, LINK, HTTP)
    brain.num_tickets = 0
    return LinkTls(brain, made(ssl.PROTOCOL_TLS_CLIENT, LINK), made(ssl.PROTOCOL_TLS_CLIENT, HTTP))


def _expiries(settings: TlsFiles) -> dict[str, float]:
    """Of the certificates of files that were just used; a file that has changed since is read again later."""
    found = {}
    for name in ("cert_file", "link_cert_file", "worker_cert_file"):
        file = getattr(settings, name)
        with suppress(OSError):
            expiry = None if file is None else expiry_s(Path(file).read_bytes())
            if expiry is not None:
                found[f"tls.{name}"] = expiry
    return found


def _load_chain(context: ssl.SSLContext, key: str, certificate: str, private_key: str | None) -> None:
    try:
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        files = certificate if private_key is None else f"{certificate} with {private_key}"
        problem = _reason(error, "a certificate, with those that it is signed by, and its private key, as PEM")
        raise ConfigError(f"{key}: {files} cannot be used: {problem}") from None


def _load_ca(context: ssl.SSLContext, key: str, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{key}: {file} cannot be used: {_reason(error, 'certificates as PEM')}") from None


def _no_password() -> str:
    """Without this OpenSSL would ask on the terminal. Raises: OSError."""
    raise OSError("the private key is encrypted; accepted is one without a password")


def _reason(error: OSError, accepted: str) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the private key is another certificate's"
    reason = f" ({error.reason})" if error.reason else ""
    return f"accepted is {accepted}{reason}"


def _stamp(settings: TlsFiles) -> Stamp:
    """The states of all files, which differ after a change."""
    return tuple((file, _state(file)) for file in settings.model_dump().values() if file is not None)


def _state(file: str) -> tuple[int, ...]:
    """A file's state, which differs after a change. The time alone is not enough: archives may give all files the same.

    Empty: it is missing or can't be read; its reader reports that.
    """
    try:
        found = Path(file).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size
