"""`balanceroute check-config`: what a configuration file amounts to, or what is wrong with it."""

from pathlib import Path
from typing import Annotated

import typer


def check_config(
    file: Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, such as routing.policy=br_0."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the effective configuration of FILE, as `serve` would use it in this environment.

    Defaults are filled in, BALANCEROUTE_SECTION__KEY variables applied, secrets masked. A file that cannot be
    used ends in one line on standard error, with the key path and what is accepted, and exit code 2.

    Example: balanceroute check-config configs/4p1d.yaml --set routing.policy=br_0
    """
    import json
    import os

    from balanceroute.config import effective, effective_yaml, load, parse_assignment

    config = load(file, os.environ, dict(parse_assignment(text) for text in assignments or []))
    typer.echo(json.dumps(effective(config), indent=2) if as_json else effective_yaml(config), nl=as_json)
