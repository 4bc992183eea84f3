"""Reads a client's body as JSON within bounds, and refuses what could not be serialised again for workers."""

from typing import Any, Final

import orjson

from balanceroute.errors import InvalidRequest, NotJson
from balanceroute.proxy.wire.fields import kind
from balanceroute.proxy.wire.json_size import check_size
from balanceroute.proxy.wire.large_integers import with_large_integers

MAX_DEPTH: Final = 250  # orjson reads 1024 levels and writes 254


def load_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises: NotJson: the body is not JSON. InvalidRequest: it is no object, or exceeds the bounds of `json_size`.
    """
    check_size(body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise NotJson(f"The body is not valid JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {kind(data)}.")
    return with_large_integers(body, data)


def load_writable_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body that is known to be writable as well. Raises: as `load_object`; InvalidRequest."""
    data = load_object(body)
    check_depth(body, data)
    return data


def check_depth(body: bytes, data: dict[str, Any]) -> None:
    """Refuse `data`, read from `body`, if it is too deep to be written. Raises: InvalidRequest.

    Called before a prefiller works for the request.
    """
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        as_json(data)


def as_json(value: object) -> bytes:
    """A part of a client's body as JSON again. Raises: InvalidRequest: nested deeper than `MAX_DEPTH`."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"The body is nested too deeply; accepted are about {MAX_DEPTH} levels.") from None
