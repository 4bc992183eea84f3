"""Several answers to one request: what the client sees when they come together, and when one of them fails."""

from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import continuation, decode
from tests.integration.router import FAST, Router, running
from tests.integration.test_proxy_answers import PROMPT, PROMPTS, chat, completion, events, texts
from tests.plain_http import PLAIN
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


async def stream(router: Router, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    return events((await router.client.post(path, json={**body, "stream": True})).text)


def of_choice(parts: list[Any], index: int) -> list[Any]:
    return [{**p, "choices": [c]} for p in parts if p != "[DONE]" for c in p["choices"] if c["index"] == index]


async def test_a_list_of_strings_is_answered_prompt_by_prompt() -> None:
    async with running() as router:
        prompts = ["the quick brown fox", "hello", "and then it runs home"]
        alone = [(await router.client.post("/v1/completions", json=completion(p))).json() for p in prompts]
        both = (await router.client.post("/v1/completions", json=completion(prompts))).json()
        assert [c["text"] for c in both["choices"]] == [a["choices"][0]["text"] for a in alone]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert both["usage"][name] == sum(a["usage"][name] for a in alone)
        assert set(both) == set(alone[0]) and set(both["choices"][1]) == set(alone[0]["choices"][0])
        await router.settled()


async def test_a_fanned_out_stream_sums_usage_and_names_the_workers_model() -> None:
    async with running() as router:
        body = completion(PROMPTS, n=2, stream_options={"include_usage": True})
        del body["model"]
        parts = await stream(router, body)
        assert parts[-2]["usage"] == {
            **parts[-2]["usage"],
            "prompt_tokens": 90,
            "completion_tokens": 72,
            "total_tokens": 162,
        }
        assert {part["model"] for part in parts[:-1]} == {"emulated"}
        assert len({(part["id"], part["created"]) for part in parts[:-1]}) == 1
        assert sum(part["choices"] == [] for part in parts[:-1]) == 1


async def test_a_stream_without_stream_options_has_no_usage() -> None:
    async with running() as router:
        parts = await stream(router, completion(PROMPTS))
        assert all(part["choices"] and part.get("usage") is None for part in parts[:-1]) and parts[-1] == "[DONE]"


async def test_continuous_usage_is_per_choice_as_on_vllm() -> None:
    async with running() as router:
        options = {"include_usage": True, "continuous_usage_stats": True}
        parts = await stream(router, completion(PROMPT, n=2, stream_options=options))
        for index in (0, 1):
            counts = [part["usage"]["completion_tokens"] for part in of_choice(parts, index)]
            assert counts == sorted(counts) and counts[-1] == 12
            assert {part["usage"]["prompt_tokens"] for part in of_choice(parts, index)} == {40}
        assert parts[-2]["usage"]["completion_tokens"] == 24 and parts[-2]["usage"]["prompt_tokens"] == 40


async def test_streamed_chat_choices_equal_the_unstreamed_ones() -> None:
    async with running() as router:
        whole = (await router.client.post("/v1/chat/completions", json=chat(n=3, max_tokens=90))).json()
        parts = await stream(router, chat(n=3, max_tokens=90), "/v1/chat/completions")
        for choice in whole["choices"]:
            assert "".join(texts(of_choice(parts, choice["index"]))) == choice["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 270
        await router.settled()


async def test_a_recomputed_choice_goes_on_while_its_siblings_run() -> None:
    async with running() as router:
        await router.cluster.inject("d0", "recompute", after_events=3, count=1)
        parts = await stream(router, completion(PROMPTS, n=2, max_tokens=40))
        for index in range(6):
            expected = decode(continuation(PROMPTS[index // 2], 40))
            assert "".join(texts(of_choice(parts, index))) == expected
        assert parts[-1] == "[DONE]" and router.app.services.metrics.recomputes.value("recomputed") == 1
        await router.settled()
        assert router.cluster.violations() == {}


@pytest.mark.parametrize(("n", "prompt", "param"), [(4, PROMPT, "n"), (1, [PROMPT] * 4, "prompt")])
async def test_more_choices_than_configured_are_refused(n: int, prompt: Any, param: str) -> None:
    async with running(limits={"max_choices": 3}) as router:
        reply = await router.client.post("/v1/completions", json=completion(prompt, n=n))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        assert (await router.client.post("/v1/completions", json=completion(n=3))).status_code == 200


async def test_a_choice_that_fails_before_the_first_token_gives_its_status() -> None:
    async with running(ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.05)) as router:
        await router.cluster.inject("d0", "status", status=400, count=1)
        reply = await router.client.post("/v1/completions", json=completion(PROMPTS, stream=True, max_tokens=400))
        assert reply.status_code == 400 and reply.json()["error"]["code"] == 400
        await router.settled()
        assert router.cluster.violations() == {}


async def test_a_choice_that_fails_later_ends_all_with_an_error_event_and_no_done() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.05)
    async with running(shape, retry={"resume_on_worker_loss": False, "max_attempts": 1}) as router:
        await router.cluster.inject("d0", "reset", after_events=20, count=1)
        text = ""
        body = completion(PROMPTS, stream=True, max_tokens=2000)
        async with router.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                async for piece in reply.aiter_text():
                    text += piece
        parts = events(text)
        assert "error" in parts[-1] and "[DONE]" not in parts
        assert sum("error" in part for part in parts) == 1
        await router.settled()
        assert router.cluster.decode[0].counters["generation_tokens"] < 6000


async def test_a_client_that_leaves_mid_stream_ends_every_choice() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=4, time_scale=0.1)
    async with running(shape) as router:
        async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, **PLAIN) as client:
            body = completion(n=6, max_tokens=2000, stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_bytes())
        await router.settled()
        assert router.app.services.metrics.requests.value("cancelled") == 1
        assert router.cluster.violations() == {}


async def test_a_request_that_the_queue_has_no_room_for_is_refused_as_a_whole() -> None:
    async with running(FAST, queue={"max_queued": 2}) as router:
        services = router.app.services
        services.tasks["metrics_poller"].cancel()  # which would tell what the prefillers really hold
        for prefiller in services.ledger.scheduler.snapshot.prefillers:
            services.ledger.report_prefiller(prefiller.spec.id, 1.0)
        reply = await router.client.post("/v1/completions", json=completion(n=6))
        assert reply.status_code == 429 and "retry-after" in reply.headers
        await router.settled()
