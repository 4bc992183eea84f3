"""Knobs of a policy, and options of a user's own policy or predictor, from `name=value` texts of a command line."""

from dataclasses import replace
from typing import Any, Final

from balanceroute.core.knobs import DEFAULTS, Option, PolicySettings, accepted, is_accepted
from balanceroute.core.policies import BUILT_IN, knobs_of, misplaced
from balanceroute.errors import InputError
from balanceroute.plugins import learn_policy

_SEPARATE: Final = ("policy", "seed")  # knobs that the command line sets by options of their own


def parse_params(settings: PolicySettings, params: list[str]) -> PolicySettings:
    """Settings with `name=value` texts applied. Raises: InputError that names what is accepted."""
    learn_policy(settings.policy)
    known = [name for name in DEFAULTS if name not in _SEPARATE]
    changes: dict[str, Any] = {}
    options: dict[str, Option] = {}
    for param in params:
        name, equals, text = param.partition("=")
        if name in _SEPARATE:
            raise InputError(f"--param {param}: the {name} has an option of its own, --{name}")
        if equals and settings.policy not in BUILT_IN and name.isidentifier():
            options[name] = _plain_value(text)
            continue
        if not equals or name not in known:
            raise InputError(f"--param {param}: {_accepted_params(settings.policy)}")
        changes[name] = _parsed(text, DEFAULTS[name])
        if not is_accepted(name, changes[name]):
            raise InputError(f"--param {param}: accepted is {accepted(name)}")
        if wrong := misplaced(settings.policy, name):
            raise InputError(f"--param {param}: {wrong}; its own: {', '.join(_own_knobs(settings.policy)) or 'none'}")
    return replace(settings, **changes, options=tuple(options.items()))


def _own_knobs(policy: str) -> list[str]:
    return [knob for knob in knobs_of(policy) if knob not in _SEPARATE]


def _accepted_params(policy: str) -> str:
    """The error for a param that is no knob of any policy."""
    if policy not in BUILT_IN:
        return "accepted is name=value"
    own = _own_knobs(policy)
    return f"accepted is name=value with a name of {', '.join(own)}" if own else f"{policy} has no knobs"


def parse_options(flag: str, texts: list[str]) -> dict[str, Option]:
    """`name=value` texts of a flag as keyword arguments. Raises: InputError for anything else."""
    options: dict[str, Option] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"{flag} {text}: accepted is name=value")
        options[name] = _plain_value(value)
    return options


def _plain_value(text: str) -> Option:
    """The value of a text: true, false, a number, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _parsed(text: str, default: Any) -> Any:
    """The text as a value of the default's kind, or as it stands when it is none."""
    if default is None and text == "null":
        return None
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, str):
            return text
        return int(text) if isinstance(default, int) else float(text)
    except (KeyError, ValueError):
        return text
