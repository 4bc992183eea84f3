"""What depends on when a worker's bytes come and when a client takes them: workers by script, not emulated."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.proxy.app import RouterApp, create_app
from tests.integration.router import served
from tests.unit.proxy.servers import CHUNKED_HEAD, Script, chunked, plain, read_request, worker

pytestmark = pytest.mark.anyio
PROBED = {
    "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3},
    "kv_transfer_params": {"remote_block_ids": [1]},
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'


def event(ids: list[int], finish: str | None = None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return b"data: %s\n\n" % json.dumps({"id": "a", "created": 1, "choices": [choice]}).encode()


def streaming(tokens: int, interval_s: float) -> Script:
    """A worker that tells the role at once and then a token per interval; as a prefiller it pins."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            if not head.startswith(b"POST /v1/"):
                writer.write(plain(METRICS))
            elif not json.loads(body).get("stream"):
                writer.write(plain(json.dumps(PROBED).encode()))
            else:
                writer.write(CHUNKED_HEAD + chunked(event([], role="assistant", content=""), last=False))
                for token in range(tokens):
                    await asyncio.sleep(interval_s)
                    writer.write(chunked(event([token], content="x"), last=False))
                writer.write(chunked(event([], "length", content=""), b"data: [DONE]\n\n"))

    return script


@asynccontextmanager
async def routing(script: Script, **limits: Any) -> AsyncIterator[tuple[RouterApp, httpx.AsyncClient]]:
    """A router in front of one prefiller and one decoder that both run the script."""
    async with worker(script) as prefiller, worker(script) as decoder:
        tree = {
            "prefill": {"workers": [{"url": prefiller.url}]},
            "decode": {"workers": [{"url": decoder.url}], "max_num_seqs": 8},
            "predictor": {"kind": "none"},
            "limits": limits,
        }
        app = create_app(validate(tree), strict=True)
        async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            yield app, client


async def test_a_chat_may_run_longer_than_its_first_event_may_take_and_is_measured_from_its_first_token() -> None:
    limits = {"first_byte_timeout_s": {"decode": 0.3}, "idle_timeout_s": 5.0}
    async with routing(streaming(20, 0.05), **limits) as (_, client):
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert reply.text.endswith("data: [DONE]\n\n") and reply.text.count('"x"') == 20
        metrics = (await client.get("/metrics")).text
        assert "balanceroute_request_ttft_seconds_count 1.0" in metrics
        assert "balanceroute_request_tpot_seconds_count 1.0" in metrics
        assert "balanceroute_generated_tokens_total 20.0" in metrics


async def test_a_client_that_is_slow_to_take_the_end_of_an_answer_has_the_time_of_clients_not_of_workers() -> None:
    async with routing(streaming(5, 0.01), idle_timeout_s=0.3, client_stall_timeout_s=30.0) as (app, client):
        await client.get("/ready")
        messages: list[MutableMapping[str, Any]] = []
        body = json.dumps(CHAT).encode()

        async def receive() -> MutableMapping[str, Any]:
            if body_taken.is_set():
                await asyncio.Event().wait()
            body_taken.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            if not message.get("more_body", True):
                await asyncio.sleep(1.2)
            messages.append(message)

        body_taken = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        assert messages[-1]["body"].endswith(b"data: [DONE]\n\n") and not messages[-1]["more_body"]
