"""Decode workers that call back a router of several relays: whichever accepts, the one that has the request is told."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from balanceroute.config import validate
from balanceroute.engine.tokens import continuation, decode
from balanceroute.errors import ConfigError
from balanceroute.proxy.link import callbacks as callbacks_module
from balanceroute.proxy.parent.configured import Configured
from balanceroute.proxy.relay import create_relay_app
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import KeptCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.wire.connectors import owner_of
from tests.integration.relayed import Relay, Relayed, relayed
from tests.integration.test_layerwise import ONE, SHAPE, ids_of
from tests.integration.test_proxy_answers import PROMPT, completion, events
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


async def test_a_relay_that_cannot_listen_for_callbacks_closes_what_it_opened(tmp_path: Path) -> None:
    urls = [{"url": f"http://127.0.0.1:{port}"} for port in (1, 2)]
    sections = {"prefill": {"workers": urls[:1]}, "decode": {"workers": urls[1:], "max_num_seqs": 2}}
    layerwise = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://127.0.0.1:3"}}
    folder = RunFolder(tmp_path)
    folder.callbacks("relay-0").mkdir()
    with os.fdopen(lock := RelayLocks(folder).lock("relay-0")):
        app = create_relay_app(Configured.read(validate(sections | layerwise)), folder, "relay-0", lock)
        with pytest.raises(ConfigError, match="cannot listen there"):
            async with app.router.lifespan_context(app):
                pass
    assert KeptCounts(folder).of("relay-0")  # what it has counted is kept


def to_the_other(router: Relayed, token: str) -> Relay:
    """The relay that has not made this token."""
    owner = int(owner_of(token).removeprefix("relay-"))
    return router.relays[1 - owner]


def token_of(request: httpx.Request) -> str:
    return request.url.path.rsplit("/", 1)[1]


def called_back(router: Relayed, answer: Callable[[httpx.Request], Any]) -> None:
    """Have decode workers' callbacks answered so."""
    router.cluster.route_metaserver(httpx.AsyncClient(transport=httpx.MockTransport(answer)))


def cross(router: Relayed) -> None:
    """Have each callback reach the relay that has not made its token."""

    async def pass_on(request: httpx.Request) -> httpx.Response:
        return await to_the_other(router, token_of(request)).client.post(request.url.path, content=request.content)

    called_back(router, pass_on)


def callbacks(relay: Relay, outcome: str) -> float:
    return relay.app.services.metrics.callbacks.value(outcome)


async def test_a_callback_at_the_wrong_relay_is_forwarded() -> None:
    async with relayed(SHAPE) as router:
        cross(router)

        async def one(number: int) -> None:
            prompt = [token + number for token in PROMPT]
            ask = completion(prompt=prompt, max_tokens=20, stream=number % 4 < 2, return_token_ids=True)
            reply = await router.relays[number % 2].client.post("/v1/completions", json=ask)
            parts = events(reply.text) if ask["stream"] else [reply.json()]
            assert reply.status_code == 200 and ids_of(parts) == continuation(prompt, 20)

        await asyncio.gather(*map(one, range(24)))
        await router.settled()
        assert [callbacks(relay, "accepted") for relay in router.relays] == [12, 12]
        assert router.cluster.violations() == {}


@asynccontextmanager
async def intercepted(router: Relayed) -> AsyncIterator[tuple[asyncio.Task[httpx.Response], httpx.Request]]:
    """A request of the first relay, and the callback for it, which is kept from the router."""
    first: asyncio.Future[httpx.Request] = asyncio.get_running_loop().create_future()

    async def keep(request: httpx.Request) -> httpx.Response:
        first.set_result(request)
        return httpx.Response(200)

    called_back(router, keep)
    asking = router.relays[0].client.post("/v1/completions", json=completion(max_tokens=12))
    work = asyncio.get_running_loop().create_task(asking)
    yield work, await first
    assert (await work).json()["choices"][0]["text"] == decode(continuation(PROMPT, 12))
    await router.settled()


async def status_before_body(relay: Relay, path: str) -> int:
    """What is answered to a request whose body does not come."""
    url = relay.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 1000\r\n\r\n".encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


@pytest.mark.parametrize("full", [False, True], ids=["once", "and the disk is full"])
async def test_a_removed_callback_socket_of_a_relay_is_recreated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    monkeypatch.setattr(callbacks_module, "LOOK_S", 0.02)
    caplog.set_level(logging.INFO)
    async with relayed(SHAPE) as router:
        cross(router)
        await until(lambda: all(relay.app.services.movers == 2 for relay in router.relays))
        with monkeypatch.context() as disk:
            if full:
                disk.setattr(asyncio, "start_unix_server", no_room)
            for number in range(2):
                router.folder.callbacks(f"relay-{number}").unlink()
            if full:
                await until(
                    lambda: count_logged(caplog, "callbacks that other relays receive do not reach this one") == 2
                )
                assert await statuses(router) == [503, 503]
                assert router.cluster.idle()
        await until(lambda: all(router.folder.callbacks(f"relay-{number}").exists() for number in range(2)))
        back = "callbacks that other relays receive reach this one again"
        await until(lambda: count_logged(caplog, back) == (2 if full else 0))
        assert await statuses(router) == [200, 200]
        assert count_logged(caplog, back) == (2 if full else 0)
        await router.settled()


async def test_a_replaced_callback_socket_of_a_relay_is_recreated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks_module, "LOOK_S", 0.02)
    async with relayed(SHAPE) as router:
        cross(router)
        for number in range(2):
            path = router.folder.callbacks(f"relay-{number}")
            path.unlink()
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
                others = path.stat().st_ino
                await until(lambda: path.exists() and path.stat().st_ino != others)  # noqa: B023
        assert await statuses(router) == [200, 200]
        await router.settled()


async def test_requests_are_refused_while_callbacks_cannot_be_passed_on_as_the_run_folder_is_unusable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those whose callback came to another relay waited for the timeout of their decode worker."""
    monkeypatch.setattr(callbacks_module, "LOOK_S", 0.02)
    async with relayed(SHAPE) as router:
        cross(router)
        await until(lambda: all(relay.app.services.movers == 2 for relay in router.relays))
        usable = router.folder.folder.with_name(f"{router.folder.folder.name}-usable")
        router.folder.folder.rename(usable)
        router.folder.folder.touch()
        await until(lambda: count_logged(caplog, "callbacks that other relays receive do not reach this one") == 2)
        assert await statuses(router) == [503, 503]
        router.folder.folder.unlink()
        usable.rename(router.folder.folder)
        await until(lambda: all(relay.app.services.callbacks.arrive() for relay in router.relays))
        assert await statuses(router) == [200, 200]
        await router.settled()


async def statuses(router: Relayed) -> list[int]:
    """The statuses of one request at each relay."""
    asked = [relay.client.post("/v1/completions", json=completion(max_tokens=3)) for relay in router.relays]
    return [reply.status_code for reply in await asyncio.gather(*asked)]


async def test_a_relay_that_was_stopped_finds_the_callbacks_that_have_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relayed(ONE) as router, intercepted(router) as (_, asked):
        path = router.folder.callbacks("relay-0")
        aside = path.with_name("aside")
        path.rename(aside)
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.bind(str(path))
            stopped.listen()
            stopped.settimeout(PATIENCE_S)
            monkeypatch.setattr(callbacks_module, "is_still", lambda *_: True)
            with monkeypatch.context() as hurry:
                hurry.setattr(callbacks_module, "PATIENCE_S", 1.0)  # ample for a question to be sent
                late = await router.relays[1].client.post(asked.url.path, content=asked.content)
            assert late.status_code == 200
            for _ in range(2):  # now it runs again
                asker, _ = stopped.accept()
                asker.settimeout(PATIENCE_S)
                with asker, socket.socket(socket.AF_UNIX) as relay:
                    relay.connect(str(aside))
                    while data := asker.recv(2**16):
                        relay.sendall(data)
        path.unlink()
        aside.rename(path)


async def no_room(*_: Any) -> asyncio.Server:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def count_logged(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return sum(record.getMessage() == event for record in caplog.records)


async def test_a_callback_without_the_token_is_refused_at_every_relay_before_its_body_is_read() -> None:
    async with relayed(ONE) as router, intercepted(router) as (_, asked):
        token = token_of(asked)
        secret = token.removeprefix("relay-0.")
        assert len(secret) >= 32
        guesses = [
            *(token[:-1], f"{token}x", secret, f"relay-1.{secret}", f"relay-7.{secret}", f"relay-0.2.{secret}"),
            *(f"..%2frelay-0.{secret}", f"relay-0.{secret}%0d%0aX:y", f"operators.{secret}", "relay-0.", "."),
        ]

        for relay in router.relays:
            for guess in guesses:
                assert await status_before_body(relay, f"/v1/metaserver/{guess}") in (403, 404), guess
        assert not sum(worker.counters["requests"] for worker in router.cluster.prefill)
        right = await router.relays[1].client.post(asked.url.path, content=asked.content)
        assert right.status_code == 200
    assert callbacks(router.relays[0], "accepted") == 1


@pytest.mark.parametrize(("body", "status"), [(b'{"request_id": "cmpl-nobody-0"}', 404), (b"[1]", 400), (b"{", 400)])
async def test_any_relay_reports_what_is_wrong_with_a_callback(body: bytes, status: int) -> None:
    async with relayed(ONE) as router, intercepted(router) as (_, asked):
        other = router.relays[1].client
        reply = await other.post(asked.url.path, content=body)
        assert reply.status_code == status and reply.json()["error"]["code"] == status
        assert (await other.post(asked.url.path, content=asked.content)).status_code == 200
        repeated = await other.post(asked.url.path, content=asked.content)
        assert repeated.status_code in (200, 403)  # it may be over by now


async def test_a_token_is_good_for_one_attempt_at_any_relay() -> None:
    async with relayed(ONE) as router:
        async with intercepted(router) as (work, asked):
            assert (await router.relays[1].client.post(asked.url.path, content=asked.content)).status_code == 200
            await work
            stolen = orjson.dumps(orjson.loads(asked.content) | {"remote_host": "203.0.113.9"})
            for relay in router.relays:
                assert (await relay.client.post(asked.url.path, content=stolen)).status_code == 403
