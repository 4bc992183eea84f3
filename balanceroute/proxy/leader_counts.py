"""What brains have counted, kept in the run folder for the one that leads next."""

import asyncio
from typing import Final

from balanceroute.proxy.link.leadership import Lead
from balanceroute.proxy.run_folder import LEADER, RunFolder
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.ticks import until_tick_s

PERIOD_S: Final = 1.0


class LeaderCounts:
    """The file of one run folder, which belongs to who leads; `metrics` go on from what is in it."""

    def __init__(self, folder: RunFolder, lead: Lead, metrics: Metrics) -> None:
        self._folder, self._lead, self._metrics = folder, lead, metrics
        self._kept = b""
        metrics.carry_on(folder.counts(LEADER))

    def keep(self) -> bool:
        """Write down what is new; False: another brain leads, and nothing was written."""
        if not self._lead.renew():
            return False
        counts = self._metrics.counts()
        if counts != self._kept:
            self._kept = counts
            self._folder.keep_counts(LEADER, counts)
        return True

    async def watch(self) -> None:
        """Keep it every second, until cancelled."""
        while True:
            await asyncio.sleep(until_tick_s(asyncio.get_running_loop().time(), PERIOD_S))
            self.keep()
