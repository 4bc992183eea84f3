"""Routes that any one worker answers, and what happens when some workers can't."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.integration.router import FAST, running, sent_to_workers
from tests.integration.test_proxy_answers import PROMPT, completion, events
from tests.security.evil_worker import attacked, reply

pytestmark = pytest.mark.anyio


async def test_models_are_described_by_a_worker_and_an_unknown_one_is_a_404() -> None:
    async with running() as router:
        assert (await router.client.get("/v1/models/emulated")).json()["id"] == "emulated"
        assert (await router.client.get("/v1/models/nope")).status_code == 404


async def test_a_call_skips_workers_that_are_down_or_failing() -> None:
    async with running() as router:
        await router.cluster.inject("p0", "stop")
        for _ in range(3):
            assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == "emulated"
        assert (await router.client.post("/tokenize", json={"model": "emulated", "prompt": "abc"})).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}], ids=["undeclared", "text"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", '{"prompt": "abc"}'),
        ("/v1/messages/count_tokens", '{"model": "emulated", "messages": [{"role": "user", "content": "a"}]}'),
    ],
    ids=["tokenize", "count tokens"],
)
async def test_a_body_is_json_for_workers_whatever_its_client_calls_it(
    path: str, body: str, headers: dict[str, str]
) -> None:
    """`curl -d` alone calls it a form; completions are read like this, too."""
    async with running() as router:
        assert (await router.client.post(path, content=body, headers=headers)).status_code == 200


async def test_when_no_worker_answers_the_client_gets_503_and_the_log_has_the_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client may be anybody: the answer names no worker."""
    async with running() as router:
        caplog.set_level("INFO", "balanceroute.proxy.ops.forwarding")
        for name in router.cluster.workers:
            await router.cluster.inject(name, "stop")
        reply = await router.client.get("/version")
        workers = [worker.id for worker in router.app.services.fleet]
        assert reply.status_code == 503 and reply.headers["retry-after"] == "5"
        assert not any(part in reply.text for worker in workers for part in worker.split(":"))
        (line,) = [vars(record) for record in caplog.records if record.message == "no worker answered"]
        assert line["path"] == "/version" and "cannot connect" in line["failed"][0]
        assert all(text.startswith(f"{worker}: ") for worker, text in zip(workers, line["failed"], strict=True))


async def test_a_forwarded_path_is_rebuilt_and_contains_at_most_a_models_name() -> None:
    async with running() as router:
        seen = sent_to_workers(router.app.services)
        for path in ("/v1/models/a%20HTTP%2F1.1", "/v1/models/org%2Fmodel?x=%20y", "/v1/models?x=1", "/version?x=1"):
            assert (await router.client.get(path)).status_code in (200, 404)
        rebuilt = ["/v1/models/a%20HTTP/1.1", "/v1/models/org/model", "/v1/models", "/version"]
        assert list(dict.fromkeys(path for _, path, _ in seen)) == rebuilt


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2freset_prefix_cache",
        "a/%2e%2e/b",
        "a%2f%2fb",
        "a%0d%0aHost:%20evil",
        "a%5c..%5cb",
        "a%00",
        "a" * 600,
    ],
)
async def test_a_name_that_could_be_another_path_reaches_no_worker(name: str) -> None:
    async with running() as router:
        seen = sent_to_workers(router.app.services)
        reply = await router.client.get(httpx.URL(router.url).copy_with(raw_path=b"/v1/models/" + name.encode()))
        assert reply.status_code in (400, 404)
        assert [path for _, path, _ in seen if path != "/v1/models"] == []


async def test_a_call_to_all_workers_keeps_plain_flags_only() -> None:
    async with running() as router:
        seen = sent_to_workers(router.app.services)
        post = router.client.post
        assert (await post("/reset_prefix_cache?reset_running_requests=true", json={})).status_code == 200
        paths = {path for _, path, _ in seen}
        assert paths == {"/reset_prefix_cache?reset_running_requests=true"}
        for query in ("a=%0d%0a", "a=b%26c", "a", "&".join(f"a{n}=1" for n in range(20)), "a=../x"):
            assert (await post(f"/reset_prefix_cache?{query}", json={})).status_code == 400
        assert {path for _, path, _ in seen} == paths


PAGES = {
    "a web page": reply(b"<script>alert(1)</script>", kind="text/html"),
    "a web page that says it is JSON": reply(b"<script>alert(1)</script>"),
    "a redirect": reply(b"{}", status="302 Found", headers=("location: http://evil/",)),
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
async def test_a_workers_web_page_is_not_served_under_the_routers_origin(page: bytes) -> None:
    async with attacked() as router:
        router.prefiller.others = router.decoder.others = lambda asked: (
            page if asked.target == "/version" else reply({})
        )
        answer = await router.client.get("/version")
        assert answer.status_code == 503 and "script>" not in answer.text and "location" not in answer.headers
        assert answer.headers["content-type"] == "application/json"


async def test_bytes_that_would_end_the_request_line_are_refused() -> None:
    async with running() as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models/\xc3\xa9 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
        writer.close()
        await writer.wait_closed()


async def test_the_configured_worker_key_replaces_the_clients_key() -> None:
    async with running(auth={"worker_api_key": "k"}) as router:
        seen = sent_to_workers(router.app.services)
        await router.client.get("/v1/models")
        await router.client.get("/v1/models", headers={"Authorization": "Bearer mine", "X-data-parallel-rank": "3"})
        assert [headers["authorization"] for _, _, headers in seen] == ["Bearer k", "Bearer k"]
        assert all("x-data-parallel-rank" not in headers for _, _, headers in seen)


async def test_a_body_above_the_limit_is_refused_before_any_worker_is_asked() -> None:
    async with running(limits={"max_body_bytes": 2048}) as router:
        seen = sent_to_workers(router.app.services)
        reply = await router.client.post("/tokenize", json={"prompt": "a" * 4000})
        assert reply.status_code == 413 and seen == []


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_a_profiling_call_reaches_every_server_once(path: str) -> None:
    async with running(FAST) as router:
        seen = sent_to_workers(router.app.services)
        reply = await router.client.post(path)
        assert [(method, there) for method, there, _ in seen] == [("POST", path)] * 6
        assert reply.status_code == 500 and len(reply.json()["failed"]) == 6  # emulated engines have no profiler


async def test_resetting_the_prefix_cache_asks_every_worker_and_names_those_that_failed() -> None:
    async with running(FAST) as router:
        seen = sent_to_workers(router.app.services)
        await router.cluster.inject("d1", "stop")
        reply = await router.client.post("/reset_prefix_cache?reset_running_requests=true")
        assert reply.status_code == 500
        assert len(seen) == 6 and {path for _, path, _ in seen} == {"/reset_prefix_cache?reset_running_requests=true"}
        assert any(
            entry.startswith(router.cluster.decode_urls[1].removeprefix("http://")) for entry in reply.json()["failed"]
        )


async def test_a_slash_behind_models_leads_to_the_list_of_models() -> None:
    async with running() as router:
        reply = await router.client.get("/v1/models/")
        assert (reply.status_code, reply.headers["location"]) == (307, "/v1/models")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/resp_1/cancel"])
async def test_a_route_that_cannot_be_served_correctly_is_refused_with_the_reason(path: str) -> None:
    async with running() as router:
        reply = await router.client.post(path, json={"input": "a"})
        error = reply.json()["error"]
        assert reply.status_code == 404 and error["code"] == 404 and "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize("max_tokens", [8, 80])
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_of_the_prefiller_not_of_the_decode_worker(stream: bool, max_tokens: int) -> None:
    """A decode worker counts what it pulls as cached; an answer of up to 64 tokens comes from it in one piece."""
    shape = replace(FAST, prefillers=1, prefix_caching=True, prompt_tokens_details=True, block_size=4)
    async with running(shape) as router:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        seen = []
        for _ in range(2):
            body = completion(PROMPT, max_tokens=max_tokens, **options)
            reply = await router.client.post("/v1/completions", json=body)
            usage = events(reply.text)[-2]["usage"] if stream else reply.json()["usage"]
            seen.append(usage["prompt_tokens_details"]["cached_tokens"])
        cached = (len(PROMPT) - 1) // 4 * 4
        assert seen == [0, cached] and cached < len(PROMPT) - 1
