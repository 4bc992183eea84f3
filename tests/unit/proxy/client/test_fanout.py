"""Several legs of one request that run side by side."""

import asyncio

import pytest

from balanceroute.proxy.client.fanout import run_all
from tests.unit.proxy.life.legs import a_leg, dispatching
from tests.unit.proxy.virtual_time import a_config, a_router, script, with_virtual_time
from tests.waiting import until


@with_virtual_time
async def test_a_task_cancelled_while_several_legs_run_is_cancelled_and_leaks_nothing() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", None)
    async with dispatching(services):
        legs = [a_leg(services, request_id=f"request-{index}") for index in range(2)]
        task = services.loop.create_task(run_all(legs))
        await until(lambda: len(services.legs) == 2)
        task.cancel("the server ends")
        with pytest.raises(asyncio.CancelledError, match="the server ends"):
            await task
        assert task.cancelled() and not services.legs
        assert not services.ledger.scheduler.snapshot.requests
