"""`balanceroute steps`."""

from pathlib import Path
from typing import Annotated

import typer


def steps(
    files: Annotated[
        list[Path], typer.Argument(help="Step logs of the engine, possibly .gz, one per DP rank.", show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find what an engine's step costs per KV token and per request, and each worker's slowdown, from its step logs.

    Example: BALANCEROUTE_STEP_LOG=logs vllm serve ...; balanceroute steps logs/steps-dp*.csv
    """
    from balanceroute.cli.output import print_json
    from balanceroute.instrumentation.reading import summarise
    from balanceroute.instrumentation.text import text_of

    summary = summarise(files)
    if json:
        print_json(summary.as_dict())
    else:
        typer.echo(text_of(summary))
