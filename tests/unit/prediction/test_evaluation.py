import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InputError
from balanceroute.prediction import AnchorPredictor, ExactMatchPredictor, FinishedRequest, SurvivalPredictor, evaluate
from balanceroute.prediction.contract import TwoStage
from balanceroute.prediction.evaluation import (
    STEP_S,
    area_under_roc,
    calibration_bins,
    started_s,
    time_split,
    walk,
)

from .builders import a_finish, finishes

H = 80


def on_arrival(arrival_s: float, output_tokens: int, key: str = "") -> FinishedRequest:
    return a_finish(output_tokens, key=key, at_s=arrival_s + STEP_S * output_tokens)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.booleans()), max_size=40))
def test_the_area_under_the_curve_is_the_share_of_pairs_in_order(samples: list[tuple[float, bool]]) -> None:
    positives = [score for score, positive in samples if positive]
    negatives = [score for score, positive in samples if not positive]
    pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]

    found = area_under_roc(np.array([s for s, _ in samples]), np.array([p for _, p in samples], dtype=np.bool_))

    assert found == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_requests_are_walked_at_every_refresh_below_their_length() -> None:
    samples = walk(finishes(81, 80, 1), H)

    walked = sorted(zip(samples.request.tolist(), samples.age.tolist(), samples.remaining.tolist(), strict=True))
    assert walked == [(0, 0, 81), (0, 40, 41), (0, 80, 1), (1, 0, 80), (1, 40, 40), (2, 0, 1)]


def test_a_request_that_was_cut_short_is_not_judged() -> None:
    assert walk([a_finish(500, reason="cancelled")], H).age.tolist() == []


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 5000)), min_size=1), st.floats(0.1, 0.9))
def test_no_training_request_ends_after_a_test_request_starts(rows: list[tuple[float, int]], ratio: float) -> None:
    train, test = time_split([on_arrival(at, output) for at, output in rows], ratio)

    latest = max((row.finished_s for row in train), default=float("-inf"))
    assert all(latest <= started_s(row) for row in test)
    assert test


def test_requests_running_at_the_split_are_cut_short_in_the_training_part() -> None:
    rows = [on_arrival(0.0, 10, "short"), on_arrival(0.0, 1000, "long"), on_arrival(5.0, 7), on_arrival(5.0, 8)]

    train, test = time_split(rows)

    assert train == [rows[0], FinishedRequest("", 100, 100, "cancelled", 5.0)]
    assert test == rows[2:]


def test_an_empty_history_splits_into_two_empty_parts() -> None:
    assert time_split([]) == ([], [])


def test_a_perfect_predictor_scores_perfectly() -> None:
    predictor = SurvivalPredictor(H)
    predictor.start(finishes(200))

    found = evaluate(predictor, finishes(*[200] * 5), H)

    assert (found.auc, found.brier, found.conditional_mae, found.c_hat_mae) == (1.0, 0.0, 0.0, 0.0)
    assert (found.samples, found.requests, found.finish_rate) == (25, 5, pytest.approx(0.4))


def test_the_anchor_is_judged_as_knowing_nothing() -> None:
    found = evaluate(AnchorPredictor(H), finishes(120), H)

    assert (found.auc, found.brier, found.gate_open_rate) == (0.5, pytest.approx(2 / 3), 0.0)
    assert found.conditional_mae == pytest.approx(80 - (80 + 40) / 2)
    assert found.c_hat_mae == pytest.approx((0 + 1 + 41) / 3)


def test_figures_without_a_class_are_null_and_the_result_is_json() -> None:
    found = evaluate(AnchorPredictor(H), finishes(10), H)

    assert json.loads(json.dumps(found.to_dict()))["auc"] is None


def test_calibration_compares_predicted_with_observed_finish_rates() -> None:
    predicted = np.array([0.0, 0.05, 0.95, 1.0])

    low, high = calibration_bins(predicted, np.array([False, True, True, True]))

    assert (low.low, low.samples, low.mean_p_finish, low.finish_rate) == (0.0, 2, pytest.approx(0.025), 0.5)
    assert (high.high, high.samples, high.mean_p_finish, high.finish_rate) == (1.0, 2, pytest.approx(0.975), 1.0)


def test_learning_online_uses_what_has_finished_and_nothing_later() -> None:
    seen: list[tuple[float, int]] = []

    class Spy(AnchorPredictor):
        learned = 0

        def observe(self, finished: FinishedRequest) -> None:
            self.learned += 1

        def predict(self, ages: np.ndarray, prompt_tokens: np.ndarray, keys: object) -> TwoStage:
            seen.append((float(len(ages)), self.learned))
            return super().predict(ages, prompt_tokens, [])

    rows = [on_arrival(float(at), 40) for at in range(1200)]
    evaluate(Spy(H), rows, H, online=True)

    # one sample per request, at its arrival; it finishes two seconds later
    assert seen == [(512.0, 0), (512.0, 511), (176.0, 1023)]


def test_a_recurring_prompt_is_learned_online_but_not_frozen() -> None:
    rows = [on_arrival(float(at), 300 + 10 * (at % 7), key=f"k{at % 7}") for at in range(0, 1500, 2)]
    frozen, online = ExactMatchPredictor(H), ExactMatchPredictor(H)

    assert evaluate(frozen, rows, H).gate_open_rate == 0.0
    found = evaluate(online, rows, H, online=True)

    assert found.gate_open_rate > 0.1
    assert found.auc is not None and found.auc > 0.85


def test_evaluating_without_a_finished_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finished request"):
        evaluate(AnchorPredictor(H), [], H)


def test_more_samples_than_memory_has_room_for_are_refused_before_any_is_made() -> None:
    rows = [FinishedRequest("", 10, 2**31 - 1, "stop", 1e9)]
    with pytest.raises(InputError, match="asked 53,687,092 times, .* accepted are 50,000,000: give fewer"):
        walk(rows, 80)
    assert len(walk(rows, 4096).age) > 1_000_000
