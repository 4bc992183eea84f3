"""Draws the figures of README.md and docs/, and the figures that the README's table of results shows.

python -m scripts.docs_figures    writes docs/figures/*.png and docs/figures/results.json; some minutes

What is drawn comes from the product: simulations with the settings that `serve` has when none are given, and the
 example decision of `balanceroute explain`.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import balanceroute
from balanceroute.core.policies import BUILT_IN, make_policy
from balanceroute.core.scheduler import Scheduler
from balanceroute.experiments.figures import BLACK, BLUE, DPI, GREEN, GREY, VERMILION, comparison, pyplot
from balanceroute.explain import explain
from balanceroute.simulator import Figures

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "figures"
EXAMPLE = ROOT / "tests" / "data" / "explain_example.json"
ROWS = 8000
SEEDS = range(6)
KEPT = ("load_spread_mean", "throughput_tok_s", "tpot_p95_s", "balance", "wait_p50_s", "wait_p99_s", "wait_max_s")
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
SHOWN = ("join_shortest_queue", "level_fit")


def write(figure: Any, name: str) -> None:
    """As PNG, with nothing in it that differs from run to run."""
    figure.savefig(OUT / f"{name}.png", dpi=DPI, metadata={"Software": "balanceroute"})


def simulated(policy: str, seed: int) -> balanceroute.SimulationResult:
    """What `balanceroute replay --policy POLICY --seed SEED` simulates."""
    return balanceroute.simulate("heavy_tailed", policy, max_requests=ROWS, seed=seed)


def results() -> None:
    """Every policy on the same requests: two of them as load panels, the means over seeds as bars and results.json."""
    runs, found = {}, {}
    for name in sorted(BUILT_IN):
        of_seeds = [simulated(name, seed) for seed in SEEDS]
        runs[name], found[name] = of_seeds[0], mean([run.figures for run in of_seeds])
        print(name, file=sys.stderr)
    write(runs[SHOWN[0]].plot(None, runs[SHOWN[1]]), "load_panels")
    found = dict(sorted(found.items(), key=lambda item: item[1].tpot_p95_s))
    title = f"Every policy on the same {ROWS:,} requests of heavy_tailed, means of {len(SEEDS)} seeds"
    comparison(found, title, OUT / "policies")
    (OUT / "policies.svg").unlink()
    table = {name: {key: asdict(figures)[key] for key in KEPT} for name, figures in found.items()}
    (OUT / "results.json").write_text(json.dumps(table, indent=1) + "\n")


def mean(runs: list[Figures]) -> Figures:
    """The first one's, with means over all where they are shown."""
    shown: dict[str, Any] = {key: fmean(asdict(figures)[key] for figures in runs) for key in KEPT}
    return replace(runs[0], **shown)


def margins() -> None:
    """The decision of the `explain` example: loads, envelope, margin, and what each request would do."""
    state = json.loads(EXAMPLE.read_text())
    explained = explain(state)
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 3), sharey=True)
    loads = {worker.id: worker.load_tokens for worker in explained.workers}
    envelope = max(loads.values())
    axes[0].bar(list(loads), list(loads.values()), color=BLUE, width=0.55)
    for place, load in enumerate(loads.values()):
        if load < envelope:
            axes[0].annotate("", (place, envelope), (place, load), arrowprops={"arrowstyle": "<->", "color": BLACK})
            axes[0].text(place + 0.05, (load + envelope) / 2, f"margin {envelope - load:,}", va="center")
    axes[0].set_xlim(-0.5, 1.8)
    axes[0].set_ylabel("KV tokens")
    axes[0].set_xlabel("decode worker")
    axes[0].set_title("before", fontsize=9)
    free = next(worker for worker in explained.workers if worker.free_slots)
    for place, waiting in enumerate(state["waiting"]):
        tokens = waiting["prompt_tokens"]
        fits = min(tokens, envelope - free.load_tokens)
        over = tokens - fits
        axes[1].bar(place, free.load_tokens, color=BLUE, width=0.55)
        axes[1].bar(place, fits, bottom=free.load_tokens, color=GREEN, width=0.55, hatch="//", edgecolor="white")
        axes[1].bar(place, over, bottom=envelope, color=VERMILION, width=0.55, hatch="xx", edgecolor="white")
        score = tokens - len(loads) * over
        chosen = " (chosen)" if waiting["id"] == explained.admissions[0].request else ""
        axes[1].text(
            place, free.load_tokens + tokens + 120, f"F = {score:,}{chosen}", ha="center", fontsize=9, bbox=BEHIND
        )
    axes[1].set_xticks(range(len(state["waiting"])), [f"{w['id']}\n{w['prompt_tokens']:,}" for w in state["waiting"]])
    axes[1].set_ylim(0, 6600)
    axes[1].set_xlabel("request, tokens")
    axes[1].set_title(f"what {free.id} would hold: hatched // fits, xx is charged {len(loads)}-fold", fontsize=9)
    for axis in axes:
        axis.axhline(envelope, color=GREY, linestyle="--", linewidth=1)
    axes[0].text(1.75, envelope + 90, "envelope", color=GREY, ha="right", fontsize=8)
    write(figure, "margins")


def subsets() -> None:
    """Four slots and eight candidates: the best subset that BR-0 finds, beside taking the largest that fit."""
    candidates = (4100, 900, 3300, 2600, 700, 1900, 1200, 3000)
    margin, slots = 8000, 4
    state = {
        "policy": "br_0",
        "params": {"s_greedy": slots, "r_max": len(candidates)},
        "workers": [
            {"id": "d0", "slots": 1, "active": [{"id": "a", "prompt_tokens": 12_000}]},
            {"id": "d1", "slots": slots + 1, "active": [{"id": "b", "prompt_tokens": 12_000 - margin}]},
        ],
        "waiting": [{"id": f"r{index}", "prompt_tokens": tokens} for index, tokens in enumerate(candidates)],
    }
    best = [int(admission.request[1:]) for admission in explain(state).admissions]
    first = first_that_fit(candidates, margin, slots)
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 2.4))
    for row, (label, chosen) in enumerate((("oldest first, while they fit", first), ("best subset", best))):
        left = 0
        for index in chosen:
            axis.barh(row, candidates[index], left=left, color=(GREY, GREEN)[row], edgecolor="white", height=0.6)
            axis.text(
                left + candidates[index] / 2,
                row,
                f"{candidates[index]:,}",
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
            left += candidates[index]
        axis.text(left + 100, row, f"{label}: {left:,}", va="center", fontsize=9, bbox=BEHIND)
    axis.axvline(margin, color=BLACK, linestyle="--", linewidth=1)
    axis.text(margin, 1.5, f"margin {margin:,}", ha="center", fontsize=9)
    axis.set_ylim(1.75, -0.5)
    axis.set_xlim(0, 11_500)
    axis.set_yticks([])
    axis.set_xlabel(
        f"KV tokens admitted to the {slots} free slots of one worker; waiting: {', '.join(map(str, candidates))}"
    )
    write(figure, "subsets")


def first_that_fit(candidates: tuple[int, ...], margin: int, slots: int) -> list[int]:
    """In order of arrival, each that still fits."""
    chosen: list[int] = []
    for index, tokens in enumerate(candidates):
        if len(chosen) < slots and tokens <= margin - sum(candidates[other] for other in chosen):
            chosen.append(index)
    return chosen


def horizon() -> None:
    """Two workers of equal load, one of which is about to lose a large request: what BR-H sees and BR-0 does not."""
    horizon_steps = 80
    settings = balanceroute.PolicySettings(policy="br_h", horizon_steps=horizon_steps)
    scheduler = Scheduler(make_policy(settings))
    for name in ("d0", "d1"):
        scheduler.add_worker(balanceroute.WorkerSpec(name, balanceroute.Role.DECODE, slots=2), 0.0)
    for name, remaining in (("leaves", 25.0), ("stays", 200.0)):
        scheduler.submit_prefilled(balanceroute.RequestSpec(name, 4000), 0.0, min(remaining, float(horizon_steps)))
    scheduler.admit(0.0)
    loads = scheduler.snapshot.projected_loads()
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 2.8))
    steps = np.arange(loads.shape[1])
    looks = ((VERMILION, "-", "o"), (BLUE, "--", "s"))
    for row, (colour, dashes, marker), worker in zip(loads, looks, scheduler.snapshot.workers, strict=True):
        holds = next(iter(worker.active))
        label = f"{worker.spec.id}: its request {holds}"
        axis.plot(steps, row, color=colour, linestyle=dashes, marker=marker, markevery=10, label=label)
    axis.fill_between(steps, loads.min(axis=0), loads.max(axis=0), color=GREEN, alpha=0.2, label="margin to come")
    axis.set_xlabel("decode steps from now")
    axis.set_ylabel("KV tokens")
    axis.set_ylim(0, 4800)
    axis.legend(loc="center right")
    write(figure, "horizon")


def main() -> int:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="only what needs no simulation")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    margins()
    subsets()
    horizon()
    if not arguments.fast:
        results()
    return 0


if __name__ == "__main__":
    sys.exit(main())
