"""The first coroutine: it gives queued requests to prefillers when one may take more.

`Ledger.submit` gives a request a prefiller at once if no other waits; this coroutine serves those that had to wait: for
KV usage to fall, for room in the pool, for a worker to come back.
"""

import asyncio

from balanceroute.proxy.admission.ledger import Ledger


class PrefillDispatcher:
    """Dispatches whenever `ledger.prefill_event` is set."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def run(self) -> None:
        """Dispatch until cancelled."""
        ledger = self._ledger
        while True:
            await ledger.prefill_event.wait()
            ledger.prefill_event.clear()
            ledger.dispatch()
            await asyncio.sleep(0)  # an event that is set already lets nobody else run
