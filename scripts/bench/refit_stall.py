"""Measure how long a re-fit holds up an event loop: a loop ticks every millisecond, with and without re-fits.

The history is at its bound and 144 x 64 requests are running, as in the largest router that is spoken of; objects from
before the start are frozen and threads switch as in `balanceroute serve`. Printed twice, each without and with a re-fit
under way, half of the time each and in turns:

    seen   the time between two ticks: what a stream would see, the machine's own pauses included
    net    less the time for which the loop's thread, or the re-fit's, was ready to run but had no CPU
           (`/proc/self/task/*/schedstat`, Linux only): the tick of 1 ms and the waiting for the interpreter lock

    .venv/bin/python -m scripts.bench.refit_stall [--kind survival] [--rows 50000] [--fits 40]
"""

import argparse
import asyncio
import gc
import platform
import sys
import threading
import time
from typing import Any, BinaryIO

import numpy as np

from balanceroute import __version__
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.prediction import AnchorPredictor, FinishedRequest, Refitter, build_predictor
from balanceroute.prediction.build import BuiltPredictor
from balanceroute.proxy.admission.forecasts import running_requests
from balanceroute.proxy.server import SWITCH_INTERVAL_S

WORKERS, SLOTS = 144, 64


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


class Ticker:
    """Ticks every millisecond on the loop while it is wanted, and keeps what was between two ticks."""

    def __init__(self) -> None:
        self.seen_ms: dict[str, list[float]] = {"without": [], "with": []}
        self.net_ms: dict[str, list[float]] = {"without": [], "with": []}
        self._waiting = Waiting()

    async def run(self, name: str, stop: asyncio.Event) -> None:
        last_s, last_waiting_s = time.perf_counter(), self._waiting()
        while not stop.is_set():
            await asyncio.sleep(0.001)
            now_s, waiting_s = time.perf_counter(), self._waiting()
            seen_s = now_s - last_s
            self.seen_ms[name].append(seen_s * 1e3)
            self.net_ms[name].append((seen_s - (waiting_s - last_waiting_s)) * 1e3)
            last_s, last_waiting_s = now_s, waiting_s


def a_full_cluster() -> Scheduler:
    """Workers whose slots are all taken, by requests of many ages."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="round_robin")))
    for worker in range(WORKERS):
        scheduler.add_worker(WorkerSpec(f"d{worker}", Role.DECODE, slots=SLOTS), 0.0)
    for at in range(WORKERS * SLOTS):
        scheduler.submit_prefilled(RequestSpec(f"r{at}", 100 + at), 0.0)
        (admission,) = scheduler.admit(0.0)
        scheduler.progress(admission.request, 1 + at % 3000, 0.0)
    return scheduler


def a_predictor(kind: str, n_rows: int) -> BuiltPredictor:
    """A predictor with a full history: lognormal lengths, one row in twenty cut short, 5,000 keys."""
    draw = np.random.default_rng(0)
    outputs = np.maximum(1, draw.lognormal(5.5, 1.5, n_rows)).astype(np.int64).tolist()
    rows = [
        FinishedRequest(f"k{at % 5000}", 1000, output, "stop" if at % 20 else "cancelled", at * 0.1)
        for at, output in enumerate(outputs)
    ]
    return build_predictor(kind, 80, rows=rows, max_rows=n_rows)


async def measure(kind: str, n_rows: int, fits: int) -> Ticker:
    predictor, scheduler = a_predictor(kind, n_rows), a_full_cluster()
    assert not isinstance(predictor, AnchorPredictor)
    refitter: Refitter[Any] = Refitter(predictor, running=lambda: running_requests(scheduler.snapshot))
    await refitter.refit()  # starts the thread
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ticker, took_s = Ticker(), 0.05
    for at in range(fits):
        for name in ("without", "with"):
            stop = asyncio.Event()
            ticking = asyncio.ensure_future(ticker.run(name, stop))
            await asyncio.sleep(0.02)
            began_s = time.perf_counter()
            if name == "with":
                predictor.observe(FinishedRequest("k1", 1000, 100 + at, "stop", 1e6 + at))
                assert await refitter.refit()
                took_s = time.perf_counter() - began_s
            else:
                await asyncio.sleep(took_s)
            stop.set()
            await ticking
    running = await running_requests(scheduler.snapshot)
    listed_s = time.perf_counter()
    predictor.ring.freeze(running)
    frozen_s = time.perf_counter()
    refitter.close()
    print(
        f"a re-fit took {took_s * 1e3:.0f} ms with {len(running)} requests running; "
        f"{(frozen_s - listed_s) * 1e3:.2f} ms to freeze the history"
    )
    return ticker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", default="survival", choices=["survival", "exact_match", "learned"])
    parser.add_argument("--rows", type=int, default=50_000, help="finished requests in the history")
    parser.add_argument("--fits", type=int, default=40, help="re-fits")
    arguments = parser.parse_args()
    print(f"balanceroute {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {vars(arguments)}")
    ticker = asyncio.run(measure(arguments.kind, arguments.rows, arguments.fits))
    for kind, by_name in (("seen", ticker.seen_ms), ("net", ticker.net_ms)):
        for name, gaps in by_name.items():
            p50, p99, p999 = np.percentile(gaps, (50, 99, 99.9))
            long = sum(gap > 5.0 for gap in gaps)
            print(
                f"{kind:4}  {name:8} ticks {len(gaps):6}   p50 {p50:5.2f} ms   p99 {p99:5.2f} ms   "
                f"p99.9 {p999:5.2f} ms   max {max(gaps):6.2f} ms   over 5 ms: {long}"
            )


if __name__ == "__main__":  # a re-fit's process imports this module
    main()
