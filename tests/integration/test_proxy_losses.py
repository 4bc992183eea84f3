"""Prefill KV and held-back text that a failure puts at risk: drained, expired or told of; never lost silently."""

import asyncio
import json

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import continuation, decode
from balanceroute.proxy.drainer import Drain
from balanceroute.proxy.payloads import parse
from tests.integration.router import running
from tests.integration.test_proxy_answers import PROMPT, completion, events, texts
from tests.integration.test_proxy_faults import PAIR, QUICK, inject_everywhere

pytestmark = pytest.mark.anyio


async def test_kv_is_drained_through_a_worker_that_takes_it_when_the_freest_one_is_busy() -> None:
    shape = ClusterShape(prefillers=1, decoders=3, max_num_seqs=8, time_scale=0.02)
    async with running(shape, **QUICK) as router:
        await router.cluster.inject("d1", "status", status=503, count=None)
        await router.cluster.inject("d2", "status", status=503, count=None)
        bodies = [completion(max_tokens=24, stream=True) for _ in range(6)]
        replies = await asyncio.gather(*(router.client.post("/v1/completions", json=body) for body in bodies))
        assert [reply.status_code for reply in replies] == [200] * 6
        await router.settled()
        metrics = router.app.services.metrics
        assert metrics.drains.value("drained") > 0
        assert metrics.drains.value("orphaned") == metrics.orphaned_kv == 0


async def test_a_compressed_reply_is_a_failed_try_and_no_byte_of_it_reaches_the_client() -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "gzip")
        reply = await router.client.post("/v1/completions", json=completion(max_tokens=24, stream=True))
        assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 24))
        await router.settled()


@pytest.mark.parametrize(("fault", "resumes"), [("recompute", True), ("reset", False)])
async def test_text_held_back_for_a_stop_string_is_never_lost_silently(fault: str, resumes: bool) -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", fault, after_events=7)
        body = completion(max_tokens=24, stream=True, stop=["</s>"])
        whole = decode(continuation(PROMPT, 24))
        if resumes:
            reply = await router.client.post("/v1/completions", json=body)
            assert "".join(texts(events(reply.text))) == whole
        else:
            got = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async with router.client.stream("POST", "/v1/completions", json=body) as stream:
                    async for piece in stream.aiter_bytes():
                        got += piece
            parts = events(got.decode())
            assert "error" in parts[-1] and whole.startswith("".join(texts(parts[:-1])))
        await router.settled()


async def test_kv_whose_lease_is_nearly_over_is_left_to_expire() -> None:
    async with running(PAIR, prefill={"kv_pin_s": 2.0}, pool={"ttl_s": 1.0}) as router:
        services = router.app.services
        request = parse("completions", json.dumps(completion()).encode())
        params = b'{"do_remote_prefill":true}'  # would be a violation if it were sent
        services.drainer.drain(Drain("late", request, params, (), services.ledger.now() - 1.9))
        await router.settled()
        assert services.metrics.drains.value("orphaned") == 1
        assert router.cluster.violations() == {}
