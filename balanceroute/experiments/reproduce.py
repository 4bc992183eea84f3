"""Runs experiments and writes their report: Markdown, CSV, PNG and SVG in one folder."""

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

from balanceroute.errors import InputError
from balanceroute.experiments import (
    bound,
    drawn,
    engine_balancer,
    fairness,
    figures,
    grid,
    main_results,
    overhead,
    paper,
    predictors,
    prefix,
    scaling,
    sensitivity,
    subsets,
)
from balanceroute.experiments.jobs import Results, Task, run_jobs
from balanceroute.experiments.scope import Scope, Section
from balanceroute.whole_file import write_whole


class Planned(Protocol):
    """A module of this folder that is an experiment."""

    def plan(self, scope: Scope) -> Sequence[Task]:
        """Which simulations it needs."""

    def report(self, scope: Scope, results: Results, out: Path) -> Section:
        """What it makes of them; figures are written to `out`."""

    def files(self, scope: Scope) -> list[str]:
        """The names of the files that it writes."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment as the command has it. `reads`: the options of the command that change what it does."""

    module: Planned
    only_by_name: bool = False  # too long to be part of "all"
    reads: frozenset[str] = frozenset({"quick", "trace"})


OPTIONS = ("quick", "trace", "policy")
EXPERIMENTS = {
    "main": Experiment(main_results, reads=frozenset(OPTIONS)),
    "scaling": Experiment(scaling),
    "sensitivity": Experiment(sensitivity),
    "subsets": Experiment(subsets),
    "overhead": Experiment(overhead),
    "predictors": Experiment(predictors, reads=frozenset({"trace"})),
    "fairness": Experiment(fairness, reads=frozenset(OPTIONS)),
    "bound": Experiment(bound),
    "engine_balancer": Experiment(engine_balancer, only_by_name=True),
    "prefix": Experiment(prefix, only_by_name=True),
    "grid": Experiment(grid, only_by_name=True),
    "drawn": Experiment(drawn, only_by_name=True, reads=frozenset({"quick"})),
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

AT_ONCE = """The workload is the given trace. What is replayed of it arrives at one time, which cannot be stretched to a
load: wherever one is stated, everything came at the start."""


def reproduce(
    names: Sequence[str],
    scope: Scope,
    out: Path,
    *,
    n_processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> str:
    """Run the named experiments (all for none) and write the report; its Markdown is returned too.

    Raises: InputError for an unknown name, and for what cannot be written, before anything runs if that can be seen.
    """
    experiments = chosen(names)
    check_writable(out, files_of(names, scope))
    jobs = [job for experiment in experiments for job in experiment.module.plan(scope)]
    store = grid.Store(out / grid.STORE) if keeps_runs(names) else None
    results = run_jobs(jobs, n_processes, on_progress, store)
    sections = [experiment.module.report(scope, results, out) for experiment in experiments]
    for section in sections:
        for table in section.tables:
            table.write_csv(out)
    parts = [preface(scope), *(section.markdown() for section in sections)]
    if not figures.available():
        parts.insert(1, f"({figures.HOW_TO_GET_FIGURES}.)")
    text = "\n\n".join(parts if scope.trace else [*parts, not_done()]) + "\n"
    write_whole(out / "REPORT.md", text.encode())
    return text


def keeps_runs(names: Sequence[str]) -> bool:
    """Whether what is stopped goes on from where it was."""
    return bool({"grid", "drawn"} & set(names))


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The named experiments in their own order; for none all but those that only run by name.

    Raises: InputError for an unknown name.
    """
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], EXPERIMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"unknown experiment {unknown[0]!r}; {hint}one of {', '.join(EXPERIMENTS)}")
    return [e for name, e in EXPERIMENTS.items() if name in names or not (names or e.only_by_name)]


def check_read(names: Sequence[str], option: str) -> None:
    """Raises: InputError where none of the named experiments reads this option of the command."""
    if not any(option in experiment.reads for experiment in chosen(names)):
        reading = ", ".join(name for name, experiment in EXPERIMENTS.items() if option in experiment.reads)
        raise InputError(f"--{option}: changes nothing in {', '.join(names)}; it is read by {reading}")


def files_of(names: Sequence[str], scope: Scope) -> list[str]:
    """The names of all that `reproduce` writes."""
    return sorted({"REPORT.md", *(file for experiment in chosen(names) for file in experiment.module.files(scope))})


def check_writable(out: Path, files: Sequence[str]) -> None:
    """Make the folder, but none above it. Raises: InputError where it cannot hold the files."""
    try:
        out.mkdir(exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        if isinstance(error, FileNotFoundError):
            reason = f"there is no folder {out.parent}"
        raise InputError(f"{out}: cannot be written: {reason}") from error
    for path in (out / file for file in files):
        if path.is_dir():
            raise InputError(f"{path}: is a folder, and a file of this name is to be written")
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(f"{path}: cannot be written")


def not_done() -> str:
    """What of the paper is not done, said once at the end of every report."""
    return "\n".join(["## What of the paper is not done here", "", *(f"- {item}" for item in paper.NOT_DONE)])


def preface(scope: Scope) -> str:
    """The title, and what the figures are."""
    yours = AT_ONCE if scope.at_once(scope.sources[0]) else YOURS
    title, paragraph = PREFACE.format(workloads=yours if scope.trace else SYNTHETIC).split("\n\n")
    return f"{title}\n\n{' '.join(paragraph.split())}"
