"""What all client requests of one router share."""

from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.life.leg import LifeServices
from balanceroute.proxy.perimeter.gate import Perimeter


class Keyer(Protocol):
    """What tells kinds of prompts apart for a predictor."""

    def key(self, prompt: bytes, header: str) -> str:
        """As `Forecasts.key`."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class ClientServices(LifeServices):
    """Beside what legs need; `perimeter` and `keyer` are replaced by a reload."""

    perimeter: Perimeter
    keyer: Keyer | None = None
    exchanges: int = 0  # client requests under way
    strict: bool = False  # tests: our own bugs are fatal

    @property
    def degraded_by(self) -> list[str]:
        """What is wrong although requests are served, one line each."""
        silent = [f"{', '.join(group.workers)}: fell silent together ({group.name})" for group in self.frozen]
        return [*self.metrics.conditions.reasons, *silent]
