"""Long work leaves the event loop to others after a bounded number of items."""

import asyncio

import pytest

from balanceroute.proxy.telemetry.turns import Gate, Spread, in_turns, over_turns
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


@with_virtual_time
async def test_what_comes_at_once_is_spread_over_turns_in_its_order() -> None:
    done: list[int] = []

    def act(item: int) -> None:
        done.append(item)
        if item == 9:
            spread.add(10)

    spread = Spread(act, 4)
    for item in range(10):
        spread.add(item)
    counts = []
    while len(done) < 11:
        counts.append(len(done))
        await asyncio.sleep(0)
    assert counts == [0, 4, 8, 10] and done == list(range(11))


@with_virtual_time
async def test_a_bounded_number_of_tasks_passes_a_gate_in_a_turn() -> None:
    gate, passed = Gate(4), list[int]()

    async def one(number: int) -> None:
        await gate.passed()
        passed.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(10)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    before = 0
    while len(passed) < 9:
        await asyncio.sleep(0)
        assert len(passed) - before <= 4
        before = len(passed)
    assert passed == [0, *range(2, 10)]
