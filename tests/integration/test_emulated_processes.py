"""Emulated workers in processes of their own: KV goes between them, and one of them can stand still."""

import asyncio
import json
import multiprocessing
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from balanceroute.cli.emulate import configuration
from balanceroute.config import validate
from balanceroute.emulator import ClusterShape, ProcessCluster
from balanceroute.emulator.cluster import Part
from balanceroute.emulator.processes import Member, _serve, members_of
from balanceroute.engine.tokens import continuation, decode
from balanceroute.errors import ConfigError
from tests.integration.test_proxy_answers import PROMPT, completion
from tests.plain_http import PLAIN
from tests.ports import HOST, free_base_port
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

SHAPE = ClusterShape(prefillers=1, decoders=2, lease_s=30.0)
PROBE = {"do_remote_decode": True, "do_remote_prefill": False}


def a_cluster(shape: ClusterShape, groups: int) -> ProcessCluster:
    count = shape.prefillers + shape.decoders + 1
    base = free_base_port(range(count))
    ports = list(range(base, base + count))
    members = members_of(shape, groups, HOST, ports[: shape.prefillers], ports[shape.prefillers : -1])
    return ProcessCluster(shape, members, HOST, ports[-1])


async def prefilled(client: httpx.AsyncClient, cluster: ProcessCluster) -> dict[str, Any]:
    body = completion(max_tokens=1, stream=False) | {"min_tokens": 1, "kv_transfer_params": PROBE}
    reply = await client.post(f"{cluster.prefill_urls[0]}/v1/completions", json=body)
    params: dict[str, Any] = reply.json()["kv_transfer_params"]
    return params


async def decoded(client: httpx.AsyncClient, url: str, params: dict[str, Any]) -> str:
    body = completion(max_tokens=5, stream=False) | {"kv_transfer_params": params}
    reply = await client.post(f"{url}/v1/completions", json=body)
    text: str = reply.json()["choices"][0]["text"]
    return text


async def test_kv_crosses_processes_once_and_a_frozen_rank_does_not_stop_the_other() -> None:
    each_its_own = httpx.Limits(max_keepalive_connections=0)  # workers close idle ones, maybe as they are used again
    async with (
        a_cluster(SHAPE, 2) as cluster,
        httpx.AsyncClient(**PLAIN, timeout=PATIENCE_S, limits=each_its_own) as client,
    ):
        first, second = cluster.decode_urls
        right = decode(continuation(PROMPT, 5))
        params = await prefilled(client, cluster)
        assert await decoded(client, first, params) == right
        assert await decoded(client, first, params) != right  # its KV is gone

        async def state() -> dict[str, Any]:
            """Without the workers whose processes a busy machine lets answer too late."""
            told: dict[str, Any] = (await client.get(f"{cluster.control_url}/_emulator/state")).json()
            return told

        async def one_is_stopped() -> bool:
            return (await state())["processes"] == {"p0": "up", "d0": "stopped", "d1": "up"}

        async def violations_and_pins() -> bool:
            told = await state()
            of_each = told["workers"].get("d0", {}).get("violations"), told["workers"].get("p0", {}).get("pinned")
            return (told["violations"], *of_each) == (1, {"params_reused": 1}, 0)

        await until(violations_and_pins)

        async def strike(worker: str, kind: str) -> int:
            url = f"{cluster.control_url}/_emulator/fault"
            return (await client.post(url, json={"worker": worker, "kind": kind})).status_code

        assert await strike("d0", "sigstop") == 200
        waits = asyncio.get_running_loop().create_task(decoded(client, first, await prefilled(client, cluster)))
        assert await decoded(client, second, await prefilled(client, cluster)) == right
        assert not waits.done()
        await until(one_is_stopped)
        assert await strike("d0", "sigcont") == 200
        assert await waits == right

        assert await strike("d1", "sigkill") == 200
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{second}/health")
        assert await strike("d1", "respawn") == 200
        assert await decoded(client, second, await prefilled(client, cluster)) == right
        assert await strike("d7", "sigstop") == 400
        await strike("d0", "sigstop")  # and the whole cluster ends all the same


async def test_a_fault_that_is_no_json_object_is_refused() -> None:
    route = next(route for route in a_cluster(SHAPE, 1).routes if route.path == "/_emulator/fault")
    transport = httpx.ASGITransport(Starlette(routes=[route]))
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
        for body in (b"{worker: d0}", b"[]"):
            reply = await client.post("/_emulator/fault", content=body)
            assert (reply.status_code, list(reply.json())) == (400, ["error"])


async def test_a_refused_fault_names_the_workers_and_all_kinds() -> None:
    route = next(route for route in a_cluster(SHAPE, 1).routes if route.path == "/_emulator/fault")
    transport = httpx.ASGITransport(Starlette(routes=[route]))
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
        for worker, kind, named in (("d7", "stop", "d0, d1"), ("d0", "kill", "sigkill")):
            reply = await client.post("/_emulator/fault", json={"worker": worker, "kind": kind})
            assert reply.status_code == 400 and named in reply.json()["error"]


async def test_a_port_that_is_in_use_is_named() -> None:
    cluster = a_cluster(SHAPE, 1)
    second = httpx.URL(cluster.decode_urls[1])

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answers, second.host, second.port):
        with pytest.raises(
            ConfigError, match=f"the process of d0, d1 cannot listen on {HOST}:{second.port}: Address already in use$"
        ):
            await cluster.__aenter__()


def blocks_sigint(pid: int | None) -> bool:
    (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(blocked, 16) >> (signal.SIGINT - 1) & 1)


async def test_ctrl_c_ends_the_parent_also_while_its_processes_start() -> None:
    known = multiprocessing.active_children()
    async with a_cluster(SHAPE, 1):
        started = [each.pid for each in multiprocessing.active_children() if each not in known]
        assert len(started) == 2 and all(map(blocks_sigint, started))  # since it exists: it is no handler of its own


async def test_a_process_that_is_ready_when_its_parent_waits_no_longer_ends_in_silence() -> None:
    cluster = a_cluster(SHAPE, 1)
    member = Member(Part(range(1), range(0)), (httpx.URL(cluster.prefill_urls[0]).port or 0,))
    parents_end, start_pipe = multiprocessing.Pipe(duplex=False)
    parents_end.close()
    serving = asyncio.get_running_loop().create_task(_serve(SHAPE, member, HOST, start_pipe))
    await asyncio.sleep(0)  # it has its handler
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(serving, PATIENCE_S)


def test_the_written_configuration_names_the_groups() -> None:
    shape = ClusterShape(prefillers=1, decoders=4)
    tree = configuration(a_cluster(shape, 2))
    assert [worker["barrier_group"] for worker in tree["decode"]["workers"]] == ["g0", "g0", "g1", "g1"]
    assert configuration(a_cluster(shape, 4))["decode"]["shared_barrier"] is False
    one = configuration(a_cluster(shape, 1))
    assert "shared_barrier" not in one["decode"] and "barrier_group" not in json.dumps(one)
    config = validate(tree)
    assert [config.decode.barrier_group_of(worker) for worker in config.decode.workers] == ["g0", "g0", "g1", "g1"]


@pytest.mark.parametrize(
    ("shape", "groups", "expected"),
    [
        (ClusterShape(decoders=4), 3, "--processes 3: 4 decode ranks can't be cut into so many equal groups"),
        (ClusterShape(decoders=4, ranks_per_url=2), 4, "--processes 4"),
        (ClusterShape(connector="mooncake_layerwise"), 1, "--processes: not with mooncake_layerwise"),  # type: ignore[arg-type]
    ],
    ids=["uneven", "through a URL", "layerwise"],
)
def test_a_cluster_that_cannot_be_split_into_the_given_processes_is_refused(
    shape: ClusterShape, groups: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        a_cluster(shape, groups)
