import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanceroute.cli import app
from balanceroute.cli.predictor import MOST_BUCKETS
from balanceroute.config.sections.routing import Predictor
from balanceroute.errors import BalanceRouteError
from balanceroute.prediction import FinishedRequest, History

KEYS = {"auc", "brier", "conditional_mae", "samples", "finish_rate", "calibration", "us_per_call"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight prompts that recur every four seconds, each with its own output length."""
    path = tmp_path / "trace.csv"
    rows = [f"{at * 0.5},{1000 + at % 8},{100 + 40 * (at % 8)},k{at % 8}" for at in range(240)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,prompt_key", *rows]) + "\n")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["predictor", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def evaluated(*arguments: object) -> dict[str, float]:
    found = json.loads(run("evaluate", *arguments, "--json"))
    assert set(found) >= KEYS
    return found


def test_exact_match_recognises_recurring_prompts_and_survival_does_not(trace: Path) -> None:
    survival = evaluated("--trace", trace, "--kind", "survival", "--horizon", 80)
    exact = evaluated("--trace", trace, "--kind", "exact_match", "--horizon", 80)

    assert exact["auc"] == 1.0 > survival["auc"]
    assert exact["conditional_mae"] == 0.0 < survival["conditional_mae"]
    assert exact["samples"] == survival["samples"] > 500


def test_a_fitted_model_is_judged_as_a_training_trace_is(trace: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.npz"

    assert json.loads(run("fit", "--trace", trace, "--kind", "exact_match", "--out", model, "--json"))["rows"] == 240

    by_model = evaluated("--trace", trace, "--model", model)
    by_train = evaluated("--trace", trace, "--train", trace, "--kind", "exact_match")
    assert {name: by_model[name] for name in KEYS - {"us_per_call"}} == {
        name: by_train[name] for name in KEYS - {"us_per_call"}
    }


def test_a_routers_history_can_be_fitted_from(trace: Path, tmp_path: Path) -> None:
    history = History(tmp_path / "history.sqlite3")
    history.add(FinishedRequest("k1", 1001, 140, "stop", 5.0))
    history.close()

    run("fit", "--history", tmp_path / "history.sqlite3", "--out", tmp_path / "m.npz")

    assert evaluated("--trace", trace, "--model", tmp_path / "m.npz")["samples"] > 0


def test_people_get_a_table_and_a_reliability_diagram(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = run("evaluate", "--trace", trace, "--kind", "exact_match", "--online", "--plot", tmp_path / "r.png")

    assert "conditional_mae" in output
    assert "calibration" in output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fit", "--out", "m.npz"], "either --trace or --history"),
        (["fit", "--history", "missing.sqlite3", "--out", "m.npz"], "not a readable prediction history"),
        (["fit", "--trace", "{trace}", "--kind", "oracle", "--out", "m.npz"], "'oracle' writes no model file"),
        (["evaluate", "--trace", "{trace}", "--model", "missing.npz"], "cannot be read"),
        (["evaluate", "--trace", "{trace}", "--model", "a", "--train", "b"], "not both"),
        (["evaluate", "--trace", "missing.csv"], "missing.csv"),
        (["fit", "--trace", "{trace}", "--out", "{trace}"], "cannot be written: it is the file that is read"),
    ],
    ids=["nothing to fit", "no history", "unknown kind", "no model", "two sources", "no trace", "over its trace"],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], reason: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BalanceRouteError, match=reason):
        CliRunner().invoke(app, ["predictor", *(a.format(trace=trace) for a in arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--kind", "exact_match"], "--kind exact_match: .* holds a survival predictor"),
        (["--param", "a=1"], "--param: changes nothing here; it is read without --model"),
        (["--size-buckets", "4"], "--size-buckets: changes nothing here; it is read by exact_match"),
    ],
    ids=["another kind", "options", "buckets"],
)
def test_options_that_a_model_file_does_not_use_are_refused(
    options: list[str], reason: str, trace: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.npz"
    run("fit", "--trace", trace, "--out", model)
    assert "survival" in run("evaluate", "--trace", trace, "--model", model, "--kind", "survival")
    with pytest.raises(BalanceRouteError, match=reason):
        run("evaluate", "--trace", trace, "--model", model, *options)


def test_an_unknown_format_of_a_diagram_is_refused_before_the_evaluation(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BalanceRouteError, match=r"--plot .*: accepted are names that end in \.png, \.svg, \.pdf"):
        run("evaluate", "--trace", "missing.csv", "--plot", tmp_path / "r.foo")


def test_a_diagram_s_format_may_be_written_in_capitals(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("evaluate", "--trace", trace, "--plot", tmp_path / "r.PNG")
    assert (tmp_path / "r.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_figure_is_drawn_below_a_notebook_whose_way_to_show_figures_is_not_installed_here(
    trace: Path, tmp_path: Path
) -> None:
    """`!balanceroute ...` in a cell has the notebook's MPLBACKEND."""
    command = [sys.executable, "-m", "balanceroute", "predictor", "evaluate", "--trace", trace, "--plot"]
    environment = os.environ | {"MPLBACKEND": "module://not_installed_here"}
    done = subprocess.run([*command, tmp_path / "r.png"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.png").stat().st_size


def test_a_log_is_judged_on_as_it_is(tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": 900 * at, "input_length": 50, "output_length": 30}) for at in range(40)]
    (tmp_path / "day.jsonl").write_text("\n".join(lines))
    found = json.loads(run("evaluate", "--trace", str(tmp_path / "day.jsonl"), "--json"))
    assert found["requests"] == 20


@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_help_shows_an_example(command: str) -> None:
    assert "Example: balanceroute predictor" in run(command, "--help")


def test_more_size_buckets_than_a_router_accepts_are_refused(trace: Path) -> None:
    """A bucket is an array: so many would not fit into memory."""
    accepted = Predictor.model_fields["size_buckets"].metadata
    assert MOST_BUCKETS in [getattr(bound, "le", None) for bound in accepted]
    arguments = ["predictor", "evaluate", "--trace", str(trace), "--kind", "exact_match", "--size-buckets"]
    assert CliRunner().invoke(app, [*arguments, str(MOST_BUCKETS)]).exit_code == 0
    for buckets in (MOST_BUCKETS + 1, 10**14):
        assert CliRunner().invoke(app, [*arguments, str(buckets)]).exit_code == 2


def test_a_horizon_that_no_router_accepts_is_refused(trace: Path, tmp_path: Path) -> None:
    arguments = ["predictor", "fit", "--trace", str(trace), "--horizon", "4097", "--out", str(tmp_path / "m.npz")]
    assert CliRunner().invoke(app, arguments).exit_code == 2
