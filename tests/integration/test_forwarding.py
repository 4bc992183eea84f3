"""Routes that any one worker answers, and what happens when some workers can't."""

import asyncio
from typing import Any

import pytest

from tests.integration.router import FAST, Router, running
from tests.integration.test_proxy_answers import PROMPT, completion, events

pytestmark = pytest.mark.anyio


def watched(router: Router) -> list[tuple[str, str, dict[str, str]]]:
    """Method, path and headers of what goes to the workers from here on."""
    seen: list[tuple[str, str, dict[str, str]]] = []
    for worker in router.app.services.fleet:
        send = worker.upstream.request

        async def noted(
            method: str, path: str, body: bytes = b"", headers: Any = (), *, send: Any = send, **rest: Any
        ) -> Any:
            if path not in ("/health", "/metrics"):
                seen.append((method, path, {name.decode(): value.decode() for name, value in headers}))
            return await send(method, path, body, headers, **rest)

        worker.upstream.request = noted  # type: ignore[method-assign]
    return seen


async def test_one_model_is_described_by_a_worker_and_an_unknown_one_is_its_404() -> None:
    async with running() as router:
        known = await router.client.get("/v1/models/emulated")
        unknown = await router.client.get("/v1/models/nope")
        assert unknown.status_code == 404
        assert known.status_code in (200, 404)  # newer vLLM only


async def test_a_worker_that_is_down_or_failing_is_passed_over() -> None:
    async with running() as router:
        await router.cluster.inject("p0", "stop")
        for _ in range(3):
            assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == "emulated"
        assert (await router.client.post("/tokenize", json={"model": "emulated", "prompt": "abc"})).status_code == 200


async def test_when_nobody_answers_the_client_gets_503_with_the_reasons() -> None:
    async with running() as router:
        for name in router.cluster.workers:
            await router.cluster.inject(name, "stop")
        reply = await router.client.get("/version")
        assert reply.status_code == 503 and "cannot connect" in reply.json()["error"]["message"]


async def test_the_path_goes_on_as_the_client_wrote_it() -> None:
    async with running() as router:
        seen = watched(router)
        for path in ("/v1/models/a%20HTTP%2F1.1", "/v1/models/org%2Fmodel?x=%20y", "/v1/models/a%0d%0aHost:%20evil"):
            assert (await router.client.get(path)).status_code in (200, 404)
        assert [path for _, path, _ in seen] == ["/v1/models/a%20HTTP%2F1.1", "/v1/models/org%2Fmodel?x=%20y"]


async def test_bytes_that_would_end_the_request_line_are_refused() -> None:
    async with running() as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models/\xc3\xa9 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
        writer.close()
        await writer.wait_closed()


async def test_the_router_s_key_is_sent_for_clients_without_one() -> None:
    async with running(auth={"worker_api_key": "k"}) as router:
        seen = watched(router)
        await router.client.get("/v1/models")
        await router.client.get("/v1/models", headers={"Authorization": "Bearer mine", "X-data-parallel-rank": "3"})
        assert [headers["authorization"] for _, _, headers in seen] == ["Bearer k", "Bearer mine"]
        assert all("x-data-parallel-rank" not in headers for _, _, headers in seen)


async def test_a_body_above_the_limit_is_refused_before_any_worker_is_asked() -> None:
    async with running(limits={"max_body_bytes": 2048}) as router:
        seen = watched(router)
        reply = await router.client.post("/tokenize", json={"prompt": "a" * 4000})
        assert reply.status_code == 413 and seen == []


async def test_resetting_the_prefix_cache_asks_every_worker_and_names_those_that_failed() -> None:
    async with running(FAST) as router:
        seen = watched(router)
        await router.cluster.inject("d1", "stop")
        reply = await router.client.post("/reset_prefix_cache?reset_running_requests=true")
        assert reply.status_code == 500
        assert len(seen) == 6 and {path for _, path, _ in seen} == {"/reset_prefix_cache?reset_running_requests=true"}
        assert any(
            entry.startswith(router.cluster.decode_urls[1].removeprefix("http://")) for entry in reply.json()["failed"]
        )


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/responses/resp_1/cancel", "/v1/messages", "/v1/messages/count_tokens"]
)
async def test_what_cannot_be_served_right_says_so(path: str) -> None:
    async with running() as router:
        reply = await router.client.post(path, json={"input": "a"})
        error = reply.json()["error"]
        assert reply.status_code == 501 and error["code"] == 501 and "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_what_the_prefiller_says_not_what_the_decoder_pulled(stream: bool) -> None:
    async with running() as router:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        seen = []
        for _ in range(2):
            reply = await router.client.post("/v1/completions", json=completion(PROMPT, max_tokens=80, **options))
            usage = events(reply.text)[-2]["usage"] if stream else reply.json()["usage"]
            seen.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        assert all(count < len(PROMPT) for count in seen)
        assert seen[0] == 0
