"""`check-config --probe`, against workers over real sockets."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from balanceroute.cli.check_config import verdict
from balanceroute.cli.probe import Answer, not_compared, probe
from balanceroute.config import validate
from balanceroute.emulator import ClusterShape, Connector, EmulatedCluster
from balanceroute.emulator.server import HttpServer
from tests.unit.proxy.servers import answering, plain, worker
from tests.waiting import PATIENCE_S, pace

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


OTHER = {"mooncake_v1": "nixl", "nixl": "mooncake_v1", "mooncake_layerwise": "nixl"}


def at(connector: str) -> dict[str, Any]:
    """The settings of a router for it."""
    return {"connector": connector, "listen": {"host": "127.0.0.1", "port": 8000}}


def asked(prefill: list[str], decode: list[str], **more: Any) -> "asyncio.Future[list[Answer]]":
    tree: dict[str, Any] = {
        "prefill": {"workers": [{"url": url} for url in prefill]},
        "decode": {"workers": [{"url": url} for url in decode], "max_num_seqs": 64},
        "health": {"timeout_s": PATIENCE_S},
        **more,
    }
    return asyncio.ensure_future(probe(validate(tree)))


async def test_an_emulated_cluster_passes_every_check() -> None:
    async with EmulatedCluster(ClusterShape(prefillers=1, decoders=2, max_num_seqs=64)) as cluster:
        answers = await asked(list(cluster.prefill_urls), list(cluster.decode_urls))
    assert [answer.problems for answer in answers] == [[], [], []]
    assert {answer.models for answer in answers} == {("emulated",)}
    assert [answer.kv_role for answer in answers] == ["kv_producer", "kv_consumer", "kv_consumer"]
    assert [answer.prefix_caching for answer in answers] == [False] * 3
    assert verdict(answers, 0) == "3 workers asked, no problem found"


@pytest.mark.parametrize("connector", ["mooncake_v1", "nixl", "mooncake_layerwise"])
async def test_tiers_that_were_swapped_slots_and_a_connector_that_differ_are_found_on_an_emulated_cluster(
    connector: str,
) -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, connector=Connector(connector))
    async with EmulatedCluster(shape) as cluster:
        right = await asked(list(cluster.prefill_urls), list(cluster.decode_urls), **at(connector))
        swapped = await asked(list(cluster.decode_urls), list(cluster.prefill_urls), **at(connector))
        other = await asked(list(cluster.prefill_urls), list(cluster.decode_urls), connector=OTHER[connector])
    assert [len(answer.problems) for answer in right] == [0, 1]
    assert "max_num_seqs is 8 there and 64 here" in right[1].problems[0]
    assert "its kv_role is kv_consumer: a prefill worker is a kv_producer" in swapped[0].problems[-1]
    assert "its kv_role is kv_producer: a decode worker is a kv_consumer" in swapped[1].problems[-1]
    assert [f"set connector: {connector}" in answer.problems[-1] for answer in other] == [True, True]


async def test_figures_that_workers_do_not_report_are_unknown() -> None:
    silent = Starlette(routes=[route for route in a_vllm("kv_both", "NixlConnector", 64).routes[:-1]])
    async with served(silent, silent, silent) as (prefill, *decode):
        answers = await asked([prefill], decode)
    assert {(answer.max_num_seqs, answer.kv_role) for answer in answers} == {(None, None)}
    p0, *decoders = [answer.worker for answer in answers]
    assert not_compared(answers) == {"max_num_seqs": decoders, "connector and kv_role": [p0, *decoders]}
    last = verdict(answers, 0)
    assert last.startswith("3 workers asked, no problem found; not compared, as workers do not tell: max_num_seqs (")
    assert ", ".join(decoders) in last


async def test_workers_that_match_the_configuration_have_no_problem() -> None:
    prefill, decode = a_vllm("kv_producer", "MooncakeConnectorV1", 8), a_vllm("kv_consumer", "MooncakeConnectorV1", 64)
    async with served(prefill, decode) as (p, d):
        answers = await asked([p], [d])
    assert [answer.problems for answer in answers] == [[], []]
    assert verdict(answers, 0) == "2 workers asked, no problem found"
    assert [(a.max_num_seqs, a.kv_role, a.prefix_caching) for a in answers] == [
        (8, "kv_producer", True),
        (64, "kv_consumer", True),
    ]


async def test_a_connector_is_known_by_any_of_the_engines_names_for_it() -> None:
    names = ("MooncakeConnectorV2", "MooncakeHybridConnector", "SfaRemoteD2HConnector", "MooncakeLayerwiseConnector")
    async with served(*(a_vllm("kv_both", name, 64) for name in names)) as urls:
        answers = await asked(urls[:2], urls[2:])
    others = [[f"its connector is {name}: set connector: mooncake_layerwise, not mooncake_v1"] for name in names[2:]]
    assert [answer.problems for answer in answers] == [[], [], *others]


async def test_each_problem_is_reported_for_its_worker() -> None:
    swapped, small = a_vllm("kv_consumer", "NixlConnector", 64), a_vllm("kv_consumer", "MooncakeConnector", 32)
    lone, locked = a_vllm("", "", 64, model="other"), a_vllm("kv_consumer", "MooncakeConnector", 64, key="secret")
    async with served(swapped, small, lone, locked) as urls:
        closed = "http://127.0.0.1:1"
        answers = await asked([urls[0], closed], urls[1:])
    problems = {answer.worker: " | ".join(answer.problems) for answer in answers}
    assert "set connector: nixl" in problems[urls[0][7:]] and "kv_role is kv_consumer" in problems[urls[0][7:]]
    assert problems[closed[7:]] == f"{closed} can't be reached: Connection refused"
    assert "max_num_seqs is 32 there and 64 here" in problems[urls[1][7:]]
    assert (
        "has no KV connector" in problems[urls[2][7:]] and "serves other, where most serve m" in problems[urls[2][7:]]
    )
    assert "auth.worker_api_key" in problems[urls[3][7:]]
    assert not_compared(answers) == {}, "of one that cannot be reached nothing is expected"


async def test_a_worker_whose_tls_is_not_as_its_url_says_is_reported_in_words() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with (
        served(a_vllm("kv_producer", "MooncakeConnectorV1", 64)) as (url,),
        worker(answering(plain(b"")), tls=tls) as secure,
    ):
        not_secure, unknown = f"https{url[4:]}", f"https{secure.url[4:]}"
        found = [answer.problems for answer in await asked([not_secure], [unknown])]
    assert found[0] == [f"{not_secure} can't be reached: its URL is https, and it does not speak TLS"]
    assert found[1][0].startswith(f"{unknown} can't be reached: its certificate is refused: ")


async def test_the_workers_key_is_sent() -> None:
    async with served(a_vllm("kv_both", "MooncakeConnectorV1", 64, key="secret")) as (url,):
        answers = await asked([url], [url + "/d"], auth={"worker_api_key": "secret"})
    assert answers[0].problems == [] and json.dumps(answers[0].models) == '["m"]'


@pytest.mark.parametrize(
    ("models", "settings"),
    [
        ({"data": [5, None, {"id": 7}]}, {}),
        ({"data": {"id": "m"}}, {"scheduler_config": [1], "kv_transfer_config": "a"}),
        ([], {"scheduler_config": {"max_num_seqs": "64"}, "kv_transfer_config": {"kv_role": [1], "kv_connector": 5}}),
    ],
)
async def test_a_server_with_unexpected_answers_is_reported_and_does_not_end_the_probe(
    models: Any, settings: Any
) -> None:
    odd = Starlette(
        routes=[
            Route("/health", lambda _: Response()),
            Route("/metrics", lambda _: Response(b"\xff\x00")),
            Route("/v1/models", lambda _: JSONResponse(models)),
            Route("/server_info", lambda _: JSONResponse({"vllm_config": settings})),
        ]
    )
    async with served(odd, odd) as (one, other):
        for answer in await asked([one], [other]):
            assert answer.healthy and answer.problems and answer.max_num_seqs is answer.kv_role is None


async def test_an_answer_that_does_not_end_is_a_problem_of_its_worker_and_ends_the_wait() -> None:
    ended = asyncio.Queue[None]()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await pace(0.01)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.put_nowait(None)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answers = await asked([url], [f"{url}/d"], health={"timeout_s": 0.2})
        for _ in answers:
            await ended.get()
    assert all("no whole answer within 0.2 s" in answer.problems[0] for answer in answers)


async def test_control_characters_of_a_worker_do_not_reach_the_terminal() -> None:
    evil = a_vllm("kv_producer\x1b[2J", "Mooncake\x1b]0;owned\x07", 64, model="m\x1b[31m")
    async with served(evil) as (url,):
        first, second = await asked([url], [f"{url}/d"])
    assert first.models == ("m?[31m",) and first.connector == "Mooncake?]0;owned?"
    assert all(text.isprintable() for text in [*first.problems, *second.problems])
