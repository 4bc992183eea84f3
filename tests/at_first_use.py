"""Large packages that few tests use: every process of a run imports all test modules, and runs a part of the tests."""

from importlib import import_module
from typing import Any


class AtFirstUse:
    """A package by name, which is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at whatever a test module holds
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
