"""`reproduce`: plans, parallel runs, reports, figures, and equal bytes for equal seeds."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balanceroute.core.policies import BUILT_IN, make_policy
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.errors import InputError
from balanceroute.experiments import (
    EXPERIMENTS,
    Scope,
    fairness,
    figures,
    files_of,
    grid,
    jobs,
    main_results,
    methods,
    paper,
    reproduce,
    scaling,
    subsets,
)
from balanceroute.experiments.jobs import Job, Workload, replayed, run_jobs
from balanceroute.experiments.methods import MAIN
from balanceroute.experiments.tables import Table
from balanceroute.simulator import Replay
from balanceroute.traces import Trace, generate_trace, write_trace
from balanceroute.traces.trace import COLUMNS
from tests.commands import run_command

TINY = replace(Scope.of(quick=True, trace=None), seeds=(0, 1), rows=60, widths=(2, 4), loads=(0.5, 1.1), sweep_rows=40)


class Counting(AdmissionPolicy):
    """Another policy, and how many admissions each of its stages has made."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy, self.name = policy, policy.name
        self.waits_for_slots, self.horizon_steps = policy.waits_for_slots, policy.horizon_steps
        self.stages: Counter[int] = Counter()

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        for choice in self.policy.decide(snapshot, now):
            self.stages[choice.stage] += 1
            yield choice


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def a_short_trace(path: Path) -> str:
    """A trace file whose replay takes a fraction of a second."""
    write_trace(generate_trace("heavy_tailed", rows=80, seed=9).with_lengths(0.05, 0.03), path)
    return str(path)


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_whatever_the_number_of_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = [tmp_path / "one", tmp_path / "other"]
    scope = replace(TINY, trace=a_short_trace(tmp_path / "t.csv"), seeds=(0,))
    for folder, processes in zip(folders, (1, 2), strict=True):
        reproduce(["fairness"], scope, folder, n_processes=processes)
        assert sorted(path.name for path in folder.iterdir()) == files_of(["fairness"], scope)
    one, other = map(digests, folders)
    assert one == other
    assert {".md", ".csv", ".png", ".svg"} == {Path(file).suffix for file in one}


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where matplotlib is not installed: they take as long as all the rest."""
    monkeypatch.setattr(figures, "available", lambda: False)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated traces whose answers end after a thirtieth of their steps: each simulation takes so much less."""

    def shortened(*args: Any, **kwargs: Any) -> Trace:
        return generate_trace(*args, **kwargs).with_lengths(0.05, 0.03)

    monkeypatch.setattr(jobs, "generate_trace", shortened)
    jobs.replayed.cache_clear()
    yield
    jobs.replayed.cache_clear()


@pytest.mark.usefixtures("no_figures", "short_answers")
def test_the_report_shows_the_papers_ratios_and_names_synthetic_data(tmp_path: Path) -> None:
    text = reproduce(["main"], replace(TINY, rows=20, seeds=(0,)), tmp_path, n_processes=1)
    assert text == (tmp_path / "REPORT.md").read_text()
    assert "synthetic" in text
    assert "No row of either is a real request." in text
    br_0 = next(line for line in text.splitlines() if line.startswith("| BR-0 |"))
    assert br_0.split("|")[5].strip() == "4.1"  # the paper's 215,110 / 51,927
    assert "BR-0, limit" in text
    assert "| BR-0, both stages, R_max 4 |" in text and "| BR-H survival, both stages, R_max 8 |" in text
    assert "fitted to the paper's JSQ imbalance" in text
    assert "## What of the paper is not done here" in text and all(item in text for item in paper.NOT_DONE)


@pytest.mark.parametrize(
    ("method", "both"), [(methods.BR_0, False), (methods.BR_0_BOTH_4, True), (methods.BR_H_BOTH_8, True)]
)
def test_both_stages_run_only_in_the_rows_that_name_them(method: methods.Method, both: bool) -> None:
    job = Job(Workload("heavy_tailed", rows=900), method, 2)
    trace, train = replayed(job.workload, job.n_workers)
    policy = Counting(make_policy(method.policy))
    Replay(trace, method.policy, job.setting, method.predictor, train, own_policy=policy).run()
    assert policy.stages[1] > 0 and (policy.stages[2] > 0) is both


@pytest.mark.usefixtures("short_answers")
def test_the_subsets_report_has_a_row_per_number_of_candidates(tmp_path: Path) -> None:
    scope = replace(TINY, rows=10, seeds=(0,))
    text = reproduce(["subsets"], scope, tmp_path, n_processes=1)
    assert all(f"| BR-0, our defaults | {r_max} |" in text for r_max in subsets.R_MAX)
    assert sorted(path.name for path in tmp_path.iterdir()) == files_of(["subsets"], scope)


def test_every_load_panel_of_the_paper_is_drawn() -> None:
    files = files_of([], Scope.of(quick=False, trace=None))
    assert {f"loads_{name}.png" for name in ("heavy_tailed", "capped")} <= set(files)
    assert {f"loads_scaling_g{width}.png" for width in paper.SCALING} <= set(files)
    assert {f"loads_sensitivity_g{width}.png" for width in paper.SENSITIVITY} <= set(files)


def test_overhead_is_measured_by_stage() -> None:
    job = Job(Workload("heavy_tailed", rows=200), methods.BR_H_DEFAULT, 2, timed=True)
    times = job.run().times
    assert times is not None
    parts = sum(values.sum() for values in times.stages.values())
    assert 0 < parts < times.total.sum()


def test_the_predictors_are_evaluated_on_an_unseen_draw(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = reproduce(["predictors"], replace(TINY, rows=120), tmp_path, n_processes=1)
    assert "| heavy_tailed | exact_match |" in text
    assert "Not reproduced (figures not within" in text and "exact_match on heavy_tailed: MAE" in text
    trace, train = replayed(Workload("heavy_tailed", rows=120), 8)
    assert trace.output_tokens.tolist() != train.output_tokens.tolist()


def test_jobs_that_are_needed_twice_run_once() -> None:
    job = Job(Workload("capped", rows=20), methods.JSQ, 2)
    progress: list[tuple[int, int]] = []
    results = run_jobs([job, job], 1, lambda done, total: progress.append((done, total)))
    assert list(results) == [job]
    assert progress == [(1, 1)]


def test_the_main_table_runs_every_router_with_a_pool_under_the_common_wait_cap_too() -> None:
    planned = {job.method for job in main_results.plan(replace(TINY, seeds=(7,)))}
    assert {method.seeded(7) for method in MAIN} <= planned
    for method in MAIN:
        rows = [row.policy.max_wait_s for row in planned if row.label == method.label]
        if method.pooled:
            assert methods.WAIT_CAP_S in rows, method.label
        else:
            assert len(rows) == 1, method.label


def test_every_row_that_names_the_paper_is_in_its_tables() -> None:
    named = {method.paper for method in MAIN if method.paper}
    assert named == set(paper.MAIN["heavy_tailed"]) == set(paper.MAIN["capped"])


@pytest.mark.usefixtures("no_figures")
def test_a_users_trace_is_replayed_after_its_own_history(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv.gz"
    whole = generate_trace("capped", rows=100, seed=9)
    write_trace(whole, path)
    trace, train = replayed(Workload(str(path), rows=50), 2)
    assert len(train) == 30
    assert trace.prompt_tokens.tolist() == whole.prompt_tokens[30:80].tolist()
    scope = replace(TINY, trace=str(path), seeds=(0,))
    text = reproduce(["main"], scope, tmp_path / "out", n_processes=1)
    assert "mine (your trace" in text
    assert "synthetic" not in text


@pytest.mark.usefixtures("no_figures")
def test_the_report_says_how_much_of_a_users_trace_is_replayed(tmp_path: Path) -> None:
    scope = replace(TINY, trace=a_short_trace(tmp_path / "t.csv"), seeds=(0,), rows=40, widths=(2, 16))
    text = reproduce(["scaling", "fairness"], replace(scope, sweep_rows=30), tmp_path / "out", n_processes=1)
    assert "of its 80 requests the first 24 are history, the next 40 are replayed" in text
    assert "as far as the trace has them: 10 at G = 2, 56 at G = 16" in text
    assert "Load sweep on t, one seed, 30 requests" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files_of(["scaling", "fairness"], scope)


def test_requests_that_arrive_at_one_time_have_no_load_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = generate_trace("heavy_tailed", rows=40).with_lengths(0.05, 0.03)
    write_trace(Trace(0 * drawn.arrival_s, *(getattr(drawn, name) for name in COLUMNS[1:])), tmp_path / "t.csv")
    scope = replace(TINY, trace=str(tmp_path / "t.csv"), seeds=(0,))
    text = reproduce(["fairness"], scope, tmp_path / "out", n_processes=1)
    assert "No load sweep on t: its requests arrive at one time" in text
    assert "load 0.5" not in text
    assert "stretched to the stated load" not in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files_of(["fairness"], scope)


@pytest.mark.parametrize("name", ["main", "scaling", "sensitivity", "bound"])
def test_requests_that_leave_no_load_spread_have_a_gap_where_it_divides(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As many equal requests for each worker, all at one time: every policy is level."""
    if name == "main":  # its figure has the loads, where nothing divides
        request.getfixturevalue("no_figures")
    text = "arrival_s,prompt_tokens,output_tokens\n" + "0,500,20\n" * 45  # of which 32 are replayed
    (tmp_path / "t.csv").write_text(text)
    scope = replace(TINY, trace=str(tmp_path / "t.csv"), seeds=(0,), widths=(8,))
    report = reproduce([name], scope, tmp_path / "out", n_processes=1)
    assert "| 0 | – |" in report
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files_of([name], scope)


def test_predictors_on_a_users_trace_say_nothing_of_the_synthetic_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_short_trace(tmp_path / "heavy_tailed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    text = reproduce(["predictors"], Scope.of(quick=True, trace="heavy_tailed"), tmp_path / "out", n_processes=1)
    assert "the first 24 are history, the next 56 are replayed. Trained on the history, judged" in text
    assert "disjoint draw" not in text
    assert "recurring half" not in text
    row = next(line for line in text.splitlines() if line.startswith("| heavy_tailed | survival |"))
    assert row.split("|")[4].strip() == "–"  # the paper judged no such file


def test_a_predictor_without_its_extra_is_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    text = reproduce(["predictors"], replace(TINY, rows=40), tmp_path, n_processes=1)
    assert "`learned` is left out: it needs scikit-learn (`scripts/install learned`)." in text


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_an_experiment_reads_the_options_that_change_what_it_runs_and_no_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    trace = tmp_path / "mine.csv"
    lines = (f"{n},{1600 + n},{50 + n % 9},k,1 2 {n}" for n in range(40))
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,prompt_key,prefix_blocks", *lines]) + "\n")
    experiment, full = EXPERIMENTS[name], Scope.of(quick=False, trace=None)
    others = {
        "quick": Scope.of(quick=True, trace=None),
        "trace": Scope.of(quick=False, trace=str(trace)),
        "policy": replace(full, policies=("own_policy:FirstFit",)),
    }
    planned = repr(experiment.module.plan(full))
    assert {
        option for option, scope in others.items() if repr(experiment.module.plan(scope)) != planned
    } == experiment.reads


def test_an_option_that_no_chosen_experiment_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, expected in (
        (["bound", "--policy", "x:Y"], "--policy: changes nothing in bound; it is read by main"),
        (["predictors", "--quick"], "--quick: changes nothing in predictors; it is read by main, scaling"),
    ):
        out = str(tmp_path / "out")
        code, printed, error_text = run_command(capsys, monkeypatch, "reproduce", *arguments, "--out", out)
        assert code == 2 and error_text.startswith(f"balanceroute: {expected}") and not printed
    assert not (tmp_path / "out").exists()


def test_unknown_experiments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"unknown experiment 'xyz'; one of {', '.join(EXPERIMENTS)}"):
        reproduce(["xyz"], TINY, tmp_path)
    with pytest.raises(InputError, match="unknown experiment 'grd'; did you mean grid"):
        reproduce(["grd"], TINY, tmp_path)


def never(*_: object) -> None:
    raise AssertionError("nothing may run")


@pytest.mark.parametrize("name", ["REPORT.md", "scaling.csv", "scaling.png", "scaling.svg"])
def test_a_folder_in_place_of_a_file_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: is a folder"):
        reproduce(["scaling"], TINY, tmp_path, n_processes=1, on_progress=never)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that even root cannot write is needed")
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="/proc/self: cannot be written"):
        reproduce(["predictors"], TINY, Path("/proc/self"), n_processes=1, on_progress=never)


def test_a_file_in_place_of_the_folder_is_refused_as_that(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match="out: cannot be written: it is no folder"):
        reproduce(["predictors"], TINY, tmp_path / "out", n_processes=1, on_progress=never)


def test_the_folder_is_made_and_none_above_it(tmp_path: Path) -> None:
    """As with what other commands write: a folder that is not there is most likely mistyped."""
    with pytest.raises(InputError, match=f"ou/t: cannot be written: there is no folder {tmp_path}/ou$"):
        reproduce(["predictors"], TINY, tmp_path / "ou" / "t", n_processes=1, on_progress=never)
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_in_the_end_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    report = tmp_path / "out" / "REPORT.md"
    with pytest.raises(InputError, match=r"REPORT\.md: cannot be written: Is a directory"):
        reproduce(
            ["predictors"],
            replace(TINY, rows=40),
            report.parent,
            n_processes=1,
            on_progress=lambda *_: report.mkdir(exist_ok=True),
        )


def test_an_empty_name_of_the_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error_text = run_command(capsys, monkeypatch, "reproduce", "main", "--out", "")
    assert code == 2 and error_text.startswith("balanceroute: --out: an empty name")


def test_a_bad_trace_is_reported_in_one_line_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("what\n")
    arguments = ["reproduce", "main", "--trace", str(tmp_path / "bad.csv"), "--out", str(tmp_path / "out")]
    code, _, error_text = run_command(capsys, monkeypatch, *arguments)
    assert code == 2 and "bad.csv: no known trace" in error_text


@pytest.mark.parametrize("jobs", ["0", "4294967296"])
def test_an_excessive_number_of_processes_is_reported_in_one_line_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    arguments = ["bound", "--jobs", jobs, "--out", str(tmp_path)]
    code, _, error_text = run_command(capsys, monkeypatch, "reproduce", *arguments)
    assert code == 2 and "--jobs" in error_text and error_text.count("\n") == 1


def test_the_command_lists_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    a_short_trace(tmp_path / "t.csv")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("not of this command")
    arguments = ["reproduce", "main", "--quick", "--jobs", "1", "--json", "--trace", str(tmp_path / "t.csv")]
    code, printed, _ = run_command(capsys, monkeypatch, *arguments, "--out", str(tmp_path / "out"))
    assert code == 0
    written = json.loads(printed)["written"]
    assert {Path(name).name for name in written} == {"REPORT.md", "main_t.csv", "loads_t.png", "loads_t.svg"}


def test_tables_render_gaps_and_thousands_and_keep_digits_in_csv(tmp_path: Path) -> None:
    table = Table("t", ["name", "n", "x"], digits={"x": 2})
    table.add("a", 12345, 1234.5678)
    table.add("b", None, float(np.nan))
    assert table.markdown().splitlines()[2:] == ["| a | 12,345 | 1,234.57 |", "| b | – | – |"]
    assert table.write_csv(tmp_path).read_text() == "name,n,x\na,12345,1234.57\nb,,nan\n"


@pytest.mark.usefixtures("no_figures")
def test_without_matplotlib_the_tables_are_written_and_the_report_says_how_to_get_figures(tmp_path: Path) -> None:
    text = reproduce(["sensitivity"], TINY, tmp_path, n_processes=1)
    assert "scripts/install plots" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == files_of(["sensitivity"], TINY)
    assert not [name for name in files_of(["sensitivity"], TINY) if name.endswith((".png", ".svg"))]


@pytest.mark.usefixtures("no_figures")
def test_an_own_policy_is_a_row_of_the_main_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    scope = replace(TINY, trace=a_short_trace(tmp_path / "t.csv"), seeds=(0,), policies=("own_policy:FirstFit",))
    text = reproduce(["main"], scope, tmp_path / "report", n_processes=1)
    assert text.count("| own_policy:FirstFit |") == len(scope.sources)


def test_every_method_has_a_unique_style_in_every_figure() -> None:
    shown = {method.label for method in (*MAIN, *fairness.DEFAULTS, *scaling.METHODS, *fairness.SWEPT, *grid.POLICIES)}
    assert shown | set(figures.LABELS.values()) <= set(figures.STYLES)
    assert set(figures.LABELS) == BUILT_IN
    looks = [look[:2] for look in figures.STYLES.values()] + list(figures.OTHERS)
    for colours_or_markers in zip(*looks, strict=True):
        assert len(set(colours_or_markers)) == len(looks)
