"""Compiled modules run only where they are those of the sources, and are otherwise the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from balanceroute import native

REPO = Path(__file__).parents[2]
ASK = """
import balanceroute.{0} as module
from balanceroute import native
print(native.COMPILED, native.STALE, module.__file__)
"""


def asked(root: Path, module: str = "core.scheduler", **environment: str) -> list[str]:
    """Whether the core is compiled, whether it is stale, and where the module comes from, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "BALANCEROUTE_PURE_PYTHON"}
    command = [sys.executable, "-c", ASK.format(module)]
    run = subprocess.run(
        command,
        cwd=root,
        env={**kept, **environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is installed, with what was compiled."""
    shutil.copytree(REPO / "balanceroute", tmp_path / "balanceroute", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("module", native.MODULES)
def test_each_module_is_compiled_where_the_library_is_that_of_its_sources(module: str) -> None:
    compiled, stale, file = asked(REPO, module)
    assert (compiled, stale) == ("True", "False")
    assert file.endswith(".so")


def test_the_environment_keeps_to_python(copy: Path) -> None:
    assert asked(copy, BALANCEROUTE_PURE_PYTHON="1") == ["False", "False", str(copy / "balanceroute/core/scheduler.py")]


@pytest.mark.parametrize("changed", native.MODULES)
def test_a_change_of_any_source_ends_the_use_of_all_compiled_ones(copy: Path, changed: str) -> None:
    source = copy / f"balanceroute/{changed.replace('.', '/')}.py"
    source.write_text(source.read_text() + "\nADDED = 1\n")
    assert asked(copy) == ["False", "True", str(copy / "balanceroute/core/scheduler.py")]
    assert asked(copy, changed)[2] == str(source)


def test_without_a_compiler_there_is_nothing_stale(copy: Path) -> None:
    for compiled in copy.rglob("*.so"):
        compiled.unlink()
    assert asked(copy) == ["False", "False", str(copy / "balanceroute/core/scheduler.py")]


def test_modules_without_their_library_are_not_used(copy: Path) -> None:
    for library in (copy / "balanceroute").glob("native_*"):
        library.unlink()
    assert asked(copy)[2] == str(copy / "balanceroute/core/scheduler.py")


DECIDE = """
from hashlib import sha256
from balanceroute import native
from balanceroute.core.knobs import PolicySettings
from balanceroute.simulator.replay import Replay
from balanceroute.simulator.setting import Setting
from balanceroute.traces import generate_trace

trace = generate_trace("heavy_tailed", rows=600, seed=3)
setting = Setting(slots=16, pool=64, slowdowns=(1.0,) * 7 + (1.3,), request_tokens=700)
outcome = Replay(trace, PolicySettings(policy="{0}"), setting).run()
print(native.COMPILED, sha256(outcome.wait_s.tobytes() + outcome.tpot_s.tobytes()).hexdigest())
"""


@pytest.mark.parametrize("policy", ["br_0", "br_h", "target_fit", "level_fit"])
def test_the_compiled_core_decides_as_python_does_to_the_last_bit(policy: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "BALANCEROUTE_PURE_PYTHON"}
    compiled, python = (
        subprocess.run(
            [sys.executable, "-c", DECIDE.format(policy)],
            cwd=REPO,
            env={**kept, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for environment in ({}, {"BALANCEROUTE_PURE_PYTHON": "1"})
    )
    assert (compiled[0], python[0]) == ("True", "False")
    assert compiled[1] == python[1]
