"""Who may ask for a prefill, at which URL, and how often."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest

from balanceroute.config import Config
from balanceroute.engine.tokens import continuation, decode
from tests.integration.router import Router, running
from tests.integration.test_layerwise import ONE, ask, callbacks, probes
from tests.integration.test_proxy_answers import PROMPT, completion
from tests.plain_http import PLAIN
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"request_id": "cmpl-nobody-0"}', 404),
        (b"{}", 400),
        (b"[1]", 400),
        (b'{"request_id": 7}', 400),
        (b"{", 400),
    ],
)
async def test_invalid_callbacks_change_nothing(body: bytes, status: int) -> None:
    async with running(ONE) as router, intercepted(router) as (client, callback):
        work = asyncio.ensure_future(ask(router))
        asked = await callback
        reply = await client.post(str(asked.url), content=body)
        assert reply.status_code == status and reply.json()["error"]["code"] == status
        assert (await client.post(str(asked.url), content=asked.content)).status_code == 200
        assert (await work).json()["choices"][0]["text"] == decode(continuation(PROMPT, 12))
        await router.settled()


async def test_another_user_s_kv_cannot_be_redirected() -> None:
    async with running(ONE) as router, intercepted(router) as (client, callback):
        work = asyncio.ensure_future(ask(router))
        asked = await callback
        token = asked.url.path.rsplit("/", 1)[1]
        assert len(token) >= 32
        stolen = orjson.dumps(orjson.loads(asked.content) | {"remote_host": "203.0.113.9", "remote_port": 1})
        for path in ("", "/", f"/{token[:-1]}", f"/{token}x", f"/{orjson.loads(asked.content)['request_id']}"):
            for headers in ({}, {"Authorization": f"Bearer {token}"}):
                reply = await router.client.post(f"/v1/metaserver{path}", content=stolen, headers=headers)
                assert reply.status_code in (307, 403), path
        assert probes(router) == 0
        assert (await client.post(str(asked.url), content=asked.content)).status_code == 200
        assert (await work).status_code == 200
        assert (await client.post(str(asked.url), content=stolen)).status_code == 403  # the token was for this request
        assert (probes(router), callbacks(router, "accepted")) == (1, 1)
        await router.settled()


async def test_a_refused_callback_is_logged_with_peer_and_request_id_but_no_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "balanceroute.proxy.ops.metaserver")
    async with running(ONE) as router:
        headers = {"X-Request-Id": "mine"}
        assert (await router.client.post("/v1/metaserver/a-token", content=b"{}", headers=headers)).status_code == 403
    (line,) = [vars(record) for record in caplog.records if record.message == "callback refused"]
    assert (line["peer"], line["request"], line["path"], line["status"]) == ("127.0.0.1", "mine", "/v1/metaserver", 403)
    assert "a-token" not in str(line)


@pytest.mark.parametrize(
    ("method", "ending", "body", "status"),
    [("GET", "", b"", 405), ("POST", "/", b"", 404), ("POST", "/x", b"", 404), ("POST", "", bytes(20_000), 413)],
)
async def test_a_token_is_in_no_line_of_the_log_however_the_route_is_called(
    caplog: pytest.LogCaptureFixture, method: str, ending: str, body: bytes, status: int
) -> None:
    caplog.set_level(logging.INFO, "balanceroute")
    async with running(ONE, limits={"max_body_bytes": 10_000}) as router, intercepted(router) as (client, callback):
        work = asyncio.ensure_future(ask(router))
        asked = await callback
        token = asked.url.path.rsplit("/", 1)[1]
        caplog.clear()
        reply = await router.client.request(method, f"/v1/metaserver/{token}{ending}", content=body)
        assert reply.status_code == status
        lines = [vars(record) for record in caplog.records if record.name.startswith("balanceroute")]
        assert [line["path"] for line in lines if "path" in line] == ["/v1/metaserver"]
        assert token not in str(lines)
        assert (await client.post(str(asked.url), content=asked.content)).status_code == 200
        assert (await work).status_code == 200
        await router.settled()


async def test_every_attempt_has_its_own_callback_token() -> None:
    async with running(ONE) as router:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(router.app), trust_env=False, timeout=None)
        paths = []

        async def passed_on(request: httpx.Request) -> httpx.Response:
            paths.append(request.url.path)
            return await client.post(str(request.url), content=request.content)

        router.cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(passed_on)))
        await router.cluster.inject("d0", "recompute", after_events=1, count=1)
        assert (await ask(router, stream=True)).status_code == 200
        await router.settled()
        assert len(set(paths)) == len(paths) == 2
        await client.aclose()


@asynccontextmanager
async def intercepted(router: Router) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Future[httpx.Request]]]:
    """A client that reaches the router as decode workers do, and the first callback, which is kept from it."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(router.app), trust_env=False, timeout=None)
    first: asyncio.Future[httpx.Request] = asyncio.get_running_loop().create_future()

    async def keep(request: httpx.Request) -> httpx.Response:
        first.set_result(request)
        return httpx.Response(200)

    router.cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(keep)))
    async with client:
        yield client, first


async def test_a_repeated_callback_starts_no_second_prefill() -> None:
    async with running(ONE) as router:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(router.app), trust_env=False, timeout=None)

        async def twice(request: httpx.Request) -> httpx.Response:
            replies = [await client.post(str(request.url), content=request.content) for _ in range(2)]
            assert [reply.status_code for reply in replies] == [200, 200]
            return httpx.Response(200)

        router.cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(twice)))
        assert (await ask(router)).json()["choices"][0]["text"] == decode(continuation(PROMPT, 12))
        await router.settled()
        assert probes(router) == 1 and callbacks(router, "repeated") == 1
        await client.aclose()


BODY_BYTES = 600
FULL = {"connections": {"max_connections": 2}, "memory": {"max_held_bytes": 2 * BODY_BYTES + 100}}


@pytest.mark.parametrize("full", FULL)
async def test_a_callback_is_taken_while_clients_use_all_connections_or_all_memory(full: str) -> None:
    """A decode worker does not look at the status, so each of these clients would wait for its timeout."""

    def narrow(config: Config) -> Config:
        return config.model_copy(update={"limits": config.limits.model_copy(update=FULL[full])})

    async with (
        running(ONE, adjust=narrow) as router,
        httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, **PLAIN) as worker,
    ):
        both = asyncio.Barrier(2)  # to look for both would miss them where one has ended

        async def called_back(request: httpx.Request) -> httpx.Response:
            await both.wait()
            reply = await worker.post(request.url.path, content=request.content.ljust(BODY_BYTES))
            assert reply.status_code == 200, reply.text
            return reply

        router.cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(called_back)))
        body = orjson.dumps(completion()).ljust(BODY_BYTES)
        headers = {"Content-Type": "application/json"}
        asked = [router.client.post("/v1/completions", content=body, headers=headers) for _ in range(2)]
        texts = [reply.json()["choices"][0]["text"] for reply in await asyncio.gather(*asked)]
        assert texts == [decode(continuation(PROMPT, 12))] * 2
        await router.settled()


async def test_without_the_layerwise_connector_there_is_no_metaserver() -> None:
    async with running() as router:
        assert (await router.client.post("/v1/metaserver", json={"request_id": "a"})).status_code == 404


async def test_a_decode_worker_that_waits_for_kv_is_not_expected_to_send_tokens() -> None:
    """Else a prompt that takes longer than the window of silence would have its worker judged down."""
    async with running(ONE) as router, intercepted(router) as (client, callback):
        services = router.app.services
        work = asyncio.ensure_future(ask(router, max_tokens=400, stream=True))
        asked = await callback
        (leg,) = services.legs
        await until(lambda: leg.reply is not None)  # the head comes before the KV
        assert leg.kv_due and not leg.expects_tokens
        assert (await client.post(str(asked.url), content=asked.content)).status_code == 200
        # the prefiller's answer and the first token come over two connections
        await until(lambda: leg.streaming_from is not None and not leg.kv_due)
        assert leg.expects_tokens
        assert (await work).status_code == 200
        await router.settled()
