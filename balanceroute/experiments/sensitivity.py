"""The paper's cross-shaped sweep of (beta, gamma) for BR-H with an oracle."""

from pathlib import Path

from balanceroute.experiments import figures, methods, paper
from balanceroute.experiments.jobs import Job, Results
from balanceroute.experiments.scaling import job_of
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table, ratio

SWEPT = ((1.0, 0.9), (24.0, 0.9), (48.0, 0.9), (96.0, 0.9), (48.0, 0.5), (48.0, 0.7), (48.0, 1.0))
DEPLOYED = ((43.0, 0.86), (14.67, 0.64))


def point_job(scope: Scope, beta: float, gamma: float, width: int) -> Job:
    """BR-H with an oracle at one operating point."""
    return job_of(scope, methods.at_point(beta, gamma), width)


def plan(scope: Scope) -> list[Job]:
    """The cross, the two operating points and JSQ at each width."""
    return [
        job
        for width in scope.sensitivity_widths
        for job in (
            job_of(scope, methods.JSQ, width),
            *(point_job(scope, beta, gamma, width) for beta, gamma in SWEPT + DEPLOYED),
        )
    ]


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    widths = scope.sensitivity_widths
    panels = [file for width in widths for file in figures.files(f"loads_sensitivity_g{width}")]
    return [*(f"sensitivity_g{width}.csv" for width in widths), *figures.files("sensitivity"), *panels]


def theirs_at(scope: Scope) -> dict[int, dict[tuple[float, float], float]]:
    """The paper's load spread by width and point; none beside a user's trace."""
    printed = {} if scope.trace else paper.SENSITIVITY
    return {width: {point: theirs.imbalance for point, theirs in points.items()} for width, points in printed.items()}


def width_table(scope: Scope, results: Results, width: int) -> Table:
    """Every point at one width."""
    base = results[job_of(scope, methods.JSQ, width)].figures
    printed = {} if scope.trace else paper.SENSITIVITY.get(width, {})
    jsq = paper.SCALING.get(width, {}).get("join_shortest_queue")
    table = Table(
        f"sensitivity_g{width}",
        ["(beta, gamma)", "load spread", "vs JSQ", "paper", "TPOT p95 ms", "tok/s", "balance", "wait p99 s"],
        digits={"vs JSQ": 1, "paper": 1, "TPOT p95 ms": 1, "balance": 3},
    )
    for beta, gamma in SWEPT + DEPLOYED:
        ours, theirs = results[point_job(scope, beta, gamma, width)].figures, printed.get((beta, gamma))
        table.add(
            f"({beta:g}, {gamma:g})" + (" *" if (beta, gamma) in DEPLOYED else ""),
            ours.load_spread_mean,
            ratio(base.load_spread_mean, ours.load_spread_mean),
            paper.times_below_jsq(theirs, jsq),
            ours.tpot_p95_s * 1000,
            ours.throughput_tok_s,
            ours.balance,
            ours.wait_p99_s,
        )
    return table


def report(scope: Scope, results: Results, out: Path) -> Section:
    """A table and a figure per width."""
    section = Section("Sensitivity to (beta, gamma)")
    workload = scope.title(scope.sources[0], scope.rows_at(max(scope.sensitivity_widths)))
    section.text(
        f"BR-H with an oracle, H = 80, as printed (no wait cap); workload {workload}, one seed:"
        " single figures move by about ±20 % with the seed. Ratios are to JSQ on the same trace."
    )
    for width in scope.sensitivity_widths:
        rows = f", {scope.replayed_rows(scope.trace, scope.rows_at(width)):,} requests" if scope.trace else ""
        section.text(f"### G = {width}{rows} (* the paper's operating points)")
        table = width_table(scope, results, width)
        section.table(table)
        if not scope.trace:
            section.text(paper.verdict_on(table))
    points = {
        width: {point: results[point_job(scope, *point, width)].figures.load_spread_mean for point in SWEPT + DEPLOYED}
        for width in scope.sensitivity_widths
    }
    name = scope.workload(scope.sources[0]).name
    figure = figures.sensitivity(points, theirs_at(scope), DEPLOYED, name, out / "sensitivity")
    section.figure(figure, "Load spread by beta and gamma, one panel per number of workers")
    for width in scope.sensitivity_widths:
        panels = [
            (f"beta {beta:g}, gamma {gamma:g}", results[point_job(scope, beta, gamma, width)].panel)
            for beta, gamma in SWEPT + DEPLOYED
        ]
        figure = figures.load_panels(panels, f"{name}, G = {width}, BR-H oracle", out / f"loads_sensitivity_g{width}")
        section.figure(figure, f"KV load of every worker over the sweep, G = {width}")
    return section
