"""The engine's own balancer: the gain of pauses inside a decode group, with this router and without.

`engine.dp_balancer` models vllm-ascend's DyntraLB: the ranks of one node agree after every step which of their own
requests run in the next one. Its plans are free here, and always on; requests that it pauses keep their KV, for which
the simulated memory always has room. All of that is in its favour.
"""

from pathlib import Path
from statistics import fmean

from balanceroute.experiments import methods
from balanceroute.experiments.cells import Cell, CellJob, mean_over
from balanceroute.experiments.jobs import Results
from balanceroute.experiments.methods import Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table

ROUTERS = (methods.JSQ, methods.LEAST_KV, methods.LEVEL_FIT)
FACTORS = ("none", "engine balancer")
SEEDS = 3
LOAD = 1.15


def jobs_of(scope: Scope, source: str, method: Method, factor: str) -> list[CellJob]:
    """A run per seed."""
    return [
        CellJob(Cell(source, LOAD, factor=factor, seed=seed, rows=scope.rows), method) for seed in scope.seeds[:SEEDS]
    ]


def plan(scope: Scope) -> list[CellJob]:
    """Every router with and without."""
    cells = [(source, method, factor) for source in scope.sources for method in ROUTERS for factor in FACTORS]
    return [job for cell in cells for job in jobs_of(scope, *cell)]


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    return [f"engine_balancer_{scope.workload(source).name}.csv" for source in scope.sources]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """A table per workload."""
    section = Section("Beside the engine's own balancer")
    section.text(
        "Eight ranks of one node at load 1.15, with and without a balancer inside the engine that pauses requests"
        f" (DyntraLB's rules, threshold 5 blocks of 128 tokens). Means over {len(scope.seeds[:SEEDS])} seed(s). `+ %`"
        " is against the same router without it. A pause is a gap in a stream: its time is part of TPOT, but the p95 of"
        " TPOT hides that few requests bear it."
    )
    for source in scope.sources:
        table = Table(
            f"engine_balancer_{scope.workload(source).name}",
            ["router", "engine balancer", "tok/s", "+ %", "load spread", "TPOT p95 ms", "wait p99 s",
             "pauses per request", "pause p99 s", "longest pause s"],
            digits={"+ %": 1, "TPOT p95 ms": 1, "wait p99 s": 1, "pauses per request": 2, "pause p99 s": 2,
                    "longest pause s": 1},
        )  # fmt: skip
        for method in ROUTERS:
            alone = 0.0
            for factor in FACTORS:
                runs = [results[job] for job in jobs_of(scope, source, method, factor)]
                rate = mean_over(runs, "throughput_tok_s")
                alone = alone or rate
                table.add(
                    method.label,
                    "no" if factor == "none" else "yes",
                    rate,
                    None if factor == "none" else 100 * (rate / alone - 1),
                    mean_over(runs, "load_spread_mean"),
                    1000 * mean_over(runs, "tpot_p95_s"),
                    mean_over(runs, "wait_p99_s"),
                    fmean(run["pauses"] / run["admitted"] for run in runs),
                    mean_over(runs, "pause_p99_s"),
                    mean_over(runs, "pause_max_s"),
                )
        section.text(f"### {scope.title(source)}")
        section.table(table)
    return section
