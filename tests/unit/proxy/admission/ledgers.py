"""A ledger with one worker of each kind, and the tickets before it."""

import asyncio

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.tickets import Ticket, Tickets


def a_ledger(policy: str = "br_0", slots: int = 1, **config: float) -> tuple[Ledger, Tickets]:
    bounds = SchedulerConfig(**config)  # type: ignore[arg-type]
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy)), bounds)
    scheduler.add_worker(WorkerSpec("p0", Role.PREFILL), 0.0)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=slots), 0.0)
    ledger = Ledger(scheduler, asyncio.get_running_loop())
    return ledger, Tickets(ledger, ledger.loop)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def pooled(tickets: Tickets, name: str, prompt_tokens: int = 10) -> Ticket:
    """A request whose prompt a prefiller has run, and which waits for a decode worker."""
    ticket = tickets.submit(RequestSpec(name, prompt_tokens))
    await ticket.prefiller()
    ticket.prefilled(prompt_tokens)
    return ticket


async def decoding(ledger: Ledger, tickets: Tickets, *names: str) -> list[Ticket]:
    made = [tickets.submit(RequestSpec(name, 10)) for name in names]
    ledger.dispatch()
    for ticket in made:
        await ticket.prefiller()
        ticket.prefilled(10)
    ledger.admit()
    return made


def load(ledger: Ledger) -> int:
    return ledger.scheduler.snapshot.workers[0].load
