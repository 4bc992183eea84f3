"""Writes docs/results/reproduction.md from what `balanceroute reproduce` has left in a folder, with its small figures.

balanceroute reproduce --out FOLDER
python -m scripts.results_page FOLDER COMMIT
"""

import re
import shutil
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "results" / "reproduction.md"
FIGURES = ("scaling", "sensitivity", "wait_heavy_tailed")  # the panels of every router and width are megabytes


def page(report: str, commit: str) -> str:
    """The report under a heading that says where it is from, without the figures that are left out."""
    told = (
        f"# What `balanceroute reproduce` prints\n\nThe whole report, of commit {commit} on two cores, from a clean "
        "install; `python -m scripts.results_page` made this page of it. Run it for the figures that are not here: the "
        "load panels of every router and width, of the sweep, and the others that the report names."
    )
    body = report.removeprefix("# The paper's experiments, simulated\n")
    kept = re.sub(r"!\[([^\]]*)\]\((\w+)\.png\)\n+", lambda found: found[0] if found[2] in FIGURES else "", body)
    return f"{told}\n{kept}"


def main() -> None:
    """Write the page and its figures."""
    folder, commit = Path(sys.argv[1]), sys.argv[2]
    PAGE.write_text(page((folder / "REPORT.md").read_text(), commit))
    for name in FIGURES:
        shutil.copy(folder / f"{name}.png", PAGE.parent)


if __name__ == "__main__":
    main()
