"""The figures: PNG and SVG, readable in print and for the colour-blind.

A method has its own colour and its own marker in every figure (`STYLES`), so that it can be told in grey, too. The
colours of what is shown most are those of Okabe and Ito, made for the colour-blind; kin are shades of one. What the
paper printed is hollow.
Without matplotlib every figure is None, and the tables stand alone. Every figure says on which workload it is, so
that it can stand alone. Equal data give equal bytes: nothing with a date or a random id is written.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import numpy as np
from numpy.typing import NDArray

from balanceroute.errors import InputError
from balanceroute.experiments import methods
from balanceroute.simulator import Figures
from balanceroute.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")
Dashes = str | tuple[int, tuple[int, int]]
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#6E6E6E"
)  # fmt: skip
DOTTED: Dashes = (0, (1, 1))
Marker = str | tuple[int, int, int]
STYLES: dict[str, tuple[str, Marker, Dashes]] = {
    "Random": ("#9E9E9E", "x", DOTTED),
    "Round-Robin": ("#8C8C3A", "+", "--"),
    "Power-of-Two-Choices": (GREY, "2", "-."),
    "Join-Shortest-Queue": (BLACK, "s", "-"),
    "Least KV tokens": (ORANGE, "D", "--"),
    "Pool, FIFO, to the least KV": ("#8C5109", "v", DOTTED),
    "BR-0": (SKY, "o", "-"),
    "BR-0, both stages, R_max 4": ("#79BBDD", "<", "--"),
    "BR-0, both stages, R_max 8": ("#2E86B5", ">", "-."),
    "BR-0, our defaults": ("#6FA3B8", "P", DOTTED),
    "BR-H oracle (43, 0.86)": (BLUE, "p", "-"),
    "BR-H oracle (14.67, 0.64)": ("#4A6FE3", "^", "--"),
    "BR-H survival": ("#332288", "H", "-."),
    "BR-H ExactMatch": ("#8375D1", "X", DOTTED),
    "BR-H survival, both stages, R_max 4": ("#1F4E8C", (5, 1, 180), "--"),
    "BR-H survival, both stages, R_max 8": ("#7F9BE0", (6, 1, 0), "-."),
    "BR-H survival, our defaults": ("#000066", (4, 1, 0), DOTTED),
    "TargetFit (beyond the paper)": (GREEN, "d", "--"),
    "LevelFit (ours)": (VERMILION, "*", "-"),
    "LevelFit, overlap_requests 0": ("#9C3D00", (8, 1, 0), "--"),
}
"""Colour, marker and dashes by a method's label."""
LABELS = {
    row.policy.policy: row.label
    for row in (
        methods.RANDOM,
        methods.ROUND_ROBIN,
        methods.POWER_OF_TWO,
        methods.JSQ,
        methods.LEAST_KV,
        methods.POOL_FIFO,
        methods.BR_0,
        methods.BR_H_SURVIVAL,
        methods.TARGET_FIT,
        methods.LEVEL_FIT,
    )
}
"""The method that a policy's name stands for, where a figure shows policies by name."""
LINES = ("x", "+", "2")  # markers without an inside
OTHERS: tuple[tuple[str, Marker], ...] = (
    (PURPLE, "8"), ("#882255", (7, 1, 0)), ("#AA4499", "h"), ("#E377C2", (7, 0, 0)), ("#5E2750", (5, 0, 180))
)  # fmt: skip
"""Of policies that are not ours, all purple."""
DPI = 160
HOW_TO_GET_FIGURES = (
    "matplotlib is not installed, so no figures were drawn: scripts/install plots, or pip install matplotlib"
)
BALANCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)  # ticks


def available() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def drawn(draw: Callable[P, Path]) -> Callable[P, Path | None]:
    """The figure, or None where matplotlib is not installed."""

    @wraps(draw)
    def draw_if_possible(*args: P.args, **kwargs: P.kwargs) -> Path | None:
        return draw(*args, **kwargs) if available() else None

    return draw_if_possible


def pyplot() -> Any:
    """matplotlib without a display, with our style. Raises: InputError where the extra is not installed."""
    os.environ["MPLBACKEND"] = "Agg"  # read at the import; what a notebook's shell has there may not be installed here
    try:
        import matplotlib
    except ImportError:
        raise InputError(HOW_TO_GET_FIGURES) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.hashsalt": "balanceroute",
            "figure.constrained_layout.use": True,
            "figure.titlesize": 10,
        }
    )
    return plt


def save(figure: "Figure", stem: Path) -> Path:
    """Write PNG and SVG; the PNG's path."""
    path, drawing = files_at(stem)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is found; each format would search for it again
    about: dict[Path, dict[str, Any]] = {
        path: {"dpi": DPI, "metadata": {"Software": "balanceroute"}},
        drawing: {"metadata": {"Date": None, "Creator": "balanceroute"}},
    }
    for file, options in about.items():
        drawn = BytesIO()
        figure.savefig(drawn, format=file.suffix[1:], **options)
        write_whole(file, drawn.getvalue())
    pyplot().close(figure)
    return path


def stem_of(path: Path) -> Path:
    """Where a user wants a figure: the suffix of either format is left out, all else is the name.

    Raises: InputError: it names no file.
    """
    if path.name in ("", ".."):
        raise InputError(f"{str(path)!r}: names no file")
    return path.with_suffix("") if path.suffix.lower() in (".png", ".svg") else path


def files_at(stem: Path) -> tuple[Path, Path]:
    """PNG and SVG of a figure; a dot in its name is part of it, as in `load1.05`."""
    return stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")


def files(stem: str) -> list[str]:
    """The names that `save` writes."""
    return [f"{stem}.png", f"{stem}.svg"] if available() else []


def look(label: str) -> tuple[str, Marker, Dashes]:
    """Colour, marker and dashes of a method; also of a user's own one the same in every figure."""
    colour, marker = OTHERS[sum(label.encode()) % len(OTHERS)]
    return STYLES.get(LABELS.get(label, label).removesuffix(", limit"), (colour, marker, "-"))


def style(label: str) -> dict[str, Any]:
    """The same as matplotlib's arguments of a line."""
    colour, marker, dashes = look(label)
    return {"color": colour, "marker": marker, "markersize": 7 if marker == "*" else 5, "linestyle": dashes}


def painted(label: str, *, filled: bool) -> dict[str, Any]:
    """The same as matplotlib's arguments of dots."""
    colour, marker, _ = look(label)
    if marker in LINES:
        return {"marker": marker, "color": colour}
    return {"marker": marker, "edgecolors": colour, "facecolors": colour if filled else "none"}


def plain_ticks(axis: "Axis", candidates: Sequence[float]) -> None:
    """Numbers as people write them on a logarithmic axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in candidates if low <= tick <= high]
    ticks = ticks if len(ticks) > 1 else [low, high]
    axis.set_ticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axis.set_minor_locator(pyplot().NullLocator())


@drawn
def load_panels(panels: Sequence[tuple[str, NDArray[np.int64]]], workload: str, stem: Path) -> Path:
    """`draw_load_panels`, written."""
    return save(draw_load_panels(panels, workload), stem)


def draw_load_panels(panels: Sequence[tuple[str, NDArray[np.int64]]], workload: str) -> "Figure":
    """KV load of every worker over a segment of steps, one panel per router, one scale for all."""
    plt = pyplot()
    columns = 2 if len(panels) <= 6 else 3
    rows = -(-len(panels) // columns)
    size = (9, 2.3 * rows) if columns == 2 else (11, 1.8 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis, (label, loads) in zip(axes.flat, panels, strict=False):
        for worker in range(loads.shape[1]):
            axis.plot(
                loads[:, worker] / 1000,
                linewidth=0.8 if loads.shape[1] <= 16 else 0.3,
                color=COLOURS[worker % len(COLOURS)],
            )
        spread = (loads.max(axis=1) - loads.min(axis=1)).mean() if len(loads) else float("nan")
        axis.set_title(f"{label}: spread {spread / 1000:,.0f}k here", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("KV load, 1,000 tokens")
    shown = list(axes.flat)[: len(panels)]
    for axis in shown[-columns:]:  # the lowest of each column, also above an empty place
        axis.set_xlabel("decode step of the segment")
        axis.tick_params(labelbottom=True)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"KV load on {workload}, one line per decode worker; the same number of steps in every panel")
    return cast("Figure", figure)


def lines_over(
    axis: "Axes", x: Sequence[float], lines: Mapping[str, Sequence[Figures]], name: str, factor: float = 1.0
) -> None:
    """One line per router of one figure."""
    for label, figures in lines.items():
        axis.plot(x, [getattr(entry, name) * factor for entry in figures], label=label, **style(label))


@drawn
def scaling(
    widths: Sequence[int],
    lines: Mapping[str, Sequence[Figures]],
    printed: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    workload: str,
    stem: Path,
) -> Path:
    """Load spread, TPOT p95 and balance against the number of workers.

    `printed`: the paper's points (width, value in the axis's unit) by figure and label.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.8))
    for axis, (name, factor, label) in zip(
        axes,
        (
            ("load_spread_mean", 1e-3, "load spread, 1,000 tokens"),
            ("tpot_p95_s", 1e3, "TPOT p95, ms"),
            ("balance", 1.0, "balance (1 = bound)"),
        ),
        strict=True,
    ):
        lines_over(axis, widths, lines, name, factor)
        for method, points in printed.get(name, {}).items():
            axis.scatter(*zip(*points, strict=True), s=60, linewidths=0.8, **painted(method, filled=False))
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(widths), [str(width) for width in widths])
        axis.minorticks_off()
        axis.set_xlabel("decode workers G")
        axis.set_ylabel(label)
    axes[0].set_yscale("log")
    plain_ticks(axes[0].yaxis, (2, 5, 10, 20, 50, 100, 200, 500, 1000))
    overlaid = "; points without a line: the paper's own, measured on NPUs with another trace" if printed else ""
    figure.suptitle(f"Scaling on {workload}{overlaid}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=3)
    return save(figure, stem)


@drawn
def sensitivity(
    points: Mapping[int, Mapping[tuple[float, float], float]],
    printed: Mapping[int, Mapping[tuple[float, float], float]],
    deployed: Sequence[tuple[float, float]],
    workload: str,
    stem: Path,
) -> Path:
    """Load spread over the (beta, gamma) plane, one panel per width; stars are the paper's operating points.

    `printed`: the paper's load spread, written beside ours.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, len(points), figsize=(4.8 * len(points), 5.2), squeeze=False)
    for axis, (width, spreads) in zip(axes[0], points.items(), strict=True):
        values = [value / 1000 for value in spreads.values()]
        for marker, chosen in (("o", [p for p in spreads if p not in deployed]), ("*", list(deployed))):
            dots = axis.scatter(
                [beta for beta, _ in chosen],
                [gamma for _, gamma in chosen],
                c=[spreads[point] / 1000 for point in chosen],
                s=110 if marker == "o" else 260,
                marker=marker,
                cmap="cividis_r",
                vmin=min(values),
                vmax=max(values),
                edgecolors="black",
                label="the paper's operating points" if marker == "*" else "swept",
            )
        for (beta, gamma), value in spreads.items():
            above = (beta, gamma) not in deployed
            theirs = printed.get(width, {}).get((beta, gamma))
            axis.annotate(
                f"{value / 1000:.0f}k" + (f"\n({theirs / 1000:.0f}k)" if theirs else ""),
                (beta, gamma),
                xytext=(0, 8) if above else (-9, -14),
                textcoords="offset points",
                ha="center" if above else "right",
                fontsize=8,
            )
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xticks([1, 15, 24, 48, 96], ["1", "15", "24", "48", "96"])
        axis.minorticks_off()
        axis.set_xlim(0.6, 200)
        axis.set_ylim(0.42, 1.12)
        axis.set_xlabel("beta")
        axis.set_ylabel("gamma")
        axis.set_title(f"G = {width}", fontsize=9)
        figure.colorbar(dots, ax=axis, label="load spread, 1,000 tokens")
    figure.suptitle(f"BR-H with an oracle on {workload}" + (" (in brackets: the paper's)" if printed else ""))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save(figure, stem)


@drawn
def overhead(
    fans: Sequence[tuple[str, NDArray[np.float64]]],
    printed: Mapping[str, tuple[float, float, float]],
    budget_ms: float,
    workload: str,
    stem: Path,
) -> Path:
    """A fan of percentiles per stage: to p50, to p95, to p99, to the maximum; the tick is the mean.

    `printed`: the paper's p50, mean and p99 of a whole dispatch, microseconds, by model; hollow bars below ours.
    """
    plt = pyplot()
    count = len(fans) + len(printed)
    figure, axis = plt.subplots(figsize=(9, 0.38 * count + 1.4))
    for row, (p50, mean, p99) in enumerate(printed.values(), start=len(fans)):
        axis.barh(row, p99 - p50, left=p50, facecolor="none", edgecolor=BLACK, height=0.7)
        axis.plot([mean] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
    for row, (_, values) in enumerate(fans):
        low, p50, p95, p99, top = np.percentile(values, (0, 50, 95, 99, 100))
        low = min(max(low, 1.0), p50)
        for start, end, alpha in ((low, p50, 1.0), (p50, p95, 0.6), (p95, p99, 0.35), (p99, top, 0.15)):
            axis.barh(row, end - start, left=start, color=COLOURS[0], alpha=alpha, height=0.7)
        axis.plot([values.mean()] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
    axis.axvspan(budget_ms * 900, budget_ms * 1100, color=COLOURS[4], alpha=0.4)
    axis.text(budget_ms * 850, -0.9, "one engine step", ha="right", va="center", fontsize=8)
    axis.set_yticks(
        range(count), [*(label for label, _ in fans), *(f"the paper, {model} (p50 to p99)" for model in printed)]
    )
    axis.set_ylim(count - 0.4, -1.4)
    axis.set_xscale("log")
    axis.set_xlabel("microseconds per decision (bars to p50, p95, p99, max, ever lighter; tick: mean)")
    figure.suptitle(f"What a decision costs on {workload}, G = 8")
    return save(figure, stem)


@drawn
def wait_versus_balance(points: Sequence[tuple[str, bool, float, float]], workload: str, stem: Path) -> Path:
    """p99 wait against balance: up and to the left is better. Filled: waits have a limit.

    The distance from the bound, 1 - balance, is on a logarithmic axis: the good ones differ in the third digit.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4.6))
    for label, limited, wait, value in points:
        axis.scatter(
            wait,
            max(1.0 - value, 1e-3),
            s=55,
            **painted(label, filled=limited),
            linewidths=1.4,
            label=f"{label}{', limited waits' if limited else ''}",
        )
    least = min(wait for *_, wait, _ in points)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.3 if least < 1 else 0.7 * least)  # room for the markers of those that never wait
    plain_ticks(axis.xaxis, (0, 1, 2, 5, 10, 20, 50, 100, 200, 500))
    axis.set_yscale("log")
    axis.invert_yaxis()
    plain_ticks(axis.yaxis, [1.0 - value for value in BALANCES])
    axis.set_yticklabels([f"{1.0 - tick:.3g}" for tick in axis.get_yticks()])
    axis.set_xlabel("wait p99, s" + (" (logarithmic above 1)" if least < 1 else ""))
    axis.set_ylabel("balance (1 = bound)")
    axis.set_title(f"Waiting and balance on {workload}", fontsize=10)
    figure.legend(loc="outside right center", fontsize=8)
    return save(figure, stem)


@drawn
def regret(losses: Mapping[str, Sequence[float]], stem: Path, title: str) -> Path:
    """What each policy gives away of the best tokens/s of a cell: one dot per cell, and a bar at the mean."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(losses) + 1.4))
    for row, (label, lost) in enumerate(losses.items()):
        values = 100 * np.array(lost)
        # dots of equal regret stand one above the other: spread by rank, the same on every run
        heights = row + 0.5 * (np.argsort(np.argsort(values)) % 7 / 6.0 - 0.5)
        colour, marker, _ = look(label)
        axis.scatter(values, heights, s=18, color=colour, marker=marker, alpha=0.6, linewidths=1)
        if len(values):
            axis.plot([values.mean()] * 2, [row - 0.38, row + 0.38], color="black", linewidth=1.5)
    axis.set_yticks(range(len(losses)), list(losses))
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.1)
    plain_ticks(axis.xaxis, (0, 0.5, 1, 2, 5, 10, 20, 50))
    axis.set_xlabel("tokens/s given away against the best policy of the cell, % (logarithmic above 1; bar: mean)")
    figure.suptitle(title)
    return save(figure, stem)


def comparison(found: Mapping[str, Figures], title: str, stem: Path) -> Path:
    """What every policy makes of the same requests: load spread, TPOT p95 and p99 wait, a bar and its mark each."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 0.32 * len(found) + 1.4), sharey=True)
    columns = (
        ("load spread, 1,000 tokens", [1e-3 * f.load_spread_mean for f in found.values()]),
        ("TPOT p95, ms", [1e3 * f.tpot_p95_s for f in found.values()]),
        ("wait p99, s", [f.wait_p99_s for f in found.values()]),
    )
    for axis, (label, values) in zip(axes, columns, strict=True):
        for row, (name, value) in enumerate(zip(found, values, strict=True)):
            colour, marker, _ = look(name)
            axis.barh(row, value, color=colour, height=0.22, alpha=0.5)
            edge = {} if marker in LINES else {"edgecolors": BLACK, "linewidths": 0.6}
            axis.scatter(value, row, s=110, color=colour, marker=marker, zorder=3, **edge)
            axis.annotate(f"{value:.3g}", (value, row), (9, 0), textcoords="offset points", va="center", fontsize=8)
        axis.set_xlim(0, 1.18 * max(values) or 1)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(label)
    axes[0].set_yticks(range(len(found)), list(found))
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}, simulated")
    return save(figure, stem)


@drawn
def load_sweep(loads: Sequence[float], lines: Mapping[str, Sequence[Figures]], workload: str, stem: Path) -> Path:
    """Load spread and p99 wait against the offered load."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    lines_over(axes[0], loads, lines, "load_spread_mean", 1e-3)
    lines_over(axes[1], loads, lines, "wait_p99_s")
    axes[0].set_ylabel("load spread, 1,000 tokens")
    axes[1].set_ylabel("wait p99, s")
    axes[1].set_yscale("symlog", linthresh=1)
    axes[1].set_ylim(bottom=0)
    plain_ticks(axes[1].yaxis, (0, 1, 2, 5, 10, 20, 50, 100, 200))
    for axis in axes:
        axis.set_xlabel("offered load / ideal capacity")
    figure.suptitle(f"Load sweep on {workload}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3)
    return save(figure, stem)
