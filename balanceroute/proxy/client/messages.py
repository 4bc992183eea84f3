"""Anthropic's `/v1/messages`: a chat like any other between the two translations of `wire/messages.py` and its answers.

    body -> chat -> Leg -> the chat's events -> MessageOutlet -> the message's events -> client

A stream that says nothing for `PING_S` gets a ping, so that neither the client nor what is between takes it for dead.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from balanceroute.errors import BalanceRouteError, InvariantError
from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.client.fanout import PartAnswer
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.life.outlet import Outlet
from balanceroute.proxy.wire.message_answers import PING, Counts, MessageStream, message_of
from balanceroute.proxy.wire.message_errors import message_error_event, with_message_id
from balanceroute.proxy.wire.messages import parse_messages
from balanceroute.proxy.wire.payloads import ClientRequest
from balanceroute.proxy.wire.responses import SSE_HEADERS, Headers

PING_S: Final = 15.0


class MessagesExchange(Exchange):
    """One `/v1/messages`: from its head to the line in the log. The response's `refusal` is `message_refusal`."""

    __slots__ = ()

    def _parsed(self) -> ClientRequest:
        return parse_messages(self._request.body)

    def _outlet_for(self, request: ClientRequest) -> Outlet:
        if not request.stream:
            return PartAnswer(request)
        stream = MessageStream(self._message_id, request.model, self._counts)
        headers = [*SSE_HEADERS, *self._own_headers()]
        return MessageOutlet(self._response, headers, stream, self._s.loop)

    def _whole(self, answer: bytes) -> bytes:
        return message_of(answer, self._message_id)

    def _error_event(self, error: BalanceRouteError) -> bytes:
        return message_error_event(error, self._told_id)

    def _own_headers(self) -> Headers:
        return with_message_id(super()._own_headers())

    def _counts(self) -> Counts:
        answer = self._legs[0].answer
        return Counts(answer.prompt_tokens, answer.cached_tokens, answer.scanner.tokens)

    @property
    def _message_id(self) -> str:
        assert self._head is not None
        return f"msg_{self._head.request_id}"

    @property
    def _told_id(self) -> str:
        return "" if self._head is None else self._head.told_id.decode()


class MessageOutlet:
    """A leg's answer as a stream of a message's events; events are translated only when the client takes them."""

    __slots__ = (
        "_headers",
        "_loop",
        "_quiet",
        "_response",
        "_timer",
        "_translate",
        "drained",
        "ends_response",
        "started",
    )

    def __init__(
        self, response: Response, headers: Headers, stream: MessageStream, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._response, self._headers, self._loop = response, headers, loop
        self._translate: Callable[[bytes], bytes] = stream.feed
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = False  # nothing was written since the timer was set
        self.drained = response.drained
        self.started = False
        self.ends_response = True

    def start(self) -> None:
        """The 200: a decoder has said its first word."""
        self.started = True
        self._response.start(200, self._headers)
        self._timer = self._loop.call_later(PING_S, self._look)

    def write(self, body: bytes, /) -> bool:
        """Translate and send, unless the client's socket is full."""
        if self._response.full:
            return False
        out = self._translate(body)
        self._quiet = False
        return not out or self._response.write(out)

    def end(self, body: bytes, /) -> None:
        """The last events."""
        if self._timer is not None:
            self._timer.cancel()
        self._response.end(self._translate(body))

    def whole(self, body: bytes) -> None:
        """A stream never comes in one piece."""
        raise InvariantError("an unstreamed answer for a client that streams")

    def forget(self) -> bool:
        """Nothing is kept: what has come has been sent."""
        return not self.started

    def _look(self) -> None:
        response = self._response
        if response.complete or response.gone:
            return
        if self._quiet and not response.full:
            response.write(PING)
        self._quiet = True
        self._timer = self._loop.call_later(PING_S, self._look)
