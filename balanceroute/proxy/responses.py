"""What the router itself says to a client: OpenAI error bodies, with the status that fits, and plain JSON."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import orjson

from balanceroute.errors import BalanceRouteError, InvalidRequest, Rejected, UpstreamError, UpstreamStatus

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE: Final = (b"content-type", b"application/json")
SSE_HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeout",
    413: "RequestEntityTooLarge",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGateway",
    503: "ServiceUnavailableError",
    504: "GatewayTimeout",
}


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """An OpenAI error object as JSON."""
    kind = _TYPES.get(status, "APIError")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def status_of(error: BalanceRouteError) -> int:
    """The status that a client should see for an error."""
    if isinstance(error, InvalidRequest | UpstreamStatus):
        return error.status
    return error.status_hint


def body_of(error: BalanceRouteError) -> bytes:
    """The JSON body for an error: a worker's own where it sent one, else ours."""
    if isinstance(error, UpstreamStatus) and error.body.lstrip().startswith(b"{"):
        return error.body
    param = error.param if isinstance(error, InvalidRequest) else None
    text = str(error)
    if isinstance(error, UpstreamStatus):
        text = f"{error.stage} worker answered {error.status}: {error.body[:500].decode('utf-8', 'replace')}"
    elif isinstance(error, UpstreamError):
        text = f"{error.stage or 'upstream'} worker: {text}"
    return error_body(status_of(error), text, param)


def error_event(error: BalanceRouteError, raw: bytes | None = None) -> bytes:
    """An SSE event that tells an error after the first byte; `raw` is the worker's own error object."""
    return b"data: " + (raw or body_of(error).replace(b"\n", b" ")) + b"\n\n"


def extra_headers(error: BalanceRouteError) -> Headers:
    """Headers that belong to an error: when to come back."""
    if isinstance(error, UpstreamStatus) and error.retry_after_s:
        return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s)))]
    if isinstance(error, Rejected) and error.retry_after_s is not None:
        return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s)))]
    return []


def json_headers(body: bytes, more: Headers | None = None) -> Headers:
    """The headers of a whole JSON response."""
    return [JSON_TYPE, (b"content-length", b"%d" % len(body)), *(more or ())]


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """A whole JSON response."""
    await send({"type": "http.response.start", "status": status, "headers": json_headers(body, headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: BalanceRouteError, headers: Headers | None = None) -> None:
    """An error before the first byte: its status and an OpenAI error body."""
    await send_json(send, status_of(error), body_of(error), [*extra_headers(error), *(headers or ())])
