"""The in-process transport streams, and tells the application when the client has gone."""

import asyncio
from typing import Any

import httpx
import pytest

from balanceroute.emulator import StreamingTransport

pytestmark = pytest.mark.anyio

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def chunk(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=StreamingTransport({"host:8080": app}), base_url="http://host:8080")


async def test_chunks_arrive_before_the_application_has_ended() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(chunk(b"first"))
        await go_on.wait()
        await send(chunk(b"second", more=False))

    async with client_of(app) as client, client.stream("GET", "/") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"first"
        go_on.set()
        assert [piece async for piece in chunks] == [b"second"]


async def test_closing_after_the_first_chunk_reaches_the_application_as_a_disconnect() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(chunk(b"first"))
        seen.append((await receive())["type"])

    async with client_of(app) as client:
        async with client.stream("POST", "/", content=b"x") as response:
            assert await anext(response.aiter_raw()) == b"first"
            assert seen == []
        assert seen == ["http.disconnect"]


async def test_giving_up_before_the_headers_reaches_the_application_as_a_disconnect() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked.set()
        await receive()
        gone.set()

    async with client_of(app) as client:
        asking = asyncio.ensure_future(client.get("/"))
        await asked.wait()
        asking.cancel()
        await gone.wait()


async def test_a_fast_application_waits_for_a_slow_reader() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(START)
        for _ in range(1000):
            await send(chunk(b"x"))
            sent += 1
        await send(chunk(b"", more=False))

    async with client_of(app) as client, client.stream("GET", "/") as response:
        for _ in range(1000):  # turns of the loop, in which a fast application would send everything
            await asyncio.sleep(0)
        assert sent < 100
        assert sum([len(piece) async for piece in response.aiter_raw()]) == 1000


@pytest.mark.parametrize("start", [False, True], ids=["before the reply", "inside the reply"])
async def test_an_application_that_crashes_ends_the_connection(start: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if start:
            await send(START)
        raise RuntimeError("bug")

    async with client_of(app) as client:
        with pytest.raises(httpx.ReadError, match="bug"):
            await client.get("/")


async def test_a_port_where_nothing_listens_refuses_the_connection() -> None:
    async with httpx.AsyncClient(transport=StreamingTransport({})) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://host:81/")
