"""The hot path: a worker's events to a client, counted, without a task waking up per event.

    socket readable -> data_received -> _Pump.chunk -> EventScanner.match, else feed
                                             |-> on_tokens(n)
                                             '-> Flusher, at the end of the loop's turn:
                                                 write(...), else send(...) driven on the spot -> socket write

Nearly all of that, for nearly all events, is in `hotpath`, which may be compiled.

An ASGI `send` is a coroutine, but a server's only waits when the client's socket is full; otherwise its
first step is also its last. So the pump steps it by hand outside of any task (`coroutine.send(None)`),
which costs a function call where an event, a future and a task switch would cost several microseconds each.
If it does wait, the pump stops reading the worker and hands the half-run coroutine to the request's own
task, which finishes it like any other `await`; later bytes queue behind it, bounded by the worker
connection's pause.

Nothing else runs in between: no timer, log line or metric per event. `on_tokens` must be O(1).

Where the server offers a shorter way for a part in the middle of a body (`Write`), it is tried first: it either writes
at once or says that it can't, and then `send` is used.

A `send` wrapped by middleware works as long as the wrapper does not need a current task (anyio cancel scopes
and `asyncio.timeout` do); Starlette's own wrappers do not.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

from balanceroute.errors import UpstreamError
from balanceroute.proxy.hotpath import EventPump, Flusher
from balanceroute.proxy.sse import EventScanner, StreamEnd
from balanceroute.proxy.upstream import Reply

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Write = Callable[[bytes], bool]  # whether these bytes of a body, neither its first nor its last, have been written

END_GRACE_S = 1.0  # a worker that has sent [DONE] may take this long to end the body before it is closed


async def relay(
    reply: Reply,
    scanner: EventScanner,
    send: Send,
    on_tokens: Callable[[int], None],
    *,
    on_first: Callable[[], None] | None = None,
    first: bytes = b"",
    write: Write | None = None,
    ends_response: bool = True,
) -> UpstreamError | None:
    """Pump the rest of `reply` through `scanner` to the client until the worker's stream ends.

    The response has been started by the caller, who also ends it: what comes next depends on `scanner.end`,
    which is set on return. Returns the error that broke the body off, if one did. Only when the stream is
    `StreamEnd.DONE` and `ends_response` has the final message (`more_body: False`) been sent here, in one
    write with [DONE]. Cancel this call when the client is gone: the worker's connection is closed at once.
    `reply.undelivered` then says whether events were counted that the client didn't take.

    Args: first: bytes that `scanner` gave for what was read of the reply before this call, sent first.
        on_tokens: called with the number of new tokens, from within the event loop's read callback; tokens
        counted before this call are not reported again.
        on_first: called once, after the first call of `on_tokens`.
        write: tried before `send` for what is not the last of the body.
    """
    pump = _Pump(reply, scanner, send, on_tokens, write, ends_response)
    if on_first is not None:

        def first_tokens(tokens: int) -> None:
            pump.on_tokens = on_tokens
            on_tokens(tokens)
            on_first()

        pump.on_tokens = first_tokens
    try:
        pump.start(first)
        while not pump.over:
            await pump.wait()
        if pump.failure is not None:
            raise pump.failure
        return pump.error
    finally:
        reply.undelivered = pump.stop()
        if scanner.end is StreamEnd.DONE:
            reply.discard(END_GRACE_S)
        else:
            reply.abort()


class _Pump(EventPump):
    """The sink of one relay; see the module's theory. What the plain case takes is in `EventPump`."""

    scanner: EventScanner
    blocked: "_HalfRun | None"

    __slots__ = (
        "_ends_response",
        "_reply",
        "_send",
        "_waiter",
        "error",
        "failure",
        "over",
    )

    def __init__(
        self,
        reply: Reply,
        scanner: EventScanner,
        send: Send,
        on_tokens: Callable[[int], None],
        write: Write | None,
        ends_response: bool,
    ) -> None:
        self._reply = reply
        super().__init__(scanner, on_tokens, _flusher(reply.loop), write)
        self._send = send
        self._ends_response = ends_response
        self._waiter: asyncio.Future[None] | None = None
        self.over = False  # nothing more will be sent by this pump
        self.error: UpstreamError | None = None  # of the worker
        self.failure: BaseException | None = None  # of `send`

    def start(self, first: bytes) -> None:
        if first:
            self._write(first)
        if self.scanner.end is None:
            self._reply.attach(self)
        elif self.blocked is None:
            self.over = True

    # -------------------------------------------------------------------------------- from the read callback

    def feed(self, data: bytes) -> None:
        self.take(self.scanner.feed(data))
        if self.scanner.end is not None:
            self._end()

    def send(self) -> None:
        out, self.out = self.out, b""
        self._write(out)
        if self.scanner.end is not None:
            self._end()

    def failed(self, error: Exception) -> None:
        self.failure = error
        self._end()

    def ended(self, error: UpstreamError | None) -> None:
        self.error = error
        self.scanner.close()
        self._end()

    def _write(self, out: bytes) -> None:
        more_body = not (self._ends_response and self.scanner.end is StreamEnd.DONE)
        message = {"type": "http.response.body", "body": out, "more_body": more_body}
        try:
            if more_body and self.write_part is not None and self.write_part(out):
                return
            sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:
            self.failed(error)
            return
        self.blocked = _HalfRun(sending, waits_for)
        self._reply.pause()
        self._wake()

    def _end(self) -> None:
        if self.blocked is None and not self.out:
            self.over = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -------------------------------------------------------------------------------- from the request's task

    async def wait(self) -> None:
        """Wait until the pump is over or blocked, and unblock it."""
        if self.blocked is None:
            self._waiter = self._reply.loop.create_future()
            await self._waiter
            self._waiter = None
        while self.blocked is not None:
            await self.blocked
            self.blocked = None
            out, self.out = self.out, b""
            if out:
                self._write(out)
        if self.scanner.end is not None:
            self.over = True
        else:
            self._reply.resume()

    def stop(self) -> bool:
        """Write what still waits for this turn's flush; whether something was counted that the client will not get.

        A cancelled relay may have read events after it was cancelled: they count as generated, so they must go out.
        """
        out, self.out = self.out, b""
        if out and self.blocked is None and self.failure is None:
            self._write(out)
            out = b""
        lost = self.blocked is not None or bool(out)
        if self.blocked is not None:
            self.blocked.close()
            self.blocked = None
        return lost


_flushers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Flusher] = weakref.WeakKeyDictionary()


def _flusher(loop: asyncio.AbstractEventLoop) -> Flusher:
    flusher = _flushers.get(loop)
    if flusher is None:
        flusher = _flushers[loop] = Flusher(loop)
    return flusher


class _HalfRun:
    """Awaits a coroutine whose first steps have been run by hand; `waits_for` is what it yielded last."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as exc:
                thrown: BaseException | None = exc
            else:
                thrown = None
            try:
                waits_for = self._coroutine.throw(thrown) if thrown else self._coroutine.send(value)
            except StopIteration:
                return

    def close(self) -> None:
        self._coroutine.close()


class DisconnectWatch:
    """Calls `on_gone` once when the client disconnects, without a task of its own.

    Start it after the request body has been read: every message but a disconnect is skipped.
    Servers report a disconnect after the whole response as well: close the watch before the last message.
    """

    __slots__ = ("_on_gone", "_receive", "_receiving", "_waits_for")

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone: Callable[[], None] | None = on_gone
        self._receiving: Coroutine[Any, Any, Message] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._step(None)

    def _step(self, _done: object) -> None:
        self._waits_for = None
        while self._on_gone is not None:
            if self._receiving is None:
                self._receiving = self._receive()  # type: ignore[assignment]
            try:
                assert self._receiving is not None
                waits_for = self._receiving.send(None)
            except StopIteration as stop:
                self._receiving = None
                if stop.value["type"] == "http.disconnect":
                    on_gone, self._on_gone = self._on_gone, None
                    on_gone()
            else:
                if waits_for is None:  # a bare yield, as of sleep(0)
                    asyncio.get_running_loop().call_soon(self._step, None)
                else:
                    waits_for._asyncio_future_blocking = False  # what a Task does with a future it is given
                    self._waits_for = waits_for
                    waits_for.add_done_callback(self._step)
                return

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._on_gone = None
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._step)
            self._waits_for = None
        if self._receiving is not None:
            self._receiving.close()
            self._receiving = None
