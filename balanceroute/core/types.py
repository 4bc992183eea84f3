"""The nouns that the core and its drivers share: workers, requests, phases, and the actions a driver must carry out.

Times are float seconds of any monotonic origin (`_s`), loads are KV tokens, `horizon` counts decode steps.

Nobody changes any of them once made. What is made per request is not frozen all the same: that would make its making
several times slower.

Where a call is made per request, phases, states and outcomes go by their names in this module: a member that is looked
up on its class costs ten times as much (Python 3.11).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from balanceroute.core.bounds import MOST_SLOWDOWN, check_number
from balanceroute.errors import InputError


class Role(StrEnum):
    """What a worker does: computes prompts (producer of KV cache) or generates tokens (consumer)."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """Up takes new requests; draining finishes what it has; down is outside the step barrier."""

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


UP, DRAINING, DOWN = WorkerState


class Phase(StrEnum):
    """The state of a request between its arrival and its single finish."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    POOLED = "pooled"
    DECODING = "decoding"
    GONE = "gone"


QUEUED, PREFILLING, POOLED, DECODING, GONE = Phase


class Outcome(StrEnum):
    """The way a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REJECTED = "rejected"


FINISHED, FAILED, CANCELLED, EXPIRED, REJECTED = Outcome


class RejectReason(StrEnum):
    """Why a request was refused before any worker was used."""

    QUEUE_FULL = "queue_full"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One schedulable (url, DP rank) pair.

    `slots` is B, the engine's max_num_seqs (decode workers only). `slowdown` and `request_tokens` (c) say what a step
    costs there, in KV tokens of a worker of slowdown 1: slowdown * (tokens + c * requests). `barrier_group` names the
    decode workers whose steps wait for each other; "" stands for none.
    """

    id: str
    role: Role
    url: str = ""
    dp_rank: int | None = None
    slots: int = 64
    slowdown: float = 1.0
    barrier_group: str = ""
    request_tokens: int = 0

    def checked(self) -> "WorkerSpec":
        """The worker itself. Raises: InputError that names the first value which makes no sense."""
        if not isinstance(self.role, Role):  # a text would be taken for a prefiller
            raise InputError(f"worker {self.id}: role {self.role!r:.60}: accepted is Role.PREFILL or Role.DECODE")
        check_number(f"worker {self.id}: slots", self.slots, 1, whole=True)
        check_number(f"worker {self.id}: slowdown", self.slowdown, 0, MOST_SLOWDOWN, whole=False, above_least=True)
        check_number(f"worker {self.id}: request_tokens", self.request_tokens, 0, whole=True)
        return self


@dataclass(slots=True)
class RequestSpec:
    """A client request as the scheduler sees it; `prompt_tokens` is an estimate until its prefill is done.

    Lower `priority` goes first, as in vLLM; it is the router's own, within its bounds. `prompt_key` is the predictor's
    key, never the text. `max_new_tokens` is the client's limit on generated tokens, before and after requeues; None
    where it set none, 0 where it asks for nothing but its prefill. `prefix`: chained hashes of the prompt's full blocks
    of `block_tokens` each (`core.prefix`).
    """

    id: str
    prompt_tokens: int
    priority: int = 0
    prompt_key: str = ""
    max_new_tokens: int | None = None
    prefix: Sequence[int] = ()
    block_tokens: int = 0

    @property
    def decodes(self) -> bool:
        """Whether it needs a decode worker."""
        return self.max_new_tokens != 0

    def checked(self) -> "RequestSpec":
        """The request itself. Raises: InputError that names the first value which makes no sense."""
        check_number("prompt_tokens", self.prompt_tokens, 0, whole=True)
        check_number("priority", self.priority, -math.inf, whole=True)
        if self.max_new_tokens is not None:
            check_number("max_new_tokens", self.max_new_tokens, 0, whole=True)
        return self


@dataclass(slots=True)
class Standing:
    """The state of a request: all that a scheduler needs to continue one that it has not seen before (`adopt`).

    Args:
        waited_s: seconds since its arrival.
        ready_s: seconds since it last came to the pool.
        prompt_tokens: with the tokens generated before its requeues (`earlier_tokens`).
        tokens: generated since the last requeue.
        prefiller: id of the prefiller that computes its prompt or keeps its KV; "" for none.
        decoder: id of the decode worker that it is bound to; "" for none.
        asking: decode-first, whether it is bound and waits for a prefiller.
        pushing: decode-first, whether it is bound and a prefiller computes its prompt.

    The `spec` of a request that generates may lack its `prefix`, which only a prefill needs; `Scheduler.requeue` then
    gets it.
    """

    spec: RequestSpec
    phase: Phase
    prompt_tokens: int
    waited_s: float = 0.0
    ready_s: float = 0.0
    prefiller: str = ""
    decoder: str = ""
    tokens: int = 0
    earlier_tokens: int = 0
    requeues: int = 0
    asking: bool = False
    pushing: bool = False


@dataclass(slots=True)
class Prefill:
    """Send the request's probe to this prefiller."""

    request: str
    worker: str


@dataclass(slots=True)
class Admit:
    """Send the request to this decode worker, for its lifetime.

    `stage`: 0 overdue, 1 abundant, 2 scarce, 3 at once (docs/glossary.md); `score` is the F-score of the choice
    (of the whole subset in stage 2), or the policy's own figure of merit, in tokens; larger is better.
    """

    request: str
    worker: str
    stage: int
    score: float


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is refused and was never registered."""

    request: str
    reason: RejectReason


@dataclass(slots=True)
class Release:
    """The request has left this phase, to queue again or for good, and holds nothing any more."""

    request: str
    phase: Phase
