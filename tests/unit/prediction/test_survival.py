import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.prediction import FinishedRequest, SurvivalPredictor

from .builders import a_finish, finishes

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def fitted(rows: list[FinishedRequest], horizon: int = 10) -> SurvivalPredictor:
    predictor = SurvivalPredictor(horizon)
    predictor.start(rows)
    return predictor


def counted(outputs: list[int], age: int, horizon: int) -> tuple[float, float]:
    """Both stages by counting over the history, as the definition says."""
    at_risk = [o for o in outputs if o > age]
    done = [o - age for o in at_risk if o <= age + horizon]
    if not done:
        return 0.0, float(horizon)
    return len(done) / len(at_risk), sum(done) / len(done)


def redistributed(rows: list[FinishedRequest], age: int, horizon: int) -> tuple[float, float]:
    """Both stages with the mass of each cut-short request handed on to those still running."""
    order = sorted(rows, key=lambda row: (row.output_tokens, row.censored))
    mass = [1.0] * len(order)
    for at, row in enumerate(order):
        later = len(order) - at - 1
        if row.censored and later:
            for other in range(at + 1, len(order)):
                mass[other] += mass[at] / later
            mass[at] = 0.0
    last = max((row.output_tokens for row in order if not row.censored), default=0)
    alive = sum(m for m, row in zip(mass, order, strict=True) if row.output_tokens > age or row.censored)
    done = [
        (m, row.output_tokens - age)
        for m, row in zip(mass, order, strict=True)
        if not row.censored and age < row.output_tokens <= age + horizon
    ]
    weight = sum(m for m, _ in done)
    if age >= last or weight == 0.0:
        return 0.0, float(horizon)
    return weight / alive, sum(m * r for m, r in done) / weight


@given(lengths, st.integers(0, 70), st.integers(1, 30))
def test_survival_equals_counting_over_the_history(outputs: list[int], age: int, horizon: int) -> None:
    predictor = fitted(finishes(*outputs), horizon)

    assert predictor.predict_one(age, 100, "") == pytest.approx(counted(outputs, age, horizon))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=40), st.integers(0, 45))
def test_cut_short_requests_hand_their_mass_on_to_the_longer_ones(history: list[tuple[int, bool]], age: int) -> None:
    rows = [a_finish(output, reason="cancelled" if cut else "stop") for output, cut in history]

    assert fitted(rows).predict_one(age, 100, "") == pytest.approx(redistributed(rows, age, 10))


@given(lengths, st.lists(st.integers(0, 70), min_size=1, max_size=20))
def test_a_batch_answers_as_one_by_one(outputs: list[int], ages: list[int]) -> None:
    predictor = fitted(finishes(*outputs))
    prompts = np.full(len(ages), 100)

    batch = predictor.predict(np.array(ages), prompts, [""] * len(ages))

    one_by_one = [predictor.predict_one(age, 100, "") for age in ages]
    assert np.stack(batch, axis=1) == pytest.approx(np.array(one_by_one))


@pytest.mark.parametrize("rows", [[], finishes(5)], ids=["no history", "older than everyone in it"])
def test_the_unknown_is_never_confident(rows: list[FinishedRequest]) -> None:
    assert fitted(rows).predict_one(7, 100, "") == (0.0, 10.0)


def test_a_cancelled_request_never_counts_as_a_finish() -> None:
    rows = [a_finish(5, reason="cancelled"), a_finish(50)]

    assert fitted(rows).predict_one(0, 100, "")[0] == 0.0


def test_a_request_cut_off_by_its_token_limit_counts_as_finished() -> None:
    assert fitted([a_finish(5, reason="length")]).predict_one(0, 100, "") == (1.0, 5.0)


def test_observations_change_nothing_before_the_next_fit() -> None:
    predictor = fitted(finishes(5))

    predictor.observe(a_finish(500))

    assert predictor.predict_one(0, 100, "") == (1.0, 5.0)
    predictor.adopt(predictor.fitter()(predictor.ring.take()))
    assert predictor.predict_one(0, 100, "")[0] == 0.5


def test_only_the_newest_rows_are_learned_from() -> None:
    predictor = SurvivalPredictor(10, max_rows=3)

    predictor.start(finishes(500, 500, 5, 5, 5))

    assert predictor.predict_one(0, 100, "") == (1.0, 5.0)
    assert predictor.ring.take().finished_s.tolist() == [2.0, 3.0, 4.0]


def test_rows_older_than_max_age_s_before_the_newest_are_left_out() -> None:
    predictor = SurvivalPredictor(10, max_age_s=60.0)

    predictor.start([a_finish(500, at_s=0.0), a_finish(5, at_s=61.0)])

    assert predictor.predict_one(0, 100, "") == (1.0, 5.0)


def test_rows_after_a_temporary_clock_error_do_not_count_as_old() -> None:
    predictor = SurvivalPredictor(10, max_age_s=60.0)

    predictor.start([a_finish(500, at_s=1e6), a_finish(5, at_s=1.0), a_finish(5, at_s=2.0)])

    assert predictor.ring.take().finished_s.tolist() == [1e6, 1.0, 2.0]
