"""What all client requests of one router share."""

from dataclasses import dataclass

from balanceroute.proxy.admission.forecasts import Forecasts
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.life.leg import LifeServices
from balanceroute.proxy.perimeter.gate import Perimeter


@dataclass(slots=True, eq=False, kw_only=True)
class ClientServices(LifeServices):
    """Beside what legs need; `perimeter` and `forecasts` are replaced by a reload."""

    ledger: Ledger
    perimeter: Perimeter
    forecasts: Forecasts | None = None
    exchanges: int = 0  # client requests under way
    strict: bool = False  # tests: our own bugs are fatal

    @property
    def degraded_by(self) -> list[str]:
        """What is wrong although requests are served, one line each."""
        silent = [f"{', '.join(group.workers)}: fell silent together ({group.name})" for group in self.frozen]
        return [*self.metrics.conditions.reasons, *silent]
