"""A predictor of one's own for `br_h`: the mean output length of the requests with the same key.

python examples/own_predictor.py
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

import balanceroute
from balanceroute import FinishedRequest, TwoStage

HORIZON_STEPS = 80  # the default of routing.horizon_steps


class MeanByKey:
    """Expects each request to generate what its key's requests generated on average; all of them, for unknown keys."""

    def __init__(self, horizon_steps: int) -> None:
        self.horizon = float(horizon_steps)
        self.tokens: dict[str, float] = defaultdict(float)
        self.requests: dict[str, int] = defaultdict(int)

    def observe(self, finished: FinishedRequest) -> None:
        """Learn from a request that left; one that was cut short says nothing about where it would have ended."""
        if not finished.censored:
            for key in {finished.prompt_key, ""}:
                self.tokens[key] += finished.output_tokens
                self.requests[key] += 1

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """(probability of finishing within the horizon, expected remaining tokens if so)."""
        known = key if self.requests[key] else ""
        if not self.requests[known]:
            return 0.0, self.horizon
        remaining = self.tokens[known] / self.requests[known] - age
        return (1.0, max(1.0, remaining)) if remaining <= self.horizon else (0.0, self.horizon)

    def predict(self, ages: np.ndarray, prompt_tokens: np.ndarray, keys: Sequence[str]) -> TwoStage:
        """The same for many requests at once."""
        rows = zip(ages.tolist(), prompt_tokens.tolist(), keys, strict=True)
        both = np.array([self.predict_one(*row) for row in rows]).reshape(-1, 2)
        return TwoStage(both[:, 0], both[:, 1])


def main() -> None:
    """Compare it with the survival predictor and with none on the same requests."""
    trace = balanceroute.generate_trace("heavy_tailed", rows=1500, seed=1)
    cluster = balanceroute.Setting(n_workers=4, slots=32)
    for predictor in ("none", "survival", MeanByKey(HORIZON_STEPS)):
        run = balanceroute.simulate(trace, "br_h", predictor=predictor, setting=cluster, load=1.1)
        name = predictor if isinstance(predictor, str) else type(predictor).__name__
        print(f"{name:<10} load spread {run.figures.load_spread_mean:8,.0f} tokens, balance {run.figures.balance:.3f}")


if __name__ == "__main__":
    main()
