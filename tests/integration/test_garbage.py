"""No request leaves anything behind that only a search for garbage finds: it may be large, and the search far away."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.sse import EventScanner
from balanceroute.proxy.workers.reply import Reply
from tests.integration.router import Router, running
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]


def _requests() -> list[object]:
    parts = Leg | Exchange | ClientRequest | Ticket | EventScanner | Reply | Response
    return [one for one in gc.get_objects() if isinstance(one, parts)]


@asynccontextmanager
async def all_freed_without_the_collector() -> AsyncIterator[None]:
    """What is made of requests in the block is gone soon after it, beside what other tests still hold."""
    gc.collect()
    known = {id(one) for one in _requests()}
    gc.disable()
    try:
        yield
        await until(lambda: not [one for one in _requests() if id(one) not in known])
    finally:
        gc.enable()


@pytest.mark.parametrize("n", [1, 4])
async def test_a_refused_requests_objects_are_freed_without_the_garbage_collector(n: int) -> None:
    async with running() as router:
        request = {"model": "no such model", "prompt": "a", "max_tokens": 2, "n": n}
        async with all_freed_without_the_collector():
            answer = await router.client.post("/v1/completions", json=request)
            assert answer.status_code in (400, 404)
            await router.settled()


@pytest.mark.parametrize("connector", ["mooncake_v1", "mooncake_layerwise"])
@pytest.mark.parametrize(
    ("worker", "fault"),
    [
        ("d0", {"fault": "status", "status": 500}),
        ("d0", {"fault": "reset", "after_events": 6}),
        ("p0", {"fault": "status", "status": 500}),
    ],
    ids=["refused", "lost", "prefill refused"],
)
async def test_a_retried_requests_objects_are_freed_without_the_garbage_collector(
    worker: str, fault: dict[str, Any], connector: str
) -> None:
    async with running(ClusterShape(prefillers=1, decoders=1, connector=connector)) as router:

        async def ask() -> None:
            await router.cluster.inject(worker, **fault, count=1)
            asked = {"model": "emulated", "prompt": "a", "max_tokens": 20, "stream": True}
            answer = await router.client.post("/v1/completions", json=asked)
            assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
            await router.settled()

        await ask()  # what is made once
        async with all_freed_without_the_collector():
            await ask()


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
_ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a"}),
    "choices": ("/v1/completions", {"prompt": "a", "n": 3}),
    "chat": ("/v1/chat/completions", _CHAT),
    "message": ("/v1/messages", _CHAT),
}


async def _ask(router: Router, how: str, what: str) -> None:
    """One request, which is served, or whose client leaves amid the answer or before it."""
    path, asked = _ASKED[what]
    request = {"model": "emulated", "max_tokens": 400 if how == "left" else 100, "stream": how != "whole", **asked}
    if how == "left at once":
        host, _, port = router.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(request)
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body))
        writer.write(head + body)
        await until(lambda: bool(router.app.services.legs))
        writer.transport.abort()
        return
    async with router.client.stream("POST", path, json=request) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_raw():
            if how == "left":
                break


@pytest.mark.parametrize("what", _ASKED)
@pytest.mark.parametrize("how", ["streamed", "whole", "left", "left at once"])
async def test_a_finished_or_cancelled_requests_objects_are_freed_without_the_garbage_collector(
    how: str, what: str
) -> None:
    async with running() as router:
        await _ask(router, "streamed", what)  # what is made once
        await router.settled()
        async with all_freed_without_the_collector():
            await _ask(router, how, what)
            await router.settled()
