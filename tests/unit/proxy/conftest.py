"""Both event loops, for tests of the wire: the router runs on its own, and whoever embeds it on whatever they like."""

import asyncio

import pytest

from balanceroute.proxy.telemetry.clock import Loop
from tests.unit.proxy.servers import Run, Test
from tests.waiting import PATIENCE_S


@pytest.fixture(params=[asyncio.new_event_loop, Loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine on the loop under test."""

    def runner(test: Test) -> None:
        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(asyncio.wait_for(test(), PATIENCE_S))

    return runner
