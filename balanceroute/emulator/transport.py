"""A streaming in-process transport for httpx: chunks arrive when the application sends them.

`httpx.ASGITransport` returns the body only when the application has ended, and never tells it that the
client has gone. Here every body message is handed over as it is sent, `send` waits while the reader is
behind (a bounded buffer, like a socket), and closing the response early gives the application its
`http.disconnect`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx
from starlette.types import Message

from balanceroute.emulator.app import CONNECTION

App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

BUFFERED_CHUNKS = 64  # how far the application may run ahead of the reader


class _Exchange:
    """One request and its reply between client and application."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._chunks: list[bytes] = []
        self._ended = False
        self._broken: Exception | None = None
        self._gone = asyncio.Event()  # the client
        self._changed = asyncio.Event()  # for the reader
        self._room = asyncio.Event()  # for the application
        self._room.set()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = asyncio.Event()

    async def receive(self) -> Message:
        """The application's `receive`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The application's `send`: suspends only while the reader is far behind."""
        while not self._room.is_set() and not self._gone.is_set():
            await self._room.wait()
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
            self.started.set()
            return
        if message.get("body"):
            self._chunks.append(message["body"])
        self._ended = self._ended or not message.get("more_body", False)
        if len(self._chunks) >= BUFFERED_CHUNKS:
            self._room.clear()
        self._changed.set()

    def close(self) -> None:
        """End the connection (fault, or the application left without finishing its reply)."""
        self.cut(httpx.RemoteProtocolError("peer closed connection without sending complete message body"))

    def reset(self) -> None:
        """Cut the connection (fault)."""
        self._chunks.clear()
        self.cut(httpx.ReadError("connection reset"))

    def cut(self, error: Exception) -> None:
        """The reader gets what is buffered, then `error`; the application its disconnect."""
        self._broken = self._broken or error
        self.disconnect()
        self.started.set()
        self._changed.set()

    def disconnect(self) -> None:
        """The client has gone."""
        self._gone.set()
        self._room.set()

    def check(self) -> None:
        """Raise what broke the exchange before the reply began."""
        if self._broken and not self.status:
            raise self._broken

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it was sent."""
        while True:
            while self._chunks:
                self._room.set()
                yield self._chunks.pop(0)
            if self._ended:
                return
            if self._broken:
                raise self._broken
            self._changed.clear()
            await self._changed.wait()


class _BodyStream(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange, task: asyncio.Task[None]) -> None:
        self._exchange = exchange
        self._task = task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._exchange.chunks():
            yield chunk

    async def aclose(self) -> None:
        """The client is done with the response: whatever still runs learns that it has gone."""
        self._exchange.disconnect()
        await asyncio.wait({self._task})


class StreamingTransport(httpx.AsyncBaseTransport):
    """Sends requests to applications by `host:port` of their URL; one that is not there refuses the connection."""

    def __init__(self, apps: Mapping[str, App]) -> None:
        self._apps = apps

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the application for one request; returns as soon as it has sent its headers."""
        app = self._apps.get(request.url.netloc.decode())
        if app is None:
            raise httpx.ConnectError(f"nothing listens on {request.url.netloc.decode()}")
        exchange = _Exchange(await request.aread())
        scope = _scope(request) | {"extensions": {CONNECTION: exchange}}
        task = asyncio.get_running_loop().create_task(_serve(app, scope, exchange))
        try:
            await exchange.started.wait()
        except asyncio.CancelledError:
            exchange.disconnect()
            raise
        exchange.check()
        return httpx.Response(exchange.status, headers=exchange.headers, stream=_BodyStream(exchange, task))


async def _serve(app: App, scope: MutableMapping[str, Any], exchange: _Exchange) -> None:
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception as error:  # an application's crash is this connection's end, as in a real server
        exchange.cut(httpx.ReadError(f"application failed: {error!r}"))
        return
    if not exchange._ended:
        exchange.close()


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
        "state": {},
    }
