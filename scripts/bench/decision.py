"""What one decision costs: per stage, per cluster size, per pool size; and what a token costs.

A step loop drives the scheduler at saturation. Prompts and outputs are drawn like those of the heavy-tailed trace
(lognormal, mean 3.2k and 1.2k tokens), all slots are kept full, and the pool is topped up to the wanted number of
waiting requests. Before each decision the engine steps until the wanted number of requests has ended, wherever they ran
(`spread`), or until one has and as many more of its worker are ended with it (`one`): only a worker with two free slots
or more has subsets to choose from, so that is the case to hold against the paper's stage 2. With br_h a request carries
a c-hat in [1, H) with probability 0.3 and the anchor H otherwise, refreshed every H/2 tokens.

Timed is `Scheduler.admit()` alone, which is the policy and the charging of its choices, in one process. The stages come
from the policy's stage timer, the same that feeds the live proxy's histograms (about 0.1 us per stage):

    prepare   reading the margins off the kept projection (br), loads and ages in the pool (level_fit)
    stage1    overdue requests, slack and greedy fill, with charging what they admit
    stage2    refined allocation, with charging what it admits
    total     the whole call

Decisions are told apart by the most that stage 2 had to do in them: `nothing` (stage 1 has filled all slots), `single`
(the best single request for one slot), `all fit` (the largest stay below the peak: no search), `enumerated` (all
subsets of the candidates) or `bit-sets` (reachable sums). level_fit and target_fit have `slack` and `scarce`.

Not timed: the predictor, HTTP, and the garbage collector, which runs between the timed sections. The last table times
`Scheduler.progress()`, what the relay calls per token, in blocks of 1,000 calls.

    scripts/bench_decision                 # the whole grid, some minutes
    scripts/bench_decision --quick         # the points that have a bar
    scripts/bench_decision --workers 8 --waiting 128 --r-max 4 16 --freed 1 2 4 8 --ticks 2000
"""

import argparse
import gc
import platform
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy

from balanceroute import __version__, native
from balanceroute.core import subset
from balanceroute.core.baselines import ASSIGN_AT_ONCE
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import BUILT_IN, make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Admit, Outcome, RequestSpec, Role, WorkerSpec
from scripts.arguments import count

SLOTS, HORIZON = 64, 80
clock_ns = time.perf_counter_ns
STAGES = ("prepare", "stage1", "stage2", "total")
METHODS = {"_best_single": "single", "_all_that_fits": "all fit", "_best_by_enumeration": "enumerated",
           "_best_by_bitsets": "bit-sets"}  # fmt: skip
DEPTH = ("nothing", *METHODS.values())


class Point(NamedTuple):
    """One row of the grid; `r_max` 0 for policies without one."""

    policy: str
    workers: int
    waiting: int
    r_max: int
    freed: int
    where: str


QUICK = [
    Point("br_h", 8, 128, 4, 1, "spread"),
    Point("br_h", 8, 128, 4, 8, "spread"),
    *(Point("br_h", 8, 128, 4, freed, "one") for freed in (2, 4, 8)),
    *(Point("br_h", 8, 128, r_max, 4, "one") for r_max in (8, 16, 32)),
    Point("br_h", 144, 512, 8, 8, "spread"),
    *(Point("level_fit", 8, 128, 0, freed, "spread") for freed in (1, 2, 8)),
    Point("level_fit", 144, 512, 0, 8, "spread"),
    Point("target_fit", 8, 128, 0, 1, "spread"),
    Point("target_fit", 8, 128, 0, 8, "spread"),
    Point("target_fit", 144, 512, 0, 8, "spread"),
]


class Searches:
    """Notes which ways of choosing a subset are taken; costs about 0.1 us each time."""

    def __init__(self) -> None:
        self.deepest = DEPTH[0]
        for function, method in METHODS.items():
            setattr(subset, function, self._noting(getattr(subset, function), method))

    def _noting(self, function: Callable[..., Any], method: str) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            if DEPTH.index(method) > DEPTH.index(self.deepest):
                self.deepest = method
            return function(*arguments)

        return noting

    def take(self) -> str:
        """The deepest one since the last time."""
        deepest, self.deepest = self.deepest, DEPTH[0]
        return deepest


class StageClock:
    """Nanoseconds by stage within one decision."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self._last_ns = 0

    def start(self) -> None:
        self.spent = {}
        self._last_ns = clock_ns()

    def __call__(self, stage: str) -> None:
        now_ns = clock_ns()
        self.spent[stage] = self.spent.get(stage, 0) + now_ns - self._last_ns
        self._last_ns = now_ns


class SaturatedCluster:
    """A cluster whose slots are full and whose pool holds `waiting` requests, one decision at a time."""

    def __init__(self, settings: PolicySettings, workers: int, waiting: int, freed: int, where: str) -> None:
        self.clock = StageClock()
        config = SchedulerConfig(
            lock_step=True, refresh_every_tokens=HORIZON // 2 if settings.policy == "br_h" else None
        )
        self.scheduler = Scheduler(make_policy(settings, self.clock), config)
        self.random = random.Random(1)
        self.waiting, self.freed, self.where = waiting, freed, where
        self.now_s, self.step, self.arrivals = 0.0, 0, 0
        self.ends: list[tuple[int, str]] = []
        for index in range(workers):
            self.scheduler.add_worker(WorkerSpec(f"d{index}", Role.DECODE, slots=SLOTS), 0.0)
        self.top_up()
        while self.scheduler.snapshot.free_slots:
            self.start(self.scheduler.admit(self.now_s))
            self.top_up()
            self.now_s += 10.0  # longer than target_fit holds anything back
        for _ in range(workers * SLOTS // freed):  # until most of what started at once has left
            self.decide()

    def contribution(self) -> float:
        return self.random.uniform(1, HORIZON) if self.random.random() < 0.3 else float(HORIZON)

    def top_up(self) -> None:
        while len(self.scheduler.snapshot.pool) < self.waiting:
            self.arrivals += 1
            spec = RequestSpec(str(self.arrivals), 1 + min(120_000, int(self.random.lognormvariate(7.13, 1.36))))
            self.scheduler.submit_prefilled(spec, self.now_s, self.contribution())

    def start(self, admissions: Iterable[Admit]) -> None:
        for action in admissions:
            output = 1 + min(20_000, int(self.random.lognormvariate(6.55, 1.03)))
            heappush(self.ends, (self.step + output, action.request))
            self.scheduler.start(action.request, self.now_s)

    def free_slots(self) -> None:
        """Step the engine until the next `freed` requests have ended, or the next one and others of its worker."""
        leaving = [heappop(self.ends) for _ in range(self.freed if self.where == "spread" else 1)]
        while self.step < leaving[-1][0]:
            self.step += 1
            self.now_s += 0.05
            self.scheduler.step(self.now_s)
            for tracker in self.scheduler.due_refreshes():
                self.scheduler.refresh(tracker.id, self.contribution(), self.now_s)
        if self.where == "one":
            worker = self.scheduler.snapshot.requests[leaving[0][1]].worker
            assert worker is not None
            others = {request for request in worker.active if request != leaving[0][1]}
            together = [entry for entry in self.ends if entry[1] in others][: self.freed - 1]
            leaving += together
            gone = {request for _, request in together}
            self.ends = [entry for entry in self.ends if entry[1] not in gone]
            heapify(self.ends)
        for _, request in leaving:
            self.scheduler.finish(request, Outcome.FINISHED, self.now_s)

    def decide(self) -> tuple[list[Admit], dict[str, float]]:
        """Free slots, decide, and return what was admitted and the microseconds by stage."""
        self.free_slots()
        self.clock.start()
        begin_ns = clock_ns()
        admissions = self.scheduler.admit(self.now_s)
        total_ns = clock_ns() - begin_ns
        assert len(admissions) == self.freed, "at saturation every freed slot is filled"
        self.start(admissions)
        self.top_up()
        return admissions, {stage: ns / 1e3 for stage, ns in {**self.clock.spent, "total": total_ns}.items()}


def quantile(ordered: list[float], q: float) -> float:
    """Nearest-rank quantile of sorted values."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(point: Point, ticks: int, searches: Searches) -> dict[tuple[str, str], list[float]]:
    """Sorted microseconds by (method, stage) over `ticks` decisions; every decision counts under one method."""
    settings = PolicySettings(policy=point.policy, horizon_steps=HORIZON, r_max=point.r_max or 8)
    cluster = SaturatedCluster(settings, point.workers, point.waiting, point.freed, point.where)
    samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    searches.take()
    gc.collect()
    gc.disable()
    for tick in range(ticks):
        admissions, spent = cluster.decide()
        method = searches.take()
        if not point.policy.startswith("br_"):
            method = "slack" if all(admission.stage == 1 for admission in admissions) else "scarce"
        for stage, microseconds in spent.items():
            samples[method, stage].append(microseconds)
        if tick % 100 == 99:
            gc.collect(1)
    gc.enable()
    methods = [method for method in (*DEPTH, "slack", "scarce") if (method, "total") in samples]
    return {(m, stage): sorted(samples[m, stage]) for m in methods for stage in STAGES if (m, stage) in samples}


def measure_progress(policy: str, anchored: bool) -> list[float]:
    """Sorted microseconds per `progress()` call, in blocks of 1,000, one token each."""
    scheduler = Scheduler(make_policy(PolicySettings(policy=policy, horizon_steps=HORIZON)))
    for index in range(8):
        scheduler.add_worker(WorkerSpec(f"d{index}", Role.DECODE, slots=SLOTS), 0.0)
    names = [str(index) for index in range(8 * SLOTS)]
    for name in names:
        scheduler.submit_prefilled(RequestSpec(name, 1000), 0.0, None if anchored else 60.0)
    scheduler.admit(0.0)
    calls = [names[index % len(names)] for index in range(1000)]
    blocks = []
    for block in range(40):
        begin_ns = clock_ns()
        for name in calls:
            scheduler.progress(name, 1, 0.0)
        blocks.append((clock_ns() - begin_ns) / 1e6)
        if not anchored and block % 20 == 19:
            for name in names:
                scheduler.refresh(name, 60.0, 0.0)
    return sorted(blocks)


def header() -> str:
    """What was measured where."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    model = [line for line in open("/proc/cpuinfo") if line.startswith("model name")] or [platform.processor()]
    form = "compiled" if native.COMPILED else "run as Python, not compiled"
    return (
        f"balanceroute {__version__} ({commit.stdout.strip() or 'none'}), {form}; Python {platform.python_version()}, "
        f"numpy {numpy.__version__}, {model[0].split(':')[-1].strip()}\nB={SLOTS} H={HORIZON}; microseconds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=sorted(BUILT_IN - ASSIGN_AT_ONCE.keys()),
        default=["br_h", "br_0", "level_fit", "target_fit"],
    )
    parser.add_argument("--workers", nargs="+", type=count, default=[8, 16, 32, 64, 144], help="G")
    parser.add_argument("--waiting", nargs="+", type=count, default=[16, 128, 512])
    parser.add_argument("--r-max", nargs="+", type=count, default=[4, 8, 16])
    parser.add_argument("--freed", nargs="+", type=count, default=[1, 2, 4, 8], help="slots freed before a decision")
    parser.add_argument("--where", nargs="+", choices=["spread", "one"], default=["spread", "one"],
                        help="freed on workers as they come, or on one worker")  # fmt: skip
    parser.add_argument("--ticks", type=count, default=1000, help="timed decisions per point")
    parser.add_argument("--quick", action="store_true", help="only the points that have a bar")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time, on a busy machine")
    options = parser.parse_args()
    if max(options.freed) > min(SLOTS, *options.waiting):
        parser.error(f"argument --freed: accepted are at most {SLOTS} slots, and no more than --waiting")
    if options.cpu_time:
        global clock_ns
        clock_ns = time.thread_time_ns
    grid = QUICK if options.quick else [
        Point(policy, workers, waiting, r_max, freed, where)
        for policy in options.policies
        for workers in options.workers
        for waiting in options.waiting
        for r_max in (options.r_max if policy.startswith("br_") else [0])
        for freed in options.freed
        for where in (options.where if freed > 1 else ["spread"])
    ]  # fmt: skip
    searches = Searches()
    print(header())
    print(f"{'policy':<10} {'G':>4} {'waiting':>7} {'R_max':>5} {'freed':>5} {'on':<6} {'method':<10} {'stage':<8} "
          f"{'n':>5} {'p50':>8} {'p95':>8} {'p99':>8} {'mean':>8}")  # fmt: skip
    for point in grid:
        for (method, stage), values in measure(point, options.ticks, searches).items():
            figures = [quantile(values, q) for q in (0.5, 0.95, 0.99)] + [sum(values) / len(values)]
            print(f"{point.policy:<10} {point.workers:>4} {point.waiting:>7} {point.r_max or '-':>5} {point.freed:>5} "
                  f"{point.where:<6} {method.replace(' ', '-'):<10} {stage:<8} {len(values):>5} "
                  + " ".join(f"{figure:>8.1f}" for figure in figures), flush=True)  # fmt: skip
    for policy, anchored in (("br_0", True), ("br_h", True), ("br_h", False)):
        blocks = measure_progress(policy, anchored)
        kind = "anchored" if anchored else "c-hat < H"
        figures = f"p50 {quantile(blocks, 0.5):.2f}, p99 {quantile(blocks, 0.99):.2f}"
        print(f"{policy:<10} progress() per token, {kind}: {figures}")


if __name__ == "__main__":
    main()
