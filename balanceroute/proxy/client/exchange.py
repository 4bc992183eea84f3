"""Serves a client's request on a hot route: from head and body to the answer or error, and its log line.

The connection (`protocol.py`) makes an `Exchange` from a request's head, and runs it in its own task once the body is
complete. The request's legs (`life/leg.py`) run in that task. If the client leaves, the task is cancelled.
"""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from mypy_extensions import mypyc_attr

from balanceroute.core.types import CANCELLED, EXPIRED, FAILED, FINISHED, REJECTED, RejectReason
from balanceroute.errors import (
    AccessDenied,
    BalanceRouteError,
    InvalidRequest,
    InvariantError,
    KeyLimit,
    NotJson,
    QueueTimeout,
    Rejected,
    UpstreamError,
)
from balanceroute.proxy.admission.decider import refusal
from balanceroute.proxy.client import fanout
from balanceroute.proxy.client.head import Request
from balanceroute.proxy.client.intake import read_head, unread_coding
from balanceroute.proxy.client.outlets import PartAnswer, PartStream, StreamOutlet
from balanceroute.proxy.client.response import Response
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.life.errors import ClientGone, ClientStalled
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.life.leg import Leg, Strategy
from balanceroute.proxy.life.outlet import Outlet
from balanceroute.proxy.life.pull import Pull
from balanceroute.proxy.life.retries import is_refused
from balanceroute.proxy.life.scoring import Scoring
from balanceroute.proxy.life.streaming import write_part
from balanceroute.proxy.life.suspicion import Choices
from balanceroute.proxy.perimeter.keys import ClientKey
from balanceroute.proxy.perimeter.routes import Access
from balanceroute.proxy.telemetry.logs import log_request
from balanceroute.proxy.wire.answer_identity import WHOLE, Part
from balanceroute.proxy.wire.client_request import ClientRequest, Endpoint, parse
from balanceroute.proxy.wire.derived_requests import with_priority
from balanceroute.proxy.wire.responses import (
    INTERNAL_ERROR,
    Headers,
    error_event,
    json_headers,
    status_of,
)
from balanceroute.proxy.wire.sse import DONE, Translation

log = logging.getLogger("balanceroute.requests")

_CLIENT: Final = Access.CLIENT
_QUOTED: Final = re.compile(r"""'(\\.|[^'\\])*('|$)|"(\\.|[^"\\])*("|$)""")  # as Python writes texts, maybe cut


@mypyc_attr(allow_interpreted_subclasses=True)
class Exchange:
    """One client request, from its head to its log line. A `Handler` of the edge."""

    __slots__ = (
        "_arrived_s",
        "_body_bytes",
        "_endpoint",
        "_failure",
        "_gone",
        "_head",
        "_in_flight",
        "_key",
        "_legs",
        "_outcome",
        "_refusal",
        "_request",
        "_response",
        "_services",
        "_status",
        "_task",
    )

    def __init__(self, services: ClientServices, endpoint: Endpoint, request: Request, response: Response) -> None:
        self._services, self._endpoint, self._request, self._response = services, endpoint, request, response
        self._arrived_s, self._body_bytes = services.tickets.now(), 0
        headers, key_header = request.headers, services.config.predictor.key_header
        self._head = read_head(
            headers,
            None if key_header is None else key_header.lower().encode(),
            services.perimeter.authorization_for(headers),
        )
        self._key: ClientKey | None = None
        self._in_flight: ClientKey | None = None  # the client key that counts this request
        self._legs: list[Leg] = []
        self._outcome = FAILED
        self._refusal: AccessDenied | KeyLimit | None = None
        self._failure: UpstreamError | Rejected | InvalidRequest | None = None
        self._status = 0
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    def check(self) -> None:
        """Judge the head. Raises: AccessDenied, KeyLimit; InvalidRequest: a header is wrong; Rejected: a drain."""
        perimeter, local = self._services.perimeter, self._request.local
        perimeter.check_listener(_CLIENT, local[1] if local else None)
        self._key = perimeter.client(self._request.headers, self._arrived_s)
        if self._key is not None:
            self._in_flight = self._key
            self._response.on_last = self._leave_key
            self._request.holder = self._key.holder
        self._head.check()
        self._check_drain()

    def _check_drain(self) -> None:
        tickets = self._services.tickets
        if tickets.draining:
            raise refusal(RejectReason.DRAINING, tickets.view).error()

    def refuse(self, error: BalanceRouteError) -> None:
        """Answer with an error: the request is incomplete, or refused."""
        self._fail(error)
        self._account()

    def abandoned(self) -> None:
        """The client has gone before its request was complete."""
        self._outcome = CANCELLED
        self._account()

    async def run(self) -> None:
        """Answer the request, with an error if need be."""
        services, response = self._services, self._response
        services.exchanges += 1
        try:
            if response.gone:
                raise ClientGone
            self._check_drain()  # again: it may have begun since the head came
            request = self._with_bounded_priority(with_priority(self._asked(), self._head.priority))
            self._task = asyncio.current_task(services.loop)  # else a system call before Python 3.12
            response.on_gone = self._on_gone
            try:
                await self._answer(request)
            finally:
                response.on_gone = None
        except ClientGone:
            self._outcome = CANCELLED
        except InvariantError as error:
            self._fail_by_bug(error)
        except BalanceRouteError as error:
            self._fail(error)
        except Exception as error:
            # a bug must not harm the connection's other requests, or the counts
            self._fail_by_bug(error)
        except asyncio.CancelledError:
            if self._outcome is not FINISHED:
                self._outcome = CANCELLED
            # if only `_on_gone` has cancelled this task, it ends normally: the request is over
            if not self._gone or (self._task is not None and self._task.uncancel() > 0):
                raise
        finally:
            services.exchanges -= 1
            self._account()

    def _asked(self) -> ClientRequest:
        """The client's request, without its bytes. Raises: InvalidRequest; with status 415 for a compressed body."""
        try:
            request = self._parsed()
        except NotJson:
            compressed = unread_coding(self._request.headers)
            if compressed is None:
                raise
            raise compressed from None
        self._body_bytes, self._request.body = len(self._request.body), b""
        return request

    def _parsed(self) -> ClientRequest:
        """The body as a request. Raises: InvalidRequest."""
        return parse(self._endpoint, self._request.body)

    def _outlet_for(self, request: ClientRequest) -> Outlet:
        """The outlet of a single answer."""
        if request.stream:
            return StreamOutlet(self._response, self._own_headers())
        return PartAnswer(request, self._response.keep)

    def _translation_of(self, request: ClientRequest) -> Callable[[], Translation] | None:
        """Makes what writes the events of a single answer in another protocol; None: they stay as they are."""
        return None

    def _whole(self, answer: bytes) -> bytes:
        """An unstreamed answer as the client gets it."""
        return answer

    def _with_bounded_priority(self, request: ClientRequest) -> ClientRequest:
        """The request with a priority that its key allows, for the router's queues; engines get the client's own."""
        entry = None if self._key is None else self._key.entry
        bounds = self._services.config.limits.priority if entry is None or entry.priority is None else entry.priority
        priority = bounds.clamped(request.priority)
        if priority == request.priority:
            return request
        if request.priority:  # 0 may be a client's default
            fields = {"request": self._head.request_id, "asked": request.priority, "priority": priority}
            log.info("priority clamped", extra=fields)
        return replace(request, priority=priority)

    async def _answer(self, request: ClientRequest) -> None:
        """Answer a request of one prompt with one answer; pass others to `_answer_many`."""
        if not request.single:
            await self._answer_many(request)
            return
        outlet = self._outlet_for(request)
        leg = self._leg_for(self._head.request_id, request, outlet)
        self._legs = [leg]
        failure = await _late_failure(leg.run(self._task), outlet)
        if failure is not None:
            await self._fail_started(failure)
            return
        self._outcome, self._status = FINISHED, 200
        if isinstance(outlet, PartAnswer):
            body = self._whole(outlet.answer(leg))
            self._response.respond(200, json_headers(body, self._own_headers()), body)
        elif leg.answer.scanner.end is not DONE:
            self._response.end(leg.answer.scanner.closing_bytes())

    async def _answer_many(self, request: ClientRequest) -> None:
        """Answer a request of several choices: run a leg for each, and merge their answers."""
        request_id = self._head.request_id
        common = fanout.common_part(request, request_id)
        shared = StreamOutlet(self._response, self._own_headers())
        answers: list[PartAnswer] = []
        choices = Choices()
        parts = fanout.parts_of(request, self._services.config.limits.max_choices, self._body_bytes)
        for index, part in enumerate(parts):
            outlet: Outlet
            if request.stream:
                outlet = PartStream(shared)
            else:
                outlet = PartAnswer(part, self._response.keep)
                answers.append(outlet)
            choice = replace(common, index=index)
            first = self._legs[index - index % request.n] if index % request.n else None
            self._legs.append(self._leg_for(f"{request_id}-{index}", part, outlet, choice, choices, first))
        failure = await _late_failure(fanout.run_all(self._legs), shared)
        if failure is not None:
            await self._fail_started(failure)
            return
        self._outcome, self._status = FINISHED, 200
        if request.stream:
            if not shared.started:
                shared.start()
            shared.end(fanout.closing_events(request, common, self._legs))
        else:
            body = fanout.merged_answer(request, common, self._legs, answers)
            self._response.respond(200, json_headers(body, self._own_headers()), body)

    def _leg_for(
        self,
        request_id: str,
        request: ClientRequest,
        outlet: Outlet,
        part: Part = WHOLE,
        choices: Choices | None = None,
        first: Leg | None = None,
    ) -> Leg:
        """A leg for one prompt with one answer; `choices`: what the legs of one request share. `first`: the leg of this
        prompt's first choice, whose prompt was looked at for all.
        """
        head, services = self._head, self._services
        keyer = services.keyer
        strategy: Callable[[Leg], Strategy] = Layerwise if services.tickets.decode_first else Pull
        if request.scores_only:
            strategy = Scoring
        return Leg(
            services,
            request_id,
            request,
            outlet,
            head.forwarded,
            strategy,
            prompt_key="" if keyer is None or first is not None else keyer.key(request.prompt_json, head.key),
            deadline_s=self._arrived_s + min(head.timeout_s, services.config.limits.request_timeout_s),
            part=part,
            translation=self._translation_of(request) if part is WHOLE else None,
            choices=choices,
            first=first,
        )

    def _fail(self, error: BalanceRouteError) -> None:
        """Answer with a status and an error body: nothing has been sent yet."""
        self._status = status_of(error)
        self._note(error)
        self._response.refuse(error, self._own_headers())

    def _own_headers(self) -> Headers:
        """The headers of every response to this request."""
        headers = [(b"x-request-id", self._head.response_id)]
        pages = self._services.perimeter.pages
        if pages.some:
            headers += pages.answer_headers(self._request.header(b"origin"))
        return headers

    def _fail_by_bug(self, error: Exception) -> None:
        self._outcome, self._status = FAILED, 200 if self._response.started else 500
        self._services.metrics.tasks_failed.inc("request")
        log.error("internal error", exc_info=error, extra={"request": self._head.request_id})
        if self._services.strict:
            raise error
        if not self._response.started:
            self._response.refuse(InvariantError(INTERNAL_ERROR), self._own_headers())

    async def _fail_started(self, error: BalanceRouteError) -> None:
        """Send an error event, because the response has begun, and never complete the response."""
        if isinstance(error, InvariantError):
            raise error
        self._status = 200
        self._note(error)
        if self._outcome is REJECTED:  # part of the answer was sent, so it is not rejected
            self._outcome = FAILED
        if isinstance(error, ClientStalled):
            return
        self._leave_key()
        await write_part(self._response, self._error_event(error))

    def _error_event(self, error: BalanceRouteError) -> bytes:
        return error_event(error)

    def _note(self, error: BalanceRouteError) -> None:
        """Take the request's outcome from an error."""
        if isinstance(error, AccessDenied | KeyLimit):
            self._refusal = error
            self._services.metrics.refusals.inc(error.reason)
        elif isinstance(error, UpstreamError | Rejected | InvalidRequest):
            self._failure = error
        if isinstance(error, QueueTimeout):
            self._outcome = EXPIRED
        elif isinstance(error, ClientStalled):
            self._outcome = CANCELLED
        elif isinstance(error, Rejected | InvalidRequest) or is_refused(error):
            self._outcome = REJECTED
        else:
            self._outcome = FAILED

    def _on_gone(self) -> None:
        """Handle a client that has left: end the legs."""
        legs = self._legs
        if all(leg.answer.scanner.end is DONE for leg in legs):
            return  # the connection also closes after the last byte
        self._gone = True
        for leg in legs:
            self._services.abandoned.add(leg)

    def _leave_key(self) -> None:
        """Tell the key that the request is over, once: it may send another one."""
        key, self._in_flight = self._in_flight, None
        if key is not None:
            key.leave(self._services.tickets.now(), sum(leg.answer.used_tokens for leg in self._legs))

    def _account(self) -> None:
        """At the request's end: update counters and histograms, write its log line."""
        metrics, now = self._services.metrics, self._services.tickets.now()
        self._leave_key()
        metrics.requests.inc(self._outcome)
        duration_s = now - self._arrived_s
        first_token_s = math.inf
        tokens = 0
        for leg in self._legs:
            if leg.prefiller_id or leg.prefill_wait_s:
                metrics.prefill_wait.observe(leg.prefill_wait_s)
            if leg.decoder_id or leg.decode_wait_s:
                metrics.decode_wait.observe(leg.decode_wait_s)
            generated = leg.answer.scanner.tokens
            tokens += generated
            first_s = leg.first_token_s
            if first_s:
                first_token_s = first_s if first_s < first_token_s else first_token_s
                took_s = leg.last_token_s - first_s
                if generated > 1 and took_s > 0:
                    metrics.tpot.observe(took_s / (generated - 1))
        ttft_s = None if first_token_s == math.inf else first_token_s - self._arrived_s
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        if self._outcome is FINISHED:
            metrics.duration.observe(duration_s)
        if log.isEnabledFor(logging.INFO):
            self._log(tokens, ttft_s, duration_s)
        self._failure = self._refusal = None  # errors refer to frames, and these to the exchange

    def _log(self, tokens: int, ttft_s: float | None, duration_s: float) -> None:
        head, legs = self._head, self._legs
        fields: dict[str, Any] = {
            "request": head.request_id,
            "outcome": self._outcome.value,
            "status": self._status or (200 if self._response.started else 0),  # also if the client has left
            "duration_s": round(duration_s, 4),
        }
        if head.client_id:
            fields["client_request"] = head.client_id
        if self._key is not None:
            fields["key"] = self._key.name
        if self._refusal is not None:
            fields |= _refused_fields(self._refusal, self._request)
        if self._failure is not None:
            fields["error"] = _why(self._failure)
        if legs:
            fields |= {
                "prefiller": ",".join([leg.prefiller_id for leg in legs]),
                "worker": ",".join([leg.decoder_id for leg in legs]),
                "prefill_wait_s": round(max([leg.prefill_wait_s for leg in legs]), 4),
                "decode_wait_s": round(max([leg.decode_wait_s for leg in legs]), 4),
                "ttft_s": None if ttft_s is None else round(ttft_s, 4),
                "prompt_tokens": sum(leg.answer.prompt_tokens for leg in legs),
                "tokens": tokens,
                "recomputes": sum([leg.recomputes for leg in legs]),
            }
            if len(legs) > 1:
                fields["choices"] = len(legs)
        log_request(fields)


async def _late_failure(run: Awaitable[None], outlet: Outlet) -> BalanceRouteError | None:
    """Wait for an answer's end; the error with which it ends, if the client has got some of it. Raises: any other."""
    try:
        await run
    except BalanceRouteError as error:
        if not outlet.started:
            raise
        return error
    return None


def _why(failure: UpstreamError | Rejected | InvalidRequest) -> str:
    """The reason of a failure for the log, without what it quotes of the client's body, which may be of a prompt; of a
    worker's own error the status alone.
    """
    text = str(failure)
    if isinstance(failure, InvalidRequest):
        return _QUOTED.sub("...", text)
    return f"{failure.tier} worker: {text}" if isinstance(failure, UpstreamError) and failure.tier else text


def _refused_fields(refusal: AccessDenied | KeyLimit, request: Request) -> dict[str, Any]:
    """Log fields of a refused request: the client and the reason, so that an operator finds tried keys and reached
    limits.
    """
    fields = {"refused": refusal.reason, "peer": request.peer[0] if request.peer else "", "path": request.path}
    return fields | ({"key": refusal.key} if isinstance(refusal, KeyLimit) else {})
