"""The cells of the grid: a workload on a cluster with at most one deviation from the reference.

A cell is small and hashable; the requests and the setting are made from it where it is run. One factor at a time is
changed around three base cells, and further cells draw every factor at random, so that what only happens where two
meet has a chance to show.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import numpy as np

from balanceroute.engine.dp_balancer import THRESHOLD_BLOCKS
from balanceroute.errors import InputError
from balanceroute.experiments.jobs import Task, whole_trace
from balanceroute.experiments.methods import Method
from balanceroute.simulator import Failure, Figures, Replay, Setting, at_load
from balanceroute.traces import Trace, generate_trace, mean_kv_tokens
from balanceroute.traces.capacity import ideal_capacity
from balanceroute.traces.drawn import drawn_workload

SHAPES = ("heavy_tailed", "capped", "short", "bursts")
DRAWN = "drawn "  # and a number: a workload of `traces.drawn`
LOADS = (0.5, 0.8, 0.95, 1.05, 1.2)
WIDTHS = (4, 8, 16, 64, 144)
FACTORS = (
    "none",
    "transfer 5",
    "transfer 20",
    "transfer 60",
    "lag 1",
    "lag 5",
    "slow worker",
    "lost worker",
    "little memory",
    "small pool",
    "request cost",
)
LATER_FACTORS = ("two groups", "no barrier", "draft 3")  # most random cells and all drawn workloads are older
REQUEST_TOKENS = 13_400  # c of the published H200 decode steps: 0.269 ms per request over 2.01e-5 ms per token
SHORT = (0.64, 0.024)  # prompts and answers of heavy_tailed times these: means 2,040 and 28, as code completion
BURST_PERIOD_S, BURST_SHARE = 60.0, 0.4  # all that arrives in a minute arrives in its first 24 seconds
SLOW = 1.3
LITTLE_MEMORY = 1.1  # KV capacity of a worker in the mean tokens of a full one
SLOTS = Setting().slots
ROWS_PER_SLOT = 20
LONGER = 5  # times the rows where answers are short: with 20 per slot a run is over in 22 s, less than the wait cap


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload, its load, the width G, a factor, and a seed. `shape`: one of SHAPES, DRAWN with a number, or the path
    of a trace.
    """

    shape: str
    load: float = 1.05
    n_workers: int = 8
    factor: str = "none"
    seed: int = 0
    rows: int = 10_240

    @property
    def name(self) -> str:
        """All but the seed, for tables."""
        factor = "" if self.factor == "none" else f", {self.factor}"
        return f"{self.shape.rsplit('/', 1)[-1]}, load {self.load:g}, G {self.n_workers}{factor}"

    @property
    def tokens_per_step(self) -> float:
        """Of a running request, on average."""
        kind, _, number = self.factor.partition(" ")
        return Setting(draft_tokens=int(number)).tokens_per_step if kind == "draft" else 1.0

    def setting(self, trace: Trace) -> Setting:
        """The cluster of the cell."""
        setting = Setting(n_workers=self.n_workers, pool=16 * self.n_workers)
        kind, _, number = self.factor.partition(" ")
        if kind == "transfer":
            return replace(setting, transfer_steps=int(number))
        if kind == "lag":
            return replace(setting, telemetry_lag_steps=int(number))
        if self.factor == "slow worker":
            return replace(setting, slowdowns=(1.0,) * (self.n_workers - 1) + (SLOW,))
        if self.factor == "lost worker":
            span = len(trace) / (self.load * ideal_capacity(trace, setting.reference))
            return replace(setting, failures=(Failure(0, 0.4 * span, 0.6 * span),))
        if self.factor == "little memory":
            largest = int((trace.prompt_tokens + trace.output_tokens).max()) + setting.slots
            room = int(LITTLE_MEMORY * setting.slots * mean_kv_tokens(trace))
            return replace(setting, kv_capacity_tokens=max(room, largest))
        if self.factor == "engine balancer":
            return replace(setting, engine_balancer_blocks=THRESHOLD_BLOCKS)
        if self.factor == "request cost":
            return replace(setting, request_tokens=REQUEST_TOKENS)
        if self.factor == "two groups":
            return replace(setting, barrier_groups=2)
        if self.factor == "no barrier":
            return replace(setting, barrier_groups=self.n_workers)
        if kind == "draft":
            return replace(setting, draft_tokens=int(number))
        if self.factor == "small pool":
            return replace(setting, pool=4 * self.n_workers)
        return setting


def one_factor_cells(
    shapes: Sequence[str],
    loads: tuple[float, ...],
    widths: tuple[int, ...],
    factors: tuple[str, ...],
) -> Iterator[Cell]:
    """The base cell of each shape, and each with one thing changed."""
    for shape in shapes:
        base = Cell(shape, rows=rows_of(shape, 8))
        yield base
        yield from (replace(base, load=load) for load in loads if load != base.load)
        wide = (replace(base, n_workers=g, rows=rows_of(shape, g)) for g in widths)
        yield from (cell for cell in wide if cell != base)
        yield from (replace(base, factor=factor) for factor in factors if factor != base.factor)


def random_cells(shapes: tuple[str, ...]) -> Iterator[Cell]:
    """Cells with everything drawn, always the same ones; the widest clusters are rare, because they take long.

    Of those with later factors none has 64 workers, each of which may step alone.
    """
    yield from _drawn_cells(60, shapes, FACTORS, (4, 6, 4, 1, 0), 20_260_513)
    yield from _drawn_cells(15, shapes, LATER_FACTORS, (4, 6, 4, 0, 0), 20_261_126)


def _drawn_cells(
    count: int, shapes: tuple[str, ...], factors: tuple[str, ...], weights: tuple[int, ...], seed: int
) -> Iterator[Cell]:
    draw = random.Random(seed)
    for _ in range(count):
        width = draw.choices(WIDTHS, weights=weights)[0]
        shape = draw.choice(shapes)
        rows = rows_of(shape, width)
        yield Cell(shape, draw.choice(LOADS), width, draw.choice(factors), rows=rows)


def rows_of(shape: str, width: int) -> int:
    """How many requests a cell of this width has."""
    return width * SLOTS * ROWS_PER_SLOT * (LONGER if shape == "short" else 1)


@lru_cache(maxsize=2)
def requests_of(shape: str, seed: int, rows: int) -> Trace:
    """The requests of a shape; a user's trace has no seeds and may have fewer rows."""
    if shape.startswith(DRAWN):
        return drawn_workload(int(shape.removeprefix(DRAWN))).trace(rows, seed)
    if shape not in SHAPES:
        return whole_trace(shape).head(rows)
    if shape == "short":
        return generate_trace("heavy_tailed", rows=rows, seed=seed).with_lengths(*SHORT)
    if shape == "bursts":
        return generate_trace("heavy_tailed", rows=rows, seed=seed)
    return generate_trace(shape, rows=rows, seed=seed)


@lru_cache(maxsize=64)
def trace_digest(shape: str) -> tuple[str, ...]:
    """The digest of the user's trace, which may be another one under the same name; nothing for what is generated.

    Raises: InputError for a file that is gone or cannot be read.
    """
    if shape in SHAPES or shape.startswith(DRAWN):
        return ()
    try:
        return (sha256(Path(shape).read_bytes()).hexdigest()[:16],)
    except FileNotFoundError as error:
        raise InputError(f"{shape}: no such file") from error
    except OSError as error:
        raise InputError(f"{shape}: cannot be read: {error.strerror}") from error


def in_bursts(trace: Trace) -> Trace:
    """The same requests, those of each period squeezed into its first part."""
    minute, within = np.divmod(trace.arrival_s, BURST_PERIOD_S)
    arrival_s = minute * BURST_PERIOD_S + within * BURST_SHARE
    return replace(trace, arrival_s=arrival_s)


@dataclass(frozen=True, slots=True)
class CellJob(Task):
    """One policy in one cell."""

    cell: Cell
    method: Method

    @property
    def key(self) -> str:
        """The key of the result in the file of finished runs: cell, all knobs of the policy, and a user's requests."""
        knobs = f"{self.method.policy!r} {self.method.predictor} {self.method.overlap_requests}"
        return " ".join([repr(self.cell), knobs, *trace_digest(self.cell.shape)])

    @property
    def cost(self) -> float:
        """A guess at how long it takes."""
        return self.cell.rows * (4 + self.cell.n_workers) * (3.0 if self.method.predictor != "none" else 1.0)

    def run(self) -> dict[str, float]:
        """Simulate in this process; the figures by name."""
        cell = self.cell
        requests = requests_of(cell.shape, cell.seed, cell.rows)
        setting = cell.setting(requests)
        if setting.engine_balancer_blocks is None:  # the two are not modelled together
            setting = replace(setting, overlap_requests=self.method.overlap_requests)
        trace = at_load(requests, cell.load, setting)
        if cell.shape == "bursts":
            trace = in_bursts(trace)
        figures: Figures = (
            Replay(trace, self.method.seeded(cell.seed).policy, setting, self.method.predictor).run().figures
        )
        return asdict(figures)


def mean_over(runs: Sequence[dict[str, float]], name: str) -> float:
    """Mean over runs of one figure."""
    return fmean(run[name] for run in runs)
