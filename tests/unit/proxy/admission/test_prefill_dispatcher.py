"""When requests that had to wait are given a prefiller."""

import asyncio
from itertools import pairwise

from balanceroute.core.types import RequestSpec
from balanceroute.proxy.admission.ledger import MOST_PREFILLS
from balanceroute.proxy.admission.prefill_dispatcher import PrefillDispatcher
from tests.unit.proxy.admission.ledgers import a_ledger, turns
from tests.unit.proxy.virtual_time import with_virtual_time


@with_virtual_time
async def test_kv_usage_that_falls_wakes_the_prefill_dispatcher() -> None:
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


@with_virtual_time
async def test_others_run_while_many_requests_that_waited_are_given_prefillers() -> None:
    ledger, tickets = a_ledger()
    task = asyncio.ensure_future(PrefillDispatcher(ledger).run())
    ledger.report_prefiller("p0", 0.99)
    waiting = 3 * MOST_PREFILLS + 1
    for number in range(waiting):
        tickets.submit(RequestSpec(f"{number}", 5))
    await turns()
    ledger.report_prefiller("p0", 0.1)
    begun = [0]
    while begun[-1] < waiting:
        await turns(1)
        begun.append(ledger.scheduler.snapshot.prefilling)
    assert max(after - before for before, after in pairwise(begun)) == MOST_PREFILLS
    task.cancel()
