"""How commands print results: JSON for programs, one aligned table for people, progress on stderr."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer


def print_json(result: Any) -> None:
    """Print a result as JSON with sorted structure kept as given; NaN, which JSON lacks, becomes null."""
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


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, told (done, total); nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
