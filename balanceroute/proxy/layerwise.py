"""Decode first: vllm-ascend's MooncakeLayerwiseConnector, whose prefiller pushes KV to a decode worker that waits.

    leg                    decode worker D                      prefiller P
     |-- decode body, metaserver=<us> -->|  allocates blocks         |
     |<-- POST /v1/metaserver (request id, where to push) -|         |     answered at once, 200
     |-- probe: that object as kv_transfer_params, the same X-Request-Id and route ->|
     |                                   |<------ KV, layer by layer -------|
     |<---------- events ----------------|                           |-- one token, no parameters -->|

So the policy binds a request to D with the *estimated* size of its prompt, before any prefill; P is chosen when D asks,
under the same back-pressure as ever, and P's reply corrects the size. The scheduler calls are `Scheduler.submit` (into
the pool), `request_prefill`, `pushed`, `push_failed`.

What can go wrong, and what is done:

* D asks a second time for the same attempt, or for one that is over: the callback is answered and nothing happens. D
  does not look at the status, so an error would not help it either.
* D's id of a request is derived from X-Request-Id, and P's message to D carries P's. Every attempt therefore has an id
  of its own, and a request that was recomputed gets a second prefill (one id for the whole life never does: the second
  callback would be taken for a repetition).
* P fails without having seen the request (no connection, 429, 503): another is asked to push to the same D.
* P fails otherwise: D may hold half of the KV and would wait for ever, so its stream is closed and the request goes
  back to the pool. A 4xx of P goes to the client.
* The client goes, or D fails: P is hung up on at once. Nothing is pinned, so nothing is drained.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from balanceroute.core.types import WorkerState
from balanceroute.errors import (
    BalanceRouteError,
    ConnectFailed,
    InvalidRequest,
    QueueTimeout,
    UpstreamError,
    UpstreamTimeout,
)
from balanceroute.proxy.connectors import METASERVER_PATH, LayerwiseConnector
from balanceroute.proxy.fleet import Worker
from balanceroute.proxy.intake import ClientGone, read_body
from balanceroute.proxy.ledger import RETRY_AFTER_S, Ticket
from balanceroute.proxy.lifecycle import REPLY_LIMIT, Leg, pushes_back, status_error
from balanceroute.proxy.payloads import ClientRequest, PrefillResult, parse_probe_reply
from balanceroute.proxy.responses import body_of, error_body, status_of
from balanceroute.proxy.services import Services
from balanceroute.proxy.sse import StreamEnd

LAST_WORD_S: Final = 1.0  # D's last token may overtake P's reply, which only counts by then
_CALLBACK_LIMIT: Final = 16 * 2**20  # the block ids of a prompt of millions of tokens


def external_id(request: ClientRequest, upstream_id: str) -> str:
    """What vLLM calls a request that came with this X-Request-Id."""
    return f"chatcmpl-{upstream_id}" if request.endpoint == "chat" else f"cmpl-{upstream_id}-0"


class PushFailed(BalanceRouteError):
    """The prefill that a decode worker waits for has failed; the request starts over after `delay_s`."""

    def __init__(self, error: UpstreamError, delay_s: float) -> None:
        super().__init__(str(error))
        self.error, self.delay_s = error, delay_s


class LayerwiseLeg(Leg):
    """A leg whose decode worker is chosen first; the prefill runs beside the decode, in a task of its own."""

    __slots__ = ("_push", "_pushed", "_result")

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `Leg`."""
        super().__init__(*args, **options)
        self._push: asyncio.Task[None] | None = None
        self._pushed = False
        self._result = PrefillResult(None, self.request.prompt_tokens, None, None)

    def abandon(self) -> None:
        """The client is gone: nothing is pinned by name, so both workers are hung up on at once."""
        self._grace_s = 0.0
        super().abandon()

    def expects_tokens_from(self, worker_id: str) -> bool:
        """Only once the KV is there."""
        return self._pushed and super().expects_tokens_from(worker_id)

    # -- the phases

    async def _serve(self, ticket: Ticket) -> None:
        self.scanner = self._new_scanner(self._result)
        while True:
            worker = await self._admission(ticket)
            self.decode_wait_s += self._s.ledger.now() - ticket.pooled_s
            self.worker = worker.id
            lost: UpstreamError | None = None
            tokens = self.scanner.tokens
            try:
                if await self._attempt(ticket, worker):
                    return
                worker.circuit.no_verdict()
                if self.scanner.tokens == tokens:
                    await asyncio.sleep(self._fruitless(worker))
            except PushFailed as failure:
                self._check_abandoned(worker)
                lost = failure.error
                await asyncio.sleep(failure.delay_s)
            except UpstreamError as error:
                self._check_abandoned(worker)
                if error.stage == "prefill":
                    raise  # judged where it happened, and it was the last try
                lost = error
                await asyncio.sleep(self._judge(error, worker, "decode"))
            if lost is None or not pushes_back(lost):
                self._s.metrics.recomputes.inc("recomputed" if lost is None else "worker_lost")
            if not self.prompt_tokens and self.scanner.prompt_ids is not None:
                self.prompt_tokens = len(self.scanner.prompt_ids)
            if not self._prepare_resume(self._result, lost):
                await self._end_by_length()
                return
            self.recomputes += 1
            self._unspent = None
            ticket.requeue()

    async def _attempt(self, ticket: Ticket, worker: Worker) -> bool:
        connector = self._s.connector
        assert isinstance(connector, LayerwiseConnector)
        self._tries += 1
        self._pushed = False
        self._unspent = connector.params
        known_as = external_id(self.request, self.upstream_id)
        connector.expect(known_as, lambda asked: self._called_back(ticket, worker, connector.push(self.request, asked)))
        try:
            done = await self._decode(ticket, worker, self._result)
            if done and self._push is not None:
                await asyncio.wait({self._push}, timeout=LAST_WORD_S)
            return done
        finally:
            connector.forget(known_as)
            self._unspent = None
            push, self._push = self._push, None
            if push is not None:
                push.cancel()  # what it holds in the scheduler goes with the request's own release

    # -- the prefill beside it

    def _called_back(self, ticket: Ticket, worker: Worker, body: bytes) -> None:
        self.stage_deadline_s = math.inf  # from here on it is us whom the decode worker waits for
        worker.progress_s = self._s.ledger.now()
        ticket.request_prefill()
        self._push = self._s.loop.create_task(self._run_push(ticket, worker, body))

    async def _run_push(self, ticket: Ticket, worker: Worker, body: bytes) -> None:
        try:
            result = await self._prefill_for(ticket, body)
            self._check_resumed(self._s.fleet[self.prefiller], result)
        except BalanceRouteError as error:
            if self.scanner.end is not StreamEnd.DONE:
                self.interrupt(error)
            return
        now = self._s.ledger.now()
        self._pushed = True
        ticket.pushed(result.prompt_tokens)
        worker.progress_s = now
        if self.request.streams_upstream and not self.scanner.begun:
            self.stage_deadline_s = now + self._s.config.limits.first_byte_timeout_s.decode
        if not self.prompt_tokens:
            self._result = result
            self.prompt_tokens, self.cached_tokens = result.prompt_tokens, result.cached_tokens
            self.scanner.prefilled(result.prompt_tokens, result.cached_tokens)

    async def _prefill_for(self, ticket: Ticket, body: bytes) -> PrefillResult:
        """Have a prefiller push. Raises: QueueTimeout; PushFailed; UpstreamError of the last try."""
        now = self._s.ledger.now
        deadline_s = now() + self._s.config.queue.deadline_s
        while True:
            waiting_since_s = now()
            try:
                async with asyncio.timeout_at(deadline_s):
                    prefiller = self._s.fleet[await ticket.prefiller()]
            except TimeoutError:
                text = "The request waited too long for a prefiller."
                raise QueueTimeout(text, retry_after_s=RETRY_AFTER_S) from None
            if prefiller.state is not WorkerState.UP:
                ticket.push_failed()
                continue
            self.prefill_wait_s += now() - waiting_since_s
            self.prefiller = prefiller.id
            try:
                return await self._probe_for(prefiller, body)
            except UpstreamError as error:
                delay_s = self._judge(error, prefiller, "prefill")
                if not _unseen(error):
                    raise PushFailed(error, delay_s) from error
                await asyncio.sleep(delay_s)
                ticket.push_failed()

    async def _probe_for(self, prefiller: Worker, body: bytes) -> PrefillResult:
        limits = self._s.config.limits
        patience_s = limits.first_byte_timeout_s.prefill
        prefiller.in_use += 1
        prefiller.circuit.used()
        try:
            async with asyncio.timeout(patience_s):
                reply = await prefiller.upstream.request(
                    "POST",
                    self.request.path,
                    body,
                    self._headers_for(prefiller),
                    connect_timeout_s=limits.connect_timeout_s,
                )
                answer = await reply.read(REPLY_LIMIT)
            if reply.status != 200:
                raise status_error(reply, answer, prefiller, "prefill")
            result = parse_probe_reply(answer, worker=prefiller.id)
            prefiller.circuit.success()
            prefiller.progress_s = self._s.ledger.now()
            return result
        except TimeoutError:
            text = f"no answer within {patience_s:g} s"
            raise UpstreamTimeout(text, worker=prefiller.id, stage="prefill") from None
        except asyncio.CancelledError:
            prefiller.circuit.no_verdict()
            raise
        finally:
            prefiller.in_use -= 1


def _unseen(error: UpstreamError) -> bool:
    """Whether the prefiller has surely not begun: another one may push to the same place."""
    return pushes_back(error) or (isinstance(error, ConnectFailed) and not error.sent)


class Metaserver:
    """`POST /v1/metaserver`: decode workers ask for prefills; `services` is called per request."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The one route."""
        return [Route(METASERVER_PATH, self.callback, methods=["POST"])]

    async def callback(self, request: Request) -> Response:
        """Answered before the prefill begins: the connector has 32 threads per engine for all its callbacks."""
        services = self._services()
        connector = services.connector
        assert isinstance(connector, LayerwiseConnector)
        try:
            timeout_s = services.config.limits.client_header_timeout_s
            asked = orjson.loads(await read_body(request.receive, _CALLBACK_LIMIT, timeout_s))
            known_as = asked["request_id"]
            if not isinstance(known_as, str):
                raise TypeError("request_id")
        except ClientGone:
            return Response(status_code=400)
        except InvalidRequest as error:
            return Response(body_of(error), status_of(error), media_type="application/json")
        except (ValueError, KeyError, TypeError):
            services.metrics.callbacks.inc("malformed")
            text = "The body must be a JSON object with a request_id."
            return Response(error_body(400, text, "request_id"), 400, media_type="application/json")
        outcome = connector.called_back(known_as, orjson.dumps(asked))
        services.metrics.callbacks.inc(outcome)
        if outcome == "unknown":
            text = "No decode worker is expected to ask for this request; it may have ended."
            return Response(error_body(404, text, "request_id"), 404, media_type="application/json")
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")
