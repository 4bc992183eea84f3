"""Probe, decode, abort, expire, resume and every fault, against a running emulated cluster."""

import asyncio
import contextlib
from typing import Any

import httpx
import orjson
import pytest

from balanceroute.emulator import EmulatedCluster
from balanceroute.engine import OutputLengths, StepTimeModel, continuation
from balanceroute.engine.tokens import decode
from balanceroute.errors import ConfigError
from tests.unit.emulator.conversation import PROBE, a_cluster, decode_ids, events, probe
from tests.unit.proxy.virtual_time import with_virtual_time
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 500))
SOCKETS = pytest.mark.parametrize("listen", [False, True], ids=["in process", "sockets"])


async def raw_stream(cluster: EmulatedCluster, client: httpx.AsyncClient, **fields: Any) -> bytes:
    """Body of a streamed completion on d0, as far as it came."""
    body = {"prompt": PROMPT, "max_tokens": 6, "stream": True, "return_token_ids": True} | fields
    got = b""
    async with client.stream("POST", cluster.decode_urls[0] + "/v1/completions", json=body) as response:
        async for piece in response.aiter_raw():
            got += piece
    return got


def ids_in(stream: bytes) -> list[int]:
    parts = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part.startswith(b"data: {")]
    choices = [choice for part in parts for choice in orjson.loads(part).get("choices", [])]
    return [token for choice in choices for token in choice["token_ids"]]


@SOCKETS
async def test_a_probe_pins_kv_that_the_decode_pulls_and_the_tokens_are_the_promised_ones(listen: bool) -> None:
    async with a_cluster(listen=listen) as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        assert cluster.prefill[0].prefiller.pinned_blocks == params["num_prompt_blocks"] == 2
        ids = await decode_ids(cluster, client, PROMPT, max_tokens=20, kv_transfer_params=params)
        assert ids == continuation(PROMPT, 20)
        assert cluster.idle() and cluster.violations() == {}


@with_virtual_time
async def test_many_streams_at_once_each_get_their_own_tokens_and_slots_are_respected() -> None:
    async with a_cluster(decoders=1, max_num_seqs=4) as (cluster, client):
        prompts = [[300 + i, 301 + i] for i in range(12)]
        tasks = [decode_ids(cluster, client, prompt, max_tokens=5 + i) for i, prompt in enumerate(prompts)]
        gathered = asyncio.gather(*tasks)
        rank = cluster.decode[0].rank
        await until(lambda: len(rank.running) == 4 and bool(rank.waiting))
        assert await gathered == [continuation(prompt, 5 + i) for i, prompt in enumerate(prompts)]
        assert cluster.idle()


async def test_a_resume_with_prompt_ids_continues_the_same_answer_to_the_same_end() -> None:
    lengths = OutputLengths.parse("fixed:15")
    async with a_cluster(lengths=lengths) as (cluster, client):
        whole = await decode_ids(cluster, client, PROMPT, max_tokens=40)
        rest = await decode_ids(cluster, client, PROMPT + whole[:7], max_tokens=33)
        assert len(whole) == 15 and whole[:7] + rest == whole


@SOCKETS
async def test_a_client_that_leaves_mid_stream_frees_everything(listen: bool) -> None:
    async with a_cluster(listen=listen) as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        body = {"prompt": PROMPT, "max_tokens": 5000, "stream": True, "kv_transfer_params": params}
        async with client.stream("POST", cluster.decode_urls[0] + "/v1/completions", json=body) as response:
            await anext(events(response))
        await until(cluster.idle)
        assert cluster.decode[0].counters["aborted"] == 1


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[::-1]], ids=["its own", "a drain's"])
async def test_a_client_that_leaves_the_decode_queue_frees_the_prefiller_too(prompt: list[int]) -> None:
    async with a_cluster(max_num_seqs=1, decoders=1) as (cluster, client):
        busy = asyncio.ensure_future(decode_ids(cluster, client, [300], max_tokens=9000))
        await until(lambda: bool(cluster.decode[0].rank.running))
        params = await probe(cluster, client, PROMPT)
        queued = asyncio.ensure_future(decode_ids(cluster, client, prompt, kv_transfer_params=params))
        await until(lambda: bool(cluster.decode[0].rank.waiting))
        for task in (queued, busy):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await until(cluster.idle)
        assert cluster.prefill[0].prefiller.expired == 0


async def test_unpulled_kv_expires_and_its_late_decode_gets_wrong_tokens() -> None:
    async with a_cluster(lease_s=2.0) as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        await until(lambda: cluster.prefill[0].prefiller.expired == 1)
        assert cluster.idle()
        ids = await decode_ids(cluster, client, PROMPT, max_tokens=5, kv_transfer_params=params)
        assert len(ids) == 5 and ids != continuation(PROMPT, 5)
        assert cluster.violations() == {"params_expired": 1}


@with_virtual_time
async def test_a_prefiller_that_dies_before_the_pull_fails_the_decode_without_a_violation() -> None:
    async with a_cluster(decoders=1, transfer_s=5.0) as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        body = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}
        decode = asyncio.ensure_future(client.post(cluster.decode_urls[0] + "/v1/completions", json=body))
        await until(lambda: bool(cluster.decode[0].rank.transferring))
        await cluster.inject("p0", "stop")
        await cluster.inject("p0", "start")
        assert (await decode).status_code == 500
        assert cluster.violations() == {} and cluster.idle()


@with_virtual_time
async def test_nixl_heartbeats_keep_the_lease_of_a_queued_decode() -> None:
    async with a_cluster(connector="nixl", lease_s=20.0, max_num_seqs=1, decoders=1) as (cluster, client):
        busy = asyncio.ensure_future(decode_ids(cluster, client, [300], max_tokens=2000))
        await until(lambda: bool(cluster.decode[0].rank.running))
        params = await probe(cluster, client, PROMPT)
        ids = await decode_ids(cluster, client, PROMPT, max_tokens=5, kv_transfer_params=params)
        assert ids == continuation(PROMPT, 5)
        assert await busy == continuation([300], 2000)
        assert cluster.prefill[0].prefiller.expired == 0


async def test_a_prefiller_full_of_orphans_waits_for_their_lease() -> None:
    async with a_cluster(prefill_blocks=4, decode_blocks=4, block_size=100) as (cluster, client):
        for _ in range(2):
            await probe(cluster, client, PROMPT)
        assert cluster.prefill[0].kv.usage_ratio == 1.0
        third = asyncio.ensure_future(probe(cluster, client, PROMPT))
        await until(lambda: len(cluster.prefill[0].prefiller.queued) == 1)
        cluster.prefill[0].end_leases()
        await third
        assert cluster.prefill[0].prefiller.expired == 2


async def _misuse(name: str, cluster: EmulatedCluster, client: httpx.AsyncClient) -> list[int]:
    params = await probe(cluster, client, PROMPT)
    if name == "params_reused":
        await decode_ids(cluster, client, PROMPT, max_tokens=2, kv_transfer_params=params)
    if name == "params_unknown":
        params["remote_request_id"] = "cmpl-nobody"
    if name == "params_modified":
        params["remote_block_ids"] = [[7, 8]]
    if name == "decoder_prefilled":
        params = None
    prompt = PROMPT[::-1] if name == "wrong_prompt" else PROMPT
    return await decode_ids(cluster, client, prompt, max_tokens=4, kv_transfer_params=params)


@pytest.mark.parametrize(
    ("name", "right"),
    [("params_reused", False), ("params_unknown", False), ("params_modified", False), ("wrong_prompt", False)]
    + [("decoder_prefilled", True)],
)
async def test_misused_params_are_counted_and_give_wrong_tokens(name: str, right: bool) -> None:
    async with a_cluster() as (cluster, client):
        ids = await _misuse(name, cluster, client)
        assert len(ids) == 4 and (ids == continuation(PROMPT, 4)) is right
        assert cluster.violations() == {name: 1}
        assert name in cluster.state()["workers"]["d0"]["violation_log"][0]


@pytest.mark.parametrize("blocks", [None, [], [1, 2], [[1]]], ids=["null", "empty", "flat", "too few"])
async def test_a_malformed_block_list_kills_the_decoders_engine(blocks: Any) -> None:
    async with a_cluster() as (cluster, client):
        params = await probe(cluster, client, PROMPT) | {"remote_block_ids": blocks}
        stream = await raw_stream(cluster, client, kv_transfer_params=params)
        assert b'{"error": {"message": "EngineCore encountered' in stream and stream.endswith(b"data: [DONE]\n\n")
        health = await client.get(cluster.decode_urls[0] + "/health")
        assert (health.status_code, cluster.violations()) == (503, {"malformed_params": 1})


async def test_params_without_their_request_id_hang_until_the_client_leaves() -> None:
    async with a_cluster() as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        del params["remote_request_id"]
        hangs = asyncio.ensure_future(raw_stream(cluster, client, kv_transfer_params=params))
        await until(cluster.violations)
        assert not hangs.done()
        hangs.cancel()
        await until(lambda: cluster.decode[0].kv.used == 0)
        assert cluster.violations() == {"malformed_params": 1}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"stream": True}, "probe_stream"), ({"n": 2}, "probe_n"), ({"max_tokens": 9}, "probe_max_tokens")]
    + [({"prompt": [[300, 301], [302]]}, "probe_batch")],
    ids=["stream", "n", "max_tokens", "batch"],
)
async def test_a_probe_of_the_wrong_shape_is_counted_and_leaves_orphans(fields: dict[str, Any], kind: str) -> None:
    async with a_cluster() as (cluster, client):
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": PROBE} | fields
        reply = await client.post(cluster.prefill_urls[0] + "/v1/completions", json=body)
        assert (reply.status_code, cluster.violations()) == (200, {kind: 1})
        assert len(cluster.prefill[0].prefiller.pinned) == (2 if kind in ("probe_n", "probe_batch") else 1)


async def test_ranks_behind_one_url_are_picked_by_their_header() -> None:
    async with a_cluster(decoders=4, ranks_per_url=2) as (cluster, client):
        url = cluster.decode_urls[1] + "/v1/completions"
        for rank, status in (("1", 200), ("2", 400), ("-1", 400), ("x", 200)):
            reply = await client.post(url, json={"prompt": [300]}, headers={"x-DATA-parallel-rank": rank})
            assert reply.status_code == status
        assert [worker.counters["requests"] for worker in cluster.decode] == [0, 0, 1, 1]
        assert 'engine="1"' in (await client.get(cluster.decode_urls[1] + "/metrics")).text


async def test_layerwise_decode_calls_the_metaserver_and_runs_when_the_prefiller_has_pushed() -> None:
    async with a_cluster(connector="mooncake_layerwise") as (cluster, client):

        async def metaserver(request: httpx.Request) -> httpx.Response:
            body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": orjson.loads(request.content)}
            url = cluster.prefill_urls[0] + "/v1/completions"
            reply = await client.post(url, json=body, headers={"x-request-id": "one"})
            assert reply.json()["kv_transfer_params"] is None
            return httpx.Response(200)

        cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(metaserver)))
        body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
        body["kv_transfer_params"] = {"do_remote_prefill": True, "metaserver": "http://proxy/v1/metaserver"}
        url = cluster.decode_urls[0] + "/v1/completions"
        reply = await client.post(url, json=body, headers={"x-request-id": "one"})
        assert reply.json()["choices"][0]["token_ids"] == continuation(PROMPT, 5)
        assert cluster.idle() and cluster.violations() == {}


async def test_memory_pressure_pops_the_youngest_request_with_the_recompute_marker() -> None:
    async with a_cluster(decoders=1, decode_blocks=5, block_size=100) as (cluster, client):
        old = asyncio.ensure_future(raw_stream(cluster, client, max_tokens=250))
        await until(lambda: bool(cluster.decode[0].rank.running))
        young = await raw_stream(cluster, client, prompt=PROMPT[::-1][:190], max_tokens=150)
        assert b'"finish_reason":"stop","stop_reason":"recomputed"' in young and young.endswith(b"[DONE]\n\n")
        done = ids_in(young)
        assert 0 < len(done) < 150 and done == continuation(PROMPT[::-1][:190], len(done))
        assert ids_in(await old) == continuation(PROMPT, 250)


async def test_local_preemption_is_invisible_but_for_the_wait() -> None:
    shape = {"decoders": 1, "decode_blocks": 5, "block_size": 100, "preemption": "recompute_locally"}
    async with a_cluster(**shape) as (cluster, client):
        streams = [raw_stream(cluster, client, prompt=PROMPT[:190], max_tokens=150) for _ in range(2)]
        for stream in await asyncio.gather(*streams):
            assert ids_in(stream) == continuation(PROMPT[:190], 150)
        assert cluster.decode[0].rank.preemptions > 0


@SOCKETS
@pytest.mark.parametrize("kind", ["reset", "close", "half_event", "reset_before_reply"])
async def test_a_broken_connection_is_broken_for_the_client_and_freed_here(kind: str, listen: bool) -> None:
    async with a_cluster(listen=listen) as (cluster, client):
        await cluster.inject("d0", kind, after_events=2)
        with pytest.raises(httpx.TransportError):
            await raw_stream(cluster, client, max_tokens=500)
        await until(cluster.idle)
        assert ids_in(await raw_stream(cluster, client)) == continuation(PROMPT, 6)


@SOCKETS
@pytest.mark.parametrize("kind", ["merge_events", "split_bytes", "late_done", "gzip"])
async def test_unusual_framing_changes_no_token(kind: str, listen: bool) -> None:
    async with a_cluster(listen=listen) as (cluster, client):
        await cluster.inject("d0", kind)
        assert await decode_ids(cluster, client, PROMPT, max_tokens=6) == continuation(PROMPT, 6)


async def test_a_fault_can_join_two_events_in_one_write_or_split_them_into_bytes_or_compress_them() -> None:
    async with a_cluster() as (cluster, client):

        async def written(kind: str) -> tuple[list[bytes], str | None]:
            await cluster.inject("d0", kind)
            body = {"prompt": PROMPT, "max_tokens": 6, "stream": True}
            async with client.stream("POST", cluster.decode_urls[0] + "/v1/completions", json=body) as response:
                return [piece async for piece in response.aiter_raw()], response.headers.get("content-encoding")

        joined, split, compressed = [await written(kind) for kind in ("merge_events", "split_bytes", "gzip")]
        assert [piece.count(b"data: ") for piece in joined[0]] == [2, 2, 2, 1]
        assert {len(piece) for piece in split[0]} == {1}
        assert compressed[1] == "gzip"


@pytest.mark.parametrize(
    ("kind", "present", "absent"),
    [
        ("no_done", b'"finish_reason":"length"', b"[DONE]"),
        ("no_finish", b"[DONE]", b'"finish_reason":"'),
        ("error_event", b'"error"', b'"finish_reason":"'),
        ("garbage", b"\xff\xfe\x00garbage", b"impossible"),
        ("recompute", b'"stop_reason":"recomputed"', b'"finish_reason":"length"'),
    ],
)
async def test_each_stream_fault_has_its_described_effect(kind: str, present: bytes, absent: bytes) -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("d0", kind, after_events=2)
        stream = await raw_stream(cluster, client)
        assert present in stream and absent not in stream
        await until(cluster.idle)


async def test_a_recompute_before_the_first_token_shows_only_done() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("d0", "recompute")
        assert await raw_stream(cluster, client) == b"data: [DONE]\n\n"
        reply = await client.post(cluster.decode_urls[0] + "/v1/completions", json={"prompt": PROMPT})
        assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_a_status_fault_counts_down_and_can_apply_to_health() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("d0", "status", count=2, status=503)
        await cluster.inject("d0", "status", count=1, status=500, path="/health")
        url = cluster.decode_urls[0]
        codes = [(await client.post(url + "/v1/completions", json={"prompt": [300]})).status_code for _ in range(3)]
        health = [(await client.get(url + "/health")).status_code for _ in range(2)]
        assert (codes, health) == ([503, 503, 200], [500, 200])


async def test_a_prefiller_can_answer_without_params_and_pins_nothing() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("p0", "null_params")
        assert await probe(cluster, client, PROMPT) is None
        assert cluster.idle()


async def test_a_frozen_rank_makes_no_progress_though_it_is_healthy_and_the_others_go_on() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("d0", "freeze")
        stuck = asyncio.ensure_future(decode_ids(cluster, client, PROMPT, max_tokens=5))
        await until(lambda: cluster.decode[0].rank.busy)
        reply = await client.post(cluster.decode_urls[1] + "/v1/completions", json={"prompt": [300]})
        assert reply.status_code == (await client.get(cluster.decode_urls[0] + "/health")).status_code == 200
        assert not stuck.done()
        await cluster.inject("d0", "unfreeze")
        assert await stuck == continuation(PROMPT, 5)


async def test_a_stopped_barrier_stops_every_rank_and_goes_on_without_losing_a_token() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("d1", "stop_barrier")
        stuck = asyncio.ensure_future(decode_ids(cluster, client, PROMPT, max_tokens=5))
        await until(lambda: cluster.decode[0].rank.busy)
        assert not stuck.done()
        await cluster.inject("d1", "start_barrier")
        assert await stuck == continuation(PROMPT, 5)


@SOCKETS
async def test_a_stopped_worker_refuses_connections_and_comes_back_empty_on_its_port(listen: bool) -> None:
    async with a_cluster(listen=listen) as (cluster, client):
        params = await probe(cluster, client, PROMPT)
        await cluster.inject("p0", "stop")
        with pytest.raises(httpx.TransportError):  # an idle connection of before was cut
            await probe(cluster, client, PROMPT)
        with pytest.raises(httpx.ConnectError):
            await probe(cluster, client, PROMPT)
        stream = await raw_stream(cluster, client, kv_transfer_params=params)
        assert b'"error"' in stream and cluster.violations() == {}
        await cluster.inject("p0", "start")
        fresh = await probe(cluster, client, PROMPT)
        assert fresh["remote_engine_id"] != params["remote_engine_id"]


async def test_a_worker_stopped_over_its_own_port_stops_and_the_cluster_can_end() -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with a_cluster(listen=True) as (cluster, client):
            order = {"worker": "p0", "kind": "stop"}
            with pytest.raises(httpx.TransportError):  # it cuts this very request
                await client.post(cluster.prefill_urls[0] + "/_emulator/fault", json=order)
            await until(lambda: not cluster.prefill[0].up)
            await cluster.inject("p0", "start")
            await probe(cluster, client, PROMPT)


async def test_a_decoder_that_is_stopped_mid_stream_cuts_it() -> None:
    async with a_cluster(listen=True) as (cluster, client):
        stuck = asyncio.ensure_future(raw_stream(cluster, client, max_tokens=5000))
        await until(lambda: bool(cluster.decode[0].rank.running))
        await cluster.inject("d0", "stop")
        with pytest.raises(httpx.TransportError):
            await stuck
        assert cluster.decode[0].kv.used == 0


async def test_a_slow_prefill_takes_its_factor_longer() -> None:
    async with a_cluster() as (cluster, client):
        await cluster.inject("p0", "slow_prefill", factor=5)
        assert cluster.prefill[0].prefiller.prefill_s(0) == pytest.approx(0.05)
        await cluster.inject("p0", "clear")
        assert cluster.prefill[0].prefiller.prefill_s(0) == pytest.approx(0.01)


async def test_faults_and_state_are_reachable_over_http() -> None:
    async with a_cluster() as (cluster, client):
        url = cluster.prefill_urls[0] + "/_emulator/"
        reply = await client.post(url + "fault", json={"worker": "d1", "kind": "status", "count": None})
        assert reply.status_code == 200
        state = (await client.get(url + "state")).json()
        assert state["workers"]["d1"]["faults"] == [{"kind": "status", "count": None, "path": None}]
        wrong = [{"worker": "x9"}, {"worker": ["d1"]}, {"colour": 1}, {"kind": "nope"}]
        wrong += [{"count": 0}, {"after_events": -1}, {"status": "500"}, {"factor": -1}, {"delay_s": None}]
        for each in wrong:
            assert (await client.post(url + "fault", json={"kind": "status", **each})).status_code == 400, each
        assert (await client.get(url + "state")).json()["workers"]["p0"]["faults"] == []


@pytest.mark.parametrize("by", ["id", "text", "text of several tokens"])
async def test_nothing_stops_an_answer_within_its_min_tokens(by: str) -> None:
    async with a_cluster(decoders=1) as (cluster, client):
        url = cluster.decode_urls[0] + "/v1/completions"
        answer = continuation(PROMPT, 10)
        words = [decode([token]) for token in answer]
        stop = {"id": {"stop_token_ids": [answer[3]]}, "text": {"stop": [words[3]]}}
        stop["text of several tokens"] = {"stop": [words[2] + words[3], "longer than the held text " * 4]}
        lengths = []
        for min_tokens in (3, 4):
            body = {"prompt": PROMPT, "max_tokens": 10, "min_tokens": min_tokens, **stop[by]}
            lengths.append((await client.post(url, json=body)).json()["usage"]["completion_tokens"])
        assert lengths == [4, 10]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_worker_counts_what_it_pulls_as_cached(stream: bool) -> None:
    """As vLLM does with --enable-prompt-tokens-details; a prompt that it computes itself is not."""
    async with a_cluster(decoders=1, prompt_tokens_details=True) as (cluster, client):
        cached = []
        for params in (await probe(cluster, client, PROMPT), None):
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            body = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params, **options}
            reply = await client.post(cluster.decode_urls[0] + "/v1/completions", json=body)
            last = reply.text.split("data: ")[-2] if stream else reply.text
            cached.append((orjson.loads(last)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"))
        assert cached == [len(PROMPT) - 1, None if stream else 0]


async def test_stop_strings_and_stop_ids_end_an_answer_early_and_free_its_slot() -> None:
    async with a_cluster() as (cluster, client):
        answer = continuation(PROMPT, 10)
        url = cluster.decode_urls[0] + "/v1/completions"
        by_id = await client.post(url, json={"prompt": PROMPT, "max_tokens": 10, "stop_token_ids": [answer[4]]})
        choice = by_id.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", answer[4])
        word = f" w{answer[3]}"
        by_text = await client.post(url, json={"prompt": PROMPT, "max_tokens": 10, "stop": [word]})
        choice = by_text.json()["choices"][0]
        assert choice["stop_reason"] == word and not choice["text"].endswith(word)
        assert cluster.idle()


async def test_a_slow_client_gets_every_byte_and_delays_no_other_client() -> None:
    async with a_cluster(decoders=1) as (cluster, client):
        body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "return_token_ids": True}
        got = b""
        async with client.stream("POST", cluster.decode_urls[0] + "/v1/completions", json=body) as response:
            pieces = response.aiter_raw()
            got += await anext(pieces)
            other = await decode_ids(cluster, client, [300, 301], max_tokens=300)
            assert other == continuation([300, 301], 300)
            async for piece in pieces:
                got += piece
        assert ids_in(got) == continuation(PROMPT, 400)


async def test_a_step_takes_no_less_than_its_time() -> None:
    async with a_cluster(time_scale=1.0, step_time=StepTimeModel(0.0, 0.004), transfer_s=0.0) as (cluster, client):
        began = asyncio.get_running_loop().time()
        await decode_ids(cluster, client, PROMPT, max_tokens=100)
        assert asyncio.get_running_loop().time() - began > 0.39


async def test_a_port_that_is_taken_is_named() -> None:
    async with a_cluster(listen=True) as (cluster, _):
        port = int(cluster.prefill_urls[0].rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=str(port)):
            async with EmulatedCluster(cluster.shape, prefill_ports=[port]):
                pass


async def test_invalid_tools_are_a_400() -> None:
    async with a_cluster() as (cluster, client):
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        tool = {"type": "function", "function": {"name": "f"}}
        for odd in ("x", 1, 1.5, True, {"x": 1}, [1], [None], [[1]], [{}], [{"function": "f"}]):
            for asked in ({"tools": odd}, {"tools": [tool], "tool_choice": {"function": odd}}):
                answer = await client.post(cluster.decode_urls[0] + "/v1/chat/completions", json=chat | asked)
                assert answer.status_code == 400, asked


async def test_unreadable_tokenizer_requests_are_a_400_and_another_model_a_404() -> None:
    async with a_cluster() as (cluster, client):
        url = cluster.prefill_urls[0]
        for odd in (None, "abc", [-5], [99_999_999], [[1, 2], [3]], [1.5]):
            answer = await client.post(url + "/detokenize", json={"tokens": odd})
            assert answer.status_code == 400, odd
        assert (await client.post(url + "/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert (await client.post(url + route, json=body)).status_code == 200
            assert (await client.post(url + route, json=body | {"model": "nope"})).status_code == 404
