"""Time that passes while we look, and while we do not."""

import asyncio

import pytest

from balanceroute.proxy.workers.fair_timeout import FairTimeout
from tests.unit.proxy.virtual_time import let_pass, stand_still, with_virtual_time


async def waits(come: asyncio.Event, limit: FairTimeout) -> bool:
    async with limit:
        return await come.wait()


def now() -> float:
    return asyncio.get_running_loop().time()


@with_virtual_time
async def test_without_a_pause_the_timeout_is_on_time_and_blames_the_worker() -> None:
    began_s, limit = now(), FairTimeout(4.0)
    with pytest.raises(TimeoutError):
        await waits(asyncio.Event(), limit)
    assert now() - began_s == pytest.approx(4.0) and not limit.ours


@with_virtual_time
async def test_an_event_during_a_pause_of_the_router_is_still_received() -> None:
    come, limit = asyncio.Event(), FairTimeout(4.0)
    waiting = asyncio.ensure_future(waits(come, limit))
    await let_pass(1.0)
    stand_still(600.0)
    asyncio.get_running_loop().call_later(0.1, come.set)  # read soon after
    assert await waiting and limit.ours


@pytest.mark.parametrize("from_s", [0.0, 0.6, 2.0, 3.9])
@with_virtual_time
async def test_a_pause_takes_a_slice_at_most_wherever_it_falls(from_s: float) -> None:
    began_s, limit = now(), FairTimeout(4.0)
    waiting = asyncio.ensure_future(waits(asyncio.Event(), limit))
    await let_pass(from_s)
    stand_still(600.0)
    with pytest.raises(TimeoutError):
        await waiting
    assert 603.5 <= now() - began_s <= 604.0 and limit.ours


@with_virtual_time
async def test_a_waiting_task_may_be_cancelled_and_leaves_no_timer() -> None:
    limit = FairTimeout(4.0)
    waiting = asyncio.ensure_future(waits(asyncio.Event(), limit))
    await let_pass(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert limit._timer.cancelled()
