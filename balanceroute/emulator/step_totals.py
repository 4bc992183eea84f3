"""Sums over all steps of the barrier, so that two readings give the means of the time between them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class StepTotals:
    """Per-step figures added up; loads are KV tokens of running requests, times modelled seconds."""

    steps: int = 0
    load_spread_tokens: int = 0
    excess_tokens: float = 0.0
    mean_load_tokens: float = 0.0
    running: int = 0
    step_s: float = 0.0

    def add(self, loads: Sequence[int], running: int, step_s: float) -> None:
        """Add a step: the ranks' loads, the requests running on all of them, and its duration."""
        most, mean = max(loads), sum(loads) / len(loads)
        self.steps += 1
        self.load_spread_tokens += most - min(loads)
        self.excess_tokens += most - mean
        self.mean_load_tokens += mean
        self.running += running
        self.step_s += step_s

    def to_dict(self) -> dict[str, float]:
        """The sums by name."""
        return asdict(self)
