"""What every request of one router shares, made once by `app.create_app`'s lifespan."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from balanceroute.config import Config
from balanceroute.errors import Draining
from balanceroute.proxy.connectors import Connector
from balanceroute.proxy.drainer import Drainer
from balanceroute.proxy.fleet import Fleet
from balanceroute.proxy.forecasts import Forecasts
from balanceroute.proxy.ledger import Ledger
from balanceroute.proxy.metrics import Metrics

if TYPE_CHECKING:
    from balanceroute.proxy.lifecycle import Leg


@dataclass(slots=True, eq=False)
class Services:
    """The parts of a running router; `config` is replaced by a reload, the rest stays."""

    config: Config
    ledger: Ledger
    fleet: Fleet
    metrics: Metrics
    drainer: Drainer
    connector: Connector
    forecasts: Forecasts | None = None
    legs: "set[Leg]" = field(default_factory=set)
    exchanges: int = 0  # client requests under way
    looked_s: float = -math.inf  # when the reaper looked last: our loop was not stalled then
    strict: bool = False  # tests: our own bugs are fatal

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one event loop."""
        return self.ledger.loop

    def abort_all(self) -> None:
        """End every request now: the clients get a 503, or an error event and an unclean end."""
        for leg in list(self.legs):
            leg.interrupt(Draining("The router is shutting down.", retry_after_s=1.0))
