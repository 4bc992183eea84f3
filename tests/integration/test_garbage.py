"""A request that has failed leaves nothing behind that only a search for garbage finds: its bodies may be large."""

import asyncio
import gc

import pytest

from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.life.leg import Leg
from tests.integration.router import running

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]


def _requests() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, Leg | Exchange)]


@pytest.mark.parametrize("n", [1, 4])
async def test_a_request_that_a_worker_refuses_is_freed_without_a_search(n: int) -> None:
    async with running() as router:
        request = {"model": "no such model", "prompt": "a", "max_tokens": 2, "n": n}
        gc.collect()
        known = {id(one) for one in _requests()}  # that other tests still hold
        gc.disable()
        try:
            answer = await router.client.post("/v1/completions", json=request)
            assert answer.status_code in (400, 404)
            await router.settled()
            await asyncio.sleep(0)
            assert not [one for one in _requests() if id(one) not in known]
        finally:
            gc.enable()
