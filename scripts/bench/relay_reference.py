"""The least that a relay under uvicorn can do: bytes of one upstream answer to the client, nothing counted or decided.

One request upstream per request, no watch for clients that go away, no timeouts, no errors. What a router costs above
this is what it does.

    .venv/bin/python -m scripts.bench.relay_reference PORT WORKER_PORT...
"""

import asyncio
import itertools
import sys
from collections import defaultdict
from typing import Any, cast

import httptools
import uvicorn

idle: dict[int, list["Upstream"]] = defaultdict(list)


class Upstream(asyncio.Protocol):
    """A connection to a worker: collects what comes and wakes who waits for it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, message: bytes) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.kind, self.complete, self.news = b"", False, asyncio.Event()
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        self.news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.kind = value

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class Relay:
    """The application: the workers in turn."""

    def __init__(self, ports: list[int]) -> None:
        self._turn = itertools.cycle(ports)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        port = next(self._turn)
        if idle[port]:
            upstream = idle[port].pop()
        else:
            _, upstream = await asyncio.get_running_loop().create_connection(Upstream, "127.0.0.1", port)
        head = b"POST %s HTTP/1.1\r\nhost: worker\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        upstream.ask(head % (scope["path"].encode(), len(body)) + body)
        try:
            await self._pass_on(upstream, send)
        finally:
            if upstream.complete:
                idle[port].append(upstream)
            else:
                upstream.transport.abort()

    async def _pass_on(self, upstream: Upstream, send: Any) -> None:
        started = False
        while not upstream.complete:
            await upstream.news.wait()
            upstream.news.clear()
            if not started:
                started = True
                status, headers = upstream.parser.get_status_code(), [(b"content-type", upstream.kind)]
                await send({"type": "http.response.start", "status": status, "headers": headers})
            body = b"".join(upstream.parts)
            upstream.parts.clear()
            await send({"type": "http.response.body", "body": body, "more_body": not upstream.complete})


if __name__ == "__main__":
    uvicorn.run(
        Relay([int(port) for port in sys.argv[2:]]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
