"""Serves Anthropic's `/v1/messages` as a chat, translated by `wire/message_requests.py` and `message_answers.py`.

    body -> chat -> Leg, whose scanner has a MessageStream for its translation -> the message's events -> client

A stream without events for `PING_S` gets a ping, so that neither the client nor a proxy gives it up.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from balanceroute.errors import BalanceRouteError
from balanceroute.proxy.client.exchange import Exchange
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.outlets import StreamOutlet
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.life.outlet import Outlet
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.message_answers import PING, Counts, MessageStream, message_of
from balanceroute.proxy.wire.message_errors import message_error_event, with_message_id
from balanceroute.proxy.wire.message_requests import parse_messages
from balanceroute.proxy.wire.responses import Headers
from balanceroute.proxy.wire.sse import Translation

PING_S: Final = 15.0


class MessagesExchange(Exchange):
    """One `/v1/messages`: from its head to the line in the log. The response's `refusal` is `message_refusal`."""

    __slots__ = ("_outlet",)

    def __init__(self, services: ClientServices, request: Request, response: Response) -> None:
        super().__init__(services, "chat", request, response)
        self._outlet: PingedOutlet | None = None  # of a stream

    def _parsed(self) -> ClientRequest:
        return parse_messages(self._request.body)

    def _outlet_for(self, request: ClientRequest) -> Outlet:
        if not request.stream:
            return super()._outlet_for(request)
        self._outlet = PingedOutlet(self._response, self._own_headers(), self._printed, self._services.loop)
        return self._outlet

    def _translation_of(self, request: ClientRequest) -> Callable[[], Translation] | None:
        if not request.stream:
            return None
        return lambda: MessageStream(self._message_id, request.model, self._counts)

    def _whole(self, answer: bytes) -> bytes:
        return message_of(answer, self._message_id)

    def _error_event(self, error: BalanceRouteError) -> bytes:
        return message_error_event(error, self._head.response_id.decode())

    def _own_headers(self) -> Headers:
        return with_message_id(super()._own_headers())

    def _account(self) -> None:
        """As `Exchange`; also break a reference cycle, which only the garbage collector would free."""
        super()._account()
        self._legs = []
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.stop()

    def _counts(self) -> Counts:
        answer = self._legs[0].answer
        # decode first: the decode worker may answer before the prefiller
        prompt_tokens = answer.prompt_tokens or answer.scanner.prompt_tokens or 0
        return Counts(prompt_tokens, answer.cached_tokens, answer.scanner.tokens)

    def _printed(self) -> int:
        return self._legs[0].answer.scanner.matcher.printed

    @property
    def _message_id(self) -> str:
        return f"msg_{self._head.request_id}"


class PingedOutlet(StreamOutlet):
    """Streams a leg's answer to the client, with a ping after each `PING_S` without events."""

    __slots__ = ("_last", "_loop", "_printed", "_timer")

    def __init__(
        self, response: Response, headers: Headers, printed: Callable[[], int], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`printed` returns how many tokens have had their text sent."""
        super().__init__(response, headers)
        self._printed, self._loop = printed, loop
        self._last = -1  # its last value
        self._timer: asyncio.TimerHandle | None = None
        self.end = self._end

    def start(self) -> None:
        """Send the 200: the decoder's first event has come."""
        super().start()
        self._look()

    def stop(self) -> None:
        """Stop sending pings."""
        if self._timer is not None:
            self._timer.cancel()
        self.end = self._response.end

    def _end(self, body: bytes, /) -> None:
        self.stop()
        self._response.end(body)

    def _look(self) -> None:
        response = self._response
        if response.complete or response.gone:
            return
        if (printed := self._printed()) == self._last and not response.full:
            response.write(PING)
        self._last = printed
        self._timer = self._loop.call_later(PING_S, self._look)
