"""What happens to the router's own processes: each may be killed, stopped or told to end, their links are broken, the
parent is told to reload, and another router takes over. Some of these faults come soon after another one.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from scripts.chaos_run.stack import Stack
from scripts.proc import children

GAP_S = (4.0, 12.0)
SOON_S = (0.0, 1.0)  # after another fault: while processes are being started, or take over
SOON_SHARE = 0.3
ALONE_S = 5.0  # a brain that has been lost so long after any other fault has a standby
TAKEN_S = 1.5  # a client hears of a kill within this time, and our own lag
UNCOUNTED_S = 1.5  # a relay says once per second what it has counted
BRAIN, STANDBY, RELAY = "br-brain", "br-standby", "br-relay-"
PAUSES_S = {
    RELAY: (0.5, 20.0),
    BRAIN: (0.5, 9.0),
    STANDBY: (0.5, 9.0),
}  # a relay is given up after 5 s, a brain after 1
DEPOSED_S = 1.5  # after a shorter pause a brain may go on leading
BROKEN_S = (0.05, 2.0)
CHILDREN = (RELAY, BRAIN, STANDBY)
KINDS = (
    *((what, whom) for what in ("kill", "stop", "end") for whom in CHILDREN),
    ("break", "link"),
    ("reload", "parent"),
    ("take over", "parent"),
)
TAKEOVER_S = 2.0
POLICIES = ("level_fit", "br_0", "least_kv", "join_shortest_queue")


@dataclass(slots=True, eq=False)
class Span:
    """From when to when something was wrong; `until_s` is the end of time while it is."""

    since_s: float
    until_s: float = float("inf")


class Killer:
    """Chooses processes below the parents of a router, in an order that the seed fixes."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack, self._random, self._folder = stack, random.Random(seed), stack.folder / "run"
        self._relays_killed_s: list[float] = []
        self._pauses: list[Span] = []  # of relays, by the monotonic clock
        self._faults: list[Span] = []  # all, by the wall clock
        self._brains_lost: list[Span] = []  # those of them in which a leader was killed or stopped for long
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; then nobody is stopped any more, and no link is broken."""
        draw = self._random
        async with asyncio.TaskGroup() as under_way:
            while True:
                await asyncio.sleep(draw.uniform(*(SOON_S if draw.random() < SOON_SHARE else GAP_S)))
                under_way.create_task(self._do(*draw.choice(KINDS)))

    async def _do(self, what: str, whom: str) -> None:
        fault = Span(time.time())
        self._faults.append(fault)
        draw = self._random
        try:
            if what == "break":
                await self._break_link(draw.uniform(*BROKEN_S))
            elif what == "reload":
                self.done["reload"] += 1
                self._stack.reload({"routing": {"policy": draw.choice(POLICIES)}})
            elif what == "take over":
                took = await _to_its_end(self._stack.take_over())
                self.done["take over" if took else "take over in vain"] += 1
            elif pids := sorted(pid for pid, name in self._children().items() if name.startswith(whom)):
                await self._harm(what, whom, draw.choice(pids), fault)
        finally:
            fault.until_s = time.time()

    async def _harm(self, what: str, whom: str, pid: int, fault: Span) -> None:
        self.done[f"{what} {whom.rstrip('-')}"] += 1
        pause_s = self._random.uniform(*PAUSES_S[whom])
        if whom == BRAIN and (what == "kill" or (what == "stop" and pause_s >= DEPOSED_S)):
            self._brains_lost.append(fault)
        if what == "stop":
            await self._stop(pid, whom, pause_s)
        elif what == "end":
            _signal(pid, signal.SIGTERM)
        else:
            if whom == RELAY:
                self._relays_killed_s.append(time.monotonic())
            _signal(pid, signal.SIGKILL)

    def took(self, at_s: float, lag_s: float) -> bool:
        """Whether a connection that broke at this time may have been one of a relay that was killed."""
        return any(0.0 <= at_s - killed_s <= TAKEN_S + lag_s for killed_s in self._relays_killed_s)

    def may_be_uncounted(self, ended_s: float) -> bool:
        """Whether a request that ended at this time may have been at a relay that was killed before it said so."""
        return any(-UNCOUNTED_S <= ended_s - killed_s <= TAKEN_S for killed_s in self._relays_killed_s)

    def stood_still_s(self, since_s: float) -> float:
        """How long a relay has stood still since then: for so long it could not answer."""
        now = time.monotonic()
        return sum(max(0.0, min(now, pause.until_s) - max(since_s, pause.since_s)) for pause in self._pauses)

    def takeovers_s(self) -> list[float]:
        """How long it took until a brain decided again, after each loss of one in which no other fault had a part."""
        decides_s = sorted(at_s for router in self._stack.routers for at_s in _times_s(router.log, "the brain decides"))
        alone_s = [lost.since_s for lost in self._brains_lost if self._is_alone(lost)]
        ends_s = [*alone_s[1:], float("inf")]
        found = []
        for lost_s, end_s in zip(alone_s, ends_s, strict=False):
            found += [at_s - lost_s for at_s in decides_s if lost_s <= at_s < end_s][:1]
        return found

    def forgot_orphans(self, last_s: float) -> bool:
        """Whether a relay has ended within this time, and another brain led afterwards: that one does not know which KV
        this relay could not have drained.
        """
        routers, since_s = self._stack.routers, time.time() - last_s
        ended_s = [at_s for router in routers for at_s in _times_s(router.log, "child died", f'"child":"{RELAY[3:]}')]
        decides_s = [at_s for router in routers for at_s in _times_s(router.log, "the brain decides")]
        return any(at_s >= since_s and at_s <= max(decides_s, default=0.0) for at_s in ended_s)

    def _is_alone(self, fault: Span) -> bool:
        """Whether there was no other one shortly before, or before a brain should have decided again."""
        first_s, last_s = fault.since_s - ALONE_S, fault.since_s + TAKEOVER_S
        others = [other for other in self._faults if other is not fault]
        return not any(other.since_s < last_s and other.until_s > first_s for other in others)

    def _children(self) -> dict[int, str]:
        """Names by process id."""
        found = {}
        for pid in [pid for parent in self._stack.parents() for pid in children(parent)]:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    async def _stop(self, pid: int, whom: str, pause_s: float) -> None:
        pause = Span(time.monotonic())
        if whom == RELAY:
            self._pauses.append(pause)
        _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            _signal(pid, signal.SIGCONT)
            pause.until_s = time.monotonic()

    async def _break_link(self, pause_s: float) -> None:
        """Another socket, at which nobody answers, is in place of the brain's: every relay loses its connection."""
        link, aside = self._folder / "link.sock", self._folder / "link.aside"
        if not link.is_socket():
            return  # it is broken already, or a brain is coming or going
        self.done["break the link"] += 1
        with suppress(FileNotFoundError):  # it goes just now
            link.rename(aside)
            link.touch()
            try:
                await asyncio.sleep(pause_s)
            finally:
                if link.is_socket():
                    aside.unlink()  # another brain listens by now
                else:
                    aside.replace(link)


async def _to_its_end(work: Coroutine[Any, Any, bool]) -> bool:
    """Wait for it, and also when cancelled: the stack's router is the one that has taken over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _times_s(log: Path, event: str, field: str = "") -> list[float]:
    """When lines of this event, with this part, were logged, as Unix time."""
    texts = log.read_text(errors="replace").splitlines()
    lines = [line for line in texts if f'"{event}"' in line and field in line]
    return [datetime.fromisoformat(json.loads(line)["time"]).timestamp() for line in lines]
