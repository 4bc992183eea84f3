"""The import rules between the layers: who may know whom."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "balanceroute"

# layer -> layers it may import from the package; a layer is a folder or a top-level module
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "arrays": set(),  # names of types, for everybody
    "whole_file": {"errors"},  # how results are written
    "bounded": set(),  # how files are read
    "native": set(),  # whether the core is compiled
    "engine": {"errors"},
    "traces": {"bounded", "errors", "whole_file"},
    "report": set(),
    "config": {"core", "errors", "plugins"},
    "core": {"errors", "native"},
    "prediction": {"bounded", "plugins", "errors", "whole_file"},
    "plugins": {"core", "errors"},
    "parameters": {"core", "plugins", "errors"},
    "journal": {"bounded", "core", "plugins", "errors"},
    "explain": {"core", "plugins", "errors"},
    "build": {"core", "config", "journal"},
    "simulator": {"core", "plugins", "prediction", "engine", "traces", "report", "errors"},
    "experiments": {
        "core",
        "plugins",
        "prediction",
        "engine",
        "traces",
        "report",
        "simulator",
        "errors",
        "whole_file",
    },
    "loadgen": {"traces", "report", "errors"},
    "proxy": {"core", "plugins", "prediction", "config", "build", "journal", "explain", "errors", "native"},
    "emulator": {"engine", "errors"},
    "library": {"core", "plugins", "prediction", "simulator", "experiments", "traces", "errors"},
    "testing": {"core", "parameters", "plugins", "prediction", "errors"},
    "demo": {"core", "loadgen", "traces", "errors"},
    "instrumentation": {"errors"},
}
PURE_STDLIB_BANS = {"asyncio", "socket", "time", "logging", "random", "threading", "datetime", "os", "io"}


def modules(folder: str = "") -> Iterator[Path]:
    """All of a folder, those below it included."""
    return (PACKAGE / folder).rglob("*.py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(path: Path) -> set[str]:
    """Absolute dotted names of everything that the module imports."""
    found: set[str] = set()
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            stem = ".".join(part for part in (base, node.module or "") if part)
            found.update(f"{stem}.{alias.name}" for alias in node.names)
    return found


def layer_of(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def package_layers(path: Path) -> set[str]:
    names = {name for name in imports_of(path) if name.split(".")[0] == "balanceroute"}
    return {layer_of(name) for name in names} - {"", "__version__"}


def test_every_module_imports_only_the_layers_below_it() -> None:
    unused = {layer: set(allowed) for layer, allowed in ALLOWED.items()}
    for path in modules():
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer not in {"cli", "__init__", "__main__"}:
            assert layer in ALLOWED, f"{layer} is not a known layer: add it to the table with what it may import"
            assert package_layers(path) - {layer, "arrays"} <= ALLOWED[layer], path
            unused[layer] -= package_layers(path)
    assert not any(unused.values()), "the table allows what nothing imports"


@pytest.mark.parametrize("folder", ["core", "engine"])
def test_pure_layers_use_no_clock_socket_task_logger_or_global_random_state(folder: str) -> None:
    # random.Random(seed) objects are explicit state, so `core` may import the class, never the module's functions
    for path in modules(folder):
        roots = {name.split(".")[0] for name in imports_of(path) if name != "random.Random"}
        assert not roots & PURE_STDLIB_BANS, path


# the ladder of proxy/: each rung imports only rungs below it; the modules beside the rungs compose them
RUNGS = (
    "wire",
    "telemetry",
    "perimeter",
    "admission",
    "link",
    "workers",
    "life",
    "client",
    "ops",
    "run_folder",
    "parent",
)


def test_every_rung_of_the_proxy_imports_only_rungs_below_it() -> None:
    for path in (PACKAGE / "proxy").glob("*/**/*.py"):
        rung = path.relative_to(PACKAGE / "proxy").parts[0]
        inner = {name.split(".")[2] for name in imports_of(path) if name.startswith("balanceroute.proxy.")}
        below = {"hotpath", *RUNGS[: RUNGS.index(rung) + 1]} if rung in RUNGS else {"hotpath"}
        assert inner <= below, path


def test_the_page_on_the_architecture_has_the_rungs_in_their_order_with_all_their_modules() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    ladder = page.partition("## The ladder of")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", ladder, flags=re.MULTILINE)
    assert [name for name, _ in rows] == [*reversed(RUNGS), "hotpath"]
    for name, meaning in rows:
        entries = (PACKAGE / "proxy" / name).iterdir()
        modules = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert modules - {"__init__", "services"} <= set(re.findall(r"`(\w+)`", meaning)), name


# modules of `core`
SCHEDULERS_OWN = {"scheduler", "prefill_dispatch", "snapshot", "snapshot_json", "tracker", "pool", "projection"}
BEHIND_THE_WAIST = {"scheduler", "_scheduler", "snapshot", "_snapshot", "tracker"}
"""Names under which the state, or a part of it that is alive, could come across."""


def test_only_admission_accesses_the_scheduler_or_its_state() -> None:
    for path in modules("proxy"):
        if path.relative_to(PACKAGE / "proxy").parts[0] == "admission":
            continue
        imported = {name.split(".")[2] for name in imports_of(path) if name.startswith("balanceroute.core.")}
        assert not imported & SCHEDULERS_OWN, path
        assert not {"balanceroute.build.build_scheduler"} & imports_of(path), path
        assert not any(name.startswith("balanceroute.journal") for name in imports_of(path)), path
        touched = {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)} & BEHIND_THE_WAIST
        assert not touched, f"{path}: ask the ledger: its calls and views carry plain data"


@pytest.mark.parametrize("folder", ["core", "proxy"])
def test_no_type_checking_import_hides_a_cycle(folder: str) -> None:
    # the hot path names its Python twin for the type checker and imports the compiled one
    guarded = {path for path in modules(folder) if "typing.TYPE_CHECKING" in imports_of(path)}
    assert guarded <= {PACKAGE / "proxy/hotpath/__init__.py"}


def imports_inside_functions(path: Path) -> set[str]:
    """Modules of the package that are imported when a function is called."""
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in inner if node.module is not None and node.module.startswith("balanceroute")}


@pytest.mark.parametrize("folder", ["core", "proxy"])
def test_no_import_inside_a_function_hides_a_circle(folder: str) -> None:
    # httpx takes time and memory, which a brain without a Lease should not cost
    costly = {"balanceroute.proxy.link.kubernetes", "balanceroute.proxy.link.lease"}
    found = {path: imports_inside_functions(path) - costly for path in modules(folder)}
    assert not {path: names for path, names in found.items() if names}


LONG_LINES, MANY_METHODS = 500, 25
WHY_WHOLE = re.compile(r"\bone (machine|class|file)\b")


def test_a_long_module_or_class_of_the_proxy_states_its_reason() -> None:
    for path in modules("proxy"):
        text = path.read_text()
        classes = [node.body for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
        methods = [sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in body) for body in classes]
        if text.count("\n") > LONG_LINES or max(methods, default=0) > MANY_METHODS:
            why = ast.get_docstring(ast.parse(text)) or ""
            assert WHY_WHOLE.search(why), f"{path}: split it, or say what makes it one machine"


def test_no_policy_reads_true_output_lengths() -> None:
    """INV-7; `tests/unit/simulator/test_simulation.py` has the simulator's own modules."""
    for path in modules("core"):
        assert "output_tokens" not in path.read_text(), path
