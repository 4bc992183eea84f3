"""BR-0 without a pool: at once, by score, up to a cap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.types import Outcome, WorkerState
from balanceroute.errors import ConfigError
from tests.examples import examples
from tests.unit.core.builders import a_scheduler, admitted, hold, pool_all


def test_requests_go_where_the_score_is_highest_and_ties_to_the_lightest_worker() -> None:
    scheduler = a_scheduler("br_0", workers=3, slots=8, pool_bypass=True)
    pool_all(scheduler, {"a": 900})
    pool_all(scheduler, {"b": 500, "c": 300, "d": 450})
    # an empty cluster: a sets the envelope; b and c fit the margins of d1 and d2; d fits d2 only (300 + 450 <= 900)
    assert admitted(scheduler) == [("a", "d0"), ("b", "d1"), ("c", "d2"), ("d", "d2")]


def test_dispatched_requests_count_as_load_at_once() -> None:
    scheduler = a_scheduler("br_0", workers=2, slots=8, pool_bypass=True)
    for name, worker in (("a", "d0"), ("b", "d1"), ("c", "d0")):
        pool_all(scheduler, {name: 100})
        assert admitted(scheduler) == [(name, worker)]


def test_requests_beyond_the_cap_wait_and_go_in_their_order() -> None:
    scheduler = a_scheduler("br_0", workers=1, slots=2, pool_bypass=True, bypass_margin=1)
    pool_all(scheduler, dict.fromkeys("abcde", 10))
    assert [request for request, _ in admitted(scheduler)] == ["a", "b", "c"]
    scheduler.finish("b", Outcome.FINISHED, 1.0)
    assert admitted(scheduler) == [("d", "d0")]


def test_only_workers_that_are_up_take_requests() -> None:
    scheduler = a_scheduler("br_0", workers=2, pool_bypass=True)
    scheduler.set_worker_state("d0", WorkerState.DRAINING, 0.0)
    pool_all(scheduler, {"a": 10})
    assert admitted(scheduler) == [("a", "d1")]


def test_br_h_refuses_to_bypass_the_pool() -> None:
    with pytest.raises(ConfigError, match="pool_bypass works with br_0 only"):
        make_policy(PolicySettings(policy="br_h", pool_bypass=True))


@settings(max_examples=examples(200), deadline=None)
@given(
    loads=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    prompt_tokens=st.integers(1, 80),
    alpha=st.sampled_from([0.5, 1.0, 3.0]),
    beta=st.none() | st.sampled_from([0.0, 1.0, 2.5, 43.0]),
)
def test_a_request_goes_where_an_exhaustive_search_puts_it(
    loads: list[int], prompt_tokens: int, alpha: float, beta: float | None
) -> None:
    scheduler = a_scheduler("br_0", workers=len(loads), slots=1, pool_bypass=True, bypass_margin=1)
    hold(scheduler, [[load] for load in loads])
    scheduler.policy = make_policy(
        PolicySettings(policy="br_0", pool_bypass=True, bypass_margin=1, alpha=alpha, beta=beta)
    )
    penalty = len(loads) if beta is None else beta
    scores = [alpha * prompt_tokens - penalty * max(0, prompt_tokens - (max(loads) - load)) for load in loads]
    best = max(range(len(loads)), key=lambda index: (scores[index], -loads[index], -index))
    pool_all(scheduler, {"r": prompt_tokens})
    (admission,) = scheduler.admit(0.0)
    assert (admission.worker, admission.stage, admission.score) == (f"d{best}", 3, scores[best])
    pool_all(scheduler, {"next": prompt_tokens})
    assert {action.worker for action in scheduler.admit(0.0)}.isdisjoint({f"d{best}"}), "one slot and a margin of one"
