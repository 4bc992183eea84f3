import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.prediction import ExactMatchPredictor, FinishedRequest, SurvivalPredictor
from balanceroute.prediction.exact_match import SAMPLES

from .builders import a_finish, finishes
from .test_survival import counted

MARGINAL = finishes(100, 200, 300, 400)


def fitted(rows: list[FinishedRequest], **options: int) -> ExactMatchPredictor:
    predictor = ExactMatchPredictor(10, **options)
    predictor.start(rows)
    return predictor


@given(st.lists(st.integers(1, 60), min_size=2, max_size=SAMPLES), st.integers(0, 58))
def test_a_known_key_answers_by_counting_its_own_lengths(outputs: list[int], age: int) -> None:
    predictor = fitted([*MARGINAL, *finishes(*outputs, key="k")])

    if age < max(outputs):
        assert predictor.predict_one(age, 100, "k") == pytest.approx(counted(outputs, age, 10))


@pytest.mark.parametrize(
    ("key", "age"),
    [("", 95), ("unknown", 95), ("thin", 95), ("known", 95)],
    ids=["none", "miss", "thin", "outlived"],
)
def test_an_unknown_key_falls_back_to_the_marginal_distribution(key: str, age: int) -> None:
    rows = [*MARGINAL, *finishes(7, key="thin"), *finishes(7, 8, 9, key="known")]
    survival = SurvivalPredictor(10)
    survival.start(rows)
    predictor = fitted(rows)

    assert predictor.predict_one(age, 100, key) == survival.predict_one(age, 100, key)
    assert (predictor.key_hits, predictor.key_misses) == (0, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.booleans()), max_size=120),
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d", "e"]), st.integers(0, 70)), min_size=1),
)
def test_a_batch_answers_and_counts_as_one_by_one(
    history: list[tuple[str, int, bool]], asked: list[tuple[str, int]]
) -> None:
    predictor = fitted([a_finish(o, key=k, reason="cancelled" if cut else "stop") for k, o, cut in history])
    one_by_one = [predictor.predict_one(age, 100, key) for key, age in asked]
    hits, misses = predictor.key_hits, predictor.key_misses

    ages = np.array([age for _, age in asked])
    batch = predictor.predict(ages, np.full(len(asked), 100), [key for key, _ in asked])

    assert np.stack(batch, axis=1) == pytest.approx(np.array(one_by_one))
    assert (predictor.key_hits, predictor.key_misses) == (2 * hits, 2 * misses)


def test_a_recurring_prompt_is_recognised_without_a_new_fit() -> None:
    predictor = fitted(MARGINAL)

    for row in finishes(7, 9, key="k"):
        predictor.observe(row)

    assert predictor.predict_one(0, 100, "k") == (1.0, 8.0)


def test_half_of_those_cut_short_in_the_window_count_as_at_risk() -> None:
    rows = [a_finish(5, key="k"), a_finish(6, key="k", reason="cancelled"), a_finish(50, key="k")]

    assert fitted(rows).predict_one(0, 100, "k") == pytest.approx((1 / 2.5, 5.0))


def test_a_full_row_forgets_the_oldest_length_of_its_key() -> None:
    predictor = fitted(finishes(500, *[5] * SAMPLES, key="k"))

    assert predictor.predict_one(0, 100, "k") == (1.0, 5.0)


def test_the_least_recently_used_key_leaves_first_and_memory_stays_bounded() -> None:
    predictor = fitted([], max_keys=2, min_samples=1)

    for key, output in [("a", 1), ("b", 2), ("a", 1), ("c", 3)]:
        predictor.observe(a_finish(output, key=key))

    assert predictor.n_keys == 2
    assert [predictor.predict_one(0, 100, key) for key in "abc"] == [(1.0, 1.0), (0.0, 10.0), (1.0, 3.0)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=200))
def test_an_evicted_row_leaves_nothing_to_the_next_key(history: list[tuple[int, int]]) -> None:
    predictor = fitted([], max_keys=3, min_samples=1)
    since_eviction: dict[int, list[int]] = {}

    for key, output in history:
        since_eviction[key] = [*since_eviction.pop(key, []), output][-SAMPLES:]
        if len(since_eviction) > 3:
            del since_eviction[next(iter(since_eviction))]
        predictor.observe(a_finish(output, key=str(key)))

    assert predictor.n_keys == len(since_eviction)
    for key, outputs in since_eviction.items():
        assert predictor.predict_one(0, 100, str(key)) == pytest.approx(counted(outputs, 0, 10))


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(1, 60), st.booleans()), max_size=150))
def test_a_bulk_history_gives_the_same_state_as_row_by_row(history: list[tuple[int, int, bool]]) -> None:
    rows = [
        a_finish(output, key=str(key) if key >= 0 else "", reason="cancelled" if cut else "stop")
        for key, output, cut in history
    ]
    at_once, one_by_one = fitted(rows, max_keys=3), fitted([], max_keys=3)
    for row in rows:
        one_by_one.observe(row)
    one_by_one.adopt(one_by_one.fitter()(one_by_one.ring.take()))

    keys = [str(key) for key in range(7)]
    for age in (0, 5, 40):
        asked = np.full(len(keys), age), np.full(len(keys), 100), keys
        assert np.array_equal(at_once.predict(*asked), one_by_one.predict(*asked))
    assert at_once.n_keys == one_by_one.n_keys
