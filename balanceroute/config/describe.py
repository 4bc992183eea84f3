"""Describes the settings from the models: rows of docs/settings.md, and accepted values for errors."""

import json
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from balanceroute.config.documents import to_yaml
from balanceroute.config.models import Config
from balanceroute.config.sections.access import Auth
from balanceroute.config.values import OF_YOUR_OWN, Endless, OneOf
from balanceroute.core.knobs import DAY_S, DEFAULTS
from balanceroute.core.policies import knobs_of

MASK = "********"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the settings table; an item of a list of workers has `[]` in its path."""

    path: str
    type: str
    default: str
    description: str


def describe_settings() -> list[Setting]:
    """Every setting, in the order of the models."""
    return list(_rows(Config, ""))


def _rows(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        nested, many = nested_model(field)
        if nested is None or many:
            yield Setting(path, accepts(field), _default_text(field), field.description or "")
        if nested is not None:
            yield from _rows(nested, f"{path}[]." if many else f"{path}.")


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "none"
    if value == ():
        return "[]"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def members(annotation: Any) -> tuple[list[Any], list[Any], bool]:
    """Take an annotation apart: its types without None, their constraints, and whether None is accepted."""
    if get_origin(annotation) is Annotated:
        inner, *constraints = get_args(annotation)
        types_, deeper, optional = members(inner)
        flat = [m for c in constraints for m in (c.metadata if isinstance(c, FieldInfo) else [c])]
        return types_, [*deeper, *flat], optional
    if get_origin(annotation) in (Union, types.UnionType):
        found: list[Any] = []
        constraints_: list[Any] = []
        optional = False
        for part in get_args(annotation):
            if part is type(None):
                optional = True
                continue
            types_, deeper, _ = members(part)
            found += types_
            constraints_ += deeper
        return found, constraints_, optional
    return [annotation], [], False


def nested_model(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, and whether it holds a list of them."""
    found, _, _ = members(field.annotation)
    kind = found[0]
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        return (kind, True) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, True)
    return (kind, False) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, False)


def is_text(field: FieldInfo) -> bool:
    """Whether a value written as plain characters (environment, command line) is meant as they stand."""
    kind = members(field.annotation)[0][0]
    return kind in (str, SecretStr) or get_origin(kind) is Literal


def is_optional(field: FieldInfo) -> bool:
    """Whether the field can be unset."""
    return members(field.annotation)[2]


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must never be shown: of a secret, or what stands where a section with one should."""
    section, _ = nested_model(field)
    if section is not None:
        return any(is_secret(each) for each in section.model_fields.values())
    return SecretStr in members(field.annotation)[0]


def accepts(field: FieldInfo) -> str:
    """The accepted values of a field, in words: `an integer, 1 to 65535, or null`."""
    nested, many = nested_model(field)
    if nested is not None:
        keys = ", ".join(nested.model_fields)
        return f"a list of {{{keys}}}" if many else f"a mapping with the keys {keys}"
    if many:
        return "a list of texts"
    found, constraints, optional = members(field.annotation)
    kind = found[0]
    if get_origin(kind) is Literal:
        text = "one of " + ", ".join(map(str, get_args(kind)))
    elif named := [bound for bound in (*constraints, *field.metadata) if isinstance(bound, OneOf)]:
        text = f"one of {', '.join(named[0].names)}, or {OF_YOUR_OWN}"
    elif get_origin(kind) is dict:
        text = "a mapping of names to plain values"
    else:
        noun = {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "text")
        words = [str(word) for other in found[1:] if get_origin(other) is Literal for word in get_args(other)]
        text = ", ".join(filter(None, [noun, _bounds([*constraints, *field.metadata])]))
        text = " or ".join([text, *words])
    return f"{text}, or null" if optional else text


def _bounds(constraints: list[Any]) -> str:
    low = high = ""
    between: list[Any] = []
    for bound in constraints:
        if isinstance(bound, annotated_types.Ge):
            low, between = f"at least {_number(bound.ge)}", [bound.ge, *between]
        elif isinstance(bound, annotated_types.Gt):
            low = f"more than {_number(bound.gt)}"
        elif isinstance(bound, annotated_types.Le):
            high, between = f"at most {_number(bound.le)}", [*between, bound.le]
        elif isinstance(bound, Endless):
            return f"0 to {_number(DAY_S)}, or .inf"
        elif isinstance(bound, annotated_types.MinLen) and bound.min_length == 1:
            low = "not empty"
    if len(between) == 2:
        return f"{_number(between[0])} to {_number(between[1])}"
    return " and ".join(filter(None, [low, high]))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def effective(config: Config) -> dict[str, Any]:
    """The configuration as plain data: what follows from other settings filled in, secrets masked, and of the policies'
    knobs those of the one that is chosen.

    Times without limit are infinite, which JSON lacks: see `effective_json`.
    """
    data = config.model_dump(mode="json")
    data["pool"]["ttl_s"] = config.pool_ttl_s
    data["prefill"]["kv_pin_s"] = config.kv_pin_s
    data["routing"] |= {"max_wait_s": config.max_wait_s, "hold_s": config.routing.hold_s}  # infinity is no JSON
    data["routing"]["beta"] = config.beta if config.beta is not None else float(len(config.decode.workers))
    others = DEFAULTS.keys() - {"policy", *knobs_of(config.routing.policy)}
    data["routing"] = {key: value for key, value in data["routing"].items() if key not in others}
    data["predictor"]["period_steps"] = config.refresh_period_steps
    data["retry"]["max_delay_s"] = config.retry.longest_delay_s
    for rows, workers in (
        (data["prefill"]["workers"], config.prefill.workers),
        (data["decode"]["workers"], config.decode.workers),
    ):
        for row, worker in zip(rows, workers, strict=True):
            row["id"] = worker.worker_id
    for row, decoder in zip(data["decode"]["workers"], config.decode.workers, strict=True):
        row["max_num_seqs"] = config.decode.slots_of(decoder)
    for name, field in Auth.model_fields.items():
        if is_secret(field) and data["auth"][name] is not None:
            data["auth"][name] = MASK
    return data


def effective_json(config: Config) -> str:
    """`effective` as JSON, with "inf" for infinity, which the settings accept too."""
    data = effective(config)
    data["routing"] = {key: "inf" if value == math.inf else value for key, value in data["routing"].items()}
    return json.dumps(data, indent=2, allow_nan=False)


def effective_yaml(config: Config) -> str:
    """`effective` as YAML."""
    return to_yaml(effective(config))
