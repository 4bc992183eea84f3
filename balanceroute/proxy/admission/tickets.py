"""The requests' side of the calls of `decider.py`: a ticket per request, with its state.

    ticket = tickets.submit(spec)         arrival
    await ticket.prefiller()              the prefiller for the probe; raises Rejected, also for a refusal at arrival
    ticket.prefilled(n, cached) | .prefill_failed()
    await ticket.admission()              the decode worker, once the policy has decided
    ticket.began()                        the first tokens have come
    ticket.progress(n)                    per read of the worker's stream; summed here, reported later
    ticket.put_back(), ticket.requeue()   wait again in the pool, or from the first phase on
    ticket.finish(outcome)                leaves, from any phase, once

Decode first (layerwise), a ticket is pooled at once if the request decodes, and between admission and the first token:

    ticket.request_prefill(), await ticket.prefiller(), ticket.pushed(n) | .push_failed()

Only the two waiting calls await, and an answer that has come already costs no turn of the loop. A lifecycle does not
see the scheduler, or in which process it is (`decider.py`).

**Tokens are reported in sums.** They come thousands of times per second, but only decisions need them. So a ticket adds
them up, and `settle` reports the sums before every decision, before a request leaves its worker, and several times per
second. The link to another process takes them at once (`Decider.at_once`), which costs as little.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import DECODING, GONE, POOLED, PREFILLING, QUEUED, Outcome, RequestSpec, Standing
from balanceroute.core.view import ClusterView
from balanceroute.errors import InvariantError
from balanceroute.proxy.admission.decider import Answer, Decider, Refusal


class Ticket:
    """A request's handle at the decider, from `submit` to its single `finish`.

    `phase`: the scheduler's, as far as it was reported. `decoder`: the decode worker that it is bound to; "": none.
    Decode first, `asking`: it is bound and waits for a prefiller; `pushing`: a prefiller computes its prompt.

    `prefiller_id`: the prefiller that computes its prompt, or keeps its KV until the first token. `prompt_tokens`: of
    its present prompt, including `earlier_tokens` generated before its `requeues`. `reported_tokens`: tokens generated
    since then that were reported.

    `queued_s`: the time of its arrival, or of its last requeue.

    `left`: it has ended, by `finish` or a refusal. `unreported_tokens`: tokens that have come since the last report.
    `last_token_s`: the time of the last ones; 0: none. `order`: the number of its arrival.
    """

    __slots__ = (
        "_answer",
        "_at_once",
        "_decider",
        "_now",
        "_tickets",
        "_unsettled",
        "_waiter",
        "arrived_s",
        "asking",
        "decoder",
        "earlier_tokens",
        "id",
        "last_token_s",
        "left",
        "order",
        "phase",
        "pooled_s",
        "prefiller_id",
        "prompt_tokens",
        "pushing",
        "queued_s",
        "reported_tokens",
        "requeues",
        "spec",
        "unreported_tokens",
    )

    def __init__(self, tickets: "Tickets", spec: RequestSpec, order: int) -> None:
        self.id, self.spec, self.order = spec.id, spec, order
        self.left = self.asking = self.pushing = False
        self.decoder = self.prefiller_id = ""
        self.prompt_tokens = spec.prompt_tokens
        self.reported_tokens = self.earlier_tokens = self.requeues = 0
        self._at_once = tickets.decider.at_once
        self._tickets, self._unsettled = tickets, tickets.unsettled
        self._decider, self._now = tickets.decider, tickets.now
        self.arrived_s = self.queued_s = now = self._now()
        self.pooled_s = self.last_token_s = 0.0
        self.unreported_tokens = 0
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        if tickets.decode_first and spec.decodes:
            self.phase, self.pooled_s = POOLED, now
        else:
            self.phase = QUEUED

    def prefiller(self) -> Coroutine[Any, Any, str]:
        """Wait for the prefiller that gets the probe. Raises: Rejected: QueueFull, NoHealthyWorkers, Draining,
        QueueTimeout.
        """
        return self._wait()

    def admission(self) -> Coroutine[Any, Any, str]:
        """Wait for the decode worker. Raises: as `prefiller`."""
        return self._wait()

    def check(self) -> None:
        """Raise a refusal that came while the request did not wait. Raises: as `prefiller`."""
        if isinstance(self._answer, Refusal):
            raise self._answer.error()

    def prefilled(self, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """The probe was answered: the request waits in the pool. `cached_tokens`: as in `Scheduler.prefilled`."""
        self.phase, self.pooled_s, self.prompt_tokens = POOLED, self._now(), prompt_tokens
        self._decider.prefilled(self.id, prompt_tokens, cached_tokens)

    def prefill_failed(self) -> None:
        """The probe failed: the request queues again."""
        self.phase, self.prefiller_id = QUEUED, ""
        self._decider.prefill_failed(self.id)

    def request_prefill(self) -> None:
        """Decode first: the decode worker asks for the KV; then await `prefiller`."""
        self.asking = True
        self._decider.request_prefill(self.id)

    def pushed(self, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Decode first: the prefiller has delivered the KV."""
        self.pushing, self.prefiller_id, self.prompt_tokens = False, "", prompt_tokens
        self._decider.pushed(self.id, prompt_tokens, cached_tokens)

    def push_failed(self) -> None:
        """Decode first: the prefiller has not begun; ask for another."""
        self.asking, self.pushing, self.prefiller_id = True, False, ""
        self._decider.push_failed(self.id)

    def progress(self, tokens: int) -> None:
        """Add `tokens` generated tokens. Hot: called for every read of a stream."""
        self.last_token_s = self._now()
        if self._at_once:
            self.reported_tokens += tokens
            self._decider.progress(self.id, tokens)
            return
        if not self.unreported_tokens:
            self._unsettled.append(self)
        self.unreported_tokens += tokens

    def settle(self) -> None:
        """Report the unreported tokens."""
        tokens, self.unreported_tokens = self.unreported_tokens, 0
        if tokens:
            self.reported_tokens += tokens
            self._decider.progress(self.id, tokens)

    def began(self) -> None:
        """The first tokens have come; all tokens so far are reported."""
        self.settle()
        if self._decider.bounds.overlap_requests is None:
            self._decider.began(self.id)

    def put_back(self) -> None:
        """The decode worker will not be asked after all: wait for another in the pool."""
        self.phase, self.decoder = POOLED, ""
        self._decider.put_back(self.id)

    def requeue(self, anew: bool = False) -> None:
        """The decode ended early, or the pinned KV was lost: queue for a prefill again. `anew`: as in
        `Scheduler.requeue`.
        """
        self.settle()
        if not self.left:  # else the answer is a refusal, and no other will come
            self._answer = None  # decode first: it may name the prefiller of a push that has ended since
        self.asking = self.pushing = False
        self.decoder = self.prefiller_id = ""
        kept_tokens = -self.earlier_tokens if anew else self.reported_tokens
        self.prompt_tokens += kept_tokens
        self.earlier_tokens += kept_tokens
        self.reported_tokens = 0
        self.requeues += 1
        if self._tickets.decode_first:
            self.phase, self.pooled_s = POOLED, self._now()
        else:
            self.phase, self.queued_s = QUEUED, self._now()
        self._decider.requeue(self.id, anew=anew)

    def finish(self, outcome: Outcome, reason: str = "") -> None:
        """Leave. `reason` is the engine's finish reason, for the predictor. Raises InvariantError when gone."""
        if self.left:
            raise InvariantError(f"{self.id} has left already")
        self.settle()
        self._leave()
        self._decider.finish(self.id, outcome, reason)

    def standing(self, now: float) -> Standing:
        """The ticket's state, for a new brain; call `settle` first."""
        spec = self.spec
        if spec.prefix and self.phase is DECODING and self.reported_tokens and not (self.asking or self.pushing):
            spec = replace(spec, prefix=())  # its prefill is over
        return Standing(
            spec,
            self.phase,
            self.prompt_tokens,
            waited_s=now - self.arrived_s,
            ready_s=now - self.pooled_s if self.pooled_s else 0.0,
            prefiller=self.prefiller_id,
            decoder=self.decoder,
            tokens=self.reported_tokens,
            earlier_tokens=self.earlier_tokens,
            requeues=self.requeues,
            asking=self.asking,
            pushing=self.pushing,
        )

    # -- for the decider

    def answer(self, answer: Answer) -> None:
        """Take an answer of the decider, and wake the request if it waits for one."""
        if isinstance(answer, Refusal):
            self._leave()
        elif self.phase is QUEUED:
            self.phase, self.prefiller_id = PREFILLING, answer
        elif self.phase is POOLED:
            self.phase, self.decoder = DECODING, answer
        else:
            self.asking, self.pushing, self.prefiller_id = False, True, answer
        self._answer = answer
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _leave(self) -> None:
        self.left, self.phase, self.decoder = True, GONE, ""
        self.asking = self.pushing = False
        del self._tickets.by_id[self.id]

    async def _wait(self) -> str:
        while self._answer is None:
            waiter = self._waiter = self._tickets.loop.create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:  # else another has begun to wait since this one was cancelled
                    self._waiter = None
        answer, self._answer = self._answer, None
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer


class Tickets:
    """All tickets of one process, by id; calls `decider`, and gets its answers."""

    def __init__(self, decider: Decider, loop: asyncio.AbstractEventLoop) -> None:
        self.decider, self.loop, self.decode_first = decider, loop, decider.bounds.decode_first
        self.now = loop.time
        self.by_id: dict[str, Ticket] = {}
        self.unsettled: list[Ticket] = []  # tickets that may have unreported tokens; the list object never changes
        self._arrivals = 0
        decider.on_answer, decider.collect = self.answer, self.settle

    def submit(self, spec: RequestSpec) -> Ticket:
        """Submit a request; if it is refused, its ticket's first `prefiller` or `admission` raises that."""
        self._arrivals += 1
        ticket = self.by_id[spec.id] = Ticket(self, spec, self._arrivals)
        self.decider.submit(spec)
        return ticket

    def answer(self, request_id: str, answer: Answer) -> None:
        """Pass an answer of the decider to its ticket."""
        self.by_id[request_id].answer(answer)

    def settle(self) -> None:
        """Report all new tokens. O(requests with new tokens)."""
        progress = self.decider.progress
        for ticket in self.unsettled:
            tokens = ticket.unreported_tokens
            if tokens:
                ticket.unreported_tokens = 0
                ticket.reported_tokens += tokens
                progress(ticket.id, tokens)
        self.unsettled.clear()

    # -- for lifecycles

    @property
    def draining(self) -> bool:
        """Whether every new request is refused."""
        return self.decider.draining

    @property
    def bounds(self) -> SchedulerConfig:
        """The bounds and times that hold now."""
        return self.decider.bounds

    def view(self) -> ClusterView:
        """The present view of the cluster; call `settle` first if loads matter."""
        return self.decider.view()
