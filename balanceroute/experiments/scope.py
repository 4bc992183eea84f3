"""The size of the experiments: the paper's in full, or a quick version of each."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from balanceroute.experiments.jobs import Workload, replayed, whole_trace
from balanceroute.experiments.tables import Table

PRESET_NAMES = ("heavy_tailed", "capped")
TITLES = {
    "heavy_tailed": "heavy_tailed (synthetic, the moments of the paper's proprietary trace)",
    "capped": "capped (synthetic stand-in for Azure-2024 above 1,000 output tokens; the spread of its prompts, which"
    " the paper does not give, was fitted to the paper's JSQ imbalance)",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope of every experiment; `quick`: fewer seeds and rows."""

    quick: bool = False
    trace: str | None = None  # a trace file of the user, in place of the synthetic workloads
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rows: int = 8000
    widths: tuple[int, ...] = (4, 8, 16, 32, 64, 144)
    sensitivity_widths: tuple[int, ...] = (8, 16)
    policies: tuple[str, ...] = ()  # further rows of the main table: users' own policies, by name
    loads: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
    sweep_rows: int = 6000

    @classmethod
    def of(cls, *, quick: bool, trace: str | None, policies: tuple[str, ...] = ()) -> "Scope":
        """The full or the quick scope."""
        seeds = (0,) if trace else (0, 1, 2, 3, 4)
        if trace:
            trace = os.path.abspath(trace)  # a file may bear the name of a preset
        if not quick:
            return cls(trace=trace, seeds=seeds, policies=policies)
        return cls(
            quick=True,
            trace=trace,
            policies=policies,
            seeds=seeds[:1],
            widths=(4, 8, 16),
            sensitivity_widths=(8,),
            loads=(0.5, 0.8, 1.0, 1.2),
            sweep_rows=4000,
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Workloads by name, or the user's trace."""
        return (self.trace,) if self.trace else PRESET_NAMES

    def workload(self, source: str, seed: int = 0, *, rows: int | None = None, load: float = 1.15) -> Workload:
        """A workload at this scope's size."""
        return Workload(source, seed, rows or self.rows, load)

    def rows_at(self, n_workers: int) -> int:
        """Requests for a cluster of that width: as many per worker as with eight."""
        return self.rows * n_workers // 8

    def replayed_rows(self, source: str, rows: int | None) -> int:
        """How many requests are replayed where `rows` are wanted: a user's trace may have fewer."""
        workload = self.workload(source, rows=rows)
        return workload.rows if workload.synthetic else len(replayed(workload, 8)[0])

    def at_once(self, source: str, rows: int | None = None) -> bool:
        """Whether all that is replayed arrives at one time, so that no load can be set."""
        workload = self.workload(source, rows=rows)
        if workload.synthetic:
            return False
        arrivals = replayed(workload, 8)[0].arrival_s
        return bool(arrivals[0] == arrivals[-1])

    def title(self, source: str, rows: int | None = None) -> str:
        """The description of a workload, with whether it is synthetic; `rows` as for `workload`."""
        return (
            TITLES[source] if source in TITLES else f"{Workload(source).name} (your trace: {self.split(source, rows)})"
        )

    def split(self, source: str, rows: int | None = None) -> str:
        """The parts of a user's trace that are history and that are replayed, in words."""
        total, history = len(whole_trace(source)), len(replayed(self.workload(source, rows=rows), 8)[1])
        if total == 1:
            return "its one request is both history and replayed"
        replays = self.replayed_rows(source, rows)
        return f"of its {total:,} requests the first {history:,} are history, the next {replays:,} are replayed"


@dataclass(slots=True)
class Section:
    """One part of the report."""

    title: str
    blocks: list[str] = field(default_factory=list)  # Markdown paragraphs and tables, in order
    tables: list[Table] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)

    def text(self, paragraph: str) -> None:
        """Append a paragraph."""
        self.blocks.append(paragraph)

    def table(self, table: Table) -> None:
        """Append a table; it is written as CSV too."""
        self.tables.append(table)
        self.blocks.append(table.markdown())

    def figure(self, path: Path | None, caption: str) -> None:
        """Append a figure that was saved as PNG and SVG beside the report; None: it could not be drawn."""
        if path is None:
            return
        self.figures.append(path)
        self.blocks.append(f"![{caption}]({path.name})")

    def markdown(self) -> str:
        """The section as Markdown."""
        return "\n\n".join([f"## {self.title}", *self.blocks])
