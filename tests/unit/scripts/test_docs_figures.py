"""`scripts/docs_figures.py`: the README's figures are those of the commands that a reader has."""

import json
import sys

import pytest

from balanceroute.cli import main
from scripts import docs_figures


@pytest.mark.parametrize("policy", ["join_shortest_queue", "random", "br_h"])
def test_a_policy_of_the_readme_s_table_is_what_replay_prints_for_that_seed(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs_figures, "ROWS", 1500)
    arguments = ["replay", "--policy", policy, "--seed", "3", "--max-requests", "1500", "--json"]
    monkeypatch.setattr(sys, "argv", ["balanceroute", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    shown = docs_figures.simulated(policy, 3).figures
    assert {key: getattr(shown, key) for key in docs_figures.KEPT} == {key: printed[key] for key in docs_figures.KEPT}


def test_the_pages_say_how_far_apart_the_loads_are_in_the_runs_that_they_show() -> None:
    shown = [docs_figures.simulated(policy, 0).figures.load_spread_mean for policy in docs_figures.SHOWN]
    left, right = (round(spread / 1000) for spread in shown)
    for page in ("README.md", "docs/index.md"):
        assert f"{left}k tokens on the left and {right}k on the right" in (docs_figures.ROOT / page).read_text(), page
    assert f"(about {left},000 and {right},000 tokens)" in (docs_figures.ROOT / "docs/quickstart.md").read_text()
    assert f"{left},000 与 {right},000" in (docs_figures.ROOT / "docs/zh/quickstart.md").read_text()
