"""Serves a request by an ASGI application: every route but the hot ones."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message

from balanceroute.errors import BalanceRouteError, InvariantError
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.intake import read_head
from balanceroute.proxy.client.response import Response, check_headers
from balanceroute.proxy.wire.connectors import METASERVER_PATH
from balanceroute.proxy.wire.message_errors import is_messages_path, message_refusal

log = logging.getLogger(__name__)

REQUEST_ID: Final = "balanceroute.request_id"  # the scope's key for the response's X-Request-Id


def path_shown(path: str) -> str:
    """A path for the log: without the token of a decode worker's callback, which may be valid."""
    return METASERVER_PATH if path.startswith(f"{METASERVER_PATH}/") else path


class AsgiHandler:
    """Calls the application as soon as the head is known, so that it may refuse a request before its body is read.

    The application gets the body whole. `send_continue` sends 100 Continue to a client that waits for it.
    """

    __slots__ = (
        "_app",
        "_app_state",
        "_body_ready",
        "_body_sent",
        "_lost",
        "_name",
        "_request",
        "_response",
        "_send_continue",
    )

    def __init__(
        self,
        app: ASGIApp,
        app_state: Mapping[str, Any],
        request: Request,
        response: Response,
        send_continue: Callable[[], None],
    ) -> None:
        self._app, self._app_state = app, app_state
        self._name = read_head(request.headers, None).response_id
        self._request, self._response, self._send_continue = request, response, send_continue
        self._body_ready: asyncio.Event | None = None  # set when the body is complete, or will never be
        self._body_sent = False
        self._lost = False
        if is_messages_path(request.path):
            response.refusal = message_refusal

    def check(self) -> None:
        """Nothing: the application checks requests itself."""

    def refuse(self, error: BalanceRouteError) -> None:
        """Send the error, with the id and the log line that the application would have made."""
        self.abandoned()
        if not self._response.started:
            request = self._request
            fields = {"request": self._name.decode(), "peer": request.peer[0] if request.peer else ""}
            fields |= {"method": request.method, "path": path_shown(request.path)}
            log.info("refused", extra={**fields, "error": str(error)})
            self._response.refuse(error, [(b"x-request-id", self._name), *request.refusal_headers])

    def abandoned(self) -> None:
        """Note that the body will not come."""
        self._lost = True
        self.body_has_come()

    def body_has_come(self) -> None:
        """Note that the body is complete."""
        if self._body_ready is not None:
            self._body_ready.set()

    async def run(self) -> None:
        """One call of the application."""
        try:
            await self._app(self._scope(), self._receive, self._send)
        except ClientDisconnect:
            if not self._lost:
                raise

    def _scope(self) -> dict[str, Any]:
        request = self._request
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.http_1_0 else "1.1",
            "method": request.method,
            "scheme": request.scheme,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": request.peer,
            "server": request.local,
            "state": dict(self._app_state),
            REQUEST_ID: self._name.decode(),
        }

    async def _receive(self) -> Message:
        if self._body_sent:
            await self._response.over()
        elif not self._request.complete and not self._lost:
            self._send_continue()
            self._body_ready = asyncio.Event()
            await self._body_ready.wait()
        if self._body_sent or self._lost:
            return {"type": "http.disconnect"}
        self._body_sent = True
        return {"type": "http.request", "body": self._request.body, "more_body": False}

    async def _send(self, message: Message) -> None:
        response = self._response
        if self._lost:
            return  # it has been answered, or the client has gone
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            check_headers(headers)
            response.start(message["status"], headers)
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if not message.get("more_body", False):
                response.end(body)
                return
            while body and not response.write(body):
                await response.drained()
        else:
            raise InvariantError(f"an ASGI message of type {message['type']}")
