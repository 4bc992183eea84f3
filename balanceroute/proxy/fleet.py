"""The workers as the proxy reaches them: connections, circuit, and what an operator or a health check said of each.

The scheduler knows a worker by its state alone (up, draining, down). That state is derived here, in one place, from
three sources that don't know each other:

    operator   draining, until removed or undrained
    health     down while /health fails or nothing progresses
    circuit    resting -> draining; open -> down (`circuit.py`)
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import InvalidRequest
from balanceroute.proxy.circuit import Circuit, CircuitConfig, CircuitState
from balanceroute.proxy.ledger import Ledger
from balanceroute.proxy.upstream import Upstream

log = logging.getLogger(__name__)

_CIRCUIT_SAYS = {
    CircuitState.CLOSED: WorkerState.UP,
    CircuitState.HALF_OPEN: WorkerState.UP,
    CircuitState.RESTING: WorkerState.DRAINING,
    CircuitState.TRIAL: WorkerState.DRAINING,
    CircuitState.OPEN: WorkerState.DOWN,
}


class Worker:
    """One schedulable (url, dp_rank) pair as the proxy reaches it.

    `progress_s` is when it last gave proof of life that counts, a token or an answered probe; `busy_since_s` is when
    it got its first request after idleness.
    """

    __slots__ = (
        "busy_since_s",
        "checks_failed",
        "circuit",
        "drained",
        "healthy",
        "in_use",
        "joining",
        "leaving",
        "progress_s",
        "rank_header",
        "seen_healthy",
        "spec",
        "stalled",
        "state",
        "upstream",
    )

    def __init__(self, spec: WorkerSpec, upstream: Upstream, circuit: Circuit) -> None:
        self.spec, self.upstream, self.circuit = spec, upstream, circuit
        self.rank_header = () if spec.dp_rank is None else ((b"x-data-parallel-rank", b"%d" % spec.dp_rank),)
        self.healthy = True
        self.seen_healthy = False
        self.checks_failed = 0
        self.stalled = False
        self.joining: tuple[int, float] | None = None  # attempts left and when the next one counts
        self.drained = False
        self.leaving = False
        self.in_use = 0  # upstream requests under way: probes, decodes, drains
        self.progress_s = -math.inf
        self.busy_since_s = -math.inf
        self.state = WorkerState.UP

    @property
    def id(self) -> str:
        """Its name in metrics, logs and /state."""
        return self.spec.id

    def wanted_state(self) -> WorkerState:
        """What operator, health and circuit allow together."""
        circuit = _CIRCUIT_SAYS[self.circuit.state]
        if not self.healthy or self.stalled or circuit is WorkerState.DOWN:
            return WorkerState.DOWN
        return WorkerState.DRAINING if self.drained or self.leaving else circuit


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How workers are connected to and judged."""

    circuit: CircuitConfig = CircuitConfig()
    high_water_bytes: int = 256 * 1024


class Fleet:
    """All workers by id; tells the scheduler their states."""

    def __init__(self, ledger: Ledger, config: FleetConfig, on_leave: Callable[[str], None] = lambda _: None) -> None:
        self._ledger, self._config, self._on_leave = ledger, config, on_leave
        self._loop: asyncio.AbstractEventLoop = ledger.loop
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def of(self, role: Role) -> list[Worker]:
        """The workers of one role, in the order they joined."""
        return [worker for worker in self._workers.values() if worker.spec.role is role]

    def connect(self, spec: WorkerSpec) -> Worker:
        """Make the connections to a worker that the scheduler knows already."""
        upstream = Upstream(
            spec.url, worker=spec.id, stage=spec.role.value, high_water_bytes=self._config.high_water_bytes
        )

        def changed(wake_in_s: float | None) -> None:
            self.update(worker)
            if wake_in_s is not None:
                self._loop.call_later(wake_in_s, self._tick, worker)

        worker = Worker(spec, upstream, Circuit(self._config.circuit, changed))
        self._workers[spec.id] = worker
        return worker

    def add(self, spec: WorkerSpec, join_attempts: int) -> Worker:
        """A worker joins at run time; it gets requests once a health check succeeds.

        Raises: InvalidRequest: its id is taken.
        """
        known = self._workers.get(spec.id)
        if known is not None and known.leaving and known.spec == spec:
            known.leaving = False
            self.update(known)
            return known
        if known is not None:
            raise InvalidRequest(f"worker {spec.id} is here already", param="instances")
        self._ledger.add_worker(spec)
        worker = self.connect(spec)
        worker.joining = (join_attempts, 0.0)
        self.set_healthy(worker, False)
        return worker

    def update(self, worker: Worker) -> None:
        """Let the scheduler know what the worker may do now."""
        state = worker.wanted_state()
        if state is worker.state or worker.spec.id not in self._workers:
            return
        before, worker.state = worker.state, state
        if WorkerState.DOWN in (before, state):
            log.warning("worker state", extra={"worker": worker.id, "state": state.value, "before": before.value})
        self._ledger.set_worker_state(worker.id, state)

    def set_healthy(self, worker: Worker, healthy: bool) -> None:
        """A health check's verdict."""
        worker.healthy = healthy
        if healthy and not worker.stalled:
            worker.circuit.reachable()
        self.update(worker)

    def drain(self, worker: Worker, drained: bool = True) -> None:
        """An operator's word: nothing new to this worker."""
        worker.drained = drained
        self.update(worker)

    def leave(self, worker: Worker) -> None:
        """Remove the worker as soon as it holds nothing."""
        worker.leaving = True
        self.update(worker)

    def sweep(self) -> list[str]:
        """Forget the leaving workers that hold nothing any more; returns their ids."""
        gone = []
        for worker in self:
            if worker.leaving and worker.in_use == 0 and self._holds_nothing(worker):
                del self._workers[worker.id]
                self._ledger.scheduler.remove_worker(worker.id, self._ledger.now())
                worker.upstream.close()
                self._on_leave(worker.id)
                gone.append(worker.id)
                log.info("worker left", extra={"worker": worker.id})
        return gone

    def close(self) -> None:
        """Close every connection."""
        for worker in self:
            worker.upstream.close()

    def _holds_nothing(self, worker: Worker) -> bool:
        snapshot = self._ledger.scheduler.snapshot
        if worker.spec.role is Role.DECODE:
            return not snapshot.worker(worker.id).active
        prefiller = snapshot.prefiller(worker.id)
        return prefiller.inflight == 0 and prefiller.pinned == 0

    def _tick(self, worker: Worker) -> None:
        worker.circuit.tick(self._loop.time())
