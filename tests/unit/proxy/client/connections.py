"""Requests that have come, and responses whose bytes are kept, without a socket."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.response import Response


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data


class Connection:
    """What a response needs; `done` are the responses that were complete: whether the next request may follow."""

    write_paused = receiving = False
    date_line = b""

    def __init__(self) -> None:
        self.transport = Transport()
        self.loop = asyncio.get_running_loop()
        self.done: list[bool] = []
        self.closed = False
        self.kept_bytes = 0
        self.room = asyncio.Event()

    async def drained(self) -> None:
        await self.room.wait()

    def keep(self, more_bytes: int) -> None:
        self.kept_bytes += more_bytes

    def response_done(self, keep_alive: bool) -> None:
        self.done.append(keep_alive)

    def close(self) -> None:
        self.closed = True

    def response(self, *, head_only: bool = False) -> Response:
        return Response(self, head_only=head_only, http_1_0=False, keep_alive=True)

    @property
    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of what was written."""
        head, _, body = self.transport.written.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


def a_request(
    body: Any = b"", path: bytes = b"/v1/completions", headers: Sequence[tuple[bytes, bytes]] = ()
) -> Request:
    """A POST whose body has come."""
    request = Request("POST", path, [(b"host", b"x"), *headers], http_1_0=False)
    request.body = body if isinstance(body, bytes) else orjson.dumps(body)
    request.complete = True
    request.peer, request.local, request.scheme = ("203.0.113.9", 1), ("127.0.0.1", 8000), "http"
    return request
