"""Reads YAML within bounds, and writes it so that it reads back the same."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import yaml

from balanceroute.errors import ConfigError

MAX_BYTES: Final = 2**25  # bytes of a file; 100,000 client keys take half of it
LONG: Final = 2**16  # characters; 500 client keys
_HINTS: Final = {
    "'\\t'": "; indent with spaces, not with tabs",
    "found another document": "; accepted is one, without a line ---",
    "mapping values are not allowed": "; look at the indentation, and quote a text with ': ' in it",
}  # of the mistakes that are made most
MAX_DIGITS: Final = 400  # of a number; the largest with a fraction has 309
MAX_VALUES: Final = 5_000_000  # that a text stands for; 100,000 client keys are a million
_OLD_NUMBER: Final = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # octal, sexagesimal
MAX_DEPTH: Final = 64  # of lists and mappings in each other; a configuration has five


class _Values(yaml.constructor.SafeConstructor):
    """YAML without its traps: a key given twice, aliases that few bytes repeat for ever, 1e3 that is text, 010000 and
    80:00 that are 4096 and 4800, numbers that Python writes no more, and values that are not what their tag says
    (`!!bool maybe`), on which PyYAML stumbles.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0] and _OLD_NUMBER.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return cast(str, super().resolve(kind, value, implicit))  # type: ignore[misc]  # the resolver's

    def get_single_data(self) -> Any:
        node = self.get_single_node()  # type: ignore[attr-defined]  # the composer's, beside which this stands
        if node is None:
            return None
        _count(node, {})
        return self.construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of more than {MAX_DIGITS} digits", node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"it is no {kind}", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_Values, yaml.SafeLoader):
    """In Python, which says better what is wrong with a text."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """See PyYAML, whose time grows with the square of the depth."""
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"it is nested more than {MAX_DEPTH} deep", problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Has the loader read everything as what it is."""


_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def _fast_loader() -> type[yaml.SafeLoader]:
    """libyaml's, where PyYAML has it: thousands of client keys take a quarter of the time."""
    if not yaml.__with_libyaml__:
        return _Loader
    fast: Any = type("_Fast", (_Values, yaml.CSafeLoader), {})
    fast.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    return cast(type[yaml.SafeLoader], fast)


_FAST = _fast_loader()


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """How many values it stands for, each as often as it is repeated; `counted`: of nodes, by their id.

    Raises: yaml.MarkedYAMLError: there are too many.
    """
    known = counted.get(id(node))
    if known is not None:
        return known
    counted[id(node)] = MAX_VALUES  # of one that holds itself
    below = node.value if isinstance(node, yaml.CollectionNode) else ()
    values = [each for value in below for each in (value if isinstance(value, tuple) else (value,))]
    count = 1 + sum(_count(value, counted) for value in values)
    if count > MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=f"it stands for more than {MAX_VALUES} values", problem_mark=node.start_mark)
    counted[id(node)] = count
    return count


def values(text: str) -> object:
    """Parse a YAML text. Raises: yaml.YAMLError, ValueError, RecursionError.

    libyaml forgives a few tabs and odd characters, so what people write by hand is read in Python everywhere.
    """
    if len(text) > LONG:
        with suppress(yaml.YAMLError):
            return yaml.load(text, Loader=_FAST)
    return yaml.load(text, Loader=_Loader)


def to_yaml(data: object) -> str:
    """Write values as YAML that reads back the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_mapping(path: Path, keys: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; `keys`: those that belong into it, for errors.

    Raises: ConfigError: it can't be read, is no YAML, or no mapping.
    """
    tree = read_document(path)
    if tree is None:
        raise ConfigError(f"{path}: is empty; accepted is a mapping with at least prefill.workers and decode.workers")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise ConfigError(f"{path}: is {kind}; accepted is a mapping with the keys {keys}")
    return tree


def read_document(path: Path) -> object:
    """Read a YAML file, whatever it holds; None if nothing. Raises: ConfigError: it can't be read, or is no YAML."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: is too large; accepted are {MAX_BYTES} bytes")
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    try:
        return values(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}:"
        problem = one_line(error.problem or error.context)
        hint = next((hint for fragment, hint in _HINTS.items() if fragment in problem), "")
        raise ConfigError(f"{path}:{where} not valid YAML: {problem}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {one_line(str(error))}") from None


def one_line(text: str | None) -> str:
    """For an error, which is one."""
    return " ".join((text or "").split())
