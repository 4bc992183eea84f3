"""The listening side: what clients get whom the router can't take in."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from balanceroute.proxy.server import ClientProtocol, Server

pytestmark = pytest.mark.anyio
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(float(scope["query_string"] or 0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


class Listening(Server):
    """The server without the router behind it."""

    def __init__(self, bounds: dict[str, float]) -> None:
        protocol = type("Protocol", (ClientProtocol,), bounds)
        config = uvicorn.Config(
            greet, port=0, http=protocol, ws="none", lifespan="off", log_config=None, server_header=False
        )
        uvicorn.Server.__init__(self, config)

    startup = uvicorn.Server.startup  # ours sets up the whole process


async def with_server(max_connections: int, test: Callable[[Open], Awaitable[None]], **bounds: float) -> None:
    server = Listening({"max_connections": max_connections, **bounds})
    task = asyncio.get_running_loop().create_task(server._serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(10):
            await test(lambda: asyncio.open_connection("127.0.0.1", port))
    finally:
        server.should_exit = True
        await task


async def ask(
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], method: str
) -> tuple[bytes, dict[str, str], Any]:
    """One request on a connection: status line, headers, body."""
    reader, writer = streams
    writer.write(b"%s /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % method.encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return head[0].encode(), headers, await reader.readexactly(int(headers["content-length"]))


async def test_above_the_bound_of_connections_clients_get_an_openai_error_that_says_when_to_come_back() -> None:
    async def test(connect: Open) -> None:
        kept = [await connect() for _ in range(2)]
        for streams in kept:
            assert (await ask(streams, "POST"))[0] == b"HTTP/1.1 200 OK"
        third = await connect()
        status, headers, body = await ask(third, "POST")
        assert status == b"HTTP/1.1 503 Service Unavailable"
        assert int(headers["retry-after"]) >= 1 and headers["content-type"] == "application/json"
        assert json.loads(body)["error"]["code"] == 503
        assert await third[0].read() == b""  # hung up on, so that it doesn't stand in the others' way
        assert (await ask(kept[0], "POST"))[0] == b"HTTP/1.1 200 OK"
        for _, writer in [*kept, third]:
            writer.close()

    await with_server(2, test)


async def test_above_the_bound_of_connections_health_and_metrics_can_still_be_read() -> None:
    async def test(connect: Open) -> None:
        streams = [await connect() for _ in range(3)]
        assert (await ask(streams[2], "GET"))[0] == b"HTTP/1.1 200 OK"
        assert (await ask(streams[2], "POST"))[0] == b"HTTP/1.1 503 Service Unavailable"
        for _, writer in streams:
            writer.close()

    await with_server(2, test)


async def test_bytes_that_are_no_http_get_an_openai_error_too() -> None:
    async def test(connect: Open) -> None:
        reader, writer = await connect()
        writer.write(b"\x16\x03\x01 this is no request\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-length: %d" % len(body) in head
        assert json.loads(body)["error"]["code"] == 400
        writer.close()

    await with_server(2, test)


async def test_a_connection_without_requests_is_closed_after_its_time_and_one_in_use_is_not() -> None:
    async def test(connect: Open) -> None:
        idle, used = await connect(), await connect()
        assert (await ask(idle, "POST"))[0] == b"HTTP/1.1 200 OK"
        loop = asyncio.get_running_loop()
        waited_s = -loop.time()
        ended = loop.create_task(idle[0].read())
        while not ended.done():
            assert (await ask(used, "POST"))[0] == b"HTTP/1.1 200 OK"
            await asyncio.sleep(0.05)
        assert ended.result() == b"" and waited_s + loop.time() > 0.5
        assert (await ask(used, "POST"))[0] == b"HTTP/1.1 200 OK"
        for _, writer in (idle, used):
            writer.close()

    await with_server(9, test, keep_alive_s=0.5)


async def test_a_connection_whose_next_request_began_during_the_last_answer_is_not_idle() -> None:
    async def test(connect: Open) -> None:
        reader, writer = await connect()
        writer.write(b"GET /?0.1 HTTP/1.1\r\nhost: x\r\n\r\nGET /?2 HT")
        assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""
        writer.close()

    await with_server(9, test, keep_alive_s=0.5)
