"""Both event loops, for tests of the wire: the router runs on uvloop, libraries that embed it on whatever they like."""

import asyncio

import pytest
import uvloop

from tests.unit.proxy.servers import Run, Test


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine on the loop under test, within 10 s."""

    def runner(test: Test) -> None:
        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(asyncio.wait_for(test(), 10))

    return runner
