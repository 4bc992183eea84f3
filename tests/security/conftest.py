"""Three routers, each started once: with the limits as they ship, with short times, and with room for few clients."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.security.deployment import Edge, Workers, serving, serving_workers
from tests.waiting import block_until

SHORT_S = 1.0
PAUSE_S = 5.0  # between two requests: many times what a client on a busy machine needs to send the next one
LIMITS: dict[str, dict[str, Any]] = {
    "edge": {"max_body_bytes": 2**20},
    "hasty": {
        "client_header_timeout_s": SHORT_S,
        "client_keep_alive_s": PAUSE_S,
        "client_stall_timeout_s": SHORT_S,
        "client_buffer_bytes": 65536,
    },
    "narrow": {"max_connections": 8, "client_header_timeout_s": SHORT_S},
}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """uvloop, as the router runs on in production."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with serving_workers() as running:
        yield running


@pytest.fixture(scope="session")
def routers(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Edge]]:
    """The routers by name, started when first asked for."""
    with ExitStack() as stack:

        class Started(dict[str, Edge]):
            def __missing__(self, name: str) -> Edge:
                folder = tmp_path_factory.mktemp(name)
                self[name] = stack.enter_context(serving(workers, folder, LIMITS[name]))
                return self[name]

        yield Started()


def _attacked(router: Edge, workers: Workers) -> Iterator[Edge]:
    """A router that must be none the worse for the test."""
    workers.seen.clear()
    workers.left = 0
    yield router
    router.disconnect()
    block_until(lambda: not router.held(), f"still held: {router.held()}")
    assert router.process.poll() is None
    lines = router.new_log_lines()
    assert not [line for line in lines if "Traceback" in line or '"level":"error"' in line], lines
    assert router.serves()


@pytest.fixture
def edge(routers: dict[str, Edge], workers: Workers) -> Iterator[Edge]:
    """With the limits as they ship, but for bodies, of which 1 MiB is enough."""
    yield from _attacked(routers["edge"], workers)


@pytest.fixture
def hasty(routers: dict[str, Edge], workers: Workers) -> Iterator[Edge]:
    """With a second for everything that clients get time for, but the pause between two requests."""
    yield from _attacked(routers["hasty"], workers)


@pytest.fixture
def narrow(routers: dict[str, Edge], workers: Workers) -> Iterator[Edge]:
    """With room for eight connections, and a second for a request to come."""
    yield from _attacked(routers["narrow"], workers)
