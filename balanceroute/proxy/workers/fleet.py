"""All workers: for each its connections, its circuit, and its state by operators and health checks.

The scheduler knows only a worker's state (up, draining, down). It is derived here from three independent sources:

    operator   draining, until removed or undrained
    health     draining while /health is not answered, down after several failures or without progress
    circuit    resting -> draining; open -> down (`circuit.py`)
"""

import asyncio
import logging
import math
import secrets
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from balanceroute.config import Config, place_of
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.errors import InvalidRequest, UpstreamError
from balanceroute.proxy.wire.responses import JSON_TYPE, header_lines
from balanceroute.proxy.workers.circuit import Circuit, CircuitConfig, CircuitState
from balanceroute.proxy.workers.connection import NO_REPLY
from balanceroute.proxy.workers.foreign import ForeignLoad
from balanceroute.proxy.workers.upstream import Connections, Upstream

log = logging.getLogger(__name__)

MOST_GONE: Final = 64  # workers, in one sweep: to forget each takes some 0.2 ms
MAX_MODELS: Final = 256  # names of models kept of a worker: some servers take any; vLLM's are its model and adapters
_MAX_NAME: Final = 256  # characters; a longer name is not kept
_COUNT_DIGITS: Final = 8  # at the beginning of a salt: how many came before it
_JSON_AND_ID: Final = header_lines([JSON_TYPE]) + b"x-request-id: "
_STATE_BY_CIRCUIT = {
    CircuitState.CLOSED: WorkerState.UP,
    CircuitState.HALF_OPEN: WorkerState.UP,
    CircuitState.RESTING: WorkerState.DRAINING,
    CircuitState.TRIAL: WorkerState.DRAINING,
    CircuitState.OPEN: WorkerState.DOWN,
}
_Error = TypeVar("_Error", bound=UpstreamError)


class Worker:
    """One schedulable (url, dp_rank) pair, with its connections and state.

    `progress_s`: time of its last token or answered probe. `answered_s`: of its last good health check. `begun_s`: when
    it last began to answer a request of this process. `erred_s`: when it last answered one with a 500 of its own.
    `given_back`: requests in a row that it gave back without a token. `ended_at`: Unix time at which its process, and
    all KV with it, was last found to have ended; a later brain, which does not know of it, finds another time; 0:
    never. `id`: its name in metrics, logs and /state. `in_use`: requests under way (probes, decodes, drains).
    `peak_in_use`: their maximum since `take_peak`. `served_models`: names for which it has served requests and refused
    none since; None: of a request without one. `cache_salt`: added to requests after it may have cached wrong KV; "":
    it has not. Of two salts the later one is the greater text, so all processes that hear of both agree.
    """

    __slots__ = (
        "alive_check",
        "answered_s",
        "apart_at",
        "awaited",
        "begun_s",
        "cache_salt",
        "checks_failed",
        "circuit",
        "differs_from",
        "doubted",
        "drained",
        "echoes_ids",
        "ended_at",
        "erred_s",
        "foreign",
        "given_back",
        "health_answer",
        "healthy",
        "id",
        "in_use",
        "joining",
        "kv_connector",
        "leaving",
        "peak_in_use",
        "progress_s",
        "rank_line",
        "seen_healthy",
        "served_models",
        "spec",
        "stalled",
        "state",
        "tier",
        "unreached",
        "upstream",
    )

    def __init__(self, spec: WorkerSpec, upstream: Connections, circuit: Circuit) -> None:
        self.id, self.spec, self.upstream, self.circuit = spec.id, spec, upstream, circuit
        self.tier = spec.role.value  # its role, as errors, logs and metrics have it
        self.rank_line = b"" if spec.dp_rank is None else b"x-data-parallel-rank: %d\r\n" % spec.dp_rank
        self.healthy = True
        self.seen_healthy = False
        self.health_answer: int | str = ""  # of the last failed check: a status, or why there was none
        self.checks_failed = 0  # health checks in a row
        self.alive_check: asyncio.Task[bool] | None = None  # the last one outside the regular checks
        self.unreached = 0  # reads of a prefiller's metrics that failed in a row
        self.doubted = False  # no new requests before its next answer: there has been none yet, or the last is overdue
        self.stalled = False
        self.joining: tuple[int, float] | None = None  # attempts left, and the time of the next one
        self.drained = False
        self.leaving = False
        self.in_use = self.peak_in_use = 0
        self.awaited: dict[str, float] = {}  # since when a client awaits its next token, by relay
        self.foreign = ForeignLoad()
        self.kv_connector: str | None = None  # the connector of its kv_transfer_params; "": they do not tell
        self.echoes_ids: bool | None = None  # whether answers contain the X-Request-Id; None: none has come
        self.progress_s = self.answered_s = -math.inf
        self.begun_s = self.erred_s = -math.inf
        self.state = WorkerState.UP
        self.cache_salt = ""
        self.served_models: set[str | None] = set()
        self.given_back = 0
        self.differs_from: set[str] = set()  # decode workers that last made another prompt than this prefiller
        self.apart_at: dict[str, str] = {}  # those that ever did: salts that keep its KV there apart from others'
        self.ended_at = 0.0

    def take(self) -> None:
        """Count a request that is about to be sent; `release` ends it."""
        self.in_use += 1
        if self.in_use > self.peak_in_use:
            self.peak_in_use = self.in_use

    def release(self) -> None:
        """Note that a request is over."""
        self.in_use -= 1

    def has_begun(self, now: float) -> None:
        """Note that it has begun to answer a request, so it works."""
        self.begun_s = now
        self.circuit.success()

    def has_served(self, model: str | None) -> None:
        """Note that it has served a request for this model."""
        if model in self.served_models or (model is not None and len(model) > _MAX_NAME):
            return
        if len(self.served_models) >= MAX_MODELS:
            self.served_models.clear()  # those in use return with the next requests
        self.served_models.add(model)

    def forget_version(self) -> None:
        """Forget what its answers have shown of its version: another one may return, with its memory free."""
        self.echoes_ids = self.kv_connector = None
        self.given_back = 0
        self.differs_from.clear()
        self.apart_at.clear()

    def headers_of(self, request_id: str, forwarded: bytes) -> bytes:
        """The header lines of a request with a JSON body; `forwarded`: the client's headers that workers get."""
        return b"".join((_JSON_AND_ID, request_id.encode(), b"\r\n", forwarded, self.rank_line))

    def failure(self, kind: type[_Error], text: str) -> _Error:
        """An error that names this worker."""
        return kind(text, worker=self.id, tier=self.tier)

    def take_peak(self) -> int:
        """The most requests under way since the last call."""
        peak, self.peak_in_use = self.peak_in_use, self.in_use
        return peak

    @property
    def out(self) -> bool:
        """Whether health checks found the worker down: it does not answer, or sends no tokens."""
        return not self.healthy or self.stalled

    @property
    def unknown(self) -> bool:
        """Whether it gets no requests because no health check of this process has had a result yet."""
        return self.healthy and self.doubted and not self.seen_healthy

    @property
    def able(self) -> bool:
        """Whether the worker takes requests, or will after a rest."""
        return self.state is not WorkerState.DOWN and not (self.drained or self.leaving)

    def wanted_state(self) -> WorkerState:
        """The state by operator, health and circuit together."""
        circuit = _STATE_BY_CIRCUIT[self.circuit.state]
        if self.out or circuit is WorkerState.DOWN:
            return WorkerState.DOWN
        return WorkerState.DRAINING if self.drained or self.leaving or self.doubted else circuit


def _place(spec: WorkerSpec) -> tuple[str, int | None]:
    return place_of(spec.url), spec.dp_rank


def why_not_up(worker: Worker) -> str:
    """The first reason that keeps requests from a worker, for operators; empty: none."""
    reasons = (
        (worker.stalled, "it runs requests and generates no tokens"),
        (not worker.healthy, why_not_healthy(worker)),
        (worker.circuit.state is CircuitState.OPEN, _with("requests to it fail", worker.circuit.reason)),
        (worker.leaving, "it was removed and finishes what it has"),
        (worker.drained, "it was drained by an operator"),
        (worker.unknown, "it has not answered /health yet"),
        (worker.doubted, "its last health check had no answer"),
        (
            worker.circuit.state is not CircuitState.CLOSED,
            _with("it failed or refused a request and gets a pause", worker.circuit.reason),
        ),
    )
    return next((text for holds, text in reasons if holds), "")


def why_not_healthy(worker: Worker) -> str:
    """Why a worker's health checks fail, for operators."""
    finding = worker.health_answer
    if isinstance(finding, int):
        return f"its /health answers {finding}"
    if worker.seen_healthy:
        return _with("it does not answer /health", finding)
    if finding.startswith(NO_REPLY) and worker.spec.url.startswith("http:"):
        finding += "; if it speaks TLS, its URL must be https://"  # OpenSSL ends such a connection without a word
    return _with("it has not answered /health yet", finding)


def _with(text: str, reason: str) -> str:
    return f"{text} ({reason})" if reason else text


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings of connections and circuits."""

    circuit: CircuitConfig = CircuitConfig()
    high_water_bytes: int = 256 * 1024
    ssl_context: Callable[[], ssl.SSLContext] | None = None  # None: the system's CAs

    @classmethod
    def of(cls, config: Config, ssl_context: Callable[[], ssl.SSLContext] | None) -> "FleetConfig":
        """The fleet's part of a configuration."""
        circuit = CircuitConfig(config.health.failure_threshold, config.health.open_for_s)
        return cls(circuit, config.limits.client_buffer_bytes, ssl_context)


class Registry(Protocol):
    """The fleet's calls to the ledger about workers."""

    loop: asyncio.AbstractEventLoop

    def add_worker(self, spec: WorkerSpec) -> None:
        """A worker joins."""

    def set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        """Set a worker's state."""

    def remove_if_idle(self, worker_id: str, role: Role) -> bool:
        """A worker leaves, if it holds nothing; returns whether it did."""


class Fleet:
    """All workers by id; tells the scheduler their states."""

    def __init__(self, ledger: Registry, config: FleetConfig, on_leave: Callable[[str], None] = lambda _: None) -> None:
        self._ledger, self._config, self.on_leave = ledger, config, on_leave
        self._loop: asyncio.AbstractEventLoop = ledger.loop
        self._workers: dict[str, Worker] = {}
        self._salts: dict[tuple[str, int | None], str] = {}  # of doubted caches, which outlive a worker's name
        self.on_change: Callable[[], None] = lambda: None  # called when a worker, or its circuit, may have changed

    def configure(self, config: Config) -> None:
        """Use another configuration, also for the present workers."""
        self._config = FleetConfig.of(config, self._config.ssl_context)
        for worker in self:
            worker.circuit.configure(self._config.circuit)
            worker.upstream.high_water_bytes = self._config.high_water_bytes

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def has(self, worker: Worker) -> bool:
        """Whether this very worker is present; another one may have its name by now."""
        return self._workers.get(worker.id) is worker

    def of(self, role: Role) -> list[Worker]:
        """The workers of one role, in the order they joined."""
        return [worker for worker in self._workers.values() if worker.spec.role is role]

    def withdrawn(self) -> set[str]:
        """The workers that operators have drained or removed, by id."""
        return {worker.id for worker in self if worker.drained or worker.leaving}

    def connect(self, spec: WorkerSpec) -> Worker:
        """Make the connections to a worker that the scheduler knows already."""
        upstream = Upstream(
            spec.url,
            worker=spec.id,
            tier=spec.role.value,
            ssl_context=self._config.ssl_context,
            high_water_bytes=self._config.high_water_bytes,
        )

        def changed(wake_in_s: float | None) -> None:
            worker = self._workers.get(spec.id)  # by id: a circuit that referred to its worker would keep it in memory
            if worker is None:
                return
            self.update(worker)
            if wake_in_s is not None:
                self._loop.call_later(wake_in_s, self._tick, worker)

        worker = Worker(spec, upstream, self.circuit(spec, changed))
        worker.cache_salt = self._salts.get(_place(spec), "")
        self._workers[spec.id] = worker
        return worker

    def circuit(self, spec: WorkerSpec, changed: Callable[[float | None], None]) -> Circuit:
        """Make a new worker's circuit, which reports its changes."""
        return Circuit(self._config.circuit, changed)

    def add(self, spec: WorkerSpec, join_attempts: int | None = None) -> Worker:
        """A worker joins at run time; it gets requests once a health check succeeds.

        `join_attempts`: health checks after which it is dropped; None: it is waited for, as at the start. A worker that
        is leaving rejoins like a new one, with no earlier state.
        Raises: InvalidRequest: its id is taken.
        """
        self.check_new(spec)
        known = self._workers.get(spec.id)
        if known is not None:
            known.leaving = known.drained = False
            self.update(known)
            return known
        self._ledger.add_worker(spec)
        worker = self.connect(spec)
        worker.joining = None if join_attempts is None else (join_attempts, 0.0)
        self.set_healthy(worker, False)
        return worker

    def check_new(self, spec: WorkerSpec) -> None:
        """Check that a worker may join. Raises: InvalidRequest: its id is taken, and not by itself while it leaves."""
        known = self._workers.get(spec.id)
        if known is not None and not (known.leaving and known.spec == spec):
            until = ", until it has finished what it has" if known.leaving else ""
            raise InvalidRequest(f"worker {spec.id} is here already{until}", param="instances")

    def restore(self, spec: WorkerSpec) -> Worker:
        """Add a worker that operators added under another brain; it is judged like those of the configuration.

        Raises: InvariantError: its id is taken.
        """
        self._ledger.add_worker(spec)
        return self.connect(spec)

    def update(self, worker: Worker) -> None:
        """Tell the scheduler the worker's present state."""
        self.on_change()
        state = worker.wanted_state()
        if state is worker.state or not self.has(worker):
            return
        before, worker.state = worker.state, state
        if WorkerState.DOWN in (before, state):
            fields = {"worker": worker.id, "state": state.value}
            if state is not WorkerState.UP:
                fields["reason"] = why_not_up(worker)
            log.warning("worker state", extra=fields)
        self._ledger.set_worker_state(worker.id, state)

    def set_healthy(self, worker: Worker, healthy: bool) -> None:
        """A health check has found the worker healthy, or not."""
        worker.healthy = healthy
        if not healthy:
            worker.forget_version()
        if healthy and not worker.stalled:
            worker.circuit.reachable()
        self.update(worker)

    def doubt_cache(self, worker: Worker) -> None:
        """Have what is sent to a decode worker from now on find nothing of what it has cached."""
        count = int(worker.cache_salt[:_COUNT_DIGITS] or "0", 16) + 1
        self.salt_cache(worker, f"{count:0{_COUNT_DIGITS}x}{secrets.token_hex(8)}")

    def salt_cache(self, worker: Worker, salt: str) -> None:
        """Use this salt for a decode worker's cache, unless it has a later one, whatever names the worker has."""
        if salt > worker.cache_salt:
            place = _place(worker.spec)
            self._salts[place] = worker.cache_salt = salt
            for each in self:
                if _place(each.spec) == place:
                    each.cache_salt = salt
            self.on_change()

    def await_answer(self, worker: Worker) -> None:
        """Send a worker no new requests before it answers a health check. It is not out: what it has stays there."""
        worker.doubted = True
        self.update(worker)

    def drain(self, worker: Worker) -> None:
        """Drain a worker for an operator: no new requests."""
        worker.drained = True
        self.update(worker)

    def undrain(self, worker: Worker) -> None:
        """End an operator's drain."""
        worker.drained = False
        self.update(worker)

    def leave(self, worker: Worker) -> None:
        """Remove the worker as soon as it holds nothing."""
        worker.leaving = True
        self.update(worker)

    def sweep(self) -> list[str]:
        """Forget leaving workers that hold nothing any more, `MOST_GONE` at most; returns their ids."""
        gone: list[str] = []
        for worker in self:
            if worker.leaving and worker.in_use == 0 and self._ledger.remove_if_idle(worker.id, worker.spec.role):
                self.forget(worker)
                gone.append(worker.id)
                if len(gone) == MOST_GONE:
                    break
        return gone

    def forget(self, worker: Worker) -> None:
        """Remove a worker that has left."""
        del self._workers[worker.id]
        worker.upstream.close()
        self.on_leave(worker.id)
        log.info("worker left", extra={"worker": worker.id})

    def close(self) -> None:
        """Close every connection."""
        for worker in self:
            worker.upstream.close()

    def _tick(self, worker: Worker) -> None:
        worker.circuit.tick(self._loop.time())
