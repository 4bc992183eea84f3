"""What brains have counted, kept in the run folder for the one that leads next."""

import asyncio
from typing import Final

from balanceroute.proxy.link.leadership import Lead
from balanceroute.proxy.run_folder import LEADER, CountsFile, RunFolder
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.ticks import until_tick_s

PERIOD_S: Final = 1.0


class LeaderCounts:
    """The file of one run folder, which belongs to who leads; `metrics` go on from what is in it."""

    def __init__(self, folder: RunFolder, lead: Lead, metrics: Metrics) -> None:
        self._file, self._lead, self._metrics = CountsFile(folder, LEADER), lead, metrics
        self._kept = b""
        metrics.carry_on(self._file.last())

    def keep(self) -> bool:
        """Write down what is new, as far as that can be; False: another brain leads, and nothing was written."""
        if not self._lead.renew():
            return False
        counts = self._metrics.counts()
        if counts != self._kept and self._file.keep(counts):
            self._kept = counts
        return True

    async def watch(self) -> None:
        """Keep it every second, until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(asyncio.get_running_loop().time(), PERIOD_S))
            self.keep()
