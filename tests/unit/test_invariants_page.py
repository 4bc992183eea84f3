"""The page of invariants: each has one row, and what checks it says so."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROWS = dict(re.findall(r"^\| (INV-\d+) \|.*?\| (`.*?) \|", (REPO / "docs/invariants.md").read_text(), re.MULTILINE))
CHECKS = [
    pytest.param(number, name, id=f"{number}-{Path(name).stem}")
    for number, checked_in in ROWS.items()
    for name in re.findall(r"`(\S*test_\w+\.py)`", checked_in)
]


def test_every_invariant_that_code_and_tests_cite_has_a_row() -> None:
    sources = [path for folder in ("balanceroute", "tests") for path in (REPO / folder).rglob("*.py")]
    cited = {number for path in sources for number in re.findall(r"\bINV-\d+\b", path.read_text())}
    assert cited == set(ROWS)


@pytest.mark.parametrize(("number", "name"), CHECKS)
def test_every_invariant_is_cited_by_a_test(number: str, name: str) -> None:
    (found,) = REPO.glob(name if "/" in name else f"tests/**/{name}")
    assert re.search(rf"\b{number}\b", found.read_text())
