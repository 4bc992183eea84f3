"""`balanceroute demo`."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from balanceroute.core.bounds import MOST_SLOTS
from balanceroute.core.knobs import DEFAULTS

if TYPE_CHECKING:
    from balanceroute.demo.decode_tier import DemoScale, PolicyRun
    from balanceroute.demo.prefill_tier import PrefixRun, PrefixScale
    from balanceroute.loadgen.run import Progress

Run = TypeVar("Run")
Scale = TypeVar("Scale", "DemoScale", "PrefixScale")
Shown = TypeVar("Shown", "PolicyRun", "PrefixRun")
Rows = list[tuple[str, Callable[[Shown], float], str]]  # name of a figure, where it is, its format

LATE_S = 0.1  # seconds a request is sent late because its client could not keep up
SHOWN = ("br_0", "br_h", DEFAULTS["policy"])  # the paper's two, and the default


def demo(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=5, help="How long requests arrive, for each router.")] = 28.0,
    load: Annotated[
        float, typer.Option(min=0.05, max=2, help="Offered load; 1 is what perfect balance carries.")
    ] = 1.15,
    slots: Annotated[int, typer.Option(min=1, max=MOST_SLOTS, help="Slots of each of the 8 decode ranks.")] = 32,
    against: Annotated[str, typer.Option(help="The policy that is compared with.")] = "join_shortest_queue",
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy that is shown; repeatable. br_0, br_h and level_fit if left out.")
    ] = None,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Show the prefill tier instead: conversations through prefill policies.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trace.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what the router is worth: an emulated cluster, the same trace through several policies, side by side.

    Ctrl-C ends it with the policies that are done.

    Example: balanceroute demo --seconds 30 --against least_kv
    """
    from balanceroute.demo.decode_tier import DemoScale, run_demo
    from balanceroute.errors import ConfigError
    from balanceroute.plugins import learn_policy

    if not math.isfinite(seconds):
        raise ConfigError(f"--seconds {seconds}: accepted is a finite number")
    if prefix:
        from balanceroute.cli.prefix_demo import prefix_demo

        refuse_beside_prefix(context)
        warn_if_busy()
        prefix_demo(seconds, seed, json)
        return
    names = list(dict.fromkeys((against, *(policy or SHOWN))))
    for name in names:
        learn_policy(name)
    scale = DemoScale(seconds=seconds, load=load, slots=slots, seed=seed)
    scale.checked()
    warn_if_busy()
    side_by_side(scale, names, run_demo, json, announce, show)


def side_by_side(
    scale: Scale,
    names: Sequence[str],
    run: "Callable[[Scale, str, Progress], Shown]",
    json: bool,
    announce: Callable[[Scale], None],
    show: "Callable[[list[Shown]], None]",
) -> None:
    """Run each of the policies, and print what was found: as JSON, or as `show` does."""
    from dataclasses import asdict

    from balanceroute.cli.output import print_json

    if not json:
        announce(scale)
    runs = until_interrupted(names, lambda name, on_progress: run(scale, name, on_progress))
    warn_if_late(runs)
    if json:
        print_json({"scale": asdict(scale), "runs": [asdict(run) for run in runs]})
    elif runs:
        show(runs)
    say_if_interrupted(len(runs), len(names))


def until_interrupted(names: Sequence[str], run: "Callable[[str, Progress], Run]") -> list[Run]:
    """The results of `run` for the policies, until Ctrl-C."""
    from balanceroute.cli.output import progress_bar
    from balanceroute.demo.processes import ended_by_signals

    runs: list[Run] = []
    with suppress(KeyboardInterrupt):
        for name in names:
            with progress_bar(f"{name:<20}") as on_progress, ended_by_signals():
                runs.append(run(name, on_progress))
    return runs


def say_if_interrupted(done: int, wanted: int) -> None:
    """End with the exit code of an interruption if there was one."""
    from balanceroute.cli.output import INTERRUPTED

    if done < wanted:
        typer.echo(f"balanceroute: interrupted after {done} of {wanted} policies", err=True)
        raise typer.Exit(INTERRUPTED)


def refuse_beside_prefix(context: typer.Context) -> None:
    """Refuse options that `--prefix` does not use: it has one scale and its own policies. Raises: ConfigError."""
    from balanceroute.cli.given import given
    from balanceroute.errors import ConfigError

    for name in ("load", "slots", "against", "policy"):
        if given(context, name):
            raise ConfigError(f"--{name} is about the decode tier; with --prefix leave it out")


def warn_if_busy() -> None:
    """Say so when the machine has other things to do than the demo."""
    import os

    from balanceroute.demo.processes import BUSY, busy_with

    if busy_with() > BUSY:
        typer.echo(
            f"warning: the machine is busy ({os.getloadavg()[0]:.1f} processes wanted its {os.cpu_count()} cores over"
            " the last minute): loads and times below will show that, and little of the policies",
            err=True,
        )


def warn_if_late(runs: "Sequence[PolicyRun | PrefixRun]") -> None:
    """Say so when the client could not send in time, so that the figures mean little."""
    late = [run for run in runs if run.report.late_s.p95 > LATE_S]
    if late:
        lags = ", ".join(f"{run.policy} {run.report.late_s.p95 * 1e3:.0f} ms" for run in late)
        typer.echo(
            f"warning: the machine was too busy to send requests in time (late by p95: {lags}); run it again on an idle"
            " one, or with less --load, before you believe the figures",
            err=True,
        )


def announce(scale: "DemoScale") -> None:
    """Say what runs, and how it was scaled."""
    from balanceroute.demo.decode_tier import REFERENCE

    trace = scale.trace()
    setting = scale.setting(trace)
    typer.echo(
        f"{len(trace)} requests in {scale.seconds:g} s at {scale.load:.0%} of what perfect balance carries, through an"
        f" emulated cluster of {scale.prefillers} prefillers and {scale.workers} decode ranks of {scale.slots} slots.\n"
        f"Scaled to two cores: prompts, outputs and horizon 1/{scale.factor:g} of the heavy-tailed workload (mean"
        f" {trace.prompt_tokens.mean():.0f} + {trace.output_tokens.mean():.0f} tokens, no output above"
        f" {scale.longest_outputs:g} means, H = {scale.horizon_steps}),"
        f" {scale.slots} slots for {REFERENCE.slots},\nstep = {setting.step_cost_s:.2g} s per KV token of the fullest"
        f" rank + {setting.step_overhead_s:g} s, so that reading KV takes the share of a step it takes at full size.\n"
    )


def show(runs: "list[PolicyRun]") -> None:
    """The table, one column per policy, and the change from the first to the last."""
    show_side_by_side(
        runs,
        [
            ("load spread, tokens (max - min)", lambda run: run.load_spread_tokens, ",.0f"),
            ("excess, tokens (max - mean)", lambda run: run.excess_tokens, ",.0f"),
            ("step time, ms", lambda run: run.step_s * 1e3, ".1f"),
            ("slots in use, %", lambda run: run.slots_used_ratio * 100, ".1f"),
            ("tokens/s", lambda run: run.tokens_per_s, ",.0f"),
            ("TPOT p50, ms", lambda run: run.report.tpot_s.p50 * 1e3, ".1f"),
            ("TPOT p95, ms", lambda run: run.report.tpot_s.p95 * 1e3, ".1f"),
            ("TTFT p50, s", lambda run: run.report.ttft_s.p50, ".2f"),
            ("TTFT p95, s", lambda run: run.report.ttft_s.p95, ".2f"),
            ("TTFT p99, s", lambda run: run.report.ttft_s.p99, ".2f"),
            ("decision, us (mean)", lambda run: run.decision_mean_us, ",.0f"),
        ],
        runs[0],
        "Loads, step time and tokens/s: every engine step from 30 % of the requests sent to the last one sent.",
    )


def show_side_by_side(runs: "list[Shown]", rows: "Rows[Shown]", compared: "Shown", *notes: str) -> None:
    """A table with a column per policy, the change from `compared` to the last one, and notes below."""
    from rich.table import Table

    from balanceroute.cli.output import print_table

    table = Table("", *(run.policy for run in runs), "change", title=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figure, form in rows:
        before, after = figure(compared), figure(runs[-1])
        change = f"{after / before - 1:+.0%}" if before else ""
        table.add_row(name, *(format(figure(run), form) for run in runs), change)
    table.add_row("answers complete", *(f"{run.report.completed} of {run.report.requests}" for run in runs), "")
    print_table(table, *notes)
