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
* Somebody else asks, to get another user's KV: the URL that D was sent holds a token that is made for this attempt and
  sent to nobody else; without it the callback is refused before its body is read. If the callback arrives at another
  relay of the router, that relay asks the one that the token names (`link/callbacks.py`).
* D's id of a request is derived from X-Request-Id, and P's message to D carries P's. Every attempt therefore has an id
  of its own, and a request that was recomputed gets a second prefill (one id for the whole life never does: the second
  callback would be taken for a repetition).
* P fails without having seen the request (no connection, 429, 503, another model): another is asked to push to the
  same D.
* P fails otherwise: D may hold half of the KV and would wait for ever, so its stream is closed and the request goes
  back to the pool. Any other 4xx of P goes to the client. If D has given tokens, it has all of the KV: nothing happens.
* D and P make different prompts of the request: see `Answer.check_prompt`. P may tell its own after D's first tokens.
* D never asks: its engine has another connector, or can't reach the URL. After `CALLBACK_S` that is a line in the log
  and in /ready, until D asks. Where no decode worker has ever asked, the request ends after `GIVE_UP_S`: somebody has
  to change a setting, and every other try would take as long. Of one that has asked before, an answer in one piece is
  waited for no longer than a stream: nothing of it is being generated.
* Callbacks that arrive at another relay can't be passed on, because the run folder is unusable: requests end with 503
  instead of waiting for their timeout at D.
* The client goes, or D fails: P is hung up on at once. Nothing is pinned, so nothing is drained.

A requeued request is pooled again at once (`Ticket.requeue`), so the leg has two phases, and the prefill runs beside
the second one. The table `Layerwise.follows` is what runs.
"""

import asyncio
import logging
import math
from functools import partial
from typing import Any, ClassVar, Final

import orjson

from balanceroute.core.types import DECODING, GONE, POOLED, Phase, Role, WorkerState
from balanceroute.errors import (
    BadUpstreamReply,
    BalanceRouteError,
    ConnectFailed,
    EdgeFull,
    InvalidRequest,
    InvariantError,
    NoHealthyWorkers,
    QueueTimeout,
    UpstreamError,
    UpstreamTimeout,
)
from balanceroute.proxy.life.cut_off import failed, given_back, requeue_rest
from balanceroute.proxy.life.decoding import decode, first_bytes_s
from balanceroute.proxy.life.errors import KvTooOld, WorkerSilent
from balanceroute.proxy.life.leg import ADMITTED, COMPLETE, CUT_OFF, Event, Leg, Transitions, clear_frames
from balanceroute.proxy.life.prefilling import ask, has_prefilled
from balanceroute.proxy.life.retries import is_refused, pushes_back
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.payloads import push_body
from balanceroute.proxy.wire.probe_reply import PrefillResult
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.fleet import Worker

log = logging.getLogger(__name__)

CALLBACK_S: Final = 5.0  # an engine asks as soon as it has allocated the blocks
GIVE_UP_S: Final = 20.0  # a cluster that is full at the router's start frees blocks by then
UNREACHED: Final = "Decode workers' callbacks do not reach this process: the router's run folder cannot be used."
_MISTAKEN: Final = "its connector is not mooncake_layerwise, or it can't reach us"
PREFILL_REPLY_S: Final = 1.0  # D's last token may overtake P's reply, which only counts by then


def external_id(request: ClientRequest, upstream_id: str) -> str:
    """vLLM's name for a request with this X-Request-Id."""
    return f"chatcmpl-{upstream_id}" if request.endpoint == "chat" else f"cmpl-{upstream_id}-0"


def own_echo(request: ClientRequest) -> dict[str, Any] | None:
    """The text for a stream's echo: its first event may come before the prefiller's answer.

    Raises: InvalidRequest: the prompt is token ids, whose text only an engine can make.
    """
    wishes = request.prompt_wishes
    if wishes is None or not (wishes.echo and request.stream) or request.return_token_ids:
        return None
    prompt = orjson.loads(request.prompt_json)
    text = "" if prompt == [""] else prompt
    if not isinstance(text, str):
        raise InvalidRequest("echo of token ids is not available when stream=True with this connector.", param="echo")
    return {"choices": [{"text": text}]}


class PushFailed(BalanceRouteError):
    """The prefill that a decode worker waits for has failed; the request starts again after `delay_s`."""

    def __init__(self, error: UpstreamError, delay_s: float) -> None:
        super().__init__(str(error))
        self.error, self.delay_s = error, delay_s


class Layerwise:
    """The strategy that chooses the decode worker first; the prefill runs beside the decode, in its own task."""

    __slots__ = ("_leg", "_patience", "_push", "_services", "_worker")

    first: ClassVar[Phase] = POOLED
    follows: ClassVar[Transitions] = {
        POOLED: {ADMITTED: DECODING},
        DECODING: {COMPLETE: GONE, CUT_OFF: POOLED},
    }

    def __init__(self, leg: Leg) -> None:
        self._leg, self._services = leg, leg.services
        self._worker: Worker
        self._push: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle  # until the decode worker should have asked
        answer = leg.answer
        answer.cut_prompt(None)  # an estimate: the decode worker is asked before the prompt has been counted
        answer.begin(PrefillResult(None, answer.estimated_tokens, None, None, reply=own_echo(answer.request)))

    async def pooled(self) -> Event:
        """Wait for a slot at a decode worker. Raises: NoHealthyWorkers: its callback would not arrive."""
        self._worker = await self._leg.admission()
        if not self._services.callbacks.arrive():
            raise NoHealthyWorkers(UNREACHED)
        return ADMITTED

    async def decoding(self) -> Event:
        """Have the decode worker ask for the KV and generate the answer, or the rest of it."""
        leg, worker = self._leg, self._worker
        tokens = leg.answer.scanner.tokens
        lost: UpstreamError | None = None
        why = "recomputed"
        try:
            if await self._attempt(worker):
                return COMPLETE
        except KvTooOld:  # the worker may have cached another prompt's: see `Answer.check_prompt`
            why = "pulled_late"
            worker.circuit.inconclusive()
            await asyncio.sleep(leg.retries.count_without_token(worker))
        except PushFailed as failure:
            lost = failure.error
            clear_frames(failure)
            await asyncio.sleep(failure.delay_s)
        except WrongConnector:
            raise  # no fault of this worker's: out of service, it would be said to be down, and no longer why
        except UpstreamError as error:
            lost = error
            if error.tier != "prefill":
                await failed(leg, worker, error, tokens)
            elif not isinstance(error, WorkerSilent):  # a silent one may have written half of the KV
                raise  # judged already, as the last try
        else:
            await given_back(leg, worker, tokens)
        try:
            return await requeue_rest(leg, lost, why)
        finally:
            clear_frames(lost)
            lost = None  # errors keep the frames that they passed, such as this one

    async def _attempt(self, worker: Worker) -> bool:
        leg, callbacks = self._leg, self._services.callbacks
        leg.new_try()
        leg.kv_due = True
        leg.answer.await_push()
        token = callbacks.new_token()
        leg.kv.params = callbacks.params(token)
        called_back = partial(self._called_back, worker)
        callbacks.expect(token, external_id(leg.answer.request, leg.upstream_id), called_back)
        self._patience = self._services.loop.call_later(CALLBACK_S, self._not_asked, worker)
        try:
            done = await decode(leg, worker, grace_s=0.0)  # nothing is pinned by name
            if done and self._push is not None:
                await self._await_prefill_figures(self._push)
            return done
        finally:
            callbacks.forget(token)
            self._patience.cancel()
            leg.kv.params = None
            push, self._push = self._push, None
            if push is not None:
                push.cancel()  # the scheduler releases the prefiller with the request
            leg.answer.count_prompt_by_decoder()

    async def _await_prefill_figures(self, push: asyncio.Task[None]) -> None:
        """Wait for the prefiller's figures of the prompt.

        Raises: BadUpstreamReply: they do not come. BalanceRouteError: the request was interrupted, and lacks them.
        """
        leg, answer = self._leg, self._leg.answer
        lacks = answer.request.prompt_wishes is not None and not answer.request.stream
        try:
            await asyncio.wait({push}, timeout=None if lacks else PREFILL_REPLY_S)
        except asyncio.CancelledError:
            interruption = leg.interruption()
            if interruption is None:
                raise
            if lacks:
                raise interruption from None
            return  # its time may be over, but the client has the answer, or is about to get it
        if lacks and answer.prompt_reply is None:
            raise BadUpstreamReply(
                "its answer lacks what was asked of the prompt", worker=leg.prefiller_id, tier="prefill"
            )

    # -- the prefill beside it

    def _not_asked(self, worker: Worker) -> None:
        """It should have asked by now: tell operators, where it never has, and wait for no tokens that can't come."""
        if self._push is not None:
            return
        leg, services = self._leg, self._services
        if worker.kv_connector is None:
            reason = f"it has asked for no prefill yet: {_MISTAKEN} at {services.config.callback_url}"
            services.doubt_connector(worker, f"{reason} (layerwise.callback_url)")
            self._patience = services.loop.call_later(GIVE_UP_S - CALLBACK_S, self._give_up, worker)
        first_byte_s = services.config.limits.first_byte_timeout_s.decode
        leg.try_deadline_s = min(leg.try_deadline_s, services.tickets.now() + first_byte_s - CALLBACK_S)

    def _give_up(self, worker: Worker) -> None:
        """No decode worker has ever asked, and none will. The error tells clients no address."""
        unknown = all(each.kv_connector is None for each in self._services.fleet.of(Role.DECODE))
        if unknown and self._push is None:
            reason = f"it has asked for no prefill in {GIVE_UP_S:g} s: {_MISTAKEN} (layerwise.callback_url)"
            self._leg.interrupt(worker.failure(WrongConnector, reason))

    def _called_back(self, worker: Worker, asked: bytes) -> None:
        if worker.kv_connector is None:
            self._services.note_connector(worker, self._services.config.connector)
        self._leg.try_deadline_s = math.inf  # from here on the decode worker waits for the router
        worker.progress_s = self._services.tickets.now()
        self._leg.ticket.request_prefill()
        self._push = self._services.loop.create_task(self._run_push(worker, asked))
        self._push.add_done_callback(self._push_is_over)

    def _push_is_over(self, push: asyncio.Task[None]) -> None:
        """Handle the end of the prefill's task: after a bug in it the leg must not wait for tokens that can't come."""
        error = None if push.cancelled() else push.exception()
        if error is None:
            return
        leg = self._leg
        self._services.metrics.tasks_failed.inc("push")
        log.error("internal error", exc_info=error, extra={"where": "push", "request": leg.id})
        if not leg.answer.decodes:
            leg.interrupt(InvariantError("the prefill has failed by a bug of ours"))

    async def _run_push(self, worker: Worker, asked: bytes) -> None:
        leg, answer = self._leg, self._leg.answer
        try:
            result = await self._prefill_for(asked)
        except BalanceRouteError as error:
            if not answer.decodes:
                leg.interrupt(error)
            elif leg.ticket.pushing:
                leg.ticket.pushed(leg.ticket.prompt_tokens)
                self._has_kv()
            return
        try:
            answer.check_prefill(self._services.fleet[leg.prefiller_id], result)
            answer.check_push(leg.prefiller_id, worker, result)
        except UpstreamError as error:
            if answer.scanner.finish_reason is None:
                leg.interrupt(error)
            return
        self._kv_arrived(worker, result)
        if answer.prompt_tokens:
            return
        try:
            answer.prompt_counted(result)
            answer.scanner.prefilled(result.prompt_tokens, result.prompt_details)
        except EdgeFull as error:
            leg.interrupt(error)

    def _kv_arrived(self, worker: Worker, result: PrefillResult) -> None:
        leg = self._leg
        leg.ticket.pushed(result.prompt_tokens, result.cached_tokens)
        worker.progress_s = leg.generates_from_s = self._services.tickets.now()
        self._has_kv()

    def _has_kv(self) -> None:
        """Wait for the decode worker, which has all of the KV, no longer than its time limit.

        Its stream may have begun before: by tokens, which have set a limit unless the engine hides some, or without.
        """
        leg, now = self._leg, self._services.tickets.now()
        leg.kv_due = False
        leg.try_deadline_s = min(leg.try_deadline_s, now + first_bytes_s(self._services.config, leg.answer.request))

    async def _prefill_for(self, asked: bytes) -> PrefillResult:
        """Have a prefiller push what was asked for. Raises: QueueTimeout; PushFailed; UpstreamError of the last try."""
        leg = self._leg
        deadline_s = self._services.tickets.now() + self._services.config.queue.deadline_s
        while True:
            prefiller = await self._next_prefiller(deadline_s)
            try:
                return await self._ask_to_push(prefiller, asked)
            except UpstreamError as error:
                delay_s = leg.retries.judge(error, prefiller, begun=bool(leg.answer.scanner.tokens))
                if not _unseen(error):
                    raise PushFailed(error, delay_s) from error
                await asyncio.sleep(delay_s)
                leg.ticket.push_failed()

    async def _next_prefiller(self, deadline_s: float) -> Worker:
        """Wait for the prefiller that is to push. Raises: QueueTimeout."""
        leg, now = self._leg, self._services.tickets.now
        while True:
            waiting_since_s = now()
            try:
                async with asyncio.timeout_at(deadline_s):
                    prefiller = self._services.fleet[await leg.ticket.prefiller()]
            except TimeoutError:
                raise QueueTimeout("The request waited too long for a prefiller.") from None
            finally:
                leg.prefill_wait_s += now() - waiting_since_s
            if prefiller.state is WorkerState.UP:
                leg.prefiller_id = prefiller.id
                return prefiller
            leg.ticket.push_failed()

    async def _ask_to_push(self, prefiller: Worker, asked: bytes) -> PrefillResult:
        leg, patience_s = self._leg, self._services.config.limits.first_byte_timeout_s.prefill
        prefiller.take()
        prefiller.circuit.used()
        leg.retries.count_try(prefiller)
        try:
            async with asyncio.timeout(patience_s):
                result = await ask(leg, prefiller, push_body(leg.answer.request, asked))
            has_prefilled(leg, prefiller, result)
            return result
        except TimeoutError:
            raise prefiller.failure(UpstreamTimeout, f"no answer within {patience_s:g} s") from None
        except asyncio.CancelledError:
            prefiller.circuit.inconclusive()
            raise
        finally:
            prefiller.release()


def _unseen(error: UpstreamError) -> bool:
    """Whether the prefiller certainly has not begun, so that another one may push to the same place."""
    return pushes_back(error) or is_refused(error) or (isinstance(error, ConnectFailed) and not error.sent)
