"""Keeps integers of more than 64 bits in a client's body (a bound in a tool's schema) as the client wrote them.

orjson reads them as floats, and an engine would get `1.8446744073709552e+19` for 18446744073709551616: another prompt.
So a body that may contain one is parsed again, and each is kept as text. Python does that, and would stop all streams
for seconds over millions of token ids: a body of so many values keeps its floats.
"""

import json
from typing import Any, Final

import orjson

_NESTED: Final = frozenset((dict, list))
_PROMPTS: Final = frozenset(("messages", "prompt"))  # large, and without such numbers
_MAX_COMMAS: Final = 2**18  # reading that many numbers takes about 0.1 s
_DIGITS: Final = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(".") for byte in range(256))
_SHORTEST: Final = b"0" * len(str(2**63))


def with_large_integers(body: bytes, data: dict[str, Any]) -> dict[str, Any]:
    """The data that orjson has read of a body, with large integers replaced by `orjson.Fragment`."""
    if not _may_hold_one(body, data) or body.count(b",") > _MAX_COMMAS:
        return data
    try:
        read: dict[str, Any] = json.loads(body, parse_int=_integer)
    except RecursionError:  # such a body is refused for its depth
        return data
    return read


def _may_hold_one(body: bytes, data: dict[str, Any]) -> bool:
    nested = False
    for name, value in data.items():
        if type(value) is float and abs(value) >= 2**63:
            return True
        nested = nested or (type(value) in _NESTED and name not in _PROMPTS)
    return nested and _SHORTEST in body.translate(_DIGITS)


def _integer(text: str) -> object:
    if len(text) < len(_SHORTEST):
        return int(text)
    if len(text) <= len(_SHORTEST) + 1 and -(2**63) <= (number := int(text)) < 2**64:
        return number
    return orjson.Fragment(text)
