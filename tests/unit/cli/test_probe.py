"""`check-config --probe`, against workers over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from balanceroute.cli.check_config import verdict
from balanceroute.cli.probe import Answer, not_compared, probe
from balanceroute.config import validate
from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.emulator.server import HttpServer

pytestmark = pytest.mark.anyio
METRICS = (
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    'vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0"} 1.0\n'
)


def a_vllm(role: str, connector: str, max_num_seqs: int, model: str = "m", key: str = "") -> Starlette:
    """What the four routes of a vLLM in development mode answer."""

    def info(request: Request) -> Response:
        settings: dict[str, Any] = {
            "scheduler_config": {"max_num_seqs": max_num_seqs},
            "kv_transfer_config": {"kv_connector": connector, "kv_role": role} if role else None,
        }
        return JSONResponse({"vllm_config": settings})

    def models(request: Request) -> Response:
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return JSONResponse({"data": [{"id": model}]})

    return Starlette(
        routes=[
            Route("/health", lambda _: Response()),
            Route("/metrics", lambda _: PlainTextResponse(METRICS)),
            Route("/v1/models", models),
            Route("/server_info", info),
        ]
    )


@asynccontextmanager
async def served(*apps: Starlette) -> AsyncIterator[list[str]]:
    servers = [HttpServer(app, "127.0.0.1", 0) for app in apps]
    for server in servers:
        await server.start()
    try:
        yield [f"http://127.0.0.1:{server.port}" for server in servers]
    finally:
        for server in servers:
            await server.stop()


def asked(prefill: list[str], decode: list[str], **more: Any) -> "asyncio.Future[list[Answer]]":
    tree: dict[str, Any] = {
        "prefill": {"workers": [{"url": url} for url in prefill]},
        "decode": {"workers": [{"url": url} for url in decode], "max_num_seqs": 64},
        **more,
    }
    return asyncio.ensure_future(probe(validate(tree)))


async def test_an_emulated_cluster_is_well_and_what_it_does_not_tell_is_unknown() -> None:
    async with EmulatedCluster(ClusterShape(prefillers=1, decoders=2)) as cluster:
        answers = await asked(list(cluster.prefill_urls), list(cluster.decode_urls))
    assert [answer.problems for answer in answers] == [[], [], []]
    assert {answer.models for answer in answers} == {("emulated",)}
    assert {(answer.max_num_seqs, answer.kv_role) for answer in answers} == {(None, None)}
    assert [answer.prefix_caching for answer in answers] == [False] * 3
    p0, *decoders = [answer.worker for answer in answers]
    assert not_compared(answers) == {"max_num_seqs": decoders, "connector and kv_role": [p0, *decoders]}
    last = verdict(answers, 0)
    assert last.startswith("3 workers asked, no problem found; not compared, as workers do not tell: max_num_seqs (")
    assert ", ".join(decoders) in last


async def test_workers_that_fit_have_no_problem() -> None:
    prefill, decode = a_vllm("kv_producer", "MooncakeConnectorV1", 8), a_vllm("kv_consumer", "MooncakeConnectorV1", 64)
    async with served(prefill, decode) as (p, d):
        answers = await asked([p], [d])
    assert [answer.problems for answer in answers] == [[], []]
    assert verdict(answers, 0) == "2 workers asked, no problem found"
    assert [(a.max_num_seqs, a.kv_role, a.prefix_caching) for a in answers] == [
        (8, "kv_producer", True),
        (64, "kv_consumer", True),
    ]


async def test_what_is_wrong_with_a_worker_is_said_of_that_worker() -> None:
    swapped, small = a_vllm("kv_consumer", "NixlConnector", 64), a_vllm("kv_consumer", "MooncakeConnector", 32)
    lone, locked = a_vllm("", "", 64, model="other"), a_vllm("kv_consumer", "MooncakeConnector", 64, key="secret")
    async with served(swapped, small, lone, locked) as urls:
        closed = "http://127.0.0.1:1"
        answers = await asked([urls[0], closed], urls[1:])
    told = {answer.worker: " | ".join(answer.problems) for answer in answers}
    assert "set connector: nixl" in told[urls[0][7:]] and "kv_role is kv_consumer" in told[urls[0][7:]]
    assert "can't be reached" in told[closed[7:]]
    assert "max_num_seqs is 32 there and 64 here" in told[urls[1][7:]]
    assert "has no KV connector" in told[urls[2][7:]] and "serves other, where most serve m" in told[urls[2][7:]]
    assert "auth.worker_api_key" in told[urls[3][7:]]
    assert not_compared(answers) == {}, "of one that cannot be reached nothing is expected"


async def test_the_workers_key_is_sent() -> None:
    async with served(a_vllm("kv_both", "MooncakeConnectorV1", 64, key="secret")) as (url,):
        answers = await asked([url], [url + "/d"], auth={"worker_api_key": "secret"})
    assert answers[0].problems == [] and json.dumps(answers[0].models) == '["m"]'
