"""Anthropic's official client in front of the router and an emulated cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from balanceroute.config import digest_of
from balanceroute.emulator import ClusterShape
from balanceroute.proxy.client import messages_exchange
from balanceroute.proxy.life.layerwise import Layerwise
from tests.at_first_use import AtFirstUse
from tests.integration.router import FAST, Router, running
from tests.integration.test_proxy_answers import chat

anthropic = AtFirstUse("anthropic")
pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {
    "model": "emulated",
    "max_tokens": 12,
    "system": "be brief",
    "messages": [{"role": "user", "content": "tell me"}],
}
ENDLESS = {"ignore_eos": True}  # in `extra_body`
TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object", "properties": {}}}


@asynccontextmanager
async def client_of(router: Router, **options: Any) -> AsyncIterator["anthropic.AsyncAnthropic"]:
    options = {"api_key": "k", "max_retries": 0, **options}
    async with anthropic.AsyncAnthropic(base_url=router.url, **options) as client:
        yield client


async def as_chat(router: Router, **fields: Any) -> str:
    """What a chat with the same words is answered."""
    answer = (await router.client.post("/v1/chat/completions", json=chat(**fields))).json()
    return str(answer["choices"][0]["message"]["content"])


async def test_a_message_is_answered_as_the_same_chat_and_counts_exactly() -> None:
    async with running() as router, client_of(router) as client:
        chat_text = await as_chat(router)
        message = await client.messages.create(**ASKED, extra_body=ENDLESS)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == chat_text
        assert message.stop_reason == "max_tokens" and message.role == "assistant" and message.model == "emulated"
        assert message.usage.output_tokens == 12
        counted = await client.messages.count_tokens(model="emulated", system="be brief", messages=ASKED["messages"])
        input_tokens = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert input_tokens == counted.input_tokens > 0
        assert message._request_id
        await router.settled()


async def test_the_first_event_has_the_prompt_s_size_also_before_its_prefiller_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode first, the decode worker's first token may come before the prefiller's reply."""
    started = asyncio.Event()
    prefill = Layerwise._prefill_for

    async def late(self: Layerwise, body: bytes) -> Any:
        result = await prefill(self, body)
        await started.wait()
        return result

    monkeypatch.setattr(Layerwise, "_prefill_for", late)
    events: dict[str, Any] = {}
    async with running(ClusterShape(prefillers=1, decoders=1, connector="mooncake_layerwise")) as router:
        async with router.client.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    events[event["type"]] = event
                    started.set()
        await router.settled()
    assert (
        events["message_start"]["message"]["usage"]["input_tokens"]
        == events["message_delta"]["usage"]["input_tokens"]
        > 0
    )


async def test_the_synchronous_client_is_served_the_same() -> None:
    async with running() as router:
        chat_text = await as_chat(router)

        def ask() -> tuple[str, str]:
            with anthropic.Anthropic(base_url=router.url, api_key="k", max_retries=0) as client:
                once = client.messages.create(**ASKED, extra_body=ENDLESS)
                with client.messages.stream(**ASKED, extra_body=ENDLESS) as stream:
                    return once.content[0].text, "".join(stream.text_stream)

        assert await asyncio.to_thread(ask) == (chat_text, chat_text)
        await router.settled()


async def test_a_stream_has_its_events_in_order_and_the_helpers_message_is_complete() -> None:
    async with running() as router, client_of(router) as client:
        chat_text = await as_chat(router)
        async with client.messages.stream(**ASKED, extra_body=ENDLESS) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert message.content[0].text == chat_text and message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 12 and message.usage.input_tokens > 0
        own = [kind for kind in kinds if kind != "text"]
        assert own[:2] == ["message_start", "content_block_start"]
        assert own[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(own[2:-3]) == {"content_block_delta"}
        await router.settled()


async def test_a_raw_stream_starts_with_the_prompts_tokens_and_contains_pings() -> None:
    async with running() as router:
        reply = await router.client.post("/v1/messages", json={**ASKED, "stream": True})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        blocks = [block.split("\n") for block in reply.text.split("\n\n") if block]
        assert [name for name, _ in blocks[:2]] == ["event: message_start", "event: ping"]
        start = json.loads(blocks[0][1][6:])["message"]
        assert start["usage"]["input_tokens"] > 0 and start["id"].startswith("msg_")
        assert "[DONE]" not in reply.text and "token_ids" not in reply.text


async def test_a_tool_loop_completes() -> None:
    async with running() as router, client_of(router) as client:
        messages: list[Any] = [{"role": "user", "content": "look it up"}]
        asked = {"model": "emulated", "max_tokens": 200, "tools": [TOOL]}
        async with client.messages.stream(**asked, messages=messages) as stream:
            turn = await stream.get_final_message()
        once = await client.messages.create(**asked, messages=messages)
        assert turn.stop_reason == once.stop_reason == "tool_use"
        assert [block.type for block in turn.content] == [block.type for block in once.content] == ["text", "tool_use"]
        call = turn.content[1]
        assert call.name == "look_up" and call.input == once.content[1].input and call.input["words"]
        answers = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "found"}]}
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": [answers]}]
        after = await client.messages.create(**{**asked, "tool_choice": {"type": "none"}}, messages=messages)
        assert after.stop_reason in ("end_turn", "max_tokens") and after.content[0].type == "text"
        await router.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_tool_runner_goes_on_without_a_thread(stream: bool) -> None:
    looked_up: list[Any] = []

    async def look_up(words: list[str]) -> str:
        looked_up.append(words)
        return "found"

    tool = anthropic.beta_async_tool(look_up, description="Looks up.")
    async with running() as router, client_of(router) as client:
        runner = client.beta.messages.tool_runner(
            model="emulated",
            max_tokens=200,
            tools=[tool],
            messages=[{"role": "user", "content": "look it up"}],
            max_iterations=2,
            stream=stream,
        )
        reasons = [(await turn.get_final_message() if stream else turn).stop_reason async for turn in runner]
        assert reasons[0] == "tool_use" and len(reasons) == 2 and looked_up
        await router.settled()


async def test_a_beta_thread_is_refused_as_unsupported() -> None:
    async with running() as router, client_of(router) as client:
        thread = client.beta.messages.thread(model="emulated", max_tokens=12)
        with pytest.raises(anthropic.BadRequestError, match="thread: ") as refused:
            await thread.send(ASKED["messages"][0])
        body: Any = refused.value.body
        assert body["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_thinking_is_a_block_before_the_answer_and_may_be_sent_back() -> None:
    async with running() as router, client_of(router) as client:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        asked = {**ASKED, "max_tokens": 1100, "thinking": thinking}
        async with client.messages.stream(**asked) as stream:
            turn = await stream.get_final_message()
        assert turn.content[0].type == "thinking" and turn.content[0].thinking and turn.content[0].signature
        more = [
            *ASKED["messages"],
            {"role": "assistant", "content": turn.content},
            {"role": "user", "content": "go on"},
        ]
        assert (await client.messages.create(**{**ASKED, "messages": more})).content
        off = await client.messages.create(**{**ASKED, "thinking": {"type": "disabled"}})
        assert [block.type for block in off.content] == ["text"]
        await router.settled()


async def test_a_stop_sequence_is_reported_in_the_message() -> None:
    async with running() as router, client_of(router) as client:
        chat_text = await as_chat(router)
        stop = next(
            chat_text[at : at + 3] for at in range(6, len(chat_text)) if chat_text.index(chat_text[at : at + 3]) == at
        )
        message = await client.messages.create(**ASKED, stop_sequences=[stop], extra_body=ENDLESS)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        async with client.messages.stream(**ASKED, stop_sequences=[stop], extra_body=ENDLESS) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)
        assert streamed.content[0].text == message.content[0].text == chat_text[: chat_text.index(stop)]


# ------------------------------------------------------------------------------------------------------- errors


async def test_what_cannot_be_translated_is_a_400_that_names_the_field() -> None:
    async with running() as router, client_of(router) as client:
        tools = [{"type": "web_search_20250305", "name": "web_search"}]
        count = {"model": "emulated", "messages": ASKED["messages"]}
        for ask in (
            lambda: client.messages.create(**ASKED, tools=tools),
            lambda: client.messages.count_tokens(**count, tools=tools),
        ):
            with pytest.raises(anthropic.BadRequestError) as raised:
                await ask()
            body = raised.value.body
            assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
            assert body["error"]["message"].startswith("tools.0.type: ")
            assert raised.value.request_id == body["request_id"]
        await router.settled()


async def test_an_engines_refusal_becomes_an_anthropic_error() -> None:
    async with running() as router, client_of(router) as client:
        for asked in (ASKED, {**ASKED, "stream": True}):
            with pytest.raises(anthropic.NotFoundError) as raised:
                await client.messages.create(**{**asked, "model": "other"})
            assert raised.value.body["error"]["type"] == "not_found_error"
            assert "does not exist" in raised.value.body["error"]["message"]


async def test_an_over_long_prompt_gets_the_error_text_that_makes_agents_compact() -> None:
    async with running() as router, client_of(router) as client:
        long: list[Any] = [{"role": "user", "content": "hello " * 20_000}]
        counted = await client.messages.count_tokens(model="emulated", messages=long)
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as raised:
                await client.messages.create(**{**ASKED, "messages": long, "system": ""}, stream=stream)
            message = f"prompt is too long: {counted.input_tokens} tokens > 32768 maximum"
            assert raised.value.body["error"] == {"type": "invalid_request_error", "message": message}
        await router.settled()


async def test_a_key_comes_as_x_api_key_and_a_wrong_one_is_an_authentication_error(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys:\n  - name: one\n    sha256: {digest_of(b'right').hex()}\n")
    async with running(auth={"client_keys": str(keys)}) as router:
        async with client_of(router, api_key="right") as client:
            assert (await client.messages.create(**ASKED)).content
            assert (await client.messages.count_tokens(model="emulated", messages=ASKED["messages"])).input_tokens
        async with client_of(router, api_key="wrong") as client:
            for ask in (
                lambda: client.messages.create(**ASKED),
                lambda: client.messages.count_tokens(model="emulated", messages=ASKED["messages"]),
            ):
                with pytest.raises(anthropic.AuthenticationError) as raised:
                    await ask()
                assert raised.value.body["error"]["type"] == "authentication_error" and raised.value.request_id


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_refusals_of_the_http_layer_are_anthropics_too(path: str) -> None:
    async with running(limits={"max_body_bytes": 2048}) as router:
        large = await router.client.post(path, json={**ASKED, "system": "a" * 4000})
        assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
        broken = await router.client.post(path, content=b"{")
        assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
        gotten = await router.client.get(path)
        assert gotten.status_code == 405 and gotten.json()["type"] == "error" and gotten.headers["allow"] == "POST"
        for reply in (large, broken, gotten):
            assert reply.headers["request-id"] == reply.json()["request_id"] == reply.headers["x-request-id"]
            assert int(reply.headers["content-length"]) == len(reply.content)
        missing = await router.client.post("/v1/messages/batches", json={})
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


async def test_no_healthy_worker_is_a_retryable_overload_error() -> None:
    async with running(queue={"no_worker_grace_s": 0.1}) as router, client_of(router) as client:
        for name in router.cluster.workers:
            await router.cluster.inject(name, "stop")
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.create(**ASKED)
        assert raised.value.status_code >= 500 and raised.value.body["error"]["type"] in (
            "overloaded_error",
            "api_error",
        )
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.count_tokens(model="emulated", messages=ASKED["messages"])
        assert raised.value.status_code == 503 and raised.value.body["error"]["type"] == "overloaded_error"


# ------------------------------------------------------------------------------------- what happens on the way


@pytest.mark.parametrize("fault", ["recompute", "reset", "close", "no_finish"])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_worker_loss_is_invisible_to_the_client(fault: str, streamed: bool) -> None:
    async with running() as router, client_of(router) as client:
        asked = {**ASKED, "max_tokens": 80}
        chat_text = await as_chat(router, max_tokens=80)
        for decoder in ("d0", "d1", "d2", "d3"):
            await router.cluster.inject(decoder, fault, after_events=6, count=1)
        if streamed:
            async with client.messages.stream(**asked, extra_body=ENDLESS) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked, extra_body=ENDLESS)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == chat_text and message.usage.output_tokens == 80
        await router.settled()


async def test_a_decoder_that_dies_loses_nothing_of_a_stream() -> None:
    async with running() as router, client_of(router) as client:
        chat_text = await as_chat(router, max_tokens=60)
        text, stopped = "", False
        async with client.messages.stream(**{**ASKED, "max_tokens": 60}, extra_body=ENDLESS) as stream:
            async for part in stream.text_stream:
                text += part
                if not stopped and len(text) > 10:
                    stopped = True
                    (leg,) = router.app.services.legs
                    urls = [url.removeprefix("http://") for url in router.cluster.decode_urls]
                    await router.cluster.inject(f"d{urls.index(leg.decoder_id)}", "stop")
        assert stopped and text == chat_text


async def test_an_error_in_mid_stream_is_raised_by_the_official_client() -> None:
    async with running(retry={"resume_on_worker_loss": False}) as router, client_of(router) as client:
        for decoder in ("d0", "d1", "d2", "d3"):
            await router.cluster.inject(decoder, "error_event", after_events=5)
        with pytest.raises(anthropic.APIStatusError) as raised:
            async with client.messages.stream(**ASKED, extra_body=ENDLESS) as stream:
                async for _ in stream:
                    pass
        assert raised.value.body["type"] == "error" and raised.value.body["error"]["message"]
        assert raised.value.request_id == raised.value.body["request_id"]
        await router.settled()


async def test_a_client_that_disconnects_leaks_nothing() -> None:
    async with running() as router, client_of(router) as client:
        async with client.messages.stream(**{**ASKED, "max_tokens": 2000}, extra_body=ENDLESS) as stream:
            async for _ in stream.text_stream:
                break
        await router.settled()


async def test_a_stream_that_is_silent_for_long_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_exchange, "PING_S", 0.05)
    async with running() as router:
        for decoder in ("d0", "d1", "d2", "d3"):
            await router.cluster.inject(decoder, "stall", after_events=4)
        pings = 0
        async with router.client.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                pings += line == "event: ping"
                if pings == 4:
                    break
        assert pings == 4


async def test_a_finished_answer_has_its_last_event_though_the_worker_sends_no_done() -> None:
    async with running() as router, client_of(router) as client:
        for decoder in ("d0", "d1", "d2", "d3"):
            await router.cluster.inject(decoder, "no_done")
        kinds = [e.type async for e in await client.messages.create(**ASKED, stream=True, extra_body=ENDLESS)]
        assert kinds[-2:] == ["message_delta", "message_stop"] and kinds.count("message_stop") == 1
        await router.settled()


async def test_a_trailing_slash_redirects_to_the_route_and_an_unknown_path_names_it() -> None:
    async with running() as router:
        reply = await router.client.post("/v1/messages/?beta=true", json=ASKED)
        assert (reply.status_code, reply.headers["location"]) == (307, "/v1/messages?beta=true")
        for method, path in (("POST", "batches"), ("GET", "batches"), ("DELETE", "batches/b")):
            other = await router.client.request(method, f"/v1/messages/{path}")
            assert other.status_code == 404
            assert other.json()["error"]["message"].startswith(f"/v1/messages/{path} is not served")
            assert other.json()["error"]["message"].endswith("use /v1/messages.")


async def test_fifty_at_once_get_each_their_own_answer() -> None:
    async with running(FAST, decode={"max_num_seqs": 4}) as router, client_of(router) as client:

        async def one(n: int) -> None:
            chat_text = await as_chat(router, content=f"tell me {n}")
            asked = {**ASKED, "messages": [{"role": "user", "content": f"tell me {n}"}]}
            if n % 2:
                message = await client.messages.create(**asked, extra_body=ENDLESS)
            else:
                async with client.messages.stream(**asked, extra_body=ENDLESS) as stream:
                    message = await stream.get_final_message()
            assert message.content[0].text == chat_text and message.usage.output_tokens == 12

        await asyncio.gather(*map(one, range(50)))
        await router.settled()
