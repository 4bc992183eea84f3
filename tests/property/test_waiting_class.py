"""The indexed waiting requests of one priority against a plain list that is searched."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.pool import WaitingClass
from balanceroute.core.tracker import RequestTracker
from balanceroute.errors import InvariantError

TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])
EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6), TIMES), max_size=25)


@settings(max_examples=200, deadline=None)
@given(
    EVENTS,
    st.integers(0, 7),
    st.integers(0, 7),
    st.sampled_from([0.0, 1.0, 2.0, 2.5]),
    st.integers(0, 30),
    st.integers(0, 25),
)
def test_every_search_equals_a_linear_scan_of_the_list(
    events: list[tuple[bool, int, int, float]], low: int, high: int, now: float, count: int, asked_first: int
) -> None:
    """Sizes and arrays are made when they are asked for first, and kept up from then on."""
    waiting, plain = WaitingClass(), list[RequestTracker]()
    for order, (is_added, pick, tokens, overdue_s) in enumerate(events):
        if order == asked_first:
            waiting.arrays()
            waiting.smallest_above(0)
        if is_added or not plain:
            # requests come back from a decode, so their place is by arrival and not by insertion
            place = pick * 100 + order
            tracker = RequestTracker(f"r{order}", tokens, place)
            tracker.ready_s, tracker.overdue_s = float(pick), overdue_s
            waiting.add(tracker)
            plain.append(tracker)
            plain.sort(key=lambda each: each.order)
        else:
            gone = plain.pop(pick % len(plain))
            waiting.remove(gone)
            assert gone not in waiting
            with pytest.raises(InvariantError):
                waiting.remove(gone)
    assert list(waiting) == plain
    assert all(tracker in waiting for tracker in plain)
    prompt_tokens, ready_s = waiting.arrays()
    assert prompt_tokens.tolist() == [tracker.prompt_tokens for tracker in plain]
    assert ready_s.tolist() == [tracker.ready_s for tracker in plain]
    up = sorted(plain, key=lambda each: (each.prompt_tokens, each.order))
    down = sorted(plain, key=lambda each: (-each.prompt_tokens, each.order))
    assert waiting.by_size(count, descending=False) == up[:count]
    assert waiting.by_size(count, descending=True) == down[:count]
    assert waiting.largest_at_most(low) is next((each for each in down if each.prompt_tokens <= low), None)
    assert waiting.smallest_above(low) is next((each for each in up if each.prompt_tokens > low), None)
    between = (each for each in plain if low <= each.prompt_tokens <= high)
    assert waiting.first_between(low, high) is next(between, None)
    late = sorted((each for each in plain if each.overdue_s <= now), key=lambda each: (each.overdue_s, each.order))
    assert waiting.most_overdue(now) is next(iter(late), None)
    if plain:
        assert waiting.longest_waiting() is min(plain, key=lambda each: (each.ready_s, each.order))
