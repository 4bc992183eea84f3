"""The counts of all leaders, kept in the run folder for the next one.

They include the counts of relays that will not return, so that these relays' files can be removed. The file names such
a relay until its own is gone, so that after a kill in between nothing is counted twice.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson

from balanceroute.proxy.link.files import is_gone
from balanceroute.proxy.link.leadership import Lead
from balanceroute.proxy.link.remote import NOBODY
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import LEADER, CountsFile, Gone, KeptCounts
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.telemetry.ticks import until_tick_s

PERIOD_S: Final = 1.0
_INHERITED: Final = "inherited"
_GENERATION: Final = "generation"  # missing: 1


class LeaderCounts:
    """The leader's file in one run folder; `metrics` continue from its contents.

    `inherited`: relays whose counts are included while their files still exist.
    """

    def __init__(
        self,
        folder: RunFolder,
        lead: Lead,
        metrics: Metrics,
        on_inherited: Callable[[str], None] = lambda relay: None,
        generation: int = 1,
    ) -> None:
        """`on_inherited` is called with relays whose counts are included from now on.

        `generation`: of the router. The first leader of a router that takes over is no restart of the former's.
        """
        self._file, self._lead, self._metrics = CountsFile(folder, LEADER), lead, metrics
        self._kept_counts, self._gone, self._on_inherited = KeptCounts(folder), Gone(folder), on_inherited
        last = self._file.last()
        former = _entries(last)
        if former.get(_GENERATION, 1) == generation:
            metrics.continue_former("brain", last)
        else:
            metrics.continue_from(last)
        self._entries = {} if generation == 1 else {_GENERATION: generation}
        self.inherited = _inherited(former)

    def keep(self) -> bool:
        """Write new counts if possible; False: another brain leads, and nothing was written."""
        if not self._lead.renew():
            return False
        self._write()
        return True

    def clean_up(self, now: float) -> None:
        """Include the counts of relays that will not return, and remove their files."""
        if self._lead.renew():
            self._gone.clean_up(now, self._inherit)
            self.inherited = {relay for relay in self.inherited if not is_gone(self._kept_counts.file(relay))}

    async def watch(self) -> None:
        """Keep the file every second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(until_tick_s(loop.time(), PERIOD_S))
            self.clean_up(loop.time())
            self.keep()

    def _inherit(self, relay: str, counts: bytes) -> bool:
        """Include the counts of a relay; returns whether the file has them.

        The file is first: a relay that is started again nevertheless continues from its own file as long as that is
        there.
        """
        if not counts:
            return True
        if relay in self.inherited:
            return self._write()
        whole = Metrics(lambda: NOBODY, self._metrics.policy)
        for part in (self._metrics.counts(), counts):
            whole.continue_from(part)
        if not self._keep(whole.counts(), self.inherited | {relay}):
            return False
        self._metrics.continue_from(counts)
        self.inherited.add(relay)
        self._on_inherited(relay)
        return True

    def _write(self) -> bool:
        """Write the file; returns whether it has all counts."""
        return self._keep(self._metrics.counts(), self.inherited)

    def _keep(self, counts: bytes, inherited: set[str]) -> bool:
        """Write the file with these counts, which include those of `inherited`; returns whether it has them."""
        entries = self._entries | ({_INHERITED: sorted(inherited)} if inherited else {})
        if entries:
            counts = orjson.dumps(orjson.loads(counts) | entries)
        return self._file.has(counts) or self._file.keep(counts)


def _entries(counts: bytes) -> dict[str, Any]:
    """What a leader's file says; nothing where it can't be read."""
    try:
        entries = orjson.loads(counts)
    except ValueError:
        return {}
    return entries if isinstance(entries, dict) else {}


def _inherited(former: dict[str, Any]) -> set[str]:
    """The relays named as included in a leader's counts."""
    named = former.get(_INHERITED)
    return {relay for relay in named if isinstance(relay, str)} if isinstance(named, list) else set()
