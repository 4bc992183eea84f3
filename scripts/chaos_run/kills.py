"""What happens to the router's own processes meanwhile: kill -9 of relays and of the brain, and pauses of relays."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

GAP_S = (4.0, 12.0)
PAUSE_S = (0.5, 9.0)  # a relay is given up after 5 s
TAKEN_S = 1.5  # a client hears of a kill within this time, and our own lag
BRAIN, RELAY = "br-brain", "br-relay-"


class Killer:
    """Chooses processes below one parent, in an order that the seed fixes."""

    def __init__(self, parent: int, seed: int) -> None:
        self._parent, self._random = parent, random.Random(seed)
        self._relays_killed_s: list[float] = []
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; then nobody is stopped any more."""
        draw = self._random
        while True:
            await asyncio.sleep(draw.uniform(*GAP_S))
            kind = draw.choice(("kill a relay", "kill the brain", "stop a relay"))
            wanted = BRAIN if kind == "kill the brain" else RELAY
            pids = sorted(pid for pid, name in self._children().items() if name.startswith(wanted))
            if not pids:
                continue  # it is being started again
            self.done[kind] += 1
            pid = draw.choice(pids)
            if kind == "stop a relay":
                await self._stop(pid, draw.uniform(*PAUSE_S))
            else:
                if wanted == RELAY:
                    self._relays_killed_s.append(time.monotonic())
                _signal(pid, signal.SIGKILL)

    def took(self, at_s: float, lag_s: float) -> bool:
        """Whether a connection that broke at this time may have been one of a relay that was killed."""
        return any(0.0 <= at_s - killed_s <= TAKEN_S + lag_s for killed_s in self._relays_killed_s)

    def _children(self) -> dict[int, str]:
        """Names by process id."""
        found = {}
        with suppress(OSError):
            for pid in Path(f"/proc/{self._parent}/task/{self._parent}/children").read_text().split():
                with suppress(OSError):
                    found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    async def _stop(self, pid: int, pause_s: float) -> None:
        _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
