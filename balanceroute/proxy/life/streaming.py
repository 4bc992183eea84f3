"""A worker's events to a client, counted, without a task waking up per event: the task's side of it.

    socket readable -> ChunkReader.data_received -> Pump.chunk -> EventMatcher.match, else EventScanner.feed
                                                        |-> on_tokens(n)
                                                        '-> Flusher, at the end of the loop's turn: BodyWriter.write

All of that is in `hotpath/events.py`, which may be compiled. Here is what the request's own task does meanwhile.

Writing never waits. A client whose socket is full takes no part: then the pump stops reading the worker and wakes the
request's own task, which waits until the client reads on; later bytes queue behind, bounded by the worker connection's
pause.

Nothing else runs in between: no timer, log line or metric per event. `on_tokens` must be O(1).
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Protocol

from balanceroute.errors import UpstreamError
from balanceroute.proxy.hotpath import Flusher, Pump
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd
from balanceroute.proxy.workers.reply import Reply


class BodyWriter(Protocol):
    """A client's response whose head is made, as far as it takes its body."""

    def write(self, body: bytes, /) -> bool:
        """Write a part, not empty and not the last; False if the client's socket is full: nothing has happened."""

    def end(self, body: bytes, /) -> None:
        """Write the last of the body, whether or not the socket is full."""

    async def drained(self) -> None:
        """Wait until a part may be taken."""


async def write_part(client: BodyWriter, part: bytes) -> None:
    """Write a part as soon as the client takes it."""
    while not client.write(part):
        await client.drained()


END_GRACE_S = 1.0  # a worker that has sent [DONE] may take this long to end the body before it is closed


async def stream_events(
    reply: Reply,
    scanner: EventScanner,
    client: BodyWriter,
    on_tokens: Callable[[int], None],
    *,
    on_first: Callable[[], None] | None = None,
    first: bytes = b"",
    ends_response: bool = True,
) -> UpstreamError | None:
    """Pump the rest of `reply` through `scanner` to the client until the worker's stream ends.

    The response has been started by the caller, who also ends it: what comes next depends on `scanner.end`,
    which is set on return. Returns the error that broke the body off, if one did. Only when the stream is
    `StreamEnd.DONE` and `ends_response` has the body been ended here, in one write with [DONE]. Cancel this call when
    the client is gone: the worker's connection is closed at once. `reply.undelivered` then says whether events were
    counted that the client didn't take.

    Args: first: bytes that `scanner` gave for what was read of the reply before this call, sent first.
        on_tokens: called with the number of new tokens, from within the event loop's read callback; tokens
        counted before this call are not reported again.
        on_first: called once, after the first call of `on_tokens`.
    """
    done = StreamEnd.DONE if ends_response else None
    pump = Pump(reply, scanner, client, on_tokens, _flusher(reply.loop), done)
    if on_first is not None:

        def first_tokens(tokens: int) -> None:
            pump.on_tokens = on_tokens
            on_tokens(tokens)
            on_first()

        pump.on_tokens = first_tokens
    try:
        pump.start(first)
        while not pump.over:
            if not pump.blocked:
                await pump.stirred()
            while pump.blocked:
                await client.drained()
                pump.unblock()
            pump.go_on()
        if pump.failure is not None:
            raise pump.failure
        return pump.error
    finally:
        reply.undelivered = pump.stop()
        pump.on_tokens = on_tokens  # what waited for the first of them knows the pump
        if scanner.end is StreamEnd.DONE:
            reply.discard(END_GRACE_S)
        else:
            reply.abort()


_flushers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Flusher] = weakref.WeakKeyDictionary()


def _flusher(loop: asyncio.AbstractEventLoop) -> Flusher:
    flusher = _flushers.get(loop)
    if flusher is None:
        flusher = _flushers[loop] = Flusher(loop.call_soon)
    return flusher
