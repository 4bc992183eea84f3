"""What a router knows of its workers when it starts: nothing, until they answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest

from balanceroute.config import Config, with_sections
from balanceroute.emulator import ClusterShape
from balanceroute.proxy.app import create_app
from tests.integration.router import running, served
from tests.integration.test_proxy_answers import completion
from tests.plain_http import PLAIN
from tests.waiting import PATIENCE_S, pace, until

pytestmark = pytest.mark.anyio

PAIR = ClusterShape(prefillers=1, decoders=1, max_num_seqs=2, time_scale=0.02)


@asynccontextmanager
async def silent_workers(asked: list[str], count: int, wake: asyncio.Event | None = None) -> AsyncIterator[list[str]]:
    """Workers that accept connections and answer nothing, as under SIGSTOP; `asked`: the paths that they are asked.

    `wake`: from then on they answer what they are asked.
    """

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.endswith(b" HTTP/1.1\r\n"):
                asked.append(line.split()[1].decode())
            if line == b"\r\n" and wake is not None:
                await wake.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    servers = [await asyncio.start_server(take, "127.0.0.1", 0) for _ in range(count)]
    try:
        yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            server.close()


def beside(silent: list[str], config: Config) -> Config:
    """The configuration with these workers before its own, one per tier."""
    prefill, decode = (tier.model_dump(exclude_unset=True) for tier in (config.prefill, config.decode))
    for tier, url in zip((prefill, decode), silent, strict=True):
        tier["workers"] = [{"url": url}, *tier["workers"]]
    return with_sections(config, prefill=prefill, decode=decode)


async def test_no_request_is_sent_to_a_worker_that_has_not_answered_since_the_start() -> None:
    asked: list[str] = []
    patience = {"timeout_s": 60.0}  # how long it takes to find out that a worker is silent
    async with silent_workers(asked, 2) as urls, running(PAIR, adjust=partial(beside, urls), health=patience) as router:
        sent = (router.client.post("/v1/completions", json=completion(max_tokens=2)) for _ in range(8))
        assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * 8
        await until(lambda: asked.count("/health") == 2)
        assert set(asked) <= {"/health", "/metrics"}
        ready = (await router.client.get("/ready")).json()
        assert (ready["status"], ready["workers_up"]) == ("ready", {"prefill": 1, "decode": 1})
        assert ready["workers_down"] == {url.removeprefix("http://"): "it has not answered /health yet" for url in urls}


async def test_whoever_asks_at_the_start_whether_the_router_is_ready_hears_of_the_first_answers() -> None:
    wake = asyncio.Event()
    async with silent_workers(asked := [], 2, wake) as urls, of_only(urls) as ask:
        await until(lambda: asked.count("/health") == 2)
        asking = asyncio.get_running_loop().create_task(ask())
        await pace(0.1)
        assert not asking.done()
        wake.set()
        assert (await asking)[0] == 200


async def test_a_router_none_of_whose_workers_answers_says_so() -> None:
    async with silent_workers([], 2) as urls, of_only(urls) as ask:
        assert await ask() == (503, "no healthy workers")


@asynccontextmanager
async def of_only(urls: list[str]) -> AsyncIterator[Callable[[], Awaitable[tuple[int, str]]]]:
    """A router of these workers, a prefiller and a decode worker; yields what asks it whether it is ready."""
    tiers = {tier: {"workers": [{"url": url}]} for tier, url in zip(("prefill", "decode"), urls, strict=True)}
    config = Config.model_validate({**tiers, "connector": "nixl", "health": {"timeout_s": 60.0}})
    async with served(create_app(config, strict=True)) as url, httpx.AsyncClient(**PLAIN, timeout=PATIENCE_S) as client:

        async def ask() -> tuple[int, str]:
            answer = await client.get(f"{url}/ready")
            return answer.status_code, answer.json()["status"]

        yield ask
