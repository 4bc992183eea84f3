"""Tables: Markdown for people, CSV for programs, from the same rows."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from balanceroute.whole_file import write_whole

Cell = str | int | float | None


def ratio(value: float, to: float) -> float | None:
    """How many times the one the other is; a gap where that one is 0, as the load spread of equal requests may be."""
    return value / to if to else None


@dataclass(slots=True)
class Table:
    """A named table; `digits` gives the decimals of a column in Markdown (CSV keeps six significant digits)."""

    name: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    digits: dict[str, int] = field(default_factory=dict)

    def add(self, *cells: Cell) -> None:
        """Append a row of as many cells as there are columns."""
        assert len(cells) == len(self.columns), f"{self.name}: {len(cells)} cells for {len(self.columns)} columns"
        self.rows.append(list(cells))

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = ["| " + " | ".join(self.columns) + " |"]
        lines.append("|" + "|".join("---" if index == 0 else "--:" for index in range(len(self.columns))) + "|")
        for row in self.rows:
            cells = (self.text(column, cell) for column, cell in zip(self.columns, row, strict=True))
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def text(self, column: str, cell: Cell) -> str:
        """One cell as people read it."""
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            return "–"
        if isinstance(cell, float):
            return f"{cell:,.{self.digits.get(column, 0)}f}"
        return f"{cell:,}" if isinstance(cell, int) else cell

    def write_csv(self, folder: Path) -> Path:
        """Write the table to `folder` under its name."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in self.rows)
        path = folder / f"{self.name}.csv"
        write_whole(path, text.getvalue().encode())
        return path
