"""Clients at any address: the connection that ships, on a transport that says where its peer is."""

import asyncio
import ssl
from typing import Any

import h11
import httpx

from balanceroute.config import Config
from balanceroute.proxy.app import RouterApp
from balanceroute.proxy.client.edge import Edge, limits_of
from balanceroute.proxy.client.protocol import ClientProtocol
from tests.waiting import PATIENCE_S

LOCAL = ("127.0.0.1", 8000)


class _Transport(asyncio.Transport):
    """What the router writes, kept; and an end that can be waited for."""

    def __init__(self, peer: str, tls: ssl.SSLContext | None) -> None:
        super().__init__({"peername": (peer, 40000), "sockname": LOCAL, "sslcontext": tls})
        self.written = bytearray()
        self.closed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed.set()

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class PeerTransport(httpx.AsyncBaseTransport):
    """A connection per request from `peer` to the router's own client protocol."""

    def __init__(self, app: RouterApp, config: Config, peer: str) -> None:
        self._app, self._config, self._peer = app, config, peer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        edge = Edge(self._app, limits_of(lambda: self._config), loop, set(), set(), {})
        tls = ssl.create_default_context() if request.url.scheme == "https" else None
        transport = _Transport(self._peer, tls)
        connection = ClientProtocol(edge, None if tls is None else transport)
        connection.connection_made(transport)
        body = await request.aread()
        lines = [b"%b: %b\r\n" % field for field in request.headers.raw if field[0].lower() != b"connection"]
        start = b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)
        connection.data_received(start + b"".join(lines) + b"connection: close\r\n\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            await transport.closed.wait()
        connection.connection_lost(None)
        return _parsed(request, bytes(transport.written))


def _parsed(request: httpx.Request, data: bytes) -> httpx.Response:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method=request.method, target=request.url.raw_path, headers=[("host", "router")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(data)
    reader.receive_data(b"")
    status, headers, body = 0, list[Any](), b""
    while True:
        event = reader.next_event()
        if isinstance(event, h11.Response):
            status, headers = event.status_code, list(event.headers)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return httpx.Response(status, headers=headers, content=body, request=request)
