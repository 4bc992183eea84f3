"""`--help` of the commands: types in words, and summaries that are not cut off."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

Function = TypeVar("Function", bound=Callable[..., Any])

METAVARS = {int: "N", float: "NUMBER", Path: "FILE", str: "TEXT"}

EXIT_CODES = """Exit codes: 0 done; 1 done, and the answer is no (an answer that was not complete, a worker that is not
as it should be, a journal that differs), or the output cannot be written; 2 the command line, a setting or a file is
wrong, as standard error says; 130 interrupted, what there was until then is printed."""


def add(app: typer.Typer, function: Function, name: str | None = None) -> Function:
    """Make the function a command of the app, its help readable."""
    name_values(function)
    return app.command(name, cls=Command, help=long_help(function), short_help=summary(function))(function)


MEANT = {"serve": "--config", "replay": "--trace"}
"""The option of a command that a name without one is most likely meant for."""


class Command(TyperCommand):
    """A command whose help names its arguments alone, without the names of Python's types."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """See typer; an argument too many is named with the option that it may be meant for."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            option = MEANT.get(str(self.name))
            hint = f"; did you mean {option} {rest[0]}?" if option and rest[0].isprintable() else ""
            ctx.fail(f"Unexpected argument {rest[0]!r}{hint}")
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what is said of arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                of_argument = parameter.param_type_name == "argument"
                named = (record[0].partition(" <")[0], record[1]) if of_argument else record
                sections["Arguments" if of_argument else "Options"].append(named)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def name_values(function: Callable[..., Any]) -> None:
    """Give each option and argument that has none a word for its value, in place of the name of a Python type."""
    for name, annotation in get_type_hints(function, include_extras=True).items():
        kind, *described = get_args(annotation) or (annotation,)
        for info in described:
            if isinstance(info, ArgumentInfo) and info.metavar is None:
                info.metavar = name.upper()
            elif isinstance(info, OptionInfo) and info.metavar is None:
                info.metavar = metavar_of(kind)


def metavar_of(kind: Any) -> str | None:
    """The word for a value of this type, of a list or an optional one of it; None for a flag."""
    candidates = [kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))]
    return next((METAVARS[each] for each in candidates if each in METAVARS), None)


def long_help(function: Callable[..., Any]) -> str:
    """A command's docstring as help, with each example on one line, to be copied."""
    return "\n\n".join(
        f"\b\n{paragraph}" if paragraph.startswith("Example:") else paragraph for paragraph in paragraphs(function)
    )


def summary(function: Callable[..., Any]) -> str:
    """The first paragraph of that, whole."""
    return paragraphs(function)[0]


def paragraphs(function: Callable[..., Any]) -> list[str]:
    """The docstring, a line per paragraph."""
    return [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(function) or "").split("\n\n")]
