"""One request of a connection and its answer, from the request's head to the answer's end; and the bytes it takes.

`Edge` counts these bytes: of a body that is not complete as incoming; of a complete one, with what is kept of its
answer, as served; and above `LARGE_BODY_BYTES` both for their client as well.
"""

from typing import Final

from balanceroute.proxy.client.body import Body, ChunkedBody, SizedBody
from balanceroute.proxy.client.edge import Edge, Handler
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.labels import holder_of
from balanceroute.proxy.client.response import Response

LARGE_BODY_BYTES: Final = 64 * 1024  # above this size a body is counted for its client


class Turn:
    """The request under way.

    Attributes: `hot`: served by a handler of its own, when it is complete; else by ASGI, from its head on. `receiving`:
    it is not complete. `body`: while it is `receiving`; None: there is none, or the head has not been judged yet.
    `incoming_bytes`: of `body`.
    """

    __slots__ = (
        "_edge",
        "_held_bytes",
        "_holder",
        "_served_bytes",
        "body",
        "handler",
        "hot",
        "incoming_bytes",
        "receiving",
        "request",
        "response",
    )

    def __init__(self, edge: Edge, request: Request, response: Response, handler: Handler, *, hot: bool) -> None:
        self._edge = edge
        self.request, self.response, self.handler, self.hot = request, response, handler, hot
        self.receiving = True
        self.body: Body | None = None
        self.incoming_bytes = self._served_bytes = self._held_bytes = 0
        self._holder = ""  # the client that `_held_bytes` are counted for, if they are

    def expect_body(self, limit: int) -> None:
        """Begin with a body of at most `limit` bytes. Raises: InvalidRequest: its length is above that."""
        length = self.request.length
        self.body = ChunkedBody(limit) if length is None else SizedBody(length, limit)

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; returns the rest. Raises: InvalidRequest: it is malformed, or too large."""
        body = self.body
        assert body is not None
        try:
            return body.feed(data)
        finally:  # a body that is refused has kept bytes as well, which `end_receiving` subtracts
            self._edge.incoming_bytes += body.size - self.incoming_bytes
            self.incoming_bytes = body.size
            if body.size > LARGE_BODY_BYTES:
                self._hold(body.size)

    def take_complete_body(self) -> bool:
        """Give the request its body once that has come whole; returns whether it has. Raises: EdgeFull: no room."""
        body = self.body
        assert body is not None
        if not body.complete:
            if not self.request.has_room:
                self._edge.check_incoming_bytes(self._holder)
            return False
        if not self.request.has_room:
            self._edge.check_held_bytes(self._holder)
        self._serve(body.whole())
        return True

    def take_whole(self, body: bytes) -> None:
        """Take a small body that has come at once. Raises: EdgeFull: there is no room for it."""
        self._edge.check_held_bytes(more_bytes=len(body))
        self._serve(body)

    def end_receiving(self) -> None:
        """Nothing of the request is awaited any more: it is complete, or refused."""
        self.receiving, self.body = False, None
        if self.incoming_bytes:
            self._edge.incoming_bytes -= self.incoming_bytes
            self.incoming_bytes = 0

    def keep(self, more_bytes: int) -> None:
        """Count bytes that are kept of the answer like those of the request. Raises: EdgeFull."""
        self._served_bytes += more_bytes
        self._edge.served_bytes += more_bytes
        self._hold(self._held_bytes + more_bytes)
        if more_bytes > 0:
            self._edge.check_held_bytes(self._holder)

    def release(self) -> None:
        """Nobody needs the request and its answer any more: count none of their bytes."""
        edge = self._edge
        if self.incoming_bytes:
            edge.incoming_bytes -= self.incoming_bytes
        edge.served_bytes -= self._served_bytes
        if self._held_bytes:
            edge.hold(self._holder, -self._held_bytes)
        self.incoming_bytes = self._served_bytes = self._held_bytes = 0

    def _serve(self, body: bytes) -> None:
        self.request.body = body
        self._served_bytes = len(body)
        self._edge.served_bytes += len(body)

    def _hold(self, size: int) -> None:
        """Count `size` bytes in all, of a large body and of its answer, for the client that sends it."""
        peer = self.request.peer
        self._holder = self._holder or self.request.holder or holder_of(peer[0] if peer else "")
        self._edge.hold(self._holder, size - self._held_bytes)
        self._held_bytes = size
