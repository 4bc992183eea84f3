"""Where decode workers ask for prefills, with the layerwise connector (`life/layerwise.py`)."""

import logging
from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.proxy.life.leg import LifeServices
from balanceroute.proxy.wire.connectors import METASERVER_PATH, LayerwiseConnector
from balanceroute.proxy.wire.responses import error_body

log = logging.getLogger(__name__)


class Metaserver:
    """`POST /v1/metaserver/TOKEN`: decode workers ask for prefills; `services` is called per request."""

    def __init__(self, services: Callable[[], LifeServices]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The one route, and the one of the example proxy, where nobody shows a token."""
        return [
            Route(METASERVER_PATH, self.callback, methods=["POST"]),
            Route(METASERVER_PATH + "/{token}", self.callback, methods=["POST"]),
        ]

    async def callback(self, request: Request) -> Response:
        """Answered before the prefill begins: the connector has 32 threads per engine for all its callbacks."""
        services = self._services()
        connector = services.connector
        assert isinstance(connector, LayerwiseConnector)
        token = request.path_params.get("token", "")
        if not connector.expects(token):
            services.metrics.callbacks.inc("refused")
            log.info("callback refused", extra={"peer": request.client.host if request.client else ""})
            text = "Only the decode worker of a request under way may ask for its prefill, at the URL that it was sent."
            return Response(error_body(403, text), 403, media_type="application/json")
        try:
            asked = orjson.loads(await request.body())
            known_as = asked["request_id"]
            if not isinstance(known_as, str):
                raise TypeError("request_id")
            params = orjson.dumps(asked)
        except (ValueError, KeyError, TypeError):
            services.metrics.callbacks.inc("malformed")
            text = "The body must be a JSON object with a request_id."
            return Response(error_body(400, text, "request_id"), 400, media_type="application/json")
        outcome = connector.called_back(token, known_as, params)
        services.metrics.callbacks.inc(outcome)
        if outcome == "unknown":
            text = "This is not the request that the URL was made for."
            return Response(error_body(404, text, "request_id"), 404, media_type="application/json")
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")
