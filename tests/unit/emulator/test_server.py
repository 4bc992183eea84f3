"""The emulator's listener: stopping it takes no longer than it says, whatever its requests do."""

import asyncio
from typing import Any

import pytest

from balanceroute.emulator import server
from balanceroute.emulator.server import HttpServer


def test_a_request_that_outlives_its_connection_is_cancelled_when_the_server_stops(
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

    async def test() -> None:
        listener = HttpServer(deaf, "127.0.0.1", 0)
        await listener.start()
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            await started.wait()
            await listener.stop()
            await cancelled.wait()
        writer.close()

    asyncio.run(test())
