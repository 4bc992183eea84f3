"""The figures: PNG and SVG, readable in print and for the colour-blind.

Colours are the palette of Okabe and Ito with a darker grey; lines also differ in markers and dashes, so that they can
be told apart in grey. Every figure says on which workload it is, so that it can stand alone. Equal data give equal
bytes: nothing with a date or a random id is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.errors import InputError
from balanceroute.simulator import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#6E6E6E")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", (0, (1, 1)))
DPI = 160
BALANCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)  # ticks


def pyplot() -> Any:
    """matplotlib without a display, with our style. Raises: InputError where the extra is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'balanceroute[plots]'") from None
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
    path = stem.with_suffix(".png")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is found; each format would search for it again
    figure.savefig(path, dpi=DPI, metadata={"Software": "balanceroute"})
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": "balanceroute"})
    pyplot().close(figure)
    return path


def files(stem: str) -> list[str]:
    """The names that `save` writes."""
    return [f"{stem}.png", f"{stem}.svg"]


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linestyle": DASHES[index % len(DASHES)],
    }


def plain_ticks(axis: "Axis", candidates: Sequence[float]) -> None:
    """Numbers as people write them on a logarithmic axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in candidates if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(pyplot().NullLocator())


def load_panels(panels: Sequence[tuple[str, NDArray[np.int64]]], workload: str, stem: Path) -> Path:
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
    for axis in axes[-1]:
        axis.set_xlabel("decode step of the segment")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"KV load on {workload}, one line per decode worker; the same number of steps in every panel")
    return save(figure, stem)


def lines_over(
    axis: "Axes", x: Sequence[float], lines: Mapping[str, Sequence[Figures]], name: str, factor: float = 1.0
) -> None:
    """One line per router of one figure."""
    for index, (label, figures) in enumerate(lines.items()):
        axis.plot(x, [getattr(entry, name) * factor for entry in figures], label=label, **style(index))


def scaling(widths: Sequence[int], lines: Mapping[str, Sequence[Figures]], workload: str, stem: Path) -> Path:
    """Load spread, TPOT p95 and balance against the number of workers."""
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
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(widths), [str(width) for width in widths])
        axis.minorticks_off()
        axis.set_xlabel("decode workers G")
        axis.set_ylabel(label)
    axes[0].set_yscale("log")
    plain_ticks(axes[0].yaxis, (2, 5, 10, 20, 50, 100, 200, 500, 1000))
    figure.suptitle(f"Scaling on {workload}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=3)
    return save(figure, stem)


def sensitivity(
    points: Mapping[int, Mapping[tuple[float, float], float]],
    deployed: Sequence[tuple[float, float]],
    workload: str,
    stem: Path,
) -> Path:
    """Load spread over the (beta, gamma) plane, one panel per width; stars are the paper's operating points."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(points), figsize=(4.6 * len(points), 3.8), squeeze=False)
    for axis, (width, spreads) in zip(axes[0], points.items(), strict=True):
        values = [value / 1000 for value in spreads.values()]
        for marker, chosen in (("o", [p for p in spreads if p not in deployed]), ("*", list(deployed))):
            dots = axis.scatter(
                [beta for beta, _ in chosen],
                [gamma for _, gamma in chosen],
                c=[spreads[point] / 1000 for point in chosen],
                s=160 if marker == "o" else 320,
                marker=marker,
                cmap="cividis_r",
                vmin=min(values),
                vmax=max(values),
                edgecolors="black",
                label="the paper's operating points" if marker == "*" else "swept",
            )
        for (beta, gamma), value in spreads.items():
            above = (beta, gamma) not in deployed
            axis.annotate(
                f"{value / 1000:.0f}k",
                (beta, gamma),
                xytext=(7, 7) if above else (-9, -14),
                textcoords="offset points",
                ha="left" if above else "right",
            )
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xticks([1, 15, 24, 48, 96], ["1", "15", "24", "48", "96"])
        axis.minorticks_off()
        axis.set_xlim(0.6, 200)
        axis.set_ylim(0.42, 1.08)
        axis.set_xlabel("beta")
        axis.set_ylabel("gamma")
        axis.set_title(f"G = {width}", fontsize=9)
        figure.colorbar(dots, ax=axis, label="load spread, 1,000 tokens")
    figure.suptitle(f"BR-H with an oracle on {workload}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save(figure, stem)


def overhead(fans: Sequence[tuple[str, NDArray[np.float64]]], budget_ms: float, workload: str, stem: Path) -> Path:
    """A fan of percentiles per stage: to p50, to p95, to p99, to the maximum; the tick is the mean."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 0.38 * len(fans) + 1.4))
    for row, (_, values) in enumerate(fans):
        low, p50, p95, p99, top = np.percentile(values, (0, 50, 95, 99, 100))
        low = min(max(low, 1.0), p50)
        for start, end, alpha in ((low, p50, 1.0), (p50, p95, 0.6), (p95, p99, 0.35), (p99, top, 0.15)):
            axis.barh(row, end - start, left=start, color=COLOURS[0], alpha=alpha, height=0.7)
        axis.plot([values.mean()] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
    axis.axvspan(budget_ms * 900, budget_ms * 1100, color=COLOURS[4], alpha=0.4)
    axis.text(budget_ms * 850, -0.9, "one engine step", ha="right", va="center", fontsize=8)
    axis.set_yticks(range(len(fans)), [label for label, _ in fans])
    axis.set_ylim(len(fans) - 0.4, -1.4)
    axis.set_xscale("log")
    axis.set_xlabel("microseconds per decision (bars to p50, p95, p99, max, ever lighter; tick: mean)")
    figure.suptitle(f"What a decision costs on {workload}, G = 8")
    return save(figure, stem)


def wait_versus_balance(points: Sequence[tuple[str, bool, float, float]], workload: str, stem: Path) -> Path:
    """p99 wait against balance: up and to the left is better. Filled: waiting is capped.

    The distance from the bound, 1 - balance, is on a logarithmic axis: the good ones differ in the third digit.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4.6))
    labels = list(dict.fromkeys(label for label, *_ in points))
    places = {label: index for index, label in enumerate(labels)}
    for label, capped, wait, value in points:
        index = places[label]
        colour = COLOURS[index % len(COLOURS)]
        axis.scatter(
            wait,
            max(1.0 - value, 1e-3),
            marker=MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
            s=55,
            facecolors=colour if capped else "none",
            edgecolors=colour,
            linewidths=1.4,
            label=f"{label}{', wait capped' if capped else ''}",
        )
    least = min(wait for *_, wait, _ in points)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.3 if least < 1 else 0.7 * least)  # room for the markers of those that never wait
    plain_ticks(axis.xaxis, (0, 1, 2, 5, 10, 20, 50, 100, 200, 500))
    axis.set_yscale("log")
    axis.invert_yaxis()
    plain_ticks(axis.yaxis, [1.0 - value for value in BALANCES])
    axis.set_yticklabels([f"{1.0 - tick:g}" for tick in axis.get_yticks()])
    axis.set_xlabel("wait p99, s" + (" (logarithmic above 1)" if least < 1 else ""))
    axis.set_ylabel("balance (1 = bound)")
    axis.set_title(f"Waiting and balance on {workload}", fontsize=10)
    figure.legend(loc="outside right center", fontsize=8)
    return save(figure, stem)


def regret(losses: Mapping[str, Sequence[float]], stem: Path) -> Path:
    """What each policy gives away of the best tokens/s of a cell: one dot per cell, and a bar at the mean."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(losses) + 1.4))
    for row, (_, lost) in enumerate(losses.items()):
        values = 100 * np.array(lost)
        # dots of equal regret stand one above the other: spread by rank, the same on every run
        heights = row + 0.5 * (np.argsort(np.argsort(values)) % 7 / 6.0 - 0.5)
        axis.scatter(values, heights, s=18, color=COLOURS[row % len(COLOURS)], alpha=0.6, linewidths=0)
        if len(values):
            axis.plot([values.mean()] * 2, [row - 0.38, row + 0.38], color="black", linewidth=1.5)
    axis.set_yticks(range(len(losses)), list(losses))
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.1)
    plain_ticks(axis.xaxis, (0, 0.5, 1, 2, 5, 10, 20, 50))
    axis.set_xlabel("tokens/s given away against the best policy of the cell, % (logarithmic above 1; bar: mean)")
    figure.suptitle("Regret over the busy cells of the grid, simulated")
    return save(figure, stem)


def comparison(found: Mapping[str, Figures], title: str, stem: Path) -> Path:
    """What every policy makes of the same requests: load spread, TPOT p95 and p99 wait, one bar each."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 0.32 * len(found) + 1.4), sharey=True)
    columns = (
        ("load spread, 1,000 tokens", [1e-3 * f.load_spread_mean for f in found.values()]),
        ("TPOT p95, ms", [1e3 * f.tpot_p95_s for f in found.values()]),
        ("wait p99, s", [f.wait_p99_s for f in found.values()]),
    )
    for axis, (label, values) in zip(axes, columns, strict=True):
        bars = axis.barh(range(len(values)), values, color=[COLOURS[0], *[COLOURS[1]] * (len(values) - 1)])
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.margins(x=0.15)
        axis.set_xlabel(label)
    axes[0].set_yticks(range(len(found)), list(found))
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}, simulated")
    return save(figure, stem)


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
