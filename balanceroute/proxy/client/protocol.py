"""One client connection: bytes in, requests one after the other, their answers out.

    data_received -> Inbox.take_head -> Site.gate, Handler.check -> Turn.feed -> Handler.run -> Response
                         one request at a time; what comes after it waits unparsed

**Who serves.** The hot routes have their own handlers; every other route is served by ASGI (`edge.Site`). A completion
is served when its body is complete. An ASGI application is called at once, and gets the body when it is complete. To
refuse a request by its head alone, before a byte of its body is read (an API key, a drain), raise from `Site.gate` or
`Handler.check`, or answer from an ASGI application that has not asked for the body: then the body is dropped as it
comes.

**State.** `Turn` is the request under way, from its head to the end of its answer; `Inbox` what has come and is not
parsed; `Unread` what is written and not read. `Awaited` says what the client has to do, and until when.

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
from enum import Enum, auto
from functools import partial
from typing import Any, Final, cast

from balanceroute.errors import BalanceRouteError, EdgeFull, InvalidRequest, InvariantError
from balanceroute.proxy.client.asgi import AsgiHandler
from balanceroute.proxy.client.edge import Edge, Handler
from balanceroute.proxy.client.head import Request, path_asked
from balanceroute.proxy.client.inbox import Inbox
from balanceroute.proxy.client.labels import id_of, reason_of
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.client.turn import LARGE_BODY_BYTES, Turn
from balanceroute.proxy.client.unread import Unread
from balanceroute.proxy.wire.message_errors import is_messages_path, message_refusal
from balanceroute.proxy.wire.responses import INTERNAL_ERROR

log = logging.getLogger(__name__)

LINGER_S: Final = 2.0
MAX_DROPPED_BYTES: Final = 64 * 2**20  # while the connection lingers; twice the largest body by default
_SLICE_BYTES: Final = 8 * 1024  # bytes of a chunked body per turn of the loop: chunks of one byte take long
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Awaited(Enum):
    """What a connection waits for its client to do, each within a time.

        REQUEST -> REST -> NOTHING -> REQUEST    for each request, without REST where it comes in one read
        END                                      behind the last answer; or the connection closes at once

    While it waits for anything, `Edge` may close it to make room for another client (`Edge.waiting`).
    """

    REQUEST = auto()  # the first byte of a request; in vain: the connection closes
    REST = auto()  # what is left of a request; in vain: 408
    NOTHING = auto()  # a request is served, or the connection closes
    END = auto()  # that the client ends its side, after the last answer; in vain: the connection is aborted


REQUEST: Final = Awaited.REQUEST
REST: Final = Awaited.REST
NOTHING: Final = Awaited.NOTHING
END: Final = Awaited.END


class ClientProtocol(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_awaited",
        "_below",
        "_deadline_s",
        "_drained",
        "_due",
        "_ended",
        "_inbox",
        "_local",
        "_peer",
        "_since_s",
        "_turn",
        "_unread",
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
        self._turn: Turn | None = None  # from a request's head to the end of its answer
        self._ended = False  # the client has ended its side
        self._due = False  # the next turn of the loop goes on with what has come
        self._awaited, self._since_s, self._deadline_s = NOTHING, 0.0, math.inf

    @property
    def date_line(self) -> bytes:
        """The present Date field."""
        return self.edge.date_line

    @property
    def receiving(self) -> bool:
        """Whether the request under way is incomplete."""
        return self._turn is not None and self._turn.receiving

    # -- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: its first request must come."""
        self.transport = cast(asyncio.Transport, transport)
        self._peer = _address(transport.get_extra_info("peername"))
        self._local = _address(transport.get_extra_info("sockname"))
        self._inbox = Inbox(self.edge, self.transport)
        self._unread = Unread(self.transport, self._below)
        if self.edge.join(self):
            self._await(REQUEST, self.edge.limits.receive_timeout_s)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.edge.leave(self)
        self._inbox.forget()
        self._wake_writers()
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()
            turn.response.lost()
            if turn.receiving:
                turn.handler.abandoned()

    def eof_received(self) -> bool:
        """The client has ended its side; returns whether the connection stays open for writing."""
        self._ended = True
        turn = self._turn
        if turn is not None and turn.hot and not turn.receiving:
            self.abort()  # `close` would wait for a client that no longer reads, and for the end of TLS
            return False
        if turn is None and self._inbox.dropping:
            return False
        self._advance()
        return self._below is None and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        inbox = self._inbox
        if not inbox.dropping:
            inbox.raw = inbox.raw + data if inbox.raw else data
            self._advance()
            return
        inbox.dropped_bytes += len(data)
        if inbox.dropped_bytes > MAX_DROPPED_BYTES:
            self.abort()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.write_paused = True
        self._drained = asyncio.Event()
        if self._turn is not None:
            self._turn.response.forbid()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._unread.in_time()
        self._wake_writers()
        if self._turn is not None:
            self._turn.response.allow()
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
        inbox = self._inbox
        if inbox.dropping or self.transport.is_closing():
            return
        if inbox.counted_bytes:  # what becomes part of a body is counted there
            inbox.count(0)
        while inbox.raw and not self._due and not self.transport.is_closing():
            turn = self._turn
            try:
                if turn is not None:
                    if turn.receiving:
                        self._take_body(turn)
                    break
                request = None if self.write_paused else inbox.take_head()
                if request is None:
                    break
                self._open(request)
            except BalanceRouteError as error:
                # one read may hold thousands of these; and no more is parsed within `_refuse`, whose answer ends here
                self._advance_soon()
                self._refuse(error)
        if not inbox.dropping and not self.transport.is_closing():
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
        turn, inbox = self._turn, self._inbox
        between = turn is None and not self.write_paused
        incomplete = bool(inbox.raw) if between else self.receiving
        if self._ended and (not self._due or (turn is not None and turn.hot)):
            if incomplete:
                self._cut_short()
                return
            if between:
                self.close()
                return
        if incomplete and self._awaited is not REST:
            self._await(REST, self.edge.limits.receive_timeout_s)
        if inbox.raw:
            self._keep_waiting()
        elif inbox.paused:
            inbox.bound()

    def _keep_waiting(self) -> None:
        """Have bytes wait that cannot be parsed yet, if they may."""
        turn, inbox = self._turn, self._inbox
        inbox.count(len(inbox.raw))
        if not self.receiving:
            try:
                self.edge.check_incoming_bytes()
            except EdgeFull as error:
                self._make_room(error)
                return
            if turn is not None and turn.hot and inbox.many:
                # drop it: without reading, a client that leaves is not noticed and keeps its decode slot
                self._drop_the_rest(turn)
                return
        inbox.bound()

    def _make_room(self, full: EdgeFull) -> None:
        """The router has no room for the bytes that wait here."""
        if self._turn is not None:
            self._drop_the_rest(self._turn)
        elif self.write_paused:
            self._linger()
        else:
            self._refuse(full)

    def _drop_the_rest(self, turn: Turn) -> None:
        """The answer under way is the last: what comes behind its request is read and dropped."""
        turn.response.keep_alive = False
        self._inbox.drop()

    def _open(self, request: Request) -> None:
        """Find the handler of a request whose head has come, and begin with its body.

        Raises: BalanceRouteError: it may not be served.
        """
        edge, inbox = self.edge, self._inbox
        request.peer, request.local = self._peer, self._local
        request.scheme = "http" if self._below is None else "https"
        response = Response(
            self,
            head_only=request.method == "HEAD",
            http_1_0=request.http_1_0,
            keep_alive=request.keep_alive and not edge.site.leaving,
        )
        route = edge.site.hot.get(request.path) if request.method == "POST" else None
        handler: Handler
        if route is not None:
            handler = route(request, response)
        else:
            handler = AsgiHandler(edge.site, edge.app_state, request, response, self._send_continue)
        turn = self._turn = Turn(edge, request, response, handler, hot=route is not None)
        edge.site.gate(request)
        if not request.has_room:
            edge.check_place(self, request.method)
        handler.check()
        length, limit = request.length, edge.limits.max_body_bytes
        if request.body_limit_bytes is not None:
            limit = min(limit, request.body_limit_bytes)
        if turn.hot and length and length <= len(inbox.raw) and length <= LARGE_BODY_BYTES and length <= limit:
            turn.take_whole(inbox.raw[:length])
            inbox.raw = inbox.raw[length:]
            self._complete(turn)
            return
        if length != 0:
            turn.expect_body(limit)
        if not turn.hot:
            self._serve(turn)
        if length == 0:
            self._complete(turn)
        elif turn.hot and not inbox.raw:
            self._send_continue()

    def _send_continue(self) -> None:
        """Send 100 Continue to a client that waits for it before it sends the body."""
        turn = self._turn
        if turn is not None and turn.receiving and turn.request.expects_continue:
            turn.request.expects_continue = False
            if not turn.incoming_bytes:
                self.transport.write(_CONTINUE)

    def _take_body(self, turn: Turn) -> None:
        """Take the part of the body that has come. Raises: BalanceRouteError: it may not be served."""
        inbox = self._inbox
        if turn.request.length is None and len(inbox.raw) > _SLICE_BYTES:
            inbox.raw = turn.feed(inbox.raw[:_SLICE_BYTES]) + inbox.raw[_SLICE_BYTES:]
            self._advance_soon()
        else:
            inbox.raw = turn.feed(inbox.raw)
        if turn.take_complete_body():
            self._complete(turn)

    # -- and is served

    def _complete(self, turn: Turn) -> None:
        """The body has come whole: have the request served."""
        if turn.hot and self._ended:  # while it waited for the answers before it: its client has left
            self.close()
            return
        turn.request.complete = True
        turn.end_receiving()
        self._await(NOTHING)
        if isinstance(turn.handler, AsgiHandler):
            turn.handler.body_has_come()
        else:
            self._serve(turn)

    def _serve(self, turn: Turn) -> None:
        """Run the handler in its own task."""
        task = self.loop.create_task(turn.handler.run())
        self.edge.tasks.add(task)
        task.add_done_callback(partial(self._ran, turn.response))

    def _ran(self, response: Response, task: "asyncio.Task[None]") -> None:
        """The handler's task has ended: end a response that it left incomplete."""
        self.edge.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("internal error", exc_info=task.exception(), extra={"where": "client request"})
        if response.complete or response.gone:
            return
        if response.started or task.cancelled():
            response.break_off()
        else:
            response.keep_alive = False
            response.refuse(InvariantError(INTERNAL_ERROR))

    def keep(self, more_bytes: int) -> None:
        """Count bytes that are kept of the answer under way like those of its request. Raises: EdgeFull."""
        assert self._turn is not None
        self._turn.keep(more_bytes)

    def response_done(self, keep_alive: bool) -> None:
        """The response is complete: go on with the next request, or end the connection."""
        turn, inbox, nothing_more = self._turn, self._inbox, True
        if turn is not None:  # else it answered bytes that are no request
            turn.release()
            nothing_more = not turn.receiving  # an application may answer before the body is complete
            self._turn = None
        if keep_alive:
            self._await(REQUEST, self.edge.limits.keep_alive_s)
            if inbox.raw or self._ended:
                self._advance()
        elif self._below is not None and nothing_more and not (inbox.raw or inbox.dropping):
            self.close()  # only the end of TLS shows the client that nothing more comes
        else:
            self._linger()

    # -- or refused

    def _refuse(self, error: BalanceRouteError) -> None:
        """Answer bytes that are no request, or a request that may not be served, with an error.

        If the body is complete, the connection continues, unless the router has no room. Otherwise it ends, because the
        start of the next request is unknown.
        """
        if reason := reason_of(error):
            self.edge.site.refused(reason)
        turn, inbox = self._turn, self._inbox
        if turn is None:
            self._refuse_bytes(error)
            return
        length = turn.request.length if turn.body is None else None
        if length is not None and len(inbox.raw) >= length and not isinstance(error, EdgeFull):
            inbox.raw = inbox.raw[length:]
        else:
            turn.response.keep_alive = False
        turn.end_receiving()
        self._await(NOTHING)
        turn.handler.refuse(error)
        if not turn.response.complete:
            turn.response.break_off()

    def _cut_short(self) -> None:
        """Handle a client that has ended its side inside a request: it has left, or gets an error."""
        error, turn = InvalidRequest("The connection ended inside the request."), self._turn
        if turn is None:
            self._refuse_bytes(error)
            return
        turn.response.keep_alive = False
        turn.handler.abandoned()
        turn.end_receiving()
        self._await(NOTHING)
        if turn.response.started:
            turn.response.break_off()
        else:
            self._respond_unserved(error, turn.response, turn.request)

    def _refuse_bytes(self, error: BalanceRouteError) -> None:
        """Answer bytes that are no request, or only the beginning of one."""
        self._await(NOTHING)
        response = Response(self, head_only=False, http_1_0=False, keep_alive=False)
        if is_messages_path(path_asked(self._inbox.raw)):
            response.refusal = message_refusal
        self._respond_unserved(error, response, None)

    def _respond_unserved(self, error: BalanceRouteError, response: Response, request: Request | None) -> None:
        """Answer what no handler answers."""
        name = id_of(request, self._inbox.raw)
        fields = {"request": name.decode(), "peer": self._peer[0] if self._peer else "", "error": str(error)}
        log.info("no request", extra=fields)
        response.refuse(error, [(b"x-request-id", name)])

    # -- time

    def _await(self, awaited: Awaited, within_s: float = math.inf) -> None:
        """Wait for this from now on: the one place where it changes."""
        self._awaited, self._since_s = awaited, self.loop.time()
        self._deadline_s = self._since_s + within_s
        if awaited is NOTHING:
            self.edge.waiting.pop(self, None)
        else:
            self.edge.waiting[self] = None

    @property
    def unread_bytes(self) -> int:
        """Bytes that are written and that the client's socket has not taken; none after `abort`, which drops them."""
        return self._unread.size

    def look(self, now: float) -> None:
        """End the connection of a client that sends or reads too slowly; called by `Edge`."""
        if self._below is not None and self._below.is_closing() and self._answering:
            self.abort()  # TCP has ended but TLS has not: TLS reports that only when the client has read everything
            return
        if now >= self._deadline_s:
            self._late(now)
        if self._answering and not self.write_paused:
            self._unread.in_time()  # the client reads events in time
        elif self._unread.stalled(now, self.edge.limits):
            self.abort()

    @property
    def _answering(self) -> bool:
        return self._turn is not None and not self._turn.response.complete

    def _late(self, now: float) -> None:
        """What is awaited has not come in time."""
        if self._awaited is REST:
            limits, received_bytes = self.edge.limits, 0 if self._turn is None else self._turn.incoming_bytes
            patience_s = limits.receive_timeout_s + received_bytes / limits.min_rate_bytes_per_s
            self._deadline_s = self._since_s + patience_s
            if now >= self._deadline_s:
                self._refuse(InvalidRequest(f"The request was not sent within {patience_s:.3g} s.", status=408))
        elif self.unread_bytes:
            self._deadline_s = now + LINGER_S  # the client still reads its last answer, fast enough for `look`
        elif self._awaited is END and self._below is None:
            self.abort()
        else:
            self.close()

    # -- ends

    def give_way(self) -> None:
        """End this connection, which has no complete request, because another client needs its place."""
        if self._awaited is END or self.unread_bytes:
            self.abort()
        else:
            self.close()

    def shutdown(self) -> None:
        """The server stops: the response under way is the connection's last."""
        if self._turn is None:
            self.close()
        else:
            self._turn.response.keep_alive = False

    def close(self) -> None:
        """Close once everything is written."""
        if self._below is not None and self.unread_bytes:  # TLS would not wait until everything is read
            self._inbox.drop()
            self._await(NOTHING, within_s=0.0)  # but look again
        else:
            self._await(NOTHING)
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._unread.drop()
        self._await(NOTHING)
        self.transport.abort()

    def _linger(self) -> None:
        """The last answer is written: let the client read it before the connection closes."""
        if self._ended or self.transport.is_closing():
            self.close()
            return
        self._inbox.drop()
        self._await(END, LINGER_S)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _address(name: object) -> tuple[str, int] | None:
    """Host and port of a socket's address; None: it has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
