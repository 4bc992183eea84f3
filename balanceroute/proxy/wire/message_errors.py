"""Errors as Anthropic's clients know them, made from those that everybody else gets.

    {"type": "error", "error": {"type": "overloaded_error", "message": "..."}, "request_id": "..."}

The status is the same as on any other route; by it, `retry-after` and `x-should-retry` Anthropic's clients choose their
exception and whether to try again. Agents read the words for a prompt that is too long, and then compact it.
Source: https://docs.anthropic.com/en/api/errors; https://github.com/musistudio/claude-code-router/issues/1799
"""

import re
from typing import Any, Final

import orjson

from balanceroute.errors import BalanceRouteError, InvalidRequest
from balanceroute.proxy.wire.responses import Headers, body_of, extra_headers, json_headers, status_of, text_of

MESSAGES_PATH: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_TOO_LONG: Final = re.compile(
    r"maximum context length is (?P<most>\d+) tokens\. "
    r"However, your prompt contains (?:at least )?(?P<count>\d+) (?P<unit>input tokens|characters)"
)
# Of refused fields, what tells SDKs to go on without them: their tool runners ask for a thread unless told not to
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def is_messages_path(path: str) -> bool:
    """Whether errors of this path are told as Anthropic tells them."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def message_error_body(status: int, body: bytes, request_id: str, *, field: str | None = None) -> bytes:
    """Anthropic's error object that says what an OpenAI one, or an engine's own, says. `field` was refused."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": _in_anthropics_words(text_of(body))}
    if field in _DETAILS:
        error["details"] = _DETAILS[field]
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def message_error_event(error: BalanceRouteError, request_id: str) -> bytes:
    """An SSE event that tells an error after the first byte."""
    body = message_error_body(status_of(error), body_of(error), request_id)
    return b"event: error\ndata: %b\n\n" % body


def message_refusal(error: BalanceRouteError, headers: Headers) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error; `headers` may name the request, and then do so as Anthropic does too."""
    request_id = next((value for name, value in headers if name == b"x-request-id"), b"")
    status = status_of(error)
    field = error.param if isinstance(error, InvalidRequest) else None
    body = message_error_body(status, body_of(error), request_id.decode(), field=field)
    return status, json_headers(body, [*extra_headers(error), *with_message_id(headers)]), body


def with_message_id(headers: Headers) -> Headers:
    """The headers of an answer, with the id of the request under Anthropic's name for it as well."""
    ids = [(b"request-id", value) for name, value in headers if name == b"x-request-id"]
    return [*(field for field in headers if field[0] != b"request-id"), *ids]


def _in_anthropics_words(text: str) -> str:
    """vLLM's words for a prompt that the model has no room for, as Anthropic says it; any other text as it is."""
    told = _TOO_LONG.search(text)
    if told is None:
        return text
    if told["unit"] == "characters":  # so many that vLLM has not counted the tokens
        return f"prompt is too long: {text}"
    return f"prompt is too long: {told['count']} tokens > {told['most']} maximum"
