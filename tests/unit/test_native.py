"""Compiled modules run only where they are those of the sources, and are otherwise the same."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from balanceroute import native

REPO = Path(__file__).parents[2]
LOAD = """
from importlib import import_module
from balanceroute import native
files = [import_module(f"balanceroute.{name}").__file__ for name in native.MODULES]
print(native.COMPILED, native.STALE, *files, sep="\\n")
"""
FIND = """
from importlib.util import find_spec
from balanceroute import native
files = [find_spec(f"balanceroute.{name}").origin for name in native.MODULES]
print(native.COMPILED, native.STALE, *files, sep="\\n")
"""
CHANGE_EACH = """
from balanceroute import native
for name in (*native.MODULES, *native.CONSTANTS_OF):
    source = native.PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    before = source.read_bytes()
    source.write_bytes(before + b"\\nADDED = 1\\n")
    if native.library() is not None:
        print(name)
    source.write_bytes(before)
if native.library() is None:
    print("the sources as they were")
"""


def output_of(root: Path, code: str, **environment: str) -> list[str]:
    """The lines that Python code prints, in a process of its own beside that package."""
    kept = {name: value for name, value in os.environ.items() if name != "BALANCEROUTE_PURE_PYTHON"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**kept, **environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


def sources_of(root: Path) -> list[str]:
    """The modules as Python."""
    return [str(root / f"balanceroute/{module.replace('.', '/')}.py") for module in native.MODULES]


ENDS_AT_ONCE = ("asyncio.timeout(", "asyncio.timeout_at(", "limit")  # `async with` of these; the last is a FairTimeout


def inside(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes of a block, but for those of functions that it defines."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from inside(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def risks(source: str) -> Iterator[int]:
    """The lines of Python code that wait during an exception, see `native.py`."""
    waits = ast.Await | ast.AsyncFor | ast.AsyncWith
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncWith):
            managers = [ast.unparse(item.context_expr) for item in node.items]
            yield from [node.lineno for manager in managers if not manager.startswith(ENDS_AT_ONCE)]
        if not isinstance(node, ast.Try):
            continue
        for body in (node.finalbody, *[handler.body for handler in node.handlers]):
            yield from [each.lineno for each in inside(body) if isinstance(each, waits)]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is installed, with what was compiled."""
    shutil.copytree(REPO / "balanceroute", tmp_path / "balanceroute", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_module_is_compiled_when_the_library_matches_the_sources() -> None:
    compiled, stale, *files = output_of(REPO, LOAD)
    assert (compiled, stale) == ("True", "False")
    assert [file for file in files if not file.endswith(".so")] == []


def test_an_environment_variable_turns_compiled_modules_off(copy: Path) -> None:
    assert output_of(copy, FIND, BALANCEROUTE_PURE_PYTHON="1") == ["False", "False", *sources_of(copy)]


def test_a_changed_source_makes_the_library_stale(copy: Path) -> None:
    assert output_of(copy, CHANGE_EACH) == []


@cache
def constants(module: str) -> set[str]:
    """The names of a module of the package whose values mypyc writes into the modules that import them."""
    path = REPO.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    finals = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Final"]
    values = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Name
    return {ast.unparse(node.target) for node in finals if isinstance(node.value, values)}


def test_the_library_is_that_of_all_modules_whose_constants_it_has() -> None:
    counted = {f"balanceroute.{name}" for name in native.CONSTANTS_OF} | native.SOURCES.keys()
    nodes = [node for path in native.SOURCES.values() for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and "balanceroute" in (node.module or "")]
    sources = {str(each.module) for each in imports if constants(str(each.module)) & {name.name for name in each.names}}
    assert "balanceroute.proxy.link.messages" in sources and sources <= counted
    assert not set(native.CONSTANTS_OF) & set(native.MODULES), "these are counted already"


def test_no_compiled_module_is_used_when_the_library_is_stale(copy: Path) -> None:
    source = copy / "balanceroute/core/scheduler.py"
    source.write_text(source.read_text() + "\nADDED = 1\n")
    assert output_of(copy, FIND) == ["False", "True", *sources_of(copy)]


def test_without_compiled_modules_the_library_is_not_stale(copy: Path) -> None:
    for compiled in copy.rglob("*.so"):
        compiled.unlink()
    assert output_of(copy, FIND) == ["False", "False", *sources_of(copy)]


def test_modules_without_their_library_are_not_used(copy: Path) -> None:
    for library in (copy / "balanceroute").glob("native_*"):
        library.unlink()
    assert output_of(copy, FIND) == ["False", "False", *sources_of(copy)]


BUILD = """
import runpy, sys, types
import setuptools
from importlib.machinery import EXTENSION_SUFFIXES
from balanceroute import native

setuptools.setup = lambda **options: print(len(options["ext_modules"]) - 1)  # beside the events' way
mypyc = types.SimpleNamespace(mypycify=lambda paths, **options: [setuptools.Extension("core", [])])
sys.modules["mypyc"] = sys.modules["mypyc.build"] = mypyc
for library in native.PACKAGE.glob("native_*"):
    library.unlink()
for _ in range(2):
    for command in ("editable_wheel", "bdist_wheel"):
        sys.argv = ["setup.py", command]
        runpy.run_path("setup.py")
    (native.PACKAGE / f"{native.group()}__mypyc{EXTENSION_SUFFIXES[0]}").touch()
"""


def test_an_extra_install_does_not_recompile_but_a_wheel_does(
    copy: Path,
) -> None:
    shutil.copy(REPO / "setup.py", copy)
    assert output_of(copy, BUILD) == ["1", "1", "0", "1"]


DECIDE = """
from hashlib import sha256
from balanceroute import native
from balanceroute.core.knobs import PolicySettings
from balanceroute.simulator.replay import Replay
from balanceroute.simulator.setting import Setting
from balanceroute.traces import generate_trace

print(native.COMPILED)
trace = generate_trace("heavy_tailed", rows=600, seed=3)
setting = Setting(slots=16, pool=64, slowdowns=(1.0,) * 7 + (1.3,), request_tokens=700)
for policy in ("br_0", "br_h", "target_fit", "level_fit"):
    outcome = Replay(trace, PolicySettings(policy=policy), setting).run()
    print(policy, sha256(outcome.wait_s.tobytes() + outcome.tpot_s.tobytes()).hexdigest())
"""


def test_the_compiled_core_decides_as_python_does_to_the_last_bit() -> None:
    compiled, *decided = output_of(REPO, DECIDE)
    python, *as_python = output_of(REPO, DECIDE, BALANCEROUTE_PURE_PYTHON="1")
    assert (compiled, python) == ("True", "False")
    assert len(decided) == 4 and decided == as_python


@pytest.mark.parametrize("name", native.MODULES)
def test_no_compiled_coroutine_waits_during_an_exception(name: str) -> None:
    assert list(risks(native.SOURCES[f"balanceroute.{name}"].read_text())) == []


def test_a_coroutine_that_waits_during_an_exception_is_detected() -> None:
    def found(body: str) -> bool:
        return bool(list(risks(f"async def f():\n try:\n  await g()\n{body}")))

    assert found(" finally:\n  await g()")
    assert found(" except KeyError:\n  await g()")
    assert found(" except KeyError:\n  if h():\n   async for _ in g(): pass")
    assert found(" finally:\n  pass\n async with g(): pass")
    assert not found(" except KeyError:\n  pass\n await g()")
    assert not found(" finally:\n  pass\n async with asyncio.timeout(1): pass")


def test_an_older_python_is_told_which_one_is_needed() -> None:
    code = "import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "balanceroute needs Python 3.11 or newer; this is 3.9\n")
