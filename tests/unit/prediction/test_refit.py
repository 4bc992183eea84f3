import asyncio
import logging
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import ConfigError
from balanceroute.prediction import Refitter, SurvivalCurve, SurvivalPredictor, refit_on_growth
from balanceroute.prediction.observations import ObservationRing, Observations
from balanceroute.prediction.refit import FIRST_ROWS_IN_PROCESS
from tests.waiting import PATIENCE_S, until

from .builders import a_finish, finishes


def observed(predictor: SurvivalPredictor, *outputs: int) -> None:
    for row in finishes(*outputs):
        predictor.observe(row)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gated(SurvivalPredictor):
    """Its fits wait for `may_end`, and can be made to fail or to take time."""

    def __init__(self) -> None:
        super().__init__(10)
        self.may_end, self.began = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def fitter(self) -> Callable[[Observations], SurvivalCurve]:
        def fit(observations: Observations) -> SurvivalCurve:
            self.began.set()
            assert self.may_end.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            return SurvivalCurve(observations)

        return fit


class Announcing(SurvivalPredictor):
    """Says when a fit is adopted."""

    def __init__(self, horizon_steps: int) -> None:
        super().__init__(horizon_steps)
        self.adopted = asyncio.Event()

    def adopt(self, fitted: SurvivalCurve) -> None:
        super().adopt(fitted)
        self.adopted.set()


def test_a_cold_start_learns_from_its_first_finishes_and_then_as_it_grows() -> None:
    predictor = SurvivalPredictor(10)
    fitted_at = []

    for n in range(1, 101):
        observed(predictor, 5)
        if refit_on_growth(predictor):
            fitted_at.append(n)

    assert fitted_at[:3] == [8, 16, 24]
    assert len(fitted_at) < 15
    assert predictor.predict_one(0, 100, "") == (1.0, 5.0)


def test_running_requests_keep_a_cold_start_from_learning_only_short_answers() -> None:
    blind, seeing = SurvivalPredictor(10), SurvivalPredictor(10)
    for predictor in (blind, seeing):
        observed(predictor, *[5] * 8)

    assert refit_on_growth(blind)
    assert refit_on_growth(seeing, running=lambda: [(200, 100)] * 24)

    assert blind.predict_one(0, 100, "")[0] == 1.0
    assert seeing.predict_one(0, 100, "")[0] == pytest.approx(8 / 32)
    assert len(seeing.ring) == 8


@pytest.mark.anyio
async def test_the_refitter_includes_the_running_requests_at_each_fit() -> None:
    predictor = SurvivalPredictor(10)
    observed(predictor, 5)
    running: list[tuple[int, int]] = []

    async def now_running() -> list[tuple[int, int]]:
        return running

    refitter = Refitter(predictor, running=now_running)
    await refitter.refit()
    assert predictor.predict_one(0, 100, "")[0] == 1.0
    running.append((6, 100))
    await refitter.refit()
    refitter.close()
    assert predictor.predict_one(0, 100, "")[0] == 0.5


@pytest.mark.anyio
async def test_the_present_fit_answers_until_the_next_one_is_adopted() -> None:
    predictor = Gated()
    predictor.start(finishes(5))
    refitter = Refitter(predictor)
    observed(predictor, 500)

    fit = asyncio.ensure_future(refitter.refit())
    await until(predictor.began.is_set)
    during = predictor.predict_one(0, 100, "")
    observed(predictor, 500, 500)
    predictor.may_end.set()

    assert await fit
    assert during == (1.0, 5.0)
    assert predictor.predict_one(0, 100, "")[0] == 0.5  # what arrived during the fit waits for the next one
    assert predictor.ring.pending == 2


def test_a_failed_fit_keeps_the_present_one_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> Refitter[SurvivalCurve]:
        predictor = Gated()
        predictor.start(finishes(5))
        predictor.may_end.set()
        predictor.error = ConfigError("no scikit-learn here")
        refitter = Refitter(predictor)
        assert not await refitter.refit()
        assert predictor.predict_one(0, 100, "") == (1.0, 5.0)
        return refitter

    with caplog.at_level(logging.WARNING):
        refitter = asyncio.run(scenario())

    assert (refitter.fits, refitter.failures) == (0, 1)
    assert "no scikit-learn here" in caplog.text


@pytest.mark.anyio
async def test_the_age_of_the_current_fit_grows_while_refits_fail() -> None:
    clock, predictor = Clock(), Gated()
    predictor.may_end.set()
    observed(predictor, *[5] * 8)
    refitter = Refitter(predictor, clock=clock)
    assert await refitter.refit()
    predictor.error = ConfigError("no scikit-learn here")
    for age_s in (60.0, 120.0):
        clock.now += 60
        observed(predictor, 5)
        assert not await refitter.refit()
        assert refitter.fit_age_s == age_s and not refitter.is_due


def test_a_refit_is_due_after_growth_or_the_interval_but_never_without_new_rows() -> None:
    clock, predictor = Clock(), SurvivalPredictor(10)
    predictor.start(finishes(*[5] * 80))
    refitter = Refitter(predictor, interval_s=60.0, clock=clock)

    clock.now = 1000.0
    assert not refitter.is_due
    observed(predictor, 5)
    assert refitter.is_due
    clock.now = 30.0
    assert not refitter.is_due
    observed(predictor, *[5] * 10)
    assert refitter.is_due


def test_a_refit_waits_nine_times_as_long_as_the_last_one_took() -> None:
    clock, predictor = Clock(), Gated()
    observed(predictor, *[5] * 8)
    refitter = Refitter(predictor, interval_s=1.0, clock=clock)
    real_fit = predictor.fitter()

    def slow(observations: Observations) -> SurvivalCurve:
        clock.now += 10.0
        return real_fit(observations)

    predictor.may_end.set()
    predictor.fitter = lambda: slow  # type: ignore[method-assign]
    asyncio.run(refitter.refit())
    observed(predictor, *[5] * 8)

    clock.now += 89.0
    assert not refitter.is_due
    clock.now += 1.0
    assert refitter.is_due


@pytest.mark.anyio
async def test_the_loop_refits_by_itself_and_ends_its_worker() -> None:
    predictor = Announcing(10)
    observed(predictor, *[5] * 8)
    executor = ThreadPoolExecutor(1)
    refitter = Refitter(predictor, interval_s=0.01, executor=executor)
    running = asyncio.ensure_future(refitter.run())
    await asyncio.wait_for(predictor.adopted.wait(), PATIENCE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert predictor.predict_one(0, 100, "") == (1.0, 5.0)
    with pytest.raises(RuntimeError):
        executor.submit(print)


class NoThreads(ThreadPoolExecutor):
    """What an executor does where the system has no thread."""

    def submit(self, *args: object, **options: object) -> Future[Any]:  # type: ignore[override]
        raise RuntimeError("can't start new thread")


@pytest.mark.anyio
async def test_a_temporary_lack_of_threads_fails_one_fit_and_not_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    predictor = Announcing(10)
    observed(predictor, *[5] * 8)
    refitter = Refitter(predictor, executor=NoThreads(1))
    with caplog.at_level(logging.WARNING):
        assert not await refitter.refit()
    observed(predictor, *[5] * 8)
    assert await refitter.refit()
    assert (refitter.fits, refitter.failures) == (1, 1)
    refitter.close()
    assert "keeping the present fit: can't start new thread" in caplog.text


@pytest.mark.parametrize("in_process", [False, True], ids=["in a thread", "in a process"])
@pytest.mark.anyio
async def test_refits_continue_when_they_are_started_again_after_an_error(in_process: bool) -> None:
    predictor = Announcing(10)
    predictor.refits_in_process = in_process
    refitter = Refitter(predictor)
    for _ in range(2):
        observed(predictor, *[5] * 8)
        assert await refitter.refit()
        refitter.close()  # as `run` does on its way out


def test_freezing_a_long_history_copies_no_rows_and_later_rows_leave_the_view_alone() -> None:
    ring = ObservationRing(100_000)
    row = a_finish(5)
    for _ in range(105_000):
        ring.add(row)

    tracemalloc.start()
    recent = ring.freeze()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for _ in range(5000):
        ring.add(a_finish(7))

    assert peak_bytes < len(ring)  # less than a byte per row
    assert len(recent.joined()) == len(ring) == 100_000
    assert set(recent.joined().output_tokens.tolist()) == {5}
    assert ring.take().output_tokens[-5001:].tolist() == [5, *[7] * 5000]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 8))
def test_a_ring_keeps_exactly_the_newest_rows_at_any_chunk_size(capacity: int, n: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("balanceroute.prediction.observations.CHUNK", chunk)
        ring = ObservationRing(capacity)
        for row in finishes(*range(1, n + 1)):
            ring.add(row)

        assert ring.take().output_tokens.tolist() == list(range(1, n + 1))[-capacity:]
        assert len(ring) == min(n, capacity)


def test_a_full_ring_is_copied_oldest_first() -> None:
    predictor = SurvivalPredictor(10, max_rows=4)
    for at, output in enumerate([1, 2, 3, 4, 5, 6]):
        predictor.observe(a_finish(output, at_s=at, key="k", reason="cancelled" if output == 5 else "stop"))

    taken = predictor.ring.take()

    assert taken.output_tokens.tolist() == [3, 4, 5, 6]
    assert taken.censored.tolist() == [False, False, True, False]
    assert len(set(taken.key_ids.tolist())) == 1


class InProcess(SurvivalPredictor):
    """Its fits happen in a process of their own, by a function that can be sent there."""

    refits_in_process = True

    def __init__(self, fit: Callable[[Observations], SurvivalCurve]) -> None:
        super().__init__(10)
        self._fit = fit

    def fitter(self) -> Callable[[Observations], SurvivalCurve]:
        return self._fit


def too_little(observations: Observations) -> SurvivalCurve:
    raise ValueError("too little")


def never_ends(observations: Observations) -> SurvivalCurve:
    threading.Event().wait()
    return SurvivalCurve(observations)


def test_a_failure_in_the_process_is_logged_and_the_current_fit_stays(caplog: pytest.LogCaptureFixture) -> None:
    predictor = InProcess(too_little)
    observed(predictor, 5, 5)
    refitter = Refitter(predictor)

    assert asyncio.run(refitter.refit()) is False
    assert "too little" in caplog.text
    refitter.close()


def test_trees_are_first_grown_at_a_minimum_number_of_rows() -> None:
    predictor = InProcess(SurvivalCurve)
    refitter = Refitter(predictor, interval_s=60.0, clock=lambda: 0.0)

    observed(predictor, *[5] * (FIRST_ROWS_IN_PROCESS - 1))
    assert not refitter.is_due
    observed(predictor, 5)
    assert refitter.is_due


def test_an_adopted_fit_and_a_refused_fit_are_each_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    predictor = Gated()
    predictor.may_end.set()
    observed(predictor, *[5] * 9)
    refitter = Refitter(predictor)

    with caplog.at_level(logging.INFO):
        assert asyncio.run(refitter.refit())
        predictor.error = ConfigError("no scikit-learn here")
        assert not asyncio.run(refitter.refit())

    adopted, refused = caplog.records
    assert (adopted.getMessage(), adopted.rows) == ("predictor fitted anew", 9)  # type: ignore[attr-defined]
    assert "no scikit-learn here" in refused.getMessage() and not refused.exc_info


def test_closing_ends_the_process_of_a_fit_under_way(caplog: pytest.LogCaptureFixture) -> None:
    predictor = InProcess(never_ends)
    observed(predictor, 5, 5)
    refitter = Refitter(predictor)

    async def scenario() -> bool:
        asyncio.get_running_loop().call_later(0.2, refitter.close)  # spawned by then, or just being spawned
        return await refitter.refit()

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) is False
    assert "ended without a result" in caplog.text
