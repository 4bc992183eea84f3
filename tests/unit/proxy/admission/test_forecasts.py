"""What the live router asks a predictor and tells it, against a real scheduler and without any HTTP."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from balanceroute.config import Config, validate
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from balanceroute.errors import ConfigError, InputError
from balanceroute.prediction import (
    FinishedRequest,
    History,
    LearnedPredictor,
    Model,
    SurvivalPredictor,
    TwoStage,
    save_model,
)
from balanceroute.prediction.history import read_rows
from balanceroute.proxy.admission.forecasts import Forecasts, LiveForecasts, build_forecasts
from balanceroute.proxy.admission.ledger import Ledger
from balanceroute.proxy.admission.tickets import Tickets
from tests.unit.core import builders
from tests.waiting import PATIENCE_S, until

H = 8


def a_config(policy: str = "br_h", **predictor: Any) -> Config:
    return validate(
        {
            "prefill": {"workers": [{"url": "http://127.0.0.1:1"}]},
            "decode": {"workers": [{"url": "http://127.0.0.1:2"}]},
            "routing": {"policy": policy, "horizon_steps": H},
            "predictor": predictor,
        }
    )


def a_scheduler() -> Scheduler:
    bounds = SchedulerConfig(refresh_every_tokens=H // 2)
    return builders.a_scheduler("br_h", workers=1, slots=64, config=bounds, horizon_steps=H)


def decoding(scheduler: Scheduler, request_id: str, *, prompt_tokens: int = 100, limit: int | None = None) -> None:
    scheduler.submit(RequestSpec(request_id, prompt_tokens, prompt_key="k", max_new_tokens=limit), 0.0)
    again(scheduler, request_id, prompt_tokens)


def again(scheduler: Scheduler, request_id: str, prompt_tokens: int) -> None:
    scheduler.dispatch(0.0)
    scheduler.prefilled(request_id, prompt_tokens, 0.0)
    scheduler.admit(0.0)


def held(scheduler: Scheduler, request_id: str) -> float:
    return scheduler.snapshot.requests[request_id].remaining(H)


def remembered(path: Path, *outputs: int) -> None:
    history = History(path)
    for output in outputs:
        history.add(FinishedRequest("k", 100, output, "stop", time.time()))
    history.close()


@pytest.mark.anyio
async def test_a_restart_predicts_from_what_was_recorded_before(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    remembered(path, *[6] * 20)
    scheduler, forecasts = a_scheduler(), LiveForecasts(a_config(kind="survival", history=str(path)))
    decoding(scheduler, "r")
    assert forecasts.initial(scheduler.snapshot.requests["r"], 100) == 5.0  # 6 steps to go, the last of them 5 ahead
    scheduler.progress("r", 4, 0.0)
    forecasts.renew(scheduler)
    assert held(scheduler, "r") == 1.0
    forecasts.close()


def test_a_reload_that_is_refused_later_puts_no_re_fit_off() -> None:
    forecasts = LiveForecasts(a_config(kind="survival"))
    predictor = forecasts.forecaster.predictor
    assert isinstance(predictor, SurvivalPredictor)
    for output in range(1, 9):
        predictor.observe(FinishedRequest("", 100, output))
    assert len(forecasts.past().finished_requests()) == 8
    assert predictor.ring.pending == 8


def test_a_models_requests_count_once_after_reloads_without_a_history(tmp_path: Path) -> None:
    save_model(tmp_path / "m.npz", Model("survival", H, [FinishedRequest("", 100, 5)] * 20))
    config, past = a_config(kind="survival", model=str(tmp_path / "m.npz")), None
    for finished in range(3):
        forecasts = LiveForecasts(config, past)
        predictor = forecasts.forecaster.predictor
        assert isinstance(predictor, SurvivalPredictor) and predictor.curve.n_rows == 20 + finished
        predictor.observe(FinishedRequest("", 100, 7))
        past = forecasts.past()
        assert [row.output_tokens for row in past.finished_requests()] == [7] * (finished + 1)
        if not finished:
            assert LiveForecasts(config).past().seen is None


def test_a_requeued_request_is_forecast_at_its_total_age_and_recorded_as_the_client_saw_it(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    remembered(path, *[6] * 20)
    scheduler, forecasts = a_scheduler(), LiveForecasts(a_config(kind="exact_match", history=str(path)))
    decoding(scheduler, "r", prompt_tokens=100)
    scheduler.progress("r", 4, 0.0)
    scheduler.requeue("r", 0.0)
    again(scheduler, "r", 104)
    tracker = scheduler.snapshot.requests["r"]

    assert forecasts.initial(tracker, 104) == 1.0
    scheduler.progress("r", 2, 0.0)
    forecasts.finished(tracker, "length")
    forecasts.close()
    row = read_rows(path)[-1]
    assert (row.prompt_tokens, row.output_tokens, row.finish_reason, row.prompt_key) == (100, 6, "length", "k")


def test_a_cancelled_request_is_recorded_as_cut_short_and_one_without_a_token_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    scheduler, forecasts = a_scheduler(), LiveForecasts(a_config(history=str(path)))
    decoding(scheduler, "r")
    decoding(scheduler, "nothing yet")
    scheduler.progress("r", 3, 0.0)
    for tracker in scheduler.snapshot.requests.values():
        forecasts.finished(tracker, "cancelled")
    forecasts.close()

    assert [(row.output_tokens, row.censored) for row in read_rows(path)] == [(3, True)]
    assert forecasts.metrics.error_tokens.count == 0


@pytest.mark.anyio
async def test_the_clients_token_limit_bounds_forecasts_before_any_history() -> None:
    scheduler, forecasts = a_scheduler(), LiveForecasts(a_config())
    decoding(scheduler, "r", limit=9)
    assert forecasts.initial(scheduler.snapshot.requests["r"], 100) == H
    for _ in range(2):
        scheduler.progress("r", 1, 0.0)
        forecasts.renew(scheduler)
    assert held(scheduler, "r") == 9 - 2 - 1  # the first token within H of the limit asked for it at once
    scheduler.progress("r", 3, 0.0)
    assert held(scheduler, "r") == 9 - 5 - 1
    forecasts.close()


class Slow(LearnedPredictor):
    """Answers 6 tokens from the start, once `may_answer` is set."""

    def __init__(self) -> None:
        super().__init__(H)
        self.may_answer = threading.Event()
        self.threads: list[int] = []

    def predict(self, ages: Any, prompt_tokens: Any, keys: Any) -> TwoStage:
        self.threads.append(threading.get_ident())
        assert self.may_answer.wait(PATIENCE_S)
        return TwoStage(ages * 0.0 + 1.0, 6.0 - ages)


@pytest.mark.anyio
async def test_trees_are_evaluated_off_the_loop_and_reach_only_requests_that_still_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = Slow()
    monkeypatch.setattr("balanceroute.proxy.admission.forecasts.build_predictor", lambda *_, **__: slow)
    config = a_config(kind="learned", history=str(tmp_path / "history.sqlite3"))
    scheduler, forecasts = a_scheduler(), LiveForecasts(config)

    async def answered(count: int) -> None:
        await until(lambda: forecasts.forecaster.refreshes >= count)

    for name in ("stays", "passes", "leaves", "requeued"):
        decoding(scheduler, name)
        scheduler.progress(name, 4, 0.0)
    forecasts.renew(scheduler)
    decoding(scheduler, "later")
    scheduler.progress("later", 4, 0.0)
    forecasts.renew(scheduler)
    assert held(scheduler, "stays") == H  # nothing waited for the answer
    scheduler.progress("stays", 1, 0.0)
    scheduler.progress("passes", 3, 0.0)  # beyond what is about to be predicted
    scheduler.finish("leaves", Outcome.FINISHED, 0.0)
    scheduler.requeue("requeued", 0.0)
    again(scheduler, "requeued", 104)
    slow.may_answer.set()
    await answered(5)
    assert held(scheduler, "stays") == 0.0
    assert held(scheduler, "passes") == 0.0
    assert held(scheduler, "later") == 1.0
    assert held(scheduler, "requeued") == H
    scheduler.progress("passes", 1, 0.0)
    assert [tracker.id for tracker in scheduler.due_refreshes()] == ["passes"]  # at the floor: at once
    scheduler.snapshot.check_invariants()
    forecasts.close()
    assert len(slow.threads) == 2  # one batch at a time
    assert threading.get_ident() not in slow.threads


@pytest.mark.anyio
async def test_the_thread_is_not_asked_about_requests_that_have_all_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = Slow()
    monkeypatch.setattr("balanceroute.proxy.admission.forecasts.build_predictor", lambda *_, **__: slow)
    scheduler = a_scheduler()
    forecasts = LiveForecasts(a_config(kind="learned", history=str(tmp_path / "history.sqlite3")))
    for name in ("first", "leaves", "last"):
        decoding(scheduler, name)
        scheduler.progress(name, 4, 0.0)
        forecasts.renew(scheduler)
        if name == "leaves":
            scheduler.finish("leaves", Outcome.FINISHED, 0.0)
            slow.may_answer.set()
            await until(lambda: forecasts.forecaster.refreshes == 1)
    await until(lambda: forecasts.forecaster.refreshes == 2)
    forecasts.close()
    assert len(slow.threads) == 2


@pytest.mark.anyio
async def test_a_requeued_request_that_expires_in_the_pool_is_recorded_as_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    forecasts = LiveForecasts(a_config(kind="exact_match", history=str(path)))
    ledger = Ledger(a_scheduler(), asyncio.get_running_loop(), forecasts)
    tickets = Tickets(ledger, ledger.loop)
    recomputed, new = (tickets.submit(RequestSpec(name, 100, prompt_key="k")) for name in ("recomputed", "new"))
    recomputed.prefilled(100)
    ledger.admit()
    recomputed.progress(3)
    recomputed.requeue()
    ledger.dispatch()
    recomputed.prefilled(103)
    new.prefilled(100)
    ledger.configure(SchedulerConfig(pool_ttl_s=0.0))
    now_s = ledger.now()
    await until(lambda: ledger.now() > now_s)
    assert ledger.expire() == ["recomputed", "new"]
    forecasts.close()
    assert [(r.prompt_tokens, r.output_tokens, r.finish_reason, r.censored) for r in read_rows(path)] == [
        (100, 3, "expired", True)
    ]


class Failing(LearnedPredictor):
    """Fails in every answer to a batch while `fails`, and else answers 6 tokens from the start."""

    def __init__(self) -> None:
        super().__init__(H)
        self.fails = True

    def predict(self, ages: Any, prompt_tokens: Any, keys: Any) -> TwoStage:
        if self.fails:
            raise FloatingPointError("no answer")
        return TwoStage(ages * 0.0 + 1.0, 6.0 - ages)


@pytest.mark.parametrize("kind", ["learned", "survival"], ids=["in the thread", "on the loop"])
@pytest.mark.anyio
async def test_requests_of_a_failed_batch_count_as_staying_and_are_forecast_again(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    failing.predict_one = lambda *asked: (1.0, 6.0)  # type: ignore[method-assign]
    predictor = (
        failing if kind == "learned" else type("OnTheLoop", (), {"__getattr__": lambda _, n: getattr(failing, n)})()
    )
    monkeypatch.setattr("balanceroute.proxy.admission.forecasts.build_predictor", lambda *_, **__: predictor)
    scheduler = a_scheduler()
    forecasts = LiveForecasts(a_config(kind=kind, history=str(tmp_path / "history.sqlite3")))
    counters = forecasts.forecaster
    names = [f"r{at}" for at in range(10)]
    for name in names:
        decoding(scheduler, name)
        scheduler.refresh(name, 6.0, 0.0)
        scheduler.progress(name, 4, 0.0)
    for failures in (1, 2):
        forecasts.renew(scheduler)
        await until(lambda n=failures: counters.failures == n)  # type: ignore[misc]
        assert {held(scheduler, name) for name in names} == {H}
        assert scheduler.due_refreshes() == []  # not at once: what fails now fails in a millisecond too
        for name in names:
            scheduler.progress(name, H // 2, 0.0)
    failing.fails = False
    forecasts.renew(scheduler)
    await until(lambda: counters.refreshes == len(names))
    assert {held(scheduler, name) for name in names} == {0.0}
    scheduler.snapshot.check_invariants()
    assert len(caplog.records) == 1 and "no answer" in caplog.text
    failing.fails = True  # anew, so that somebody hears of it again
    for name in names:
        scheduler.progress(name, 1, 0.0)
    forecasts.renew(scheduler)
    await until(lambda: counters.failures == 3)
    forecasts.close()
    assert len(caplog.records) == 2


def test_the_key_is_the_header_where_there_is_one_and_else_the_prompt() -> None:
    forecasts = [LiveForecasts(a_config(kind="exact_match", key_header=header)) for header in ("X-Task", None)]
    by_header, by_prompt = [each.keys for each in forecasts]
    for each in forecasts:
        each.close()
    assert by_header is not None and by_prompt is not None
    assert by_header.key(b'"a"', "summary") == by_header.key(b'"b"', "summary") != by_header.key(b'"a"', "")
    assert by_header.key(b'"a"', "") != by_header.key(b'"b"', "") != ""
    assert by_prompt.key(b'"a"', "summary") == by_prompt.key(b'"a"', "")


def test_prompts_are_not_hashed_without_a_predictor_key_or_history() -> None:
    forecasts = LiveForecasts(a_config(kind="survival"))
    assert forecasts.keys is None
    forecasts.close()


@pytest.mark.parametrize(("policy", "kind"), [("br_0", "survival"), ("br_h", "none")])
def test_a_configured_history_is_recorded_without_a_predictor(policy: str, kind: str, tmp_path: Path) -> None:
    assert build_forecasts(a_config(policy, kind=kind)) is None
    path = tmp_path / "history.sqlite3"
    forecasts = build_forecasts(a_config(policy, kind=kind, history=str(path)))
    assert isinstance(forecasts, Forecasts) and not isinstance(forecasts, LiveForecasts)
    scheduler = a_scheduler()
    decoding(scheduler, "r")
    scheduler.progress("r", 3, 0.0)
    tracker = scheduler.snapshot.requests["r"]

    assert forecasts.initial(tracker, 100) is None
    assert forecasts.runner(scheduler.snapshot) is None
    forecasts.finished(tracker, "stop")
    forecasts.close()
    assert [row.output_tokens for row in read_rows(path)] == [3]


def test_a_model_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m\.npz"):
        build_forecasts(a_config(kind="survival", model=str(tmp_path / "m.npz")))


def test_without_scikit_learn_a_learned_predictor_is_refused_and_a_fitted_model_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    history, model = str(tmp_path / "history.sqlite3"), tmp_path / "m.npz"
    with pytest.raises(ConfigError, match=r"scripts/install learned"):
        build_forecasts(a_config(kind="learned", history=history))
    assert not Path(history).exists()

    save_model(model, Model("learned", H, [FinishedRequest("k", 100, 6, "stop", 1.0)]))
    forecasts = build_forecasts(a_config(kind="learned", model=str(model)))
    assert forecasts is not None and forecasts.runner(a_scheduler().snapshot) is None
    forecasts.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays as it is" in caplog.text and "Traceback" not in caplog.text


@pytest.mark.anyio
async def test_the_metrics_page_shows_the_predictors_state(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    remembered(path, *[6] * 20)
    scheduler, forecasts = a_scheduler(), LiveForecasts(a_config(kind="exact_match", history=str(path)))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(forecasts.metrics)
    assert forecasts.runner(scheduler.snapshot) is not None
    decoding(scheduler, "r")
    forecasts.initial(scheduler.snapshot.requests["r"], 100)
    scheduler.progress("r", 4, 0.0)
    forecasts.renew(scheduler)
    forecasts.finished(scheduler.snapshot.requests["r"], "stop")
    forecasts.close()
    page = generate_latest(registry).decode()
    for line in (
        "balanceroute_predictor_history_rows 21.0",
        "balanceroute_predictor_refreshes_total 1.0",
        "balanceroute_predictor_failures_total 0.0",
        'balanceroute_predictor_gate_total{kind="open"} 2.0',
        'balanceroute_predictor_keys_total{kind="hit"} 2.0',
        'balanceroute_predictor_error_tokens_bucket{le="0.0"} 0.0',
        'balanceroute_predictor_error_tokens_bucket{le="1.0"} 1.0',
        'balanceroute_predictor_fits_total{outcome="adopted"} 0.0',
        "balanceroute_predictor_fit_age_seconds",
    ):
        assert line in page, page
