"""The base of both kinds of worker: an engine object with a clock, and calls that wait for their tokens.

`prefill.py` and `decode.py` have the two kinds, `decode_group.py` the barrier between decode ranks. Everything happens
in one event loop; nothing awaits between reading the engine and acting on it.
"""

import asyncio
import itertools
import logging
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any

from balanceroute.emulator.clock import EmulatedClock
from balanceroute.emulator.connectors import KvExchange
from balanceroute.emulator.faults import Fault, FaultBox
from balanceroute.emulator.replies import Call, Choice
from balanceroute.emulator.requests import GenerationRequest
from balanceroute.emulator.shape import ClusterShape
from balanceroute.emulator.structure import PlannedStream
from balanceroute.engine import KvBlocks, TokenStream
from balanceroute.engine.tokens import plan_length

logger = logging.getLogger(__name__)

sequence_numbers = itertools.count()  # numbers of engine requests, over all workers


def planned_length(choice: Choice, request: GenerationRequest, shape: ClusterShape) -> tuple[int, bool]:
    """(output tokens, whether the last one is the end of text); under a grammar it may, in spite of `ignore_eos`."""
    limit = request.limit_for(len(choice.prompt), shape.context_tokens)
    planned = choice.plan.length if choice.plan is not None else None
    if planned is not None:
        return plan_length(planned, limit, ignore_eos=False, min_tokens=0)
    natural = TokenStream(choice.prompt, shape.lengths).remaining
    return plan_length(natural, limit, ignore_eos=request.ignore_eos, min_tokens=request.min_tokens)


def stream_of(choice: Choice, corruption: bytes = b"") -> TokenStream | PlannedStream:
    if choice.plan is not None:
        return choice.plan.stream(corruption)
    return TokenStream(choice.prompt, corruption=corruption)


class Worker(ABC):
    """The base of both kinds: name, faults, violations, counters, and whether the engine runs."""

    role: str

    def __init__(self, name: str, shape: ClusterShape, clock: EmulatedClock, exchange: KvExchange) -> None:
        self.name = name
        self.shape = shape
        self.clock = clock
        self.exchange = exchange
        self.engine_id = str(uuid.uuid4())
        self.faults = FaultBox()
        self.dead = False  # the engine behind the API server
        self.up = True  # the API server itself
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()  # by finished_reason
        self.violations: Counter[str] = Counter()
        self.violation_log: deque[str] = deque(maxlen=100)
        self._tasks: set[asyncio.Task[None]] = set()

    def violate(self, kind: str, request_id: str) -> None:
        """Count something that a router must never do."""
        self.violations[kind] += 1
        self.violation_log.append(f"{kind}: {request_id}")
        logger.debug("violation", extra={"worker": self.name, "kind": kind, "request_id": request_id})

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it beside the engine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    @abstractmethod
    def kv(self) -> KvBlocks:
        """The worker's KV memory."""

    @abstractmethod
    def submit(self, call: Call, fault: Fault | None = None) -> None:
        """Take a call in."""

    @abstractmethod
    def abort(self, call: Call) -> None:
        """The client has gone: free what the call holds."""

    @abstractmethod
    def queue_counts(self) -> tuple[int, int, int]:
        """Requests running, waiting for capacity, waiting for KV."""

    @abstractmethod
    def fail_all(self) -> None:
        """Lose everything; every call gets the error `ENGINE_DEAD`."""

    def kill_engine(self) -> None:
        """The engine core crashes: error events, then nothing but errors and an unhealthy /health."""
        self.dead = True
        self.fail_all()

    def go_down(self) -> None:
        """Kill the process: no request gets an answer (the caller cuts the connections)."""
        self.up = False
        self.fail_all()

    def come_back(self) -> None:
        """Start the process again, empty, with a new engine id."""
        self.up, self.dead = True, False
        self.engine_id = str(uuid.uuid4())
        self.faults.clear()

    def state(self) -> dict[str, Any]:
        """The worker's part of `GET /_emulator/state`."""
        running, waiting, deferred = self.queue_counts()
        return {
            "name": self.name,
            "role": self.role,
            "up": self.up,
            "dead": self.dead,
            "running": running,
            "waiting": waiting,
            "transferring": deferred,
            "blocks_used": self.kv.used,
            "blocks_total": self.kv.num_blocks,
            "kv_usage_ratio": self.kv.usage_ratio,
            "violations": dict(self.violations),
            "violation_log": list(self.violation_log),
            "counters": dict(self.counters),
            "finished": dict(self.finished),
            "faults": self.faults.to_json(),
        }
