"""Helpers that talk to an emulated cluster the way a router does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson

from balanceroute.emulator import ClusterShape, EmulatedCluster
from tests.waiting import PATIENCE_S

PROBE = {"do_remote_decode": True, "do_remote_prefill": False}
FAST = 0.02  # real seconds per modelled second: a 25 ms step takes 0.5 ms


@asynccontextmanager
async def a_cluster(*, listen: bool = False, **values: Any) -> AsyncIterator[tuple[EmulatedCluster, httpx.AsyncClient]]:
    """A running cluster and a client that reaches it, in process unless `listen`."""
    shape = ClusterShape(**({"time_scale": FAST} | values))
    async with EmulatedCluster(shape, listen=listen) as cluster:
        transport = httpx.AsyncHTTPTransport() if listen else cluster.transport()
        async with httpx.AsyncClient(transport=transport, timeout=PATIENCE_S, trust_env=False) as client:
            yield cluster, client


async def probe(cluster: EmulatedCluster, client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> Any:
    """Prefill on p0; the returned kv_transfer_params."""
    body = {"prompt": prompt, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PROBE} | fields
    reply = await client.post(cluster.prefill_urls[0] + "/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["kv_transfer_params"]


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """Parsed events of a stream; `[DONE]` comes as the string."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else orjson.loads(data)


async def decode_ids(
    cluster: EmulatedCluster, client: httpx.AsyncClient, prompt: list[int], **fields: Any
) -> list[int]:
    """All token ids of a streamed completion on d0."""
    body = {"prompt": prompt, "stream": True, "return_token_ids": True} | fields
    ids: list[int] = []
    async with client.stream("POST", cluster.decode_urls[0] + "/v1/completions", json=body) as response:
        async for event in events(response):
            for choice in event["choices"] if event != "[DONE]" else ():
                ids += choice["token_ids"]
    return ids
