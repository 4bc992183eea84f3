"""Finds the traces and captures that some tests compare with; they are not part of the project."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("BALANCEROUTE_SHARED", Path(__file__).parents[2] / "shared"))


def shared_path(name: str) -> Path:
    """Path of a file or folder of the shared material, or a skip with the reason."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared material (set BALANCEROUTE_SHARED to its folder)")
    return path
