"""One client connection: bytes in, requests one after the other, their answers out.

    data_received -> head.parse_head -> Site.gate, Handler.check -> body.Body -> Handler.run -> Response
                         one request at a time; what comes after it waits unparsed

**Who serves.** The hot routes have their own handlers; every other route is served by ASGI (`edge.Site`). A completion
is served when its body is complete. An ASGI application is called at once, and gets the body when it is complete. To
refuse a request by its head alone, before a byte of its body is read (an API key, a drain), raise from `Site.gate` or
`Handler.check`, or answer from an ASGI application that has not asked for the body: then the body is dropped as it
comes.

**Bounds.** There are bounds for the head (`head.py`); for the body and its trailers (`body.py`); for the time that both
take together; for the bytes that wait behind the request under way; and for the time in which a client must take a part
of what is written to it. Where too many bytes wait, the socket is not read. Behind a completion, or where the router
has no room for more, they are dropped, and the answer before them is the connection's last. `Edge` counts all bytes
that wait with those of bodies, and looks at all deadlines a few times per second.

**Ends.** A refusal before the body was read ends the connection, but not at once: it lingers. What the client still
sends is read and dropped for `LINGER_S` and up to `MAX_DROPPED_BYTES`, else the answer could be lost to a reset (RFC
9112 section 9.6). A client that ends its side of the connection during a completion has left, which is how every SDK
cancels; on any other route it still gets its answer.

`ClientProtocol` is one machine: every byte, deadline and end of an answer may change which of its states comes next.
"""

import asyncio
import logging
import math
import re
from functools import partial
from typing import Any, Final, cast

from balanceroute.errors import BalanceRouteError, EdgeFull, InvalidRequest, InvariantError
from balanceroute.proxy.client.asgi import AsgiHandler
from balanceroute.proxy.client.body import Body, ChunkedBody, SizedBody
from balanceroute.proxy.client.edge import Edge, Handler
from balanceroute.proxy.client.head import Request, check_beginning, parse_head, path_asked
from balanceroute.proxy.client.labels import holder_of, id_of, reason_of
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.wire.message_errors import is_messages_path, message_refusal
from balanceroute.proxy.wire.responses import INTERNAL_ERROR

log = logging.getLogger(__name__)

LINGER_S: Final = 2.0
MAX_DROPPED_BYTES: Final = 64 * 2**20  # while the connection lingers; twice the largest body by default
LARGE_BODY_BYTES: Final = 64 * 1024  # above this size a body is counted for its client
MAX_WAITING_BYTES: Final = 64 * 1024  # behind the request under way; then the socket is not read
_SLICE_BYTES: Final = 8 * 1024  # bytes of a chunked body per turn of the loop: chunks of one byte take long
_BLANK_LINES: Final = re.compile(rb"(?:\r\n)+")
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientProtocol(asyncio.Protocol):
    """One connection. At any time it waits for a request, receives one, serves one, or lingers."""

    __slots__ = (
        "_aborted",
        "_advancing",
        "_below",
        "_body",
        "_deadline_s",
        "_drained",
        "_dropped_bytes",
        "_due",
        "_ended",
        "_handler",
        "_held_bytes",
        "_holder",
        "_hot",
        "_lingering",
        "_local",
        "_backlog",
        "_peer",
        "_raw",
        "_reading_paused",
        "_receiving_since_s",
        "_request",
        "_response",
        "_scanned",
        "_scheme",
        "_served_bytes",
        "_waiting_bytes",
        "edge",
        "loop",
        "transport",
        "write_paused",
    )

    def __init__(self, edge: Edge, below: asyncio.Transport | None = None) -> None:
        """`below`: the TCP transport under TLS, which buffers what is written; None: plain."""
        self.edge, self.loop, self._below = edge, edge.loop, below
        self.transport: asyncio.Transport = cast(Any, None)
        self.write_paused = False
        self._drained: asyncio.Event | None = None
        self._raw = b""  # bytes that have come and are not parsed yet
        self._waiting_bytes = 0  # of them, as far as the edge has counted them
        self._scanned = 0  # bytes of an incomplete head that were searched for its end
        self._request: Request | None = None
        self._response: Response | None = None
        self._handler: Handler | None = None
        self._body: Body | None = None  # while it is not complete
        self._hot = self._advancing = self._lingering = self._ended = self._reading_paused = self._aborted = False
        self._due = False  # the next turn of the loop goes on with `_raw`
        self._served_bytes = 0  # size of the body whose answer is not complete
        self._held_bytes, self._holder = 0, ""  # of a large body, and the client that the edge counts them for
        self._dropped_bytes = 0  # while lingering
        self._receiving_since_s = math.inf  # when the first byte of the incomplete request came
        self._deadline_s = math.inf
        self._backlog: tuple[float, int] | None = None  # a time, and the bytes that the client had not read then

    @property
    def date_line(self) -> bytes:
        """The present Date field."""
        return self.edge.date_line

    @property
    def receiving(self) -> bool:
        """Whether the request under way is incomplete."""
        return self._request is not None

    # -- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: its first request must come."""
        self.transport = cast(asyncio.Transport, transport)
        self._peer = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        self._scheme = "https" if transport.get_extra_info("sslcontext") is not None else "http"
        self._deadline_s = self.loop.time() + self.edge.limits.receive_timeout_s
        if not self.edge.join(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.edge.leave(self)
        incomplete = self._request is not None
        response, handler = self._response, self._handler
        self._forget_request()
        self._response, self._raw = None, b""
        self._count_waiting()
        self._forget_body()
        self._wake_writers()
        if response is not None:
            response.lost()
        if incomplete and handler is not None:
            handler.abandoned()

    def eof_received(self) -> bool:
        """The client has ended its side; returns whether the connection stays open for writing."""
        self._ended = True
        if self._hot and self._response is not None and self._request is None:
            self.abort()  # `close` would wait for a client that no longer reads, and for the end of TLS
            return False
        if self._lingering and self._response is None:
            return False
        self._advance()
        return self._scheme == "http" and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if not self._lingering:
            self._raw = self._raw + data if self._raw else data
            self._advance()
            return
        self._dropped_bytes += len(data)
        if self._dropped_bytes > MAX_DROPPED_BYTES:
            self.abort()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.write_paused = True
        self._drained = asyncio.Event()
        if self._response is not None:
            self._response.forbid()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._backlog = None
        self._wake_writers()
        if self._response is not None:
            self._response.allow()
        else:
            self._advance()

    async def drained(self) -> None:
        """Wait until more may be written, or the connection is lost."""
        if self._drained is not None:
            await self._drained.wait()

    def _wake_writers(self) -> None:
        self.write_paused = False
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    # -- a request comes in

    def _advance(self) -> None:
        """Parse what has come, up to the end of one request: the next one waits until that is answered."""
        if self._advancing or self._lingering or self.transport.is_closing():
            return
        self._advancing = True
        if self._waiting_bytes:  # what becomes part of a body is counted there
            self.edge.incoming_bytes -= self._waiting_bytes
            self._waiting_bytes = 0
        try:
            while self._raw and not self._due and not self.transport.is_closing():
                try:
                    if self._request is not None:
                        self._take_body(self._request)
                        break
                    if self._response is not None or self.write_paused or not self._take_head():
                        break
                except BalanceRouteError as error:
                    self._refuse(error)
                    self._advance_soon()  # one read may hold thousands of requests that are refused
        finally:
            self._advancing = False
        if not self.transport.is_closing():
            self._await_the_rest()

    def _advance_soon(self) -> None:
        """Let others have a turn of the loop before this connection goes on."""
        self._due = True
        self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._due = False
        self._advance()

    def _await_the_rest(self) -> None:
        """Set an incomplete request's deadline, end one whose client has left, and stop reading if too much waits."""
        receiving = self._request is not None
        if self._response is None and not self.write_paused:
            receiving = bool(self._raw)
            if self._ended and not self._lingering and not self._due:
                if receiving:
                    self._cut_short()
                else:
                    self.close()
                return
        elif receiving and self._ended and (self._hot or not self._raw):  # else there are slices of a chunked body left
            self._cut_short()
            return
        if receiving and self._receiving_since_s == math.inf:
            self._receiving_since_s = self.loop.time()
            self._deadline_s = self._receiving_since_s + self.edge.limits.receive_timeout_s
        if self._raw:
            self._keep_waiting()
        elif self._reading_paused:
            self._read_on()

    def _keep_waiting(self) -> None:
        """Have bytes wait that cannot be parsed yet, if they may."""
        self._count_waiting()
        many = len(self._raw) > MAX_WAITING_BYTES
        if self._request is None:
            try:
                self.edge.check_incoming_bytes()
            except EdgeFull as error:
                self._make_room(error)
                return
            if many and self._hot and self._response is not None:
                # drop it: without reading, a client that leaves is not noticed and keeps its decode slot
                self._drop_the_rest()
                return
        if many and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        elif not many and self._reading_paused:
            self._read_on()

    def _make_room(self, full: EdgeFull) -> None:
        """The router has no room for the bytes that wait here."""
        if self._response is not None:
            self._drop_the_rest()
        elif self.write_paused:
            self._linger()
        else:
            self._refuse(full)

    def _drop_the_rest(self) -> None:
        """The answer under way is the last: what comes behind its request is read and dropped."""
        assert self._response is not None
        self._response.keep_alive = False
        self._discard_input()

    def _discard_input(self) -> None:
        """Drop what has come and what will."""
        self._lingering, self._raw = True, b""
        self._count_waiting()
        if self._reading_paused:
            self._read_on()

    def _read_on(self) -> None:
        self._reading_paused = False
        self.transport.resume_reading()

    def _count_waiting(self) -> None:
        """Have the edge count the bytes that wait."""
        waiting = len(self._raw)
        if waiting != self._waiting_bytes:
            self.edge.incoming_bytes += waiting - self._waiting_bytes
            self._waiting_bytes = waiting

    def _take_head(self) -> bool:
        """Take a head, if one has come whole; returns whether it has. Raises: BalanceRouteError: it is refused."""
        raw = self._raw
        if not self._scanned and (blank := _BLANK_LINES.match(raw)):
            raw = self._raw = raw[blank.end() :]  # some clients send a blank line after a body (RFC 9112 section 2.2)
        end = raw.find(b"\r\n\r\n", self._scanned) + 4
        if end < 4:
            check_beginning(raw, self._scanned)
            self._scanned = max(0, len(raw) - 3)
            return False
        request = parse_head(raw[:end])
        self._raw, self._scanned = raw[end:], 0
        self._open(request)
        return True

    def _open(self, request: Request) -> None:
        """Find the handler of a request whose head has come, and begin with its body.

        Raises: BalanceRouteError: it may not be served.
        """
        edge = self.edge
        request.peer, request.local, request.scheme = self._peer, self._local, self._scheme
        response = Response(
            self,
            head_only=request.method == "HEAD",
            http_1_0=request.http_1_0,
            keep_alive=request.keep_alive and not edge.site.leaving,
        )
        route = edge.site.hot.get(request.path) if request.method == "POST" else None
        self._hot = route is not None
        handler: Handler
        if route is not None:
            handler = route(request, response)
        else:
            handler = AsgiHandler(edge.site, edge.app_state, request, response, self._send_continue)
        self._request, self._response, self._handler = request, response, handler
        edge.site.gate(request)
        edge.check_place(self, request.method)
        handler.check()
        length, limit = request.length, edge.limits.max_body_bytes
        if request.body_limit_bytes is not None:
            limit = min(limit, request.body_limit_bytes)
        if self._hot and length and length <= len(self._raw) and length <= LARGE_BODY_BYTES and length <= limit:
            return self._take_whole(request, length)
        if length != 0:
            self._body = ChunkedBody(limit) if length is None else SizedBody(length, limit)
        if not self._hot:
            self._serve(handler, response)
        if length == 0:
            self._complete(request)
        elif self._hot and not self._raw:
            self._send_continue()

    def _send_continue(self) -> None:
        """Send 100 Continue to a client that waits for it before it sends the body."""
        if self._request is not None and self._request.expects_continue:
            self._request.expects_continue = False
            if not self._body or not self._body.size:
                self.transport.write(_CONTINUE)

    def _take_whole(self, request: Request, length: int) -> None:
        """Take a small body that has come with its head. Raises: EdgeFull."""
        edge = self.edge
        edge.check_held_bytes(more_bytes=length)
        request.body, self._raw = self._raw[:length], self._raw[length:]
        self._served_bytes = length
        edge.served_bytes += length
        self._complete(request)

    def _take_body(self, request: Request) -> None:
        """Take the part of the body that has come. Raises: BalanceRouteError: it may not be served."""
        body, edge = self._body, self.edge
        assert body is not None
        before = body.size
        try:
            if request.length is None and len(self._raw) > _SLICE_BYTES:
                rest = body.feed(self._raw[:_SLICE_BYTES])
                self._raw = rest + self._raw[_SLICE_BYTES:]
                self._advance_soon()
            else:
                self._raw = body.feed(self._raw)
        finally:  # a body that is refused has kept bytes as well, which `_forget_request` subtracts
            edge.incoming_bytes += body.size - before
            if body.size > LARGE_BODY_BYTES:
                self._hold(body.size, request)
        if not body.complete:
            edge.check_incoming_bytes(self._holder)
            return
        edge.check_held_bytes(self._holder)
        request.body = body.whole()
        self._served_bytes = body.size
        edge.served_bytes += body.size
        self._complete(request)

    # -- and is served

    def _complete(self, request: Request) -> None:
        """The body has come whole: have the request served."""
        handler, response = self._handler, self._response
        assert handler is not None and response is not None
        if self._hot and self._ended:  # while it waited for the answers before it: its client has left
            self.close()
            return
        request.complete = True
        self._forget_request()
        self._deadline_s = math.inf
        self.edge.waiting.pop(self, None)
        if isinstance(handler, AsgiHandler):
            handler.body_has_come()
        else:
            self._serve(handler, response)

    def _serve(self, handler: Handler, response: Response) -> None:
        """Run the handler in its own task."""
        task = self.loop.create_task(handler.run())
        self.edge.tasks.add(task)
        task.add_done_callback(partial(self._ran, response))

    def _forget_request(self) -> None:
        """No request is being received any more: it is complete, refused or cut short."""
        if self._body is not None:
            self.edge.incoming_bytes -= self._body.size
        self._request = self._handler = self._body = None
        self._receiving_since_s = math.inf

    def keep(self, more_bytes: int, request: Request) -> None:
        """Count bytes that are kept of the answer under way like those of its request. Raises: EdgeFull."""
        self._served_bytes += more_bytes
        self.edge.served_bytes += more_bytes
        self._hold(self._held_bytes + more_bytes, request)
        if more_bytes > 0:
            self.edge.check_held_bytes(self._holder)

    def _forget_body(self) -> None:
        """Subtract the last complete request and its answer, which nobody needs any more, from the edge's counts."""
        self.edge.served_bytes -= self._served_bytes
        self._served_bytes = 0
        if self._held_bytes:
            self.edge.hold(self._holder, -self._held_bytes)
        self._held_bytes, self._holder = 0, ""

    def _hold(self, size: int, request: Request) -> None:
        """Count `size` bytes in all, of a large body and of its answer, for the client that sends it."""
        self._holder = self._holder or request.holder or holder_of(self._peer[0] if self._peer else "")
        self.edge.hold(self._holder, size - self._held_bytes)
        self._held_bytes = size

    def _ran(self, response: Response, task: "asyncio.Task[None]") -> None:
        """The handler's task has ended: end a response that it left incomplete."""
        self.edge.tasks.discard(task)
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            log.error("internal error", exc_info=task.exception(), extra={"where": "client request"})
        if response.complete or response.gone:
            return
        if response.started or task.cancelled():
            response.break_off()
        else:
            response.keep_alive = False
            response.refuse(InvariantError(INTERNAL_ERROR))

    def response_done(self, keep_alive: bool) -> None:
        """The response is complete: go on with the next request, or end the connection."""
        self._response = None
        self._forget_body()
        nothing_more = self._request is None and not (self._raw or self._lingering)
        if self._request is not None:  # an application may answer before the body is complete
            self._forget_request()
        if not keep_alive:
            if self._below is not None and nothing_more:
                self.close()  # only the end of TLS shows the client that nothing more comes
            else:
                self._linger()
            return
        self._deadline_s = self.loop.time() + self.edge.limits.keep_alive_s
        self.edge.waiting[self] = None
        if self._raw or self._ended:
            self._advance()

    def _refuse(self, error: BalanceRouteError, counted: bool = True) -> None:
        """Answer bytes that are no request, or a request that may not be served, with an error.

        If the body is complete, the connection continues, unless the router has no room. Otherwise it ends, because the
        start of the next request is unknown.
        """
        handler, response, request = self._handler, self._response, self._request
        if counted and (reason := reason_of(error)):
            self.edge.site.refused(reason)
        if response is None:
            response = self._response = Response(self, head_only=False, http_1_0=False, keep_alive=False)
            if is_messages_path(path_asked(self._raw)):
                response.refusal = message_refusal
        length = None if request is None or self._body is not None else request.length
        if length is not None and len(self._raw) >= length and not isinstance(error, EdgeFull):
            self._raw = self._raw[length:]
        else:
            response.keep_alive = False
        self._forget_request()
        self.edge.waiting.pop(self, None)
        if handler is not None:
            handler.refuse(error)
        elif not response.started:
            name = id_of(request, self._raw)
            fields = {"request": name.decode(), "peer": self._peer[0] if self._peer else "", "error": str(error)}
            log.info("no request", extra=fields)
            response.refuse(error, [(b"x-request-id", name)])
        if not response.complete:
            response.break_off()

    def _cut_short(self) -> None:
        """Handle a client that has ended its side inside a request: it has left, or gets an error."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.abandoned()
        self._refuse(InvalidRequest("The connection ended inside the request."), counted=False)

    # -- ends

    @property
    def unread_bytes(self) -> int:
        """Bytes that are written and that the client's socket has not taken; none after `abort`, which drops them."""
        if self._aborted:  # uvloop counts them for another turn
            return 0
        below = 0 if self._below is None else self._below.get_write_buffer_size()
        return below + self.transport.get_write_buffer_size()

    def look(self, now: float) -> None:
        """End the connection of a client that sends or reads too slowly; called by `Edge`."""
        response = self._response
        if self._below is not None and self._below.is_closing() and response is not None and not response.complete:
            self.abort()  # TCP has ended but TLS has not: TLS reports that only when the client has read everything
            return
        if now >= self._deadline_s:
            self._late(now)
            response = self._response
        waiting = self.unread_bytes
        if not waiting or (response is not None and not response.complete and not self.write_paused):
            self._backlog = None  # the client has nothing to read, or reads events in time
            return
        if self._backlog is None:
            self._backlog = (now, waiting)
        since_s, before = self._backlog
        limits = self.edge.limits
        if now - since_s >= limits.stall_timeout_s:
            if before - waiting < limits.min_rate_bytes_per_s * (now - since_s):
                self.abort()
            self._backlog = (now, waiting)

    def _late(self, now: float) -> None:
        """Handle a deadline: of lingering, of an idle connection, or of an incomplete request."""
        if self._receiving_since_s == math.inf and self.unread_bytes:
            self._deadline_s = now + LINGER_S  # the client still reads its last answer, fast enough for `look`
        elif self._lingering and self._below is None:
            self.abort()
        elif self._receiving_since_s == math.inf:
            self.close()
        else:
            limits = self.edge.limits
            received = 0 if self._body is None else self._body.size
            patience_s = limits.receive_timeout_s + received / limits.min_rate_bytes_per_s
            self._deadline_s = self._receiving_since_s + patience_s
            if now >= self._deadline_s:
                self._refuse(InvalidRequest(f"The request was not sent within {patience_s:.3g} s.", status=408))

    def give_way(self) -> None:
        """End this connection, which has no complete request, because another client needs its place."""
        self.edge.waiting.pop(self, None)
        if self._lingering or self.unread_bytes:
            self.abort()
        else:
            self.close()

    def shutdown(self) -> None:
        """The server stops: the response under way is the connection's last."""
        if self._response is None:
            self.close()
        else:
            self._response.keep_alive = False

    def close(self) -> None:
        """Close once everything is written."""
        self.edge.waiting.pop(self, None)
        if self._below is not None and self.unread_bytes:  # TLS would not wait until everything is read
            self._discard_input()
            self._receiving_since_s = math.inf
            self._deadline_s = self.loop.time()
            return
        self._deadline_s = math.inf
        self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.edge.waiting.pop(self, None)
        self._aborted = True
        self._deadline_s = math.inf
        self.transport.abort()

    def _linger(self) -> None:
        """The last answer is written: let the client read it before the connection closes."""
        if self._ended or self.transport.is_closing():
            self.close()
            return
        self._discard_input()
        self._deadline_s = self.loop.time() + LINGER_S
        self.edge.waiting[self] = None
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _address(name: object) -> tuple[str, int] | None:
    """Host and port of a socket's address; None: it has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
