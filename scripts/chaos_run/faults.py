"""What happens to the workers: a seeded schedule of faults, played over the emulator's own control route.

Whatever lasts is healed after a while, and at most half of the decode ranks and one prefiller are down or frozen at a
time, so that there is always somebody left who could serve.

Where workers are processes of their own, they are stopped, killed and started as processes (SIGSTOP, SIGCONT, SIGKILL).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from balanceroute.emulator.faults import FaultKind

MEAN_GAP_S = 0.6  # between two faults
FROZEN_SHARE = 0.12  # of the steps, where ranks are processes
MOST_FROZEN_S = 15.0  # with the wait in the pool less than a lease: a thawed decoder may still pull what it was sent
GROUP_GAP_S = (4.0, 15.0)  # from one freeze of a whole group to the next
GROUP_FROZEN_S = (0.5, 12.0)
STATUSES = (503, 503, 503, 429, 500, 502, 401, 404)  # 401, 404: started again with another key or model
STREAM_FAULTS = (
    FaultKind.RESET,
    FaultKind.CLOSE,
    FaultKind.STALL,
    FaultKind.HALF_EVENT,
    FaultKind.GARBAGE,
    FaultKind.ERROR_EVENT,
    FaultKind.RECOMPUTE,
)
WHOLE_FAULTS = (
    FaultKind.MERGE_EVENTS,
    FaultKind.SPLIT_BYTES,
    FaultKind.LATE_DONE,
    FaultKind.NO_DONE,
    FaultKind.NO_FINISH,
    FaultKind.RESET_BEFORE_REPLY,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One fault on one worker; `heal_kind` follows after `heal_s`."""

    worker: str
    fault: dict[str, Any]
    heal_kind: str | None = None
    heal_s: float = 0.0

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.fault.items() if name != "kind")
        return f"{self.worker} {self.fault['kind']}" + (f" ({values})" if values else "")


class Schedule:
    """Draws the steps; the same seed gives the same ones.

    Args: own_processes: every worker is a process. lasting: whether anything but requests is struck.
    """

    def __init__(
        self, seed: int, prefillers: int, decoders: int, *, own_processes: bool = False, lasting: bool = True
    ) -> None:
        self._random = random.Random(seed)
        self._own_processes, self._lasting = own_processes, lasting
        self._prefill = [f"p{index}" for index in range(prefillers)]
        self._decode = [f"d{index}" for index in range(decoders)]

    @property
    def random(self) -> random.Random:
        """Where all draws come from."""
        return self._random

    def gap_s(self) -> float:
        """Seconds until the next step."""
        return self._random.expovariate(1.0 / MEAN_GAP_S)

    def next(self, out: Sequence[str]) -> Step:
        """The next step; `out` are the workers that are down or frozen already."""
        draw = self._random
        lasting_allowed = self._lasting and sum(name in self._decode for name in out) < len(self._decode) // 2
        if self._own_processes and lasting_allowed and draw.random() < FROZEN_SHARE:
            return self._frozen(draw.choice([name for name in self._decode if name not in out]))
        if draw.random() < 0.25:
            worker = draw.choice(self._prefill)
            nobody_out = not any(name in self._prefill for name in out)
            return self._on_prefiller(worker, lasting_allowed=self._lasting and nobody_out)
        worker = draw.choice(self._decode)
        return self._on_decoder(worker, lasting_allowed=lasting_allowed and worker not in out)

    def _on_prefiller(self, worker: str, *, lasting_allowed: bool) -> Step:
        draw = self._random
        kind = draw.random()
        if kind < 0.15 and lasting_allowed:
            return self._frozen(worker) if self._own_processes and draw.random() < 0.5 else self._down(worker)
        if kind < 0.3:
            return self._busy(worker)
        if kind < 0.45:
            factor, heal_s = draw.choice([(5.0, 6.0), (50.0, 6.0), (3.0, 60.0)])
            fault = {"kind": FaultKind.SLOW_PREFILL, "factor": factor}
            return Step(worker, fault, FaultKind.CLEAR, draw.uniform(1.0, heal_s))
        if kind < 0.6:
            return Step(worker, {"kind": FaultKind.NULL_PARAMS, "count": draw.randint(1, 8)})
        if kind < 0.7:
            return self._side_route(worker)
        name = draw.choice(
            [FaultKind.RESET_BEFORE_REPLY, FaultKind.HALF_EVENT, FaultKind.RESET, FaultKind.GARBAGE, FaultKind.STALL]
        )
        return Step(worker, {"kind": name, "count": draw.randint(1, 3)})

    def _on_decoder(self, worker: str, *, lasting_allowed: bool) -> Step:
        draw = self._random
        kind = draw.random()
        if kind < 0.12 and lasting_allowed:
            return self._down(worker)
        if kind < 0.16 and lasting_allowed:
            return Step(worker, {"kind": FaultKind.KILL_ENGINE}, FaultKind.START, draw.uniform(2.0, 8.0))
        if kind < 0.21 and lasting_allowed:
            return Step(worker, {"kind": FaultKind.FREEZE}, FaultKind.UNFREEZE, draw.uniform(1.0, 20.0))
        if kind < 0.23 and self._lasting:
            return Step(worker, {"kind": FaultKind.STOP_BARRIER}, FaultKind.START_BARRIER, draw.uniform(0.5, 2.0))
        if kind < 0.25:
            return Step(worker, {"kind": FaultKind.PAUSE}, FaultKind.CLEAR, draw.uniform(0.5, 10.0))
        if kind < 0.34:
            return self._busy(worker)
        if kind < 0.38:
            return self._side_route(worker)
        if kind < 0.45:
            return Step(worker, {"kind": FaultKind.RECOMPUTE_NOW})
        if kind < 0.48:
            return Step(worker, {"kind": FaultKind.GZIP, "count": draw.randint(1, 2)})
        if kind < 0.65:
            fault = {"kind": draw.choice(WHOLE_FAULTS), "count": draw.randint(1, 4), "delay_s": draw.choice([0.2, 3.0])}
            return Step(worker, fault)
        fault = {
            "kind": draw.choice(STREAM_FAULTS),
            "count": draw.randint(1, 4),
            "after_events": draw.choice([0, 0, 1, 2, 3, draw.randint(1, 80)]),
        }
        return Step(worker, fault)

    def _frozen(self, worker: str) -> Step:
        """SIGSTOP: mostly for longer than health checks take to judge, at times only for a pause."""
        draw = self._random
        pause_s = draw.uniform(0.2, 3.0) if draw.random() < 0.4 else draw.uniform(5.0, MOST_FROZEN_S)
        return Step(worker, {"kind": "sigstop"}, "sigcont", pause_s)

    def _down(self, worker: str) -> Step:
        if self._own_processes:
            return Step(worker, {"kind": "sigkill"}, "respawn", self._random.uniform(0.5, 8.0))
        return Step(worker, {"kind": FaultKind.STOP}, FaultKind.START, self._random.uniform(0.5, 8.0))

    def _busy(self, worker: str) -> Step:
        fault = {"kind": FaultKind.STATUS, "status": self._random.choice(STATUSES)}
        if self._random.random() < 0.4:
            return Step(worker, fault | {"count": None}, FaultKind.CLEAR, self._random.uniform(1.0, 8.0))
        return Step(worker, fault | {"count": self._random.randint(1, 10)})

    def _side_route(self, worker: str) -> Step:
        kind = self._random.choice([FaultKind.STATUS, FaultKind.STALL])
        path = self._random.choice(["/health", "/metrics"])
        fault = {"kind": kind, "count": self._random.randint(1, 6), "path": path}
        if worker in self._prefill:
            fault["status"] = 500  # 503 of /health would say that the engine is dead, and its pinned KV gone
        return Step(worker, fault)


class Saboteur:
    """Plays a schedule against a running emulator."""

    def __init__(self, control_urls: Sequence[str], schedule: Schedule) -> None:
        self._urls = list(control_urls)
        self._schedule = schedule
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)
        self._out: Counter[str] = Counter()  # workers that are down or frozen
        self.played: Counter[str] = Counter()  # by kind

    async def run(self) -> None:
        """Until cancelled; then nothing is left that lasts."""
        try:
            async with asyncio.TaskGroup() as healing:
                while True:
                    await asyncio.sleep(self._schedule.gap_s())
                    await self._play(self._schedule.next(list(self._out)), healing)
        finally:
            await self.heal_all()

    async def inject(self, worker: str, fault: dict[str, Any]) -> bool:
        """Put a fault on a worker, over the first server that is up; whether the emulator took it."""
        for url in self._urls:
            try:
                reply = await self._client.post(f"{url}/_emulator/fault", json={"worker": worker, **fault})
            except httpx.TransportError:
                continue
            return reply.status_code == 200
        return False

    async def state(self) -> dict[str, Any]:
        """What the emulated workers hold."""
        for url in self._urls:
            try:
                state: dict[str, Any] = (await self._client.get(f"{url}/_emulator/state")).json()
            except httpx.TransportError:
                continue
            return state
        raise ConnectionError("no emulated worker answers")

    async def freeze_group(self) -> None:
        """Until cancelled: the decode ranks' one process stands still, or its barrier does, from time to time."""
        draw = self._schedule.random
        while True:
            await asyncio.sleep(draw.uniform(*GROUP_GAP_S))
            kind, heal = draw.choice([("sigstop", "sigcont"), (FaultKind.STOP_BARRIER, FaultKind.START_BARRIER)])
            await self.inject("d0", {"kind": kind})
            self.played[f"group {kind}"] += 1
            try:
                await asyncio.sleep(draw.uniform(*GROUP_FROZEN_S))
            finally:
                await asyncio.shield(self.inject("d0", {"kind": heal}))

    async def heal_all(self) -> None:
        """Everybody is up, thawed and without faults."""
        for name in (await self.state()).get("processes", {}):
            await self.inject(name, {"kind": "sigcont"})
            await self.inject(name, {"kind": "respawn"})
        await self.inject("d0", {"kind": FaultKind.START_BARRIER})
        for name, worker in (await self.state())["workers"].items():
            if worker["dead"] or not worker["up"]:
                await self.inject(name, {"kind": FaultKind.START})
            await self.inject(name, {"kind": FaultKind.CLEAR})
        self._out.clear()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _play(self, step: Step, healing: asyncio.TaskGroup) -> None:
        if not await self.inject(step.worker, step.fault):
            self.played["refused"] += 1
            return
        self.played[step.fault["kind"]] += 1
        if step.heal_kind is not None:
            if step.heal_kind is not FaultKind.CLEAR:
                self._out[step.worker] += 1
            healing.create_task(self._heal(step, step.heal_kind))

    async def _heal(self, step: Step, kind: str) -> None:
        await asyncio.sleep(step.heal_s)
        await self.inject(step.worker, {"kind": kind})
        if kind is not FaultKind.CLEAR:
            self._out[step.worker] -= 1
            if self._out[step.worker] <= 0:
                del self._out[step.worker]
