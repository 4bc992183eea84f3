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
* Somebody else asks, to have another user's KV pushed to himself: the URL that D was sent holds a token that is made
  for this attempt and told to nobody else; without it the callback is refused before its body is read.
* D's id of a request is derived from X-Request-Id, and P's message to D carries P's. Every attempt therefore has an id
  of its own, and a request that was recomputed gets a second prefill (one id for the whole life never does: the second
  callback would be taken for a repetition).
* P fails without having seen the request (no connection, 429, 503): another is asked to push to the same D.
* P fails otherwise: D may hold half of the KV and would wait for ever, so its stream is closed and the request goes
  back to the pool. A 4xx of P goes to the client.
* D never asks: its engine has another connector, or can't reach the URL. Nothing else would say so before the first
  byte is late, so after `CALLBACK_S` it is a line in the log and in /ready, until D asks.
* The client goes, or D fails: P is hung up on at once. Nothing is pinned, so nothing is drained.
"""

import asyncio
import logging
import math
import secrets
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
from balanceroute.proxy.admission.ledger import RETRY_AFTER_S, Ticket
from balanceroute.proxy.life.lifecycle import ERROR_LIMIT, REPLY_LIMIT, Leg, LifeServices, pushes_back, status_error
from balanceroute.proxy.telemetry.conditions import CONNECTOR
from balanceroute.proxy.wire.connectors import METASERVER_PATH, LayerwiseConnector
from balanceroute.proxy.wire.payloads import ClientRequest, PrefillResult, parse_probe_reply
from balanceroute.proxy.wire.responses import error_body
from balanceroute.proxy.wire.sse import StreamEnd
from balanceroute.proxy.workers.fleet import Worker

log = logging.getLogger(__name__)

CALLBACK_S: Final = 10.0  # an engine asks as soon as it has the blocks
LAST_WORD_S: Final = 1.0  # D's last token may overtake P's reply, which only counts by then
TOKEN_BYTES: Final = 24


def external_id(request: ClientRequest, upstream_id: str) -> str:
    """What vLLM calls a request that came with this X-Request-Id."""
    return f"chatcmpl-{upstream_id}" if request.endpoint == "chat" else f"cmpl-{upstream_id}-0"


def own_echo(request: ClientRequest) -> dict[str, Any] | None:
    """What a stream's echo is made of: its first event may come before the prefiller's word on the prompt.

    Raises: InvalidRequest: the prompt is token ids, whose text only an engine knows.
    """
    wishes = request.prompt_wishes
    if wishes is None or not (wishes.echo and request.stream) or request.return_token_ids:
        return None
    text = orjson.loads(request.prompt_json)
    if not isinstance(text, str):
        raise InvalidRequest("echo of token ids is not available when stream=True with this connector.", param="echo")
    return {"choices": [{"text": text}]}


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
        self._result = PrefillResult(None, self._thought_tokens, None, None, reply=own_echo(self.request))

    def abandon(self) -> None:
        """The client is gone: nothing is pinned by name, so both workers are hung up on at once."""
        self._grace_s = 0.0
        super().abandon()

    def move(self, worker_id: str, stage: str) -> None:
        """A prefiller that is left may have written half of the KV, so the decode worker is left with it."""
        error = UpstreamTimeout("the worker has fallen silent", worker=worker_id, stage=stage)
        self.interrupt(PushFailed(error, 0.0) if stage == "prefill" else error)

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
                await self._suspect_loss(error, worker)
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
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._unspent = connector.params(token)

        def called_back(asked: bytes) -> None:
            self._called_back(ticket, worker, connector.push(self.request, asked))

        connector.expect(token, external_id(self.request, self.upstream_id), called_back)
        silence = None
        if worker.kv_connector is None:
            silence = self._s.loop.call_later(CALLBACK_S, self._never_asked, worker)
        try:
            done = await self._decode(ticket, worker, self._result)
            if done and self._push is not None:
                await asyncio.wait({self._push}, timeout=LAST_WORD_S)
            return done
        finally:
            connector.forget(token)
            if silence is not None:
                silence.cancel()
            self._unspent = None
            push, self._push = self._push, None
            if push is not None:
                push.cancel()  # what it holds in the scheduler goes with the request's own release

    # -- the prefill beside it

    def _never_asked(self, worker: Worker) -> None:
        if worker.kv_connector is None:
            reason = "it has asked for no prefill yet: its connector is not mooncake_layerwise, or it can't reach us"
            self._s.metrics.conditions.hold(CONNECTOR, worker.id, f"{reason} (layerwise.callback_url)")

    def _called_back(self, ticket: Ticket, worker: Worker, body: bytes) -> None:
        if worker.kv_connector is None:
            worker.kv_connector = self._s.connector.name
            self._s.metrics.conditions.clear(CONNECTOR, worker.id)
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
        ticket.pushed(result.prompt_tokens, result.cached_tokens)
        worker.progress_s = now
        if self.request.streams_upstream and not self.scanner.begun:
            self.stage_deadline_s = now + self._s.config.limits.first_byte_timeout_s.decode
        if not self.prompt_tokens:
            self._result, self.prompt_reply = result, result.reply
            self._learn_size(result.prompt_tokens)
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
                answer = await reply.read(REPLY_LIMIT if reply.status == 200 else ERROR_LIMIT)
            if reply.status != 200:
                raise status_error(reply, answer, prefiller, "prefill")
            result = parse_probe_reply(answer, worker=prefiller.id, keep=self.request.prompt_wishes is not None)
            self._check_id(prefiller, "prefill", result.reply_id)
            if result.kv_transfer_params is not None and prefiller.kv_connector is None:
                self._check_connector(prefiller, result.kv_transfer_params)
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
    """`POST /v1/metaserver/TOKEN`: decode workers ask for prefills; `services` is called per request."""

    def __init__(self, services: Callable[[], LifeServices]) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The one route, and the one of the example proxy, where nobody shows a token."""
        return [
            Route(METASERVER_PATH, self.callback, methods=["POST"]),
            Route(METASERVER_PATH + "/{token}", self.callback, methods=["POST"]),
        ]

    async def callback(self, request: Request) -> Response:
        """Answered before the prefill begins: the connector has 32 threads per engine for all its callbacks."""
        services = self._services()
        connector = services.connector
        assert isinstance(connector, LayerwiseConnector)
        token = request.path_params.get("token", "")
        if not connector.expects(token):
            services.metrics.callbacks.inc("refused")
            log.info("callback refused", extra={"peer": request.client.host if request.client else ""})
            text = "Only the decode worker of a request under way may ask for its prefill, at the URL that it was sent."
            return Response(error_body(403, text), 403, media_type="application/json")
        try:
            asked = orjson.loads(await request.body())
            known_as = asked["request_id"]
            if not isinstance(known_as, str):
                raise TypeError("request_id")
            params = orjson.dumps(asked)
        except (ValueError, KeyError, TypeError):
            services.metrics.callbacks.inc("malformed")
            text = "The body must be a JSON object with a request_id."
            return Response(error_body(400, text, "request_id"), 400, media_type="application/json")
        outcome = connector.called_back(token, known_as, params)
        services.metrics.callbacks.inc(outcome)
        if outcome == "unknown":
            text = "This is not the request that the URL was made for."
            return Response(error_body(404, text, "request_id"), 404, media_type="application/json")
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")
