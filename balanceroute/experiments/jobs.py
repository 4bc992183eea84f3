"""A simulation as a value, and running many of them on all cores.

A `Job` is hashable: experiments that need the same run share it. Traces are made inside the process that uses them and
kept there, so nothing large is ever pickled, and results come back as the few numbers that tables and figures need.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from balanceroute import report
from balanceroute.errors import BalanceRouteError
from balanceroute.experiments.methods import Method
from balanceroute.prediction import Evaluation, evaluate
from balanceroute.simulator import Figures, Replay, Setting
from balanceroute.simulator.history import finished_requests, fitted
from balanceroute.traces import PRESETS, Trace, generate_trace, ideal_capacity, load_trace

TRAIN_SEED_OFFSET = 1000  # histories are other draws of the same workload
TRAIN_RATIO = 0.3  # share of a user's trace that is history; the rest is replayed
STAGES = ("prepare", "stage1", "stage2")


@dataclass(frozen=True, slots=True)
class Workload:
    """A preset by name, or the user's trace by path."""

    source: str
    seed: int = 0
    rows: int = 8000
    load: float = 1.15

    @property
    def synthetic(self) -> bool:
        """Whether it is generated."""
        return self.source in PRESETS

    @property
    def name(self) -> str:
        """A short name for tables and files."""
        return self.source if self.synthetic else Path(self.source).name.split(".")[0]


class Task(Protocol):
    """What `run_jobs` can run: hashable, picklable. A class that inherits from it needs a cost, and how to run."""

    @property
    def cost(self) -> float:
        """A guess at how long it takes, relative to others: the longest start first."""

    @property
    def timed(self) -> bool:
        """Whether its result depends on how fast it runs: such ones run alone."""
        return False

    @property
    def key(self) -> str | None:
        """The name of its result among finished runs; None: it is not kept."""
        return None

    def run(self) -> Any:
        """Do it in this process; the result is small."""


@dataclass(frozen=True, slots=True)
class Job(Task):
    """One simulation: a method on a workload. `panel`: keep a segment of loads; `timed`: time the stages."""

    workload: Workload
    method: Method
    n_workers: int = 8
    panel: bool = False
    timed: bool = False

    @property
    def setting(self) -> Setting:
        """The reference setting at this width; the pool grows with it."""
        return Setting(n_workers=self.n_workers, pool=16 * self.n_workers)

    @property
    def cost(self) -> float:
        """A guess at how long it takes, to start the longest first."""
        weight = 3.0 if self.method.policy.policy == "br_h" else 1.0
        return self.workload.rows * (4 + self.n_workers) * weight

    def run(self) -> "JobResult":
        """Simulate in this process."""
        trace, train = replayed(self.workload, self.n_workers)
        timer = StageClock() if self.timed else None
        method = self.method
        outcome = Replay(trace, method.policy, self.setting, method.predictor, train, with_loads=self.panel).run(
            stage_timer=timer
        )
        waits_p99_s = report.wait_p99_by_size(outcome.wait_s, outcome.prompt_tokens)
        times = timer.times(outcome.decision_us) if timer else None
        return JobResult(outcome.figures, waits_p99_s, outcome.segment.copy(), times)


@dataclass(frozen=True, slots=True)
class PredictorJob(Task):
    """One predictor, fitted on the history of a workload and judged on its trace."""

    workload: Workload
    kind: str
    horizon_steps: int

    @property
    def cost(self) -> float:
        """The learned predictor grows its trees for many seconds."""
        return self.workload.rows * (100.0 if self.kind == "learned" else 5.0)

    def run(self) -> Evaluation:
        """Fit and judge in this process."""
        trace, train = replayed(self.workload, 8)
        predictor = fitted(self.kind, train, self.horizon_steps)
        return evaluate(predictor, list(finished_requests(trace)), self.horizon_steps)


Results = dict[Any, Any]  # Job -> JobResult, PredictorJob -> Evaluation


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Microseconds per dispatch by stage; arrays of one entry per decision."""

    stages: dict[str, NDArray[np.float64]]
    total: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class JobResult:
    """The figures of one simulation for tables and plots; `waits_p99_s`: by `report.SIZE_CLASSES`."""

    figures: Figures
    waits_p99_s: tuple[float, ...]
    panel: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    times: StageTimes | None = None


@lru_cache(maxsize=1)
def whole_trace(path: str) -> Trace:
    """The user's trace, read once."""
    return load_trace(path)


@lru_cache(maxsize=4)
def replayed(workload: Workload, n_workers: int) -> tuple[Trace, Trace]:
    """The trace to replay and the history before it, at the workload's load for that many workers."""
    setting = Setting(n_workers=n_workers).reference
    if workload.synthetic:
        trace, train = (
            generate_trace(
                workload.source, rows=workload.rows, seed=workload.seed + offset, load=workload.load, setting=setting
            )
            for offset in (0, TRAIN_SEED_OFFSET)
        )
        return trace, train
    whole = whole_trace(workload.source)
    cut = min(max(1, int(TRAIN_RATIO * len(whole))), len(whole) - 1)
    rest = whole.part(cut, cut + workload.rows)
    rest = replace(rest, arrival_s=rest.arrival_s - whole.arrival_s[cut])
    return rest.at_rate(workload.load * ideal_capacity(rest, setting)), whole.head(max(1, cut))


class StageClock:
    """Measures the stages of decisions: called when a decision begins, then with the name of each stage at its end."""

    def __init__(self) -> None:
        self.last = perf_counter()
        self.spent: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def __call__(self, stage: str) -> None:
        now = perf_counter()
        if stage == "begin":
            self.last = now
            return
        self.spent[stage].append((now - self.last) * 1e6)
        self.last = now

    def times(self, total_us: NDArray[np.float64]) -> StageTimes:
        """All measurements so far."""
        return StageTimes({stage: np.array(spent) for stage, spent in self.spent.items()}, total_us)


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end at once when the block is left by an exception, or when this process dies.

    Leaving an executor waits for all that is queued and cannot interrupt what runs: so they are terminated. For the
    case that this process has no time to do so, every worker watches a pipe of which only we hold the writing end.
    """
    context = get_context("spawn")  # not forked: the parent has threads (the progress bar)
    others = active_children()
    watched, held = context.Pipe(duplex=False)
    with watched, held, ProcessPoolExecutor(count, context, initializer=watch, initargs=(watched,)) as pool:
        try:
            yield pool
        except BaseException as error:
            with signals_held_back():  # a second Ctrl-C must leave none running: the end of the block waits for all
                for process in set(active_children()).difference(others):
                    process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise BalanceRouteError("a process of the simulation was killed (out of memory?)") from error
            raise


def watch(parent: "Connection[Any, Any]") -> None:
    """End this process, whatever it is doing, as soon as the parent's end of the pipe closes."""

    def exit_with_parent() -> None:
        wait([parent])
        os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back; processes started meanwhile never see Ctrl-C, from their first instruction on.

    A process that has been started and not yet been told what it is for would end with a traceback. The mask alone does
    not hold: another thread of ours may take the signal, and Python raises in this one.
    """
    received: list[int] = []
    ours = current_thread() is main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if ours else ()
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


class FinishedRuns(Protocol):
    """Results of earlier runs by the key of the job, and where new ones go."""

    known: dict[str, Any]

    def keep(self, job: Any, result: Any) -> None:
        """Remember a result."""


def run_jobs(
    jobs: Iterable[Task],
    n_processes: int | None,
    on_done: Callable[[int, int], None] | None = None,
    store: FinishedRuns | None = None,
) -> Results:
    """Run every different job, the longest first, on all cores.

    Timed ones run at last and one at a time, so that no neighbour disturbs them. The results do not depend on the
    number of processes (but for measured times). Jobs with a `key` that `store` knows are not run again.
    """
    ordered = sorted(dict.fromkeys(jobs), key=lambda job: -job.cost)
    parallel, alone = [job for job in ordered if not job.timed], [job for job in ordered if job.timed]
    results: Results = {}
    if store is not None:
        results |= {job: store.known[job.key] for job in ordered if job.key in store.known}
        parallel = [job for job in parallel if job not in results]

    def keep(job: Task, result: Any) -> None:
        results[job] = result
        if store is not None and job.key is not None:
            store.keep(job, result)
        if on_done is not None:
            on_done(len(results), len(ordered))

    workers = n_processes or os.cpu_count() or 1
    if workers == 1:
        alone = parallel + alone
    else:
        run_side_by_side(parallel, workers, keep)
    for job in alone:
        keep(job, job.run())
    return results


def run_side_by_side(jobs: Iterable[Task], n_processes: int, keep: Callable[[Task, Any], None]) -> None:
    """Run the jobs in processes of their own; `keep` gets each with its result as it ends."""
    with worker_processes(n_processes) as pool:
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        with signals_held_back():  # an executor starts its processes as it is given work
            futures = {pool.submit(job.run): job for job in jobs}
            for future in futures:  # not `as_completed`: an interrupt while it locks them all leaves some locked
                future.add_done_callback(done.put)
        for _ in futures:
            future = done.get()
            keep(futures[future], future.result())
