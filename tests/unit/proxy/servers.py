"""Workers for tests of the wire: a server whose every connection runs a script of bytes and pauses."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from balanceroute.proxy.telemetry.clock import Loop
from balanceroute.proxy.workers.reply import Reply
from balanceroute.proxy.workers.upstream import Upstream

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Test = TypeVar("Test", bound=Callable[..., Awaitable[None]])


def on_both_loops(test: Test) -> Test:
    """Run a test of the wire on both: the router has a loop of its own, and who embeds it has whatever he likes."""
    loops = [("asyncio", {"loop_factory": loop}) for loop in (asyncio.new_event_loop, Loop)]
    marked: Test = pytest.mark.anyio(pytest.mark.parametrize("anyio_backend", loops, ids=["asyncio", "uvloop"])(test))
    return marked


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request; raises IncompleteReadError when there is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


def chunked(*parts: bytes, last: bool = True) -> bytes:
    """Parts as a chunked body, one chunk each."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return body + (b"0\r\n\r\n" if last else b"")


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def plain(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole reply with a content-length."""
    return b"HTTP/1.1 %s\r\nContent-Type: text/plain\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


class Worker:
    """A running scripted server: its URL, and how many connections it has taken."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.url = ""
        self.closed = asyncio.Event()  # set when any connection's script has ended

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed: every script ends so
        finally:
            writer.close()
            self.closed.set()


@asynccontextmanager
async def worker(script: Script, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Worker]:
    """Serve a script on a free port."""
    running = Worker(script)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(running._serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    running.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        yield running
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(*replies: bytes) -> Script:
    """A script that answers every request of a connection with the next reply, the last one for ever."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = list(replies)
        while True:
            await read_request(reader)
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            await writer.drain()

    return script


def falling_silent(sent: bytes = b"") -> Script:
    """A script that says this to the first request of a connection, and nothing more until it is closed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        await reader.read()

    return script


async def post(upstream: Upstream, **options: object) -> Reply:
    """The reply to a small request."""
    return await upstream.request("POST", "/v1/x", b"{}", [(b"x-request-id", b"r1")], **options)  # type: ignore[arg-type]
