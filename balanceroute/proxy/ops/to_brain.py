"""Operators' routes on a relay: it passes each request on to the brain, which answers.

The relay decides who may ask, because it knows the client. The brain's socket is open to the router's user only, and to
other machines with a certificate of the link. While there is no brain, the answer is 503.

No credential for the router is passed on: no admin token, dashboard session or client key. A credential that a caller
sent for the workers is, on routes where the brain calls workers for the relay.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from balanceroute.config.addresses import host_in_url
from balanceroute.errors import ConnectFailed, NoHealthyWorkers, UpstreamError, UpstreamTimeout
from balanceroute.proxy.client.asgi import REQUEST_ID
from balanceroute.proxy.link.messages import SILENT_S
from balanceroute.proxy.ops.guard import error_response
from balanceroute.proxy.ops.shared_answer import SharedAnswer
from balanceroute.proxy.perimeter.access import READS
from balanceroute.proxy.workers.reply import Reply
from balanceroute.proxy.workers.upstream import Connections, Upstream

OPEN_S: Final = SILENT_S + 0.5  # for the head of an answer that anybody may ask for: checks and scrapes end soon
READ_S: Final = 10.0  # for that of any other read: to ask four policies what they would do takes seconds
ABSENT_S: Final = 2.0  # the same while this relay has not joined a brain, which may have stopped
CHANGE_S: Final = 300.0  # workers may take 30 s, and a new policy's predictor may read large files
MAX_PAGE_BYTES: Final = 64 * 2**20
TURN_S: Final = 1.0  # for answers under way of the former brain
_OURS: Final = frozenset(  # not passed on: hop-by-hop, set by the relay itself, or credentials
    (
        b"accept-encoding",
        b"authorization",
        b"connection",
        b"content-length",
        b"cookie",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-request-id",
    )
)


def through_socket(path: str) -> Upstream:
    """Connections to the application of a brain on this machine, at this unix socket."""
    return Upstream("http://brain", worker="brain", tier="brain", socket_path=path)


def to_machine(address: tuple[str, int], context: Callable[[], ssl.SSLContext]) -> Upstream:
    """Connections to a brain on another machine."""
    host, port = address
    return Upstream(f"https://{host_in_url(host)}:{port}", worker="brain", tier="brain", ssl_context=context)


class ToBrain:
    """The handler of all routes that the brain answers."""

    def __init__(self, connections: Callable[[], Connections], joined: Callable[[], bool] = lambda: True) -> None:
        """`connections` connects to the application of the leading brain. `joined`: this relay has joined it."""
        self._connections, self._joined = connections, joined
        self._upstream = connections()
        self._former: set[Connections] = set()

    async def answer(self, request: Request, authorization: bool = False) -> Response:
        """Pass the request on, and stream the answer back. `authorization`: also pass on that header, for workers."""
        query: bytes = request.scope["query_string"]
        path = request.scope["raw_path"].decode("latin-1") + ("?" + query.decode("latin-1") if query else "")
        method = "GET" if request.method == "HEAD" else request.method
        timeout_s = self._patience_s(READ_S if request.method in READS else CHANGE_S)
        kept = (b"authorization",) if authorization else ()
        passed = [(name, value) for name, value in request.headers.raw if name not in _OURS or name in kept]
        headers = [*passed, (b"x-request-id", request.scope[REQUEST_ID].encode())]
        try:
            reply = await self._upstream.request(
                method, path, await request.body(), headers, first_byte_timeout_s=timeout_s
            )
        except UpstreamError as error:
            return error_response(_unanswered(method, error))
        response = StreamingResponse(_body(reply), reply.status)
        length = b"content-length"  # the answer is sent with its own length; an answer to HEAD has only that
        response.raw_headers = [(name, value) for name, value in reply.headers if name not in _OURS or name == length]
        return response

    def shared(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """The handler of a route that is open to anybody: the brain is asked once for all who ask together."""
        shared = SharedAnswer(partial(self._whole, path))

        async def answer(request: Request) -> Response:
            return await shared.get()

        return answer

    async def _whole(self, path: str) -> Response:
        try:
            reply = await self._upstream.request("GET", path, first_byte_timeout_s=self._patience_s(OPEN_S))
            body = await reply.read(MAX_PAGE_BYTES)
        except UpstreamError as error:
            raise _unanswered("GET", error) from None
        response = Response(body, reply.status)
        response.raw_headers += [(name, value) for name, value in reply.headers if name not in _OURS]
        return response

    def _patience_s(self, usual_s: float) -> float:
        return usual_s if self._joined() else ABSENT_S

    def switch_brain(self) -> None:
        """Another brain leads: send new requests to it, and wait `TURN_S` at most for answers of the former one."""
        former, self._upstream = self._upstream, self._connections()
        former.drop_idle()
        self._former.add(former)
        asyncio.get_running_loop().call_later(TURN_S, self._leave, former)

    def close(self) -> None:
        """Close every connection."""
        for upstream in (self._upstream, *self._former):
            upstream.close()
        self._former.clear()

    def _leave(self, former: Connections) -> None:
        """End the requests that the former brain has not answered."""
        self._former.discard(former)
        former.close()


def _unanswered(method: str, error: UpstreamError) -> NoHealthyWorkers:
    """The refusal of a request that the brain has not answered."""
    text = "No process decides for this router: no brain can be reached."
    if isinstance(error, UpstreamTimeout):
        text = f"The process that decides for this router (the brain) is late: {error}."
        if method not in READS:
            text += " It may still do as asked."
    elif method not in READS and not (isinstance(error, ConnectFailed) and not error.sent):
        text = "The process that decides for this router (the brain) gave no answer; it may have done as asked."
    return NoHealthyWorkers(text)


async def _body(reply: Reply) -> AsyncIterator[bytes]:
    try:
        while (chunk := await reply.next_chunk()) is not None:
            yield chunk
    finally:
        reply.abort()
