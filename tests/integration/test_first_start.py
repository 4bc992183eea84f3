"""What a router knows of its workers when it starts: nothing, until they answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from balanceroute.config import Config, with_sections
from balanceroute.emulator import ClusterShape
from tests.integration.router import running
from tests.integration.test_proxy_answers import completion
from tests.waiting import until

pytestmark = pytest.mark.anyio

PAIR = ClusterShape(prefillers=1, decoders=1, max_num_seqs=2, time_scale=0.02)


@asynccontextmanager
async def silent_workers(asked: list[str], count: int) -> AsyncIterator[list[str]]:
    """Workers that accept connections and answer nothing, as under SIGSTOP; `asked`: the paths that they are asked."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.endswith(b" HTTP/1.1\r\n"):
                asked.append(line.split()[1].decode())
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
