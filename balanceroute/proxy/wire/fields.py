"""Reads numbers and flags of a client's body as engines do.

vLLM's bodies are lax pydantic models: they accept `4.0` and `"4"` as 4, and `"true"` as true. So a value of another
JSON type is read by pydantic here as well, and replaced by the result.
"""

from typing import Annotated, Any, Final

import orjson
from pydantic import AllowInfNan, FailFast, TypeAdapter, ValidationError

from balanceroute.errors import InvalidRequest

MAX_INTEGER: Final = 2**63 - 1
_INTEGER: Final = TypeAdapter(int)
_INTEGERS: Final = TypeAdapter(Annotated[list[int], FailFast()])  # else each wrong one becomes an error
_BOOLEAN: Final = TypeAdapter(bool)
_NUMBER: Final = TypeAdapter(Annotated[float, AllowInfNan(False)])


def boolean(data: dict[str, Any], name: str) -> bool:
    """A boolean field of `data`; False if it is null or absent. Raises: InvalidRequest."""
    value = data.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    flag = as_boolean(value)
    if flag is None:
        raise InvalidRequest(f"{name} must be true or false, not {kind(value)}.", param=name)
    data[name] = flag
    return flag


def integer(data: dict[str, Any], name: str, *, least: int | None) -> int | None:
    """A 64-bit integer field of `data`; None if it is null or absent. Raises: InvalidRequest."""
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
    """The boolean that engines read from a value; None: they refuse it."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return None


def as_integer(value: object) -> int | None:
    """The integer that engines read from a value; None: they refuse it."""
    try:
        return _INTEGER.validate_python(value)
    except ValidationError:
        return None


def as_integers(values: object) -> list[int] | None:
    """The integers that engines read from a list; None: they refuse one of them, or it is no list.

    As one value: to read millions one by one takes seconds.
    """
    try:
        return _INTEGERS.validate_python(values)
    except ValidationError:
        return None


def as_number(value: object) -> float | None:
    """The number that engines read from a value; None: they refuse it, or JSON can't express it."""
    try:
        return _NUMBER.validate_python(value)
    except ValidationError:
        return None


def checked(name: str, value: int, *, least: int | None) -> int:
    """Check that an integer has 64 bits at most. Raises: InvalidRequest."""
    if not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise InvalidRequest(f"{name} must be an integer of 64 bits, not {value}.", param=name)
    if least is not None and value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}.", param=name)
    return value


def kind(value: object) -> str:
    """The JSON type of a value, for an error."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names[orjson.Fragment] = "a number of more than 64 bits"
    return names.get(type(value), "a number")
