"""Access of browsers' pages to the client routes: the router's own pages and those of allowed origins.

Pages of other sites get nothing unless `auth.allowed_origins` names them. A browser keeps them from reading answers,
but not from sending a form, so where no client key is asked for, a request that names a foreign origin is refused.
If keys are set a page needs one, too. Credentials that browsers add by themselves (cookies) mean
nothing on these routes, so no answer says Access-Control-Allow-Credentials.

The protocol is CORS of the Fetch standard (https://fetch.spec.whatwg.org, "HTTP extensions"). Admin routes never take
part: `perimeter/access.py` refuses every foreign origin there.
"""

import re
from collections.abc import Iterable
from typing import Final

from balanceroute.errors import AccessDenied
from balanceroute.proxy.perimeter.access import foreign_origin
from balanceroute.proxy.wire.responses import Headers

MAX_AGE_S: Final = 600  # for which a browser caches a preflight
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1024}")
_EXPOSED: Final = (b"access-control-expose-headers", b"x-request-id, request-id, retry-after, x-should-retry")


class Pages:
    """The origins whose pages may use the client routes; `*`: every origin.

    Attributes: `some`: whether there are any; if not, OPTIONS is refused like any method that no route has.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._any = b"*" in self._allowed
        self.some = bool(self._allowed)

    def check(self, headers: Headers) -> None:
        """Refuse requests of other pages. Raises: AccessDenied: 403."""
        origin = foreign_origin(headers)
        if origin is not None and not self._is_allowed(origin):
            text = "Pages of other sites may not use this route, unless auth.allowed_origins names their origin."
            raise AccessDenied(text, status=403, reason="foreign_origin")

    def answer_headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """The CORS headers of an answer, so that the browser lets the page read it."""
        if not self.some:
            return []
        if self._any:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), _EXPOSED]
        vary = (b"vary", b"origin")
        if origin is None or not self._is_allowed(origin):
            return [vary]
        return [(b"access-control-allow-origin", origin), _EXPOSED, vary]

    def preflight(self, headers: Headers, methods: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """The headers that answer a browser's question whether a page may send its request. Raises: AccessDenied."""
        self.check(headers)
        by_name = dict(headers)
        wanted = by_name.get(b"access-control-request-headers", b"")
        return [
            *self.answer_headers(by_name.get(b"origin")),
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else b""),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]

    def _is_allowed(self, origin: bytes) -> bool:
        return self._any or origin.lower() in self._allowed
