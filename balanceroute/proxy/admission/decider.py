"""The calls between the holders of requests and the decider: plain data, by request id.

    submit(spec)                                     arrival
    prefilled(id, n, cached) | prefill_failed(id)    the probe's result
    progress(id, n)                                  n more tokens were generated
    began(id)                                        the first of them, if transfers are measured
    put_back(id)                                     its decode worker went out before the request was sent
    requeue(id)                                      the decode ended early: begin again with the prefill
    finish(id, outcome, reason)                      leaves, from any phase, once
    request_prefill(id), pushed(id, n, cached) | push_failed(id)    decode first, between admission and first token

A call returns nothing. The decision comes later, or before the call returns, through `on_answer`: the id of a worker,
or a refusal, with which the request has left. One answer is due after `submit`, after `prefilled`, after each call that
asks again, and after `request_prefill`. Only plain data crosses: no tracker, no exception, no future.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RejectReason, RequestSpec, WorkerState
from balanceroute.core.view import ClusterView
from balanceroute.errors import RETRY_AFTER_S, Draining, NoHealthyWorkers, QueueFull, QueueTimeout, Rejected

NO_WORKERS_RETRY_AFTER_S: Final = 5.0
MOST_ENDED: Final = 64  # requests, in one turn of the loop; to answer and log each takes some 0.3 ms


class RefusalKind(StrEnum):
    """The client's error for a refusal."""

    QUEUE_FULL = "queue_full"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    EXPIRED = "expired"
    LOST = "lost"


_ERRORS: Final[Mapping[RefusalKind, type[Rejected]]] = {
    RefusalKind.QUEUE_FULL: QueueFull,
    RefusalKind.NO_WORKERS: NoHealthyWorkers,
    RefusalKind.DRAINING: Draining,
    RefusalKind.EXPIRED: QueueTimeout,
    RefusalKind.LOST: NoHealthyWorkers,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal, with which the request has ended."""

    kind: RefusalKind
    text: str
    retry_after_s: float = RETRY_AFTER_S

    def error(self) -> Rejected:
        """The error for the client."""
        return _ERRORS[self.kind](self.text, retry_after_s=self.retry_after_s)


Answer = str | Refusal
OnAnswer = Callable[[str, Answer], None]


def refusal(reason: RejectReason, view: Callable[[], ClusterView]) -> Refusal:
    """Translate the core's refusal; `view` is called if the workers are its cause."""
    if reason is RejectReason.QUEUE_FULL:
        return Refusal(RefusalKind.QUEUE_FULL, "Too many requests are waiting; try again shortly.")
    if reason is RejectReason.DRAINING:
        return Refusal(RefusalKind.DRAINING, "The router is shutting down.")
    return no_workers(view())


def no_workers(view: ClusterView) -> Refusal:
    """The refusal of a request that no worker can serve now: which tier has none, and how many of it are down."""
    prefillers, decoders = [worker.state for worker in view.prefillers], [worker.state for worker in view.decoders]
    causes = [
        f"none of {len(states)} {tier} is up ({states.count(WorkerState.DOWN)} down)"
        for tier, states in (("prefillers", prefillers), ("decode workers", decoders))
        if WorkerState.UP not in states
    ]
    why = f": {', '.join(causes)}; GET /ready says more" if causes else ""
    text = f"No healthy worker can serve the request now{why}."
    return Refusal(RefusalKind.NO_WORKERS, text, NO_WORKERS_RETRY_AFTER_S)


class Decider(Protocol):
    """The interface for decisions on requests: the ledger, or a relay's link to it.

    `on_answer`: called with each answer. `collect`: called before a decision, to report new tokens first. `at_once`:
    report tokens as they come, because the decider collects them itself.
    """

    at_once: bool
    on_answer: OnAnswer
    collect: Callable[[], None]

    @property
    def draining(self) -> bool:
        """Whether every new request is refused."""

    @property
    def bounds(self) -> SchedulerConfig:
        """The present bounds and times."""

    def configure(self, config: SchedulerConfig) -> None:
        """Use other bounds and times from now on."""

    def view(self) -> ClusterView:
        """The present view of the cluster."""

    def submit(self, spec: RequestSpec) -> None:
        """A request arrives. Answered: which prefiller gets the probe; decode first, which decode worker it goes to."""

    def prefilled(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """The probe was answered. `cached_tokens`: as in `Scheduler.prefilled`. Answered: which decode worker."""

    def prefill_failed(self, request_id: str) -> None:
        """The probe failed: the request queues again. Answered: which prefiller."""

    def request_prefill(self, request_id: str) -> None:
        """Decode first: the decode worker asks for the KV. Answered: which prefiller computes it."""

    def pushed(self, request_id: str, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Decode first: the prefiller has delivered the KV."""

    def push_failed(self, request_id: str) -> None:
        """Decode first: the prefiller has not begun. Answered: which other one."""

    def progress(self, request_id: str, tokens: int) -> None:
        """The request has generated `tokens` more."""

    def began(self, request_id: str) -> None:
        """The first tokens have just come; called only if `bounds.overlap_requests` is measured (None)."""

    def put_back(self, request_id: str) -> None:
        """The request was not sent to its decode worker: back to the pool. Answered: another decode worker."""

    def requeue(self, request_id: str, *, anew: bool = False) -> None:
        """The decode ended early, or the pinned KV was lost: from the first phase on again. Answered as `submit`.

        `anew`: without what was generated so far.
        """

    def finish(self, request_id: str, outcome: Outcome, reason: str = "") -> None:
        """The request leaves. `reason` is the engine's finish reason, for the predictor."""
