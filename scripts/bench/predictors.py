"""Time the predictors: one answer, a batch of 512, a re-fit's part on the event loop and in its worker.

Not measured: the attribute reads of `Forecaster.refresh`, and what a busy machine adds. Ages are spread over
the lengths, half of the requests have one of 400 keys. `lookup_us` is one access per request to a dict of these
keys, beside which an answer by key is to be judged.

    .venv/bin/python -m scripts.bench.predictors [--rows 8000] [--json]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np

from balanceroute import __version__
from balanceroute.prediction import FinishedRequest, LearnedPredictor, build_predictor

BATCH = 512
HORIZON = 80


def rows(n: int, seed: int = 0) -> list[FinishedRequest]:
    rng = np.random.default_rng(seed)
    outputs = np.maximum(1, rng.lognormal(6.5, 1.0, n)).astype(np.int64).tolist()
    keys = rng.integers(0, 400, n).tolist()
    return [
        FinishedRequest(f"{key:016x}" if at % 2 else "", 1000, output, "stop", at * 0.1)
        for at, (key, output) in enumerate(zip(keys, outputs, strict=True))
    ]


def quantiles_us(call: Callable[[], object], per: int, passes: int = 200) -> dict[str, float]:
    """p50 and p99 of the duration of `call`, divided by `per`, in microseconds."""
    took = []
    for _ in range(passes):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) / per * 1e6)
    p50, p99 = np.percentile(took, (50, 99))
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def measure(kind: str, n_rows: int) -> dict[str, object]:
    predictor = build_predictor(kind, HORIZON, rows=rows(n_rows), max_rows=n_rows)
    began = time.perf_counter()
    if isinstance(predictor, LearnedPredictor):
        predictor.grow()
    else:
        predictor.fitter()(predictor.ring.take())
    fit_s = time.perf_counter() - began
    rng = np.random.default_rng(1)
    ages, prompts = rng.integers(0, 2000, BATCH), np.full(BATCH, 1000)
    keys = [f"{key:016x}" if at % 2 else "" for at, key in enumerate(rng.integers(0, 400, BATCH).tolist())]
    asked = list(zip(ages.tolist(), keys, strict=True))
    known = {key: at for at, key in enumerate(keys)}
    return {
        "lookup_us": quantiles_us(lambda: np.fromiter(map(known.get, keys), dtype=np.intp, count=BATCH), BATCH),
        "one_us": quantiles_us(lambda: [predictor.predict_one(age, 1000, key) for age, key in asked], BATCH, 20),
        "batch_us_per_request": quantiles_us(lambda: predictor.predict(ages, prompts, keys), BATCH),
        "freeze_us": quantiles_us(predictor.ring.freeze, 1),
        "fit_s": round(fit_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8000, help="finished requests in the history")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    about = {"version": __version__, "python": platform.python_version(), "numpy": np.__version__}
    found = about | {"rows": arguments.rows, "batch": BATCH}
    found |= {kind: measure(kind, arguments.rows) for kind in ("survival", "exact_match", "learned")}
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:12}  {value}")


if __name__ == "__main__":
    main()
