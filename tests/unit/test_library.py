"""What `import balanceroute` offers, and policies of one's own wherever a policy is named."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

import balanceroute
from balanceroute.build import build_scheduler
from balanceroute.config import validate
from balanceroute.core.policies import BUILT_IN
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError, InputError
from balanceroute.explain import explain
from balanceroute.testing import RuleBroken, check_policy, costs
from balanceroute.testing import __main__ as testing_command
from balanceroute.testing.__main__ import main as conformance
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
WORKERS = {"prefill": {"workers": [{"url": "http://p:1"}]}, "decode": {"workers": [{"url": "http://d:1"}]}}
OWN = "own_policy:FirstFit"


@pytest.fixture(autouse=True)
def _the_examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


# -- the library


def test_every_public_name_exists() -> None:
    assert len(set(balanceroute.__all__)) == len(balanceroute.__all__)
    assert [name for name in balanceroute.__all__ if getattr(balanceroute, name, None) is None] == []
    assert set(dir(balanceroute)) == set(balanceroute.__all__)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import balanceroute, sys; print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'pydantic')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_paths_may_be_text(tmp_path: Path) -> None:
    trace = balanceroute.generate_trace("capped", rows=50)
    balanceroute.write_trace(trace, str(tmp_path / "t.csv.gz"))
    read = balanceroute.read_trace(str(tmp_path / "t.csv.gz"))
    assert (read.arrival_s == trace.arrival_s).all()
    (tmp_path / "m.jsonl").write_text('{"timestamp": 0, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n')
    assert len(balanceroute.convert_trace(str(tmp_path / "m.jsonl")).trace) == 1
    recording = balanceroute.build_scheduler(validate(WORKERS), 0.0, journal=str(tmp_path / "journal"))
    assert (tmp_path / "journal").read_bytes().startswith(b'{"journal":')
    recording.close()  # type: ignore[attr-defined]


def test_a_simulation_needs_one_call_and_plots_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = balanceroute.simulate("capped", "br_0", params={"s_greedy": 0}, max_requests=60)
    assert run.figures.admitted == len(run.trace) == 60
    assert run.outcome.loads.shape == (run.figures.steps, 8)
    run.plot(str(tmp_path / "loads"), balanceroute.simulate(run.trace, "level_fit"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads.png", "loads.svg"]


@pytest.mark.parametrize("name", ["load1.05", "load1.05.png", "load1.05.SVG"])
def test_a_plot_may_be_named_with_the_suffix_of_either_format(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    balanceroute.simulate("capped", max_requests=20).plot(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load1.05.png", "load1.05.svg"]


def test_the_lowest_panel_of_every_column_labels_its_axis(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from balanceroute.experiments.figures import draw_load_panels

    panels = [(name, np.zeros((5, 2), dtype=np.int64)) for name in ("a", "b", "c")]
    shown = [axis for axis in draw_load_panels(panels, "capped").axes if axis.get_visible()]
    assert [bool(axis.get_xlabel()) for axis in shown] == [False, True, True]


def test_a_simulation_is_that_of_replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = run_command(capsys, monkeypatch, "replay", "--max-requests", "150", "--policy", "br_h", "--json")
    run = balanceroute.simulate(max_requests=150, policy="br_h", predictor="none")
    assert json.loads(out)["load_spread_mean"] == run.figures.load_spread_mean


def test_br_h_gets_its_predictor_by_name_or_as_an_object() -> None:
    settings = balanceroute.PolicySettings(policy="br_h")
    cluster = balanceroute.Setting(n_workers=2, slots=4)
    given = ("br_h", settings, balanceroute.make_policy(settings))
    runs = [balanceroute.simulate("capped", each, setting=cluster, max_requests=120) for each in given]
    assert len({run.figures.load_spread_mean for run in runs}) == 1
    blind = balanceroute.simulate("capped", "br_h", predictor="none", setting=cluster, max_requests=120)
    assert blind.figures.load_spread_mean != runs[0].figures.load_spread_mean


def test_a_simulation_of_an_incomplete_log_warns_of_its_assumptions(tmp_path: Path) -> None:
    text = "INFO 01-01 00:00:00 [logger.py:1] Received request a: prompt: 'x', params: SamplingParams(max_tokens=16)\n"
    (tmp_path / "vllm.log").write_text(text)
    with pytest.warns(UserWarning) as warned:
        balanceroute.simulate(tmp_path / "vllm.log")
    assert any("took max_tokens as the answers of 1 requests" in str(each.message) for each in warned)
    assert {each.filename for each in warned} == {__file__}


def test_a_simulation_of_a_trace_that_is_still_being_written_warns_where_it_was_called(tmp_path: Path) -> None:
    (tmp_path / "growing.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,6\n1,5,6\n2,5")
    with pytest.warns(UserWarning, match="growing.csv: left out 1 line .*, line 4") as warned:
        run = balanceroute.simulate(tmp_path / "growing.csv", "level_fit")
    assert len(run.trace) == 2 and [each.filename for each in warned] == [__file__]


def without_answers() -> balanceroute.Trace:
    return balanceroute.Trace(np.arange(5.0), np.full(5, 10), np.zeros(5, dtype=np.int64), np.full(5, ""))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"policy": "br_1"}, "policy 'br_1' is unknown;"),
        ({"policy": "br_0", "params": {"r_max": 0}}, "params.r_max: expected a whole number from 1 to 64"),
        (
            {"policy": "br_h", "predictor": balanceroute.SurvivalPredictor(80), "train": "capped"},
            "train: changes nothing; predictor SurvivalPredictor is not fitted here",
        ),
        ({"predictor": "magic"}, "predictor 'magic' is unknown; accepted are none, oracle"),
        ({"trace": "no_such_file.csv"}, "no_such_file.csv"),
        ({"policy": balanceroute.PolicySettings(), "params": {"r_max": 4}}, "params: accepted only where"),
        ({"policy": "level_fit", "params": {"beta": 4}}, "params.beta: level_fit does not have this knob; br_0, br_h"),
        ({"policy": 3}, "policy 3: accepted is a name, PolicySettings, or an object of an AdmissionPolicy"),
        ({"max_requests": 0}, "max_requests 0: accepted is a number from 1"),
        ({"seed": "7"}, "seed '7': accepted is a whole number from 0 to 9"),
        ({"load": "0.9"}, "load '0.9': accepted is a number from 0.001 to 1000"),
        ({"load": 10**400}, "load 1000"),
        ({"setting": {"n_workers": 4}}, "setting {'n_workers': 4}: accepted is a balanceroute.Setting"),
        ({"policy": "br_0", "params": "r_max=4"}, "params 'r_max=4': accepted is a mapping of names to values"),
        ({"policy": balanceroute.PolicySettings(policy=None)}, "policy: None; accepted: "),  # type: ignore[arg-type]
        ({"trace": without_answers()}, "output_tokens: accepted are whole numbers from 1 to"),
        ({"train": without_answers(), "policy": "br_h"}, "output_tokens: accepted are whole numbers from 1 to"),
        ({"max_requests": 5.0}, "max_requests 5.0: accepted is a whole number from 1"),
        ({"policy": balanceroute.PolicySettings(policy="br_h", gamma=2.0)}, "params.gamma: expected a number above 0"),
        ({"policy": balanceroute.PolicySettings(policy="br_1")}, "policy 'br_1' is unknown;"),
        ({"policy": "br_0", "params": {"policy": "br_h"}}, "params.policy: br_0 does not have this knob"),
    ],
    ids=[
        "policy",
        "knob",
        "history-of-an-object",
        "predictor",
        "file",
        "params-twice",
        "other-policys-knob",
        "no-policy",
        "no-request",
        "seed",
        "load",
        "load-beyond-floats",
        "setting",
        "params",
        "no-name",
        "trace",
        "past",
        "part-of-a-request",
        "settings",
        "policy-of-settings",
        "policy-as-a-knob",
    ],
)
def test_a_wrong_argument_is_reported_in_one_line_with_what_is_accepted(
    arguments: dict[str, object], problem: str
) -> None:
    with pytest.raises((ConfigError, InputError), match="^[^\n]*$") as refused:
        balanceroute.simulate(**{"max_requests": 5, **arguments})  # type: ignore[arg-type]
    assert problem in str(refused.value)


def test_numpy_numbers_are_accepted() -> None:
    cluster = balanceroute.Setting(
        n_workers=np.int64(2),
        slots=np.int32(4),
        step_cost_s=np.float32(1e-7),
        slowdowns=np.array([1.0, 1.2]),  # type: ignore[arg-type]
        failures=[balanceroute.Failure(np.int64(0), np.float64(1.0), np.float32(2.0))],  # type: ignore[arg-type]
    )
    params = {"r_max": np.int64(4), "beta": np.float32(8.0), "pool_bypass": np.False_}
    run = balanceroute.simulate(
        "capped",
        "br_0",
        params=params,
        setting=cluster,
        max_requests=np.int64(40),
        seed=np.int64(3),
        load=np.float32(1),
    )
    settings = balanceroute.PolicySettings(policy="br_0", r_max=np.int64(4), beta=np.float64(8.0), seed=3)
    assert balanceroute.simulate(run.trace, settings, setting=run.setting).figures.steps == run.figures.steps
    assert json.dumps(run.setting.slowdowns) == "[1.0, 1.2]"


class NotOne:
    """A policy that does not inherit from `AdmissionPolicy`, and lacks what that has."""

    name = "not_one"

    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        yield from ()


class FarSighted(balanceroute.AdmissionPolicy):
    name = "far_sighted"
    horizon_steps = -3

    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        yield from ()


class Undecided(balanceroute.AdmissionPolicy):
    """A policy whose `decide` was forgotten, or has another name."""

    name = "undecided"


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (NotOne(), "policy NotOne: lacks waits_for_slots, horizon_steps, patience_s, recheck_s; see"),
        (NotOne, "accepted is a name, PolicySettings, or an object of an AdmissionPolicy"),
        (FarSighted(), "horizon_steps must be a whole number from 0 to 4096"),
    ],
    ids=["lacks", "class", "horizon"],
)
def test_an_object_that_is_not_a_policy_is_refused_like_a_named_class(policy: object, problem: str) -> None:
    with pytest.raises((ConfigError, InputError), match="^[^\n]*$") as refused:
        balanceroute.simulate("capped", policy, max_requests=5)  # type: ignore[arg-type]
    assert problem in str(refused.value)


# -- a policy of one's own


def test_an_own_policy_and_its_options_come_from_the_configuration() -> None:
    config = validate(WORKERS | {"routing": {"policy": OWN, "options": {"patience_s": 3}}})
    assert build_scheduler(config, 0.0).policy.patience == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        (
            {"policy": "no_module_of_ours:X"},
            "No module named 'no_module_of_ours' (is its folder installed, or on PYTHON",
        ),
        ({"policy": "own_policy:Missing"}, "has no attribute 'Missing'"),
        ({"policy": "json:JSONDecodeError"}, "JSONDecodeError with options {}:"),
        ({"policy": "json:JSONDecoder"}, "lacks name, waits_for_slots, horizon_steps"),
        ({"policy": f"{__name__}:Undecided"}, "Can't instantiate abstract class Undecided"),
        ({"policy": OWN, "options": {"patience_s": -1}}, "patience_s must be at least 0, not -1"),
        ({"policy": OWN, "options": {"patience": 1}}, "unexpected keyword argument 'patience'"),
        ({"policy": OWN, "options": {"patience_s": [1]}}, "accepted is a mapping of names to true, false, numbers"),
        ({"policy": "br_0", "options": {"r_max": 1}}, "routing.options: br_0 takes none"),
        ({"policy": "magic"}, "routing.policy = 'magic': accepted is one of br_0, br_h"),
    ],
    ids=["module", "class", "signature", "shape", "no decide", "value", "name", "list", "built-in", "unknown"],
)
def test_an_own_policy_that_cannot_be_created_is_reported_in_one_line(routing: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
        validate(WORKERS | {"routing": routing})
    assert problem in str(refused.value)


def test_replay_and_explain_take_an_own_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replay = ("replay", "--policy", OWN, "--param", "patience_s=2.5", "--max-requests", "100", "--json")
    assert json.loads(run_command(capsys, monkeypatch, *replay)[1])["admitted"] == 100
    state = tmp_path / "state.json"
    state.write_text((ROOT / "tests/data/explain_example.json").read_text())
    _, out, _ = run_command(capsys, monkeypatch, "explain", str(state), "--policy", OWN, "--json")
    assert json.loads(out)["policy"] == "first_fit"
    assert [admission["request"] for admission in json.loads(out)["admissions"]] == ["small"]


def test_a_state_document_cannot_name_a_class_that_the_operator_did_not_name() -> None:
    state = {"policy": OWN, "workers": [{"id": "d", "slots": 1, "active": []}], "waiting": []}
    with pytest.raises(ConfigError, match="imported only with --policy own_policy:FirstFit"):
        explain(state)
    assert explain(state, OWN).policy == "first_fit"


def test_a_package_offers_its_policies_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "first_fit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: first-fit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[balanceroute.policies]\nfirst_fit = own_policy:FirstFit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert validate(WORKERS | {"routing": {"policy": "first_fit"}}).routing.policy == "first_fit"
    state = {"policy": "first_fit", "workers": [{"id": "d", "slots": 1, "active": []}], "waiting": []}
    assert explain(state).policy == "first_fit"


def test_a_policy_of_an_installed_package_is_named_on_the_command_line(tmp_path: Path) -> None:
    """An environment of its own: what is installed in it is the package, and the rest is lent by this one."""
    venv.create(tmp_path, with_pip=False)
    python = str(tmp_path / "bin" / "python")
    installed = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path), "platbase": str(tmp_path)}))
    (installed / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (installed / "first_fit.py").write_text((ROOT / "examples" / "own_policy.py").read_text())
    metadata = installed / "first_fit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: first-fit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[balanceroute.policies]\nfirst_fit = first_fit:FirstFit\n")

    def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "balanceroute", "replay", "--max-requests", "100", "--json", *arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)

    done = replay("--policy", "first_fit", "--param", "patience_s=2.5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["admitted"] == 100
    mistyped = replay("--policy", "firstfit")
    assert mistyped.returncode == 2 and "did you mean first_fit?" in mistyped.stderr


def test_an_own_policy_with_a_horizon_gets_forecasts_of_the_predictor() -> None:
    from balanceroute.build import predicts

    routing = {"policy": "tests.unit.test_library:LooksAhead", "horizon_steps": 40}
    assert predicts(validate(WORKERS | {"routing": routing}))
    with pytest.raises(ConfigError, match="looks 40 steps ahead, and horizon_steps is 80"):
        validate(WORKERS | {"routing": {"policy": "tests.unit.test_library:LooksAhead"}})


# -- the conformance kit


def test_every_built_in_policy_keeps_the_rules() -> None:
    """The examples: a block of docs/library.md, which is run, too."""
    for name in sorted(BUILT_IN):
        check_policy(lambda name=name: balanceroute.make_policy(balanceroute.PolicySettings(policy=name)), rounds=4)


class Broken(balanceroute.AdmissionPolicy):
    """Right but for what each subclass does."""

    name = "broken"

    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        while len(snapshot.pool) and (workers := [worker for worker in snapshot.workers if worker.free_slots]):
            yield balanceroute.Choice(snapshot.pool.front[0], self.worker_of(snapshot, workers), 1, 0.0)

    def worker_of(self, snapshot, workers):  # type: ignore[no-untyped-def]
        return workers[0]


class LooksAhead(Broken):
    horizon_steps = 40


class OverFull(Broken):
    def worker_of(self, snapshot, workers):  # type: ignore[no-untyped-def]
        return snapshot.workers[0]


class Remembers(Broken):
    turn = 0

    def worker_of(self, snapshot, workers):  # type: ignore[no-untyped-def]
        type(self).turn += 1
        return workers[self.turn % len(workers)]


class Meddles(Broken):
    def worker_of(self, snapshot, workers):  # type: ignore[no-untyped-def]
        workers[0].load += 1
        return workers[0]


class Idle(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        yield from ()


class Interrupts(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt


class LastClassFirst(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        while len(snapshot.pool) and (workers := [worker for worker in snapshot.workers if worker.free_slots]):
            yield balanceroute.Choice(list(snapshot.pool)[-1], workers[0], 1, 0.0)


class Scores(Broken):
    stage: object = 1
    score: object = 0.0

    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        for choice in super().decide(snapshot, now):
            yield balanceroute.Choice(choice.request, choice.worker, self.stage, self.score)  # type: ignore[arg-type]


class NoScore(Scores):
    score = None


class StageOfNumpy(Scores):
    stage = np.int64(1)


class ScoreOfNumpy(Scores):
    score = np.float64(2.5)


class OncePerRequestAndAgain(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        yield from super().decide(snapshot, now)
        if snapshot.free_slots and not len(snapshot.pool) and snapshot.requests:
            yield balanceroute.Choice(next(iter(snapshot.requests.values())), snapshot.up[0], 1, 0.0)


class Answers(Broken):
    answer: object = None

    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        return self.answer


class NoChoices(Answers):
    answer = ("r0",)


class NoPatience(Broken):
    def patience_s(self, prompt_tokens, snapshot):  # type: ignore[no-untyped-def]
        return None


class Raises(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("nothing to divide by")


class Exits(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        raise SystemExit(0)


class NoTime(Broken):
    def recheck_s(self, snapshot, now):  # type: ignore[no-untyped-def]
        return None


def test_a_numpy_score_is_returned_as_a_plain_number() -> None:
    check_policy(ScoreOfNumpy, rounds=4)
    scheduler = Scheduler(ScoreOfNumpy())
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE), 0.0)
    scheduler.submit_prefilled(RequestSpec("a", 10), 0.0)
    assert orjson.loads(orjson.dumps(scheduler.admit(0.0)))[0]["score"] == 2.5


class WorkerIndex(OverFull):
    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        if len(snapshot.pool):
            yield balanceroute.Choice(snapshot.pool.front[0], 0, stage=1, score=0.0)  # type: ignore[arg-type]


class RequestIndex(OverFull):
    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        if len(snapshot.pool):
            yield balanceroute.Choice(0, snapshot.workers[0], stage=1, score=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "problem"), [
    (WorkerIndex, "worker 0 is none of snapshot.workers"), (RequestIndex, "request 0 does not wait"),
])  # fmt: skip
def test_the_kit_names_what_a_policy_chose_where_that_is_an_index(policy: type, problem: str) -> None:
    with pytest.raises(RuleBroken, match=f"rule 2: {problem}"):
        check_policy(policy)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (OverFull, 2),
        (Remembers, "[34]"),
        (Meddles, 5),
        (Idle, 6),
        (LastClassFirst, 2),
        (NoScore, 2),
        (StageOfNumpy, 2),
        (OncePerRequestAndAgain, 2),
        (Answers, 1),
        (NoChoices, 2),
        (NoPatience, 1),
        (NoTime, 1),
        (Raises, 1),
        (Exits, 1),
        (object, 1),
    ],
)
def test_the_kit_names_the_rule_that_a_policy_breaks(policy: type, rule: object) -> None:
    with pytest.raises(RuleBroken, match=f"rule {rule}: "):
        check_policy(policy)


def test_the_kit_says_in_one_line_what_a_policy_raised_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance(["tests.unit.test_library:Raises"]) == 1
    output = capsys.readouterr().out
    raised = "it raises ZeroDivisionError('nothing to divide by') (test_library.py, line "
    assert output.startswith(f"tests.unit.test_library:Raises: round 0: rule 1: {raised}")
    assert output.count("\n") == 1


class Endless(Broken):
    def decide(self, snapshot, now):  # type: ignore[no-untyped-def]
        while True:
            pass


def test_the_kit_names_the_place_in_a_policy_that_never_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(testing_command, "MOST_S", 2.0)  # a busy machine has begun to ask it by then
    assert conformance(["tests.unit.test_library:Endless"]) == 1
    said = "tests.unit.test_library:Endless: it has not answered for 2 s (test_library.py, line "
    assert capsys.readouterr().out.startswith(said)


class Slow(balanceroute.SurvivalPredictor):
    """Each of its calls takes half of the time that one may take."""

    time_left = 1.0

    def _call(self) -> None:
        Slow.time_left -= 0.5
        assert Slow.time_left >= 0

    def predict(self, ages, prompt_tokens, keys):  # type: ignore[no-untyped-def]
        self._call()
        return super().predict(ages, prompt_tokens, keys)

    def predict_one(self, age, prompt_tokens, key):  # type: ignore[no-untyped-def]
        self._call()
        return super().predict_one(age, prompt_tokens, key)

    def observe(self, finished):  # type: ignore[no-untyped-def]
        self._call()
        super().observe(finished)


def test_each_call_of_a_predictor_has_the_time_of_the_kit_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history has hundreds of them."""
    monkeypatch.setattr(signal, "setitimer", lambda _, time_s: setattr(Slow, "time_left", time_s / 60))
    assert conformance(["--predictor", "tests.unit.test_library:Slow"]) == 0


def test_the_kit_is_a_command_with_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance(["tests.unit.test_library:Idle"]) == 1
    assert "rule 6: it leaves requests waiting" in capsys.readouterr().out
    assert conformance(["no_module_of_ours:X"]) == 2
    assert conformance([]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("usage: ")
    assert conformance(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


class Ponders(Broken):
    """Takes its time, on a clock of its own."""

    clock_s = 0.0
    takes_s = 0.0

    def decide(self, snapshot: balanceroute.ClusterSnapshot, now: float) -> Iterator[balanceroute.Choice]:
        Ponders.clock_s += Ponders.takes_s
        yield from super().decide(snapshot, now)


@pytest.mark.parametrize(("takes_s", "said"), [(0.0009, ""), (0.02, " takes 20 ms; "), (5.0, " takes 5000 ms; ")])
def test_the_kit_says_that_a_policy_is_slow(
    takes_s: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It breaks no rule by that: the same policy is fast enough on another machine."""
    monkeypatch.setattr(Ponders, "takes_s", takes_s)
    monkeypatch.setattr(costs, "clock_s", lambda: Ponders.clock_s)
    assert conformance(["tests.unit.test_library:Ponders"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "tests.unit.test_library:Ponders: keeps the rules\n"
    assert (said in printed.err) if said else printed.err == ""


def test_the_kit_ends_in_silence_when_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance(["tests.unit.test_library:Interrupts"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_folder_of_its_name_beside_a_script_does_not_hide_the_library(tmp_path: Path) -> None:
    """Such as the checkout; the script finds what is installed, in an editable way or not."""
    (tmp_path / "balanceroute").mkdir()
    (tmp_path / "script.py").write_text("import balanceroute\nprint(balanceroute.Setting().n_workers)\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("8\n", "")


# -- the examples


@pytest.mark.parametrize("name", ["own_predictor", "own_trace"])
def test_an_example_runs_and_prints_its_table(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / f"examples/{name}.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


def test_the_notebook_runs() -> None:
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples/two_policies.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    by_count, by_level = names["by_count"], names["by_level"]
    assert by_level.figures.load_spread_mean < by_count.figures.load_spread_mean  # type: ignore[attr-defined]
