"""The command line: one module per command; this one composes them and turns errors into one line.

Commands import what they need inside their function, so that `--help` and a typo cost no heavy import.
"""

import sys
from typing import Annotated

import typer

from balanceroute import __version__
from balanceroute.cli import trace
from balanceroute.cli.check_config import check_config
from balanceroute.cli.explain import explain
from balanceroute.cli.load import load
from balanceroute.errors import BalanceRouteError

app = typer.Typer(
    name="balanceroute",
    help="A load-balancing router for disaggregated LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(trace.app, name="trace")
app.command()(load)
app.command()(explain)


def show_version(wanted: bool) -> None:
    """Print the version and stop, when asked to."""
    if wanted:
        typer.echo(f"balanceroute {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keep the decode workers level: `balanceroute demo` shows it in two minutes."""


app.command("check-config")(check_config)


def main() -> None:
    """Run the command line; a deliberate error is one clear line and exit code 2."""
    try:
        app()
    except BalanceRouteError as error:
        print(f"balanceroute: {error}", file=sys.stderr)
        sys.exit(2)
