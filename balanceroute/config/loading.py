"""Loads a checked `Config` from files, environment and flags.

Four layers, each above the one before: the models' defaults, the YAML file, `BALANCEROUTE_SECTION__KEY`
variables, and the flags of the command line. A layer replaces single keys; a list (of workers) is replaced
whole. Everything that can be wrong becomes a `ConfigError` of one line: where the value came from, its key
path, the value, what is accepted.

`BALANCEROUTE_CONNECTOR` is the one setting without a section. Other variables without a double underscore
are not settings: Kubernetes puts `BALANCEROUTE_PORT=tcp://...` and `BALANCEROUTE_SERVICE_HOST` into every
container of a namespace that has a service called balanceroute.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from balanceroute.config.describe import MASK, accepts, is_optional, is_secret, is_text, nested_model
from balanceroute.config.documents import one_line, read_mapping, values
from balanceroute.config.models import Config
from balanceroute.core.knobs import ALL, DEFAULTS
from balanceroute.core.policies import KNOBS, misplaced
from balanceroute.errors import ConfigError
from balanceroute.plugins import installed

ENV_PREFIX = "BALANCEROUTE_"
WORKER_KEY_VARIABLE = "OPENAI_API_KEY"  # as the example proxies read it
OTHER_VARIABLES = {"BALANCEROUTE_PURE_PYTHON", "BALANCEROUTE_STEP_LOG"}
_OF_KUBERNETES = re.compile(
    "BALANCEROUTE_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
Tree = dict[str, Any]


def load(
    path: str | Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Build the configuration from a YAML file, an environment and flags; reads the file and nothing global.

    Args: path: the YAML, or None for none. environ: usually `os.environ`. overrides: dotted key path to
    value, as `from_example_flags` and `parse_assignment` give them.
    Raises: ConfigError.
    """
    tree, origin = _read(path)
    policy_of_file = _policy(tree)
    sources, problems = _put_layers(tree, environ or {}, overrides or {})
    try:
        config = validate(tree, origin, sources)
    except ConfigError as error:
        problems += error.problems
    for name, wrong in _misplaced_knobs(tree, policy_of_file, sources):
        path_of_knob = f"routing.{name}"
        if not any(path_of_knob in problem for problem in problems):
            problems.append(_prefixed(f"{path_of_knob}: {wrong}", path_of_knob, origin, sources))
    if problems:
        raise ConfigError(*problems)
    return config


def load_sections(
    path: str | Path | None, environ: Mapping[str, str], overrides: Mapping[str, object], names: Iterable[str]
) -> Config:
    """These sections of a configuration that is wrong elsewhere, each at its defaults if it is wrong itself.

    For looking at the files that they name; the other sections are not there.
    Raises: ConfigError: the YAML cannot be read.
    """
    tree, _ = _read(path)
    _put_layers(tree, environ, overrides)
    sections: dict[str, Any] = {}
    for name in names:
        model, _ = nested_model(Config.model_fields[name])
        assert model is not None, f"{name} is no section"
        try:
            sections[name] = model.model_validate(tree.get(name) or {})
        except (ValidationError, ConfigError):
            sections[name] = model()
    return Config.model_construct(**sections)


def _read(path: str | Path | None) -> tuple[Tree, str]:
    """The file's tree, and how errors name the file. Raises: ConfigError with the line of a syntax error."""
    if path is None:
        return {}, ""
    return read_mapping(Path(path), ", ".join(Config.model_fields)), str(path)


def _put_layers(
    tree: Tree, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[dict[str, str], list[str]]:
    """Put variables and flags over the file's tree; where these keys come from, and the variables that are wrong."""
    sources: dict[str, str] = {}
    problems: list[str] = []
    for variable in sorted(environ):
        try:
            for key, value in _setting_of(variable, environ[variable]):
                sources[key] = variable
                _put(tree, key, value, variable)
        except ConfigError as error:
            problems += error.problems
    for key, value in overrides.items():
        sources[key] = "command line"
        _put(tree, key, value, "command line")
    _put_worker_key(tree, environ.get(WORKER_KEY_VARIABLE, ""), sources)
    return sources, problems


def _policy(tree: Tree) -> str:
    routing = tree.get("routing")
    named = routing.get("policy") if isinstance(routing, dict) else None
    return named if isinstance(named, str) else DEFAULTS["policy"]


def _misplaced_knobs(tree: Tree, policy_of_file: str, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Knobs that are given to a policy that does not have them, and what is said of each.

    Where a variable or flag chooses another policy than the file does, the file's knobs may be those of its own.
    """
    routing, policy = tree.get("routing"), _policy(tree)
    if not isinstance(routing, dict) or (policy not in KNOBS and policy not in installed() and ":" not in policy):
        return  # what is wrong with it is said elsewhere
    for name in routing:
        wrong = misplaced(policy, name) if name in ALL and name != "policy" and routing[name] is not None else None
        if wrong and (f"routing.{name}" in sources or misplaced(policy_of_file, name)):
            yield name, wrong


def _put_worker_key(tree: Tree, value: str, sources: dict[str, str]) -> None:
    """The example proxies' variable, below all other sources; a null in any of those is a word, too."""
    auth = tree.get("auth") or {}
    if value.strip() and isinstance(auth, dict) and "worker_api_key" not in auth:
        sources["auth.worker_api_key"] = WORKER_KEY_VARIABLE
        _put(tree, "auth.worker_api_key", value, WORKER_KEY_VARIABLE)


def validate(tree: Tree, origin: str = "", sources: Mapping[str, str] | None = None) -> Config:
    """Check plain data against the models; `origin` and `sources` (by key path) lead the error's text."""
    # an empty section means its defaults, and makes a missing list of workers be reported by its full path
    sections = {name for name, field in Config.model_fields.items() if nested_model(field)[0] is not None}
    filled = tree | {name: {} for name in sections if tree.get(name) is None}
    try:
        return Config.model_validate(filled)
    except ValidationError as error:
        found = error.errors(include_url=False)
        inner = [each["loc"] for each in found]  # a list whose items are wrong is not wrong for itself
        problems = [
            problem(each, origin, sources or {})
            for each in found
            if not any(loc[: len(each["loc"])] == each["loc"] != loc for loc in inner)
        ]
    except ConfigError as error:
        problems = [_prefixed(text, text, origin, sources or {}) for text in error.problems]
    raise ConfigError(*dict.fromkeys(problems))


def with_sections(config: Config, **sections: object) -> Config:
    """The configuration with these sections replaced. Raises: ConfigError: they do not fit the rest."""
    return validate({name: getattr(config, name) for name in config.model_fields_set} | sections)


def parse_assignment(text: str) -> tuple[str, object]:
    """Read `section.key=value` as the command line gives it into a key path and a value of the key's type."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"command line: {text!r}: accepted is KEY=VALUE, such as routing.policy=br_0")
    return key.strip(), parse_value(key.strip(), value, "command line")


def parse_value(key: str, text: str, source: str) -> object:
    """Turn characters into a value for the setting at `key`: text as it stands, all else read as YAML."""
    field = field_at(tuple(key.split(".")))
    if field is not None and is_optional(field) and text.strip() in ("", "null", "~"):
        return None
    if field is None or is_text(field):
        return text
    try:
        return values(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        taken = f"accepted is {accepts(field)}, written as YAML or JSON"
        raise ConfigError(f"{source}: {key} = {_shown(text, field)}: {taken}") from None


def unused_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that look like settings and are none, a line each with the setting that was probably meant.

    Those that Kubernetes makes for a service called balanceroute are left out, and those of our other programs.
    """
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or "__" in name or name in Config.model_fields:
            continue
        if variable in OTHER_VARIABLES or _OF_KUBERNETES.fullmatch(variable):
            if not (variable == "BALANCEROUTE_PORT" and environ[variable].isdigit()):
                continue
        candidates = [
            path for path in _all_paths(Config) if path.replace(".", "_") == name or path.endswith(f".{name}")
        ]
        names = [ENV_PREFIX + path.upper().replace(".", "__") for path in candidates]
        hint = f"; did you mean {' or '.join(names)}?" if names else ""
        yield f"{variable}: is no setting and changes nothing{hint}"


def assumptions(config: Config) -> Iterator[str]:
    """Assumptions that no setting states and no engine reports, a line each."""
    decode = config.decode
    if "max_num_seqs" not in decode.model_fields_set and any(each.max_num_seqs is None for each in decode.workers):
        yield (
            f"decode.max_num_seqs is not set: {decode.max_num_seqs} slots per decode worker are assumed; "
            "it must be the engines' own --max-num-seqs, per DP rank"
        )


def _setting_of(variable: str, text: str) -> Iterator[tuple[str, object]]:
    """The key path and value that a variable sets, if it is a setting. Raises: ConfigError."""
    if not variable.startswith(ENV_PREFIX):
        return
    name = variable.removeprefix(ENV_PREFIX).lower()
    field = Config.model_fields.get(name)
    if field is not None and nested_model(field)[0] is not None:
        raise ConfigError(f"{variable}: {name} is a section; accepted is {variable}__KEY for one of its keys")
    if "__" in name or field is not None:
        key = name.replace("__", ".")
        yield key, parse_value(key, text, variable)


def field_at(path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field at a key path, or None when there is no such setting."""
    model: type[BaseModel] | None = Config
    field: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            continue
        field = None if model is None else model.model_fields.get(part)
        model = None if field is None else nested_model(field)[0]
        if field is None:
            return None
    return field


def _put(tree: Tree, key: str, value: object, source: str) -> None:
    *sections, last = key.split(".")
    for name in sections:
        below = tree.get(name)
        if below is None:
            below = tree[name] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{source}: {key}: {name} is not a section")
        tree = below
    tree[last] = value


# -- the texts of errors


def problem(found: Mapping[str, Any], origin: str, sources: Mapping[str, str]) -> str:
    """What an error of pydantic's says, in our words; its `loc` is the key path in the whole configuration."""
    loc = found["loc"]
    field = field_at(loc)
    if field is None and found["type"] != "extra_forbidden":  # a value of several types: the last part names one
        loc, field = loc[:-1], field_at(loc[:-1])
    path = _dotted(loc)
    value = _shown(found["input"], field)
    inside = [source for key, source in sources.items() if key.startswith(f"{path}.")]
    if found["type"] == "extra_forbidden":
        text = f"{path}: unknown key; {_nearest(loc)}"
    elif found["type"] == "missing":
        text = f"{path}: required and missing; {_missing_hint(loc, field)}"
    elif found["type"] == "value_error":
        text = f"{path} = {value}: {found['ctx']['error']}"
    else:
        taken = accepts(field) if field is not None else found["msg"]
        if field is not None and isinstance(loc[-1], int) and taken.startswith("a list of {"):
            taken = f"{taken.removeprefix('a list of ')}, such as {{url: http://HOST:PORT}}"
        elif field is not None and isinstance(loc[-1], int) and taken == "a list of texts":
            taken = "text"
        elif found["type"] == "too_short":
            taken += ", at least one"
        elif found["type"] == "too_long":
            taken += f", at most {found['ctx']['max_length']}"
        elif taken == "a list of texts":
            taken += ": [ONE, OTHER]"
        text = f"{path} = {value}: accepted is {taken}"
    if inside:  # a variable or the command line sets a key in this section, which does not exist or breaks its rule
        return f"{', '.join(dict.fromkeys(inside))}: {one_line(text)}"
    return _prefixed(one_line(text), path, origin, sources)


def _prefixed(text: str, path: str, origin: str, sources: Mapping[str, str]) -> str:
    """Put the value's source in front: a variable or the command line where they set it, else the file."""
    source = next(
        (name for key, name in reversed(list(sources.items())) if re.match(rf"{re.escape(key)}(?![\w])", path)),
        origin,
    )
    return f"{source}: {text}" if source else text


def _nearest(loc: tuple[str | int, ...]) -> str:
    """For an unknown key: the setting that may be meant, if any, and the accepted keys."""
    model: type[BaseModel] | None = Config
    if len(loc) > 1:
        parent = field_at(loc[:-1])
        model = None if parent is None else nested_model(parent)[0]
    keys = [] if model is None else list(model.model_fields)
    meant = _meant(loc, keys)
    return (f"did you mean {meant[0]}? " if meant else "") + f"accepted are {', '.join(keys)}"


def _meant(loc: tuple[str | int, ...], keys: list[str]) -> list[str]:
    """The settings that an unknown key may mean, the likeliest first. `keys`: those that are accepted beside it."""
    key, paths = str(loc[-1]), list(_all_paths(Config))
    if len(loc) == 1 and key in paths:  # written as these texts and --set have it
        section, _, name = key.rpartition(".")
        return [f"{section}: {{{name}: ...}}"]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    close = close or [name for name in keys if name.startswith(f"{key}_")][:1]
    prefix = _dotted(loc[:-1]) + "." if len(loc) > 1 else ""
    near = [prefix + name for name in close]
    if any(isinstance(part, int) for part in loc):
        return near
    elsewhere = [path for path in paths if path.endswith(f".{key}")]
    # a key that stands below no section, for want of indentation, is what it says, not a section of a like name
    return elsewhere + near if len(loc) == 1 else near + elsewhere


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        nested, many = nested_model(field)
        yield f"{prefix}{name}"
        if nested is not None and not many:
            yield from _all_paths(nested, f"{prefix}{name}.")


def _missing_hint(loc: tuple[str | int, ...], field: FieldInfo | None) -> str:
    flags = {"prefill.workers": "--prefiller", "decode.workers": "--decoder"}.get(_dotted(loc))
    taken = f"accepted is {accepts(field)}" if field is not None else ""
    return f"{taken}, or the flags {flags}-hosts and {flags}-ports" if flags else taken


def _dotted(loc: tuple[str | int, ...]) -> str:
    """The key path as a text: `decode.workers[0].url`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".") or "configuration"


def _shown(value: object, field: FieldInfo | None) -> str:
    """The value as it may appear in an error: no secret, no credentials of a URL, at most half a line."""
    if field is not None and is_secret(field):
        return MASK
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    text = re.sub(r"//[^/\s'\"]*@", f"//{MASK}@", text)
    return one_line(text if len(text) <= 80 else text[:77] + "...")
