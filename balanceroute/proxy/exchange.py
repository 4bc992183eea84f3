"""The client's side of a request: its body in, its answer or its error out, and what is told about it at the end.

A plain ASGI application for the two hot routes. The leg (`lifecycle.py`) runs in the task that the server made for the
request; a client that goes away is noticed without a task of its own (`relay.DisconnectWatch`) and cancels that task.
"""

import asyncio
import logging
from typing import Any

from balanceroute.core.types import Outcome, RejectReason
from balanceroute.errors import (
    BalanceRouteError,
    InvalidRequest,
    InvariantError,
    Rejected,
    UpstreamStatus,
)
from balanceroute.proxy.answers import AnswerAssembler
from balanceroute.proxy.intake import ClientGone, Head, Receive, read_body, read_head
from balanceroute.proxy.ledger import rejection
from balanceroute.proxy.lifecycle import ClientStalled, Leg
from balanceroute.proxy.payloads import ClientRequest, Endpoint, parse
from balanceroute.proxy.relay import DisconnectWatch
from balanceroute.proxy.responses import (
    SSE_HEADERS,
    Headers,
    Message,
    Send,
    error_event,
    send_error,
    send_json,
    status_of,
)
from balanceroute.proxy.services import Services
from balanceroute.proxy.sse import StreamEnd

log = logging.getLogger("balanceroute.requests")


class StreamOutlet:
    """A leg's answer as the client's own stream."""

    __slots__ = ("_headers", "_send", "ends_response", "send", "started")

    def __init__(self, send: Send, headers: Headers) -> None:
        self.send = send
        self._send, self._headers = send, headers
        self.started = False
        self.ends_response = True

    async def start(self) -> None:
        """The 200: a decoder has said its first word."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def whole(self, body: bytes) -> None:
        """A stream never comes in one piece."""
        raise InvariantError("an unstreamed answer for a client that streams")


class AnswerOutlet:
    """A leg's answer as one JSON object, kept until it is complete."""

    __slots__ = ("_assembler", "_body", "ends_response", "started")

    def __init__(self, request: ClientRequest) -> None:
        self._assembler = AnswerAssembler(request)
        self._body: bytes | None = None
        self.started = False
        self.ends_response = False

    async def start(self) -> None:
        """Nothing goes to the client yet."""

    async def send(self, message: Message) -> None:
        """Take in events."""
        self._assembler.feed(message["body"])

    async def whole(self, body: bytes) -> None:
        """The answer came unstreamed."""
        self._body = body

    def answer(self, leg: Leg) -> bytes:
        """The complete answer."""
        return self._body if self._body is not None else self._assembler.answer(leg.scanner)


class CompletionsRoute:
    """`POST /v1/completions` or `POST /v1/chat/completions`."""

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._s, self._endpoint = services, endpoint

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        services = self._s
        services.exchanges += 1
        exchange = Exchange(services, self._endpoint, send)
        try:
            await exchange.serve(scope, receive)
        finally:
            services.exchanges -= 1
            exchange.account()


class Exchange:
    """One client request: from its head to the line in the log."""

    __slots__ = (
        "_arrived_s",
        "_endpoint",
        "_gone",
        "_head",
        "_leg",
        "_outcome",
        "_s",
        "_send",
        "_status",
        "_task",
    )

    def __init__(self, services: Services, endpoint: Endpoint, send: Send) -> None:
        self._s, self._endpoint, self._send = services, endpoint, send
        self._arrived_s = services.loop.time()
        self._head: Head | None = None
        self._leg: Leg | None = None
        self._outcome = Outcome.FAILED
        self._status = 0
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    async def serve(self, scope: Any, receive: Receive) -> None:
        """Answer the request, one way or the other."""
        try:
            request = await self._read(scope, receive)
            self._task = asyncio.current_task()
            watch = DisconnectWatch(receive, self._on_gone)
            try:
                await self._answer(request)
            finally:
                watch.close()
        except ClientGone:
            self._outcome = Outcome.CANCELLED
        except BalanceRouteError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if self._outcome is not Outcome.FINISHED:
                self._outcome = Outcome.CANCELLED
            # the cancellation was ours alone: the server's task ends as if the request were over, which it is
            if not self._gone or (self._task is not None and self._task.uncancel() > 0):
                raise

    async def _read(self, scope: Any, receive: Receive) -> ClientRequest:
        config = self._s.config
        limits = config.limits
        key_header, api_key = config.predictor.key_header, config.auth.worker_api_key
        head = self._head = read_head(
            scope["headers"],
            None if key_header is None else key_header.lower().encode(),
            None if api_key is None else api_key.get_secret_value().encode(),
        )
        if self._s.ledger.scheduler.draining:
            raise rejection(RejectReason.DRAINING)
        body = await read_body(receive, limits.max_body_bytes, limits.client_header_timeout_s, head.content_length)
        request = parse(self._endpoint, body)
        if not request.single:
            raise InvalidRequest(
                "One prompt with one answer per request, please: n must be 1 and prompt a single one.",
                param="n" if request.n > 1 else "prompt",
            )
        return request

    async def _answer(self, request: ClientRequest) -> None:
        head, services = self._head, self._s
        assert head is not None
        id_header = (b"x-request-id", (head.client_id or head.request_id).encode())
        outlet: StreamOutlet | AnswerOutlet
        if request.stream:
            outlet = StreamOutlet(self._send, [*SSE_HEADERS, id_header])
        else:
            outlet = AnswerOutlet(request)
        forecasts = services.forecasts
        leg = self._leg = Leg(
            services,
            head.request_id,
            request,
            outlet,
            head.forwarded,
            prompt_key="" if forecasts is None else forecasts.key(request.prompt_key, head.key),
            deadline_s=self._arrived_s + min(head.timeout_s, services.config.limits.request_timeout_s),
        )
        try:
            await leg.run()
        except BalanceRouteError as error:
            if not outlet.started:
                raise
            await self._fail_started(error)
            return
        self._outcome, self._status = Outcome.FINISHED, 200
        if isinstance(outlet, AnswerOutlet):
            await send_json(self._send, 200, outlet.answer(leg), [id_header])
        elif leg.scanner.end is not StreamEnd.DONE:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: BalanceRouteError) -> None:
        """Before the first byte: a status and an error body."""
        self._status = status_of(error)
        self._note(error)
        await send_error(self._send, error)

    async def _fail_started(self, error: BalanceRouteError) -> None:
        """After the first byte: an event that says so and, by returning without a last message, an unclean end."""
        self._status = 200
        self._note(error)
        if isinstance(error, ClientStalled):
            return
        raw = error.body if isinstance(error, UpstreamStatus) and error.body.lstrip().startswith(b"{") else None
        event = error_event(error, raw if raw is not None and b"\n" not in raw else None)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _note(self, error: BalanceRouteError) -> None:
        leg = self._leg
        if isinstance(error, InvariantError):
            self._s.metrics.tasks_failed.inc("request")
            log.error("internal error", exc_info=error, extra={"request": leg.id if leg else ""})
            if self._s.strict:
                raise error
        if leg is not None and leg.outcome in (Outcome.EXPIRED, Outcome.CANCELLED):
            self._outcome = leg.outcome
        elif isinstance(error, Rejected | InvalidRequest) or self._refused(error):
            self._outcome = Outcome.REJECTED
        else:
            self._outcome = Outcome.FAILED

    @staticmethod
    def _refused(error: BalanceRouteError) -> bool:
        return isinstance(error, UpstreamStatus) and error.status < 500 and error.status != 429

    def _on_gone(self) -> None:
        leg = self._leg
        if leg is not None and leg.scanner.end is StreamEnd.DONE:
            return  # servers say so after the last byte as well
        self._gone = True
        if leg is not None:
            leg.abandon()
        elif self._task is not None:
            self._task.cancel()

    def account(self) -> None:
        """The request is over: its counters, its histograms and its one line."""
        metrics, leg, now = self._s.metrics, self._leg, self._s.loop.time()
        metrics.requests.inc(self._outcome.value)
        duration_s = now - self._arrived_s
        tokens = 0
        ttft_s = tpot_s = None
        if leg is not None and leg.prompt_tokens:
            tokens = leg.scanner.tokens
            metrics.tokens.inc(by=tokens)
            metrics.prefill_wait.observe(leg.prefill_wait_s)
            if leg.worker:
                metrics.decode_wait.observe(leg.decode_wait_s)
            if leg.first_token_s:
                ttft_s = leg.first_token_s - self._arrived_s
                metrics.ttft.observe(ttft_s)
                if tokens > 1:
                    tpot_s = (leg.last_token_s - leg.first_token_s) / (tokens - 1)
                    metrics.tpot.observe(tpot_s)
        if self._outcome is Outcome.FINISHED:
            metrics.duration.observe(duration_s)
        if log.isEnabledFor(logging.INFO):
            self._log(leg, tokens, ttft_s, duration_s)

    def _log(self, leg: Leg | None, tokens: int, ttft_s: float | None, duration_s: float) -> None:
        head = self._head
        fields: dict[str, Any] = {
            "request": head.request_id if head is not None else "",
            "outcome": self._outcome.value,
            "status": self._status,
            "duration_s": round(duration_s, 4),
        }
        if head is not None and head.client_id:
            fields["client_request"] = head.client_id
        if leg is not None:
            fields |= {
                "prefiller": leg.prefiller,
                "worker": leg.worker,
                "prefill_wait_s": round(leg.prefill_wait_s, 4),
                "decode_wait_s": round(leg.decode_wait_s, 4),
                "ttft_s": None if ttft_s is None else round(ttft_s, 4),
                "prompt_tokens": leg.prompt_tokens,
                "tokens": tokens,
                "recomputes": leg.recomputes,
            }
        log.info("request", extra=fields)
