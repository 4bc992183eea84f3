"""When an answer begins with something other than a token, as every chat does with its role."""

import asyncio
import json

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.proxy.app import create_app
from tests.integration.router import served
from tests.unit.proxy.servers import CHUNKED_HEAD, Script, chunked, plain, read_request, worker

pytestmark = pytest.mark.anyio
PROBED = {
    "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3},
    "kv_transfer_params": {"remote_block_ids": [1]},
}
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


async def test_a_chat_may_run_longer_than_its_first_event_may_take_and_is_measured_from_its_first_token() -> None:
    script = streaming(20, 0.05)
    async with worker(script) as prefiller, worker(script) as decoder:
        app = create_app(
            validate(
                {
                    "prefill": {"workers": [{"url": prefiller.url}]},
                    "decode": {"workers": [{"url": decoder.url}], "max_num_seqs": 8},
                    "predictor": {"kind": "none"},
                    "limits": {"first_byte_timeout_s": {"decode": 0.3}, "idle_timeout_s": 5.0},
                }
            ),
            strict=True,
        )
        async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.text.endswith("data: [DONE]\n\n") and reply.text.count('"x"') == 20
            metrics = (await client.get("/metrics")).text
            assert "balanceroute_request_ttft_seconds_count 1.0" in metrics
            assert "balanceroute_request_tpot_seconds_count 1.0" in metrics
            assert "balanceroute_generated_tokens_total 20.0" in metrics
