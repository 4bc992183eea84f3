"""Who leaves a silent worker, and how many at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.core.tracker import PrefillerBudget
from balanceroute.core.types import Role, WorkerSpec, WorkerState
from balanceroute.proxy.life.moves import LANES, Stuck, choose, room


def a_prefiller(state: WorkerState = WorkerState.UP, kv_usage: float = 0.1) -> PrefillerBudget:
    return PrefillerBudget(WorkerSpec("p", Role.PREFILL), state, kv_usage)


def test_requests_without_a_token_move_first_in_order_of_arrival() -> None:
    stuck = [Stuck("c", True, 1, 9.0), Stuck("b", False, 3, 9.0), Stuck("a", False, 2, 9.0)]
    assert choose(stuck, 9, 5.0) == ["a", "b", "c"]
    assert choose(stuck, 2, 5.0) == ["a", "b"]
    assert choose(stuck, 0, 5.0) == []


def test_a_stream_waits_longer_than_a_new_request_before_it_moves() -> None:
    stuck = [Stuck("begun", True, 1, 4.9), Stuck("fresh", False, 2, 0.0)]
    assert choose(stuck, 9, 5.0) == ["fresh"]
    assert choose([Stuck("begun", True, 1, 5.0)], 9, 5.0) == ["begun"]
    assert choose([Stuck("begun", True, 1, math.inf)], 9, 5.0) == ["begun"]


def test_the_prefill_tier_takes_as_many_moves_as_keep_its_prefillers_busy() -> None:
    down, full = a_prefiller(WorkerState.DOWN), a_prefiller(kv_usage=0.95)
    assert room([a_prefiller(), a_prefiller(), down, full], 0.9, None, 100, 0) == 2 * LANES
    assert room([a_prefiller()], 0.9, 7, 100, 5) == 2
    assert room([down, full], 0.9, None, 100, 0) == 0
    assert room([a_prefiller()], 0.9, None, 1, 0) == 1
    assert room([a_prefiller()], 0.9, None, -3, 0) == 0


@pytest.mark.parametrize("relays", [1, 2, 3, 5])
def test_all_relays_together_move_no_more_than_a_single_process(relays: int) -> None:
    tier = [a_prefiller(), a_prefiller()]
    each = room(tier, 0.9, None, 100, 0, relays)
    assert each >= 1 and relays * (each - 1) < 2 * LANES <= relays * each
    assert room(tier, 0.9, None, 100, each, relays) == 0
    assert room(tier, 0.9, None, 1, 0, relays) == 1


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.floats(0, 10)), max_size=30),
    st.integers(0, 12),
    st.floats(0, 10),
)
def test_moves_are_limited_by_free_places_and_none_is_early(
    waits: list[tuple[bool, int, float]], free: int, after_s: float
) -> None:
    stuck = {str(i): Stuck(str(i), *wait) for i, wait in enumerate(waits)}
    chosen = choose(list(stuck.values()), free, after_s)
    may = [one.id for one in stuck.values() if not one.has_tokens or one.waited_s >= after_s]
    assert len(chosen) == min(free, len(may)) == len(set(chosen)) and set(chosen) <= set(may)
    left = [stuck[name] for name in set(may) - set(chosen)]
    assert all(
        (stuck[c].has_tokens, stuck[c].order) <= (other.has_tokens, other.order) for c in chosen for other in left
    )
