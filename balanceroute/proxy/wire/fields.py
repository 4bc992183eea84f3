"""Numbers and flags of a client's body, as the engines read them.

vLLM takes `4.0`, `"4"` and `"true"` for what they mean: its bodies are pydantic models, which are lax. So a value that
is not what JSON has for it is given to the same reader, and the body goes on with what came of it.
"""

from typing import Annotated, Any, Final

import orjson
from pydantic import AllowInfNan, TypeAdapter, ValidationError

from balanceroute.errors import InvalidRequest

_MAX_INTEGER: Final = 2**63 - 1
_INTEGER: Final = TypeAdapter(int)
_BOOLEAN: Final = TypeAdapter(bool)
_NUMBER: Final = TypeAdapter(Annotated[float, AllowInfNan(False)])


def boolean(data: dict[str, Any], name: str) -> bool:
    """A field of `data` that is true or false; false where it is null or left out. Raises: InvalidRequest."""
    value = data.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    flag = as_boolean(value)
    if flag is None:
        raise InvalidRequest(f"{name} must be true or false, not {kind(value)}.", param=name)
    data[name] = flag
    return flag


def integer(data: dict[str, Any], name: str, *, least: int | None) -> int | None:
    """A field of `data` that is an integer of 64 bits; None where it is null or left out. Raises: InvalidRequest."""
    value = data.get(name)
    if value is None:
        return None
    if type(value) is int:
        return checked(name, value, least=least)
    number = as_integer(value)
    if number is None:
        raise InvalidRequest(f"{name} must be an integer, not {kind(value)}.", param=name)
    data[name] = number
    return checked(name, number, least=least)


def as_boolean(value: object) -> bool | None:
    """The flag that engines read there; None where it is none."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return None


def as_integer(value: object) -> int | None:
    """The integer that engines read there; None where it is none."""
    try:
        return _INTEGER.validate_python(value)
    except ValidationError:
        return None


def as_number(value: object) -> float | None:
    """The number that engines read there; None where it is none, or what JSON has no word for."""
    try:
        return _NUMBER.validate_python(value)
    except ValidationError:
        return None


def checked(name: str, value: int, *, least: int | None) -> int:
    """An integer that engines can hold. Raises: InvalidRequest."""
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise InvalidRequest(f"{name} must be an integer of 64 bits, not {value}.", param=name)
    if least is not None and value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}.", param=name)
    return value


def kind(value: object) -> str:
    """What JSON calls a value, for an error."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names[orjson.Fragment] = "a number of more than 64 bits"
    return names.get(type(value), "a number")
