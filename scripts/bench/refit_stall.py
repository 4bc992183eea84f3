"""Measure how long a re-fit holds up an event loop: a loop ticks every millisecond, with and without re-fits.

A gap between two ticks counts net of the time for which the loop's thread, or the re-fit's, was ready to run but had
no CPU (`/proc/self/task/*/schedstat`, Linux only), so a busy machine disturbs little. What is left is the tick of 1 ms
and the waiting for the interpreter lock. The history is at its bound, and 144 x 64 requests are running.

    python scripts/bench/refit_stall.py [--kind survival] [--rows 50000] [--fits 40]
"""

import argparse
import asyncio
import platform
import threading
import time
from typing import Any, BinaryIO

import numpy as np

from balanceroute import __version__
from balanceroute.prediction import AnchorPredictor, FinishedRequest, Refitter, build_predictor

RUNNING = np.stack([np.arange(9216) % 3000, np.arange(9216) + 100], axis=1)


class Waiting:
    """Seconds for which our threads have waited for a CPU."""

    def __init__(self) -> None:
        self._files: dict[int, BinaryIO] = {}

    def __call__(self) -> float:
        for thread in threading.enumerate():
            known = thread.native_id
            if known is not None and known not in self._files:
                self._files[known] = open(f"/proc/self/task/{known}/schedstat", "rb", buffering=0)
        total = 0
        for file in self._files.values():
            file.seek(0)
            total += int(file.read().split()[1])
        return total / 1e9


async def tick(stop: asyncio.Event, gaps_ms: list[float]) -> None:
    waiting = Waiting()
    last = time.perf_counter() - waiting()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter() - waiting()
        gaps_ms.append((now - last) * 1e3)
        last = now


async def measure(kind: str, n_rows: int, fits: int) -> dict[str, list[float]]:
    draw = np.random.default_rng(0)
    outputs = np.maximum(1, draw.lognormal(5.5, 1.5, n_rows)).astype(np.int64).tolist()
    rows = [
        FinishedRequest(f"k{at % 5000}", 1000, output, "stop" if at % 20 else "cancelled", at * 0.1)
        for at, output in enumerate(outputs)
    ]
    predictor = build_predictor(kind, 80, rows=rows, max_rows=n_rows)
    assert not isinstance(predictor, AnchorPredictor)
    refitter: Refitter[Any] = Refitter(predictor, running=lambda: RUNNING)
    await refitter.refit()  # starts the thread
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    took_s = 0.05
    for at in range(fits):
        for name, found in gaps.items():
            stop = asyncio.Event()
            ticking = asyncio.ensure_future(tick(stop, found))
            await asyncio.sleep(0.02)
            began = time.perf_counter()
            if name == "with":
                predictor.observe(rows[at])
                await refitter.refit()
                took_s = time.perf_counter() - began
            else:
                await asyncio.sleep(took_s)
            stop.set()
            await ticking
    refitter.close()
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", default="survival", choices=["survival", "exact_match", "learned"])
    parser.add_argument("--rows", type=int, default=50_000, help="finished requests in the history")
    parser.add_argument("--fits", type=int, default=40, help="re-fits")
    arguments = parser.parse_args()
    print(f"balanceroute {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {vars(arguments)}")
    for name, gaps in asyncio.run(measure(arguments.kind, arguments.rows, arguments.fits)).items():
        p50, p99 = np.percentile(gaps, (50, 99))
        print(f"{name:8} gaps {len(gaps):6}   p50 {p50:.2f} ms   p99 {p99:.2f} ms   max {max(gaps):.2f} ms")


if __name__ == "__main__":  # a re-fit's process imports this module
    main()
