"""The one assumption about uvicorn: how it calls a protocol class, and what it does with what the class keeps."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from balanceroute.proxy.client.edge import ClientLimits
from balanceroute.proxy.client.protocol import ClientProtocol
from balanceroute.proxy.client.uvicorn_protocol import protocol_factory
from tests.unit.proxy.client.listening import EchoSite, listening
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_uvicorn_creates_one_protocol_per_client() -> None:
    async with listening() as server:
        clients = [await server.connect() for _ in range(3)]
        await until(lambda: len(server.connections) == 3)
        assert all(isinstance(connection, ClientProtocol) for connection in server.connections)
        assert len({id(connection.edge) for connection in server.connections}) == 1
        clients[0].writer.close()
        await until(lambda: len(server.connections) == 2)


async def test_a_stop_closes_idle_connections_and_waits_for_requests_under_way() -> None:
    async with listening() as server:
        idle, busy = await server.connect(), await server.connect()
        busy.send(b"GET /?0.25 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.site.scopes)
        assert len(server._server.server_state.tasks) == 1
        server._server.should_exit = True
        assert await idle.closed()
        status, headers, body = await busy.answer()
        assert (status, body) == (200, b"hi") and headers["connection"] == "close"
        assert await busy.closed()


async def test_the_protocol_uses_only_two_sets_of_uvicorn() -> None:
    state: Any = SimpleNamespace(connections=set(), tasks=set())
    made: Any = protocol_factory(EchoSite(), ClientLimits)
    connection = made(config=None, server_state=state, app_state={}, _loop=asyncio.get_running_loop())
    assert isinstance(connection, ClientProtocol) and uvicorn.Config(EchoSite(), http=made).http is made
