"""How commands print results: JSON for programs, one aligned table for people, progress on stderr."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from balanceroute.errors import InputError

INTERRUPTED = 130  # exit code of what a signal cut short
LINE_EVERY_S = 15.0  # between two lines of progress
WIDEST = 10_000  # characters of a table


def check_written(path: Path, *read: str | Path | None) -> None:
    """Raises: InputError: no file can be written there, which is said before the work whose result it would hold.

    An empty name is `.`, a folder. `read`: the files that the result is made of, which it must not replace.
    """
    if str(path) == "-":
        reason = "what is printed goes to standard output; accepted is a file"
    elif os.path.isdir(path):
        reason = "it is a folder"
    elif any(os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file) for file in read if file):
        reason = "it is the file that is read"
    elif not os.path.isdir(path.parent):
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        reason = "no permission"
    else:
        return
    raise InputError(f"{path}: cannot be written: {reason}")


def why(error: BaseException) -> str:
    """Why an HTTP client got no answer: what the system said, without the address that libraries put around it.

    Of TLS what the router's own health checks say.
    """
    import ssl

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            from balanceroute.proxy.workers.upstream import reason_of

            return reason_of(cause)
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def print_json(result: Any) -> None:
    """Print a result as JSON; NaN and infinity, which JSON lacks, become null."""
    typer.echo(json.dumps(without_nan(result), indent=2))


def without_nan(value: Any) -> Any:
    """The same nested value with non-finite numbers as `None`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nan(item) for item in value]
    return value


def print_fields(title: str, fields: Mapping[str, Any]) -> None:
    """Print named figures, one a line."""
    typer.echo(title)
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"  {name:<{width}}  {figure(value)}")


def figure(value: Any) -> str:
    """A number as people read it: thousands separated, four significant digits below one thousand."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def print_table(*parts: Any) -> None:
    """Print tables of `rich` and texts, with no cell cut off: part of a name names nothing.

    On a terminal that is too narrow lines are left out, then cells take several lines, at blanks if that is enough;
    elsewhere lines are as long as they need to be.
    """
    from rich.console import Console

    plain: dict[str, Any] = {
        "markup": False,
        "emoji": False,
        "highlight": False,
    }  # names are names, whatever is in them
    console = Console(**plain)
    console.width = console.width or 80  # COLUMNS=0 says nothing, and rich would print nothing
    for part in parts:
        if isinstance(part, str):
            console.print(part, soft_wrap=True)
            continue
        for column in part.columns:
            column.overflow = "fold"
        _, needed = widths(console, part)
        if console.is_terminal and needed > console.width:
            narrow(console, part)
        Console(width=console.width if console.is_terminal else needed, **plain).print(part)


def widths(console: Any, table: Any) -> tuple[int, int]:
    """How wide a table must be at least to break no word, and to break nothing."""
    from rich.measure import Measurement

    needed = Measurement.get(console, console.options.update(max_width=WIDEST), table)
    return needed.minimum, needed.maximum


def narrow(console: Any, table: Any) -> None:
    """Leave out what only separates, stack the words of the heads, and break no name if it fits like that."""
    from rich import box

    table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
    for column in table.columns:
        column.header = "\n".join(str(column.header).split())
    for between in (1, 0):
        table.padding = (0, between, 0, 0)
        least, _ = widths(console, table)
        if least <= console.width:
            for column in table.columns:
                column.no_wrap = not any(" " in str(cell) for cell in column.cells)
            return


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on stderr, called with (done, total): a bar on a terminal, elsewhere a line every `LINE_EVERY_S`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(description.strip())
        return
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class ProgressLines:
    """A line now and then, for a log; a command that is done sooner has none."""

    def __init__(self, description: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._description, self._clock = description, clock
        self._next_s = clock() + LINE_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        """Report progress."""
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + LINE_EVERY_S
            print(f"{self._description}: {done:,} of {total:,}", file=sys.stderr, flush=True)


@contextmanager
def stopped_by_signals() -> Iterator[Callable[[], bool]]:
    """Tells whether SIGINT or SIGTERM has come, so that a command can end with what it has; the next one ends it."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def note(number: int, frame: object) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        restore()
