"""What happens to the router's own processes: kill -9 and pauses of relays, brain and standby, broken links."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

GAP_S = (4.0, 12.0)
TAKEN_S = 1.5  # a client hears of a kill within this time, and our own lag
UNCOUNTED_S = 1.5  # a relay says once per second what it has counted
BRAIN, STANDBY, RELAY = "br-brain", "br-standby", "br-relay-"
PAUSES_S = {
    RELAY: (0.5, 20.0),
    BRAIN: (0.5, 9.0),
    STANDBY: (0.5, 9.0),
}  # a relay is given up after 5 s, a brain after 1
BROKEN_S = (0.05, 2.0)
KINDS = (("kill", RELAY), ("kill", BRAIN), ("kill", STANDBY), ("stop", RELAY), ("stop", BRAIN), ("stop", STANDBY))
LINK = ("break", "link")
TAKEOVER_S = 2.0


@dataclass(slots=True)
class Pause:
    """When a process stood still, by the monotonic clock; `until_s` is the end of time while it does."""

    since_s: float
    until_s: float = float("inf")


class Killer:
    """Chooses processes below one parent, in an order that the seed fixes."""

    def __init__(self, parent: int, seed: int, folder: Path) -> None:
        """`folder`: the router's run folder."""
        self._parent, self._random, self._folder = parent, random.Random(seed), folder
        self._relays_killed_s: list[float] = []
        self._pauses: list[Pause] = []  # of relays
        self._brains_lost_s: list[float] = []  # by the wall clock: when a leader was killed or stopped for long
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; then nobody is stopped any more, and no link is broken."""
        draw = self._random
        while True:
            await asyncio.sleep(draw.uniform(*GAP_S))
            what, whom = draw.choice((*KINDS, LINK))
            if (what, whom) == LINK:
                await self._break_link(draw.uniform(*BROKEN_S))
                continue
            pids = sorted(pid for pid, name in self._children().items() if name.startswith(whom))
            if not pids:
                continue  # it is being started again
            pid = draw.choice(pids)
            self.done[f"{what} {whom.rstrip('-')}"] += 1
            if what == "stop":
                await self._stop(pid, whom, draw.uniform(*PAUSES_S[whom]))
            else:
                self._note_loss(whom)
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

    def takeovers_s(self, log: Path) -> list[float]:
        """How long it took until a brain decided again, after each loss of one that has another before the next."""
        decides_s = sorted(_times_s(log, "the brain decides"))
        ends_s = [*self._brains_lost_s[1:], float("inf")]
        found = []
        for lost_s, end_s in zip(self._brains_lost_s, ends_s, strict=True):
            found += [at_s - lost_s for at_s in decides_s if lost_s <= at_s < end_s][:1]
        return found

    def _note_loss(self, whom: str) -> None:
        if whom == RELAY:
            self._relays_killed_s.append(time.monotonic())
        elif whom == BRAIN:
            self._brains_lost_s.append(time.time())

    def _children(self) -> dict[int, str]:
        """Names by process id."""
        found = {}
        with suppress(OSError):
            for pid in Path(f"/proc/{self._parent}/task/{self._parent}/children").read_text().split():
                with suppress(OSError):
                    found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    async def _stop(self, pid: int, whom: str, pause_s: float) -> None:
        pause = Pause(time.monotonic())
        if whom == RELAY:
            self._pauses.append(pause)
        elif whom == BRAIN:
            self._note_loss(whom)
        _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            _signal(pid, signal.SIGCONT)
            pause.until_s = time.monotonic()

    async def _break_link(self, pause_s: float) -> None:
        """Another socket, at which nobody answers, is in place of the brain's: every relay loses its connection."""
        self.done["break the link"] += 1
        link, aside = self._folder / "link.sock", self._folder / "link.aside"
        with suppress(FileNotFoundError):  # a brain is coming or going
            link.rename(aside)
            link.touch()
            try:
                await asyncio.sleep(pause_s)
            finally:
                if link.is_socket():
                    aside.unlink()  # another brain listens by now
                else:
                    aside.replace(link)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _times_s(log: Path, event: str) -> list[float]:
    """When lines of this event were logged, as Unix time."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if f'"{event}"' in line]
    return [datetime.fromisoformat(json.loads(line)["time"]).timestamp() for line in lines]
