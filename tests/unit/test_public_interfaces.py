"""Dependencies are used by their public names only, so that their next version is still the one that was tested."""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "balanceroute"
OWN = "balanceroute"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_dependency(module: str) -> bool:
    root = module.split(".")[0]
    return root != OWN and root not in sys.stdlib_module_names


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name and dotted name of all that a module imports from dependencies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def root_of(node: ast.expr) -> str:
    """The name at the start of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(source: str) -> list[str]:
    """Private names of dependencies that a module imports, reaches for, or inherits from."""
    tree = ast.parse(source)
    names = {local: dotted for local, dotted in imported(tree) if is_dependency(dotted)}
    found = [dotted for dotted in names.values() if any(map(is_private, dotted.split(".")))]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)]
    return found + [ast.unparse(node) for node in attributes if root_of(node) in names]


def own_private_names(node: ast.ClassDef) -> set[str]:
    """Private names that a class defines, or sets on its objects."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store | ast.Del):
            found.add(inner.attr)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
    return {name for name in found if is_private(name)}


@cache
def private_names_of(base: type) -> set[str]:
    """Private names that a class, or what it inherits from, defines or sets on its objects."""
    found = {name for name in dir(base) if is_private(name)}
    for one in base.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= own_private_names(node)
    return found


def overridden(module: str, source: str) -> list[str]:
    """Private names of dependencies that a module's classes overwrite by inheriting from theirs."""
    loaded = importlib.import_module(module)
    found = []
    for node in ast.walk(ast.parse(source)):
        kind = getattr(loaded, node.name, None) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and isinstance(kind, type):
            for base in kind.__mro__[1:]:
                if is_dependency(base.__module__):
                    found += [
                        f"{base.__qualname__}.{name}" for name in own_private_names(node) & private_names_of(base)
                    ]
    return found


def test_no_module_uses_a_private_name_of_a_dependency() -> None:
    uses = {path: private_uses(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in uses.items() if names} == {}


def test_no_class_overwrites_a_private_name_of_the_dependency_it_inherits_from() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__main__.py":
            module = ".".join((OWN, *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
            assert overridden(module, path.read_text()) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "from uvicorn._types import Scope",
        "from uvicorn.protocols.http.h11_impl import _get_status_line",
        "import orjson._orjson",
        "import uvicorn\nuvicorn.Server._serve",
        "import uvicorn\nuvicorn.server._x = 1",
        "from starlette.routing import Route\nclass R(Route._Base): ...",
    ],
)
def test_uses_of_private_names_are_found(source: str) -> None:
    assert private_uses(source) != []


def test_overwritten_private_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import uvicorn\nclass S(uvicorn.Server):\n    def f(self):\n        self._captured_signals = []\n"
    (tmp_path / "an_overwriting_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert overridden("an_overwriting_module", source) == ["Server._captured_signals"]
