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
    used, be it this one or one that it names (client keys, certificates), ends in one line on standard error, with
    the key path and what is accepted, and exit code 2.

    Example: balanceroute check-config configs/4p1d.yaml --set routing.policy=br_0
    """
    import os

    from balanceroute.config import effective_json, effective_yaml, load, parse_assignment
    from balanceroute.proxy.perimeter.gate import Perimeter
    from balanceroute.proxy.perimeter.tls import Tls

    config = load(file, os.environ, dict(parse_assignment(text) for text in assignments or []))
    Perimeter(config)
    Tls(config)
    typer.echo(effective_json(config) if as_json else effective_yaml(config), nl=as_json)
