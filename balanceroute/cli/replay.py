"""`balanceroute replay`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from balanceroute.core.knobs import DEFAULTS

if TYPE_CHECKING:
    from balanceroute.simulator import Failure, Figures, Outcome, Replay

TRACE_HELP = (
    "CSV of arrival_s,prompt_tokens,output_tokens; heavy_tailed or capped for a generated one; or whatever "
    "`balanceroute trace convert` reads: a public trace, this router's JSON log, vLLM's request log. "
    "- is standard input."
)
WORKERS_HELP = (
    "Decode workers (G). heavy_tailed and capped arrive as fast as suits 8: for more or fewer draw a trace with "
    "`balanceroute trace generate --workers`."
)
LOAD_HELP = (
    "Stretch or squeeze the arrivals to this fraction of ideal capacity: what level, always full workers would finish."
)
COMPARE_HELP = (
    "Replay it through every policy and print one table, --policy first. Each with its defaults; "
    "--param and --predictor are for --policy alone."
)
PREDICTOR_HELP = (
    "none, oracle, survival, exact_match, learned, or module:Class of your own. [default: survival for br_h, else none]"
)
FILLED = 0.7
"""A balance below which most slots cannot have been in use: even random choice reaches .8 with all of them."""
COST_AWARE_HELP = "Whether the router knows --slowdowns and --request-tokens."
REQUEST_TOKENS_HELP = "c: a request costs as much step time as so many KV tokens, beside those that it has."
SLOWDOWNS_HELP = "Time per token of each worker, relative to the others: 1,1,1,1.3"
FAIL_HELP = "A worker that is lost: WORKER@START[-END], its number (from 0) and seconds; repeatable."
KV_CAPACITY_HELP = "KV tokens that fit into a worker; beyond that requests are recomputed. Without it all fit."

ENGINE_BALANCER_HELP = (
    "Simulate a balancer inside the engine that pauses requests, with this threshold in KV blocks (vllm-ascend's "
    "DyntraLB has 5)."
)
BARRIER_GROUPS_HELP = (
    "How many groups the workers form: those of one group wait for each other after every step. As many as workers: "
    "none waits for another."
)
DRAFT_TOKENS_HELP = (
    "Speculative decoding: tokens that are guessed per request and step. A step yields one token and the guesses that "
    "are right."
)
PREFIX_CACHE_HELP = (
    "Tokens that the prefix cache of one prefiller holds. The trace must say which prompts begin alike: "
    "`balanceroute trace convert` keeps the hash_ids of Mooncake's and Bailian's."
)

BY_SIZE_HELP = "Whether that is how long a mean prompt takes, and others take it in proportion to their KV."
BESIDE_FULL_HELP = "Whether workers begin KV transfers while all their slots are in use; vLLM does not."
OVERLAP_HELP = (
    "Requests sent to each worker beyond its slots (m), or auto: as many as measured transfers need. "
    "[default: auto, 0 with an engine balancer]"
)


def replay(
    context: typer.Context,
    trace: Annotated[str, typer.Option(help=TRACE_HELP)] = "heavy_tailed",
    train: Annotated[
        str | None,
        typer.Option(help="Past trace that the predictor is fitted on; without it it learns during the run."),
    ] = None,
    policy: Annotated[str, typer.Option(help="level_fit, br_0, br_h, target_fit, join_shortest_queue, ...")] = DEFAULTS[
        "policy"
    ],
    predictor: Annotated[str | None, typer.Option(help=PREDICTOR_HELP)] = None,
    predictor_param: Annotated[
        list[str] | None, typer.Option(help="An option of a predictor of your own: name=value; repeatable.")
    ] = None,
    param: Annotated[list[str] | None, typer.Option(help="A knob of the policy: name=value; repeatable.")] = None,
    workers: Annotated[int, typer.Option(help=WORKERS_HELP)] = 8,
    slots: Annotated[int, typer.Option(help="Slots per worker (B).")] = 64,
    pool: Annotated[int, typer.Option(help="Most prefilled requests that wait for a slot (W).")] = 128,
    step_cost: Annotated[float, typer.Option(help="a: seconds of a step per KV token of the fullest worker.")] = 1.2e-7,
    step_overhead: Annotated[float, typer.Option(help="b: seconds of a step whatever the load.")] = 0.025,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random policies and of a generated trace.")] = 0,
    load: Annotated[float | None, typer.Option(help=LOAD_HELP)] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Replay only the first N requests.")] = None,
    prefillers: Annotated[int, typer.Option(min=0, help="Simulate a prefill tier of this many workers.")] = 0,
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens per second of one prefiller.")] = 20_000.0,
    prefill_policy: Annotated[
        str, typer.Option(help="prefix_affinity, least_tokens or round_robin: which prefiller computes a prompt.")
    ] = "prefix_affinity",
    prefix_cache: Annotated[int, typer.Option(help=PREFIX_CACHE_HELP)] = 0,
    transfer_steps: Annotated[int, typer.Option(min=0, help="Steps that a KV transfer takes.")] = 0,
    transfers_by_size: Annotated[bool, typer.Option(help=BY_SIZE_HELP)] = False,
    transfers_beside_full: Annotated[bool, typer.Option(help=BESIDE_FULL_HELP)] = False,
    overlap_requests: Annotated[str | None, typer.Option(help=OVERLAP_HELP)] = None,
    telemetry_lag: Annotated[
        int, typer.Option(min=0, help="By how many steps the router hears of tokens and ends late.")
    ] = 0,
    kv_capacity: Annotated[int | None, typer.Option(help=KV_CAPACITY_HELP)] = None,
    request_tokens: Annotated[int, typer.Option(min=0, help=REQUEST_TOKENS_HELP)] = 0,
    slowdowns: Annotated[str | None, typer.Option(help=SLOWDOWNS_HELP)] = None,
    cost_aware: Annotated[bool, typer.Option(help=COST_AWARE_HELP)] = True,
    fail: Annotated[list[str] | None, typer.Option(help=FAIL_HELP)] = None,
    engine_balancer: Annotated[float | None, typer.Option(help=ENGINE_BALANCER_HELP)] = None,
    barrier_groups: Annotated[int, typer.Option(help=BARRIER_GROUPS_HELP)] = 1,
    draft_tokens: Annotated[int, typer.Option(min=0, help=DRAFT_TOKENS_HELP)] = 0,
    draft_acceptance: Annotated[
        float, typer.Option(help="How likely a guess is right where the one before it was.")
    ] = 0.7,
    series: Annotated[Path | None, typer.Option(help="Write loads by step and worker to this CSV (.gz).")] = None,
    compare: Annotated[bool, typer.Option("--compare", help=COMPARE_HELP)] = False,
    figure: Annotated[Path | None, typer.Option(help="With --compare: draw it, to FILE.png and FILE.svg.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Replay a trace through a policy on the step simulator: seconds for a whole trace, no cluster.

    Example: balanceroute replay --trace heavy_tailed --policy br_0 --param s_greedy=0 --json
    """
    from balanceroute.cli.given import refuse_unused
    from balanceroute.cli.output import check_written
    from balanceroute.core.knobs import PolicySettings
    from balanceroute.errors import InputError
    from balanceroute.parameters import parse_options, parse_params
    from balanceroute.simulator import Replay, Setting, at_load, usual_predictor
    from balanceroute.traces import load_trace

    setting = Setting(
        n_workers=workers,
        slots=slots,
        pool=pool,
        step_cost_s=step_cost,
        step_overhead_s=step_overhead,
        prefillers=prefillers,
        prefill_tokens_per_s=prefill_rate,
        prefill_policy=prefill_policy,
        prefix_cache_tokens=prefix_cache,
        transfer_steps=transfer_steps,
        transfers_by_size=transfers_by_size,
        transfers_beside_full=transfers_beside_full,
        overlap_requests=parse_overlap(overlap_requests, engine_balancer is not None),
        telemetry_lag_steps=telemetry_lag,
        kv_capacity_tokens=kv_capacity,
        request_tokens=request_tokens,
        slowdowns=parse_slowdowns(slowdowns),
        cost_aware=cost_aware,
        engine_balancer_blocks=engine_balancer,
        barrier_groups=barrier_groups,
        draft_tokens=draft_tokens,
        draft_acceptance=draft_acceptance,
        failures=tuple(parse_failure(text) for text in fail or []),
    )
    requests = load_trace(trace, seed=seed, rows=max_requests, on_note=partial(typer.echo, err=True))
    job = Replay(
        trace=requests if load is None else at_load(requests, load, setting.checked()),
        policy=parse_params(PolicySettings(policy=policy, seed=seed), param or []),
        setting=setting,
        predictor=usual_predictor(policy) if predictor is None else predictor,
        predictor_options=tuple(parse_options("--predictor-param", predictor_param or []).items()),
        # a generated history has a seed of its own: never the trace that is replayed
        train=load_trace(train, seed=seed + 1, on_note=partial(typer.echo, err=True)) if train is not None else None,
        with_loads=series is not None,
    )
    refuse_unused(context, "prefill_rate", prefillers > 0, "with --prefillers")
    refuse_unused(context, "prefill_policy", prefillers > 0, "with --prefillers")
    refuse_unused(
        context, "cost_aware", bool(setting.slowdowns) or request_tokens > 0, "with --slowdowns or --request-tokens"
    )
    refuse_unused(context, "draft_acceptance", draft_tokens > 0, "with --draft-tokens")
    for flag in ("transfers_by_size", "transfers_beside_full"):
        refuse_unused(context, flag, transfer_steps > 0, "with --transfer-steps")
    job.checked()
    if compare:
        if series is not None:
            raise InputError("--series: writes the loads of one policy; leave it out with --compare")
        compare_policies(job, trace, as_json=json, figure=figure)
        return
    if figure is not None:
        raise InputError("--figure: draws a comparison; accepted only with --compare")
    if series is not None:
        check_written(series, trace, train)
    replay_one(job, trace, series, as_json=json)


def parse_overlap(text: str | None, engine_balancer: bool) -> int | None:
    """The number, or None for `auto`, which an engine's balancer is not modelled with. Raises: InputError."""
    from balanceroute.core.bounds import MOST_OVERLAP
    from balanceroute.errors import InputError

    if text is None and engine_balancer:
        return 0
    if text in (None, "auto"):
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InputError(
            f"--overlap-requests {text!r:.60}: accepted is a whole number from 0 to {MOST_OVERLAP}, or auto"
        )
    return int(text)


def until(stopped: Callable[[], bool], on_progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Progress that ends the replay once `stopped` says so."""

    def report(done: int, total: int) -> None:
        from balanceroute.simulator import Stopped

        on_progress(done, total)
        if stopped():
            raise Stopped

    return report


def replay_one(job: "Replay", title: str, series: Path | None, *, as_json: bool) -> None:
    """Replay the job's requests through its own policy, print what it comes to, and write the loads to `series`."""
    from dataclasses import asdict

    from balanceroute.cli.output import INTERRUPTED, print_fields, print_json, progress_bar, stopped_by_signals

    with progress_bar("replaying") as on_progress, stopped_by_signals() as stopped:
        outcome = job.run(until(stopped, on_progress))
    if series is not None:
        write_series(outcome, series)
    figures = asdict(outcome.figures)
    if as_json:
        print_json(figures)
    else:
        print_fields(f"{title}: {job.policy.policy}, predictor {job.predictor}", figures)
    if stopped():
        typer.echo(f"balanceroute: interrupted with {outcome.finished:,} of {len(job.trace):,} finished", err=True)
        raise typer.Exit(INTERRUPTED)
    note_late_failures(job, {job.policy.policy: float(outcome.step_start_s[-1])})


def compare_policies(job: "Replay", title: str, *, as_json: bool, figure: Path | None) -> None:
    """Replay the job's requests through every policy, its own first, and print and draw what each comes to."""
    from dataclasses import asdict, replace

    from balanceroute.cli.output import INTERRUPTED, print_json, progress_bar, stopped_by_signals
    from balanceroute.core.knobs import PolicySettings
    from balanceroute.core.policies import POLICIES
    from balanceroute.simulator import usual_predictor

    if figure is not None:
        check_figure(figure)
    others = [name for name in sorted(POLICIES) if name != job.policy.policy]
    jobs = [job]
    for name in others:
        settings = PolicySettings(policy=name, seed=job.policy.seed)
        jobs.append(replace(job, policy=settings, predictor=usual_predictor(name), predictor_options=()))
    found: dict[str, Figures] = {}
    ends_s: dict[str, float] = {}
    with stopped_by_signals() as stopped:
        for each in jobs:
            with progress_bar(f"{each.policy.policy:<20}") as on_progress:
                outcome = each.run(until(stopped, on_progress))
            if stopped():
                break
            found[each.policy.policy] = outcome.figures
            ends_s[each.policy.policy] = float(outcome.step_start_s[-1])
    if figure is not None and found:
        draw_comparison(found, title, figure)
    if as_json:
        print_json({name: asdict(figures) for name, figures in found.items()})
    elif found:
        show_comparison(found, f"{title}: {len(job.trace):,} requests through every policy")
    if stopped():
        typer.echo(f"balanceroute: interrupted after {len(found)} of {len(jobs)} policies", err=True)
        raise typer.Exit(INTERRUPTED)
    note_late_failures(job, ends_s)


def note_late_failures(job: "Replay", ends_s: dict[str, float]) -> None:
    """Name each failure that came after the last step, and with which policies: how long a run takes depends on them.

    Args: ends_s: when the last step of each policy's run began.
    """
    for failure in job.setting.failures:
        spared = {name: end_s for name, end_s in ends_s.items() if end_s < failure.start_s}
        if spared:
            typer.echo(
                f"--fail {failure.worker}@{failure.start_s:g}: changed nothing with {', '.join(spared)}; "
                f"the last step began at {max(spared.values()):,.1f} s",
                err=True,
            )


def show_comparison(found: "dict[str, Figures]", title: str) -> None:
    """A table, a row per policy."""
    from rich.table import Table

    from balanceroute.cli.output import print_table

    columns = (
        "policy", "load spread", "balance", "tokens/s", "makespan s", "TPOT p95 ms",
        "wait p50 s", "wait p99 s", "wait max s",
    )  # fmt: skip
    table = Table(columns[0], title=title)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for name, f in found.items():
        waits = (f"{wait:,.1f}" for wait in (f.wait_p50_s, f.wait_p99_s, f.wait_max_s))
        cells = (
            f"{f.load_spread_mean:,.0f}",
            f"{f.balance:.3f}",
            f"{f.throughput_tok_s:,.0f}",
            f"{f.makespan_s:,.0f}",
            f"{1e3 * f.tpot_p95_s:.1f}",
        )
        table.add_row(name, *cells, *waits)
    print_table(table)
    if (best := max(figures.balance for figures in found.values())) < FILLED:
        typer.echo(
            f"balance is {best:.3f} at best: slots stayed empty, where policies hardly differ; "
            "replay more requests, or at a higher --load"
        )


def check_figure(path: Path) -> None:
    """Say before anything is replayed what would keep it from being drawn. Raises: InputError."""
    from balanceroute.cli.output import check_written
    from balanceroute.experiments import figures

    figures.pyplot()  # which may be missing
    for file in figures.files_at(figures.stem_of(path)):
        check_written(file)


def draw_comparison(found: "dict[str, Figures]", title: str, path: Path) -> None:
    """The comparison as a figure."""
    from balanceroute.experiments import figures

    drawn = figures.comparison(found, f"Every policy on {Path(title).name}", figures.stem_of(path))
    typer.echo(f"figure: {drawn}", err=True)


def parse_slowdowns(text: str | None) -> tuple[float, ...]:
    """Numbers separated by commas."""
    from balanceroute.errors import InputError

    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise InputError(f"--slowdowns {text}: numbers separated by commas, one per worker") from None


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

    from balanceroute.whole_file import write_whole

    rows = zip(outcome.step_start_s.tolist(), outcome.loads.tolist(), strict=True)
    header = ",".join(f"d{index}" for index in range(outcome.loads.shape[1]))
    lines = [f"step,start_s,{header}"]
    lines += [f"{step},{start:.6f}," + ",".join(map(str, loads)) for step, (start, loads) in enumerate(rows)]
    data = ("\n".join(lines) + "\n").encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)
