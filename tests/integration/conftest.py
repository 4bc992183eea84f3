"""Integration tests run on the loop that the router has in production."""

from typing import Any

import pytest

from balanceroute.proxy.telemetry.clock import Loop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": Loop}
