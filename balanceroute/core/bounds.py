"""Bounds of numbers, and `check_number` and `check_flag`: a library user's values are checked where they enter, and
nowhere else.

NaN is refused everywhere: no comparison holds for it, so a bound of NaN would never be reached, silently.
"""

import math

from balanceroute.errors import InputError

# beyond any cluster: the configuration, the simulator and the commands refuse larger numbers as mistyped
MOST_SLOTS = 65_536
MOST_OVERLAP = 65_536
MOST_REQUEST_TOKENS = 10_000_000
MOST_SLOWDOWN = 100


def check_number(
    label: str, value: object, least: float, most: float = math.inf, *, whole: bool, above_least: bool = False
) -> None:
    """Raises: InputError unless it is one of Python's own numbers within these bounds."""
    kind = "number"
    if not isinstance(value, int if whole else int | float) or isinstance(value, bool):
        kind = "whole number" if whole else kind
        kind += " of Python's own" * (type(value).__module__ == "numpy")
    elif least < value <= most or (value == least and not above_least):
        return
    lower = "" if least == -math.inf else f" above {least}" if above_least else f" from {least}"
    upper = "" if most == math.inf else f" and at most {most}" if above_least else f" to {most}"
    raise InputError(f"{label} {value!r:.60}: accepted is a {kind}{lower}{upper}")


def check_flag(label: str, value: object) -> None:
    """Raises: InputError unless it is true or false."""
    if not isinstance(value, bool):
        raise InputError(f"{label} {value!r:.60}: accepted is True or False")
