import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.prediction.contract import TwoStage
from balanceroute.prediction.refresh import (
    composite,
    decremented,
    gated,
    gated_batch,
    last_step,
    refresh_interval_tokens,
)

H = 80


def test_the_composite_weighs_the_anchor_with_the_chance_of_not_finishing() -> None:
    assert composite(0.75, 20.0, H) == pytest.approx(0.25 * 80 + 0.75 * 20)


@pytest.mark.parametrize(("mean", "expected"), [(500.0, 80.0), (-500.0, 0.0)], ids=["above", "below"])
def test_the_composite_stays_inside_the_window(mean: float, expected: float) -> None:
    assert composite(1.0, mean, H) == expected


@pytest.mark.parametrize(
    ("p_finish", "expected"),
    [(0.5, 44.0), (0.499, 80.0), (float("nan"), 80.0)],
    ids=["open", "closed", "nan"],
)
def test_the_gate_lets_only_likely_finishes_through(p_finish: float, expected: float) -> None:
    assert gated(p_finish, 10.0, H) == expected


def test_a_mean_that_is_no_number_says_nothing_of_a_request_alone_or_in_a_batch() -> None:
    assert gated(0.9, math.nan, H) == H
    assert gated_batch(TwoStage(np.array([0.9, 1.0]), np.array([math.nan, 5.0])), H).tolist() == [H, 4.0]


@pytest.mark.parametrize(
    ("steps_to_go", "last"), [(1.0, 0.0), (1.4, 1.0), (5.0, 4.0), (5.0 + 1e-9, 4.0), (0.3, 0.0), (0.0, 0.0)]
)
def test_the_last_step_of_a_request_is_one_less_than_its_steps_to_go(steps_to_go: float, last: float) -> None:
    assert last_step(steps_to_go) == last
    assert gated(1.0, steps_to_go, H) == last


def test_an_active_request_takes_part_in_the_present_step_at_least() -> None:
    assert gated(1.0, 0.25, H) == 0.0
    assert decremented(3.0, 10, H) == 0.0


@pytest.mark.parametrize(("left", "last"), [(81.0, 80.0), (80.0, 79.0), (1.0, 0.0), (0.0, 0.0)])
def test_the_limit_of_the_client_says_the_latest_last_step(left: float, last: float) -> None:
    assert gated(0.0, 1.0, H, left) == last
    assert gated(1.0, 500.0, H, left) == min(last, 79.0)


def test_without_a_window_nothing_remains_in_it() -> None:
    assert gated(1.0, 0.0, 0) == 0.0
    assert gated(0.0, 0.0, 0) == 0.0


@given(st.floats(0, 1), st.floats(-10, 200), st.integers(0, 100), st.one_of(st.just(math.inf), st.integers(-5, 120)))
def test_a_batch_is_gated_as_one_by_one(p_finish: float, mean: float, horizon: int, left: float) -> None:
    batch = gated_batch(TwoStage(np.array([p_finish]), np.array([mean])), horizon, np.array([left]))

    assert batch.tolist() == pytest.approx([gated(p_finish, mean, horizon, left)])
    assert 0 <= batch[0] <= max(0.0, min(horizon, left - 1))


def test_between_refreshes_an_estimate_ages_and_an_anchor_does_not() -> None:
    assert decremented(50.0, 7, H) == 43.0
    assert decremented(80.0, 7, H) == 80.0


def test_the_period_is_half_the_window_and_never_nothing() -> None:
    assert [refresh_interval_tokens(h) for h in (80, 1, 0)] == [40, 1, 1]
