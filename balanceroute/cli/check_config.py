"""`balanceroute check-config`: what a configuration file amounts to, or all that is wrong with it."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from balanceroute.cli.probe import Answer
    from balanceroute.config import Config


def check_config(
    file: Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, such as routing.policy=br_0."),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--probe", help="Ask every worker for its health, models, metrics, role and slots; compute nothing."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the effective configuration of FILE, as `serve` would use it in this environment.

    Defaults are filled in, BALANCEROUTE_SECTION__KEY variables applied, secrets masked. What is wrong is said on
    standard error, a line each with the key path and what is accepted, and ends in exit code 2: in the file, the
    variables, and the files that it names (client keys, certificates, predictor.model); then between settings, once
    each is valid by itself. Nothing is written.

    With --probe what the workers say is printed instead; exit code 1 if anything is wrong with one.

    Example: balanceroute check-config configs/4p1d.yaml --set routing.policy=br_0
    """
    from balanceroute.config import (
        assumptions,
        effective_json,
        effective_yaml,
        load,
        load_sections,
        parse_assignment,
        unused_variables,
    )
    from balanceroute.errors import ConfigError

    for text in unused_variables(os.environ):
        typer.echo(f"warning: {text}", err=True)
    overrides = dict(parse_assignment(text) for text in assignments or [])
    try:
        config = load_without_threads(lambda: load(file, os.environ, overrides))
    except ConfigError as error:
        beside = load_sections(
            file, os.environ, overrides, ("listen", "auth", "metrics", "tls", "predictor", "lifecycle")
        )
        raise ConfigError(*error.problems, *file_problems(beside, model_too=False)) from None
    if wrong := file_problems(config):
        raise ConfigError(*wrong)
    for text in assumptions(config):
        typer.echo(f"warning: {text}", err=True)
    if ask:
        show_probe(config, as_json=as_json)
    else:
        typer.echo(effective_json(config) if as_json else effective_yaml(config), nl=as_json)


def load_without_threads(load: "Callable[[], Config]") -> "Config":
    """The configuration that `load` reads, unless it has relays and a class that it names has started a thread.

    Raises: ConfigError.
    """
    import threading

    from balanceroute.errors import ConfigError

    threads_before = threading.active_count()
    config = load()
    if config.listen.relays and threading.active_count() > threads_before:
        raise ConfigError(
            "routing.policy, predictor.kind: a class of your own starts a thread when it is imported, or a policy when "
            "it is made; the processes of listen.relays would not have it: start it when it is first needed"
        )
    return config


def file_problems(config: "Config", *, model_too: bool = True) -> list[str]:
    """Look at every file that the configuration names, and with `model_too` into the predictor's model."""
    from balanceroute.errors import ConfigError, InputError
    from balanceroute.proxy.perimeter.perimeter import Perimeter
    from balanceroute.proxy.perimeter.tls import Tls

    try:
        check_files(config)
    except ConfigError as error:
        return list(error.problems)  # to read a pipe may take for ever
    problems: list[str] = []
    checks: list[Callable[[Config], object]] = [Perimeter, Tls, check_paths]
    if model_too:
        checks.append(check_model)
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
        except InputError as error:
            problems.append(str(error))
    return problems


def check_paths(config: "Config") -> None:
    """The predictor's model is there, its history and the record of pinned KV have folders. Raises: ConfigError."""
    from balanceroute.errors import ConfigError

    paths = {
        "predictor.model": config.predictor.model,
        "predictor.history": config.predictor.history,
        "lifecycle.pins_file": config.lifecycle.pins_file,
    }
    wrong = {key: _wrong_path(key, Path(path)) for key, path in paths.items() if path is not None}
    if problems := [f"{key} = {paths[key]!r}: {text}" for key, text in wrong.items() if text]:
        raise ConfigError(*problems)


def _wrong_path(key: str, path: Path) -> str:
    try:
        if key == "predictor.model":
            return "" if path.is_file() else "there is no such file"
        if path.is_dir():
            return "is a folder; accepted is a file"
        return "" if path.parent.is_dir() else "its folder does not exist; make it first"
    except OSError as error:  # a folder on the way that this user may not search
        return error.strerror or str(error)


def check_files(config: "Config") -> None:
    """Files that are read again while the router serves can be, and answer. Raises: ConfigError: one is a pipe."""
    from balanceroute.errors import ConfigError

    files = {f"tls.{key}": file for key, file in config.tls.model_dump().items()}
    files |= {"auth.client_keys": config.auth.client_keys, "predictor.model": config.predictor.model}
    problems: list[str] = []
    for key, file in files.items():
        if file is None:
            continue
        with suppress(OSError):  # its reader reports what is wrong
            if Path(file).is_fifo():
                problems.append(f"{key} = {file!r}: is a pipe, which can't be read again; accepted is a file")
            elif Path(file).is_file():
                with Path(file).open("rb") as opened:
                    opened.read(1)
    if problems:
        raise ConfigError(*problems)


def check_model(config: "Config") -> None:
    """Check that the predictor's model can be read and has its kind and horizon; that a user's own predictor can be
    made.

    Raises: ConfigError, InputError.
    """
    from balanceroute.prediction import build_predictor

    chosen, horizon = config.predictor, config.routing.horizon_steps
    if chosen.of_ones_own or (chosen.model is not None and os.path.isfile(chosen.model)):  # False where none may look
        build_predictor(chosen.kind, horizon, model=chosen.model, options=chosen.options)


def show_probe(config: "Config", *, as_json: bool) -> None:
    """Ask the workers and print what they say; exit code 1 if something is wrong."""
    import asyncio
    from dataclasses import asdict

    from balanceroute.cli.output import print_json
    from balanceroute.cli.probe import not_compared, probe

    answers = asyncio.run(probe(config))
    wrong = [f"{answer.worker}: {text}" for answer in answers for text in answer.problems]
    if as_json:
        workers = [asdict(answer) for answer in answers]
        print_json({"workers": workers, "not_compared": not_compared(answers), "ok": not wrong})
    else:
        show_answers(answers)
        for text in wrong:
            typer.echo(text)
        typer.echo(verdict(answers, len(wrong)))
    if wrong:
        raise typer.Exit(1)


def verdict(answers: "list[Answer]", problems: int) -> str:
    """The last line: the workers asked, the problems, and what could not be compared."""
    from balanceroute.cli.probe import not_compared

    count = len(answers)
    wrong = {0: "no problem found", 1: "1 problem"}.get(problems, f"{problems} problems")
    found = f"{count} workers asked, {wrong}"
    unknown = [f"{name} ({', '.join(workers)})" for name, workers in not_compared(answers).items()]
    if not unknown:
        return found
    return f"{found}; not compared, as workers do not tell: {', '.join(unknown)}; see VLLM_SERVER_DEV_MODE=1 in vLLM"


def show_answers(answers: "list[Answer]") -> None:
    """A table, a row per worker."""
    from rich.table import Table

    from balanceroute.cli.output import print_table

    def cell(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "unknown" if value is None else str(value)

    names = ("worker", "tier", "healthy", "models", "reports load", "prefix caching", "max_num_seqs", "kv_role")
    table = Table(*names)
    for a in answers:
        models = ", ".join(a.models) or None
        cells = (a.healthy, models, a.reports_load, a.prefix_caching, a.max_num_seqs, a.kv_role)
        table.add_row(a.worker, a.role, *map(cell, cells))
    print_table(table)
