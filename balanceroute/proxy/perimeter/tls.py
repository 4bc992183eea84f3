"""Certificates: ours towards clients, theirs if they must show one, and both sides' towards workers.

Every handshake is made under the context of the moment (`client/handshake.py`). Whether there is TLS at all, and
whether clients must show a certificate, stays until a restart, so that no change of a file opens a router.

Between machines the link between brain and relays has a CA of its own, and both sides show a certificate of it. One
port carries the link and operators' requests, which ALPN tells apart.

Files are read again on SIGHUP, and when they have changed; connections that stand go on under the old ones. No session
is resumed: a client whose CA has gone must not come back by what it was given before.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from balanceroute.config import Config
from balanceroute.config.models import TlsFiles
from balanceroute.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S: Final = 60.0

LINK: Final = "balanceroute-link"  # ALPN
HTTP: Final = "http/1.1"

Stamp = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class LinkTls:
    """TLS 1.3 of the link between machines: a brain takes connections under `brain`; a relay opens some under `relay`
    for the link and under `operators` for operators' requests.
    """

    brain: ssl.SSLContext
    relay: ssl.SSLContext
    operators: ssl.SSLContext


class Tls:
    """The contexts of one router; `server` is for the next connection of a client, None for plain HTTP."""

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError: a file cannot be used; nothing is half done."""
        self._settings, self._stamp = config.tls, _stamp(config.tls)
        self.server = _server_context(config.tls)
        self._workers = _worker_context(config.tls)
        self._link = _link_contexts(config.tls)

    def for_workers(self) -> ssl.SSLContext:
        """For the next connection to an https worker."""
        if self._workers is None:
            self._workers = ssl.create_default_context()  # takes time and memory, which plain HTTP should not cost
        return self._workers

    @property
    def link(self) -> LinkTls:
        """For the next connection to or from another machine's brain or relay; the configuration has it."""
        assert self._link is not None
        return self._link

    def reload(self, config: Config) -> None:
        """Use what the files hold now. Raises: ConfigError: one is of no use, or needs a restart; nothing changed."""
        settings = config.tls
        for name in ("cert_file", "client_ca_file", "link_ca_file", "link_cert_file"):
            if (getattr(settings, name) is None) is not (getattr(self._settings, name) is None):
                raise ConfigError(f"tls.{name}: cannot be set or unset while the router runs; restart it")
        stamp = _stamp(settings)
        server, workers, link = _server_context(settings), _worker_context(settings), _link_contexts(settings)
        self._settings, self._stamp, self.server, self._workers, self._link = settings, stamp, server, workers, link

    async def watch(self, config: Callable[[], Config], period_s: float = LOOK_S) -> None:
        """Until cancelled, read files again that have changed, as those are that are renewed by themselves."""
        while True:
            await asyncio.sleep(period_s)
            stamp = _stamp(self._settings)
            if stamp == self._stamp:
                continue
            try:
                self.reload(config())
            except ConfigError as error:
                self._stamp = stamp  # said once; the next change is another try
                log.warning("certificates not reloaded", extra={"error": str(error)})
            else:
                log.info("certificates reloaded")


def _server_context(settings: TlsFiles) -> ssl.SSLContext | None:
    if settings.cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols([HTTP])
    _load_chain(context, "tls.cert_file", settings.cert_file, settings.key_file)
    if settings.client_ca_file is not None:
        _load_ca(context, "tls.client_ca_file", settings.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _worker_context(settings: TlsFiles) -> ssl.SSLContext | None:
    """None: that of the system will do."""
    if settings.worker_ca_file is None and settings.worker_cert_file is None:
        return None
    if settings.worker_ca_file is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # this CA alone
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


def _load_chain(context: ssl.SSLContext, key: str, certificate: str, private_key: str | None) -> None:
    try:
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        files = certificate if private_key is None else f"{certificate} with {private_key}"
        raise ConfigError(f"{key}: {files} cannot be used: {_told(error)}") from None


def _load_ca(context: ssl.SSLContext, key: str, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{key}: {file} cannot be used: {_told(error)}") from None


def _no_password() -> str:
    """Without this OpenSSL would ask on the terminal. Raises: OSError."""
    raise OSError("the private key is encrypted; accepted is one without a password")


def _told(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def _stamp(settings: TlsFiles) -> Stamp:
    """When each file was changed last; a missing one has a stamp, too."""
    files = [file for file in settings.model_dump().values() if file is not None]
    return tuple((file, Path(file).stat().st_mtime_ns if Path(file).exists() else 0) for file in files)
