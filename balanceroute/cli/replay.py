"""`balanceroute replay`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from balanceroute.simulator import Failure, Outcome

WORKERS_HELP = (
    "Decode workers (G). heavy_tailed and capped arrive as fast as suits 8: for more or fewer draw a trace with "
    "`balanceroute trace generate --workers`."
)
SPEED_AWARE_HELP = "Whether the router knows the speeds. Only target_fit looks at them; other policies decide alike."


def replay(
    trace: Annotated[
        str, typer.Option(help="Trace CSV, or heavy_tailed or capped for a generated one.")
    ] = "heavy_tailed",
    train: Annotated[
        str | None,
        typer.Option(help="Past trace that the predictor is fitted on; without it it learns during the run."),
    ] = None,
    policy: Annotated[str, typer.Option(help="br_0, br_h, target_fit, join_shortest_queue, ...")] = "br_h",
    predictor: Annotated[str, typer.Option(help="none, oracle, survival, exact_match or learned.")] = "none",
    param: Annotated[list[str] | None, typer.Option(help="A knob of the policy: name=value; repeatable.")] = None,
    workers: Annotated[int, typer.Option(help=WORKERS_HELP)] = 8,
    slots: Annotated[int, typer.Option(help="Slots per worker (B).")] = 64,
    pool: Annotated[int, typer.Option(help="Requests that may wait (W).")] = 128,
    step_cost: Annotated[float, typer.Option(help="Seconds per KV token of the fullest worker (a).")] = 1.2e-7,
    step_overhead: Annotated[float, typer.Option(help="Seconds per step whatever the load (b).")] = 0.025,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random policies and of a generated trace.")] = 0,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Replay only the first N requests.")] = None,
    prefillers: Annotated[int, typer.Option(min=0, help="Simulate a prefill tier of this many workers.")] = 0,
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens per second of one prefiller.")] = 20_000.0,
    transfer_steps: Annotated[int, typer.Option(min=0, help="Steps that a KV transfer takes.")] = 0,
    telemetry_lag: Annotated[int, typer.Option(min=0, help="Steps by which the router hears late.")] = 0,
    kv_capacity: Annotated[int | None, typer.Option(help="KV tokens that fit a worker; beyond: recompute.")] = None,
    speeds: Annotated[str | None, typer.Option(help="Seconds per token by worker, relative: 1,1,1,1.3")] = None,
    speed_aware: Annotated[bool, typer.Option(help=SPEED_AWARE_HELP)] = True,
    fail: Annotated[list[str] | None, typer.Option(help="WORKER@START[-END] in seconds; repeatable.")] = None,
    series: Annotated[Path | None, typer.Option(help="Write loads by step and worker to this CSV (.gz).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Replay a trace through a policy on the step simulator: seconds for a whole trace, no cluster.

    Example: balanceroute replay --trace heavy_tailed --policy br_0 --param s_greedy=0 --json
    """
    from dataclasses import asdict

    from balanceroute.cli.output import print_fields, print_json, progress_bar
    from balanceroute.core.policies import PolicySettings
    from balanceroute.simulator import Replay, Setting, parse_params
    from balanceroute.traces import load_trace

    setting = Setting(
        n_workers=workers,
        slots=slots,
        pool=pool,
        step_cost_s=step_cost,
        step_overhead_s=step_overhead,
        prefillers=prefillers,
        prefill_tokens_per_s=prefill_rate,
        transfer_steps=transfer_steps,
        telemetry_lag_steps=telemetry_lag,
        kv_capacity_tokens=kv_capacity,
        speeds=parse_speeds(speeds),
        speed_aware=speed_aware,
        failures=tuple(parse_failure(text) for text in fail or []),
    )
    job = Replay(
        trace=load_trace(trace, seed=seed, rows=max_requests),
        policy=parse_params(PolicySettings(policy=policy, seed=seed), param or []),
        setting=setting,
        predictor=predictor,
        # a generated history has a seed of its own: never the trace that is replayed
        train=load_trace(train, seed=seed + 1) if train else None,
        with_loads=series is not None,
    )
    with progress_bar("replaying") as tell:
        outcome = job.run(tell)
    if series is not None:
        write_series(outcome, series)
    figures = asdict(outcome.figures)
    if json:
        print_json(figures)
    else:
        print_fields(f"{trace}: {policy}, predictor {predictor}", figures)


def parse_speeds(text: str | None) -> tuple[float, ...]:
    """Numbers separated by commas."""
    from balanceroute.errors import InputError

    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--speeds {text}: numbers separated by commas, one per worker") from None


def parse_failure(text: str) -> "Failure":
    """`WORKER@START` or `WORKER@START-END`, seconds."""
    from balanceroute.errors import InputError
    from balanceroute.simulator import Failure

    worker, _, span = text.partition("@")
    start, dash, end = span.partition("-")
    try:
        return Failure(int(worker.removeprefix("d")), float(start), float(end) if dash else None)
    except ValueError:
        raise InputError(f"--fail {text}: WORKER@START or WORKER@START-END, for example 3@120-300") from None


def write_series(outcome: "Outcome", path: Path) -> None:
    """One row per step: when it began, and the KV tokens of every worker."""
    import gzip

    from balanceroute.errors import InputError

    rows = zip(outcome.step_start_s.tolist(), outcome.loads.tolist(), strict=True)
    header = ",".join(f"d{index}" for index in range(outcome.loads.shape[1]))
    lines = [f"step,start_s,{header}"]
    lines += [f"{step},{start:.6f}," + ",".join(map(str, loads)) for step, (start, loads) in enumerate(rows)]
    data = ("\n".join(lines) + "\n").encode()
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
