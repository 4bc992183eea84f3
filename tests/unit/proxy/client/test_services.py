"""What all requests of a process have in common."""

import asyncio

from balanceroute.core.types import Outcome
from balanceroute.errors import Draining
from balanceroute.proxy.admission.decider import MOST_ENDED
from tests.unit.proxy.life.legs import a_leg, dispatching, idle
from tests.unit.proxy.virtual_time import a_config, a_router, script, with_virtual_time
from tests.waiting import until

MANY = 2 * MOST_ENDED + 5


@with_virtual_time
async def test_requests_that_end_with_the_router_end_a_bounded_number_in_a_turn_of_the_loop() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", None)
    async with dispatching(services):
        legs = [a_leg(services, request_id=f"r{number}") for number in range(MANY)]
        tasks = [services.loop.create_task(leg.run()) for leg in legs]
        await until(lambda: len(services.legs) == MANY)
        services.abort_all()
        left = MANY
        while services.legs:
            await asyncio.sleep(0)
            assert left - len(services.legs) <= MOST_ENDED
            left = len(services.legs)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Draining) for result in results) and idle(services)


@with_virtual_time
async def test_requests_whose_clients_leave_together_end_a_bounded_number_in_a_turn_of_the_loop() -> None:
    services = a_router(a_config(1, 1, prefill={"max_inflight": 1}))
    script(services, "p0", None)
    async with dispatching(services):
        legs = [a_leg(services, request_id=f"r{number}") for number in range(MANY)]
        tasks = [services.loop.create_task(leg.run()) for leg in legs]
        await until(lambda: len(services.legs) == MANY)
        for leg in legs:
            services.abandoned.add(leg)
        left = MANY
        while len(services.legs) > 1:  # the prefiller has one, and may pin KV: that ends after its grace
            await asyncio.sleep(0)
            assert left - len(services.legs) <= MOST_ENDED
            left = len(services.legs)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert {leg.outcome for leg in legs} == {Outcome.CANCELLED} and idle(services)
