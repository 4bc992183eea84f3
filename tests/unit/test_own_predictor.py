"""A predictor of one's own wherever a predictor is named, and the kit that checks it."""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import balanceroute
from balanceroute.config import validate
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import RequestSpec
from balanceroute.errors import ConfigError
from balanceroute.prediction import KINDS, FinishedRequest, TwoStage, build_predictor
from balanceroute.prediction.history import read_rows
from balanceroute.proxy.admission.forecasts import LiveForecasts, build_forecasts
from balanceroute.testing import RuleBroken, check_predictor, costs
from balanceroute.testing.__main__ import main as conformance
from tests.commands import run_command
from tests.unit.core import builders

ROOT = Path(__file__).parents[2]
WORKERS = {"prefill": {"workers": [{"url": "http://p:1"}]}, "decode": {"workers": [{"url": "http://d:1"}]}}
OWN = "own_predictor:MeanByKey"
HERE = "tests.unit.test_own_predictor"
H = 8


@pytest.fixture(autouse=True)
def _the_examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def a_config(kind: str, policy: str = "br_h", **predictor: Any) -> balanceroute.Config:
    routing = {"policy": policy, "horizon_steps": H}
    return validate(WORKERS | {"routing": routing, "predictor": {"kind": kind, **predictor}})


class Fixed:
    """Right but for what each subclass does: everybody finishes after `steps` steps more."""

    def __init__(self, horizon_steps: int, steps: float = 4.0) -> None:
        if steps < 0:
            raise ValueError(f"steps must be at least 0, not {steps}")
        self.horizon, self.steps = horizon_steps, steps
        self.seen: list[FinishedRequest] = []

    def observe(self, finished: FinishedRequest) -> None:
        self.seen.append(finished)

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 1.0, self.steps

    def predict(self, ages: np.ndarray, prompt_tokens: np.ndarray, keys: Sequence[str]) -> TwoStage:
        questions = zip(ages.tolist(), prompt_tokens.tolist(), keys, strict=True)
        both = np.array([self.predict_one(*question) for question in questions])
        return TwoStage(*both.reshape(-1, 2).T)


# -- by name


def test_an_own_predictor_gets_its_options_and_learns_from_the_history() -> None:
    config = a_config(f"{HERE}:Fixed", options={"steps": 3})
    rows = [FinishedRequest("k", 100, 7)]
    predictor = build_predictor(config.predictor.kind, H, rows=rows, options=config.predictor.options)
    assert predictor.predict_one(0, 100, "k") == (1.0, 3.0)
    assert predictor.predictor.seen == rows  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("predictor", "problem"),
    [
        ({"kind": "no_module_of_ours:X"}, "No module named 'no_module_of_ours' (is its folder installed, or on PYTHON"),
        ({"kind": "own_predictor:Missing"}, "has no attribute 'Missing'"),
        (
            {"kind": "magic"},
            "predictor.kind = 'magic': predictor 'magic' is unknown; accepted are none, survival, exact_match, learned",
        ),
        ({"kind": "survival", "options": {"steps": 1}}, "predictor.options: survival takes none"),
        ({"kind": f"{HERE}:Fixed", "model": "m"}, "predictor.model = 'm': accepted only with predictor.kind survival"),
        (
            {"kind": f"{HERE}:Fixed", "options": {"steps": [1]}},
            "accepted is a mapping of names to true, false, numbers",
        ),
    ],
    ids=["module", "class", "unknown", "built-in", "model", "list"],
)
def test_an_invalid_predictor_name_is_reported_in_one_line(predictor: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
        validate(WORKERS | {"predictor": predictor})
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("json:JSONDecodeError", {}, "JSONDecodeError with horizon_steps 8 and options {}:"),
        ("decimal:Decimal", {}, "lacks predict, predict_one, observe"),
        (f"{HERE}:Fixed", {"steps": -1}, "steps must be at least 0, not -1"),
        (f"{HERE}:Fixed", {"step": 1}, "unexpected keyword argument 'step'"),
    ],
    ids=["signature", "shape", "value", "name"],
)
def test_an_own_predictor_that_cannot_be_created_is_reported_in_one_line(
    name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
        build_forecasts(a_config(name, options=options))
    assert problem in str(refused.value)


def test_a_package_offers_its_predictors_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "by_key-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: by-key\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[balanceroute.predictors]\nby_key = {OWN}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert a_config("by_key").predictor.kind == "by_key"
    assert build_predictor("by_key", H).predict_one(0, 1, "") == (0.0, H)


# -- on the command line


def test_replay_and_evaluate_accept_an_own_predictor_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replay = ("replay", "--policy", "br_h", "--max-requests", "150", "--json", "--predictor")
    code, out, _ = run_command(capsys, monkeypatch, *replay, OWN)
    trace = balanceroute.generate_trace("heavy_tailed").head(150)
    module = sys.modules["own_predictor"]
    same = balanceroute.simulate(trace, "br_h", predictor=module.MeanByKey(80))
    assert (code, json.loads(out)["load_spread_mean"]) == (0, same.figures.load_spread_mean)
    balanceroute.write_trace(trace, tmp_path / "t.csv")
    code, out, _ = run_command(
        capsys, monkeypatch, "predictor", "evaluate", "--trace", str(tmp_path / "t.csv"), "--kind", OWN, "--json"
    )
    assert (code, json.loads(out)["kind"]) == (0, OWN)
    assert json.loads(out)["samples"] > 100


def test_options_reach_an_own_predictor_in_replay_and_evaluate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replay = ("replay", "--policy", "br_h", "--max-requests", "20", "--predictor", f"{HERE}:Fixed", "--predictor-param")
    assert run_command(capsys, monkeypatch, *replay, "steps=2")[0] == 0
    code, _, err = run_command(capsys, monkeypatch, *replay, "steps=100")  # beyond the horizon of 80
    assert code == 2 and err.count("\n") == 1
    assert f"predictor {HERE}:Fixed answers (1, 100): p_finish must be from 0 to 1" in err
    trace = str(tmp_path / "t.csv")
    balanceroute.write_trace(balanceroute.generate_trace("heavy_tailed", rows=300), trace)
    judge = ("predictor", "evaluate", "--trace", trace, "--kind", f"{HERE}:Fixed", "--json", "--param")
    judged = [json.loads(run_command(capsys, monkeypatch, *judge, f"steps={n}")[1]) for n in (1, 80)]
    assert judged[0]["c_hat_mae"] != judged[1]["c_hat_mae"]


class CannotAnswer(Fixed):
    """Learns, and cannot answer."""

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        raise LookupError("no such age")

    def predict(self, ages: Any, prompt_tokens: Any, keys: Any) -> Any:
        raise LookupError("no such age")


def test_replay_and_evaluate_report_in_one_line_what_an_own_predictor_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace, named = str(tmp_path / "t.csv"), f"{HERE}:CannotAnswer"
    balanceroute.write_trace(balanceroute.generate_trace("capped", rows=50), trace)
    replay = ("replay", "--trace", trace, "--policy", "br_h", "--predictor", named)
    for command in (replay, ("predictor", "evaluate", "--trace", trace, "--kind", named)):
        code, _, err = run_command(capsys, monkeypatch, *command)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith(
            f"balanceroute: predictor {named}: LookupError: no such age (test_own_predictor.py, line "
        )


class Sure(Fixed):
    """More than sure."""

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 2.0, -1.0


@pytest.mark.parametrize(
    ("predictor", "problem"),
    [
        (Sure(80), r"predictor Sure answers \(2, -1\): p_finish must be from 0 to 1"),
        (Fixed, "predictor Fixed: is a class, and not an object of it"),
        (object(), "predictor object: lacks predict, predict_one, observe"),
    ],
    ids=["answer", "class", "none"],
)
def test_a_predictor_object_is_checked_like_a_named_one(predictor: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        balanceroute.simulate("capped", "br_h", predictor=predictor, max_requests=5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("predictor", "fit", "--trace", "t.csv", "--out", "m.npz", "--kind", OWN), "writes no model file"),
        (
            ("replay", "--policy", "br_h", "--predictor", "survival", "--predictor-param", "steps=1"),
            "survival: it takes no options",
        ),
        (("replay", "--predictor", OWN, "--predictor-param", "steps"), "accepted is name=value"),
        (("replay", "--predictor", "magic"), "balanceroute: predictor 'magic' is unknown; accepted are none, oracle"),
        (("replay", "--predictor", "no_module:X"), "balanceroute: predictor no_module:X: No module named 'no_module'"),
    ],
    ids=["fit", "built-in", "no-value", "unknown", "no-module"],
)
def test_an_invalid_option_value_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    code, _, err = run_command(capsys, monkeypatch, *arguments)
    assert code == 2 and problem in err and "Traceback" not in err


def test_check_config_creates_an_own_predictor_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(WORKERS | {"predictor": {"kind": f"{HERE}:Fixed", "options": {"steps": -1}}}))
    code, _, err = run_command(capsys, monkeypatch, "check-config", str(config))
    assert code == 2 and "steps must be at least 0, not -1" in err


# -- in a router


class Raises(Fixed):
    def observe(self, finished: FinishedRequest) -> None:
        raise RuntimeError("nothing is learned")

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        raise ZeroDivisionError("no answer")


def a_scheduler() -> Scheduler:
    bounds = SchedulerConfig(refresh_every_tokens=H // 2)
    return builders.a_scheduler("br_h", workers=1, slots=64, config=bounds, horizon_steps=H)


@pytest.mark.parametrize(
    ("kind", "first", "later", "failures"), [("Fixed", 3.0, 3.0, 0), ("Raises", H, H, 3), ("ExitsAlways", H, H, 3)]
)
@pytest.mark.anyio
async def test_a_router_works_without_the_forecasts_of_a_failing_predictor(
    kind: str, first: float, later: float, failures: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = a_scheduler()
    forecasts = LiveForecasts(a_config(f"{HERE}:{kind}", history=str(tmp_path / "h.sqlite3")))
    scheduler.submit(RequestSpec("r", 100, prompt_key="k"), 0.0)
    scheduler.dispatch(0.0)
    scheduler.prefilled("r", 100, 0.0)
    scheduler.admit(0.0)
    tracker = scheduler.snapshot.requests["r"]
    assert forecasts.initial(tracker, 100) == first
    scheduler.progress("r", 4, 0.0)
    forecasts.renew(scheduler)
    assert tracker.remaining(H) == later
    forecasts.finished(tracker, "stop")
    assert forecasts.forecaster.failures == failures
    assert len([record for record in caplog.records if "requests count as staying" in record.message]) == failures
    assert forecasts.runner(scheduler.snapshot) is None  # it sees to its own fits
    assert forecasts.past().seen is None
    forecasts.close()
    assert [row.output_tokens for row in read_rows(tmp_path / "h.sqlite3")] == [4]


class Recovers(Fixed):
    """Fails while `works` is not set."""

    works = False

    def observe(self, finished: FinishedRequest) -> None:
        if not self.works:
            raise RuntimeError("nothing is learned")

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        if not self.works:
            raise ZeroDivisionError("no answer")
        return super().predict_one(age, prompt_tokens, key)


@pytest.mark.anyio
async def test_the_first_failure_of_each_series_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = a_scheduler()
    forecasts = LiveForecasts(a_config(f"{HERE}:Recovers"))
    scheduler.submit_prefilled(RequestSpec("r", 100), 0.0)
    scheduler.admit(0.0)
    tracker = scheduler.snapshot.requests["r"]
    for works in (False, False, True, False):
        monkeypatch.setattr(Recovers, "works", works)
        forecasts.initial(tracker, 100)
        scheduler.progress("r", 4, 0.0)
        forecasts.renew(scheduler)
        forecasts.finished(tracker, "stop")
    forecasts.close()
    logged = [record.args[0] for record in caplog.records if "requests count as staying" in record.message]
    assert logged == 2 * ["first forecasts", "forecasts", "observations"]
    assert forecasts.forecaster.failures == 9


def test_an_own_predictor_distinguishes_requests_by_their_keys() -> None:
    forecasts = LiveForecasts(a_config(OWN, key_header="x-kind"))
    assert forecasts.keys is not None
    assert len({forecasts.keys.key(b'"hello"', header) for header in ("chat", "batch")}) == 2
    forecasts.close()


# -- the conformance kit


class TooSure(Fixed):
    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 1.5, self.steps


class NotANumber(Fixed):
    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 1.0, float("nan")


class OneWord(Fixed):
    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        return 1.0  # type: ignore[return-value]


class Shorter(Fixed):
    def predict(self, ages, prompt_tokens, keys):  # type: ignore[no-untyped-def]
        return super().predict(ages[1:], prompt_tokens[1:], keys[1:])


class Otherwise(Fixed):
    def predict(self, ages, prompt_tokens, keys):  # type: ignore[no-untyped-def]
        return TwoStage(np.zeros(len(ages)), np.full(len(ages), 1.0))


class Meddles(Fixed):
    def predict(self, ages, prompt_tokens, keys):  # type: ignore[no-untyped-def]
        answer = super().predict(ages, prompt_tokens, keys)
        ages += 1
        return answer


class Counts(Fixed):
    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        self.steps += 0.001
        return 1.0, self.steps


class Shared(Fixed):
    made = 0

    def __init__(self, horizon_steps: int) -> None:
        type(self).made += 1
        super().__init__(horizon_steps, steps=self.made % 7)


class OnlyFinished(Fixed):
    def observe(self, finished: FinishedRequest) -> None:
        if finished.censored:
            raise ValueError(finished.finish_reason)


class Exits(Fixed):
    def predict_one(self, *_: object) -> tuple[float, float]:
        raise SystemExit(0)


class ExitsWhileLearning(Fixed):
    def observe(self, finished: FinishedRequest) -> None:
        raise SystemExit(0)


class ExitsAlways(Exits, ExitsWhileLearning):
    """As `Raises`."""


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda horizon_steps: object(), 1),
        (TooSure, 2),
        (NotANumber, 2),
        (OneWord, 2),
        (Shorter, "2 or 3"),
        (Otherwise, 3),
        (Meddles, 4),
        (Counts, "[34]"),
        (Shared, 5),
        (OnlyFinished, 6),
        (Exits, 2),
        (ExitsWhileLearning, 6),
    ],
)
def test_the_kit_names_the_rule_that_a_predictor_breaks(make: Callable[[int], Any], rule: object) -> None:
    with pytest.raises(RuleBroken, match=f"rule {rule}"):
        check_predictor(make)


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_predictor_keeps_the_rules(kind: str) -> None:
    check_predictor(lambda horizon_steps: build_predictor(kind, horizon_steps), rounds=3)


def test_an_answer_that_only_rounding_puts_out_of_bounds_keeps_the_rules() -> None:
    class Rounds(Fixed):
        def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
            return 1.0 + 1e-12, self.horizon * (1.0 + 1e-12)

    assert Rounds(H).predict_one(0, 1, "")[1] > H
    check_predictor(lambda horizon: Rounds(horizon), horizon_steps=H)


def test_the_kit_says_that_a_predictor_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a clock that goes on by a quarter of a millisecond between two looks at it."""
    monkeypatch.setattr(costs, "clock_s", itertools.count(0.0, 0.00025).__next__)
    assert conformance(["--predictor", f"{HERE}:Fixed", "steps=2"]) == 0
    assert "predict_one takes 0.25 ms; " in capsys.readouterr().err


def test_the_kit_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance(["--predictor", f"{HERE}:Fixed", "steps=2"]) == 0
    assert conformance(["--predictor", f"{HERE}:TooSure"]) == 1
    assert "answers (1.5, 4)" in capsys.readouterr().out
    assert conformance(["--predictor", "no_module_of_ours:X"]) == 2
    assert conformance(["--predictor"]) == 2
