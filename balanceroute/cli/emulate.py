"""`balanceroute emulate`: a cluster to try the router on, without an NPU."""

import contextlib
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from balanceroute.core.bounds import MOST_SLOTS
from balanceroute.core.knobs import DAY_S, DEFAULTS

if TYPE_CHECKING:
    from balanceroute.emulator import ClusterShape, EmulatedCluster, ProcessCluster

DECODE_PORT_OFFSET = 100
LAST_PORT = 65_535
MOST_BLOCKS = 10_000_000  # each takes 40 bytes
Member = TypeVar("Member", bound=StrEnum)


def emulate(
    prefill: Annotated[int, typer.Option(min=1, max=DECODE_PORT_OFFSET, help="Prefillers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode ranks; they wait for each other after every step.")] = 8,
    base_port: Annotated[
        int, typer.Option(min=1, max=65_000, help="First prefiller's port; decode ranks start 100 above.")
    ] = 9000,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=MOST_SLOTS, help="Slots of a decode rank (B).")] = 64,
    write_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a configuration that `serve` takes as it is.")
    ] = None,
    listen_port: Annotated[
        int, typer.Option(min=0, max=LAST_PORT, help="The router's port in that configuration.")
    ] = 8000,
    time_scale: Annotated[float, typer.Option(help="Real seconds per modelled second; 0.1 runs fast.")] = 1.0,
    connector: Annotated[
        str, typer.Option(help="How KV travels: mooncake_v1, nixl or mooncake_layerwise.")
    ] = "mooncake_v1",
    step_cost: Annotated[float, typer.Option(help="a: seconds of a step per KV token of the fullest rank.")] = 1.2e-7,
    step_overhead: Annotated[float, typer.Option(help="b: seconds of a step whatever the load.")] = 0.025,
    kv_blocks: Annotated[int, typer.Option(min=1, max=MOST_BLOCKS, help="KV blocks of a decode rank.")] = 4096,
    prefill_kv_blocks: Annotated[int, typer.Option(min=1, max=MOST_BLOCKS, help="KV blocks of a prefiller.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 128,
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens per second of a prefiller.")] = 50_000.0,
    transfer: Annotated[float, typer.Option(help="Seconds of a KV transfer, whatever its size.")] = 0.005,
    transfer_per_token: Annotated[
        float, typer.Option(help="Seconds that a KV transfer takes longer per token.")
    ] = 1e-6,
    transfers_beside_full: Annotated[
        bool, typer.Option(help="Whether decode ranks begin transfers while all slots are in use; vLLM does not.")
    ] = False,
    lease: Annotated[
        float | None,
        typer.Option(help="Seconds for which a prefiller keeps KV that nobody pulls; the connector's own unless set."),
    ] = None,
    preemption: Annotated[
        str,
        typer.Option(
            help="What a decode rank out of KV blocks does with its last request: pop_last gives it back to the "
            "router, as vllm-ascend's recompute scheduler does; recompute_locally computes it again."
        ),
    ] = "pop_last",
    output_lengths: Annotated[
        str,
        typer.Option(
            help="Length of answers: max_tokens, fixed:N, uniform:LOW,HIGH, geometric:MEAN, lognormal:MEDIAN,SIGMA."
        ),
    ] = "max_tokens",
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per stream chunk.")] = 1,
    prefix_caching: Annotated[
        bool, typer.Option(help="Whether prefillers cache prompts and skip what they have of one.")
    ] = False,
    prompt_tokens_details: Annotated[
        bool, typer.Option(help="Whether a prefiller's answers say how many tokens of the prompt it had.")
    ] = False,
    ranks_per_url: Annotated[int, typer.Option(min=1, max=4096, help="Decode ranks behind one URL.")] = 1,
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Cut the decode ranks into so many processes of equal size, each with a barrier of its own, beside a"
            " process per prefiller; as many as ranks makes them independent. 0: one process, one barrier.",
        ),
    ] = 0,
    max_model_len: Annotated[int, typer.Option(min=2, help="Longest context, tokens.")] = 32_768,
    model: Annotated[str, typer.Option(help="Model name that is served.")] = "emulated",
    seed: Annotated[int, typer.Option(help="Seed of the output lengths.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Run prefillers and decode ranks that speak vLLM's HTTP, until SIGTERM or SIGINT.

    GET /_emulator/state of any of them tells what every worker holds; POST /_emulator/fault breaks things. With
    --processes they are on the port below --base-port, and sigstop, sigcont, sigkill and respawn are faults, too.

    Example: balanceroute emulate --prefill 2 --decode 8 --base-port 9000 --write-config cluster.yaml
    """
    from balanceroute.emulator import ClusterShape, Connector
    from balanceroute.engine import OutputLengths, Preemption, StepTimeModel
    from balanceroute.errors import ConfigError

    for flag, value, least, most in (
        ("--time-scale", time_scale, 0.001, 1000),
        ("--prefill-rate", prefill_rate, 1, 1_000_000_000),
        ("--lease", lease, 0.001, DAY_S),
        ("--transfer", transfer, 0, DAY_S),
        ("--transfer-per-token", transfer_per_token, 0, 1),
        ("--step-cost", step_cost, 0, 1),
        ("--step-overhead", step_overhead, 0, DAY_S),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag} {value:g}: accepted is a number from {least:g} to {most}")
    shape = ClusterShape(
        prefillers=prefill,
        decoders=decode,
        ranks_per_url=ranks_per_url,
        max_num_seqs=max_num_seqs,
        connector=named(Connector, connector, "--connector"),
        model=model,
        max_model_len=max_model_len,
        step_time=StepTimeModel(step_cost, step_overhead),
        block_size=block_size,
        decode_blocks=kv_blocks,
        prefill_blocks=prefill_kv_blocks,
        prefill_tokens_per_s=prefill_rate,
        transfer_s=transfer,
        transfer_s_per_token=transfer_per_token,
        transfers_beside_full=transfers_beside_full,
        lease_s=lease,
        preemption=named(Preemption, preemption, "--preemption"),
        lengths=OutputLengths.parse(output_lengths, seed),
        stream_interval=stream_interval,
        prefix_caching=prefix_caching,
        prompt_tokens_details=prompt_tokens_details,
        time_scale=time_scale,
    )
    run(shape, host, base_port, write_config, listen_port, processes)


def named(kind: type[Member], text: str, flag: str) -> Member:
    """The member of an enumeration that a flag names. Raises: ConfigError."""
    from balanceroute.errors import ConfigError

    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: accepted is {', '.join(kind)}") from error


def run(
    shape: "ClusterShape", host: str, base_port: int, write_config: Path | None, listen_port: int, processes: int = 0
) -> None:
    """Serve the cluster until a signal comes; the configuration is written before the ready line."""
    import asyncio

    import uvloop

    from balanceroute.cli.output import INTERRUPTED
    from balanceroute.emulator import EmulatedCluster, ProcessCluster
    from balanceroute.emulator.processes import members_of
    from balanceroute.errors import ConfigError

    urls = shape.decoders // shape.ranks_per_url
    first_decode = base_port + DECODE_PORT_OFFSET
    prefill_ports = range(base_port, base_port + shape.prefillers)
    decode_ports = range(first_decode, first_decode + urls)
    if decode_ports[-1] > LAST_PORT:
        raise ConfigError(f"--base-port {base_port}: the last decode rank's port would be {decode_ports[-1]}")
    cluster: EmulatedCluster | ProcessCluster
    if processes:
        if base_port == 1:
            raise ConfigError("--base-port 1: with --processes the port below it is needed, too")
        members = members_of(shape, processes, host, prefill_ports, decode_ports)
        cluster = ProcessCluster(shape, members, host, base_port - 1)
    else:
        cluster = EmulatedCluster(shape, host=host, prefill_ports=prefill_ports, decode_ports=decode_ports)

    async def serve() -> None:
        async with running(cluster) as stopped:
            if write_config is not None:
                write_yaml(write_config, configuration(cluster, listen_port))
            typer.echo(
                f"emulating {shape.prefillers} prefillers on {cluster.prefill_urls[0]} and {shape.decoders} decode"
                f" ranks on {cluster.decode_urls[0]} onward"
            )
            await stopped.wait()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None


@contextlib.asynccontextmanager
async def running(cluster: "EmulatedCluster | ProcessCluster") -> AsyncIterator[Any]:
    """The cluster, and an event that SIGTERM and SIGINT set; while it starts they cancel this task."""
    import asyncio
    import signal

    stopped, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    async with cluster:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        yield stopped


def configuration(cluster: "EmulatedCluster | ProcessCluster", listen_port: int = 8000) -> dict[str, Any]:
    """The configuration for `serve` in front of the cluster."""
    from balanceroute.emulator import Connector

    shape = cluster.shape
    ranks = range(shape.ranks_per_url)
    decode_workers: list[dict[str, Any]] = [
        {"url": url} | ({"dp_rank": rank} if len(ranks) > 1 else {}) for url in cluster.decode_urls for rank in ranks
    ]
    groups = getattr(cluster, "groups", 1)
    if 1 < groups < shape.decoders:
        size = shape.decoders // groups
        decode_workers = [entry | {"barrier_group": f"g{i // size}"} for i, entry in enumerate(decode_workers)]
    independent = {"shared_barrier": False} if groups == shape.decoders > 1 else {}
    tree: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": listen_port},
        "connector": str(shape.connector),
        "prefill": {"workers": [{"url": url} for url in cluster.prefill_urls]},
        "decode": {"workers": decode_workers, "max_num_seqs": shape.max_num_seqs} | independent,
        "routing": {"policy": DEFAULTS["policy"]},
        "predictor": {"kind": "none"},
    }
    if shape.lease_s is not None or shape.time_scale < 1:
        # the router's own defaults fit the connector's usual lease only
        lease_s = min(shape.pin_lease_s * shape.time_scale, DAY_S)  # the most that the router takes
        tree["pool"] = {"ttl_s": lease_s / 2}
        if shape.connector is not Connector.MOONCAKE_LAYERWISE:  # which pins none
            tree["prefill"]["kv_pin_s"] = lease_s
    return tree


def write_yaml(path: Path, tree: dict[str, Any]) -> None:
    """Write plain data as YAML. Raises: InputError."""
    import yaml

    from balanceroute.whole_file import write_whole

    write_whole(path, yaml.safe_dump(tree, sort_keys=False).encode())
