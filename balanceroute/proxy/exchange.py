"""The client's side of a request: its body in, its answer or its error out, and what is told about it at the end.

A plain ASGI application for the two hot routes. The leg (`lifecycle.py`) runs in the task that the server made for the
request; a client that goes away is noticed without a task of its own (`ClientConnection.watch`, on other servers than
ours `relay.DisconnectWatch`) and cancels that task.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from balanceroute.core.types import Outcome, RejectReason
from balanceroute.errors import (
    BalanceRouteError,
    InvalidRequest,
    InvariantError,
    QueueTimeout,
    Rejected,
    UpstreamStatus,
)
from balanceroute.proxy import fanout
from balanceroute.proxy.client_transport import CLIENT_CONNECTION, ClientConnection
from balanceroute.proxy.fanout import PartAnswer, PartStream, StreamHead
from balanceroute.proxy.intake import ClientGone, Head, Receive, read_body, read_head, within
from balanceroute.proxy.layerwise import LayerwiseLeg
from balanceroute.proxy.ledger import rejection
from balanceroute.proxy.lifecycle import ClientStalled, Leg, Outlet
from balanceroute.proxy.logs import log_request
from balanceroute.proxy.payloads import ClientRequest, Endpoint, parse
from balanceroute.proxy.relay import DisconnectWatch, Write
from balanceroute.proxy.responses import (
    SSE_HEADERS,
    Headers,
    Send,
    error_event,
    json_headers,
    send_error,
    send_json,
    status_of,
)
from balanceroute.proxy.services import Services
from balanceroute.proxy.sse import StreamEnd

log = logging.getLogger("balanceroute.requests")


class StreamOutlet:
    """A leg's answer as the client's own stream."""

    __slots__ = ("_headers", "_send", "ends_response", "send", "started", "write")

    def __init__(self, send: Send, headers: Headers, write: Write | None) -> None:
        self.send, self.write = send, write
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


class CompletionsRoute:
    """`POST /v1/completions` or `POST /v1/chat/completions`."""

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        self._s, self._endpoint = services, endpoint

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        services = self._s
        services.exchanges += 1
        exchange = Exchange(services, self._endpoint, send, scope.get("extensions", {}).get(CLIENT_CONNECTION))
        try:
            await exchange.serve(scope, receive)
        finally:
            services.exchanges -= 1
            exchange.account()


class Exchange:
    """One client request: from its head to the line in the log."""

    __slots__ = (
        "_arrived_s",
        "_client",
        "_endpoint",
        "_gone",
        "_head",
        "_legs",
        "_outcome",
        "_s",
        "_send",
        "_status",
        "_task",
    )

    def __init__(
        self, services: Services, endpoint: Endpoint, send: Send, client: ClientConnection | None = None
    ) -> None:
        """`client` where the server is our own; ASGI's messages do for all others."""
        self._s, self._endpoint, self._send, self._client = services, endpoint, send, client
        self._arrived_s = services.loop.time()
        self._head: Head | None = None
        self._legs: list[Leg] = []
        self._outcome = Outcome.FAILED
        self._status = 0
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    async def serve(self, scope: Any, receive: Receive) -> None:
        """Answer the request, one way or the other."""
        try:
            request = await self._read(scope, receive)
            self._task = asyncio.current_task(self._s.loop)  # finding the loop takes a system call before Python 3.12
            unwatch = self._watch(receive)
            try:
                await self._answer(request)
            finally:
                unwatch()
        except ClientGone:
            self._outcome = Outcome.CANCELLED
        except InvariantError as error:
            await self._fail_by_bug(error)
        except BalanceRouteError as error:
            await self._fail(error)
        except Exception as error:
            # a bug of ours must not take the connection's other requests, or the accounting, with it
            await self._fail_by_bug(error)
        except asyncio.CancelledError:
            if self._outcome is not Outcome.FINISHED:
                self._outcome = Outcome.CANCELLED
            # the cancellation was ours alone: the server's task ends as if the request were over, which it is
            if not self._gone or (self._task is not None and self._task.uncancel() > 0):
                raise

    def _watch(self, receive: Receive) -> Callable[[], None]:
        """Notice from now on when the client goes away; returns what ends that."""
        if self._client is None:
            return DisconnectWatch(receive, self._on_gone).close
        self._client.watch(self._on_gone)
        return self._client.unwatch

    @property
    def _write(self) -> Write | None:
        return None if self._client is None else self._client.write

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
        body = None if self._client is None else self._client.body()
        if body is not None:
            return parse(self._endpoint, within(limits.max_body_bytes, body))
        body = await read_body(receive, limits.max_body_bytes, limits.client_header_timeout_s, head.content_length)
        return parse(self._endpoint, body)

    async def _respond(self, status: int, body: bytes, headers: Headers) -> None:
        """A whole JSON response."""
        if self._client is None or not self._client.respond(status, json_headers(body, headers), body):
            await send_json(self._send, status, body, headers)

    async def _answer(self, request: ClientRequest) -> None:
        """One prompt, one answer: nearly every request."""
        if not request.single:
            await self._answer_many(request)
            return
        head = self._head
        assert head is not None
        id_header = (b"x-request-id", (head.client_id or head.request_id).encode())
        outlet = (
            StreamOutlet(self._send, [*SSE_HEADERS, id_header], self._write) if request.stream else PartAnswer(request)
        )
        leg = self._leg_for(head.request_id, request, outlet, None)
        self._legs = [leg]
        try:
            await leg.run(self._task)
        except BalanceRouteError as error:
            if not outlet.started:
                raise
            await self._fail_started(error)
            return
        self._outcome, self._status = Outcome.FINISHED, 200
        if isinstance(outlet, PartAnswer):
            await self._respond(200, outlet.answer(leg), [id_header])
        elif leg.scanner.end is not StreamEnd.DONE:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer_many(self, request: ClientRequest) -> None:
        """Several prompts or answers: a leg for each choice, merged."""
        head = self._head
        assert head is not None
        id_header = (b"x-request-id", (head.client_id or head.request_id).encode())
        created = fanout.created_now()
        shared = StreamHead(self._send, [id_header], self._write, request.model)
        answers: list[PartAnswer] = []
        for index, part in enumerate(fanout.parts_of(request, self._s.config.limits.max_choices)):
            outlet: Outlet
            if request.stream:
                outlet = PartStream(shared)
            else:
                outlet = PartAnswer(part)
                answers.append(outlet)
            options = fanout.scanner_options(request, head.request_id, index, created)
            self._legs.append(self._leg_for(f"{head.request_id}-{index}", part, outlet, options))
        try:
            await fanout.run_all(self._legs)
        except BalanceRouteError as error:
            if not shared.started:
                raise
            await self._fail_started(error)
            return
        self._outcome, self._status = Outcome.FINISHED, 200
        if request.stream:
            await shared.start()
            end = fanout.closing_events(request, head.request_id, created, shared.model, self._legs)
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
        else:
            body = fanout.merged_answer(request, head.request_id, self._legs, answers)
            await self._respond(200, body, [id_header])

    def _leg_for(self, request_id: str, request: ClientRequest, outlet: Outlet, options: dict[str, Any] | None) -> Leg:
        head, services = self._head, self._s
        assert head is not None
        forecasts = services.forecasts
        kind = LayerwiseLeg if services.connector.decode_first else Leg
        return kind(
            services,
            request_id,
            request,
            outlet,
            head.forwarded,
            prompt_key="" if forecasts is None else forecasts.key(request.prompt_key, head.key),
            deadline_s=self._arrived_s + min(head.timeout_s, services.config.limits.request_timeout_s),
            scanner_options=options,
        )

    async def _fail(self, error: BalanceRouteError) -> None:
        """Before the first byte: a status and an error body."""
        self._status = status_of(error)
        self._note(error)
        await send_error(self._send, error)

    async def _fail_by_bug(self, error: Exception) -> None:
        self._outcome, self._status = Outcome.FAILED, 500
        self._s.metrics.tasks_failed.inc("request")
        request_id = self._head.request_id if self._head is not None else ""
        log.error("internal error", exc_info=error, extra={"request": request_id})
        if self._s.strict:
            raise error
        if not any(leg.started for leg in self._legs):
            await send_error(self._send, InvariantError("Internal error of the router; see its log."))

    async def _fail_started(self, error: BalanceRouteError) -> None:
        """After the first byte: an event that says so and, by returning without a last message, an unclean end."""
        if isinstance(error, InvariantError):
            raise error
        self._status = 200
        self._note(error)
        if isinstance(error, ClientStalled):
            return
        raw = error.body if isinstance(error, UpstreamStatus) and error.body.lstrip().startswith(b"{") else None
        event = error_event(error, raw if raw is not None and b"\n" not in raw else None)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _note(self, error: BalanceRouteError) -> None:
        if isinstance(error, QueueTimeout):
            self._outcome = Outcome.EXPIRED
        elif isinstance(error, ClientStalled):
            self._outcome = Outcome.CANCELLED
        elif isinstance(error, Rejected | InvalidRequest) or self._refused(error):
            self._outcome = Outcome.REJECTED
        else:
            self._outcome = Outcome.FAILED

    @staticmethod
    def _refused(error: BalanceRouteError) -> bool:
        return isinstance(error, UpstreamStatus) and error.status < 500 and error.status != 429

    def _on_gone(self) -> None:
        legs = self._legs
        if legs and all(leg.scanner.end is StreamEnd.DONE for leg in legs):
            return  # servers say so after the last byte as well
        self._gone = True
        for leg in legs:
            leg.abandon()
        if not legs and self._task is not None:
            self._task.cancel()

    def account(self) -> None:
        """The request is over: its counters, its histograms and its one line."""
        metrics, now = self._s.metrics, self._s.loop.time()
        metrics.requests.inc(self._outcome.value)
        duration_s = now - self._arrived_s
        first_token_s = math.inf
        tokens = 0
        for leg in self._legs:
            if not leg.prompt_tokens:
                continue
            tokens += leg.scanner.tokens
            metrics.prefill_wait.observe(leg.prefill_wait_s)
            if leg.worker:
                metrics.decode_wait.observe(leg.decode_wait_s)
            if leg.first_token_s:
                first_token_s = min(first_token_s, leg.first_token_s)
                if leg.scanner.tokens > 1 and leg.last_token_s > leg.first_token_s:
                    metrics.tpot.observe((leg.last_token_s - leg.first_token_s) / (leg.scanner.tokens - 1))
        if tokens:
            metrics.tokens.inc(by=tokens)
        ttft_s = None if first_token_s == math.inf else first_token_s - self._arrived_s
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        if self._outcome is Outcome.FINISHED:
            metrics.duration.observe(duration_s)
        if log.isEnabledFor(logging.INFO):
            self._log(tokens, ttft_s, duration_s)

    def _log(self, tokens: int, ttft_s: float | None, duration_s: float) -> None:
        head, legs = self._head, self._legs
        fields: dict[str, Any] = {
            "request": head.request_id if head is not None else "",
            "outcome": self._outcome.value,
            "status": self._status,
            "duration_s": round(duration_s, 4),
        }
        if head is not None and head.client_id:
            fields["client_request"] = head.client_id
        if legs:
            one = legs[0] if len(legs) == 1 else _Together(legs)
            fields |= {
                "prefiller": one.prefiller,
                "worker": one.worker,
                "prefill_wait_s": round(one.prefill_wait_s, 4),
                "decode_wait_s": round(one.decode_wait_s, 4),
                "ttft_s": None if ttft_s is None else round(ttft_s, 4),
                "prompt_tokens": one.prompt_tokens,
                "tokens": tokens,
                "recomputes": one.recomputes,
            }
        log_request(fields)


class _Together:
    """What the log says of several legs: their workers in order, the longest waits, the sums."""

    def __init__(self, legs: list[Leg]) -> None:
        self.prefiller = ",".join(leg.prefiller for leg in legs)
        self.worker = ",".join(leg.worker for leg in legs)
        self.prefill_wait_s = max(leg.prefill_wait_s for leg in legs)
        self.decode_wait_s = max(leg.decode_wait_s for leg in legs)
        self.prompt_tokens = sum(leg.prompt_tokens for leg in legs)
        self.recomputes = sum(leg.recomputes for leg in legs)
