"""The client protocol without a socket: bytes in, in any pieces; what it took for requests, and what it answered, out.

The transport does what a socket's does, as far as a protocol can see: it delivers nothing while reading is paused, or
after it was closed; what is written is taken at once.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from balanceroute.errors import BalanceRouteError
from balanceroute.proxy.client.edge import ClientLimits, Edge
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.protocol import ClientProtocol
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.wire.responses import json_headers

HOT_PATH: Final = "/hot"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_ANSWER: Final = b"{}"
_QUIET_TURNS: Final = 20  # of the loop in which nothing happens: everybody waits
_MOST_WRITES: Final = 10_000  # to a connection
_MOST_TURNS: Final = 10_000  # of the loop per piece; more is an endless one


@dataclass(frozen=True, slots=True)
class Taken:
    """A request as it was served."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(slots=True)
class Outcome:
    """What became of a connection: `statuses` without informational ones; `closed`, by the router."""

    requests: list[Taken] = field(default_factory=list)
    written: bytes = b""
    closed: bool = False

    @property
    def statuses(self) -> list[int]:
        """Of the answers."""
        return [int(status) for status in _STATUS.findall(self.written) if status != b"100"]

    @property
    def refusal(self) -> int | None:
        """The first answer that is none of an application's."""
        return next((status for status in self.statuses if status != 200), None)


class Socket(asyncio.Transport):
    """A transport whose other side takes everything, as long as it is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outcome: Outcome) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._loop, self._outcome = loop, outcome
        self.protocol: asyncio.Protocol | None = None
        self.reading = True
        self._writes = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self._writes += 1
        if self._writes > _MOST_WRITES:
            raise RuntimeError("the same is written for ever")
        if not self._outcome.closed:
            self._outcome.written += data

    def write_eof(self) -> None:
        """The other side would see the end."""

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self._outcome.closed

    def close(self) -> None:
        if not self._outcome.closed:
            self._outcome.closed = True
            assert self.protocol is not None
            self._loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()


class _Hot:
    """The handler of a hot route."""

    def __init__(self, stage: "Stage", request: Request, response: Response) -> None:
        self._stage, self._request, self._response = stage, request, response

    def check(self) -> None:
        """Nobody is turned away."""

    def refuse(self, error: BalanceRouteError) -> None:
        self._response.refuse(error)

    def abandoned(self) -> None:
        """The client has gone."""

    async def run(self) -> None:
        request = self._request
        target = request.raw_path + (b"?" + request.query if request.query else b"")
        self._stage.taken.append(Taken(request.method, target, tuple(request.headers), request.body))
        self._response.respond(200, json_headers(_ANSWER), _ANSWER)


class Stage:
    """Connections of one listener, one after the other; serves every path, one of them as a hot route."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.taken: list[Taken] = []
        self.failures: list[dict[str, Any]] = []
        self._loop = loop
        limits = ClientLimits(max_body_bytes=2**20)
        self._edge = Edge(self, lambda: limits, loop, set(), set(), {})
        loop.set_exception_handler(lambda _, context: self.failures.append(context))

    @property
    def hot(self) -> Mapping[str, Any]:
        """One hot route."""
        return {HOT_PATH: lambda request, response: _Hot(self, request, response)}

    leaving = False

    def gate(self, request: Request) -> None:
        """Nobody is turned away."""

    def refused(self, reason: str) -> None:
        """What the edge refuses is seen in its answers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Every other route."""
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        self.taken.append(Taken(scope["method"], target, tuple(scope["headers"]), message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": json_headers(_ANSWER)})
        await send({"type": "http.response.body", "body": _ANSWER})

    async def connection(self, pieces: Iterable[bytes], *, half_close: bool = True, at_once: bool = False) -> Outcome:
        """One connection that says this and then, if it half-closes, waits for the answers.

        `at_once`: it half-closes while the answers are still to come.
        """
        self.taken = []
        outcome = Outcome(self.taken)
        socket = Socket(self._loop, outcome)
        protocol = socket.protocol = ClientProtocol(self._edge)
        protocol.connection_made(socket)
        for piece in pieces:
            await self._until_read(socket)
            if outcome.closed:
                break
            if piece and socket.reading:
                protocol.data_received(piece)
        if not at_once:
            await self._until_idle(outcome)
        if half_close and not outcome.closed:
            if not protocol.eof_received():
                socket.close()
            await self._until_idle(outcome)
        socket.close()
        await asyncio.sleep(0)
        await self._until_idle(outcome)
        if self.failures:
            raise RuntimeError(f"the loop met {self.failures}")
        return outcome

    def left(self) -> dict[str, int]:
        """What the listener still holds; only what is not zero."""
        edge = self._edge
        held = {
            "connections": len(edge.connections),
            "waiting": len(edge.waiting),
            "tasks": len(edge.tasks),
            "incoming_bytes": edge.incoming_bytes,
        }
        return {name: count for name, count in held.items() if count}

    async def _until_read(self, socket: Socket) -> None:
        """Let what has come be served, so that more of it is read."""
        if self._edge.tasks:
            await asyncio.sleep(0)
        for _ in range(_MOST_TURNS):
            if socket.reading or socket.is_closing():
                return
            await asyncio.sleep(0)
        raise RuntimeError("reading is paused for ever")

    async def _until_idle(self, outcome: Outcome) -> None:
        """Let everything happen that can: until no request is served, or those that are wait for the client."""
        quiet = 0
        for _ in range(_MOST_TURNS):
            before = (len(self._edge.tasks), len(self.taken), len(outcome.written))
            await asyncio.sleep(0)
            if not self._edge.tasks or quiet > _QUIET_TURNS:
                await asyncio.sleep(0)
                return
            same = before == (len(self._edge.tasks), len(self.taken), len(outcome.written))
            quiet = quiet + 1 if same else 0
        raise RuntimeError("a request is served for ever")
