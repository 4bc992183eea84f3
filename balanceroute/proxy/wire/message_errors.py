"""Translates OpenAI errors into Anthropic's.

    {"type": "error", "error": {"type": "overloaded_error", "message": "..."}, "request_id": "..."}

The status is the same as on other routes. Anthropic's clients choose their exception, and whether to retry, by the
status, `retry-after` and `x-should-retry`. Agents recognise the message for a prompt that is too long, and then compact
it; and the one for a prompt that leaves no room for `max_tokens`, and then ask for fewer.
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
# in the words of vLLM 0.32; of 0.23, which names the output, too; and of 0.11, for the prompt alone and with the output
_TOO_LONG: Final = re.compile(
    r"(?:is too large: (?P<limit>\d{1,19})\. This model's )?maximum context length is (?P<most>\d{1,19}) tokens"
    r"(?:\. However,)?(?: you requested (?P<asked>\d{1,19}) output tokens)?(?: and)? your "
    r"(?:prompt contains|request has) (?:at least )?(?P<count>\d{1,19}) (?P<unit>input tokens|characters)"
)
# Refused fields whose error makes SDKs continue without them: their tool runners ask for a thread by default
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def is_messages_path(path: str) -> bool:
    """Whether this path answers with Anthropic's errors."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def message_error_body(status: int, body: bytes, request_id: str, *, field: str | None = None) -> bytes:
    """Anthropic's error object for an OpenAI error, or an engine's own. `field`: the refused field."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": _anthropic_message(text_of(body))}
    if field in _DETAILS:
        error["details"] = _DETAILS[field]
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def message_error_event(error: BalanceRouteError, request_id: str) -> bytes:
    """The SSE event for an error after the first byte."""
    body = message_error_body(status_of(error), body_of(error), request_id)
    return b"event: error\ndata: %b\n\n" % body


def message_refusal(error: BalanceRouteError, headers: Headers) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error; a request id in `headers` is added under Anthropic's name as well."""
    request_id = next((value for name, value in headers if name == b"x-request-id"), b"")
    status = status_of(error)
    field = error.param if isinstance(error, InvalidRequest) else None
    body = message_error_body(status, body_of(error), request_id.decode(), field=field)
    return status, json_headers(body, [*extra_headers(error), *with_message_id(headers)]), body


def with_message_id(headers: Headers) -> Headers:
    """An answer's headers, with the request id added under Anthropic's name."""
    ids = [(b"request-id", value) for name, value in headers if name == b"x-request-id"]
    return [*(field for field in headers if field[0] != b"request-id"), *ids]


def _anthropic_message(text: str) -> str:
    """Anthropic's message for vLLM's error on a prompt that is too long, alone or with its output; else unchanged."""
    match = _TOO_LONG.search(text)
    if match is None:
        return text
    asked = int(match["asked"] or match["limit"] or 0)
    if match["unit"] == "characters":  # vLLM refused the prompt by its characters, before it counted tokens
        return text if asked > 1 else f"prompt is too long: {text}"
    count, most = int(match["count"]), int(match["most"])
    if asked and count < most:
        fault = f"input length and `max_tokens` exceed context limit: {count} + {asked} > {most}"
        return f"{fault}, decrease input length or `max_tokens` and try again"
    return f"prompt is too long: {count} tokens > {most} maximum"
