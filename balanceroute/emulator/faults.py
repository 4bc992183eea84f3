"""Faults that a test or an operator injects: what can go wrong on a worker, and how it looks on the wire.

Request faults wait on a worker for the next `count` requests of a route (`count: null`: for all). Worker
faults act at once. `after_events` counts SSE events that get through before a stream fault strikes.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from starlette.types import Send

from balanceroute.emulator.errors import ApiError, error_body
from balanceroute.emulator.sse import DONE, Connection, GzipSseWriter, SseWriter


class FaultKind(StrEnum):
    """Everything that can be injected."""

    # one request
    STATUS = "status"  # answers `status`
    RESET_BEFORE_REPLY = "reset_before_reply"
    STALL = "stall"  # after the events: no bytes any more, connection open
    RESET = "reset"  # after the events: connection cut
    CLOSE = "close"  # after the events: connection ended cleanly, without the final chunk
    HALF_EVENT = "half_event"  # after the events: half of the next one, then closed
    MERGE_EVENTS = "merge_events"  # two events in one write
    SPLIT_BYTES = "split_bytes"  # every byte a write of its own
    GARBAGE = "garbage"  # after the events: bytes that are no event, then on
    GZIP = "gzip"
    LATE_DONE = "late_done"  # [DONE] comes `delay_s` after the last event
    NO_DONE = "no_done"  # a clean end without [DONE]
    NO_FINISH = "no_finish"  # [DONE] without any finish_reason
    ERROR_EVENT = "error_event"  # after the events: {"error": ...}, then [DONE]
    RECOMPUTE = "recompute"  # after as many tokens: popped by the recompute scheduler
    NULL_PARAMS = "null_params"  # a probe is answered without kv_transfer_params
    # the worker, at once
    SLOW_PREFILL = "slow_prefill"  # prompts take `factor` times as long (1 heals)
    FREEZE = "freeze"  # /health 200 but no progress
    UNFREEZE = "unfreeze"
    PAUSE = "pause"  # the engine's balancer pauses the request that has run longest, with its KV
    RESUME = "resume"  # and resumes all paused ones
    RECOMPUTE_NOW = "recompute_now"  # pops the last running request on the next step
    KILL_ENGINE = "kill_engine"  # error events, /health 503
    STOP = "stop"  # process gone: connections cut, port closed
    START = "start"  # comes back empty, with a new engine id
    CLEAR = "clear"  # forgets the waiting request faults, undoes slow_prefill, freeze and pause
    # the group, at once
    STOP_BARRIER = "stop_barrier"  # no rank of the group makes progress
    START_BARRIER = "start_barrier"


WORKER_KINDS = frozenset(
    {
        FaultKind.SLOW_PREFILL,
        FaultKind.FREEZE,
        FaultKind.UNFREEZE,
        FaultKind.PAUSE,
        FaultKind.RESUME,
        FaultKind.RECOMPUTE_NOW,
        FaultKind.KILL_ENGINE,
        FaultKind.STOP,
        FaultKind.START,
        FaultKind.CLEAR,
        FaultKind.STOP_BARRIER,
        FaultKind.START_BARRIER,
    }
)
_NUMBERS = (  # the least value of each
    ("count", int | None, 1),
    ("after_events", int, 0),
    ("status", int, 200),
    ("delay_s", int | float, 0),
    ("factor", int | float, 0),
)
GENERATION_ROUTES = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `path` limits it to a route (default: both generation routes)."""

    kind: FaultKind
    count: int | None = 1
    after_events: int = 0
    status: int = 503
    delay_s: float = 1.0
    factor: float = 10.0
    path: str | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Fault":
        """Read `{"kind": ..., ...}`. Raises: ApiError 400 that names what is wrong."""
        known = {field.name for field in fields(cls)}
        unknown = set(body) - known - {"worker"}
        if unknown:
            raise ApiError(f"fault: unknown keys {sorted(unknown)}, known are {sorted(known | {'worker'})}")
        values = {name: body[name] for name in known & set(body)}
        try:
            values["kind"] = FaultKind(body.get("kind", ""))
        except ValueError as error:
            raise ApiError(f"fault: kind must be one of {', '.join(FaultKind)}") from error
        for name, types, least in _NUMBERS:
            value = values.get(name, least)
            if not isinstance(value, types) or isinstance(value, bool) or (value is not None and value < least):
                raise ApiError(f"fault: {name} must be a number from {least}, got {value!r}")
        return cls(**values)

    def applies_to(self, path: str) -> bool:
        """Whether it concerns requests of that route."""
        return path == self.path if self.path else path in GENERATION_ROUTES


class FaultBox:
    """The request faults that wait on a worker, first in first out."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Let it wait."""
        self._faults.append(fault)

    def clear(self) -> None:
        """Forget all."""
        self._faults.clear()

    def take(self, path: str) -> Fault | None:
        """The fault that strikes a request of this route now."""
        for index, fault in enumerate(self._faults):
            if fault.applies_to(path):
                if fault.count is not None:
                    left = replace(fault, count=fault.count - 1)
                    self._faults[index : index + 1] = [left] if left.count else []
                return fault
        return None

    def to_json(self) -> list[dict[str, Any]]:
        """The waiting faults."""
        return [{"kind": f.kind, "count": f.count, "path": f.path} for f in self._faults]


_GARBAGE = b"\xff\xfe\x00garbage\r\n: \x80{]\n"


class FaultySseWriter(SseWriter):
    """An event stream that misbehaves as its fault says."""

    def __init__(
        self,
        send: Send,
        tasks: set[asyncio.Task[None]],
        fault: Fault,
        connection: Connection,
        time_scale: float,
    ) -> None:
        super().__init__(send, tasks)
        self._fault = fault
        self._connection = connection
        self._delay_s = fault.delay_s * time_scale
        self._events = 0
        self._broken = False  # nothing more gets through
        self._kept = b""

    def event(self, data: bytes) -> None:
        """Let the first events through, then strike."""
        if self._broken:
            return
        kind = self._fault.kind
        if self._events == self._fault.after_events:
            data = self._strike(data)
        self._events += 1
        if kind is FaultKind.MERGE_EVENTS:
            self._kept, data = (b"", self._kept + data) if self._kept else (data, b"")
        elif kind is FaultKind.NO_FINISH and b'"finish_reason":"' in data:
            return
        if data:
            self.write(data)

    def done(self) -> None:
        """End, unless the fault forbids it."""
        kind = self._fault.kind
        if self._broken:
            return
        if kind is FaultKind.NO_DONE:
            self.end()
        elif kind is FaultKind.LATE_DONE:
            asyncio.get_running_loop().call_later(self._delay_s, self._late_done)
        elif self._kept:
            self.write(self._kept + DONE)
            self.end()
        else:
            super().done()

    def _late_done(self) -> None:
        if not self.completed.done():
            super().done()

    def _strike(self, data: bytes) -> bytes:
        kind = self._fault.kind
        if kind is FaultKind.GARBAGE:
            return _GARBAGE + data
        if kind is FaultKind.ERROR_EVENT:
            self.write(b"data: " + error_body("Injected error") + b"\n\n")
            super().done()
            self._broken = True
        elif kind is FaultKind.STALL:
            self._broken = True
        elif kind is FaultKind.HALF_EVENT:
            self.write(data[: len(data) // 2])
            self._break(reset=False)
        elif kind in (FaultKind.RESET, FaultKind.CLOSE):
            self._break(reset=kind is FaultKind.RESET)
        return b"" if self._broken else data

    def _break(self, *, reset: bool) -> None:
        self._broken = True
        if reset:
            self._connection.reset()
        else:
            self._connection.close()


class SplittingSseWriter(SseWriter):
    """Writes every byte on its own, with a turn of the event loop in between."""

    def write(self, data: bytes) -> None:
        """Queue the bytes."""
        self._pending += [data[place : place + 1] for place in range(len(data))]
        if not self._flushing:
            self._flush_by(self._drip())

    async def _drip(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, []
            for piece in pending:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
        self._flushing = False
        if self._ended:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._complete()


def sse_writer(
    send: Send, tasks: set[asyncio.Task[None]], fault: Fault | None, connection: Connection, time_scale: float
) -> SseWriter:
    """The event stream for a request, healthy or as its fault says."""
    if fault is None or fault.kind in (FaultKind.RECOMPUTE, FaultKind.NULL_PARAMS):
        return SseWriter(send, tasks)
    if fault.kind is FaultKind.GZIP:
        return GzipSseWriter(send, tasks)
    if fault.kind is FaultKind.SPLIT_BYTES:
        return SplittingSseWriter(send, tasks)
    return FaultySseWriter(send, tasks, fault, connection, time_scale)
