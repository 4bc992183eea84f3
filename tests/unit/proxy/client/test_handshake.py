"""Connections that are not encrypted yet: their place, their end, and the bytes that come too early or too late."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from balanceroute.proxy.client.edge import RESERVE, ClientLimits, Edge
from balanceroute.proxy.client.handshake import MAX_EARLY_BYTES, Handshake
from tests.unit.proxy.client.connections import Transport
from tests.unit.proxy.client.listening import EchoSite, contexts
from tests.unit.proxy.virtual_time import with_virtual_time
from tests.waiting import until


class Echo(asyncio.Protocol):
    """What the connection is handed over to."""

    def __init__(self, below: asyncio.Transport) -> None:
        self.below = below

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())


class Listening:
    """A listener whose connections begin with a handshake."""

    def __init__(self, edge: Edge, port: int, trusted: ssl.SSLContext) -> None:
        self.edge, self.port, self.trusted = edge, port, trusted

    async def connect(self, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = self.trusted if tls else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)


@asynccontextmanager
async def listening(*, late: bool = False, **limits: Any) -> AsyncIterator[Listening]:
    ours, theirs = contexts()
    loop = asyncio.get_running_loop()
    edge = Edge(EchoSite(), lambda: ClientLimits(**limits), loop, set(), set(), {})

    def accepted() -> asyncio.Protocol:
        handshake = Handshake(edge, ours, Echo)
        return Late(handshake) if late else handshake

    server = await loop.create_server(accepted, "127.0.0.1", 0)
    try:
        yield Listening(edge, server.sockets[0].getsockname()[1], theirs)
    finally:
        server.close()


@pytest.mark.anyio
async def test_a_completed_handshake_hands_the_connection_to_its_protocol() -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        assert not server.edge.connections and not server.edge.waiting
        writer.transport.abort()


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "no TLS"])
async def test_a_client_that_does_not_finish_the_handshake_is_closed_and_frees_its_place(sent: bytes) -> None:
    async with listening(receive_timeout_s=0.2) as server:
        reader, writer = await server.connect(tls=False)
        writer.write(sent)
        assert b"HTTP" not in await reader.read()
        await until(lambda: not server.edge.connections)
        writer.transport.abort()


@pytest.mark.anyio
async def test_a_waiting_handshake_gives_its_place_to_the_next() -> None:
    async with listening(max_connections=1) as server:
        waiting, writer = await server.connect(tls=False)
        await until(lambda: server.edge.waiting)
        other, second = await server.connect()
        second.write(b"hello")
        assert await other.readexactly(5) == b"HELLO"
        assert await waiting.read() == b""
        for each in (writer, second):
            each.transport.abort()


class Plain(Transport):
    """A connection that is not encrypted."""

    aborted = paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


@with_virtual_time
async def test_bytes_before_the_handshake_are_bounded() -> None:
    loop = asyncio.get_running_loop()
    edge = Edge(EchoSite(), ClientLimits, loop, set(), set(), {})
    handshake, plain = Handshake(edge, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Echo), Plain()
    handshake.connection_made(plain)
    assert plain.paused and edge.connections == {handshake}
    handshake.data_received(b"x" * MAX_EARLY_BYTES)
    assert not plain.aborted
    handshake.data_received(b"x")
    assert plain.aborted and not edge.connections


@with_virtual_time
async def test_without_any_free_place_no_handshake_begins() -> None:
    loop = asyncio.get_running_loop()
    edge = Edge(EchoSite(), lambda: ClientLimits(max_connections=0), loop, set(), set(), {})
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    others = [Handshake(edge, context, Echo) for _ in range(RESERVE)]
    assert all(map(edge.join, others))
    edge.waiting.clear()  # all are busy
    handshake, plain = Handshake(edge, context, Echo), Plain()
    handshake.connection_made(plain)
    assert plain.aborted and not plain.paused
    for other in others:
        edge.leave(other)


class Late(asyncio.Protocol):
    """Begins the handshake when the client's first bytes have come, as uvloop may."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.set_protocol(self.handshake)
        self.handshake.connection_made(self.transport)
        self.handshake.data_received(data)


@pytest.mark.anyio
async def test_bytes_that_came_before_the_handshake_are_its_first() -> None:
    async with listening(late=True) as server:
        reader, writer = await server.connect()
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
        writer.transport.abort()
