"""Reads a client's body as JSON within bounds, and refuses what could not be serialised again for workers."""

import json
import math
import re
import secrets
from contextlib import suppress
from typing import Any, Final

import msgspec
import orjson

from balanceroute.errors import InvalidRequest, NotJson
from balanceroute.proxy.wire.fields import kind
from balanceroute.proxy.wire.json_size import check_size
from balanceroute.proxy.wire.large_integers import with_large_integers

MAX_DEPTH: Final = 250  # orjson reads 1024 levels and writes 254
MAX_IDS: Final = 5_000_000  # of a prompt; as many as 32 MiB hold
_LARGE_BYTES: Final = 2**16
_IDS_BEGIN: Final = re.compile(rb'"prompt"\s*:\s*(\[)\s*\d')
_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG: Final = b"0" * 19  # digits; of as many a number may have more than 64 bits
_MAX_BYTES_BY_PYTHON: Final = 2**20  # of a body that only Python's JSON reads, which takes ten times as long
_MAX_COMMAS_BY_PYTHON: Final = 2**16  # of it; that many values take some 0.03 s
_LABELS: Final = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key"))  # engines ignore them
_MARK: Final = secrets.token_hex(16)  # stands for the ids of a prompt; no client knows it
_json: Final = msgspec.json.Decoder(msgspec.Raw)  # checks JSON and makes nothing of it


def load_object(body: bytes, *, large_in_messages: bool = False) -> dict[str, Any]:
    """The JSON object of a body.

    Args: large_in_messages: large integers in its messages keep their digits, too.

    Raises: NotJson: the body is not JSON. InvalidRequest: it is no object, or exceeds the bounds of `json_size`.
    """
    check_size(body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        cut = None if large_in_messages else _with_cut_labels(body)
        if cut is None:
            raise NotJson(f"The body is not valid JSON: {exc}") from exc
        return cut
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {kind(data)}.")
    return with_large_integers(body, data, in_messages=large_in_messages)


def _with_cut_labels(body: bytes) -> dict[str, Any] | None:
    r"""The fields of a body in which a label has half of a surrogate pair (`"\ud83d"`), as clients write it that have
    cut a text within an emoji; None: it is no such body.

    Engines read it as JSON. Labels stay JSON, of which no reader knows what it holds; so no other field may have half
    of a pair, nor anything else that `orjson` would refuse.
    """
    if len(body) > _MAX_BYTES_BY_PYTHON or body.count(b",") > _MAX_COMMAS_BY_PYTHON or b"\\u" not in body:
        return None
    try:
        data = json.loads(body.decode(), parse_float=_finite, parse_constant=_finite)
        if not isinstance(data, dict):
            return None
        for name in _LABELS.intersection(data):
            label = json.dumps(data[name]).encode()
            if label.count(b"[") + label.count(b"{") > MAX_DEPTH:
                return None
            data[name] = orjson.Fragment(label)
        orjson.dumps(data)
    except (ValueError, TypeError, RecursionError):
        return None
    return data


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no JSON, or more than a float holds")
    return number


def load_prompt(body: bytes) -> dict[str, Any]:
    """The JSON object of a completion's body; a large prompt of plain token ids stays JSON, without its blanks.

    To make numbers of a hundred thousand ids and JSON of these again takes three times as long. Raises: as
    `load_object`.
    """
    found = _IDS_BEGIN.search(body) if len(body) >= _LARGE_BYTES else None
    if found is not None:
        start, end = found.start(1), body.find(b"]", found.end()) + 1
        ids = _plain_ids(body[start:end])
        if ids and ids.count(b",") < MAX_IDS:
            with suppress(NotJson):  # `load_object` says where in the body
                data = load_object(b'%b"%b"%b' % (body[:start], _MARK.encode(), body[end:]))
                if data.get("prompt") == _MARK:  # else that was another field's
                    return data | {"prompt": ids}
    return load_object(body)


def _plain_ids(value: bytes) -> bytes:
    """A list of integers without blanks; empty: it is none, or one may have more than 64 bits."""
    ids = value.translate(None, b" \t\r\n")
    if ids.translate(None, b"0123456789,") != b"[]" or _LONG in ids.translate(_ZEROS):
        return b""
    try:
        _json.decode(value)
    except ValueError:
        return b""
    return ids


def load_writable_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body of Anthropic's API, known to be writable as well.

    Raises: as `load_object`; InvalidRequest.
    """
    data = load_object(body, large_in_messages=True)
    check_depth(body, data)
    return data


def check_depth(body: bytes, data: dict[str, Any]) -> None:
    """Refuse `data`, read from `body`, if it is too deep to be written. Raises: InvalidRequest.

    Called before a prefiller works for the request.
    """
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        as_json(data)


def as_json(value: object) -> bytes:
    """A part of a client's body as JSON again, to be kept. Raises: InvalidRequest: nested deeper than `MAX_DEPTH`."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"The body is nested too deeply; accepted are about {MAX_DEPTH} levels.") from None
    return bytes(memoryview(text))  # orjson's own bytes keep the room that it wrote them in: 8 to 16 times a text's
