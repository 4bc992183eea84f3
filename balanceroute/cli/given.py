"""Finds the options that a user gave, and refuses those without effect."""

import typer

from balanceroute.errors import InputError


def given(context: typer.Context, name: str) -> bool:
    """Whether this parameter of the command that runs was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(context: typer.Context, name: str, used: bool, needs: str) -> None:
    """Raises: InputError: the option is given, and nothing would read it. `needs`: when it would be read."""
    if not used and given(context, name):
        raise InputError(f"--{name.replace('_', '-')}: changes nothing here; it is read {needs}")
