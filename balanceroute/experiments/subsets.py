"""Gain and cost of the subset search of stage 2, by its number of candidates R_max.

With `s_greedy` 0 stage 1 fills every slot and nothing is ever searched, so most rows of the main table say nothing of
it. Here stage 2 gets the last four slots of every decision, as in the product's defaults.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from balanceroute.experiments import methods
from balanceroute.experiments.jobs import Job, Results
from balanceroute.experiments.methods import Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table

R_MAX = (1, 4, 8, 16, 24, 32, 48)
ROUTERS = (methods.BR_0_DEFAULT, methods.BR_H_DEFAULT)
SEEDS = 3


def at_r_max(method: Method, r_max: int) -> Method:
    """The router with another number of candidates."""
    return replace(method, key=f"{method.key}_r{r_max}", policy=replace(method.policy, r_max=r_max))


def jobs_of(scope: Scope, source: str, method: Method, r_max: int) -> list[Job]:
    """A run per seed."""
    routed = at_r_max(method, r_max)
    return [Job(scope.workload(source, seed), routed.seeded(seed)) for seed in scope.seeds[:SEEDS]]


def timed_job(scope: Scope, source: str, method: Method, r_max: int) -> Job:
    """The first seed again, alone on the machine."""
    return Job(scope.workload(source), at_r_max(method, r_max), timed=True)


def plan(scope: Scope) -> list[Job]:
    """Every R_max for both routers on every workload."""
    cells = [(source, method, r_max) for source in scope.sources for method in ROUTERS for r_max in R_MAX]
    return [job for cell in cells for job in (*jobs_of(scope, *cell), timed_job(scope, *cell))]


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    return [f"subsets_{scope.workload(source).name}.csv" for source in scope.sources]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """A table per workload."""
    section = Section("What the subset search is worth")
    section.text(
        "The product's defaults (`s_greedy` 4: stage 2 gets the last four slots of a decision; waits capped) with other"
        f" numbers of candidates. Means over {len(scope.seeds[:SEEDS])} seed(s); `us` is a whole decision, measured on"
        " this machine, one run at a time. With R_max 1 those slots go to the oldest request, or where that scores"
        " nothing, to the best of the pool; up to 21 candidates for four slots all subsets are enumerated, beyond that"
        " bit-sets of reachable sums find the same best subset."
    )
    for source in scope.sources:
        name = scope.workload(source).name
        table = Table(
            f"subsets_{name}",
            ["router", "R_max", "load spread", "balance", "tok/s", "TPOT p95 ms", "wait p99 s", "p50 us", "p99 us"],
            digits={"balance": 4, "TPOT p95 ms": 1, "wait p99 s": 1},
        )
        for method in ROUTERS:
            for r_max in R_MAX:
                runs = [results[job].figures for job in jobs_of(scope, source, method, r_max)]
                times = results[timed_job(scope, source, method, r_max)].times
                assert times is not None
                p50, p99 = (float(value) for value in np.percentile(times.total, (50, 99)))
                table.add(
                    method.label,
                    r_max,
                    fmean(run.load_spread_mean for run in runs),
                    fmean(run.balance for run in runs),
                    fmean(run.throughput_tok_s for run in runs),
                    fmean(run.tpot_p95_s for run in runs) * 1000,
                    fmean(run.wait_p99_s for run in runs),
                    p50,
                    p99,
                )
        section.text(f"### {scope.title(source)}")
        section.table(table)
    return section
