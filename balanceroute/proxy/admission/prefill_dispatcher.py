"""The first coroutine: queued requests to prefillers, whenever one may take more.

A request that finds nobody before it is given its prefiller at once, by `Ledger.submit`; this coroutine serves those
that had to wait: for KV usage to fall, for room in the pool, for a worker to come back.
"""

from balanceroute.proxy.admission.ledger import Ledger


class PrefillDispatcher:
    """Sleeps on `ledger.prefill_event`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def run(self) -> None:
        """Until cancelled."""
        ledger = self._ledger
        while True:
            await ledger.prefill_event.wait()
            ledger.prefill_event.clear()
            ledger.dispatch()
