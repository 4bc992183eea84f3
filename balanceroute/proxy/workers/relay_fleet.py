"""A relay's workers: the relay holds connections to them, the brain judges them.

A request's result at a worker is reported to the brain (`Finding`), whose circuit decides; the relay uses the last
state that the brain sent. While there is no brain, nothing is reported: the next one begins with what the last one has
written down of circuits (`run_folder/changes.py`).
"""

import asyncio
import math
from collections.abc import Callable, Mapping

from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.proxy.link.messages import CacheDoubted, Finding, Judged, Use, Workers, WorkerStanding
from balanceroute.proxy.workers.circuit import Circuit, CircuitConfig, CircuitState
from balanceroute.proxy.workers.fleet import Fleet, FleetConfig, Worker

Report = Callable[[Judged | CacheDoubted], None]


class ReportedCircuit(Circuit):
    """A relay's view of a worker's circuit at the brain.

    The brain's state may come late. So a relay that has told of a trial also tells of its end, whatever the state is by
    then: a trial without an end would keep requests from the worker for good.
    """

    __slots__ = ("_doubtful", "_report", "_tries", "_worker_id")

    def __init__(self, worker_id: str, report: Report, on_trial: Callable[[float | None], None]) -> None:
        """`on_trial`: called when a request of this relay becomes the trial; the brain tells of all other changes."""
        super().__init__(CircuitConfig(), on_trial)
        self._worker_id, self._report = worker_id, report
        self._doubtful = False
        self._tries = False  # the brain was told last that a trial has begun

    def detach(self) -> None:
        """Report nothing more: another server has the worker's name now."""
        self._report = _drop

    @property
    def doubtful(self) -> bool:
        """Whether a success would change the brain's circuit, so that it has to be reported."""
        return self._doubtful

    def set_state(self, state: CircuitState, doubtful: bool) -> None:
        """Take the state that the brain has sent."""
        self.state, self._doubtful = state, doubtful

    def used(self) -> None:
        """See `Circuit`."""
        if self.state is CircuitState.HALF_OPEN:
            self._report_finding(Finding.USED)
            self._enter(CircuitState.TRIAL, None)

    def success(self) -> None:
        """See `Circuit`."""
        if self._doubtful or self._tries:
            self._report_finding(Finding.SUCCESS)

    def inconclusive(self) -> None:
        """See `Circuit`."""
        if self._tries:
            self._report_finding(Finding.INCONCLUSIVE)

    def fault(self, now: float, reason: str) -> None:
        """See `Circuit`."""
        self._doubtful = True
        self._report_finding(Finding.FAULT, reason=reason)

    def busy(self, now: float, retry_after_s: float = 0.0) -> None:
        """See `Circuit`."""
        self._doubtful = True
        self._report_finding(Finding.BUSY, retry_after_s)

    def _report_finding(self, finding: Finding, retry_after_s: float = 0.0, reason: str = "") -> None:
        self._tries = finding is Finding.USED
        self._report(Judged(self._worker_id, finding, retry_after_s, reason))


def _drop(message: Judged | CacheDoubted) -> None:
    """Report to no brain."""


class _Nowhere:
    """The registry of a relay's fleet: the brain decides, so it has nothing to record."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def add_worker(self, spec: WorkerSpec) -> None:
        """Nothing: the brain knows of the worker already."""

    def set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        """Nothing: the state came from the brain."""

    def remove_if_idle(self, worker_id: str, role: Role) -> bool:
        """True: the brain has removed the worker already."""
        return True


class RelayFleet(Fleet):
    """The workers that the brain has named, in the states that it has sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: FleetConfig,
        report: Report,
        on_leave: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`report`: sends to the brain."""
        super().__init__(_Nowhere(loop), config, on_leave)
        self._report = report
        self._reported_use: set[str] = set()  # the workers in use at the last report

    def circuit(self, spec: WorkerSpec, changed: Callable[[float | None], None]) -> Circuit:
        """A circuit that reports to the one at the brain."""
        return ReportedCircuit(spec.id, self._report, changed)

    def update(self, worker: Worker) -> None:
        """Send no other request beside a trial that the brain has not heard of yet. It decides on all other states."""
        if worker.circuit.state is CircuitState.TRIAL and worker.state is WorkerState.UP:
            worker.state = WorkerState.DRAINING

    def doubt_cache(self, worker: Worker) -> None:
        """See `Fleet`; the brain tells the other relays."""
        super().doubt_cache(worker)
        self._report(CacheDoubted(worker.id, worker.cache_salt))

    def follow(self, message: Workers, whole: bool) -> None:
        """Take the brain's list of workers; `whole`: there are no others."""
        for standing in message.changed:
            self._take(self._named(standing.spec), standing)
        named = {standing.spec.id for standing in message.changed}
        for worker in self:
            if worker.id in message.gone or (whole and worker.id not in named):
                worker.leaving, worker.state = True, WorkerState.DOWN
        self.sweep()

    def _take(self, worker: Worker, standing: WorkerStanding) -> None:
        """Take the brain's judgement of a worker."""
        worker.state, worker.drained, worker.leaving = standing.state, standing.withdrawn, False
        ended_at = standing.ended_at or worker.ended_at  # a new brain knows of no end before its own time
        if (standing.out and worker.healthy) or ended_at != worker.ended_at:  # not >: clocks are set back, too
            worker.forget_version()
        worker.healthy, worker.ended_at = not standing.out, ended_at
        assert isinstance(worker.circuit, ReportedCircuit)
        worker.circuit.set_state(CircuitState(standing.circuit), standing.doubtful)
        self.salt_cache(worker, standing.cache_salt)
        if worker.cache_salt > standing.cache_salt:  # the brain is a new one, or did not know the server any more
            self._report(CacheDoubted(worker.id, worker.cache_salt))

    def _named(self, spec: WorkerSpec) -> Worker:
        """The worker of this name. The brain of a router that has taken over may describe it otherwise than before;
        this relay's requests on it continue.
        """
        if spec.id in self:
            worker = self[spec.id]
            if _reached_at(worker.spec) == _reached_at(spec):
                worker.spec = spec
                return worker
            assert isinstance(worker.circuit, ReportedCircuit)
            worker.circuit.detach()
            worker.upstream.retire()
            self.on_leave(worker.id)
        return self.connect(spec)

    def uses(self, now: float, awaited: Mapping[str, float]) -> tuple[Use, ...]:
        """The use of workers, if changed since the last report; `awaited`: workers whose next token a client awaits,
        and since when.
        """
        in_use = {worker.id for worker in self if worker.peak_in_use}  # never below `in_use`
        reported = [worker for worker in self if worker.id in in_use or worker.id in self._reported_use]
        self._reported_use = in_use
        return tuple(
            Use(
                worker=worker.id,
                in_use=worker.in_use,
                peak=worker.take_peak(),
                awaits_tokens=worker.id in awaited,
                progress_age_s=_age(now, worker.progress_s),
                awaited_age_s=_age(now, awaited.get(worker.id, -math.inf)),
            )
            for worker in reported
        )


def _reached_at(spec: WorkerSpec) -> tuple[Role, str, int | None]:
    return spec.role, spec.url, spec.dp_rank


def _age(now: float, at_s: float) -> float | None:
    return None if at_s == -math.inf else now - at_s
