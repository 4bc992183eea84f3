"""Runs experiments and writes their report: Markdown, CSV, PNG and SVG in one folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from balanceroute.errors import InputError
from balanceroute.experiments import fairness, main_results, overhead, predictors, scaling, sensitivity
from balanceroute.experiments.jobs import Results, Task, run_jobs
from balanceroute.experiments.scope import Scope, Section


@dataclass(frozen=True, slots=True)
class Experiment:
    """Which simulations it needs, and what it makes of them."""

    plan: Callable[[Scope], Sequence[Task]]
    report: Callable[[Scope, Results, Path], Section]


EXPERIMENTS = {
    "main": Experiment(main_results.plan, main_results.report),
    "scaling": Experiment(scaling.plan, scaling.report),
    "sensitivity": Experiment(sensitivity.plan, sensitivity.report),
    "overhead": Experiment(overhead.plan, overhead.report),
    "predictors": Experiment(predictors.plan, predictors.report),
    "fairness": Experiment(fairness.plan, fairness.report),
}

PREFACE = """# The paper's experiments, simulated

Every figure below comes from the step simulator, which drives the live router's scheduler and policies; none was
measured on accelerators. The step time (1.2e-7 s per KV token of the fullest worker plus 25 ms) is inferred from the
paper's throughput and TPOT. {workloads} Compare ratios, not absolute values: the paper's were measured on 144 NPUs with
a proprietary trace and with Azure 2024 conversations, neither of which is available here."""

SYNTHETIC = """Both workloads are synthetic: `heavy_tailed` has the published moments of the paper's proprietary trace,
`capped` is a stand-in for its filtered Azure-2024 trace, with the published means and a prompt spread that fits its JSQ
imbalance. No row of either is a real request."""

YOURS = "The workload is the given trace, its arrivals stretched to the stated load of each simulated cluster."


def reproduce(
    names: Sequence[str],
    scope: Scope,
    out: Path,
    *,
    n_processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> str:
    """Run the named experiments (all for none) and write the report; its Markdown is returned too.

    Raises: InputError for an unknown name or a folder that cannot be made.
    """
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise InputError(f"unknown experiment {unknown[0]!r}; one of {', '.join(EXPERIMENTS)}")
    chosen = [EXPERIMENTS[name] for name in EXPERIMENTS if name in names or not names]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made: {error.strerror}") from error
    jobs = [job for experiment in chosen for job in experiment.plan(scope)]
    results = run_jobs(jobs, n_processes, on_progress)
    sections = [experiment.report(scope, results, out) for experiment in chosen]
    for section in sections:
        for table in section.tables:
            table.write_csv(out)
    title, paragraph = PREFACE.format(workloads=YOURS if scope.trace else SYNTHETIC).split("\n\n")
    preface = " ".join(paragraph.split())
    text = "\n\n".join([title, preface, *(section.markdown() for section in sections)]) + "\n"
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    return text
