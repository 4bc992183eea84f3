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
    is_due,
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
    [(0.5, 45.0), (0.499, 80.0), (float("nan"), 80.0)],
    ids=["open", "closed", "nan"],
)
def test_the_gate_lets_only_likely_finishes_through(p_finish: float, expected: float) -> None:
    assert gated(p_finish, 10.0, H) == expected


def test_an_active_request_contributes_at_least_one_step() -> None:
    assert gated(1.0, 0.25, H) == 1.0
    assert decremented(3.0, 10, H) == 1.0


def test_without_a_window_nothing_remains_in_it() -> None:
    assert gated(1.0, 0.0, 0) == 0.0
    assert gated(0.0, 0.0, 0) == 0.0


@given(st.floats(0, 1), st.floats(-10, 200), st.integers(0, 100), st.one_of(st.just(math.inf), st.floats(-5, 120)))
def test_a_batch_is_gated_as_one_by_one(p_finish: float, mean: float, horizon: int, left: float) -> None:
    batch = gated_batch(TwoStage(np.array([p_finish]), np.array([mean])), horizon, np.array([left]))

    assert batch.tolist() == pytest.approx([gated(p_finish, mean, horizon, left)])
    assert min(1, horizon) <= batch[0] <= max(min(1, horizon), min(horizon, left))


def test_between_refreshes_an_estimate_ages_and_an_anchor_does_not() -> None:
    assert decremented(50.0, 7, H) == 43.0
    assert decremented(80.0, 7, H) == 80.0


@pytest.mark.parametrize(
    ("expected_remaining", "tokens", "due"),
    [(80.0, 39, False), (80.0, 40, True), (2.0, 5, False), (1.0, 5, True), (1.0, 0, False)],
    ids=["anchor", "period over", "above the floor", "at the floor", "just refreshed"],
)
def test_a_refresh_is_due_after_half_a_window_or_at_the_floor(
    expected_remaining: float, tokens: int, due: bool
) -> None:
    assert is_due(expected_remaining, tokens, H) is due


def test_the_period_is_half_the_window_and_never_nothing() -> None:
    assert [refresh_interval_tokens(h) for h in (80, 1, 0)] == [40, 1, 1]
