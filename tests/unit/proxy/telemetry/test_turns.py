"""Long work leaves the event loop to others after a bounded number of items."""

import asyncio

import pytest

from balanceroute.proxy.telemetry.turns import in_turns, over_turns
from tests.unit.proxy.virtual_time import with_virtual_time

pytestmark = pytest.mark.anyio


@with_virtual_time
@pytest.mark.parametrize("count", [0, 1, 4, 5, 12])
async def test_every_item_has_its_turn_and_no_turn_has_more_than_its_share(count: int) -> None:
    done: list[int] = []
    over_turns(asyncio.get_running_loop(), list(range(count)), done.append, 4)
    while len(done) < count:
        before = len(done)
        assert before % 4 == 0
        await asyncio.sleep(0)
    assert done == list(range(count))


@with_virtual_time
async def test_others_run_between_the_parts_of_a_long_loop() -> None:
    seen: list[int] = []
    done: list[int] = []

    async def other() -> None:
        while len(done) < 10:
            seen.append(len(done))
            await asyncio.sleep(0)

    running = asyncio.ensure_future(other())
    async for item in in_turns(range(10), 4):
        done += [item]
    assert done == list(range(10)) and {4, 8} <= set(seen) <= {0, 4, 8}
    await running
