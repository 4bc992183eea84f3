"""The router's own answers to clients: OpenAI error bodies with their status, and JSON."""

import math
from collections.abc import Sequence
from typing import Final

import orjson

from balanceroute.errors import (
    AccessDenied,
    BalanceRouteError,
    CannotConnect,
    DecodersLost,
    InvalidRequest,
    Rejected,
    UpstreamError,
    UpstreamStatus,
)
from balanceroute.proxy.wire.bounds import error_object

Headers = Sequence[tuple[bytes, bytes]]

JSON_TYPE: Final = (b"content-type", b"application/json")
SSE_HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events otherwise
]
INTERNAL_ERROR: Final = "Internal error of the router; see its log."  # clients get no details of a bug in the router
_line: Final = b": ".join
_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "RequestEntityTooLarge",
    414: "RequestURITooLong",
    415: "UnsupportedMediaType",
    417: "ExpectationFailed",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLarge",
    500: "InternalServerError",
    502: "BadGateway",
    503: "ServiceUnavailableError",
    504: "GatewayTimeout",
    505: "HTTPVersionNotSupported",
}


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """An OpenAI error object as JSON."""
    kind = _TYPES.get(status, "APIError")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def status_of(error: BalanceRouteError) -> int:
    """The HTTP status for an error."""
    if isinstance(error, InvalidRequest | UpstreamStatus):
        return error.status
    return error.status_hint


def body_of(error: BalanceRouteError) -> bytes:
    """The JSON body for an error: a worker's own, if it sent one, else the router's."""
    if isinstance(error, UpstreamStatus) and (own := error_object(error.body)) is not None:
        return own
    if isinstance(error, AccessDenied) and error.status == 401:  # as OpenAI's own
        body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
        return orjson.dumps({"error": body})
    param = error.param if isinstance(error, InvalidRequest) else None
    text = str(error)
    if isinstance(error, UpstreamStatus):
        text = f"{error.tier} worker answered {error.status}: {error.body[:500].decode('utf-8', 'replace')}"
    elif isinstance(error, UpstreamError) and error.tier:  # an error without a tier is not a worker's
        text = f"{error.tier} worker: {text}"
    return error_body(status_of(error), text, param)


def error_event(error: BalanceRouteError) -> bytes:
    """The SSE event of an error after the first byte; clients recognise it by its `error`."""
    body = body_of(error)
    if isinstance(error, UpstreamStatus) and not orjson.loads(body).get("error"):
        body = error_body(error.status, text_of(body))
    return b"data: " + body + b"\n\n"


def text_of(body: bytes) -> str:
    """The message in a JSON error object of an engine; else the body as text."""
    try:
        parsed = orjson.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error")
        for holder in (error if isinstance(error, dict) else {}, parsed):
            for name in ("message", "detail"):
                if isinstance(holder.get(name), str):
                    return str(holder[name])
        if isinstance(error, str):
            return error
    return body.decode("utf-8", "replace")


def refusal(error: BalanceRouteError, headers: Headers) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error; `headers`: further headers of the response."""
    body = body_of(error)
    return status_of(error), json_headers(body, [*extra_headers(error), *headers]), body


def extra_headers(error: BalanceRouteError) -> Headers:
    """Headers for an error: Retry-After, WWW-Authenticate, and x-should-retry for OpenAI's clients."""
    if isinstance(error, DecodersLost):
        return [(b"x-should-retry", b"false")]
    if isinstance(error, AccessDenied) and error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Rejected | CannotConnect) or (isinstance(error, UpstreamStatus) and error.retry_after_s):
        whole_s = max(1, math.ceil(round(error.retry_after_s, 3)))  # a client that is back too early is refused again
        return [(b"retry-after", b"%d" % whole_s)]
    return []


def header_lines(headers: Headers) -> bytes:
    """Headers as bytes of HTTP/1.1."""
    return b"\r\n".join((*map(_line, headers), b""))


def json_headers(body: bytes, more: Headers = ()) -> Headers:
    """The headers of a whole JSON response."""
    return [JSON_TYPE, (b"content-length", b"%d" % len(body)), *more]
