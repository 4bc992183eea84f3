"""The command line: one module per command; this one composes them and turns errors into one line.

Commands import what they need inside their function, so that `--help` and a typo cost no heavy import.
"""

import errno
import io
import logging
import os
import re
import sys
from typing import Annotated, Any

import typer

from balanceroute import __version__
from balanceroute.cli import helping, predictor, trace
from balanceroute.cli.check_config import check_config
from balanceroute.cli.decisions import decisions
from balanceroute.cli.demo import demo
from balanceroute.cli.emulate import emulate
from balanceroute.cli.explain import explain
from balanceroute.cli.key import key
from balanceroute.cli.load import load
from balanceroute.cli.replay import replay
from balanceroute.cli.reproduce import reproduce
from balanceroute.cli.serve import serve, spread_lists
from balanceroute.cli.steps import steps
from balanceroute.errors import BalanceRouteError, ConfigError

# what typer raises for a flag it cannot use; newer versions bring a click of their own, so that it has no
# public name
USAGE_ERROR: Any = typer.BadParameter.__base__
# what a write fails with; a pipe whose reader is gone (EPIPE) ends the command in silence, which typer sees to
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

app = typer.Typer(
    name="balanceroute",
    help="A load-balancing router for disaggregated LLM serving.",
    epilog=helping.EXIT_CODES,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (serve, demo, emulate, replay, reproduce, load):
    helping.add(app, command)
app.add_typer(trace.app, name="trace", short_help=trace.SUMMARY)
app.add_typer(predictor.app, name="predictor", short_help=predictor.SUMMARY)
helping.add(app, steps)
helping.add(app, explain)
helping.add(app, decisions)
helping.add(app, check_config, "check-config")
helping.add(app, key)


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
    """Keep the decode workers level: `balanceroute demo` shows it in four minutes."""


def main() -> None:
    """Run the command line; a deliberate error is one clear line and exit code 2, output that cannot be written 1.

    Of a configuration all that is wrong is said, a line each.
    """
    _fill_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # the name of a file may be no text in its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(spread_lists(sys.argv[1:]), standalone_mode=False)
    except BalanceRouteError as error:
        logging.shutdown()  # its lines come before the last words
        for line in error.problems if isinstance(error, ConfigError) else (error,):
            print(f"balanceroute: {_on_one_line(str(line))}", file=sys.stderr)
        sys.exit(2)
    except USAGE_ERROR as error:  # typer's own report is a box of many lines
        text = error.format_message()  # one line; when nothing was asked for the help, or nothing once that is printed
        if (cause := getattr(error.__cause__, "errors", None)) is not None:  # pydantic's: newer typer names no value
            text += f": {cause()[0]['input']!r:.80}"
        if text:
            print(text if "\n" in text else f"balanceroute: {text}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in UNWRITABLE and not isinstance(error, io.UnsupportedOperation):
            raise
        print(f"balanceroute: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        # the rest of the buffer would fail again at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)
    sys.exit(status or 0)


def _on_one_line(text: str) -> str:
    """A message whose values (names of files) may hold line breaks, or what controls a terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: ascii(found[0])[1:-1], text)


def _fill_standard_streams() -> None:
    """Open what the caller has closed of standard input, output and error, before a socket gets its number.

    uvloop aborts the process when it closes one of those. Who prints hears of a closed output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it is the lowest free one, which is the one that is opened
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY), True)
    if sys.stdout is None:
        sys.stdout = open(1, closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
