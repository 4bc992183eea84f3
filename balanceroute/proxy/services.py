"""The parts of a running router, made once by `app.create_app`'s lifespan.

Each rung of the ladder declares what it needs: `LifeServices`, on it `ClientServices`, and on that `OperatorServices`.
This is all of it, for those who put it together.
"""

from dataclasses import dataclass

from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.ops.services import OperatorServices


@dataclass(slots=True, eq=False, kw_only=True)
class Services(OperatorServices):
    """Everything, in the process that decides."""

    forecasts: Forecasts | None = None

    def begin_drain(self) -> None:
        """Refuse every new request from now on."""
        self.ledger.drain()
