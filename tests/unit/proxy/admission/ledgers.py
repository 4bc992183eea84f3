"""A ledger with a real scheduler behind it, on the virtual clock."""

import asyncio

from balanceroute.core.policies import PolicySettings, make_policy
from balanceroute.core.scheduler import Scheduler, SchedulerConfig
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.proxy.admission.ledger import Ledger, Ticket


def a_ledger(policy: str = "br_0", slots: int = 1, **config: float) -> Ledger:
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy)), SchedulerConfig(**config))  # type: ignore[arg-type]
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=slots), 0.0)
    return Ledger(scheduler, asyncio.get_running_loop())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def decoding(ledger: Ledger, *names: str) -> list[Ticket]:
    tickets = [ledger.submit(RequestSpec(name, 10)) for name in names]
    ledger.dispatch()
    for ticket in tickets:
        await ticket.prefiller()
        ticket.prefilled(10)
    ledger.admit()
    return tickets
