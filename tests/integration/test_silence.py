"""Workers that fall silent without a broken connection: alone, as a group, and the only one of its kind."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import continuation, decode
from balanceroute.proxy.workers.silence import SETTLE_S
from tests.integration.router import Router, looked_on, running
from tests.integration.test_proxy_answers import PROMPT, completion
from tests.waiting import until

pytestmark = pytest.mark.anyio

SHAPE = ClusterShape(prefillers=2, decoders=3, max_num_seqs=8, time_scale=0.5)  # few tokens, for seconds
# limits far above what is waited for here: whatever ends in time was moved, and was not just late
SETTINGS: dict[str, Any] = {
    "health": {
        "interval_s": 0.5,
        "timeout_s": 1.0,
        "failure_threshold": 2,
        "stall_after_s": 4.0,
        "silence_window_s": 2.0,
    },
    "retry": {"base_delay_s": 0.001, "max_delay_s": 0.01, "resume_after_silence_s": 0.3},
    "queue": {"no_worker_grace_s": 0.5},
    "limits": {"idle_timeout_s": 600.0, "first_byte_timeout_s": {"prefill": 600.0, "decode": 600.0}},
}
LONGER_S = SETTLE_S + 0.8  # than anybody stays who may move, by two looks
ROUTES = ("/health", "/metrics", "/v1/completions")


async def freeze(router: Router, name: str) -> None:
    """As SIGSTOP: streams stand still, connections stay open, and nothing is answered any more."""
    for path in ROUTES:
        await router.cluster.inject(name, "stall", path=path, count=None)
    if name.startswith("d"):
        await router.cluster.inject(name, "freeze")


def ask(router: Router, tokens: int) -> "asyncio.Task[httpx.Response]":
    body = completion(max_tokens=tokens, stream=True)
    return asyncio.get_running_loop().create_task(router.client.post("/v1/completions", json=body, timeout=300.0))


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    parts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def moves(router: Router, tier: str = "decode") -> float:
    return router.app.services.metrics.moves.value(tier)


def streams_on_every_decoder(router: Router) -> bool:
    begun = {leg.decoder_id for leg in router.app.services.legs if leg.streaming_from is not None}
    return len(begun) == len(router.cluster.decode)


@pytest.mark.parametrize("connector", ["mooncake_v1", "mooncake_layerwise"])
async def test_streams_and_new_requests_of_a_frozen_decode_worker_are_answered_by_the_others(connector: str) -> None:
    async with running(replace(SHAPE, connector=connector), **SETTINGS) as router:  # type: ignore[arg-type]
        streams = [ask(router, 600) for _ in range(6)]
        await until(lambda: streams_on_every_decoder(router))
        frozen = router.cluster.decode[0]
        await freeze(router, frozen.name)
        fresh = [ask(router, 20) for _ in range(6)]
        assert {text_of(await task) for task in fresh} == {decode(continuation(PROMPT, 20))}
        assert {text_of(await task) for task in streams} == {decode(continuation(PROMPT, 600))}
        assert moves(router) >= 2
        assert not any(router.app.services.fleet[w].in_use for w in _ids(router)[:1])
        await router.cluster.inject(frozen.name, "clear")  # what it still sends goes nowhere, and it serves again
        await until(lambda: router.app.services.fleet[_ids(router)[0]].state == "up")
        assert text_of(await ask(router, 20)) == decode(continuation(PROMPT, 20))
        await router.cluster.inject(frozen.name, "clear")
        await router.settled()


def _ids(router: Router) -> list[str]:
    return [worker.spec.id for worker in router.app.services.ledger.scheduler.snapshot.workers]


async def test_a_stream_that_cannot_be_resumed_stays_on_its_frozen_decode_worker_and_ends_there() -> None:
    async with running(SHAPE, **SETTINGS) as router:
        services = router.app.services
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        body = completion(max_tokens=80, stream=True, response_format=schema)
        task = asyncio.get_running_loop().create_task(router.client.post("/v1/completions", json=body, timeout=300.0))
        await until(lambda: any(leg.streaming_from is not None for leg in services.legs))
        worker = next(leg.decoder_id for leg in services.legs)
        frozen = f"d{_ids(router).index(worker)}"
        await freeze(router, frozen)
        await until(lambda: services.fleet[worker].out)
        await looked_on(router.app.services, LONGER_S)
        assert moves(router) == 0 and not task.done()
        await router.cluster.inject(frozen, "clear")
        assert (await task).text.endswith("data: [DONE]\n\n")
        await router.settled()


async def test_a_frozen_barrier_moves_no_request_is_named_by_ready_and_continues() -> None:
    async with running(SHAPE, **SETTINGS) as router:
        services = router.app.services
        streams = [ask(router, 150) for _ in range(6)]
        await until(lambda: streams_on_every_decoder(router))
        probes = sum(worker.counters["probes"] for worker in router.cluster.prefill)
        await router.cluster.inject("d0", "stop_barrier")
        # as one frozen rank does it: its own /health is silent, too
        await router.cluster.inject("d0", "stall", path="/health", count=None)
        await until(lambda: all(worker.out for worker in services.fleet if worker.spec.role == "decode"))
        ready = (await router.client.get("/ready")).json()
        assert ready["silent_groups"] == {"decode": sorted(_ids(router))}
        await looked_on(router.app.services, LONGER_S)
        assert moves(router) == 0
        await router.cluster.inject("d0", "clear")
        await router.cluster.inject("d0", "start_barrier")
        assert {text_of(await task) for task in streams} == {decode(continuation(PROMPT, 150))}
        assert sum(worker.counters["probes"] for worker in router.cluster.prefill) == probes
        await until(lambda: not services.frozen)
        assert "silent_groups" not in (await router.client.get("/ready")).json()
        await router.settled()


async def test_probes_of_a_frozen_prefiller_are_answered_by_the_other_one() -> None:
    async with running(SHAPE, **SETTINGS) as router:
        await freeze(router, "p0")
        asked = [ask(router, 20) for _ in range(6)]
        assert {text_of(await task) for task in asked} == {decode(continuation(PROMPT, 20))}
        assert moves(router, "prefill") >= 1
        await router.cluster.inject("p0", "clear")
        await router.settled()


async def test_requests_with_only_a_dead_prefiller_get_503_after_the_grace_like_new_ones() -> None:
    async with running(replace(SHAPE, prefillers=1), **SETTINGS) as router:
        await freeze(router, "p0")
        for reply in await asyncio.gather(*(ask(router, 20) for _ in range(4))):
            assert reply.status_code == 503 and reply.headers["retry-after"]
            assert "none of 1 prefillers is up (1 down)" in reply.text
        reply = await ask(router, 20)
        assert reply.status_code == 503 and "none of 1 prefillers is up (1 down)" in reply.text
        await router.cluster.inject("p0", "clear")
        await until(lambda: router.app.services.ledger.scheduler.snapshot.prefillers[0].state == "up")
        assert text_of(await ask(router, 20)) == decode(continuation(PROMPT, 20))
        await router.settled()


async def test_a_stream_that_the_engine_pauses_is_not_lost() -> None:
    """As vllm-ascend's DyntraLB does it: one request stands still beside others that run, longer than any silence."""
    async with running(SHAPE, **SETTINGS) as router:
        streams = [ask(router, 600) for _ in range(6)]
        decoders = router.cluster.decode
        await until(lambda: sum(len(worker.rank.running) for worker in decoders) == 6)
        index = next(i for i, worker in enumerate(decoders) if len(worker.rank.running) > 1)
        await router.cluster.inject(decoders[index].name, "pause")
        (name,) = decoders[index].rank.paused
        await looked_on(router.app.services, LONGER_S)
        assert name in decoders[index].rank.paused
        assert router.app.services.fleet[_ids(router)[index]].state == "up"
        await router.cluster.inject(decoders[index].name, "resume")
        assert {text_of(await task) for task in streams} == {decode(continuation(PROMPT, 600))}
        assert moves(router) == 0
        await router.settled()
