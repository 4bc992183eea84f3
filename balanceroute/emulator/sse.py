"""Writing server-sent events with little work per event.

An ASGI `send` of a server that is not pushing back completes without suspending, so an event can be written
straight from the decode step, for all streams in one pass, without waking a task per stream. Only when the
client is slow does a task take over; what is generated meanwhile goes out together afterwards, as vLLM's
own output collector does.
"""

import asyncio
import zlib
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from starlette.types import Send

from balanceroute.errors import InvariantError

DONE = b"data: [DONE]\n\n"


class Connection(Protocol):
    """The transport under an exchange, for faults that HTTP has no words for."""

    def close(self) -> None:
        """End the connection after what is written, whatever the reply promised."""

    def reset(self) -> None:
        """Cut the connection."""


class _Started:
    """Lets a task finish a coroutine that has already run up to its first suspension."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                yield waits_for
            except BaseException as error:  # the task was cancelled: the coroutine must know
                waits_for = self._coroutine.throw(error)
                continue
            try:
                waits_for = self._coroutine.send(None)
            except StopIteration:
                return


class SseWriter:
    """One event stream. `completed` is done when its last byte has been handed to the server."""

    def __init__(self, send: Send, tasks: set[asyncio.Task[None]]) -> None:
        self._send = send
        self._tasks = tasks
        self._pending: list[bytes] = []
        self._flushing = False
        self._ended = False
        self.completed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, extra_headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send status 200 and the headers, before anything is generated, as vLLM does."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *extra_headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def event(self, data: bytes) -> None:
        """Write one event, framing included."""
        self.write(data)

    def done(self) -> None:
        """Write `[DONE]` and end the reply."""
        self.write(DONE)
        self.end()

    def write(self, data: bytes) -> None:
        """Write bytes of the body as one piece, if the client keeps up."""
        if self._ended:
            raise InvariantError("emulator: write after the end of a stream")
        if self._flushing:
            self._pending.append(data)
        else:
            self._push(data, more=True)

    def end(self) -> None:
        """End the reply."""
        self._ended = True
        if not self._flushing:
            self._push(b"", more=False)

    def _push(self, data: bytes, *, more: bool) -> None:
        coroutine = self._send({"type": "http.response.body", "body": data, "more_body": more})
        assert isinstance(coroutine, Coroutine)
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            if not more:
                self._complete()
            return
        self._flush_by(self._flush(coroutine, waits_for, more))

    def _flush_by(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a task write, which ends the flush."""
        self._flushing = True
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self, coroutine: Coroutine[Any, Any, None], waits_for: object, more: bool) -> None:
        await _Started(coroutine, waits_for)
        while self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._flushing = False
        if self._ended:
            if more:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._complete()

    def _complete(self) -> None:
        if not self.completed.done():
            self.completed.set_result(None)


class GzipSseWriter(SseWriter):
    """The same stream, compressed although the client did not ask for it."""

    def __init__(self, send: Send, tasks: set[asyncio.Task[None]]) -> None:
        super().__init__(send, tasks)
        self._compressor = zlib.compressobj(wbits=31)

    async def start(self, extra_headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Announce the encoding."""
        await super().start((*extra_headers, (b"content-encoding", b"gzip")))

    def write(self, data: bytes) -> None:
        """Compress and write."""
        super().write(self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH))

    def end(self) -> None:
        """Write the trailer of the compressed stream."""
        super().write(self._compressor.flush())
        super().end()
