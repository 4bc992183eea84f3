"""A predictor of one's own for `br_h`: the mean output length of the requests with the same key.

    python examples/own_predictor.py
    PYTHONPATH=examples python -m balanceroute.testing --predictor own_predictor:MeanByKey most_keys=100
    PYTHONPATH=examples balanceroute replay --policy br_h --predictor own_predictor:MeanByKey --max-requests 2000

In the YAML of a router:

    routing: {policy: br_h}
    predictor: {kind: "own_predictor:MeanByKey", options: {most_keys: 100}, key_header: x-kind}
"""

from collections.abc import Sequence

import numpy as np

import balanceroute
from balanceroute import FinishedRequest, TwoStage

EVERYBODY = ""  # the key of requests without one; all count here, too


class MeanByKey:
    """Expects each request to generate what its key's requests generated on average; all of them, for unknown keys."""

    def __init__(self, horizon_steps: int, most_keys: int = 10_000) -> None:
        if most_keys < 1:
            raise ValueError(f"most_keys must be at least 1, not {most_keys}")
        self.horizon = float(horizon_steps)
        self.most_keys = most_keys
        self.seen: dict[str, tuple[int, int]] = {}  # by key: tokens, requests

    def observe(self, finished: FinishedRequest) -> None:
        """Learn from a request that left; one that was cut short says nothing about where it would have ended."""
        if finished.censored:
            return
        for key in {finished.prompt_key, EVERYBODY}:
            tokens, requests = self.seen.pop(key, (0, 0))
            self.seen[key] = (tokens + finished.output_tokens, requests + 1)
        if len(self.seen) > self.most_keys + 1:  # keys are prompts unless a header names them: they would never end
            del self.seen[next(key for key in self.seen if key != EVERYBODY)]

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """(probability of finishing within the horizon, expected remaining tokens if so)."""
        tokens, requests = self.seen.get(key) or self.seen.get(EVERYBODY, (0, 0))
        if not requests:
            return 0.0, self.horizon
        remaining = tokens / requests - age
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
    horizon = balanceroute.PolicySettings().horizon_steps
    for predictor in ("none", "survival", MeanByKey(horizon)):
        run = balanceroute.simulate(trace, "br_h", predictor=predictor, setting=cluster, load=1.1)
        name = predictor if isinstance(predictor, str) else type(predictor).__name__
        print(f"{name:<10} load spread {run.figures.load_spread_mean:8,.0f} tokens, balance {run.figures.balance:.3f}")


if __name__ == "__main__":
    main()
