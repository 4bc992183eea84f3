"""Where decode workers ask for prefills, with the layerwise connector (`life/layerwise.py`)."""

import logging
from collections.abc import Callable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.proxy.client.asgi import REQUEST_ID
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.link.callbacks import EXPECTED, REFUSED, OtherRelays
from balanceroute.proxy.wire.connectors import METASERVER_PATH, Callbacks
from balanceroute.proxy.wire.responses import error_body

log = logging.getLogger(__name__)

_ERRORS: Final = {
    REFUSED: (
        403,
        "Only the decode worker of a request under way may ask for its prefill, at the URL that it was sent.",
        None,
    ),
    "malformed": (400, "The body must be a JSON object with a request_id.", "request_id"),
    "unknown": (404, "This is not the request that the URL was made for.", "request_id"),
}


class Metaserver:
    """`POST /v1/metaserver/TOKEN`: decode workers ask for prefills; `services` is called per request."""

    def __init__(self, services: Callable[[], LifeServices], others: OtherRelays | None = None) -> None:
        """`others`: the relays that may hold the request instead; None: there are none."""
        self._services, self._others = services, others

    def routes(self) -> list[Route]:
        """The route with a token, and the example proxy's without one, which is refused."""
        return [
            Route(METASERVER_PATH, self.callback, methods=["POST"]),
            Route(METASERVER_PATH + "/{token}", self.callback, methods=["POST"]),
        ]

    async def callback(self, request: Request) -> Response:
        """Take a callback. It is answered before the prefill begins: a connector has 32 threads per engine for all
        callbacks.
        """
        token = request.path_params.get("token", "")
        if self.answer(token, None) == EXPECTED:
            outcome = self.answer(token, await request.body())
        elif self._others is not None and await self._others.ask(token) != REFUSED:
            outcome = await self._others.ask(token, await request.body())
        else:
            outcome = REFUSED
        if outcome == REFUSED:
            return self._refused(request)
        if outcome in _ERRORS:
            return _error(outcome)
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")

    def answer(self, token: str, body: bytes | None) -> str:
        """Say whether this process expects the token; with a body, take the callback and say how that went."""
        services = self._services()
        if not services.callbacks.expects(token):
            return REFUSED
        if body is None:
            return EXPECTED
        outcome = _take(services.callbacks, token, body)
        services.metrics.callbacks.inc(outcome)
        return outcome

    def _refused(self, request: Request) -> Response:
        self._services().metrics.callbacks.inc(REFUSED)
        fields = {"request": request.scope.get(REQUEST_ID, ""), "peer": request.client.host if request.client else ""}
        log.info("callback refused", extra={**fields, "path": METASERVER_PATH, "status": 403})  # a token may be valid
        return _error(REFUSED)


def _take(callbacks: Callbacks, token: str, body: bytes) -> str:
    try:
        known_as = orjson.loads(body)["request_id"]
    except (ValueError, KeyError, TypeError):
        return "malformed"
    return callbacks.called_back(token, known_as, body) if isinstance(known_as, str) else "malformed"


def _error(outcome: str) -> Response:
    status, text, param = _ERRORS[outcome]
    return Response(error_body(status, text, param), status, media_type="application/json")
