"""Numbers and flags of a client's body, as the engines read them.

vLLM takes `4.0`, `"4"` and `"true"` for what they mean: its bodies are pydantic models, which are lax. So a value that
is not what JSON has for it is given to the same reader, and the body goes on with what came of it.
"""

from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from balanceroute.errors import InvalidRequest

_MAX_INTEGER: Final = 2**63 - 1
_INTEGER: Final = TypeAdapter(int)
_BOOLEAN: Final = TypeAdapter(bool)


def boolean(data: dict[str, Any], name: str) -> bool:
    """A field of `data` that is true or false; false where it is null or left out. Raises: InvalidRequest."""
    value = data.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    try:
        flag = data[name] = _BOOLEAN.validate_python(value)
    except ValidationError:
        raise InvalidRequest(f"{name} must be true or false, not {kind(value)}.", param=name) from None
    return flag


def integer(data: dict[str, Any], name: str, *, least: int | None) -> int | None:
    """A field of `data` that is an integer of 64 bits; None where it is null or left out. Raises: InvalidRequest."""
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not int:
        try:
            value = data[name] = _INTEGER.validate_python(value)
        except ValidationError:
            raise InvalidRequest(f"{name} must be an integer, not {kind(value)}.", param=name) from None
    return checked(name, value, least=least)


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
    return names.get(type(value), "a number")
