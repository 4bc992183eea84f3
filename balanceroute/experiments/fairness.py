"""Waits by prompt size, and policies below saturation; neither is in the paper."""

from pathlib import Path

from balanceroute.experiments import figures, main_results, methods
from balanceroute.experiments.jobs import Job, Results
from balanceroute.experiments.main_results import jobs_of, mean_of, variants
from balanceroute.experiments.methods import MAIN, Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table

DEFAULTS = (methods.BR_0_DEFAULT, methods.BR_H_DEFAULT)
ROWS = (*((method, variant) for method in MAIN for variant in variants(method)), *((each, each) for each in DEFAULTS))
"""Methods, each with itself or with itself under the cap."""
SWEPT = methods.AS_SERVED


def sweep_job(scope: Scope, source: str, method: Method, load: float) -> Job:
    """One router at one load."""
    return Job(scope.workload(source, rows=scope.sweep_rows, load=load), method)


def plan(scope: Scope) -> list[Job]:
    """The main table's runs, the product's defaults, and the load sweep."""
    defaults = [job for source in scope.sources for method in DEFAULTS for job in jobs_of(scope, source, method)]
    sweep = [
        sweep_job(scope, source, method, load)
        for source in scope.sources
        if can_sweep(scope, source)
        for method in SWEPT
        for load in scope.loads
    ]
    return main_results.plan(scope) + defaults + sweep


def can_sweep(scope: Scope, source: str) -> bool:
    """Whether loads differ at all: requests that arrive at one time cannot come faster or slower."""
    return not scope.at_once(source, scope.sweep_rows)


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    written = []
    for source in scope.sources:
        name = scope.workload(source).name
        written += [f"waits_{name}.csv", *figures.files(f"wait_{name}")]
        if can_sweep(scope, source):
            written += [f"sweep_{name}.csv", *figures.files(f"sweep_{name}")]
    return written


def report(scope: Scope, results: Results, out: Path) -> Section:
    """Waits by prompt size, wait against balance, and the load sweep."""
    section = Section("Fairness of waiting, and lower loads (not in the paper)")
    section.text(
        "p99 waits (prefill done until admitted) of the first seed by prompt size: the smallest half, up to the 90th"
        " percentile, up to the 99th, and the largest hundredth. Level columns are fair. A router that may leave a"
        " request waiting for ever can always be the better balanced one, so no imbalance figure should be read without"
        " these."
    )
    for source in scope.sources:
        name = scope.workload(source).name
        section.text(f"### {scope.title(source)}")
        section.table(waits_table(scope, results, source, name))
        points = [
            (
                variant.label,
                variant is not method or method in (methods.TARGET_FIT, methods.LEVEL_FIT) or method in DEFAULTS,
                mean_of(results, jobs_of(scope, source, variant), "wait_p99_s"),
                mean_of(results, jobs_of(scope, source, variant), "balance"),
            )
            for method, variant in ROWS
        ]
        section.figure(figures.wait_versus_balance(points, name, out / f"wait_{name}"), f"Wait versus balance, {name}")
        if not can_sweep(scope, source):
            section.text(f"No load sweep on {name}: its requests arrive at one time, so that every load is the same.")
            continue
        rows = scope.replayed_rows(source, scope.sweep_rows)
        section.text(f"Load sweep on {name}, one seed, {rows:,} requests: load spread in tokens.")
        section.table(sweep_table(scope, results, source, name))
        lines = {
            method.label: [results[sweep_job(scope, source, method, load)].figures for load in scope.loads]
            for method in SWEPT
        }
        section.figure(figures.load_sweep(scope.loads, lines, name, out / f"sweep_{name}"), f"Load sweep, {name}")
    return section


def waits_table(scope: Scope, results: Results, source: str, name: str) -> Table:
    """p99 wait by prompt size for every row of the main table and for the product's defaults; first seed."""
    table = Table(
        f"waits_{name}",
        ["router", "smallest half", "to p90", "to p99", "largest 1 %", "all: p50", "all: p99", "all: max", "balance"],
        digits={"all: p50": 1, "balance": 3},
    )
    for method, variant in ROWS:
        jobs = jobs_of(scope, source, variant)
        table.add(
            variant.label + (", limit" if variant is not method else ""),
            *results[jobs[0]].waits_p99_s,
            *(mean_of(results, jobs, name) for name in ("wait_p50_s", "wait_p99_s", "wait_max_s", "balance")),
        )
    return table


def sweep_table(scope: Scope, results: Results, source: str, name: str) -> Table:
    """Load spread by router and load."""
    table = Table(f"sweep_{name}", ["router", *(f"load {load:g}" for load in scope.loads)])
    for method in SWEPT:
        table.add(
            method.label,
            *(results[sweep_job(scope, source, method, load)].figures.load_spread_mean for load in scope.loads),
        )
    return table
