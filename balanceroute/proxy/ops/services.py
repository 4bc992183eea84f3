"""What operators' routes need of the router: beside what client requests share, who decides."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.client.services import ClientServices


@dataclass(slots=True, eq=False, kw_only=True)
class OperatorServices(ClientServices):
    """In the process that holds the ledger.

    `keep_changes` keeps what operators have changed for the next brain; it is called before they are answered. Raises:
    NoHealthyWorkers: another brain leads, and does not know of it. `changing` is held by who makes another
    configuration from the present one: that may take seconds, in which no other may come.
    """

    ledger: Ledger
    keep_changes: Callable[[], None] = lambda: None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
