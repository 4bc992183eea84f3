"""`scripts/docs_figures.py`: the README's figures are those of the commands that a reader has."""

import json
import re

import pytest

from scripts import docs_figures
from tests.commands import run_command


@pytest.mark.parametrize("policy", ["join_shortest_queue", "random", "br_h"])
def test_each_row_of_the_readmes_policy_table_equals_replays_output(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs_figures, "ROWS", 300)
    arguments = ["replay", "--policy", policy, "--seed", "3", "--max-requests", "300", "--json"]
    code, out, _ = run_command(capsys, monkeypatch, *arguments)
    assert code == 0
    printed = json.loads(out)
    shown = docs_figures.simulated(policy, 3).figures
    assert {key: getattr(shown, key) for key in docs_figures.KEPT} == {key: printed[key] for key in docs_figures.KEPT}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", r"(\d+)k tokens on the left and (\d+)k on the right"),
        ("docs/index.md", r"(\d+)k tokens on the left and (\d+)k on the right"),
        ("docs/quickstart.md", r"`load_spread_mean` \(about (\d+),000 and (\d+),000 tokens\)"),
        ("docs/zh/quickstart.md", r"`load_spread_mean`（约 (\d+),000 与 (\d+),000"),
    ],
)
def test_the_pages_state_the_load_spread_of_the_runs_that_they_show(
    page: str, expected: str, spreads: list[float]
) -> None:
    found = re.search(expected, (docs_figures.ROOT / page).read_text())
    assert found is not None
    # another numpy, or another CPU, may round a number and with it a run otherwise
    assert [float(number) * 1000 for number in found.groups()] == pytest.approx(spreads, rel=0.1)


@pytest.fixture(scope="module")
def spreads() -> list[float]:
    """Load spreads of the two runs of docs/figures/load_panels.png."""
    return [docs_figures.simulated(policy, 0).figures.load_spread_mean for policy in docs_figures.SHOWN]
