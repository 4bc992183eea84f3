"""Scaling with the number of decode workers at constant load per worker: the paper's 4, 8, 16, and beyond."""

from pathlib import Path

from balanceroute.experiments import figures, methods, paper
from balanceroute.experiments.jobs import Job, Results
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table, ratio

METHODS = (
    methods.RANDOM,
    methods.ROUND_ROBIN,
    methods.POWER_OF_TWO,
    methods.JSQ,
    methods.LEAST_KV,
    methods.BR_0,
    methods.BR_H_ORACLE,
    methods.BR_H_ORACLE_14,
    methods.TARGET_FIT,
    methods.LEVEL_FIT,
)


def source_of(scope: Scope) -> str:
    """The paper scales on its proprietary trace only; so do we."""
    return scope.sources[0]


def job_of(scope: Scope, method: methods.Method, width: int) -> Job:
    """One router at one width."""
    return Job(scope.workload(source_of(scope), rows=scope.rows_at(width)), method, width, panel=True)


def plan(scope: Scope) -> list[Job]:
    """Every router at every width."""
    return [job_of(scope, method, width) for width in scope.widths for method in METHODS]


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    panels = [file for width in scope.widths for file in figures.files(f"loads_scaling_g{width}")]
    return ["scaling.csv", *figures.files("scaling"), *panels]


def per_worker(scope: Scope) -> str:
    """What grows with the width; a user's trace may be too short for it."""
    if not scope.trace:
        return "with as many requests and as much pool per worker as at G = 8"
    rows = ((width, scope.replayed_rows(scope.trace, scope.rows_at(width))) for width in scope.widths)
    replays = ", ".join(f"{count:,} at G = {width}" for width, count in rows)
    return (
        "with as much pool per worker as at G = 8. Requests replayed, as many per worker as at G = 8 as far as the"
        f" trace has them: {replays}"
    )


def printed_points(scope: Scope) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The paper's points by figure and router, in the units of the axes; none beside a user's trace."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {"load_spread_mean": {}, "tpot_p95_s": {}}
    for method in METHODS:
        for width in scope.widths:
            theirs = paper.SCALING.get(width, {}).get(method.paper)
            if theirs is not None and not scope.trace:
                points["load_spread_mean"].setdefault(method.label, []).append((width, theirs.imbalance / 1000))
                points["tpot_p95_s"].setdefault(method.label, []).append((width, theirs.tpot_p95_ms))
    return points if any(points.values()) else {}


def scaling_table(scope: Scope, results: Results) -> Table:
    """Every router at every width."""
    table = Table(
        "scaling",
        ["router", "G", "load spread", "vs JSQ", "paper", "TPOT p95 ms", "tok/s per worker", "balance", "wait p99 s"],
        digits={"vs JSQ": 1, "paper": 1, "TPOT p95 ms": 1, "balance": 3},
    )
    for width in scope.widths:
        base = results[job_of(scope, methods.JSQ, width)].figures
        printed = {} if scope.trace else paper.SCALING.get(width, {})
        for method in METHODS:
            ours, theirs = results[job_of(scope, method, width)].figures, printed.get(method.paper)
            table.add(
                method.label,
                width,
                ours.load_spread_mean,
                ratio(base.load_spread_mean, ours.load_spread_mean),
                paper.times_below_jsq(theirs, printed.get("join_shortest_queue")),
                ours.tpot_p95_s * 1000,
                ours.throughput_tok_s / width,
                ours.balance,
                ours.wait_p99_s,
            )
    return table


def report(scope: Scope, results: Results, out: Path) -> Section:
    """One table over all widths, and the figure."""
    section = Section("Scaling with the number of decode workers")
    section.text(
        f"Workload {scope.title(source_of(scope), scope.rows_at(max(scope.widths)))}, one seed, load 1.15 of each"
        f" width's ideal capacity, {per_worker(scope)}. Widths above 16 are not in the paper. The paper's G = 16"
        " ran with fewer prefillers per worker, so its absolute figures mix in prefill; compare the ratios to JSQ of"
        " the same width. Routers as printed, no wait cap, but for TargetFit and LevelFit, which have one."
    )
    table = scaling_table(scope, results)
    section.table(table)
    if not scope.trace:
        section.text(paper.verdict_on(table, lambda row: f"{row[0]} at G = {row[1]}"))
    lines = {
        method.label: [results[job_of(scope, method, width)].figures for width in scope.widths] for method in METHODS
    }
    name = scope.workload(source_of(scope)).name
    figure = figures.scaling(scope.widths, lines, printed_points(scope), name, out / "scaling")
    section.figure(figure, "Load spread, TPOT p95 and balance of each policy by number of workers")
    for width in scope.widths:
        panels = [(method.label, results[job_of(scope, method, width)].panel) for method in METHODS]
        figure = figures.load_panels(panels, f"{name}, G = {width}", out / f"loads_scaling_g{width}")
        section.figure(figure, f"KV load of every worker, G = {width}")
    return section
