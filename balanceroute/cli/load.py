"""`balanceroute load`."""

from functools import partial
from typing import Annotated, Any

import typer


def load(
    url: Annotated[
        str,
        typer.Argument(
            help="Endpoint without /v1, for example http://127.0.0.1:8000. For https with a CA of your own set "
            "SSL_CERT_FILE to its file."
        ),
    ],
    trace: Annotated[str, typer.Option(help="Trace CSV, or heavy_tailed or capped for a generated one.")],
    max_requests: Annotated[int | None, typer.Option(min=1, help="Send only the first N requests.")] = None,
    time_scale: Annotated[
        float, typer.Option(help="Seconds of wall clock per second of the trace; 0.5 plays twice as fast.")
    ] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Requests per second, instead of the trace's own.")] = None,
    prompt_scale: Annotated[float, typer.Option(help="Multiplies all prompt lengths.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Multiplies all output lengths.")] = 1.0,
    model: Annotated[str | None, typer.Option(help="Model name; the first of /v1/models if left out.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_envvar=True)
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Longest time for one answer, seconds.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts and of a generated trace.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Send a trace over HTTP to any OpenAI endpoint and measure what a client sees.

    Exit code 1 when any answer was not complete. Ctrl-C ends it with what there is until then, and exit code 130.

    Example: balanceroute load http://127.0.0.1:8000 --trace heavy_tailed --max-requests 200 --rate 8
    """
    import asyncio
    import signal
    from dataclasses import asdict

    import uvloop

    from balanceroute.cli.output import INTERRUPTED, print_json, progress_bar
    from balanceroute.errors import InputError
    from balanceroute.loadgen import LoadOptions, LoadReport, run_load
    from balanceroute.traces import load_trace

    if not (prompt_scale > 0 and output_scale > 0 and (rate is None or rate > 0)):
        raise InputError("--rate, --prompt-scale and --output-scale must be above 0")
    requests = load_trace(trace, seed=seed, rows=max_requests, on_note=partial(typer.echo, err=True))
    requests = requests.with_lengths(prompt_scale, output_scale)
    if rate is not None:
        if len(requests) > 1 and requests.arrival_s[0] == requests.arrival_s[-1]:
            raise InputError(f"rate {rate:g}: all requests of the trace arrive at one time, so it has none")
        requests = requests.at_rate(rate)
    options = LoadOptions(url, model, api_key, time_scale, timeout, seed)
    total = len(requests)
    stop = asyncio.Event()

    async def measure() -> LoadReport:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await run_load(requests, options, lambda sent, ended: tell(ended, total), stop)

    with progress_bar("answers") as tell, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(measure())
    if json:
        print_json(asdict(report))
    else:
        print_report(asdict(report), interrupted=stop.is_set())
    if stop.is_set():
        typer.echo(f"balanceroute: interrupted after {report.requests:,} of {total:,} requests were sent", err=True)
        raise typer.Exit(INTERRUPTED)
    if report.completed < report.requests:
        raise typer.Exit(1)


def print_report(report: dict[str, Any], *, interrupted: bool) -> None:
    """Counts, a line per kind of failure, one per latency that has values, and a word where no answer was complete."""
    from balanceroute.cli.output import print_fields

    latencies = {name: value for name, value in report.items() if isinstance(value, dict) and name != "errors"}
    counts = {name: value for name, value in report.items() if name not in latencies and name != "errors"}
    print_fields("load", counts)
    for kind, count in report["errors"].items():  # a worker's message may be long
        typer.echo(f"  {count:,} failed: {kind}")
    if not report["completed"]:
        typer.echo("  no answer yet" if interrupted else "  no complete answer")
    known = {name: value for name, value in latencies.items() if value["n"]}
    if known:
        typer.echo(f"  {'ms':<22}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}")
    for name, value in known.items():
        cells = "".join(f"{value[q] * 1000:>10.1f}" for q in ("mean", "p50", "p95", "p99", "max"))
        typer.echo(f"  {name.removesuffix('_s'):<22}{cells}")
