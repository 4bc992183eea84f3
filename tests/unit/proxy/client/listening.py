"""A small site behind the client protocol, on a real socket, and clients that speak bytes."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import trustme
import uvicorn
from starlette.types import Receive, Scope, Send

from balanceroute.errors import BalanceRouteError, InvalidRequest
from balanceroute.proxy.client.edge import ClientLimits, Edge
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.client.uvicorn_protocol import protocol_factory
from tests.waiting import PATIENCE_S, pace, until


class Echo:
    """The hot route: says the body back, or what `x-do` asks for."""

    def __init__(self, site: "EchoSite", request: Request, response: Response) -> None:
        self.site, self.request, self.response = site, request, response

    def check(self) -> None:
        self.request.holder = (self.request.header(b"x-holder") or b"").decode()
        if self.request.header(b"x-do") == b"refuse":
            raise InvalidRequest("no", status=401)

    def refuse(self, error: BalanceRouteError) -> None:
        self.site.errors.append(error)
        self.response.refuse(error)

    def abandoned(self) -> None:
        self.site.abandoned += 1

    async def run(self) -> None:
        response, body = self.response, self.request.body
        self.site.served += 1
        match self.request.header(b"x-do"):
            case None:
                response.respond(200, [(b"content-length", b"%d" % len(body))], body)
            case b"wait":
                gone = asyncio.Event()
                response.on_gone = gone.set
                if not response.gone:
                    await gone.wait()
                self.site.abandoned += 1
            case b"stream":
                response.start(200, [(b"content-type", b"text/event-stream")])
                for _ in range(3):
                    assert response.write(body)
                    await asyncio.sleep(0)
                response.end(b"end")
            case b"flood":
                response.start(200, [])
                while not response.gone:
                    if not response.write(b"x" * 2**16):
                        self.site.full += 1
                        await response.drained()
            case b"break":
                response.start(200, [])
                response.write(body)
            case b"keep":  # as much of an answer as the body has digits
                try:
                    response.keep(int(body))
                except BalanceRouteError as error:
                    self.refuse(error)
                else:
                    await response.over()
            case b"drop":  # what was kept, before the answer
                response.keep(len(body))
                response.keep(-len(body))
                response.respond(200, [(b"content-length", b"0")], b"")
            case b"fail":
                raise RuntimeError("a bug")


class EchoSite:
    """`POST /hot` without ASGI, everything else by ASGI: `?SECONDS` takes so long, `/wait` until `going_on`."""

    def __init__(self) -> None:
        self.hot: Mapping[str, Any] = {"/hot": lambda request, response: Echo(self, request, response)}
        self.served = self.abandoned = self.full = 0
        self.errors: list[BalanceRouteError] = []
        self.reasons: list[str] = []
        self.scopes: list[Scope] = []
        self.going_on = asyncio.Event()

    leaving = False

    def gate(self, request: Request) -> None:
        if request.header(b"authorization") == b"Bearer wrong":
            raise InvalidRequest("who are you?", status=401)

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await pace(float(scope["query_string"] or 0))
        body = (await receive())["body"] or b"hi"
        if scope["path"] == "/wait":
            await self.going_on.wait()
        if scope["path"] == "/large":
            body = b"x" * 2**24
        if scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"a", b"", b"b"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Client:
    """One connection, bytes both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    def post(self, body: bytes = b"", *lines: bytes, path: bytes = b"/hot") -> None:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (path, len(body))
        self.send(head, *(line + b"\r\n" for line in lines), b"\r\n", body)

    async def answer(self, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next response: status, headers, body."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        status, body = int(lines[0].split()[1]), b""
        if status >= 200 and not bodiless and "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked" and not bodiless:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        return status, headers, body

    async def error(self) -> int:
        """The status of the next response, which must be an OpenAI error."""
        status, headers, body = await self.answer()
        assert headers["content-type"] == "application/json"
        assert json.loads(body)["error"]["code"] == status
        return status

    async def closed(self) -> bool:
        """Wait for the end; whether it came without another byte."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class Listening:
    """A running server: its site, its shared edge, and clients of it."""

    def __init__(self, site: EchoSite, server: uvicorn.Server, trusted: ssl.SSLContext | None) -> None:
        self.site, self._server, self.trusted = site, server, trusted
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self._writers: list[asyncio.StreamWriter] = []
        self._edge: Edge | None = None

    @property
    def connections(self) -> set[Any]:
        return self._server.server_state.connections

    @property
    def edge(self) -> Edge:
        """That of all connections, made for the first one."""
        assert self._edge is not None
        return self._edge

    def _has_edge(self) -> bool:
        for each in self.connections:
            self._edge = getattr(each, "edge", self._edge)  # a handshake has none
        return self._edge is not None

    async def connect(self, source: str = "127.0.0.1") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0), ssl=self.trusted)
        self._writers.append(writer)
        await until(self._has_edge)  # the client's end may be open before the server's
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            with suppress(AttributeError):  # raised by Python 3.11.2 where TLS has ended already
                writer.transport.abort()


def an_edge(**limits: Any) -> Edge:
    """One without connections."""
    return Edge(EchoSite(), lambda: ClientLimits(**limits), asyncio.get_running_loop(), set(), set(), {})


@asynccontextmanager
async def listening(*, encrypted: bool = False, **limits: Any) -> AsyncIterator[Listening]:
    """Serve an `EchoSite` on a free port within 20 s."""
    site = EchoSite()
    ours, theirs = contexts() if encrypted else (None, None)
    config = uvicorn.Config(
        site,
        port=0,
        http=protocol_factory(site, lambda: ClientLimits(**limits), lambda: ours),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server._serve())
    await until(lambda: server.started)
    running = Listening(site, server, theirs)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield running
    finally:
        running.close()
        server.should_exit = True
        await task


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's, and that of clients that trust it."""
    ca = trustme.CA()
    ours, theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    ca.issue_cert("127.0.0.1").configure_cert(ours)
    ca.configure_trust(theirs)
    return ours, theirs


async def served(server: "Listening") -> None:
    """Another client is served as ever."""
    client = await server.connect()
    client.post(b"well?")
    assert (await client.answer())[2] == b"well?"
    client.writer.close()
