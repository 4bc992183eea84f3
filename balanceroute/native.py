"""The modules of the core that mypyc compiles, and the rule that a compiled form of other sources never runs.

They are ordinary typed Python, which setup.py compiles at installation where there is a C compiler: every request takes
some twenty calls into the scheduler. Nothing else depends on it. The machine code of all
lies in one library whose name ends with a digest of the sources, beside a small module for each. Where that library is
not found (no compiler; a checkout with other sources than at its installation) or `BALANCEROUTE_PURE_PYTHON=1` is set,
`Sources` has the same modules read as Python.

setup.py runs this file by its path, so it imports nothing of the package. What stays Python: `types.py` and `view.py`,
whose dataclasses go to orjson, which crashes on compiled ones; `policy.py`, from which users inherit; `subset.py`,
where numpy does the work; and what runs seldom.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

MODULES: Final = (
    "balance_route",
    "fscore",
    "overlap",
    "pool",
    "pool_bypass",
    "prefill",
    "prefill_work",
    "prefix",
    "projection",
    "scheduler",
    "snapshot",
    "target_fit",
    "tracker",
)
PACKAGE: Final = Path(__file__).parent
SOURCES: Final = {f"balanceroute.core.{name}": PACKAGE / "core" / f"{name}.py" for name in MODULES}


def group() -> str:
    """The library's name without mypyc's suffix: these sources and no others.

    Raises: OSError where a source cannot be read.
    """
    digest = hashlib.sha256()
    for path in SOURCES.values():
        digest.update(path.read_bytes())
    return f"native_{digest.hexdigest()[:16]}"


def library() -> ModuleSpec | None:
    """The compiled form of these very sources, where there is one."""
    try:
        return PathFinder.find_spec(f"balanceroute.{group()}__mypyc", [str(PACKAGE)])
    except OSError:  # sources left out: compiled modules alone were installed, and no other form of them can be meant
        return None


class Sources:
    """Finds the modules as Python, where Python itself would take the compiled ones beside them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder`: nothing for all other modules."""
        source = SOURCES.get(name)
        return None if source is None else spec_from_file_location(name, source)


_KEPT_TO_PYTHON: Final = bool(os.environ.get("BALANCEROUTE_PURE_PYTHON"))

COMPILED: Final = not _KEPT_TO_PYTHON and library() is not None
STALE: Final = not _KEPT_TO_PYTHON and not COMPILED and any(PACKAGE.glob("native_*__mypyc.*"))
if not COMPILED:
    sys.meta_path.insert(0, Sources)
