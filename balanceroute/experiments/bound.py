"""The distance of each policy from perfect balance, and from the best schedule known in hindsight.

*Perfect balance*: all loads equal and all slots full on every step; `balance` 1. No schedule reaches it: loads are sums
of whole requests, and change only where one ends.

*Refills without foresight*: suppose that every admission brings its worker back to the level to the token. Until its
next departure the worker then grows by a token per request and step. Departures come at random, so that the growth
since the last one is exponential with the mean answer o for its mean, and of G of them the largest and the smallest
differ by

    o (1 + 1/2 + ... + 1/(G-1)),

the difference of the extremes of G exponentials. Who knows nothing of what ends next can do no better on average.

*Hindsight*: the best load spread that any schedule reached on the same requests, those included that see how long each
answer becomes and let requests wait as long as they like. It is no optimum, which nobody can compute.
"""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from balanceroute.experiments import methods
from balanceroute.experiments.jobs import Job, Results, replayed
from balanceroute.experiments.main_results import jobs_of, mean_of
from balanceroute.experiments.methods import Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table, ratio

WAITING = replace(methods.LEVEL_FIT, key="level_fit_waiting", label="LevelFit, no limit to waiting",
                  policy=replace(methods.LEVEL_FIT.policy, max_wait_s=math.inf))  # fmt: skip
HINDSIGHT = (methods.BR_H_ORACLE, methods.BR_H_ORACLE_14, WAITING, replace(WAITING, key="target_fit_waiting",
             label="TargetFit, no limit to waiting", policy=replace(WAITING.policy, policy="target_fit")))  # fmt: skip
ROUTERS = methods.AS_SERVED


def plan(scope: Scope) -> list[Job]:
    """Every row on every workload."""
    return [
        job for source in scope.sources for method in (*ROUTERS, *HINDSIGHT) for job in jobs_of(scope, source, method)
    ]


def files(scope: Scope) -> list[str]:
    """The files of the report."""
    return [f"bound_{scope.workload(source).name}.csv" for source in scope.sources]


def report(scope: Scope, results: Results, out: Path) -> Section:
    """One table per workload."""
    section = Section("The bound: what is left to win")
    section.text(
        "Load spread in tokens, and how many times that of the best schedule known in hindsight it is; `lost` is the"
        " share of tokens/s that perfect balance would add. `Refills without foresight` is a model, not a run: every"
        " admission exact, departures at random. Rows below it see true lengths or let requests wait for minutes."
    )
    for source in scope.sources:
        section.text(f"### {scope.title(source)}")
        section.table(bound_table(scope, results, source))
    return section


def without_foresight(mean_answer: float, n_workers: int) -> float:
    """Expected load spread, tokens, where every admission is exact and departures come at random."""
    return mean_answer * sum(1.0 / k for k in range(1, n_workers))


def bound_table(scope: Scope, results: Results, source: str) -> Table:
    """Every policy's distance to the limit."""
    table = Table(
        f"bound_{scope.workload(source).name}",
        ["schedule", "load spread", "× hindsight", "balance", "lost %", "wait p99 s", "wait max s"],
        digits={"× hindsight": 2, "balance": 3, "lost %": 1, "wait p99 s": 1},
    )
    spreads = {m.key: mean_of(results, jobs_of(scope, source, m), "load_spread_mean") for m in (*ROUTERS, *HINDSIGHT)}
    best = min(spreads.values())

    def add(method: Method) -> None:
        jobs = jobs_of(scope, source, method)
        balance, p99, most = (mean_of(results, jobs, name) for name in ("balance", "wait_p99_s", "wait_max_s"))
        spread = spreads[method.key]
        table.add(method.label, spread, ratio(spread, best), balance, 100 * (1 / balance - 1), p99, most)

    for method in ROUTERS:
        add(method)
    answers = fmean(float(replayed(scope.workload(source, seed), 8)[0].output_tokens.mean()) for seed in scope.seeds)
    table.add("Refills without foresight (model)", without_foresight(answers, 8), None, None, None, None, None)
    for method in HINDSIGHT:
        add(method)
    table.add("Perfect balance", 0.0, 0.0, 1.0, 0.0, None, None)
    return table
