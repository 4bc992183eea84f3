"""The id of a request that the edge refuses, and the reason for the metrics."""

import ipaddress
import re
from typing import Final

from balanceroute.errors import AccessDenied, BalanceRouteError, EdgeFull, InvalidRequest
from balanceroute.proxy.client.head import MAX_HEAD_BYTES, Request
from balanceroute.proxy.client.intake import read_head

_ID_LINE: Final = re.compile(rb"\r\nx-request-id:([^\r\n]*)(?=\r\n)", re.IGNORECASE)
_REASONS: Final = {
    400: "malformed",
    405: "method",
    408: "slow",
    413: "body_too_large",
    414: "line_too_long",
    417: "expectation",
    431: "head_too_large",
    505: "version",
}
_SITE_BITS: Final = 64  # bits of an IPv6 address that one customer of a network has


def reason_of(error: BalanceRouteError) -> str:
    """The label for a refusal of the edge; empty: it was counted elsewhere."""
    if isinstance(error, EdgeFull):
        return "overload"
    if isinstance(error, InvalidRequest) and not isinstance(error, AccessDenied):
        return _REASONS.get(error.status, "")
    return ""


def id_of(request: Request | None, raw: bytes) -> bytes:
    """X-Request-Id of an answer to `request` or, where the head is none, to the bytes that should have been one.

    The client's own, if there is exactly one that can be read.
    """
    if request is not None:
        return read_head(request.headers, None).response_id
    head, end, _ = raw[:MAX_HEAD_BYTES].partition(b"\r\n\r\n")
    matches = _ID_LINE.findall(head + end)  # an incomplete line may belong to another request
    return read_head([(b"x-request-id", matches[0].strip())] if len(matches) == 1 else (), None).response_id


def holder_of(peer: str) -> str:
    """The name of a client without a key, from its address."""
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    if address.version == 4 or address.ipv4_mapped is not None:
        return peer
    return str(ipaddress.ip_network((int(address), _SITE_BITS), strict=False))
