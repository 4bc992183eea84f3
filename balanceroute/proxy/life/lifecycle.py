"""One request from its arrival to its single finish.

A `Leg` is one prompt with one answer, the only shape that a KV transfer can carry. It runs inside the task of whoever
serves the client and is the only place where a request's phases follow each other:

    submit -> [ wait for a prefiller -> probe -> pool, wait for a slot -> decode, relay ] -> finish
                     ^------ probe failed ---'                                 |
                     '-------- recomputed, decoder lost: prompt + ids so far --'

Four rules:

**Once.** `finish` is called in one `finally`, whatever happened; everything else that the leg holds (connections,
circuit verdicts) is released in the scope that took it. Releasing never awaits, so it can't be cancelled half-way.

**Status before bytes.** The decoder's stream is read until there is something for the client or the stream has ended;
only then `Outlet.start` is called. Up to that point a failure is another try or a status.

**Parameters once.** `_unspent` holds the prefiller's kv_transfer_params from its answer until a decoder may have seen
them. If the request leaves while it still holds them, the KV is drained. They are not sent any more once the prefiller
may soon drop the KV, as after a pause of our whole process: a decoder would read what is there by then, unnoticed.

**Back-pressure is no failure.** A 429 or 503 is a worker's way to say "later", so it costs the request none of its
tries. The worker rests (`circuit.py`) and the request goes round again; while every worker rests it waits, as it would
for a slot, and gets a 503 with Retry-After when it has waited `queue.deadline_s` for its first token.

**A client that goes away is not always a reason to hang up at once.** A prefiller that has just finished pins KV whose
parameters only its reply tells, and a decoder that has not handed the request to its engine yet forgets it without
telling the prefiller; both then hold the KV until the connector's timeout, minutes later. So `abandon` lets a probe
run for `PROBE_GRACE_S` more and a decode, until its first event, for `DECODE_GRACE_S`, and hangs up then.

Timeouts cost nothing per event: the leg keeps its deadlines as plain numbers, its ticket the time of the last token,
and the reaper, which looks at all legs a few times per second, interrupts those that are late (`interrupt`).
"""

import asyncio
import logging
import math
import random
import sys
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from balanceroute.build import scheduler_config
from balanceroute.config import Config
from balanceroute.core.types import Outcome, RequestSpec, WorkerState
from balanceroute.errors import (
    BadUpstreamReply,
    BalanceRouteError,
    ConnectFailed,
    DecodersLost,
    ForeignReply,
    NotResumable,
    QueueTimeout,
    UpstreamError,
    UpstreamStatus,
    UpstreamTimeout,
)
from balanceroute.proxy.admission.ledger import RETRY_AFTER_S, Ledger, Ticket
from balanceroute.proxy.admission.prompt_sizes import PromptSizes, traits_to_estimate
from balanceroute.proxy.life.relay import relay, write_part
from balanceroute.proxy.life.resumption import Fidelity, resumption
from balanceroute.proxy.life.suspicion import Choices, Sign, Suspect, Suspicions, sign_of
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.wire.answers import correct_answer
from balanceroute.proxy.wire.bounds import answers, retry_after_s
from balanceroute.proxy.wire.connectors import Connector
from balanceroute.proxy.wire.payloads import ClientRequest, PrefillResult, parse_probe_reply, resume, score_body
from balanceroute.proxy.wire.prompt_blocks import PromptBlocks
from balanceroute.proxy.wire.prompt_part import prompt_text
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd
from balanceroute.proxy.workers.connector_check import check_connector, pinned_nothing, shortened
from balanceroute.proxy.workers.drainer import Drain, Drainer
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.probing import is_alive
from balanceroute.proxy.workers.silence import Attention, FrozenGroup
from balanceroute.proxy.workers.upstream import Reply

log = logging.getLogger(__name__)

REPLY_LIMIT: Final = 256 * 2**20  # an unstreamed answer with logprobs and the prompt's ids; more is a fault
ERROR_LIMIT: Final = 2**20
# Hanging up costs (chance to hit the window) x (480 s of pinned KV), going on costs half of what the prefill takes:
# with a window of 20 ms between engine and reply (a busy machine) both are equal for a prefill of 4.4 s.
PROBE_GRACE_S: Final = 5.0
# From a decoder's socket to its engine, tokenisation included. An idle one needs milliseconds and its first event ends
# the wait; a real vLLM on an overloaded machine had not done it after 0.5 s, and its prefiller kept the KV.
DECODE_GRACE_S: Final = 5.0
MAX_FRUITLESS: Final = 8  # a full engine may pop a request more than once before its first token
MAX_RESTARTS: Final = 8  # of an answer that can't be resumed: each one is lost work
_JSON = (b"content-type", b"application/json")
_NO_ANSWER: Final = frozenset((StreamEnd.ERROR, StreamEnd.MALFORMED, StreamEnd.FOREIGN))
_NOTHING_YET: Final = EventScanner()  # stands for the scanner until the first prefill is done
_draws = random.Random()  # jitter of backoffs: no decision depends on it


class Outlet(Protocol):
    """Where a leg's answer goes."""

    @property
    def started(self) -> bool:
        """Whether the client has seen the status; from then on nothing can be taken back."""
        ...

    @property
    def ends_response(self) -> bool:
        """Whether the stream's [DONE] ends the client's response too."""
        ...

    def start(self) -> None:
        """The first bytes are about to come."""
        ...

    def write(self, body: bytes, /) -> bool:
        """Take whole events, not the last; False if the client's socket is full: nothing has happened."""
        ...

    def end(self, body: bytes, /) -> None:
        """Take the last events."""
        ...

    async def drained(self) -> None:
        """Wait until events may be taken."""
        ...

    def whole(self, body: bytes) -> None:
        """An unstreamed answer."""
        ...

    def forget(self) -> bool:
        """Drop what the client has not seen yet; returns whether that is everything, so that the answer may restart."""
        ...


class NothingPinned(BadUpstreamReply):
    """The prefiller answered without kv_transfer_params: sent on, a decoder would prefill by itself."""


class DeadlineExceeded(UpstreamTimeout):
    """The request as a whole took too long."""

    retryable = False


class ClientGone(Exception):
    """The client disconnected: nobody is there to be answered."""


class ClientStalled(BalanceRouteError):
    """The client has stopped reading."""


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error, and what led to it, has left."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@dataclass(slots=True, eq=False, kw_only=True)
class LifeServices:
    """What all legs of one router share; `config` is replaced by a reload, the rest stays."""

    config: Config
    ledger: Ledger
    fleet: Fleet
    metrics: Metrics
    drainer: Drainer
    connector: Connector
    legs: "set[Leg]" = field(default_factory=set)
    prompt_sizes: PromptSizes = field(default_factory=PromptSizes)
    prompt_blocks: PromptBlocks = field(default_factory=PromptBlocks)
    suspicions: Suspicions = field(default_factory=Suspicions)
    looked_s: float = -math.inf  # when the reaper looked last: our loop was not stalled then
    attention: Attention = field(default_factory=Attention)
    frozen: list[FrozenGroup] = field(default_factory=list)  # groups of workers that fell silent together

    @property
    def knows_prefixes(self) -> bool:
        """Whether the choice of a prefiller asks what a prompt begins with."""
        return self.config.prefill.policy == "prefix_affinity"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one event loop."""
        return self.ledger.loop

    def configure(self, config: Config) -> None:
        """Other settings from now on, for all that reads them as it goes."""
        self.config = config
        self.ledger.configure(scheduler_config(config))
        self.drainer.pin_s = config.kv_pin_s


class Leg:
    """One single-prompt, single-answer request; `run` is its whole life."""

    __slots__ = (
        "_abandoned",
        "_begun_s",
        "_choices",
        "_failures",
        "_grace_s",
        "_headers",
        "_idle_s",
        "_interruption",
        "_key",
        "_original",
        "_outlet",
        "_pinned_s",
        "_refusal",
        "_reply",
        "_restarts",
        "_s",
        "_scanner_options",
        "_suspect",
        "_task",
        "_thought_tokens",
        "_ticket",
        "_traits",
        "_tries",
        "_unspent",
        "at",
        "cached_tokens",
        "deadline_s",
        "decode_wait_s",
        "decoder",
        "first_token_s",
        "id",
        "outcome",
        "prefill_wait_s",
        "prefiller",
        "prompt_reply",
        "prompt_tokens",
        "recomputes",
        "request",
        "scanner",
        "stage_deadline_s",
        "stalled_since_s",
        "waits_for",
        "worker",
    )

    def __init__(
        self,
        services: LifeServices,
        request_id: str,
        request: ClientRequest,
        outlet: Outlet,
        headers: list[tuple[bytes, bytes]],
        *,
        prompt_key: str = "",
        deadline_s: float = math.inf,
        scanner_options: dict[str, Any] | None = None,
        choices: Choices | None = None,
    ) -> None:
        """`headers` go to the workers as they are.

        `scanner_options` are for an answer in another form, or made of several legs, as `choices` are.
        """
        self._traits = traits_to_estimate(request)
        self._thought_tokens = request.prompt_tokens
        if self._traits is not None:
            self._thought_tokens = services.prompt_sizes.estimate(request, self._traits)
        self.id, self.request, self.deadline_s = request_id, request, deadline_s
        self.scanner = _NOTHING_YET
        self._scanner_options = scanner_options or {}
        self.outcome = Outcome.FAILED
        self.prefiller = self.worker = ""
        self.decoder: Worker | None = None  # whose tokens come
        self.at = ""  # the worker that a request of ours is under way at
        self.waits_for = ("", "")  # the worker, and the stage, that the leg waits for or waited for last
        self.prompt_tokens, self.recomputes = 0, 0
        self.cached_tokens: int | None = None
        self.prompt_reply: dict[str, Any] | None = None  # a prefiller's, where the client wishes to know of its prompt
        self.prefill_wait_s = self.decode_wait_s = 0.0
        self.first_token_s = 0.0
        self.stage_deadline_s = self.stalled_since_s = math.inf
        self._idle_s = -math.inf  # longest pause between two tokens, once there has been one
        self._s, self._outlet, self._headers, self._key = services, outlet, headers, prompt_key
        self._original = request
        self._ticket: Ticket | None = None
        self._task: asyncio.Task[Any] | None = None
        self._reply: Reply | None = None
        self._unspent: bytes | None = None
        self._pinned_s = 0.0
        self._interruption: BalanceRouteError | None = None
        self._failures = {"prefill": 0, "decode": 0, "fruitless": 0, "refused": 0}  # in a row
        self._restarts = 0
        self._choices = choices
        self._suspect = Suspect() if choices is None else choices.suspect
        self._begun_s = math.inf  # when the first token of this life came
        self._refusal: UpstreamStatus | None = None  # the last 429 or 503 before the first token
        self._tries = 0
        self._abandoned = False
        self._grace_s = 0.0

    async def run(self, task: asyncio.Task[Any] | None = None) -> None:
        """Serve the request: returns when its answer is complete.

        Args: task: the one that runs this, where the caller has asked already.

        Raises: Rejected, UpstreamError: what the client is to be told; `Outlet.started` says whether as a status or
        as an event.
        """
        if self._abandoned:
            raise ClientGone
        services = self._s
        request = self.request
        tokens = self._thought_tokens
        spec = RequestSpec(self.id, tokens, request.priority, self._key, request.effective_limit)
        if services.knows_prefixes:
            spec.prefix, spec.block_tokens = services.prompt_blocks.of(request, tokens)
        ticket = self._ticket = services.ledger.submit(spec)
        self._task = task or asyncio.current_task()
        services.legs.add(self)
        try:
            await self._serve(ticket)
            self.outcome = Outcome.FINISHED
        except QueueTimeout:
            self.outcome = Outcome.EXPIRED
            raise
        except (ClientStalled, ClientGone):
            self.outcome = Outcome.CANCELLED
            raise
        except asyncio.CancelledError:
            if not self._was_interrupted():
                self.outcome = Outcome.FINISHED if self.scanner.end is StreamEnd.DONE else Outcome.CANCELLED
                raise
            raise self._interruption_error() from None
        finally:
            services.legs.discard(self)
            if self._suspect.losses:
                services.suspicions.end_turn(self._suspect)
            if self._choices is not None and self.outcome is Outcome.FINISHED:
                self._choices.clear()  # on a failure the others are abandoned: none of them may go now
            self._leave(ticket)
            # Errors keep the frames that they came through, these keep the leg with its bodies, and the leg the errors:
            # a ring that is freed only when all garbage is looked for, which may take very long.
            self._task = self._refusal = None
            _clear_frames(sys.exc_info()[1])

    def abandon(self) -> None:
        """The client is gone: end the request, at once or as soon as nothing leaks by it."""
        if self._abandoned:
            return
        self._abandoned = True
        if self._task is None:
            return  # it will find out as soon as it runs
        grace_s = self._grace_s
        if grace_s:
            self._s.loop.call_later(grace_s, self._hang_up)
        else:
            self._task.cancel()

    def _hang_up(self) -> None:
        if self in self._s.legs and self._task is not None:
            self._task.cancel()

    def _check_abandoned(self, worker: Worker | None = None) -> None:
        if self._abandoned:
            if worker is not None:
                worker.circuit.no_verdict()
            raise ClientGone

    def interrupt(self, error: BalanceRouteError) -> None:
        """End the current stage with this error: the reaper found it late."""
        if self._interruption is None and self._task is not None:
            self._interruption = error
            self._task.cancel()

    def move(self, worker_id: str, stage: str) -> None:
        """Leave a worker that has fallen silent: that try has failed, and whatever it still sends is not read."""
        self.interrupt(UpstreamTimeout("the worker has fallen silent", worker=worker_id, stage=stage))

    @property
    def may_move(self) -> bool:
        """Whether the answer can go on elsewhere; one that can't is left where it is, until it is late."""
        scanner = self.scanner
        if not scanner.tokens or not self._outlet.started:
            return True
        resumable = resumption(self._original, scanner.cut()).fidelity is not Fidelity.INVALID
        return self._s.config.retry.resume_on_worker_loss and resumable and scanner.ids_exact

    def expects_tokens_from(self, worker_id: str) -> bool:
        """Whether a stream from that worker is open whose client reads."""
        return (
            self.worker == worker_id
            and self._reply is not None
            and self.request.streams_upstream
            and not self._reply.paused
        )

    @property
    def last_token_s(self) -> float:
        """When the last token came, on whatever worker; 0 before."""
        return 0.0 if self._ticket is None else self._ticket.last_token_s

    def late(self, now: float) -> bool:
        """Whether the worker should have given its answer, its first byte or its next token by now."""
        return now > max(self.stage_deadline_s, self.last_token_s + self._idle_s)

    @property
    def started(self) -> bool:
        """Whether the client has seen something of this leg."""
        return self._outlet.started

    @property
    def blocked_by_client(self) -> bool:
        """Whether the worker isn't read at the moment because the client doesn't read, or has nothing left to say."""
        return self._reply is not None and (self._reply.paused or self._reply.over)

    # -- the phases

    async def _serve(self, ticket: Ticket) -> None:
        while True:
            result = await self._prefill(ticket)
            ticket.prefilled(result.prompt_tokens, result.cached_tokens)
            worker = await self._admission(ticket)
            self.decode_wait_s += self._s.ledger.now() - ticket.pooled_s
            if self._s.drainer.too_old(self._pinned_s):
                ticket.requeue()
                self._free_kv()
                continue
            self.worker = worker.id
            lost: UpstreamError | None = None
            tokens = self.scanner.tokens
            try:
                if await self._decode(ticket, worker, result):
                    return
                worker.circuit.no_verdict()
                if self.scanner.tokens == tokens:
                    await asyncio.sleep(self._fruitless(worker))
            except UpstreamError as error:
                self._check_abandoned(worker)
                lost = error
                await self._suspect_loss(error, worker)
                await asyncio.sleep(self._judge(error, worker, "decode"))
            if lost is None or not pushes_back(lost):
                self._s.metrics.recomputes.inc("recomputed" if lost is None else "worker_lost")
            if not self._prepare_resume(result, lost):
                await self._end_by_length()
                return
            self.recomputes += 1
            ticket.requeue()
            self._free_kv()

    async def _prefill(self, ticket: Ticket) -> PrefillResult:
        waiting_since_s = self._s.ledger.now()
        while True:
            worker = self._s.fleet[await self._patiently(ticket, ticket.prefiller())]
            if worker.state is not WorkerState.UP:
                ticket.prefill_failed()
                continue
            self.prefill_wait_s += self._s.ledger.now() - waiting_since_s
            self.prefiller = worker.id
            sent_s = self._s.ledger.now()
            try:
                result = await self._probe(worker)
            except UpstreamError as error:
                self._check_abandoned(worker)
                delay_s = self._judge(error, worker, "prefill")
                await asyncio.sleep(delay_s)
                waiting_since_s = self._s.ledger.now()
                ticket.prefill_failed()
            else:
                # the answer may have lain there since our loop turned last
                self._unspent, self._pinned_s = result.kv_transfer_params, max(sent_s, self._s.looked_s)
                self._check_abandoned(worker)
                self._check_resumed(worker, result)
                if self.scanner is _NOTHING_YET:
                    self.prompt_tokens, self.cached_tokens = result.prompt_tokens, result.cached_tokens
                    self.prompt_reply = result.reply
                    self._learn_size(result.prompt_tokens)
                    self.scanner = self._new_scanner(result)
                return result

    async def _admission(self, ticket: Ticket) -> Worker:
        """Wait for the decode worker. Raises: QueueTimeout.

        One that has gone out between the decision and now, be it for another request's trial, is not asked.
        """
        while True:
            worker = self._s.fleet[await self._patiently(ticket, ticket.admission())]
            choices = self._choices
            if choices is not None:
                await choices.turn(self)
                if choices.cleared and self._suspect is choices.suspect:
                    self._suspect = Suspect()
            if self._suspect.losses:
                await self._s.suspicions.turn(self._suspect, worker.id)
            if worker.state is WorkerState.UP:
                return worker
            self._s.suspicions.end_turn(self._suspect)
            if choices is not None:
                choices.back(self)
            ticket.put_back()

    async def _patiently(self, ticket: Ticket, answer: Awaitable[str]) -> str:
        """Wait for a worker; once refused by one, until the queue's deadline only. Raises: QueueTimeout."""
        refusal = self._refusal
        if refusal is None:
            return await answer
        try:
            async with asyncio.timeout_at(ticket.arrived_s + self._s.config.queue.deadline_s):
                return await answer
        except TimeoutError:
            text = f"No worker has taken the request; the last one, for {refusal.stage}, answered {refusal.status}."
            raise QueueTimeout(text, retry_after_s=max(RETRY_AFTER_S, refusal.retry_after_s)) from refusal

    def _check_resumed(self, worker: Worker, result: PrefillResult) -> None:
        """An engine too old to take token ids for a chat would start the answer over: better an error than that.

        Raises: BadUpstreamReply: the prefill was of another prompt than prompt and answer so far.
        """
        expected = self.request.prompt_tokens
        if self.request is not self._original and result.prompt_tokens != expected:
            raise BadUpstreamReply(
                f"it can't go on from token ids: prefilled {result.prompt_tokens} tokens, not {expected}",
                worker=worker.id,
                stage="prefill",
            )

    def _new_scanner(self, result: PrefillResult) -> EventScanner:
        request = self.request
        prefix = prompt_text(request, result.reply) if result.reply is not None and request.stream else ""
        return EventScanner(
            prefix=prefix,
            want_token_ids=request.return_token_ids,
            want_usage=request.include_usage or request.assembled,
            want_continuous_usage=request.continuous_usage,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            **self._scanner_options,
        )

    async def _probe(self, worker: Worker) -> PrefillResult:
        config = self._s.config.limits
        self._tries += 1
        worker.in_use += 1
        worker.circuit.used()
        self.stage_deadline_s = self._s.ledger.now() + config.first_byte_timeout_s.prefill
        self._grace_s = PROBE_GRACE_S
        self.at = worker.id
        self.waits_for = (worker.id, "prefill")
        try:
            reply = await worker.upstream.request(
                "POST",
                self.request.path,
                score_body(self.request) if self.request.scores_only else self._s.connector.probe(self.request),
                self._headers_for(worker),
                connect_timeout_s=config.connect_timeout_s,
            )
            body = await reply.read(REPLY_LIMIT if reply.status == 200 else ERROR_LIMIT)
            if reply.status != 200:
                raise status_error(reply, body, worker, "prefill")
            result = parse_probe_reply(body, worker=worker.id, keep=self.request.prompt_wishes is not None)
            self._check_id(worker, "prefill", result.reply_id)
            if result.kv_transfer_params is None and not self.request.scores_only:
                pinned_nothing(worker, self._s.connector, self._s.metrics.conditions)
                raise NothingPinned("it returned no kv_transfer_params", worker=worker.id, stage="prefill")
            if result.kv_transfer_params is not None and worker.kv_connector is None:
                self._check_connector(worker, result.kv_transfer_params)
            worker.circuit.success()
            worker.progress_s = self._s.ledger.now()
            self._failures["prefill"] = 0
            return result
        except ForeignReply:
            self._s.drainer.orphan()  # what it has pinned for us, if anything, nobody will ever be told
            raise
        except asyncio.CancelledError:
            worker.circuit.no_verdict()
            self._s.drainer.orphan()  # it may finish, or have finished, all the same
            if not self._was_interrupted():
                raise
            raise self._interruption_error() from None
        finally:
            self._grace_s = 0.0
            self.stage_deadline_s = math.inf
            self.at = ""
            worker.in_use -= 1

    async def _decode(self, ticket: Ticket, worker: Worker, result: PrefillResult) -> bool:
        """Let the worker decode; True when the answer is complete, False when it is to be resumed elsewhere."""
        limits = self._s.config.limits
        params = self._unspent
        assert params is not None
        now = self._s.ledger.now()
        if worker.in_use == 0:
            worker.busy_since_s = now
        worker.in_use += 1
        worker.circuit.used()
        if self.request.streams_upstream:  # else nothing comes before the whole answer
            self.stage_deadline_s = now + limits.first_byte_timeout_s.decode
        self._grace_s = DECODE_GRACE_S
        self.at = worker.id
        self.waits_for = (worker.id, "decode")
        tokens, answered = self.scanner.tokens, False
        try:
            body = self._s.connector.decode(self.request, params)
            self._unspent = None
            reply = await worker.upstream.request(
                "POST",
                self.request.path,
                body,
                self._headers_for(worker),
                connect_timeout_s=limits.connect_timeout_s,
                retry_stale=False,  # a worker that took the request and died looks the same: the KV may be pulled
            )
            self._reply = reply
            if reply.status != 200:
                error = status_error(reply, await reply.read(ERROR_LIMIT), worker, "decode")
                if isinstance(error, UpstreamStatus) and (
                    error.status < 500 or error.status == 503 or self.request.streams_upstream
                ):
                    self._unspent = params  # refused before the engine saw it: its KV is still pinned
                raise error
            if reply.header(b"content-encoding") not in (None, b"identity"):
                raise BadUpstreamReply("it compressed its reply unasked", worker=worker.id, stage="decode")
            if self.request.streams_upstream:
                complete = await self._stream(ticket, worker, reply)
            else:
                complete = await self._unstreamed(ticket, worker, reply, result)
            answered = True
            return complete
        except ConnectFailed as error:
            if not error.sent:
                self._unspent = params
            raise
        except asyncio.CancelledError:
            worker.circuit.no_verdict()
            if not self._was_interrupted():
                raise
            error_of_stage = self._interruption_error()
            if self._reply is not None and self._reply.undelivered:
                raise ClientStalled("the client had not taken all events when the request was ended") from None
            if self.scanner.end is StreamEnd.DONE:
                return True
            if self.scanner.finish_reason is not None and not isinstance(error_of_stage, ClientStalled):
                await self._close_finished()
                return True
            raise error_of_stage from None
        finally:
            if self._reply is not None and self.scanner.end is not StreamEnd.DONE:
                self._reply.abort()
            self._reply = None
            if not answered and self._unspent is None and self.scanner.tokens == tokens:
                self._s.drainer.orphan()  # the worker was told, but gave no sign of having pulled the KV
            self._grace_s = 0.0
            self.stage_deadline_s = self.stalled_since_s = math.inf
            self._idle_s = -math.inf
            self.decoder = None
            if self._suspect.losses:
                self._s.suspicions.end_turn(self._suspect)
            self.at = ""
            worker.in_use -= 1

    async def _stream(self, ticket: Ticket, worker: Worker, reply: Reply) -> bool:
        scanner, outlet = self.scanner, self._outlet
        before = counted = scanner.tokens
        _check_is_stream(reply, worker)
        scanner.expect(self.upstream_id, checked=bool(worker.echoes_ids), request_id=self.id)
        out = b""
        while not (out and scanner.begun) and scanner.end is None:
            chunk = await reply.next_chunk()
            self._grace_s = 0.0
            self._check_abandoned(worker)
            if chunk is None:
                scanner.close()
                break
            out += scanner.feed(chunk)
            if len(out) > ERROR_LIMIT and not scanner.begun:
                break
            if scanner.tokens > counted:
                ticket.progress(scanner.tokens - counted)
                counted = scanner.tokens
                self._has_begun(ticket, worker)
        if not scanner.begun:  # [DONE] alone is a request that was given back at once
            if chunk is None or scanner.end is None:
                raise BadUpstreamReply("its stream holds no event of an answer", worker=worker.id, stage="decode")
            out = b""
        elif scanner.end not in _NO_ANSWER:
            self._learn_id(worker, scanner.echoed)
            worker.circuit.success()
        broken: UpstreamError | None = None
        if out:
            if not outlet.started:
                outlet.start()
            broken = await relay(
                reply,
                scanner,
                outlet,
                ticket.progress,
                # a chat's role may come before its first token
                on_first=None if counted > before else lambda: self._has_begun(ticket, worker),
                first=out,
                ends_response=outlet.ends_response,
            )
        if scanner.finish_reason is not None and scanner.end is not StreamEnd.DONE:
            await self._close_finished()
        return self._ended(worker, broken)

    def _has_begun(self, ticket: Ticket, worker: Worker) -> None:
        """The first tokens are here: from now on the next one is waited for, and what failed before is forgotten."""
        ticket.settle()  # the prefiller's KV has been pulled
        at = worker.progress_s = ticket.last_token_s
        self.decoder = worker
        if not self.first_token_s:
            self.first_token_s = at
        self._idle_s = self._s.config.limits.idle_timeout_s
        self.stage_deadline_s = at + self._idle_s
        self._failures["decode"] = self._failures["fruitless"] = self._failures["refused"] = 0
        self._refusal = None
        self._begun_s = at
        if self._suspect.losses:
            self._s.suspicions.cleared(self._suspect)
        if self._choices is not None:
            self._choices.clear()

    async def _close_finished(self) -> None:
        """The answer has finished, and whatever the worker does before its [DONE] takes nothing from it.

        Going on from here would generate beyond its end; it only lacks the usage, if any, and the closing event, and
        that one is not made up.
        """
        scanner = self.scanner
        scanner.end = StreamEnd.NO_DONE
        owed = scanner.owed_usage(self.request.model, chat=self.request.endpoint == "chat")
        if owed:
            await write_part(self._outlet, owed)

    def _ended(self, worker: Worker, broken: UpstreamError | None) -> bool:
        """Judge how the worker's stream ended: True complete, False recomputed. Raises: UpstreamError."""
        end = self.scanner.end
        if end is StreamEnd.DONE:
            return True
        if end is StreamEnd.ERROR:
            raise _event_error(self.scanner.error or b"{}", worker)
        if end is StreamEnd.NO_DONE:
            return True
        if broken is not None:
            raise broken
        if end is StreamEnd.MALFORMED:
            raise BadUpstreamReply(self.scanner.fault, worker=worker.id, stage="decode")
        if end is StreamEnd.FOREIGN:
            raise self._foreign(worker, "decode", self.scanner.fault)
        if end is StreamEnd.OVERSIZED:
            raise BadUpstreamReply("an event is larger than any answer", worker=worker.id, stage="decode")
        return False

    async def _unstreamed(self, ticket: Ticket, worker: Worker, reply: Reply, result: PrefillResult) -> bool:
        body = await reply.read(REPLY_LIMIT)
        answer = correct_answer(
            self.request,
            body,
            worker=worker.id,
            cached_tokens=self.cached_tokens,
            upstream_id=self.upstream_id,
            request_id=self.id,
        )
        self._check_id(worker, "decode", answer.reply_id)
        worker.circuit.success()
        if answer.recomputed or answer.finish_reason is None:
            return False  # nothing of it has reached the client: once more from its own prompt
        if answer.tokens:
            ticket.progress(answer.tokens)
        self.first_token_s = worker.progress_s = self._s.ledger.now()
        self.scanner.tokens, self.scanner.finish_reason = answer.tokens, answer.finish_reason
        self.scanner.end = StreamEnd.DONE
        if self._choices is not None:
            self._choices.clear()
        self._outlet.whole(answer.body)
        return True

    def _learn_size(self, prompt_tokens: int) -> None:
        """A prefiller has counted the client's own prompt."""
        if self._traits is None:
            return
        error = abs(self._thought_tokens - prompt_tokens) / max(1, prompt_tokens)
        self._s.metrics.prompt_estimate_error.observe(error)
        self._s.prompt_sizes.learn(self._original, self._traits, prompt_tokens)

    # -- whose answer it is

    def _check_id(self, worker: Worker, stage: str, told: object) -> None:
        """Raises: ForeignReply: the answer's `id` is not ours, and this worker's always were."""
        echoed = answers(told, self.upstream_id)
        if worker.echoes_ids and not echoed:
            raise self._foreign(worker, stage, "the answer carries the id of another request")
        self._learn_id(worker, echoed)

    def _learn_id(self, worker: Worker, echoed: bool) -> None:
        """What an answer says of its worker: one that has ever put X-Request-Id into `id` always does."""
        if echoed:
            worker.echoes_ids = True
        elif worker.echoes_ids is None:
            worker.echoes_ids = False
            log.info("worker does not echo X-Request-Id, its answers go unchecked", extra={"worker": worker.id})

    def _foreign(self, worker: Worker, stage: str, text: str) -> ForeignReply:
        worker.upstream.drop_idle()  # the answer that is missing may still come on one of them
        return ForeignReply(text, worker=worker.id, stage=stage)

    def _check_connector(self, worker: Worker, kv_transfer_params: bytes) -> None:
        """Raises: WrongConnector."""
        services = self._s
        found = check_connector(worker, kv_transfer_params, services.connector, services.metrics.conditions)
        if found is not None:
            services.configure(shortened(services.config, [found]))

    # -- failures

    def _judge(self, error: UpstreamError, worker: Worker, stage: str) -> float:
        """Take note of a failed try; returns how long to wait before the next. Raises `error` when it was the last."""
        services, circuit = self._s, worker.circuit
        if isinstance(error, DeadlineExceeded):
            circuit.no_verdict()
            raise error
        now = services.ledger.now()
        retry = services.config.retry
        if isinstance(error, UpstreamStatus) and error.status < 500 and error.status != 429:
            circuit.no_verdict()
            raise error
        services.metrics.upstream_errors.inc(worker.id, stage, _kind(error))
        log.debug("try failed", extra={"request": self.id, "worker": worker.id, "stage": stage, "error": str(error)})
        if isinstance(error, UpstreamStatus) and pushes_back(error):
            circuit.busy(now, error.retry_after_s)
            self._refusal = None if self.scanner.tokens else error  # an answer that has begun has its own deadline
            self._failures["refused"] += 1
            services.metrics.retries.inc(stage)
            return self._backoff_s(self._failures["refused"])
        circuit.fault(now)
        self._failures[stage] += 1
        failures = self._failures[stage]
        if stage == "decode":
            failures -= self._suspect.explained
        last = failures >= retry.max_attempts or not error.retryable
        if last or (isinstance(error, NothingPinned) and failures > 1):
            raise error
        services.metrics.retries.inc(stage)
        return self._backoff_s(max(1, failures))

    async def _suspect_loss(self, error: UpstreamError, worker: Worker) -> None:
        """Take down that the worker died under this request. Raises: DecodersLost: once too often."""
        sign = sign_of(error)
        if sign is Sign.NONE:
            return
        if sign is Sign.MAYBE and await is_alive(worker, self._s.config.health.timeout_s):
            return
        suspect, now = self._suspect, self._s.ledger.now()
        if self.scanner.tokens_in_life:
            guilty = self._s.suspicions.lost_midway(suspect, worker.id, now, now - self._begun_s)
        else:
            there = (leg for leg in self._s.legs if leg is not self and leg.worker == worker.id)
            alone = all(leg.scanner.tokens_in_life for leg in there)
            guilty = self._s.suspicions.lost(suspect, worker.id, now, alone=alone)
        if not guilty:
            return
        worker.circuit.fault(now)
        self._s.metrics.upstream_errors.inc(worker.id, "decode", _kind(error))
        self._s.metrics.poison_requests.inc()
        log.warning(
            "request given up: decode workers die under it", extra={"request": self.id, "workers": suspect.workers}
        )
        where = "under this request's answer" if suspect.midway else "before this request's first token"
        text = f"{len(suspect.workers)} decode workers were lost {where}; it goes to no other"
        raise DecodersLost(text, worker=worker.id, stage="decode") from error

    def _fruitless(self, worker: Worker) -> float:
        """A decode was given back without a token: no fault, but no reason to go round for ever either.

        Returns how long to wait. Raises: BadUpstreamReply: it has happened `MAX_FRUITLESS` times in a row.
        """
        self._failures["fruitless"] += 1
        if self._failures["fruitless"] >= MAX_FRUITLESS:
            raise BadUpstreamReply("it gives the request back again and again", worker=worker.id, stage="decode")
        return self._backoff_s(self._failures["fruitless"])

    def _backoff_s(self, failures: int) -> float:
        """Exponential with full jitter."""
        retry = self._s.config.retry
        return _draws.uniform(0.0, min(retry.max_delay_s, retry.base_delay_s * 2.0 ** (failures - 1)))

    def _prepare_resume(self, result: PrefillResult, error: UpstreamError | None) -> bool:
        """Make the request that goes on where this life ended; False when its limit leaves nothing to generate.

        Raises: `error`, or BadUpstreamReply, when it can't be resumed.
        """
        if self._choices is not None:
            self._choices.back(self)
        scanner = self.scanner
        lost = error or BadUpstreamReply("the answer can't be resumed", worker=self.worker, stage="decode")
        is_lost = error is not None and not pushes_back(error)
        if self._outlet.started and is_lost and not self._s.config.retry.resume_on_worker_loss:
            raise lost
        cut = scanner.cut()
        scanner.resume()
        if scanner.tokens == 0:
            self.request = self._original
            return True
        how = resumption(self._original, cut)
        if how.fidelity is Fidelity.INVALID:
            text = f"the answer was cut off, and {how.because} is state that another decode worker does not have"
            lost = NotResumable(text, worker=self.worker, stage="decode")
        prompt_ids = scanner.prompt_ids or result.prompt_token_ids
        if how.fidelity is Fidelity.INVALID or not scanner.ids_exact or prompt_ids is None:
            self._start_again(result, lost)
            return True
        self._s.metrics.resumes.inc(how.fidelity.name.lower())
        try:
            self.request = resume(
                self._original,
                prompt_ids[: self.prompt_tokens],
                scanner.ids,
                resume_key=self._s.connector.resume_key,
            )
        except ValueError:
            return False
        return True

    def _start_again(self, result: PrefillResult, lost: UpstreamError) -> None:
        """From the original prompt, which needs a client that has seen nothing. Raises: `lost`, where it has."""
        self._restarts += 1
        if self._restarts > MAX_RESTARTS or not self._outlet.forget():
            self._s.metrics.resumes.inc("ended")
            raise lost
        self._s.metrics.resumes.inc("restarted")
        self.request = self._original
        self.scanner = self._new_scanner(result)

    async def _end_by_length(self) -> None:
        """The limit was reached when the worker was lost: say so as a worker would have."""
        out = self.scanner.feed(_closing_events(self._original, self.prompt_tokens, self.scanner.tokens))
        if not self._outlet.started:
            self._outlet.start()
        if self._outlet.ends_response:
            self._outlet.end(out)
        else:
            await write_part(self._outlet, out)

    def _was_interrupted(self) -> bool:
        """Whether the CancelledError under way is our own interruption, and nobody else's as well."""
        if self._interruption is None or self._task is None:
            return False
        if self._task.uncancel() > 0:
            self._interruption = None
            return False
        return True

    def _interruption_error(self) -> BalanceRouteError:
        error, self._interruption = self._interruption, None
        assert error is not None
        return error

    # -- leaving

    def _leave(self, ticket: Ticket) -> None:
        if ticket.left is None:
            ticket.finish(self.outcome, self.scanner.finish_reason or "")
        self._free_kv()

    def _free_kv(self) -> None:
        """Have pinned KV pulled that the request leaves behind, unless a decoder may have been told to already.

        A decoder that failed before its first token may or may not have pulled: its parameters must not be used
        again, so that KV is only counted (`_decode`).
        """
        params, self._unspent = self._unspent, None
        if params is None:
            return
        if self._suspect.losses:
            self._s.drainer.orphan()  # a drain is the same request once more, at yet another decode worker
        else:
            self._s.drainer.drain(Drain(self.id, self.request, params, tuple(self._headers), self._pinned_s))

    @property
    def upstream_id(self) -> str:
        """X-Request-Id at the workers; every try has its own."""
        return self.id if self._tries == 1 else f"{self.id}-{self._tries}"

    def _headers_for(self, worker: Worker) -> list[tuple[bytes, bytes]]:
        return [_JSON, (b"x-request-id", self.upstream_id.encode()), *self._headers, *worker.rank_header]


def _closing_events(request: ClientRequest, prompt_tokens: int, tokens: int) -> bytes:
    chat = request.endpoint == "chat"
    head = {
        "id": "",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": request.model,
    }
    part: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    events: tuple[dict[str, Any], ...] = ({**head, "choices": [choice]}, {**head, "choices": [], "usage": usage})
    return b"".join(b"data: %s\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"


def status_error(reply: Reply, body: bytes, worker: Worker, stage: str) -> UpstreamError:
    """A worker's answer that is no 200: an error of its own, or one that no completion has."""
    if reply.status < 400:
        return BadUpstreamReply(f"it answered with status {reply.status}", worker=worker.id, stage=stage)
    error = UpstreamStatus(f"status {reply.status}", worker=worker.id, stage=stage, status=reply.status, body=body)
    error.retry_after_s = retry_after_s(reply.header(b"retry-after"))
    return error


def _check_is_stream(reply: Reply, worker: Worker) -> None:
    """Raises: BadUpstreamReply: the answer says that it is something else than the stream that was asked for."""
    kind = reply.header(b"content-type")
    if kind is not None and not kind.lower().startswith(b"text/event-stream"):
        told = kind[:80].decode("latin-1")
        raise BadUpstreamReply(f"it answered with {told}, not a stream of events", worker=worker.id, stage="decode")


def pushes_back(error: UpstreamError) -> bool:
    """Whether a worker says that it can't take more now: back-pressure, no fault, and its engine has seen nothing."""
    return isinstance(error, UpstreamStatus) and error.status in (429, 503)


def _event_error(payload: bytes, worker: Worker) -> UpstreamStatus:
    """An error event as the error that it would have been as a status."""
    try:
        told = orjson.loads(payload).get("error")
        code = told.get("code") if isinstance(told, dict) else None
    except (ValueError, AttributeError):
        code = None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return UpstreamStatus("error event", worker=worker.id, stage="decode", status=status, body=payload)


def _kind(error: UpstreamError) -> str:
    if isinstance(error, UpstreamStatus):
        return f"status_{error.status // 100}xx"
    names: dict[type[UpstreamError], str] = {
        ConnectFailed: "connect",
        UpstreamTimeout: "timeout",
        ForeignReply: "foreign_reply",
        BadUpstreamReply: "bad_reply",
    }
    return next((name for kind, name in names.items() if isinstance(error, kind)), "other")
