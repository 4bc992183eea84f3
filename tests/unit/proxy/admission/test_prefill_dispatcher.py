"""When requests that had to wait are given a prefiller."""

import asyncio

from balanceroute.core.types import RequestSpec
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from tests.unit.proxy.admission.ledgers import a_ledger, turns
from tests.unit.proxy.virtual_time import in_virtual_time


def test_kv_usage_that_falls_wakes_the_prefill_dispatcher() -> None:
    async def test() -> None:
        ledger, tickets = a_ledger()
        task = asyncio.ensure_future(PrefillDispatcher(ledger).run())
        ledger.report_prefiller("p0", 0.99)
        ticket = tickets.submit(RequestSpec("r", 5))
        waiting = asyncio.ensure_future(ticket.prefiller())
        await turns()
        assert not waiting.done()
        ledger.report_prefiller("p0", 0.1)
        assert await waiting == "p0"
        task.cancel()

    in_virtual_time(test)
