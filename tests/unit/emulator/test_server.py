"""The emulator's listener: stopping it takes no longer than it says, whatever its requests do."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from balanceroute.emulator import server
from balanceroute.emulator.app import CONNECTION
from balanceroute.emulator.server import HttpServer
from tests.waiting import PATIENCE_S, until


@pytest.mark.anyio
async def test_a_request_that_outlives_its_connection_is_cancelled_when_the_server_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.05)
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    listener = HttpServer(deaf, "127.0.0.1", 0)
    await listener.start()
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        await started.wait()
        await listener.stop()
        await cancelled.wait()
    writer.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_reset_of_a_closed_connection_logs_no_error(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    gone = asyncio.Event()
    connections: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connections.append(scope["extensions"][CONNECTION])
        while (await receive())["type"] != "http.disconnect":
            continue
        gone.set()

    async def test() -> None:
        listener = HttpServer(app, "127.0.0.1", 0)
        await listener.start()
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: connections)
                writer.transport.abort()
                await gone.wait()
            connections[0].reset()
        finally:
            await listener.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(test())
