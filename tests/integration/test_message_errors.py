"""Whatever refuses a message, its client reads the error as one of Anthropic's: type, status, request id."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from balanceroute.config import digest_of
from tests.at_first_use import AtFirstUse
from tests.integration.router import FAST, Router, running
from tests.integration.test_messages_exchange import ASKED, ENDLESS, client_of

anthropic = AtFirstUse("anthropic")
pytestmark = pytest.mark.anyio

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
COUNTED: dict[str, Any] = {"model": "emulated", "messages": ASKED["messages"]}
FIELDS = "".join(f"X-{number}: a\r\n" for number in range(200))
# (what comes after "POST PATH", the status, the type of the error)
NO_REQUESTS = {
    "length": (" HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400, "invalid_request_error"),
    "coding": (" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "invalid_request_error"),
    "host": ("?beta=true HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400, "invalid_request_error"),
    "chunk": (" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request_error"),
    "empty": (" HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n", 400, "invalid_request_error"),
    "line": ("?" + "a" * 9000 + " HTTP/1.1\r\nHost: h\r\n\r\n", 414, "invalid_request_error"),
    "fields": (f" HTTP/1.1\r\nHost: h\r\n{FIELDS}\r\n", 431, "invalid_request_error"),
    "version": (" HTTP/2.0\r\nHost: h\r\n\r\n", 505, "api_error"),
    "half a head": (" HTTP/1.1\r\nHost: h", 408, "invalid_request_error"),
    "half a body": (" HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{", 408, "invalid_request_error"),
}


async def answer_to(router: Router, sent: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and JSON of the one answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(head[0].split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize("case", NO_REQUESTS)
async def test_invalid_bytes_are_refused_in_anthropics_format(path: str, case: str) -> None:
    rest, status, kind = NO_REQUESTS[case]
    async with running(limits={"client_header_timeout_s": 0.3} if status == 408 else {}) as router:
        got_status, headers, body = await answer_to(router, f"POST {path}{rest}".encode())
        assert (got_status, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["error"]["message"]
        assert headers["request-id"] == headers["x-request-id"] == body["request_id"]


async def test_other_paths_keep_openais_error_format() -> None:
    async with running() as router:
        for path in ("/v1/chat/completions", "/v1/messagesx", "/"):
            _, headers, body = await answer_to(router, f"POST {path} HTTP/1.1\r\nContent-Length: x\r\n\r\n".encode())
            assert body["error"]["code"] == 400 and "request-id" not in headers


def asks(client: "anthropic.AsyncAnthropic") -> list[Callable[[], Awaitable[Any]]]:
    """Each way to ask, as something to be refused."""
    return [
        lambda: client.messages.create(**ASKED),
        lambda: client.messages.create(**ASKED, stream=True),
        lambda: client.messages.count_tokens(**COUNTED),
    ]


async def refusals(client: "anthropic.AsyncAnthropic") -> list[tuple[int, str, str | None]]:
    """Status, type and retry-after of the refusal of each; the official client names the request from the header."""
    found = []
    for ask in asks(client):
        with pytest.raises(anthropic.APIStatusError) as raised:
            await ask()
        error = raised.value
        body = error.body
        assert isinstance(body, dict) and body["type"] == "error" and body["error"]["message"]
        assert error.request_id and error.request_id == body["request_id"]
        found.append((error.status_code, str(body["error"]["type"]), error.response.headers.get("retry-after")))
    return found


async def test_a_key_over_its_limits_gets_a_rate_limit_error_with_retry_after(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- name: one\n  sha256: {digest_of(b'right').hex()}\n  requests_per_minute: 1\n")
    async with running(auth={"client_keys": str(keys)}) as router, client_of(router, api_key="right") as client:
        assert (await client.messages.create(**ASKED)).content
        for status, kind, retry_after in await refusals(client):
            assert (status, kind) == (429, "rate_limit_error") and int(retry_after or 0) > 0


async def test_a_key_is_needed_for_both_routes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- name: one\n  sha256: {digest_of(b'right').hex()}\n")
    async with running(auth={"client_keys": str(keys)}) as router:
        async with client_of(router, api_key="wrong") as client:
            assert {refusal[:2] for refusal in await refusals(client)} == {(401, "authentication_error")}
        async with client_of(router, api_key=None, auth_token="wrong") as client:
            assert {refusal[:2] for refusal in await refusals(client)} == {(401, "authentication_error")}
        async with client_of(router, api_key=None, auth_token="right") as client:
            assert (await client.messages.create(**ASKED)).content


async def test_a_draining_router_answers_with_an_overloaded_error() -> None:
    async with running() as router, client_of(router) as client:
        router.app.services.ledger.drain()
        for ask in asks(client)[:2]:
            with pytest.raises(anthropic.InternalServerError) as raised:
                await ask()
            assert raised.value.status_code == 503 and raised.value.body["error"]["type"] == "overloaded_error"


async def test_a_full_queue_answers_with_a_rate_limit_error() -> None:
    async with running(queue={"max_queued": 0}) as router, client_of(router) as client:
        for ask in asks(client)[:2]:
            with pytest.raises(anthropic.RateLimitError) as raised:
                await ask()
            assert (
                raised.value.body["error"]["type"] == "rate_limit_error"
                and raised.value.response.headers["retry-after"]
            )


@pytest.mark.parametrize("fault", [("status", {"status": 500}), ("null_params", {})], ids=["500", "params"])
async def test_failing_workers_are_an_api_error(fault: tuple[str, dict[str, Any]]) -> None:
    async with running(FAST) as router, client_of(router) as client:
        kind, options = fault
        for worker in router.cluster.prefill:
            await router.cluster.inject(worker.name, kind, count=None, **options)
        for ask in asks(client)[:2]:
            with pytest.raises(anthropic.APIStatusError) as raised:
                await ask()
            assert raised.value.status_code >= 500
            assert raised.value.body["error"]["type"] in ("api_error", "overloaded_error", "timeout_error")


@pytest.mark.parametrize("helper", ["stream", "raw"])
async def test_both_streaming_helpers_raise_the_error_that_ends_an_answer(helper: str) -> None:
    async with running(retry={"resume_on_worker_loss": False}) as router, client_of(router) as client:
        for decoder in ("d0", "d1", "d2", "d3"):
            await router.cluster.inject(decoder, "close", after_events=5)
        seen = 0
        with pytest.raises(anthropic.APIStatusError) as raised:
            if helper == "stream":
                async with client.messages.stream(**ASKED, extra_body=ENDLESS) as stream:
                    async for _ in stream.text_stream:
                        seen += 1
            else:
                async for event in await client.messages.create(**ASKED, stream=True, extra_body=ENDLESS):
                    seen += event.type == "content_block_delta"
        assert seen and raised.value.body["error"]["type"] == "api_error"
        await router.settled()
