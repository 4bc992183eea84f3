"""Runs every policy on a hundred workloads drawn at random, each with another load, width and disturbance.

Twenty more have rare huge prompts. They were added when a test showed that the default of the time lost there.

Regrets and bars are those of the grid. A run is of some minutes, which is a few wait caps: who lets large prompts wait
until its end has served more of the small ones before, and gains tokens/s though it ends no sooner. So the makespan is
judged as well: the time from the trace's second 0 to the last token.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from balanceroute.experiments import figures, grid, methods
from balanceroute.experiments.cells import DRAWN, FACTORS, ROWS_PER_SLOT, SLOTS, Cell, CellJob
from balanceroute.experiments.jobs import Results
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table
from balanceroute.traces.drawn import RARE_FROM, DrawnWorkload, drawn_workload

RARE_WORKLOADS = 20
QUICK_WORKLOADS = (*range(11), RARE_FROM)
LOADS = (0.8, 0.95, 1.05, 1.2)
WIDTHS, WEIGHTS = (4, 8, 16), (5, 6, 2)  # the widest take longest
UNDISTURBED = 0.5  # of the workloads


def cells(scope: Scope) -> list[Cell]:
    """One cell for each workload, always the same ones."""
    numbers = QUICK_WORKLOADS if scope.quick else range(RARE_FROM + RARE_WORKLOADS)
    return [_cell(number) for number in numbers]


def _cell(number: int) -> Cell:
    draw = random.Random(number)
    width = draw.choices(WIDTHS, weights=WEIGHTS)[0]
    load = draw.choice(LOADS)
    factor = "none" if draw.random() < UNDISTURBED else draw.choice(FACTORS[1:])
    rows = width * SLOTS * ROWS_PER_SLOT * _times(drawn_workload(number))
    return Cell(f"{DRAWN}{number}", load, width, factor, rows=rows)


def _times(workload: DrawnWorkload) -> int:
    """The rows of a run, by 20 for each slot: where answers are short these are over at once."""
    return 5 if workload.answer_tokens < 60 else 2 if workload.answer_tokens < 150 else 1


def one_seed(scope: Scope) -> Scope:
    """Many workloads say more than five samples of each."""
    return replace(scope, seeds=scope.seeds[:1])


def plan(scope: Scope) -> list[CellJob]:
    """Every policy on every workload."""
    scope = one_seed(scope)
    return [job for cell in cells(scope) for method in grid.POLICIES for job in grid.jobs_of(scope, cell, method)]


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    names = ("drawn", "drawn_regret", "drawn_makespan", "drawn_verdict", "drawn_workloads")
    return [*(f"{name}.csv" for name in names), grid.STORE, *figures.files("drawn_regret")]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """The tables of regrets, makespans and bars, the workloads, and the figure."""
    scope = one_seed(scope)
    section = Section("Drawn workloads: what nobody tuned for")
    rows = [grid.cell_results(scope, results, cell) for cell in cells(scope)]
    busy = grid.busy_ones(rows)
    section.text(
        f"{len(rows)} workloads, {len(busy)} of them busy (more than {grid.BUSY:.0%} of the slots in use), one sample"
        " of each. Regrets are against the best policy on the same workload, as in the grid."
    )
    section.table(grid.regret_table(busy, "drawn_regret"))
    section.text(
        "The time from the trace's second 0 to the last token, against the shortest on the same workload. A policy"
        " gains tokens/s by letting large prompts wait until the end; here it does not."
    )
    section.table(makespan_table(scope, results, busy))
    section.text(f"The bars for the default, {methods.LEVEL_FIT.label}:")
    section.table(grid.verdict_table(rows, busy, "drawn_verdict"))
    section.table(workload_table(scope))
    section.table(grid.cell_table(rows, "drawn"))
    section.figure(
        figures.regret(grid.lost_tokens(busy), out / "drawn_regret", "Regret on drawn workloads, simulated"),
        "Regret of each policy, one dot per busy workload",
    )
    return section


def makespan_table(scope: Scope, results: Results, busy: Sequence[Sequence[grid.CellResult]]) -> Table:
    """One row per policy over all busy workloads."""
    table = Table(
        "drawn_makespan",
        ["router", "longer makespan mean %", "worst %", "workloads within 1 %"],
        digits={"longer makespan mean %": 2, "worst %": 2},
    )

    def makespan_s(result: grid.CellResult) -> float:
        (job,) = grid.jobs_of(scope, result.cell, result.method)
        return float(results[job]["makespan_s"])

    spans = [[makespan_s(result) for result in row] for row in busy]
    for index, method in enumerate(grid.POLICIES):
        longer = [each[index] / min(each) - 1.0 for each in spans]
        if longer:
            table.add(method.label, 100 * fmean(longer), 100 * max(longer), sum(each <= 0.01 for each in longer))
    return table


def workload_table(scope: Scope) -> Table:
    """What was drawn."""
    table = Table("drawn_workloads", ["workload", "what it is", "requests"])
    for cell in cells(scope):
        table.add(cell.name, str(drawn_workload(int(cell.shape.removeprefix(DRAWN)))), cell.rows)
    return table
