"""Keeps integers of more than 64 bits in a client's body (a bound in a tool's schema) as the client wrote them.

orjson reads them as floats, and an engine would get `1.8446744073709552e+19` for 18446744073709551616: another prompt.
So the fields that may contain one are parsed again, and each is kept as text. Python does that, and would stop all
streams for seconds over millions of values: fields of so many keep their floats. Prompts are not parsed again, except
those of Anthropic's messages in which a value is as large: there the arguments of a tool's call are values.
"""

import json
from typing import Any, Final

import msgspec
import orjson

from balanceroute.proxy.wire.json_size import MAX_FIELDS

_NESTED: Final = frozenset((dict, list))
_PROMPTS: Final = frozenset(("messages", "prompt"))  # large, and without such numbers
_MAX_COMMAS: Final = 2**16  # reading that many numbers takes some 0.05 s
_MAX_MESSAGES_BYTES: Final = 2**18  # of all messages that are parsed again; small objects take 0.03 s
_MAX_VALUES: Final = 2**16  # of the messages that are looked at, which takes some 0.01 s
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items: Final = msgspec.json.Decoder(list[msgspec.Raw])
_DIGITS: Final = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(".") for byte in range(256))
_SHORTEST: Final = b"0" * len(str(2**63))


def with_large_integers(body: bytes, data: dict[str, Any], *, in_messages: bool) -> dict[str, Any]:
    """The data that orjson has read of a body, with large integers replaced by `orjson.Fragment`.

    Args: in_messages: also those in `messages`.
    """
    large = _that_hold_one(data.get("messages")) if in_messages else set()
    if len(data) > MAX_FIELDS or not (large or _may_hold_one(body, data)):  # such a body is refused for its fields
        return data
    try:
        fields = _fields.decode(body)
        read = _read_again(fields, data)
        if large:
            read["messages"] = _messages_read_again(fields["messages"], data["messages"], large)
    except RecursionError:  # such a body is refused for its depth
        return data
    return data | read


def _may_hold_one(body: bytes, data: dict[str, Any]) -> bool:
    nested = False
    for name, value in data.items():
        if _may_be_one(value):
            return True
        nested = nested or (type(value) in _NESTED and name not in _PROMPTS)
    return nested and _SHORTEST in body.translate(_DIGITS)


def _may_be_one(value: object) -> bool:
    return type(value) is float and abs(value) >= 2**63


def _that_hold_one(messages: object) -> set[int]:
    """The messages, by their places, in which a value may have been one."""
    found: set[int] = set()
    left = _MAX_VALUES
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        values = [message]
        while values and left:
            left -= 1
            value = values.pop()
            if _may_be_one(value):
                found.add(place)
                break
            if type(value) in _NESTED:
                values += value.values() if isinstance(value, dict) else value
    return found


def _read_again(fields: dict[str, msgspec.Raw], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that may hold one, but no prompts. Raises: RecursionError."""
    members = [
        b"%b:%b" % (orjson.dumps(name), fields[name])
        for name, value in data.items()
        if type(value) is float or (type(value) in _NESTED and name not in _PROMPTS)
    ]
    text = b"{%b}" % b",".join(members)
    read: dict[str, Any] = {} if text.count(b",") > _MAX_COMMAS else json.loads(text, parse_int=_integer)
    return read


def _messages_read_again(raw: msgspec.Raw, messages: list[Any], large: set[int]) -> list[Any]:
    """The messages, those at the places `large` read again. Raises: RecursionError."""
    left, read, texts = _MAX_MESSAGES_BYTES, messages.copy(), _items.decode(raw)
    for place in sorted(large):
        text = bytes(texts[place])
        left -= len(text)
        if left >= 0:
            read[place] = json.loads(text, parse_int=_integer)
    return read


def _integer(text: str) -> object:
    if len(text) < len(_SHORTEST):
        return int(text)
    if len(text) <= len(_SHORTEST) + 1 and -(2**63) <= (number := int(text)) < 2**64:
        return number
    return orjson.Fragment(text)
