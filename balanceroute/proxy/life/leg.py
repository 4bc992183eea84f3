"""One request from its arrival to its single finish.

A `Leg` is one prompt with one answer, the only shape that a KV transfer can carry. It runs inside the task that serves
the client. It holds the request's resources and state. Its strategy (`pull.py`, `layerwise.py` or `scoring.py`) has the
phases and their order.

| module | what it does for a leg |
|---|---|
| `pull.py`, `layerwise.py`, `scoring.py` | the phases, with a table of their order |
| `prefilling.py`, `decoding.py` | one try at a prefiller, one at a decode worker |
| `cut_off.py` | what follows a decode that ended too early |
| `answer.py` | the answer so far, and its continuation when a worker is lost |
| `retries.py` | judges failed tries, and waits before the next |

Four rules:

**Once.** `finish` is called in one `finally`; everything else that the leg holds (connections, trials of circuits) is
released in the scope that took it. Releasing never awaits, so it can't be cancelled half-way.

**Status before bytes.** The decoder's stream is read until there is something for the client or the stream has ended;
only then `Outlet.start` is called. Up to that point a failure is another try or a status.

**Parameters once.** `kv` holds the prefiller's kv_transfer_params from its answer until a decoder may have seen them.
If the request ends while it still holds them, the KV is drained. `held_kv.py` prevents the use of KV that may be gone.

**A client that goes away is not always a reason to hang up at once.** A prefiller that has just finished pins KV whose
parameters are only in its reply; a decoder that has not yet passed the request to its engine drops it without telling
the prefiller. In both cases the KV stays pinned until the connector's timeout, minutes later. So `abandon` lets a try
continue for its grace time (`enter`) before it hangs up.

Timeouts cost nothing per event: the leg keeps its deadlines as plain numbers, its ticket the time of the last token,
and the reaper, which looks at all legs a few times per second, interrupts those that are late (`interrupt`).
"""

import asyncio
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Final, Protocol

from mypy_extensions import mypyc_attr

from balanceroute.core.types import CANCELLED, EXPIRED, FAILED, FINISHED, GONE, UP, Phase, RequestSpec
from balanceroute.errors import BalanceRouteError, QueueTimeout, Rejected
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.life.answer import Answer
from balanceroute.proxy.life.errors import ClientGone, ClientStalled, WorkerSilent
from balanceroute.proxy.life.held_kv import HeldKv
from balanceroute.proxy.life.outlet import Outlet
from balanceroute.proxy.life.retries import Retries
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.life.suspicion import Choices
from balanceroute.proxy.wire.answer_identity import WHOLE, Part
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.probe_reply import PrefillResult
from balanceroute.proxy.wire.sse import DONE, Translation
from balanceroute.proxy.workers.drainer import Drain
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.pins import PinRecord
from balanceroute.proxy.workers.reply import Reply
from balanceroute.proxy.workers.upstream import checked_lines

REPLY_LIMIT: Final = 256 * 2**20  # an unstreamed answer with logprobs and the prompt's ids; more is a fault
SLOWEST_TOKEN_S: Final = 1.0  # per token that an unstreamed answer may have; when they are over, it is awaited


class Event(StrEnum):
    """The end of a phase of a leg, other than by an error, which ends the leg."""

    TAKEN = "taken"  # a prefiller takes the request
    PREFILLED = "prefilled"
    PREFILL_FAILED = "prefill failed"  # and may be tried again
    ADMITTED = "admitted"  # a decode worker takes the request
    CUT_OFF = "cut off"  # the decode worker was lost, or gave the request back: the answer is continued
    COMPLETE = "complete"


TAKEN, PREFILLED, PREFILL_FAILED, ADMITTED, CUT_OFF, COMPLETE = Event


Transitions = Mapping[Phase, Mapping[Event, Phase]]


class Strategy(Protocol):
    """The order of a leg's phases, in `follows`. For each phase it has a coroutine of that name.

    The phases are the scheduler's, which may be ahead: it chooses a worker before the leg hears of it.
    """

    first: ClassVar[Phase]
    follows: ClassVar[Transitions]


@mypyc_attr(allow_interpreted_subclasses=True)
class Leg:
    """One single-prompt, single-answer request; `run` is its whole life."""

    __slots__ = (
        "_abandoned",
        "_blocks",
        "_first",
        "_grace",
        "_grace_s",
        "_interruption",
        "_key",
        "_strategy",
        "_task",
        "_tries",
        "answer",
        "at_worker",
        "counted_tokens",
        "deadline_s",
        "decode_wait_s",
        "streaming_from",
        "first_token_s",
        "generates_from_s",
        "headers",
        "id",
        "idle_s",
        "kv",
        "kv_due",
        "outcome",
        "prefill_wait_s",
        "prefiller_id",
        "recomputes",
        "reply",
        "services",
        "try_deadline_s",
        "stalled_since_s",
        "ticket",
        "upstream_id",
        "retries",
        "last_tried",
        "decoder_id",
    )

    def __init__(
        self,
        services: LifeServices,
        request_id: str,
        request: ClientRequest,
        outlet: Outlet,
        headers: list[tuple[bytes, bytes]],
        strategy: "Callable[[Leg], Strategy]",
        *,
        prompt_key: str = "",
        deadline_s: float = math.inf,
        part: Part = WHOLE,
        translation: Callable[[], Translation] | None = None,
        choices: Choices | None = None,
        first: "Leg | None" = None,
    ) -> None:
        """`headers`: sent to workers unchanged.

        `part`, `choices`: for an answer made of several legs. `translation`: for one in another protocol. `first`: the
        leg of the first choice of the same prompt; None: this is the one.
        """
        self.id, self.services, self._strategy = request_id, services, strategy
        self._first: Leg | None = first
        self._blocks: tuple[list[int], int] | None = None  # of the prompt; the first leg has them for all
        self.answer: Answer = Answer(
            services, request, outlet, part, translation, None if first is None else first.answer
        )
        self.retries = Retries(services, request_id, choices, request.model)
        self.headers = checked_lines(headers)
        self._key: str = prompt_key if first is None else first._key
        self.deadline_s = deadline_s
        self.outcome = FAILED
        self.prefiller_id = self.decoder_id = ""  # the last workers asked
        self.recomputes = self._tries = 0
        self.counted_tokens = 0  # tokens of its answer that are in `generated_tokens_total`
        self.upstream_id = request_id  # X-Request-Id at the workers; every try has its own
        self.prefill_wait_s = self.decode_wait_s = self.first_token_s = 0.0
        # its resources
        self.ticket: Ticket
        self.kv = HeldKv(services)
        # its state
        self._task: asyncio.Task[Any] | None = None
        self.at_worker = ""  # the id of the worker with a request under way
        self.last_tried = ("", "")  # the id and tier of the worker that the present try, or the last one, went to
        self.streaming_from: Worker | None = None  # the decode worker whose tokens come
        self.reply: Reply | None = None  # the decode worker's stream, while it is read
        self.kv_due = False  # its decode worker waits for KV that is being computed: no token can come
        self.generates_from_s = math.inf  # since when its decode worker has had all that it needs, and is read
        # the deadline of the try
        self._grace_s = 0.0  # how long the try continues if the client leaves
        self._grace: asyncio.TimerHandle | None = None  # the timer that then ends it
        self.try_deadline_s = self.stalled_since_s = math.inf
        self.idle_s = -math.inf  # longest pause between two tokens, once there has been one
        self._abandoned = False
        self._interruption: BalanceRouteError | None = None

    async def run(self, task: asyncio.Task[Any] | None = None) -> None:
        """Serve the request: returns when its answer is complete.

        Args: task: the running one, if the caller knows it already.

        Raises: Rejected, UpstreamError: the client's error: an event if the outlet has started, else a status.
        """
        if self._abandoned:
            raise ClientGone
        self.ticket = self.services.tickets.submit(self._spec())
        self._task = task or asyncio.current_task()
        self.services.legs.add(self)
        try:
            strategy = self._strategy(self)
            phase = strategy.first
            while phase is not GONE:
                run_phase: Callable[[], Awaitable[Event]] = getattr(strategy, phase)
                phase = strategy.follows[phase][await run_phase()]
            self.outcome = FINISHED
        except QueueTimeout:
            self.outcome = EXPIRED
            raise
        except Rejected:
            if self.ticket.left:  # refused at its arrival: it has waited for that answer only, not for a worker
                self.prefill_wait_s = self.decode_wait_s = 0.0
            raise
        except (ClientStalled, ClientGone):
            self.outcome = CANCELLED
            raise
        except asyncio.CancelledError:
            error = self.interruption()
            if error is None:
                self.outcome = FINISHED if self.answer.scanner.end is DONE else CANCELLED
                raise
            if isinstance(error, QueueTimeout):
                self.outcome = EXPIRED
            raise error from None
        finally:
            self._close(sys.exc_info()[1])

    def _spec(self) -> RequestSpec:
        """The request as the scheduler sees it."""
        request, tokens = self.answer.request, self.answer.estimated_tokens
        spec = RequestSpec(self.id, tokens, request.priority, self._key, request.effective_limit)
        if self.services.knows_prefixes:
            first = self._first or self
            if first._blocks is None:
                first._blocks = self.services.prompt_blocks.of(request, tokens)
            spec.prefix, spec.block_tokens = first._blocks
        return spec

    def _close(self, error: BaseException | None) -> None:
        """Release all resources; `error`: the leg's error, if any."""
        answer = self.answer
        self.services.legs.discard(self)
        self.count_tokens()
        self.retries.close()
        if self.outcome is FAILED or self.outcome is EXPIRED:
            answer.count_ended(error)
        if self.outcome is FINISHED:
            answer.count_resumed()  # no further token came
            self.retries.clear_choices()  # after a failure the other choices are abandoned, so none may start now
        if not self.ticket.left:
            self.ticket.finish(self.outcome, answer.scanner.finish_reason or "")
        self.free_kv()
        # Errors refer to frames, frames to the leg with its bodies, and the leg to the errors: a reference cycle that
        # only a full garbage collection would free, which may come very late.
        self._task = None
        if self._grace is not None:  # the task may go on without the leg
            self._grace.cancel()
        clear_frames(error)

    # -- for other tasks: to end or move it

    def abandon(self) -> None:
        """End the request, because the client is gone: at once, or when no pinned KV would leak."""
        if self._abandoned:
            return
        self._abandoned = True
        if self._task is None:
            return  # the task checks when it starts
        if self._grace_s:
            self._grace = self.services.loop.call_later(self._grace_s, self._task.cancel)
        else:
            self._task.cancel()

    def check_abandoned(self, worker: Worker) -> None:
        """Check whether the client has left. Raises: ClientGone."""
        if self._abandoned:
            worker.circuit.inconclusive()
            raise ClientGone

    def interrupt(self, error: BalanceRouteError) -> None:
        """Interrupt the present step with this error: the reaper found it late, or the request can't go on.

        A refusal, which comes once and ends the request, replaces an error of the same turn that a retry may follow.
        """
        if self._task is None:
            return
        if self._interruption is None:
            self._interruption = error
            self._task.cancel()
        elif isinstance(error, Rejected):
            self._interruption = error

    def move(self, worker: Worker) -> None:
        """Leave a silent worker: that try has failed, and nothing more is read of it."""
        self.interrupt(worker.failure(WorkerSilent, "the worker has fallen silent"))

    def interruption(self) -> BalanceRouteError | None:
        """The error of `interrupt`, once; None: the cancellation came from elsewhere, too."""
        error, self._interruption = self._interruption, None
        if error is None or self._task is None or self._task.uncancel() > 0:
            return None
        return error

    # -- for other tasks: its state

    def count_tokens(self) -> None:
        """Count the tokens since the last call; those of an answer that starts again count once."""
        more = self.answer.scanner.tokens - self.counted_tokens
        if more > 0:
            self.counted_tokens += more
            self.services.metrics.tokens.inc(by=more)

    @property
    def last_token_s(self) -> float:
        """The time of the last token, from any worker; 0: none has come."""
        return self.ticket.last_token_s

    def late(self, now: float) -> bool:
        """Whether the worker's answer, first byte or next token is overdue."""
        return now > self.try_deadline_s and now > self.last_token_s + self.idle_s

    @property
    def blocked_by_client(self) -> bool:
        """Whether the worker is not read now because the client does not read, or because the worker's stream has
        ended.
        """
        return self.reply is not None and (self.reply.paused or self.reply.over)

    @property
    def expects_tokens(self) -> bool:
        """Whether the decode worker owes tokens: its stream is open, they may come, and the client reads.

        An answer in one piece is owed after the time that a slow engine needs for all of it.
        """
        request = self.answer.request
        if self.kv_due or not self.decoder_id:
            return False
        if request.streams_upstream:
            return self.reply is not None and not request.counted_by_usage and not self.blocked_by_client
        tokens = request.effective_limit
        needs_s = math.inf if tokens is None else tokens * SLOWEST_TOKEN_S
        return self.services.tickets.now() > self.generates_from_s + needs_s

    # -- for the reaper, which asks all legs several times per second

    def note_progress(self) -> None:
        """Note when the decode worker's last token came."""
        worker, at_s = self.streaming_from, self.ticket.last_token_s
        if worker is not None and at_s > worker.progress_s:
            worker.progress_s = at_s

    def wants_look(self, now: float, most_tokens: int) -> bool:
        """Whether the reaper may have something to do: a time is over, the answer is too long, or it is not read."""
        return (
            now > self.deadline_s
            or self.stalled_since_s < math.inf
            or self.late(now)
            or self.blocked_by_client
            or self.answer.scanner.tokens > most_tokens
        )

    # -- for its strategy

    def new_try(self) -> None:
        """Begin a new try, which is another request to the workers."""
        self._tries += 1
        if self._tries > 1:
            self.upstream_id = f"{self.id}-{self._tries}"

    def enter(self, worker: Worker, deadline_s: float, grace_s: float) -> None:
        """Note that a request to this worker is about to be sent; `leave` ends it.

        Args: deadline_s: for its first byte. grace_s: how long it continues if the client leaves.
        """
        worker.take()
        worker.circuit.used()
        self.retries.count_try(worker)
        self.try_deadline_s, self._grace_s = deadline_s, grace_s
        self.at_worker = worker.id
        self.last_tried = (worker.id, worker.tier)

    def note_received(self, worker: Worker) -> None:
        """Note that the worker has the request, so it can be hung up when the client leaves. Raises: ClientGone."""
        self._grace_s = 0.0
        self.check_abandoned(worker)

    def leave(self, worker: Worker) -> None:
        """Note that the request to this worker is over."""
        self._grace_s = 0.0
        self.try_deadline_s = math.inf
        self.at_worker = ""
        worker.release()

    async def admission(self) -> Worker:
        """Wait for the decode worker. Raises: QueueTimeout.

        A worker that has gone out since the decision, or is taken by another request's trial, is not used.
        """
        ticket, retries, fleet = self.ticket, self.retries, self.services.fleet
        waiting_since_s = ticket.pooled_s
        try:
            while True:
                worker = fleet[await retries.wait_for_worker(ticket, ticket.admission())]
                if retries.has_turn:
                    await retries.turn(worker)
                if worker.state is UP:
                    return worker
                retries.note_waiting()
                ticket.put_back()
        finally:
            self.decode_wait_s += self.services.tickets.now() - waiting_since_s

    def record(self, pins: PinRecord, prefiller: Worker, result: PrefillResult) -> None:
        """Record the KV that a prefiller has pinned, if any prompt of the same size can drain it.

        Not for a suspect, for which a drain would be another try, and not for embeddings, whose size in token ids is
        unknown.
        """
        self.kv.pin = None
        params, request, tokens = result.kv_transfer_params, self.answer.request, result.prompt_tokens
        if params is not None and tokens and request.prompt_json and not self.retries.has_losses:
            age_s = self.services.tickets.now() - self.kv.pinned_s
            self.kv.pin = pins.pin(self.upstream_id, prefiller.spec.url, params, tokens, request.model, age_s)

    def free_kv(self) -> None:
        """Have the request's pinned KV drained, unless a decoder may have its parameters.

        A decoder that failed before its first token may or may not have pulled: its parameters must not be used
        again, so that KV is only counted (`decoding.py`).
        """
        kv = self.kv
        params = kv.leave()
        if params is None:
            return
        drainer = self.services.drainer
        if self.retries.has_losses:
            drainer.orphan(kv.pinned_s)  # a drain is the same request once more, at yet another decode worker
            if kv.pin is not None:
                kv.pin.release()
        else:
            request, drains = self.answer.request, self.retries.drains
            drainer.drain(Drain(self.upstream_id, request, params, self.headers, kv.pinned_s, drains, kv.pin))


def clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
