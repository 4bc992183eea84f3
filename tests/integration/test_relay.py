"""A relay on its own: without a brain, at a reload, and when its hold on a request is lost."""

import asyncio
from typing import Any

import httpx
import pytest

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.messages import Activity, Counted, Explained, Judged, Learned
from balanceroute.proxy.link.remote import RemoteBrain
from balanceroute.proxy.relay import COUNTS_S, reload_relay
from tests.integration.relayed import SLOW, Relayed, a_brain, answered, relayed
from tests.integration.router import FAST
from tests.integration.test_proxy_answers import completion
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Overheard:
    """A relay's brain, and the kinds of what is reported to it."""

    def __init__(self, brain: RemoteBrain, told: list[type]) -> None:
        self._brain, self._told = brain, told

    def report(self, message: Judged | Activity | Counted | Learned | Explained) -> None:
        """As `RemoteBrain.report`."""
        self._told.append(type(message))
        self._brain.report(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._brain, name)


async def streams_end(router: Relayed) -> None:
    """See the test below."""
    relay = router.relays[0]
    ask = completion(max_tokens=4000, stream=True, ignore_eos=True)
    async with relay.client.stream("POST", "/v1/completions", json=ask) as answer:
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass
        request = next(iter(relay.app.services.tickets.by_id))
        relay.app.services.void(request)
        rest = [line async for line in lines]
        assert any("error" in line for line in rest) and "data: [DONE]" not in rest


async def test_without_a_brain_relays_live_and_new_requests_wait_for_one() -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        router.brain.end()
        await until(lambda: relay.app.services.brain.member is None)
        assert (await relay.client.get("/health")).status_code == 200
        ready = await relay.client.get("/ready")
        assert ready.status_code == 503 and ready.headers["retry-after"]
        waits = asyncio.gather(*(answered(relay, number) for number in range(8)))
        await until(lambda: len(relay.app.services.tickets.by_id) == 8)
        async with a_brain(router.config, router.folder, relays=1) as brain:
            await waits
            await until(lambda: not brain.services.ledger.requests)


async def test_a_relay_where_nothing_happens_tells_each_brain_what_it_does_and_has_counted_only_once() -> None:
    async with relayed(FAST, count=1) as router:
        services = router.relays[0].app.services
        await until(lambda: bool(services.kept) and services.told is not None)
        told: list[type] = []
        services.brain = Overheard(services.brain, told)  # type: ignore[assignment]
        looked_s = services.last_look_s
        await until(lambda: services.last_look_s > looked_s + 2 * COUNTS_S)
        assert told == []
        router.brain.end()
        await until(lambda: services.brain.member is None)
        async with a_brain(router.config, router.folder, relays=1):
            await until(lambda: sorted(told, key=str) == [Activity, Counted])
        await until(lambda: services.brain.member is None)


async def test_a_relay_reloads_what_is_its_own() -> None:
    async with relayed(FAST, count=1) as router:
        services = router.relays[0].app.services
        limits = router.config.limits.model_copy(update={"max_choices": 1})
        reload_relay(services, router.config.model_copy(update={"limits": limits}))
        refused = await router.relays[0].client.post("/v1/completions", json=completion(n=2))
        assert refused.status_code == 400
        with pytest.raises(ConfigError, match="connector"):
            reload_relay(services, router.config.model_copy(update={"connector": "mooncake_v1x"}))


async def test_a_stream_whose_hold_is_lost_ends_with_an_error_and_no_done() -> None:
    async with relayed(SLOW, count=1) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            await streams_end(router)
        await router.settled()
