"""Runs every policy in every cell, and computes its distance from the cell's best one.

Regret is what a policy gives away against the best one of the same cell, averaged over its seeds: tokens per second in
per cent of the best; TPOT p95 likewise; and TPOT p95 and the p99 wait against the best among the policies within 1 % of
the best tokens per second, because who leaves slots empty makes the other requests fast, and can wait less. Cells that
are not busy (utilisation up to 0.7) are listed and not judged: there every policy serves what arrives.

`verdict` holds the default against each bar of a policy without regret.

Finished runs are kept in `grid.jsonl` in the folder of the report, so a run that was stopped goes on where it was.
"""

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import BinaryIO

import balanceroute
from balanceroute.errors import InputError
from balanceroute.experiments import figures, methods
from balanceroute.experiments.cells import (
    FACTORS,
    LATER_FACTORS,
    LOADS,
    ROWS_PER_SLOT,
    SLOTS,
    WIDTHS,
    Cell,
    CellJob,
    mean_over,
    one_factor_cells,
    random_cells,
    rows_of,
)
from balanceroute.experiments.jobs import Results, whole_trace
from balanceroute.experiments.methods import Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table

POLICIES = (
    methods.JSQ,
    methods.LEAST_KV,
    methods.POOL_FIFO,
    methods.BR_0_DEFAULT,
    methods.BR_H_DEFAULT,
    methods.TARGET_FIT,
    methods.LEVEL_FIT,
    methods.LEVEL_FIT_SLOTS,
)
BUSY = 0.7  # of the slots in use
NEAR = 0.01  # share of the best tokens/s within which policies are compared by waits
STORE = "grid.jsonl"
MAX_LINE_BYTES = 2**16
DECIDES = ("core", "engine", "prediction", "simulator", "traces", "experiments/cells.py", "report.py")
BASES = ("heavy_tailed", "capped", "short")
QUICK_FACTORS = ("none", "transfer 20", "lag 5", "slow worker", "lost worker")


def cells(scope: Scope) -> list[Cell]:
    """The cells of a scope, without seeds. In quick ones the later factors, which take long, meet one base."""
    shapes = scope.sources if scope.trace else BASES
    if scope.quick:
        found = [*one_factor_cells(shapes, (0.8, 1.05), (8,), QUICK_FACTORS)]
        found += one_factor_cells(shapes if scope.trace else ("capped",), (), (), LATER_FACTORS)
        return list(dict.fromkeys(found))
    drawn = shapes if scope.trace else (*BASES, "bursts")
    found = [*one_factor_cells(shapes, LOADS, WIDTHS, (*FACTORS, *LATER_FACTORS))]
    found += random_cells(drawn)
    if not scope.trace:
        found += one_factor_cells(("bursts",), (), (), ())
    return list(dict.fromkeys(found))


def jobs_of(scope: Scope, cell: Cell, method: Method) -> list[CellJob]:
    """One policy in one cell, a job per seed; the widest clusters have so many requests that one seed does.

    Steps that yield several tokens take several times as long to simulate, so two must do there.
    """
    most = 1 if cell.n_workers > 16 else 2 if cell.tokens_per_step > 1.0 else len(scope.seeds)
    seeds = scope.seeds[:most]
    return [CellJob(replace(cell, seed=seed), method) for seed in seeds]


def plan(scope: Scope) -> list[CellJob]:
    """Every policy in every cell."""
    return [job for cell in cells(scope) for method in POLICIES for job in jobs_of(scope, cell, method)]


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    return ["grid.csv", "regret.csv", "verdict.csv", STORE, *figures.files("regret")]


def code_digest() -> str:
    """A digest of the code that a result depends on."""
    digest = sha256()
    package = Path(balanceroute.__file__).parent
    for part in DECIDES:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Store:
    """Finished runs in a file, one a line, so that none is run twice; several processes may add to it.

    Runs of other code are passed over: each carries a digest of what decides and simulates.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, float]] = {}
        self.code = code_digest()
        lines = self._read().split(b"\n") if path.is_file() else [b""]
        for number, line in enumerate(lines[:-1], start=1):  # the last line may be incomplete, or is empty
            self._learn(number, line)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _learn(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if entry["code"] == self.code:
                self.known[entry["key"]] = {name: float(value) for name, value in entry["figures"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{self.path}: line {number}: no finished run; delete the line to run it again") from None

    def keep(self, job: CellJob, figures_: dict[str, float]) -> None:
        """Remember a run that has just ended, in place of half a line that may stand last.

        Raises: InputError where the file cannot be written.
        """
        line = json.dumps({"code": self.code, "key": job.key, "figures": figures_}).encode() + b"\n"
        try:
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the writer holds it, so an incomplete line is from a killed process
                _cut_half_line(file)
                file.write(line)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from error


def _cut_half_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_LINE_BYTES))
    half_bytes = len(file.read().rpartition(b"\n")[2])
    if half_bytes:
        file.truncate(size - half_bytes)


@dataclass(frozen=True, slots=True)
class CellResult:
    """One policy in one cell: means over the seeds, and its losses against the best (ratios; 0: it is the best)."""

    cell: Cell
    method: Method
    tokens_s: float
    tokens_s_deviation: float | None
    tpot_p95_s: float
    wait_p99_s: float
    wait_max_s: float
    load_spread: float
    balance: float
    utilisation: float
    lost_tokens: float = 0.0
    lost_tpot: float = 0.0
    lost_wait: float | None = None  # against those within NEAR of the best tokens/s; None where it is none of them
    lost_tpot_near: float | None = None  # the same
    seeds: int = 1


def cell_results(scope: Scope, results: Results, cell: Cell) -> list[CellResult]:
    """All policies in one cell."""
    found = []
    for method in POLICIES:
        runs = [results[job] for job in jobs_of(scope, cell, method)]
        rates = [run["throughput_tok_s"] for run in runs]
        full = cell.n_workers * SLOTS * cell.tokens_per_step
        found.append(
            CellResult(
                cell,
                method,
                tokens_s=fmean(rates),
                tokens_s_deviation=stdev(rates) if len(rates) > 1 else None,
                tpot_p95_s=mean_over(runs, "tpot_p95_s"),
                wait_p99_s=mean_over(runs, "wait_p99_s"),
                wait_max_s=mean_over(runs, "wait_max_s"),
                load_spread=mean_over(runs, "load_spread_mean"),
                balance=mean_over(runs, "balance"),
                utilisation=fmean(run["throughput_tok_s"] * run["step_time_mean_s"] / full for run in runs),
                seeds=len(runs),
            )
        )
    best_rate = max(s.tokens_s for s in found)
    best_tpot = min(s.tpot_p95_s for s in found)
    near = [s for s in found if s.tokens_s >= (1 - NEAR) * best_rate]
    least_wait, near_tpot = min(s.wait_p99_s for s in near), min(s.tpot_p95_s for s in near)
    return [
        replace(
            s,
            lost_tokens=1 - s.tokens_s / best_rate,
            lost_tpot=s.tpot_p95_s / best_tpot - 1,
            lost_wait=_lost_wait(s.wait_p99_s, least_wait) if s in near else None,
            lost_tpot_near=s.tpot_p95_s / near_tpot - 1 if s in near else None,
        )
        for s in found
    ]


def _lost_wait(wait_s: float, least_s: float) -> float:
    """How much longer than the shortest, as a share of it; 0 if within a second."""
    return wait_s / max(least_s, 1.0) - 1 if wait_s - least_s > 1.0 else 0.0


def report(scope: Scope, results: Results, out: Path) -> Section:
    """The table of regrets, the cells where the default is not the best, and the figure."""
    section = Section("The grid: which policy never loses")
    rows = [cell_results(scope, results, cell) for cell in cells(scope)]
    busy = busy_ones(rows)
    section.text(
        f"{len(rows)} cells, {len(busy)} of them busy (more than {BUSY:.0%} of the slots in use), {len(scope.seeds)}"
        " seed(s). Lost tokens/s and TPOT p95 are against the best policy of the same cell; the wait is the p99 against"
        f" the best of those within {NEAR:.0%} of the best tokens/s. Tokens/s are of a window: who lets large prompts"
        " wait serves more of the small ones meanwhile, and gains up to 1 % here. In a run of only a few wait caps it"
        " gains several per cent, though it ends no sooner: judge such a run by its makespan."
    )
    regrets = regret_table(busy)
    if busy:
        section.table(regrets)
    else:
        section.text(why_none_is_busy(scope, rows))
        section.tables.append(regrets)  # its file is written all the same
    section.text(f"The bars for the default, {methods.LEVEL_FIT.label}, one by one:")
    section.table(verdict_table(rows, busy))
    section.table(cell_table(rows))
    section.figure(
        figures.regret(lost_tokens(busy), out / "regret", "Regret over the busy cells of the grid, simulated"),
        "Regret of each policy, one dot per busy cell",
    )
    return section


def slots_used(row: Sequence[CellResult]) -> float:
    """The share of a cell's slots in use, as a mean of its policies."""
    return fmean(s.utilisation for s in row)


def busy_ones(rows: Sequence[Sequence[CellResult]]) -> list[Sequence[CellResult]]:
    """The cells that are judged."""
    return [row for row in rows if slots_used(row) > BUSY]


def why_none_is_busy(scope: Scope, rows: Sequence[Sequence[CellResult]]) -> str:
    """Why there is no regret: a user's trace may be too short to fill the slots."""
    text = (
        f"No cell is busy: at most {max(map(slots_used, rows)):.0%} of the slots were in use. So every policy serves"
        " what arrives, and there is no regret to show."
    )
    if not scope.trace:
        return text
    return (
        f"{text} To fill the slots, a run needs about {ROWS_PER_SLOT} requests for each of them,"
        f" {rows_of(scope.trace, 8):,} for 8 workers of {SLOTS}; the trace has {len(whole_trace(scope.trace)):,}."
    )


def lost_tokens(busy: Sequence[Sequence[CellResult]]) -> dict[str, list[float]]:
    """The regret of each policy in each cell, ratios of the best tokens/s."""
    return {method.label: [row[index].lost_tokens for row in busy] for index, method in enumerate(POLICIES)}


def default_of(row: Sequence[CellResult]) -> CellResult:
    """The product's default among the policies of a cell."""
    return next(s for s in row if s.method is methods.LEVEL_FIT)


def worse_than_baselines(row: Sequence[CellResult]) -> float:
    """How far the default's tokens/s are below those of a baseline, beyond noise; 0 where they are not.

    Noise is two deviations of the difference of the means over the seeds, and 1 % at least.
    """
    own = default_of(row)
    worst = 0.0
    for s in row:
        if s.method in (methods.JSQ, methods.LEAST_KV):
            variance = ((s.tokens_s_deviation or 0.0) ** 2 + (own.tokens_s_deviation or 0.0) ** 2) / own.seeds
            lost = s.tokens_s - own.tokens_s
            worst = max(worst, lost / s.tokens_s if lost > max(2.0 * variance**0.5, NEAR * s.tokens_s) else 0.0)
    return worst


def verdict_table(
    rows: Sequence[Sequence[CellResult]], busy: Sequence[Sequence[CellResult]], name: str = "verdict"
) -> Table:
    """Each bar of a default without regret: in how many cells it holds, and where it does not, by how much."""
    table = Table(name, ["bar", "holds", "in cells", "of", "not in"])
    bars: tuple[tuple[str, Sequence[Sequence[CellResult]], Callable[[Sequence[CellResult]], float], float], ...] = (
        ("tokens/s within 1 % of the best", busy, lambda row: default_of(row).lost_tokens, NEAR),
        ("TPOT p95 within 5 % of the best", busy, lambda row: default_of(row).lost_tpot, 0.05),
        (
            "TPOT p95 within 5 % of the best of those within 1 % of tokens/s",
            [row for row in busy if default_of(row).lost_tpot_near is not None],
            lambda row: default_of(row).lost_tpot_near or 0.0,
            0.05,
        ),
        (
            "wait p99 within 10 % of the best of those within 1 % of tokens/s",
            [row for row in busy if default_of(row).lost_wait is not None],
            lambda row: default_of(row).lost_wait or 0.0,
            0.1,
        ),
        ("tokens/s not below join_shortest_queue or least_kv by more than noise", rows, worse_than_baselines, 0.0),
    )
    for bar, judged, lost, most in bars:
        failing = sorted(((lost(row), row[0].cell.name) for row in judged if lost(row) > most), reverse=True)
        named = "; ".join(f"{name} ({by:.1%})" for by, name in failing) or "-"
        table.add(bar, "no" if failing else "yes" if judged else "-", len(judged) - len(failing), len(judged), named)
    return table


def regret_table(busy: Sequence[Sequence[CellResult]], name: str = "regret") -> Table:
    """One row per policy over all busy cells."""
    columns = ["router", "lost tok/s mean %", "worst %", "cells within 1 %", "lost TPOT p95 mean %", "worst TPOT %",
               "cells within 5 %", "within 1 % and 10 % of the wait"]  # fmt: skip
    table = Table(name, columns, digits=dict.fromkeys([c for c in columns if c.endswith("%")], 2))
    for index, method in enumerate(POLICIES):
        own = [row[index] for row in busy]
        table.add(
            method.label,
            100 * fmean(s.lost_tokens for s in own) if own else None,
            100 * max(s.lost_tokens for s in own) if own else None,
            sum(s.lost_tokens <= NEAR for s in own),
            100 * fmean(s.lost_tpot for s in own) if own else None,
            100 * max(s.lost_tpot for s in own) if own else None,
            sum(s.lost_tpot <= 0.05 for s in own),
            sum(s.lost_wait is not None and s.lost_wait <= 0.1 for s in own),
        )
    return table


def cell_table(rows: Sequence[Sequence[CellResult]], name: str = "grid") -> Table:
    """Every policy in every cell."""
    table = Table(
        name,
        [
            "cell",
            "router",
            "tok/s",
            "±",
            "TPOT p95 ms",
            "load spread",
            "balance",
            "wait p99 s",
            "wait max s",
            "slots used",
        ],
        digits={"TPOT p95 ms": 1, "balance": 3, "wait p99 s": 1, "slots used": 2},
    )
    for row in rows:
        for s in row:
            table.add(
                s.cell.name,
                s.method.label,
                s.tokens_s,
                s.tokens_s_deviation,
                1000 * s.tpot_p95_s,
                s.load_spread,
                s.balance,
                s.wait_p99_s,
                s.wait_max_s,
                s.utilisation,
            )
    return table
