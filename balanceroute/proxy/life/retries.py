"""Judges failed tries of a request: what they mean for it and its workers, and the wait before the next try.

| what happened | the worker | the request |
|---|---|---|
| a worker does not know the model, or the router's key, and another one does | as a 500 | as a 429 |
| the same, and those that do are out of service | nothing | ends: 503, as the model is not unknown |
| its engine has no rank of that number | as a 500 | as a 429 if another one serves the model |
| another 4xx except 408 and 429 | nothing | ends: the error is the client's |
| 429, 503 | rests (`circuit.busy`) | tries again, without counting a failure; ends after the queue's deadline |
| given back without a lasting token | rests, after `MANY_BACK` in a row | tries again, `MAX_FRUITLESS` times in a row |
| made anew | nothing | the same |
| the request's own deadline | nothing | ends |
| its prompt is not the prefiller's | as a 500 | as a 500 |
| the same, and no other decode worker's is, either | the prefiller: as a 500 | as a 500 |
| the same, and no other prefiller may make it right | nothing: other requests may be served | ends |
| an answer larger than the router reads | nothing: the request may have asked for it | ends |
| no descriptor or port was free for a connection | nothing: the router's fault | tries again, as below |
| 500 from every worker that could take it | nothing; its earlier 500s are cleared, too | ends |
| 500 from a worker that serves others, when half of its tier, not it alone, has just answered so | nothing | as below |
| anything else | a failure (`circuit.fault`) | tries again, `retry.max_attempts` times in a row |
| the same again at a worker that lives while another may take it | a failure | as a 429, `MAX_FRUITLESS` times |
| it died | a failure | tries again, or ends when it is the likely cause (`suspicion.py`) |

**Back-pressure is no failure.** A 429 or 503 means "later". While every worker rests, the request waits as for a slot,
and gets a 503 with Retry-After if it has no first token `queue.deadline_s` after the first refusal of a decode worker.
For a prefiller that refuses it waits as long as for one that is busy: from its arrival, or its last requeue.

**Given back.** So does an engine without memory, and it may give back request after request before the first token. It
would soon be the least loaded worker, get every request, and give them all back: so it rests, too. One that has begun
answers in between is left in use, because a request may be given back by every engine.

**Refused by all.** Some requests an engine answers with 500 where a 400 would be right: its chat template raises, or it
lacks a feature. Counted as failures, a few such requests of one client would take a small tier out for all clients. So
if the last try ends with 500, too, and no other worker is left, no worker is blamed.

Many of them at once would take a large tier out. So once half of a tier has answered with 500 within `RECENT_S`, a
worker that has begun another answer in that time is not blamed; one of two is if the other has not answered so. Half of
a tier can still be broken: a worker that answers nothing else is blamed soon.

**Again and again at one worker.** While all others are full, a broken one is the only one with a free slot, and gets
the request again after each rest. So of a request's tries at one worker only the first counts, until all others that
may take it have failed, too, or after `MAX_FRUITLESS` more: each costs a prefill, and where an answer has begun, or a
prefiller pushes, no deadline but the request's own would end them.

**Another model or key.** A decode worker that does not know the model or the key with which a prefiller has just served
the request was started with others; so was a worker that is asked first where another one has served that model. It
refuses at once, so it is the least loaded one: if nothing were held against it, it would get most requests, and refuse
them all. While the others are full it is the only one with a free slot, and one request may try it again and again: so
these tries are not counted while another worker serves the model. A rank that its engine has no more, since it was
started anew with fewer, is the same; and so is a worker whose chat template is another one than all others', except
that its tries count. A model that no worker has served is the client's error, and only a key of the router's own
counts: a client may send any.
"""

import asyncio
import logging
import math
import os
import random
import re
from collections.abc import Awaitable
from operator import itemgetter
from typing import Final

import orjson

from balanceroute.core.types import POOLED, Role
from balanceroute.errors import (
    RETRY_AFTER_S,
    BadUpstreamReply,
    BalanceRouteError,
    CannotConnect,
    DecodersLost,
    NoHealthyWorkers,
    QueueTimeout,
    ReplyTooLarge,
    UpstreamError,
    UpstreamStatus,
)
from balanceroute.proxy.admission.decider import NO_WORKERS_RETRY_AFTER_S
from balanceroute.proxy.admission.tickets import Ticket
from balanceroute.proxy.life.errors import DeadlineExceeded, NothingPinned, PromptsDiffer
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.life.suspicion import Choices, Sign, Suspect, sign_of
from balanceroute.proxy.wire.bounds import MAX_ERROR_BYTES, retry_after_s
from balanceroute.proxy.workers.drainer import DrainGroup
from balanceroute.proxy.workers.fleet import Worker
from balanceroute.proxy.workers.liveness import is_alive
from balanceroute.proxy.workers.reply import Reply

log = logging.getLogger(__name__)

RECENT_S: Final = 2.0  # a busy worker begins several answers in this time
MAX_FRUITLESS: Final = 8  # a full engine may pop a request more than once before its first token
MANY_BACK: Final = 3  # requests that a worker gives back, with no first token in between
_draws = random.Random()  # jitter of backoffs: no decision depends on it
os.register_at_fork(after_in_child=_draws.seed)


class Retries:
    """A leg's failures in a row, its last refusal, the suspicion against it, and its turn among the choices."""

    __slots__ = (
        "_again",
        "_begun_s",
        "_choices",
        "_decode_failures",
        "_erred",
        "_failed",
        "_fruitless",
        "_model",
        "_pinned_nothing",
        "_prefill_failures",
        "_refusals",
        "_refused",
        "_request_id",
        "_services",
        "_suspect",
        "_to_retry",
    )

    def __init__(
        self, services: LifeServices, request_id: str, choices: Choices | None, model: str | None = None
    ) -> None:
        """`choices`: all choices of the client's request, if it has several. `model`: that it names."""
        self._services, self._request_id, self._choices, self._model = services, request_id, choices, model
        self._suspect: Suspect | None = None
        self._prefill_failures = self._decode_failures = self._fruitless = self._refused = 0  # in a row
        self._pinned_nothing = False  # a prefiller has answered without KV parameters since the last that had some
        self._failed: set[str] = set()  # workers of either tier at which a try has failed
        self._again = 0  # tries that failed at one of them once more, and did not count
        self._erred: set[str] = set()  # those that answered it with their own error
        # before the first token, by tier: the time of its first uncounted refusal in a row, and the last one
        self._refusals: dict[str, tuple[float, UpstreamError]] = {}
        self._begun_s = math.inf  # when the first token came on its present decode worker
        self._to_retry: set[str] = set()  # tiers where a try has failed and another may be made

    # -- judging

    def judge(self, error: UpstreamError, worker: Worker, *, begun: bool) -> float:
        """Judge a failed try; returns the wait before the next, in seconds.

        Args: begun: the answer has tokens already, from any worker.

        Raises: `error`, when it was the last try. NoHealthyWorkers: those that serve its model are out of service.
        """
        services, tier = self._services, worker.tier
        if isinstance(error, PromptsDiffer) and error.prefiller:
            worker.circuit.inconclusive()
            worker = services.fleet[error.prefiller]
        circuit, misconfigured = worker.circuit, self._is_misconfigured(error, worker)
        refused = is_refused(error) and not misconfigured
        if refused or isinstance(error, DeadlineExceeded) or (isinstance(error, PromptsDiffer) and not misconfigured):
            circuit.inconclusive()
            if refused:
                _check_model(error, worker, self._model, services)
            raise error
        if not isinstance(error, CannotConnect):  # which is this process's own lack
            services.metrics.upstream_errors.inc(worker.id, worker.tier, error.kind)
        fields = {"request": self._request_id, "worker": worker.id, "tier": tier, "error": str(error)}
        log.debug("try failed", extra=fields)
        now = services.tickets.now()
        lacks_model = misconfigured and isinstance(error, UpstreamStatus)
        if (
            pushes_back(error)
            or (lacks_model and _is_served_beside(worker, self._model, services))
            or self._fails_again(error, worker)
        ):
            if isinstance(error, UpstreamStatus) and pushes_back(error):
                circuit.busy(now, error.retry_after_s)
            else:
                self._blame(error, worker, now, misconfigured=misconfigured, last=False)
            if not begun:  # else the answer has its own deadline
                self._refusals[tier] = (self._refusals.get(tier, (now, error))[0], error)
            self._refused += 1
            self._to_retry.add(tier)
            return self._backoff_s(self._refused)
        self._failed.add(worker.id)
        failures = self._count_failure(tier)
        last = failures >= services.config.retry.max_attempts or not error.retryable
        self._blame(error, worker, now, misconfigured=misconfigured, last=last)
        pins_nothing = isinstance(error, NothingPinned)
        if last or (pins_nothing and self._pinned_nothing):  # the second time, the tier's configuration is wrong
            raise error
        self._pinned_nothing |= pins_nothing
        self._to_retry.add(tier)
        return self._backoff_s(max(1, failures))

    def _is_misconfigured(self, error: UpstreamError, worker: Worker) -> bool:
        """Whether the worker was started with another model, key or chat template than one that has served this request
        or others of its model, or without the rank.
        """
        if isinstance(error, PromptsDiffer):
            return error.elsewhere
        if _lacks_rank(error, worker):
            return True
        if not _lacks_model(error, self._services):
            return False
        if worker.tier == "decode" and not self._services.config.decode_first:
            return True
        return _is_served_beside(worker, self._model, self._services)

    def _blame(self, error: UpstreamError, worker: Worker, now: float, *, misconfigured: bool, last: bool) -> None:
        """Count the failure against the worker, unless its cause may be the request, or this process."""
        own = misconfigured or _is_own(error)
        if own:
            self._erred.add(worker.id)
        many_err = own and not misconfigured and self._many_err(worker, now)
        if own and last and not _is_able_beside(worker, self._erred, self._services):
            for one in self._services.fleet.of(worker.spec.role):
                if one.id in self._erred:
                    one.circuit.success()
        elif many_err or isinstance(error, CannotConnect | ReplyTooLarge):
            worker.circuit.inconclusive()
        else:
            worker.circuit.fault(now, public_reason(error))

    def _many_err(self, worker: Worker, now: float) -> bool:
        """Note that a worker has erred; returns whether half of its tier had, while it serves other requests. Its own
        errors alone say nothing of the requests, unless there is no other worker.
        """
        tier, since_s = self._services.fleet.of(worker.spec.role), now - RECENT_S
        erring = [one for one in tier if one.erred_s > since_s]
        worker.erred_s = now
        only_itself = erring == [worker] != tier
        return worker.begun_s > since_s and 2 * len(erring) >= len(tier) and not only_itself

    def _fails_again(self, error: UpstreamError, worker: Worker) -> bool:
        """Whether a try has failed at this worker before, which lives, and another one may take the request; not again
        and again.
        """
        if not error.retryable or isinstance(error, CannotConnect | NothingPinned) or worker.id not in self._failed:
            return False
        if sign_of(error) is not Sign.NONE or not _is_able_beside(worker, self._failed, self._services):
            return False
        self._again += 1
        return self._again <= MAX_FRUITLESS

    def count_try(self, worker: Worker) -> None:
        """Count a try as a retry if one has failed before it in this worker's tier."""
        if worker.tier in self._to_retry:
            self._to_retry.discard(worker.tier)
            self._services.metrics.retries.inc(worker.tier)

    def _count_failure(self, tier: str) -> int:
        """Count a failure; returns the failures in a row."""
        if tier == "prefill":
            self._prefill_failures += 1
            return self._prefill_failures
        self._decode_failures += 1
        return self._decode_failures - (0 if self._suspect is None else self._suspect.explained)

    def given_back(self, worker: Worker) -> float:
        """Judge a decode that was given back without a lasting token. Returns, raises: as `count_without_token`."""
        worker.given_back += 1
        if worker.given_back >= MANY_BACK:
            worker.circuit.busy(self._services.tickets.now())
        else:
            worker.circuit.inconclusive()
        return self.count_without_token(worker)

    def count_without_token(self, worker: Worker) -> float:
        """Count a decode that was given back without a lasting token, or made anew: no failure, but bounded.

        Returns how long to wait. Raises: BadUpstreamReply: it has happened `MAX_FRUITLESS` times in a row.
        """
        self._fruitless += 1
        if self._fruitless >= MAX_FRUITLESS:
            raise worker.failure(BadUpstreamReply, "it gives the request back, or its KV is too old, again and again")
        return self._backoff_s(self._fruitless)

    async def suspect_loss(self, error: UpstreamError, worker: Worker, *, midway: bool) -> None:
        """Record the worker's death under this request, if it died.

        Args: midway: it had sent tokens of the answer.

        Raises: DecodersLost: too many have died.
        """
        sign = sign_of(error)
        if sign is Sign.NONE:
            return
        services = self._services
        if sign is Sign.MAYBE:
            await services.lost.passed()
            if await is_alive(worker, services.config.health.timeout_s):
                return
        suspect = self._suspect = self._suspect or Suspect(self._choices)
        now = services.tickets.now()
        if midway:
            given_up = services.suspicions.lost_midway(suspect, worker.id, now, now - self._begun_s)
        else:
            given_up = services.suspicions.lost(suspect, worker.id, now)
        if not given_up:
            return
        worker.circuit.fault(now, public_reason(error))
        services.metrics.upstream_errors.inc(worker.id, worker.tier, error.kind)
        services.metrics.given_up_requests.inc()
        fields = {"request": self._request_id, "workers": suspect.workers}
        log.warning("request given up: decode workers die under it", extra=fields)
        where = "under this request's answer" if suspect.midway else "before this request's first token"
        text = f"{len(suspect.workers)} decode workers were lost {where}; it goes to no other"
        raise worker.failure(DecodersLost, text) from error

    @property
    def has_losses(self) -> bool:
        """Whether a decode worker died under it, or another choice, before the first token there."""
        shared = self._choices is not None and bool(self._choices.losses)
        return shared or (self._suspect is not None and bool(self._suspect.losses))

    @property
    def drains(self) -> DrainGroup:
        """The drain group of its pinned KV."""
        return DrainGroup() if self._choices is None or self._choices.cleared else self._choices.drains

    # -- waiting

    def wait_for_worker(self, ticket: Ticket, answer: Awaitable[str]) -> Awaitable[str]:
        """Wait for a worker; after a refusal only until the queue's deadline. Raises: QueueTimeout."""
        if ticket.phase is POOLED:  # decode first: the push that a prefiller refused is over, and had its own deadline
            self._refusals.pop("prefill", None)
        return self._until_deadline(ticket, answer) if self._refusals else answer

    async def _until_deadline(self, ticket: Ticket, answer: Awaitable[str]) -> str:
        since_s, refusal = min(self._refusals.values(), key=itemgetter(0))
        if refusal.tier == "prefill":  # as it waits in the queue without a refusal, which is when the queue ends it
            since_s = min(since_s, ticket.queued_s)
        try:
            async with asyncio.timeout_at(since_s + self._services.config.queue.deadline_s):
                return await answer
        except TimeoutError:
            how, pause_s = f"failed ({public_reason(refusal)})", 0.0
            if isinstance(refusal, UpstreamStatus):
                how, pause_s = f"answered {refusal.status}", refusal.retry_after_s
            text = f"No worker has taken the request; the last one, for {refusal.tier}, {how}."
            raise QueueTimeout(text, retry_after_s=max(RETRY_AFTER_S, pause_s)) from refusal

    @property
    def has_turn(self) -> bool:
        """Whether it may have to wait before it goes to a decode worker."""
        return self._choices is not None or self._suspect is not None

    async def turn(self, worker: Worker) -> None:
        """Wait until this request may go to that decode worker; see `suspicion.py`."""
        if self._choices is not None:
            await self._choices.turn(self)
        if self.has_losses:
            self._suspect = self._suspect or Suspect(self._choices)
            await self._services.suspicions.turn(self._suspect, worker.id)

    def left_worker(self) -> None:
        """Note that it left its decode worker: another suspect may go there."""
        if self._suspect is not None:
            self._services.suspicions.end_turn(self._suspect)

    def note_waiting(self) -> None:
        """Note that it waits for another decode worker: another choice of the same request may go."""
        self.left_worker()
        if self._choices is not None:
            self._choices.back(self)

    def _backoff_s(self, failures: int) -> float:
        """Exponential with full jitter."""
        retry, doublings = self._services.config.retry, min(failures - 1, 1000)  # refusals have no bound, floats have
        return _draws.uniform(0.0, min(retry.longest_delay_s, retry.base_delay_s * 2.0**doublings))

    # -- what is forgotten

    def prefilled(self) -> None:
        """Forget failures and refusals of the prefill: a probe was answered."""
        self._prefill_failures, self._pinned_nothing = 0, False
        self._refusals.pop("prefill", None)

    def begun(self, now: float) -> None:
        """Forget refusals and suspicions: the first tokens are here."""
        self._refused = 0
        self._refusals.clear()
        self._begun_s = now
        if self._suspect is not None:
            self._services.suspicions.cleared(self._suspect)
        self.clear_choices()

    def grown(self) -> None:
        """Forget failures of the decode: a try has left tokens from which the next one goes on.

        Tokens alone do not show that. If none of them had a text, or the answer can only start again, the next try
        generates the same ones, and may end as this one did.
        """
        self._decode_failures = self._fruitless = self._again = 0
        self._erred.clear()
        self._failed.clear()

    def clear_choices(self) -> None:
        """Free the other choices from waiting for turns: this one has an answer."""
        if self._choices is not None:
            self._choices.clear()

    def close(self) -> None:
        """Release everything: the request is over."""
        self._refusals.clear()  # an error keeps the frames that it passed
        self.left_worker()


def _check_model(error: UpstreamError, worker: Worker, model: str | None, services: LifeServices) -> None:
    """Raises: NoHealthyWorkers: the worker lacks the model, and those that have served it are out of service."""
    if _lacks_model(error, services) and _serving(model, worker.spec.role, services):
        text = f"No {worker.tier} worker that serves this model is up; GET /ready says more."
        raise NoHealthyWorkers(text, retry_after_s=NO_WORKERS_RETRY_AFTER_S) from error


def _lacks_model(error: UpstreamError, services: LifeServices) -> bool:
    """Whether the worker says that it does not know the model, or the router's own key."""
    statuses = (404,) if services.config.auth.worker_api_key is None else (401, 403, 404)
    return isinstance(error, UpstreamStatus) and error.status in statuses


def _serving(model: str | None, role: Role, services: LifeServices) -> list[Worker]:
    """The workers that have served the model, in service or not."""
    return [one for one in services.fleet.of(role) if model in one.served_models]


def _is_served_beside(worker: Worker, model: str | None, services: LifeServices) -> bool:
    """Whether another worker of its tier that has served the model may take the request; this one does not any more."""
    worker.served_models.discard(model)
    return any(one.able for one in _serving(model, worker.spec.role, services))


def _is_able_beside(worker: Worker, tried: set[str], services: LifeServices) -> bool:
    """Whether a worker of this one's tier that is not among those tried may take the request."""
    return any(one.able for one in services.fleet.of(worker.spec.role) if one.id not in tried)


def _is_own(error: UpstreamError) -> bool:
    """Whether it is an error of the engine's own, which lives."""
    return isinstance(error, UpstreamStatus) and error.status in (500, 501) and sign_of(error) is Sign.NONE


def _lacks_rank(error: UpstreamError, worker: Worker) -> bool:
    """Whether its engine answers that it has no such rank, which only the router has asked for."""
    rank = worker.spec.dp_rank
    if rank is None or not isinstance(error, UpstreamStatus) or error.status != 400:
        return False
    # as vLLM 0.27 writes it; at the beginning, because a client's words may stand further behind
    return re.match(rb'\{"error": ?\{"message": ?"data_parallel_rank %d is out of range' % rank, error.body) is not None


def is_refused(error: BalanceRouteError) -> bool:
    """Whether the engine refuses the request as invalid. 408 comes of what is before it, or of a slow connection."""
    return isinstance(error, UpstreamStatus) and error.status < 500 and error.status not in (408, 429)


def pushes_back(error: UpstreamError) -> bool:
    """Whether the error is back-pressure: the worker can't take more now, and its engine has not seen the request."""
    return isinstance(error, UpstreamStatus) and error.status in (429, 503)


def status_error(reply: Reply, body: bytes, worker: Worker) -> UpstreamError:
    """The error for a worker's status other than 200."""
    if reply.status < 400:
        return worker.failure(BadUpstreamReply, f"it answered with status {reply.status}")
    text = f"status {reply.status}"
    error = UpstreamStatus(text, worker=worker.id, tier=worker.tier, status=reply.status, body=body)
    error.retry_after_s = retry_after_s(reply.header(b"retry-after"))
    return error


def event_error(payload: bytes, worker: Worker) -> UpstreamStatus:
    """An error event as the error of the corresponding status, with as much of it as of a status's body.

    vLLM before 0.11 does not nest the object.
    """
    try:
        whole = orjson.loads(payload)
        error = whole.get("error")
        code = (error if isinstance(error, dict) else whole).get("code")
    except (ValueError, AttributeError):
        code = None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    text = f"error event of status {status}"
    return UpstreamStatus(text, worker=worker.id, tier=worker.tier, status=status, body=payload[:MAX_ERROR_BYTES])


def public_reason(error: UpstreamError) -> str:
    """The error in words that may go to everyone: what it quotes of an answer stands in brackets at its end."""
    return str(error).partition(" (")[0]
