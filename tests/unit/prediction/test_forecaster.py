import pytest

from balanceroute.prediction import AnchorPredictor, ExactMatchPredictor, Forecaster, SurvivalPredictor

from .builders import ATracker, finishes

H = 80


def a_forecaster() -> Forecaster:
    predictor = SurvivalPredictor(H)
    predictor.start(finishes(*[60] * 9, *[1000] * 1))
    return Forecaster(predictor, H)


def test_a_waiting_request_is_forecast_at_age_zero() -> None:
    assert a_forecaster().initial(100) == 61.0  # 0.1 * 80 + 0.9 * 60 = 62 steps, the last of them 61 ahead


@pytest.mark.parametrize("n", [1, 100], ids=["few, one by one", "many, one batch"])
def test_a_refresh_answers_every_tracker_in_order(n: int) -> None:
    forecaster = a_forecaster()

    values = forecaster.refresh([ATracker(age_tokens=age) for age in (0, 50, 500) * n])

    assert values == [61.0, 16.0, 80.0] * n
    assert (forecaster.refreshes, forecaster.gate_open, forecaster.gate_closed) == (3 * n, 2 * n, n)


def test_an_empty_refresh_costs_nothing() -> None:
    forecaster = a_forecaster()

    assert forecaster.refresh([]) == []
    assert forecaster.refreshes == 0


def test_a_finished_request_is_learned() -> None:
    forecaster = a_forecaster()

    row = forecaster.finished(ATracker(age_tokens=55), "stop", now=3.0)

    assert (row.output_tokens, row.finished_s, row.censored) == (55, 3.0, False)
    assert forecaster.predictor.ring.pending == 1  # type: ignore[attr-defined]


def test_a_requeued_request_is_learned_and_forecast_as_the_client_saw_it() -> None:
    tracker = ATracker(age_tokens=55, earlier_tokens=50, prompt_tokens=150, prompt_key="k")
    forecaster = a_forecaster()

    assert forecaster.refresh([tracker]) == [12.0]  # 0.1 * 80 + 0.9 * 5 = 12.5 steps, the last of them 12 ahead
    assert forecaster.initial(100, "k", age_tokens=50) == 16.0  # 0.1 * 80 + 0.9 * 10 = 17 steps
    row = forecaster.finished(tracker, "length", now=3.0)
    assert (row.prompt_tokens, row.output_tokens, row.prompt_key) == (100, 55, "k")


@pytest.mark.parametrize("n", [1, 20], ids=["few, one by one", "many, one batch"])
def test_the_clients_token_limit_bounds_the_forecast_even_with_a_closed_gate(n: int) -> None:
    forecaster = a_forecaster()
    trackers = [
        ATracker(age_tokens=0, max_new_tokens=40),  # 60 would be likely, but 40 is the end
        ATracker(age_tokens=500, max_new_tokens=530),  # gate closed: nobody finishes here but for the limit
        ATracker(age_tokens=500, max_new_tokens=581),  # the limit is beyond the horizon
        ATracker(age_tokens=30, max_new_tokens=100),  # 30 more are likely (p = 0.9), 70 at most
        ATracker(age_tokens=99, max_new_tokens=99),  # the last token is out, the end not yet heard
    ]

    expected = [39.0, 29.0, 80.0, 33.0, 0.0]  # one less than the steps to go: 40, 30, any, 0.1 * 70 + 0.9 * 30, 1
    assert forecaster.refresh(trackers * n) == expected * n
    assert (forecaster.gate_open, forecaster.gate_closed) == (4 * n, n)
    assert forecaster.initial(100, max_new_tokens=40) == 39.0


def test_a_cancelled_request_is_learned_as_cut_short() -> None:
    forecaster = a_forecaster()

    row = forecaster.finished(ATracker(age_tokens=55), "cancelled", now=3.0)

    assert row.censored


def test_key_hits_are_passed_on_and_zero_without_keys() -> None:
    predictor = ExactMatchPredictor(H)
    predictor.start(finishes(60, 60, key="k"))
    forecaster = Forecaster(predictor, H)

    forecaster.refresh([ATracker(prompt_key="k"), ATracker(prompt_key="other")])

    assert (forecaster.key_hits, forecaster.key_misses) == (1, 1)
    assert a_forecaster().key_hits == 0


def test_no_predictor_means_every_request_is_anchored() -> None:
    forecaster = Forecaster(AnchorPredictor(H), H)

    assert forecaster.initial(100, "k") == 80.0
    assert forecaster.refresh([ATracker(age_tokens=9)] * 20) == [80.0] * 20
