"""All services of the process that decides, made by `app.build_services`.

Each layer declares what it uses: `LifeServices`, then `ClientServices` on it, then `OperatorServices` on that.
"""

from dataclasses import dataclass

from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.ops.services import OperatorServices


@dataclass(slots=True, eq=False, kw_only=True)
class Services(OperatorServices):
    """The services of the process that decides."""

    forecasts: Forecasts | None = None

    def begin_drain(self) -> None:
        """Refuse every new request from now on."""
        self.ledger.drain()
