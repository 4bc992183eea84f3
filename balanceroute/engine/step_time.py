"""The duration of a decode step when all workers of a group wait at one barrier.

Attention reads the whole resident KV of a worker, so a worker's step takes `per_token_s * load +
overhead_s`; the barrier makes the group wait for the slowest. A worker without requests still runs a dummy
batch and pays the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from balanceroute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Step time `a * max load + b`.

    per_token_s: a, seconds per resident KV token. overhead_s: b, seconds. The defaults are the reference
    setting of the step simulator.
    """

    per_token_s: float = 1.2e-7
    overhead_s: float = 0.025

    def __post_init__(self) -> None:
        for name in ("per_token_s", "overhead_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"step time: {name} must be a number from zero, got {getattr(self, name)}")

    def duration_s(self, loads: Iterable[int]) -> float:
        """Seconds from barrier to barrier for the loads (tokens) of all workers of the group."""
        return self.per_token_s * max(loads, default=0) + self.overhead_s
