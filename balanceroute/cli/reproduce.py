"""`balanceroute reproduce`."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

MOST_JOBS = 1024  # processes, each with its own Python


def reproduce(
    context: typer.Context,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            help="main, scaling, sensitivity, subsets, overhead, predictors, fairness, bound; these if left out. "
            "prefix: the prefill tier and its caches. engine_balancer: with and without a balancer inside the engine. "
            "grid: each policy on 133 workloads and clusters, more than an hour (longer where nothing is compiled), "
            "two minutes or three with --quick. drawn: the same on 120 workloads drawn at random, ten minutes. Both go "
            "on where they were stopped."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer seeds, rows and widths: a fraction of the time.")
    ] = False,
    out: Annotated[str, typer.Option(metavar="PATH", help="Folder for REPORT.md, CSV, PNG and SVG.")] = "reproduction",
    trace: Annotated[
        str | None,
        typer.Option(help="Run on this trace CSV, or what trace convert reads, not on the synthetic ones."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Add a policy of your own to main and fairness: module:Class, or an installed one; repeatable."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=MOST_JOBS, help="Processes; as many as cores if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the names of what was written, not the report.")] = False,
) -> None:
    """Run the paper's experiments on the step simulator and print our figures beside the paper's.

    Example: balanceroute reproduce main scaling --quick --out /tmp/reproduction
    """
    import signal
    import sys

    from balanceroute.cli.given import given
    from balanceroute.cli.output import print_json, progress_bar
    from balanceroute.errors import InputError
    from balanceroute.experiments import Scope, figures, files_of
    from balanceroute.experiments import reproduce as run
    from balanceroute.experiments.reproduce import OPTIONS, check_read, keeps_runs
    from balanceroute.traces import load_trace
    from balanceroute.traces.source import check_read_again

    if not out:
        raise InputError("--out: an empty name; the folder for the report, . for this one")
    for option in OPTIONS:
        if given(context, option):
            check_read(experiments or [], option)
    if trace is not None:
        check_read_again(trace)  # by every process of the simulation
        # a bad file is named before anything runs
        load_trace(os.path.abspath(trace), on_note=partial(typer.echo, err=True))
    scope, folder = Scope.of(quick=quick, trace=trace, policies=tuple(policy or ())), Path(out)
    # as an exception, so that the processes of the simulation end with this one
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with progress_bar("simulating") as tell:
            text = run(experiments or [], scope, folder, n_processes=jobs, on_progress=tell)
    except KeyboardInterrupt:
        kept = "; what has ended is kept, and not run again" if keeps_runs(experiments or []) else ""
        typer.echo(f"balanceroute: interrupted before the report{kept}", err=True)
        raise
    if json:
        print_json({"written": [str(folder / file) for file in files_of(experiments or [], scope)]})
    else:
        typer.echo(text)
    if not figures.available():
        print(f"balanceroute: {figures.HOW_TO_GET_FIGURES}", file=sys.stderr)
