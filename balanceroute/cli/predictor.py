"""`balanceroute predictor fit | evaluate`."""

from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from balanceroute.cli import helping
from balanceroute.core.knobs import ALL, DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.core.knobs import Option
    from balanceroute.prediction import Evaluation, FinishedRequest
    from balanceroute.prediction.build import BuiltPredictor

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
MOST_BUCKETS = 64  # as in the configuration
SUMMARY = "Fit predictors of the remaining output, and measure how good they are."
app = typer.Typer(no_args_is_help=True, help=SUMMARY, rich_markup_mode=None)

KindOption = Annotated[str, typer.Option(help="survival, exact_match or learned.")]
AnyKindOption = Annotated[str, typer.Option(help="survival, exact_match, learned, or module:Class of your own.")]
HorizonOption = Annotated[
    int,
    typer.Option(min=1, max=ALL["horizon_steps"].most, help="H, decode steps; routing.horizon_steps of the router."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BucketsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST_BUCKETS,
        help="exact_match: where the key is unknown, use prompts of similar size, in so many quantiles.",
    ),
]


def fit(
    out: Annotated[Path, typer.Option("--out", "-o", help="Model file to write (for predictor.model).")],
    trace: Annotated[Path | None, typer.Option(help="Trace to learn from, or whatever `trace convert` reads.")] = None,
    history: Annotated[Path | None, typer.Option(help="History file of a router (predictor.history) instead.")] = None,
    kind: KindOption = "survival",
    horizon: HorizonOption = DEFAULTS["horizon_steps"],
    json: JsonFlag = False,
) -> None:
    """Fit a predictor and write it to a file.

    The keys of a router are hashed under the salt of its history: for exact_match fit from --history, not
    from a trace.

    Example: balanceroute predictor fit --trace week.csv.gz --kind learned --out learned.npz
    """
    from balanceroute.cli.output import check_written, print_fields, print_json
    from balanceroute.errors import ConfigError
    from balanceroute.prediction import KINDS, LearnedPredictor, Model, save_model

    if kind not in KINDS[1:]:
        raise ConfigError(f"--kind: {kind!r} writes no model file; accepted are {', '.join(KINDS[1:])}")
    if (trace is None) == (history is None):
        raise ConfigError("predictor fit: give either --trace or --history")
    check_written(out, trace, history)
    rows = _from_history(history) if history is not None else _from_trace(trace)
    predictor = _fitted(kind, horizon, rows)
    learned = predictor.fitted if isinstance(predictor, LearnedPredictor) else None
    save_model(out, Model(kind, horizon, rows, learned))
    result = {"out": str(out), "kind": kind, "horizon_steps": horizon, "rows": len(rows), "bytes": out.stat().st_size}
    if learned is not None:
        result["calibration_error"] = learned.calibration_error
    if json:
        print_json(result)
    else:
        print_fields("fitted", result)


def evaluate(
    context: typer.Context,
    trace: Annotated[Path, typer.Option(help="Trace to judge on, or whatever `trace convert` reads.")],
    model: Annotated[Path | None, typer.Option(help="Model file to judge.")] = None,
    kind: AnyKindOption = "survival",
    param: Annotated[
        list[str] | None, typer.Option(help="An option of a predictor of your own: name=value; repeatable.")
    ] = None,
    train: Annotated[
        Path | None, typer.Option(help="Trace to learn from. Without it and --model: the earlier half of --trace.")
    ] = None,
    horizon: HorizonOption = DEFAULTS["horizon_steps"],
    online: Annotated[bool, typer.Option("--online", help="Go on learning from each request as it finishes.")] = False,
    size_buckets: BucketsOption = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a reliability diagram (.png, .svg, .pdf).")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure a predictor on requests that it has not seen, at every age at which a router would ask.

    Example: balanceroute predictor evaluate --trace day.csv.gz --kind exact_match --horizon 80 --json
    """
    from balanceroute.cli.given import given, refuse_unused
    from balanceroute.cli.output import print_json
    from balanceroute.errors import ConfigError, InputError
    from balanceroute.parameters import parse_options
    from balanceroute.plugins import while_it_runs
    from balanceroute.prediction import OwnPredictor, build_predictor
    from balanceroute.prediction import evaluate as judge
    from balanceroute.prediction.evaluation import time_split

    if model is not None and train is not None:
        raise ConfigError("predictor evaluate: give --model or --train, not both")
    if plot is not None:
        check_plot(plot, trace, model, train)
    if model is not None:
        kind = _kind_of(model, kind if given(context, "kind") else None)
    refuse_unused(context, "param", model is None, "without --model")
    refuse_unused(context, "size_buckets", kind == "exact_match", "by exact_match")
    rows = _from_trace(trace)
    predictor: BuiltPredictor
    if model is not None:
        learned_from, tested = "model file", rows
        predictor = build_predictor(kind, horizon, model=model, size_buckets=size_buckets)
    else:
        known, tested = (_from_trace(train), rows) if train is not None else time_split(rows)
        n_known = sum(not row.censored for row in known)
        learned_from = str(train) if train is not None else f"the first {n_known} finishes of the trace"
        predictor = _fitted(kind, horizon, known, size_buckets, parse_options("--param", param or []))
    if not tested:
        raise InputError(f"{trace}: too short to split by time; give --train")
    with while_it_runs(f"predictor {kind}") if isinstance(predictor, OwnPredictor) else nullcontext():
        found = judge(predictor, tested, horizon, online=online)
    if plot is not None:
        draw_reliability(found, f"{kind} on {trace.name}, horizon {horizon}", plot)
    about = {"trace": str(trace), "kind": kind, "learned_from": learned_from, "online": online}
    result = about | {"horizon_steps": horizon} | found.to_dict()
    if json:
        print_json(result)
    else:
        show_evaluation(result, found)


def _kind_of(model: Path, given_kind: str | None) -> str:
    """The kind of predictor in a model file. Raises: ConfigError: another kind was given."""
    from balanceroute.errors import ConfigError
    from balanceroute.prediction import load_model

    held = load_model(model).kind
    if given_kind not in (None, held):
        raise ConfigError(f"--kind {given_kind}: {model} holds a {held} predictor")
    return held


def show_evaluation(result: "Mapping[str, Any]", found: "Evaluation") -> None:
    """Print the figures, one a line, and the calibration as a table."""
    from balanceroute.cli.output import print_fields

    print_fields("predictor", {name: value for name, value in result.items() if name != "calibration"})
    typer.echo("  calibration (p_finish said -> seen, samples)")
    for row in found.calibration:
        typer.echo(f"    {row.mean_p_finish:.3f} -> {row.finish_rate:.3f}   {row.samples:,}")


def check_plot(path: Path, *read: Path | None) -> None:
    """Say before anything is judged what would keep the diagram from being drawn. Raises: InputError."""
    from balanceroute.cli.output import check_written
    from balanceroute.errors import InputError
    from balanceroute.experiments import figures

    figures.pyplot()  # which may be missing
    check_written(path, *read)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--plot {path}: accepted are names that end in {', '.join(PLOT_SUFFIXES)}")


def draw_reliability(found: "Evaluation", title: str, path: Path) -> None:
    """Draw said against seen probability, with the number of samples per bin below.

    Raises: InputError when the file can't be written.
    """
    from matplotlib.figure import Figure

    from balanceroute.experiments import figures
    from balanceroute.whole_file import write_whole

    figure = Figure(figsize=(5.0, 6.0), layout="constrained")
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    predicted = [row.mean_p_finish for row in found.calibration]
    seen = [row.finish_rate for row in found.calibration]
    curve.plot([0, 1], [0, 1], linestyle="--", color=figures.ORANGE, label="perfect calibration")
    curve.plot(predicted, seen, marker="o", color=figures.BLUE, label="predictor")
    curve.set(xlim=(0, 1), ylim=(0, 1), ylabel="share that finished within the horizon", title=title)
    auc = "n/a" if found.auc is None else f"{found.auc:.3f}"
    curve.legend(loc="upper left", title=f"AUC {auc}, Brier {found.brier:.3f}")
    low = [row.low for row in found.calibration]
    counts.bar(low, [row.samples for row in found.calibration], width=0.1, align="edge", color=figures.BLUE)
    counts.set(yscale="log", xlabel="predicted probability of finishing (p_finish)", ylabel="samples")
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    write_whole(path, drawn.getvalue())


def _fitted(
    kind: str,
    horizon: int,
    rows: "list[FinishedRequest]",
    size_buckets: int = 0,
    options: "dict[str, Option] | None" = None,
) -> "BuiltPredictor":
    from balanceroute.plugins import check_predictor_name
    from balanceroute.prediction import KINDS, LearnedPredictor, build_predictor

    check_predictor_name(kind, KINDS[1:])
    predictor = build_predictor(
        kind, horizon, rows=rows, max_rows=max(1, len(rows)), size_buckets=size_buckets, options=options
    )
    if isinstance(predictor, LearnedPredictor):
        predictor.grow()
    return predictor


def _from_trace(path: Path | None) -> "list[FinishedRequest]":
    """Rows of a trace as finished requests, in the order in which they finish at the nominal step time."""
    from balanceroute.prediction.evaluation import STEP_S
    from balanceroute.simulator.history import finished_requests
    from balanceroute.traces import load_trace

    if path is None:
        return []
    trace = load_trace(str(path), on_note=partial(typer.echo, err=True))
    return sorted(finished_requests(trace, STEP_S), key=lambda row: row.finished_s)


def _from_history(path: Path) -> "list[FinishedRequest]":
    from balanceroute.errors import InputError
    from balanceroute.prediction.history import read_rows

    rows = read_rows(path)
    if not rows:
        raise InputError(f"{path}: no finished requests in it")
    return rows


for command in (fit, evaluate):
    helping.add(app, command)
