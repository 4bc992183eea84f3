"""`balanceroute serve`: the router."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from balanceroute.errors import InputError

if TYPE_CHECKING:
    from balanceroute.config import Config


# flags of other example proxies, and why they are not taken
_OF_OTHERS = (
    dict.fromkeys(
        ("--prefiller-hosts-num", "--prefiller-ports-inc", "--decoder-hosts-num", "--decoder-ports-inc"),
        "name every server, by --prefiller-hosts, --prefiller-ports, --decoder-hosts and --decoder-ports",
    )
    | dict.fromkeys(
        ("--encoder-hosts", "--encoder-ports", "--pd-hosts", "--pd-ports", "--encode-servers-urls"),
        "encoders are not served; it is a flag of the proxies for encoders apart from prefillers (EPD)",
    )
    | dict.fromkeys(
        ("--dp-hosts", "--dp-ports", "--server-hosts", "--server-ports"),
        "it is a flag of a proxy for servers that prefill and decode; here these are apart",
    )
)


def serve(
    config_files: Annotated[
        list[Path] | None, typer.Option("--config", metavar="FILE", help="The YAML; flags override what it says.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one setting, such as pool.max_entries=64; repeatable."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="routing.policy: which request goes to which decode worker; level_fit unless set."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="listen.host: 127.0.0.1 unless set; 0.0.0.0 to be reached from other machines."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="listen.port: 8000 unless set; 0 lets the system choose.")] = None,
    prefiller_hosts: Annotated[list[str] | None, typer.Option(help="Host of each prefiller.")] = None,
    prefiller_ports: Annotated[
        list[int] | None, typer.Option(help="Port of each prefiller, in the order of the hosts; 8001 if left out.")
    ] = None,
    decoder_hosts: Annotated[list[str] | None, typer.Option(help="Host of each decode worker (DP rank).")] = None,
    decoder_ports: Annotated[
        list[int] | None, typer.Option(help="Port of each decode worker, in the order of the hosts; 8002 if left out.")
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option(help="The engines' KV connector: mooncake_v1 (unless set), nixl or mooncake_layerwise."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="decode.max_num_seqs: the engines' own --max-num-seqs, per DP rank; 64 unless set."),
    ] = None,
    max_retries: Annotated[
        int | None, typer.Option(help="retry.max_attempts: most failed tries of a request per tier; 3 unless set.")
    ] = None,
    retry_delay: Annotated[
        float | None,
        typer.Option(help="retry.base_delay_s: longest delay before the second try, doubled from try to try."),
    ] = None,
    max_waiting_retries: Annotated[
        int | None,
        typer.Option(
            help="lifecycle.join_attempts: how often a worker added at run time is asked whether it is ready."
        ),
    ] = None,
    waiting_retry_interval: Annotated[
        float | None, typer.Option(help="lifecycle.join_interval_s: seconds from one of these to the next.")
    ] = None,
    relays: Annotated[
        int | None, typer.Option(help="listen.relays: processes for clients and streams; 0 is one process for all.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="The example proxy's name for --relays; 1 is one process for all.")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every decision to FILE, begun anew, for `explain --journal FILE`."),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="With relays: take over from the router that runs on this port or in this run folder, if one does, "
            "without a failed request.",
        ),
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error or critical.")] = None,
) -> None:
    """Run the router: requests over prefillers and decode workers, until SIGTERM.

    SIGTERM and Ctrl-C let running requests finish; SIGHUP reads the configuration again. The log goes to standard
    error. The flags of vllm-ascend's example proxy work as they are, with several values after one flag.

    Example: balanceroute serve --config configs/4p1d.yaml --policy br_h
    """
    import logging
    import os
    from functools import partial

    from balanceroute.build import predicts
    from balanceroute.cli.check_config import check_files, check_model, check_paths, load_without_threads
    from balanceroute.config import (
        assumptions,
        from_example_flags,
        load,
        parse_assignment,
        unused_variables,
    )
    from balanceroute.config.patience import in_time
    from balanceroute.errors import ConfigError
    from balanceroute.proxy.client.descriptors import raise_limit
    from balanceroute.proxy.perimeter.perimeter import exposures
    from balanceroute.proxy.telemetry.logs import configure

    if config_files and len(config_files) > 1:
        raise InputError("--config: accepted is one file; --set overrides single settings")
    config_file = config_files[0] if config_files else None
    if workers is not None and relays is not None:
        raise InputError(f"--workers {workers}, --relays {relays}: two names of one setting; give one")
    overrides: dict[str, object] = dict(parse_assignment(text) for text in assignments or [])
    overrides |= from_example_flags(
        host=host,
        port=port,
        prefiller_hosts=prefiller_hosts,
        prefiller_ports=prefiller_ports,
        decoder_hosts=decoder_hosts,
        decoder_ports=decoder_ports,
        max_retries=max_retries,
        retry_delay=retry_delay,
        max_waiting_retries=max_waiting_retries,
        waiting_retry_interval=waiting_retry_interval,
        workers=workers,
        log_level=log_level,
    )
    for key, value in (
        ("routing.policy", policy),
        ("connector", connector),
        ("listen.relays", relays),
        ("decode.max_num_seqs", max_num_seqs),
    ):
        if value is not None:
            overrides[key] = value
    config = load_without_threads(lambda: load(config_file, os.environ, overrides))
    check_paths(config)
    check_files(config)
    configure(config.log.level, config.log.format)
    for text in (*unused_variables(os.environ), *assumptions(config), *exposures(config)):
        logging.getLogger(__name__).warning(text)
    raise_limit()

    def read() -> "Config":
        again = load(config_file, os.environ, overrides)
        check_files(again)
        return again

    def read_again() -> "Config":
        return in_time(read, f"{config_file or 'the configuration'}, or a file that it names")

    if journal is not None:
        journal = _checked_journal(journal, config, config_file)
    if config.listen.relays:
        from balanceroute.proxy.parent.supervisor import try_apart
        from balanceroute.proxy.processes import serve_processes

        if predicts(config) and not config.listen.brains:
            try_apart(partial(check_model, config))  # one line here, instead of a brain that dies
        raise typer.Exit(serve_processes(config, read_again, journal, take_over))
    if take_over:
        raise ConfigError("--take-over: needs listen.relays; a router in one process can't be taken over")
    serve_alone(config, read_again, journal)


def _checked_journal(journal: Path, config: "Config", config_file: Path | None) -> Path:
    """The path of the journal without links. Raises: ConfigError, InputError: it can't be written, or not here."""
    import os

    from balanceroute.cli.output import check_written
    from balanceroute.errors import ConfigError
    from balanceroute.journal import check_replaceable

    if config.listen.brains:
        raise ConfigError("--journal: no brain runs here (listen.brains), so there is nothing to write; give it there")
    check_written(journal, config_file)
    if os.path.exists(journal) and not os.path.isfile(journal):  # pathlib would raise for a name that is too long
        raise InputError(f"{journal}: cannot be written: accepted is a file")
    check_replaceable(journal)
    return Path(os.path.realpath(journal))  # made anew with relays; a link to it, such as /dev/stdout, stays


def serve_alone(config: "Config", read_again: "Callable[[], Config]", journal: Path | None) -> None:
    """Run the router in one process. Raises: ConfigError, InputError: a file of the configuration is wrong."""
    import asyncio

    from balanceroute.proxy.admission.forecasts import build_forecasts
    from balanceroute.proxy.app import create_app
    from balanceroute.proxy.client.descriptors import warn_if_few
    from balanceroute.proxy.reload import reload
    from balanceroute.proxy.server import serve as run
    from balanceroute.proxy.telemetry.logs import configure

    async def on_reload() -> None:
        new = await asyncio.to_thread(read_again)
        async with app.services.changing:
            await reload(app.services, new)
        configure(new.log.level, new.log.format)

    # read before the loop runs: a wrong model file is one line, and a long history delays no request
    forecasts = build_forecasts(config)
    app = create_app(config, journal=journal, forecasts=forecasts)
    warn_if_few(config)
    run(app, config, on_reload)


def spread_lists(arguments: list[str]) -> list[str]:
    """Let a list flag take several values, as argparse does: `--decoder-ports 1 2` -> one flag per value.

    Without its last letter it is the same flag: argparse takes what begins one, and vLLM's example names both.
    Raises: InputError: another option stands where a value should, or the flag is one of a proxy of another kind.
    """
    lists = {
        name: flag
        for flag in ("--prefiller-hosts", "--prefiller-ports", "--decoder-hosts", "--decoder-ports")
        for name in (flag, flag.removesuffix("s"))
    }
    spread: list[str] = []
    flag: str | None = None
    fresh = False
    for argument in arguments:
        if fresh and argument.startswith("-"):
            raise InputError(f"{flag}: no value after it")
        name, equals, value = argument.partition("=")
        if name in _OF_OTHERS:
            raise InputError(f"{name}: {_OF_OTHERS[name]}")
        if name in lists:
            flag, fresh = (None, False) if equals else (lists[name], True)
            spread.append(f"{lists[name]}{equals}{value}")
        elif argument.startswith("-") or flag is None:
            flag = None
            spread.append(argument)
        else:
            spread += [argument] if fresh else [flag, argument]
            fresh = False
    return spread
