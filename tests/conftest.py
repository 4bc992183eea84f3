"""Property tests are judged by what they find, not by how fast a busy machine draws examples; nothing is skipped."""

import gc
import logging
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from balanceroute.core.policies import POLICIES

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("a second time", settings.get_profile("any machine"), max_examples=30)  # see .ci/run
settings.load_profile("any machine")
NUMBERS = count()


def pytest_configure() -> None:
    """What is collected stays: looking for garbage among it took a third of the time that collecting takes."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Named by a number: a socket's path has at most 107 bytes, of which TMPDIR and the user's name may take many."""
    return tmp_path_factory.mktemp(str(next(NUMBERS)), numbered=False)


@pytest.fixture(autouse=True)
def _policies_that_a_test_has_named_are_forgotten() -> Iterator[None]:
    before = set(POLICIES)
    yield
    for name in set(POLICIES) - before:
        del POLICIES[name]


@pytest.fixture(autouse=True)
def _what_a_test_does_to_the_log_is_undone() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)  # loggers keep what they know of a level until another one is set


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a machine lacks for a test is a failure that names it: a green run has run everything."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report
