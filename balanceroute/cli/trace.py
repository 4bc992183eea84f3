"""`balanceroute trace generate | convert | describe`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from balanceroute.cli import helping

if TYPE_CHECKING:
    from balanceroute.traces import Trace

SUMMARY = "Make, convert and look at request traces."
app = typer.Typer(no_args_is_help=True, help=SUMMARY, rich_markup_mode=None)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
OutFile = Annotated[
    Path, typer.Option("--out", "-o", help="CSV to write; compressed where the name ends in .gz or .xz.")
]


def generate(
    preset: Annotated[str, typer.Argument(help="heavy_tailed or capped.")],
    out: OutFile,
    rows: Annotated[int, typer.Option(min=1, max=10_000_000, help="Requests to draw.")] = 8000,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal bytes.")] = 0,
    load: Annotated[float, typer.Option(help="Arrival rate as a fraction of the cluster's ideal capacity.")] = 1.15,
    workers: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Decode workers of the cluster that --load refers to.")
    ] = 8,
    slots: Annotated[int, typer.Option(min=1, max=1_000_000, help="Slots per worker.")] = 64,
    step_cost: Annotated[float, typer.Option(help="Seconds per KV token of the fullest worker.")] = 1.2e-7,
    step_overhead: Annotated[float, typer.Option(help="Seconds per step whatever the load.")] = 0.025,
    json: JsonFlag = False,
) -> None:
    """Draw a synthetic trace.

    Example: balanceroute trace generate heavy_tailed --load 0.9 --seed 7 --out day.csv.gz
    """
    from balanceroute.cli.output import check_written
    from balanceroute.traces import ReferenceSetting, generate_trace, write_trace

    check_written(out)
    setting = ReferenceSetting(workers, slots, step_cost, step_overhead)
    trace = generate_trace(preset, rows=rows, seed=seed, load=load, setting=setting)
    write_trace(trace, out)
    show(trace, out, json=json)


def convert(
    source: Annotated[Path, typer.Argument(help="Original file, possibly .gz or .xz; - is standard input.")],
    out: OutFile,
    format: Annotated[str, typer.Option(help="auto, azure, mooncake, bailian, burstgpt, router or vllm.")] = "auto",
    jitter: Annotated[
        float, typer.Option(min=0, help="Spread arrivals at random over so many seconds, where stamps are rounded.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jitter.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Convert an Azure 2023/2024, Mooncake, Bailian or BurstGPT trace, this router's JSON log or vLLM's request log.

    Logs also as kubectl, docker or journald print them, or the files of docker and of /var/log/pods.

    Example: balanceroute trace convert router.log --out day.csv.gz && balanceroute replay --trace day.csv.gz --compare
    """
    from balanceroute.cli.output import check_written
    from balanceroute.traces import convert_trace, write_trace

    check_written(out, source)
    result = convert_trace(source, format, jitter_s=jitter, seed=seed)
    write_trace(result.trace, out)
    for note in result.notes:
        typer.echo(note, err=True)
    show(result.trace, out, json=json)


def describe(
    trace: Annotated[Path, typer.Argument(help="A trace, a preset, or whatever convert reads; - is standard input.")],
    json: JsonFlag = False,
) -> None:
    """Print rates, moments and quantiles of a trace.

    reference_capacity_per_s: requests per second that 8 workers of 64 slots would finish, always full and level;
    reference_load: the trace's rate as a share of that. `balanceroute replay --load` takes a cluster of your size.

    Example: balanceroute trace describe day.csv.gz
    """
    from balanceroute.traces import load_trace

    show(load_trace(str(trace), on_note=partial(typer.echo, err=True)), trace, json=json)


def show(trace: "Trace", path: Path, *, json: bool) -> None:
    """Print what is in a trace file, and the load it means for the reference cluster."""
    from dataclasses import asdict

    from balanceroute.cli.output import print_fields, print_json
    from balanceroute.traces import describe_trace, ideal_capacity

    summary = asdict(describe_trace(trace))
    capacity = ideal_capacity(trace)
    summary |= {"reference_capacity_per_s": capacity, "reference_load": summary["rate_per_s"] / capacity}
    if json:
        print_json(summary)
    else:
        print_fields(str(path), summary)


for command in (generate, convert, describe):
    helping.add(app, command)
