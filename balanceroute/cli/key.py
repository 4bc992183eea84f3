"""`balanceroute key`: a new client key, and its entry for the file of keys."""

import sys
from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in the log.", show_default=False)],
    max_in_flight: Annotated[int | None, typer.Option(help="Most requests under way at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Most tokens per minute, prompts included.")] = None,
    priority: Annotated[
        tuple[int, int] | None, typer.Option(metavar="MIN MAX", help="Bounds of `priority` in its requests.")
    ] = None,
    existing: Annotated[bool, typer.Option("--stdin", help="Hash a key from standard input, make none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print key and entry as JSON.")] = False,
) -> None:
    """Make a client key: the key goes to standard error, once, its entry for auth.client_keys to standard output.

    The router keeps the hash alone; the key can't be read back from it. The file is a list of entries.

    Example: balanceroute key search-team --max-in-flight 32 >> keys.yaml
    """
    from pydantic import ValidationError

    from balanceroute.cli.output import print_json
    from balanceroute.config import KeyEntry, digest_of, new_key, to_yaml
    from balanceroute.config.client_keys import problem_of_entry

    if existing:
        text = sys.stdin.readline().strip()
        if len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text:
            raise typer.BadParameter("the key on standard input must be 16 or more ASCII characters without spaces")
        secret, digest = None, digest_of(text.encode()).hex()
    else:
        secret, digest = new_key()
    entry = {
        "name": name,
        "sha256": digest,
        "priority": None if priority is None else {"min": priority[0], "max": priority[1]},
        "max_in_flight": max_in_flight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    entry = {field: value for field, value in entry.items() if value is not None}
    try:
        KeyEntry.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise typer.BadParameter(f"{'.'.join(map(str, first['loc']))}: {problem_of_entry(first)}") from None
    if as_json:
        print_json({"key": secret, "entry": entry})
        return
    typer.echo(to_yaml([entry]), nl=False)
    if secret is not None:  # once its entry is written: a key that is in no file would be given away
        typer.echo(f"The key of {name}, shown this once: {secret}", err=True)
