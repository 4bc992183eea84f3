"""The parts of a running router, made once by `app.create_app`'s lifespan.

Each rung of the ladder declares what it needs: `LifeServices`, on it `ClientServices`, and on
that `OperatorServices`. This is
all of it, for those who put it together.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from balanceroute.errors import Draining
from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.ops.services import OperatorServices
from balanceroute.proxy.perimeter.tls import Tls

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Services(OperatorServices):
    """Everything, and what runs."""

    tls: Tls
    forecasts: Forecasts | None = None
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # the coroutines, once they run, by name

    def internal_error(self, where: str, error: Exception, worker: str) -> None:
        """A bug of ours: counted and logged with its traceback. Raises: `error`, where bugs are fatal."""
        self.metrics.tasks_failed.inc(where)
        log.error("internal error", exc_info=error, extra={"where": where, "worker": worker})
        if self.strict:
            raise error

    def abort_all(self) -> None:
        """End every request now: the clients get a 503, or an error event and an unclean end."""
        for leg in list(self.legs):
            leg.interrupt(Draining("The router is shutting down.", retry_after_s=1.0))
