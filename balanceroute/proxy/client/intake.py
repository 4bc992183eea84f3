"""Reads the headers of a request that matter to the router."""

import math
import os
import random
from dataclasses import dataclass
from typing import Final

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.fields import checked
from balanceroute.proxy.wire.responses import Headers

# for identity and tracing; none that frames or routes a message
FORWARDED: Final = frozenset(
    [b"authorization", b"traceparent", b"tracestate", b"baggage", b"b3"]
    + [b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled", b"x-b3-flags"]
    + [b"openai-organization", b"openai-project", b"user-agent", b"accept-language", b"x-session-id"]
)
_ID_CHARACTERS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_MAX_ID: Final = 96
_ids: Final = random.Random()  # ids are no secrets: one seed from the system instead of a system call per request
os.register_at_fork(after_in_child=_ids.seed)  # two relays must not make the same ids


@dataclass(slots=True)
class Head:
    """The headers that the router reads; `forwarded` go to the workers.

    `priority` counts before the body's, as vLLM reads it; None where it is no integer that engines can hold.
    """

    request_id: str
    client_id: str | None
    forwarded: list[tuple[bytes, bytes]]
    timeout_s: float
    key: str
    priority: int | None

    @property
    def response_id(self) -> bytes:
        """The X-Request-Id of the response: the client's own where it sent one."""
        return (self.client_id or self.request_id).encode()

    def check(self) -> None:
        """Check the values. Raises: InvalidRequest: X-Request-Timeout is no positive number."""
        if math.isnan(self.timeout_s):
            raise InvalidRequest("X-Request-Timeout must be a positive number of seconds.", param="X-Request-Timeout")


def read_head(headers: Headers, key_header: bytes | None, authorization: bytes | None = None) -> Head:
    """Read the headers; of a header that comes twice the last one counts.

    `authorization`: sent to workers instead of the client's; empty: none is sent; None: the client's is sent.
    """
    by_name = dict(headers)
    forwarded = [field for field in headers if field[0] in FORWARDED]
    if authorization is not None:
        forwarded = [field for field in forwarded if field[0] != b"authorization"]
    if authorization:
        forwarded.append((b"authorization", authorization))
    client_id, timeout = by_name.get(b"x-request-id"), by_name.get(b"x-request-timeout")
    key = b"" if key_header is None else by_name.get(key_header, b"")
    known = None if client_id is None else _clean(client_id)
    unique = f"{_ids.getrandbits(64):016x}"
    request_id = f"{known}-{unique}" if known else unique  # some clients use one id for many requests
    timeout_s = math.inf if timeout is None else _timeout(timeout)
    priority = by_name.get(b"x-vllm-priority")
    return Head(
        request_id,
        known,
        forwarded,
        timeout_s,
        key.decode("latin-1"),
        None if priority is None else _priority(priority),
    )


def unread_coding(headers: Headers) -> InvalidRequest | None:
    """The refusal (415) of a body that is no JSON because these headers say that it is compressed; None: it is not."""
    codings = b", ".join([value for name, value in headers if name == b"content-encoding"])
    if codings.lower() in (b"", b"identity"):
        return None
    return InvalidRequest(f"No Content-Encoding is read, and the body has {codings.decode('latin-1')}.", status=415)


def _timeout(value: bytes) -> float:
    """Seconds; not a number for anything but a positive one (`Head.check`)."""
    try:
        seconds = float(value)
    except ValueError:
        return math.nan
    return seconds if 0 < seconds < math.inf else math.nan


def _priority(value: bytes) -> int | None:
    try:
        return checked("X-Vllm-Priority", int(value), least=None)
    except (ValueError, InvalidRequest):
        return None  # as vLLM does


def _clean(client_id: bytes) -> str:
    """A client's id without characters that must not appear in headers and logs."""
    return bytes(c for c in client_id[:_MAX_ID] if c in _ID_CHARACTERS).decode("ascii")
