"""Decides by a request's headers and peer whether it is admitted, and as whom.

Pure, so that the ASGI routes (`ops/guard.py`) and the hot path can call it before they read a body. The peer is the
socket's. A header that names another peer never grants access; it only denies it.

**Client** routes ask for a key where `auth.client_keys` is set. Without, they are for everyone who can connect.

**Admin** routes ask for `auth.admin_token`. Without one they are for the router's own machine alone: the peer is a
loopback address, no header says that a proxy stands in between (it makes everyone loopback), and Host is a name of this
machine, so that a page whose name resolves to 127.0.0.1 gets nowhere (DNS rebinding).

In both cases requests that another site's page made a browser send are refused: Origin and Sec-Fetch-Site must be the
router's own, and every change is a POST of JSON, which no form and no plain `fetch` can make.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final
from urllib.parse import urlsplit

from balanceroute.config import is_loopback
from balanceroute.errors import AccessDenied
from balanceroute.proxy.perimeter.keys import bearer
from balanceroute.proxy.wire.responses import Headers

READS: Final = frozenset(("GET", "HEAD"))
DASHBOARD_PATH: Final = "/dashboard"
SESSION_COOKIE: Final = "balanceroute_session"
SESSION_S: Final = 7 * 86_400
_OF_PROXIES: Final = frozenset((b"forwarded", b"via", b"x-real-ip", b"true-client-ip", b"cf-connecting-ip"))


@dataclass(frozen=True, slots=True)
class Visit:
    """The parts of a request that the decision depends on; header names in lower case, `peer`: the socket's address
    without port.
    """

    method: str
    headers: Headers
    peer: str | None
    path: str = ""

    @property
    def watches(self) -> bool:
        """Whether the request only shows the dashboard."""
        return self.method in READS and (self.path == DASHBOARD_PATH or self.path.startswith(f"{DASHBOARD_PATH}/"))


class AdminGate:
    """Access control of the admin routes, with a token or without."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else _digest(token.encode())
        # signs sessions, which end when the token changes
        self._session_key = b"" if token is None else _digest(b"dashboard session\0" + token.encode())

    def admit(self, visit: Visit, now_unix_s: float) -> str:
        """Admit a request; returns by which credential: "token", "session" or "loopback". Raises: AccessDenied: 401,
        403, 415.
        """
        by = self._identify(visit, now_unix_s)
        _check_origin(visit)
        if visit.method not in READS:
            _check_content_type(visit)
        return by

    def is_shown(self, headers: Headers) -> bool:
        """Whether the request has the right token."""
        if self._digest is None:
            return False
        given = bearer(headers)
        return given is not None and compare_digest(_digest(given), self._digest)

    def new_session(self, now_unix_s: float) -> str:
        """The value of a cookie that shows the dashboard for `SESSION_S`."""
        ends = str(int(now_unix_s) + SESSION_S)
        return f"{ends}.{self._signature(ends)}"

    def _identify(self, visit: Visit, now_unix_s: float) -> str:
        if self._digest is None:
            _check_local(visit)
            return "loopback"
        if self.is_shown(visit.headers):
            return "token"
        if bearer(visit.headers) is not None:
            raise _unauthorized("The admin token is wrong.", "wrong_token")
        if visit.watches and self._has_session(visit.headers, now_unix_s):
            return "session"
        raise _unauthorized("This route needs auth.admin_token as a bearer token.", "no_token")

    def _has_session(self, headers: Headers, now_unix_s: float) -> bool:
        for value in _sessions(headers):
            ends, _, signature = value.partition(".")
            signed = compare_digest(signature.encode(), self._signature(ends).encode())
            if signed and now_unix_s < int(ends):
                return True
        return False

    def _signature(self, ends: str) -> str:
        return hashlib.blake2b(ends.encode(), key=self._session_key, digest_size=32).hexdigest()


def _check_local(visit: Visit) -> None:
    """Check that the request comes from this machine. Raises: AccessDenied: 403."""
    if not is_loopback(visit.peer):
        raise _forbidden("is open to calls from the router's own machine to 127.0.0.1 only", "not_loopback")
    for name, _ in visit.headers:
        if name in _OF_PROXIES or name.startswith(b"x-forwarded"):
            raise _forbidden("is not open to what comes through a proxy", "proxied")
    if not _names_this_machine(_host(visit.headers)):
        raise _forbidden("is open under a loopback address or localhost as its Host only", "foreign_host")


def _check_origin(visit: Visit) -> None:
    """Refuse requests that another site's page made a browser send. Raises: AccessDenied: 403."""
    foreign = foreign_origin(visit.headers) is not None
    for name, value in visit.headers:
        if name == b"sec-fetch-site" and visit.method not in READS and value not in (b"same-origin", b"none"):
            foreign = True
    if foreign:
        raise AccessDenied("Pages of other sites may not use this route.", status=403, reason="foreign_origin")


def foreign_origin(headers: Headers) -> bytes | None:
    """The Origin of another site; None: there is none, or it is the router's own."""
    for name, value in headers:
        if name == b"origin":
            host = _host(headers)
            if not host or _authority(value) != host:
                return value
    return None


def _check_content_type(visit: Visit) -> None:
    """Refuse a body that is not declared as JSON: any page may send one. Raises: AccessDenied: 415."""
    declared = [value for name, value in visit.headers if name == b"content-type"]
    if not declared and not _has_body(visit.headers):
        return
    if len(declared) != 1 or declared[0].partition(b";")[0].strip().lower() != b"application/json":
        text = "The body must be JSON, with the header Content-Type: application/json."
        raise AccessDenied(text, status=415, reason="content_type")


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0") for name, value in headers
    )


def _host(headers: Headers) -> bytes:
    """The one Host in lower case; empty when there is none, or more."""
    hosts = [value for name, value in headers if name == b"host"]
    return hosts[0].strip().lower() if len(hosts) == 1 else b""


def _authority(origin: bytes) -> bytes:
    """HOST:PORT of an Origin, in lower case; empty for `null` and what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return b""


def _names_this_machine(host: bytes) -> bool:
    try:
        name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name)


def _sessions(headers: Headers) -> Iterable[str]:
    """The values of the dashboard's cookies."""
    for field, value in headers:
        if field == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                key, _, content = pair.strip().partition("=")
                if key == SESSION_COOKIE:
                    yield content


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _unauthorized(text: str, reason: str) -> AccessDenied:
    return AccessDenied(text, status=401, reason=reason)


def _forbidden(why: str, reason: str) -> AccessDenied:
    text = f"This route {why} while no auth.admin_token is set; set one and send it as a bearer token."
    return AccessDenied(text, status=403, reason=reason)
