"""What is read of a client's request before anything is decided: its body and the headers that matter.

A deadline for slow bodies costs nothing when the body has come with the head, as it nearly always has.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.responses import Message

Receive = Callable[[], Awaitable[Message]]

# identity and tracing: what a worker may need, and nothing that frames or routes a message
FORWARDED: Final = frozenset(
    [b"authorization", b"traceparent", b"tracestate", b"baggage", b"b3"]
    + [b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled", b"x-b3-flags"]
    + [b"openai-organization", b"openai-project", b"user-agent", b"accept-language"]
)
_ID_CHARACTERS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_MAX_ID: Final = 96
_ids: Final = random.Random()  # names, no secrets: seeded once by the system, instead of a system call per request


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


@dataclass(slots=True)
class Head:
    """The headers that the router reads; `forwarded` go to the workers."""

    request_id: str
    client_id: str | None
    forwarded: list[tuple[bytes, bytes]]
    timeout_s: float
    content_length: int | None
    key: str


def read_head(headers: Iterable[tuple[bytes, bytes]], key_header: bytes | None, api_key: bytes | None) -> Head:
    """One pass over the headers. `api_key` is sent to workers when the client sent no Authorization.

    Raises: InvalidRequest: X-Request-Timeout is no positive number.
    """
    forwarded = []
    client_id: bytes | None = None
    timeout_s, length, key, authorized = math.inf, None, "", False
    for name, value in headers:
        if name in FORWARDED:
            forwarded.append((name, value))
            authorized |= name == b"authorization"
        elif name == b"x-request-id":
            client_id = value
        elif name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"x-request-timeout":
            timeout_s = _timeout(value)
        if name == key_header:
            key = value.decode("latin-1")
    if api_key is not None and not authorized:
        forwarded.append((b"authorization", b"Bearer " + api_key))
    known = None if client_id is None else _clean(client_id)
    unique = f"{_ids.getrandbits(64):016x}"
    request_id = f"{known}-{unique[:8]}" if known else unique
    return Head(request_id, known, forwarded, timeout_s, length, key)


async def read_body(receive: Receive, limit: int, timeout_s: float, content_length: int | None = None) -> bytes:
    """The whole body.

    Raises: InvalidRequest: 413 over `limit` bytes, 408 when the client takes longer than `timeout_s`. ClientGone.
    """
    if content_length is not None and content_length > limit:
        raise _too_large(limit)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return within(limit, body)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_rest(receive, [body], limit)
    except TimeoutError:
        raise InvalidRequest(f"The body was not sent within {timeout_s:g} s.", status=408) from None


def within(limit: int, body: bytes) -> bytes:
    """The body. Raises: InvalidRequest: it is larger than `limit` bytes."""
    if len(body) > limit:
        raise _too_large(limit)
    return body


async def _read_rest(receive: Receive, parts: list[bytes], limit: int) -> bytes:
    size = len(parts[0])
    while True:
        message: dict[str, Any] = dict(await receive())
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body is larger than {limit} bytes.", status=413)


def _timeout(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("X-Request-Timeout must be a positive number of seconds.", param="X-Request-Timeout")
    return seconds


def _clean(client_id: bytes) -> str:
    """A client's id as far as it may appear in headers, logs and metrics of others."""
    return bytes(c for c in client_id[:_MAX_ID] if c in _ID_CHARACTERS).decode("ascii")
