"""Access control before each handler, by the class of its route, and one log line per call.

    open      no check, no line; `/ready` names workers to operators alone where `/metrics` is theirs alone
    client    a client key where keys are set; a line
    decoder   the handler itself checks the token that it gave out
    admin     `perimeter.access`; a line with the caller, its credential and the call

The hot routes ask the same `Perimeter` in `client/exchange.py`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from balanceroute.errors import AccessDenied, BalanceRouteError, InvalidRequest, KeyLimit, Rejected, UpstreamError
from balanceroute.proxy.client.asgi import REQUEST_ID
from balanceroute.proxy.client.intake import read_head
from balanceroute.proxy.perimeter.access import Visit
from balanceroute.proxy.perimeter.keys import ClientKey
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.routes import Access, access_of
from balanceroute.proxy.telemetry.instruments import CounterFamily
from balanceroute.proxy.wire.message_errors import message_error_body
from balanceroute.proxy.wire.responses import Headers, body_of, extra_headers, json_headers, status_of

log = logging.getLogger(__name__)

READY: Final = "/ready"
LOG_FIELDS: Final = "log_fields"  # the attribute of `request.state` with a handler's fields for the log line
_ROUTE: Final = "balanceroute.route"  # in the ASGI scope: the matched route, which not every Starlette sets
_CLOSED: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-frame-options": "DENY"}


def error_response(error: BalanceRouteError) -> Response:
    """An error as its status and an OpenAI error body."""
    headers = dict(_texts(extra_headers(error)))
    return Response(body_of(error), status_of(error), headers, media_type="application/json")


async def _respond(request: Request, error: Exception) -> Response:
    assert isinstance(error, BalanceRouteError)
    return error_response(error)


ERROR_HANDLERS: Final = dict.fromkeys((InvalidRequest, Rejected, UpstreamError), _respond)
"""For an application: the errors of its handlers that are sent to clients; all others are bugs."""


def _texts(headers: Headers) -> Iterator[tuple[str, str]]:
    return ((name.decode(), value.decode("latin-1")) for name, value in headers)


def guarded(
    route: Route,
    perimeter: Callable[[], Perimeter],
    refusals: Callable[[], CounterFamily],
    sign_in: Response | None = None,
) -> Route:
    """The route with the access control of its class.

    `perimeter` and `refusals` are called per request, because they exist only while the router runs.

    Args: sign_in: the page for a browser without the admin token.
    Raises: KeyError: the table of classes does not have the route.
    """
    access_of(route.path)
    return _GuardedRoute(route, _Guard(route, perimeter, refusals, sign_in), perimeter)


def trusted(route: Route) -> Route:
    """The route without access control, for callers that another process of the router has let in."""
    return _TrustedRoute(route.path, route.endpoint, methods=sorted(route.methods or ()))


class _TrustedRoute(Route):
    """A route that notes its name in the scope, and logs the call. The other process logs the caller."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for this path."""
        scope[_ROUTE] = self.path
        call = _Call(scope, send)
        await super().handle(scope, receive, call.send)
        if asked := scope.get("state", {}).get(LOG_FIELDS):
            fields = {"request": scope.get(REQUEST_ID, ""), "path": scope["path"], "status": call.status}
            log.info("operator's change", extra={**fields, **asked})


class _GuardedRoute(Route):
    """A route that another class's listener answers with 404 for every method; it answers browsers' preflights."""

    def __init__(self, route: Route, guard: "_Guard", perimeter: Callable[[], Perimeter]) -> None:
        super().__init__(route.path, guard, methods=sorted(route.methods or ()))
        self._perimeter = perimeter

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for this path, whatever its method."""
        perimeter, server = self._perimeter(), scope.get("server")
        access = access_of(self.path, public_metrics=perimeter.public_metrics)
        try:
            perimeter.check_listener(access, server[1] if server else None)
        except InvalidRequest as error:
            await error_response(error)(scope, receive, send)
            return
        scope[_ROUTE] = self.path
        if scope["method"] == "OPTIONS" and access is Access.CLIENT and perimeter.pages.some:
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


class _Guard:
    """The access control of one route, as an ASGI application."""

    def __init__(
        self,
        route: Route,
        perimeter: Callable[[], Perimeter],
        refusals: Callable[[], CounterFamily],
        sign_in: Response | None,
    ) -> None:
        self._path, self._methods, self._sign_in = route.path, sorted(route.methods or ()), sign_in
        self._perimeter, self._refusals = perimeter, refusals
        self._app: ASGIApp = route.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the caller, serve or refuse the call, and log it."""
        perimeter, loop = self._perimeter(), asyncio.get_running_loop()
        access = access_of(self._path, public_metrics=perimeter.public_metrics)
        call = _Call(scope, send)
        if access is Access.OPEN or access is Access.DECODER:
            named = self._path != READY or perimeter.may_see_workers(call.visit, time.time())
            await self._app(scope, receive, send if named else without_names(send))
            return
        try:
            if access is Access.CLIENT and scope["method"] == "OPTIONS":
                cors_headers = perimeter.pages.preflight(scope["headers"], self._methods)
                await Response(None, 204, dict(_texts(cors_headers)))(scope, receive, call.send)
                return
            if access is Access.CLIENT:
                call.headers = perimeter.pages.answer_headers(dict(scope["headers"]).get(b"origin"))
                key = call.key = perimeter.client(scope["headers"], loop.time())
                call.fields |= {} if key is None else {"key": key.name}
            else:
                call.fields["by"] = perimeter.admin.admit(call.visit, time.time())
            await self._app(scope, receive, call.send)
        except (AccessDenied, KeyLimit) as error:
            call.fields["refused"] = error.reason
            if isinstance(error, KeyLimit):
                call.fields["key"] = error.key
            self._refusals().inc(error.reason)
            await self._refuse(error)(scope, receive, call.send)
        finally:
            call.leave()
            log.info("%s call", access.value, extra=call.log_fields())

    def _refuse(self, error: AccessDenied | KeyLimit) -> Response:
        if self._sign_in is not None and status_of(error) == 401:
            return self._sign_in
        return error_response(error)


class _Call:
    """One call of a guarded route: the decision on it and its log line."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        peer = scope.get("client")
        self.visit = Visit(scope["method"], scope["headers"], peer[0] if peer else None, scope["path"])
        self.status = 0
        self.key: ClientKey | None = None  # set while the key's request is in flight
        self.headers: Headers = []  # added to every answer
        self.fields: dict[str, Any] = {}

    async def send(self, message: Message) -> None:
        """Pass a message on, and note the status."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
        elif not message.get("more_body", False):
            self.leave()  # before the last byte: the client may send its next request as soon as it has that
        await self._send(message)

    def leave(self) -> None:
        """Release the key's request in flight."""
        key, self.key = self.key, None
        if key is not None:
            key.leave(asyncio.get_running_loop().time())

    def log_fields(self) -> dict[str, Any]:
        """The fields of the log line, without the query: people put secrets there."""
        state = self._scope.get("state", {})
        return {
            "request": self._scope.get(REQUEST_ID, ""),
            "peer": self.visit.peer or "",
            "method": self.visit.method,
            "path": self._scope["path"],
            "status": self.status,
            **self.fields,
            **state.get(LOG_FIELDS, {}),
        }


def with_request_id(scope: Scope, send: Send) -> Send:
    """A `send` that adds X-Request-Id to the response: the client's own, if it sent one."""
    if REQUEST_ID not in scope:  # set by the router's own server only
        scope[REQUEST_ID] = read_head(scope["headers"], None).response_id.decode()
    header = (b"x-request-id", scope[REQUEST_ID].encode())

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [field for field in message.get("headers", ()) if field[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*headers, header]}
        await send(message)

    return named


def with_message_errors(scope: Scope, send: Send) -> Send:
    """A `send` for Anthropic's clients: it adds `request-id`, and gives every error Anthropic's form.

    `with_request_id` comes first. Errors are assumed to be small, in one message.
    """
    request_id: str = scope[REQUEST_ID]
    refused: Message | None = None

    async def translated(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"request-id", request_id.encode())]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                refused = message
                return
        elif refused is not None and message["type"] == "http.response.body":
            start, refused = refused, None
            body = message_error_body(start["status"], message.get("body", b""), request_id)
            kept = [field for field in start["headers"] if field[0].lower() not in (b"content-length", b"content-type")]
            await send({**start, "headers": [*json_headers(body), *kept]})
            message = {**message, "body": body, "more_body": False}
        await send(message)

    return translated


def without_names(send: Send) -> Send:
    """A `send` of what `/ready` says, without its workers and what is wrong with them."""
    start: Message = {}
    body = b""

    async def shortened(message: Message) -> None:
        nonlocal start, body
        if message["type"] == "http.response.start":
            start = message
            return
        body += message.get("body", b"")
        if message.get("more_body", False):
            return
        answer = orjson.loads(body)
        short = orjson.dumps({name: answer[name] for name in ("status", "workers_up", "error") if name in answer})
        kept = [field for field in start["headers"] if field[0] not in (b"content-length", b"content-type")]
        await send({**start, "headers": [*json_headers(short), *kept]})
        await send({"type": "http.response.body", "body": short})

    return shortened


def route_of(request: Request) -> str:
    """The path of the route that serves this scope, with its parameters in braces."""
    path: str = request.scope[_ROUTE]
    return path


def add_log_fields(request: Request, **fields: Any) -> None:
    """Add fields to the log line of a call."""
    log_fields: dict[str, Any] = request.scope.setdefault("state", {}).setdefault(LOG_FIELDS, {})
    log_fields.update(fields)


def closed_headers() -> dict[str, str]:
    """Headers for operators' pages: not cached, not shown in frames of other pages."""
    return dict(_CLOSED)
