"""The paper's main table: every router on both workloads at heavy load, also with limited waits."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from balanceroute.experiments import figures, methods, paper
from balanceroute.experiments.jobs import Job, Results
from balanceroute.experiments.methods import JSQ, MAIN, Method
from balanceroute.experiments.scope import Scope, Section
from balanceroute.experiments.tables import Table, ratio


def jobs_of(scope: Scope, source: str, method: Method) -> list[Job]:
    """One method on one workload, a job per seed; the first seed also shows its loads."""
    return [
        Job(scope.workload(source, seed), method.seeded(seed), panel=seed == scope.seeds[0]) for seed in scope.seeds
    ]


def variants(method: Method) -> list[Method]:
    """The row itself and, where waiting can be capped and is not yet, the row under the cap."""
    capped = method.capped()
    return [method, capped] if method.pooled and capped != method else [method]


def rows(scope: Scope) -> list[Method]:
    """Our methods, and the policies of others that were asked for."""
    return [*MAIN, *map(methods.own, scope.policies)]


def plan(scope: Scope) -> list[Job]:
    """Every row on every workload."""
    return [
        job
        for source in scope.sources
        for method in rows(scope)
        for variant in variants(method)
        for job in jobs_of(scope, source, variant)
    ]


def files(scope: Scope) -> list[str]:
    """What the report writes."""
    names = [scope.workload(source).name for source in scope.sources]
    return [file for name in names for file in (f"main_{name}.csv", *figures.files(f"loads_{name}"))]


def mean_of(results: Results, jobs: Sequence[Job], name: str) -> float:
    """Mean over seeds of one figure."""
    return fmean(getattr(results[job].figures, name) for job in jobs)


def deviation_of(results: Results, jobs: Sequence[Job]) -> float | None:
    """Standard deviation over seeds of the load spread; None: there is a single seed."""
    values = [results[job].figures.load_spread_mean for job in jobs]
    return stdev(values) if len(values) > 1 else None


def report(scope: Scope, results: Results, out: Path) -> Section:
    """Tables, panels and what they say."""
    section = Section("Main results (G = 8, load 1.15 of ideal capacity)")
    section.text(
        f"Means over {len(scope.seeds)} seed(s); ± is the standard deviation over seeds. `load spread` is the paper's"
        " average imbalance (max − min KV tokens, mean over steps). `vs JSQ` is how many times smaller it is than"
        " JSQ's, with the paper's own ratio beside it. `balance` 1.0 is the bound that no router can pass. Rows"
        f' marked "limit" are the same router with waits limited to {methods.WAIT_CAP_S:.0f} s (longer for huge'
        " prompts): the paper has no such limit, and its greedy stage lets big prompts wait for minutes. Its rows run"
        " with `s_greedy` 0, which gives its ratios and means that stage 1 makes every admission; in the rows `both"
        " stages` the last four slots of a decision go by subsets (4 is the paper's R_max, 8 ours)."
    )
    for source in scope.sources:
        name = scope.workload(source).name
        section.text(f"### {scope.title(source)}")
        table = main_table(scope, results, source, name)
        section.table(table)
        if source in paper.MAIN:
            section.text(paper.verdict_on(table))
        panels = [(method.label, results[jobs_of(scope, source, method)[0]].panel) for method in rows(scope)]
        section.figure(figures.load_panels(panels, name, out / f"loads_{name}"), f"KV load of every worker, {name}")
    return section


def main_table(scope: Scope, results: Results, source: str, name: str) -> Table:
    """One workload's rows."""
    table = Table(
        f"main_{name}",
        ["router", "load spread", "±", "vs JSQ", "paper", "TPOT p95 ms", "tok/s", "vs JSQ tok/s", "paper tok/s",
         "balance", "wait p50 s", "wait p99 s", "wait max s"],
        digits={"vs JSQ": 1, "paper": 1, "TPOT p95 ms": 1, "vs JSQ tok/s": 3, "paper tok/s": 3, "balance": 3,
                "wait p50 s": 1},
    )  # fmt: skip
    base = jobs_of(scope, source, JSQ)
    base_spread, base_rate = (mean_of(results, base, n) for n in ("load_spread_mean", "throughput_tok_s"))
    printed = paper.MAIN.get(source, {})
    for method in rows(scope):
        for variant in variants(method):
            jobs = jobs_of(scope, source, variant)
            ours = partial(mean_of, results, jobs)
            theirs = printed.get(method.paper) if variant is method else None
            jsq = printed.get("join_shortest_queue")
            table.add(
                variant.label + (", limit" if variant is not method else ""),
                ours("load_spread_mean"),
                deviation_of(results, jobs),
                ratio(base_spread, ours("load_spread_mean")),
                paper.times_below_jsq(theirs, jsq),
                ours("tpot_p95_s") * 1000,
                ours("throughput_tok_s"),
                ours("throughput_tok_s") / base_rate,
                theirs.throughput / jsq.throughput if theirs and jsq else None,
                ours("balance"),
                ours("wait_p50_s"),
                ours("wait_p99_s"),
                ours("wait_max_s"),
            )
    return table
