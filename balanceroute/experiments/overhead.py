"""The time of a decision, by stage; the only figures here that depend on the machine."""

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balanceroute.experiments import figures, methods, paper
from balanceroute.experiments.jobs import STAGES, Job, Results
from balanceroute.experiments.methods import Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table

STEP_BUDGET_MS = 60.0  # one engine step in the paper's deployment


def paper_point() -> Method:
    """The deployed BR-H of the paper: both stages in use, R_max = 4."""
    policy = replace(methods.BR_H_DEFAULT.policy, r_max=4)
    return Method("br_h_r4", "BR-H survival, r_max 4", policy, "survival")


def rows_of(scope: Scope) -> list[tuple[Method, int]]:
    """Which routers are timed, at which widths."""
    rows = [(paper_point(), 8), (methods.BR_H_DEFAULT, 8), (methods.BR_0_DEFAULT, 8), (methods.TARGET_FIT, 8)]
    if not scope.quick:
        rows += [(paper_point(), 16), (methods.BR_H_DEFAULT, 16), (methods.TARGET_FIT, 16)]
    return rows


def job_of(scope: Scope, method: Method, width: int) -> Job:
    """A timed run, long enough for most decisions to be taken with every slot busy."""
    return Job(scope.workload(scope.sources[0], rows=max(scope.rows, 6000)), method, width, timed=True)


def plan(scope: Scope) -> list[Job]:
    """All timed runs."""
    return [job_of(scope, method, width) for method, width in rows_of(scope)]


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    return ["overhead.csv", *figures.files("overhead")]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """A table by stage and the fan of percentiles."""
    section = Section("Dispatch overhead")
    printed = "; ".join(
        f"{name}: P50 {p50:,.0f}, P99 {p99:,.0f} us" for name, (p50, _, p99) in paper.OVERHEAD_US.items()
    )
    section.text(
        "Microseconds per decision in the simulator, by stage, with the live router's own code; measured on this"
        f" machine ({platform.machine()}, Python {platform.python_version()}), one run at a time. These figures, and"
        f" only these, differ from run to run. The paper's proxy (r_max 4, G = 8) takes {printed}, of which stage 2 is"
        f" about 69 %; one engine step there is about {STEP_BUDGET_MS:.0f} ms."
    )
    table = Table(
        "overhead",
        ["router", "G", "stage", "decisions", "p50 us", "mean us", "p95 us", "p99 us", "max us"],
        digits={"p50 us": 1, "mean us": 1, "p95 us": 1},
    )
    fans: list[tuple[str, NDArray[np.float64]]] = []
    for method, width in rows_of(scope):
        times = results[job_of(scope, method, width)].times
        assert times is not None
        for stage, values in (("total", times.total), *((stage, times.stages[stage]) for stage in STAGES)):
            if not len(values):
                continue
            p50, p95, p99 = (float(x) for x in np.percentile(values, (50, 95, 99)))
            table.add(method.label, width, stage, len(values), p50, float(values.mean()), p95, p99, float(values.max()))
            if width == 8:
                fans.append((f"{method.label}: {stage}", values))
    section.table(table)
    name = scope.workload(scope.sources[0]).name
    section.figure(
        figures.overhead(fans, paper.OVERHEAD_US, STEP_BUDGET_MS, name, out / "overhead"), "Dispatch overhead"
    )
    return section
