"""Reports of decode workers against our ledger: what is somebody else's, since when, and what it leaves to us."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balanceroute.proxy.workers.foreign import NOBODY, Foreign, ForeignLoad, Occupancy, least_own_slots
from tests.examples import examples

CAPACITY = {"kv_capacity_tokens": 100_000.0, "kv_block_tokens": 128.0}


def report(running: float, waiting: float = 0.0, **samples: float) -> dict[str, float]:
    return {"num_requests_running": running, "num_requests_waiting": waiting, **samples}


def test_requests_beyond_the_ledger_in_two_consecutive_reports_are_foreign() -> None:
    load = ForeignLoad()
    assert load.see(report(30, 34, kv_cache_usage_perc=0.5, **CAPACITY), 2, 1_000, 500.0) == NOBODY
    found = load.see(report(30, 34, kv_cache_usage_perc=0.4, **CAPACITY), 2, 1_000, 500.0)
    assert found == Foreign(62, 40_000 - 1_000 - 2 * 128)


def test_foreign_load_ends_with_the_first_report_without_it() -> None:
    load = ForeignLoad()
    for _ in range(3):
        load.see(report(10), 0, 0, 100.0)
    assert load.see(report(4), 0, 0, 100.0) == Foreign(4, 400)
    assert load.see(report(0), 0, 0, 100.0) == NOBODY


def test_a_report_of_fewer_requests_than_our_own_changes_nothing() -> None:
    load = ForeignLoad()
    for _ in range(3):
        assert load.see(report(3), 8, 4_000, 500.0) == NOBODY


def test_without_a_known_cache_size_a_foreign_request_is_as_large_as_our_own() -> None:
    load = ForeignLoad()
    load.see(report(4), 1, 700, 700.0)
    assert load.see(report(4), 1, 700, 700.0) == Foreign(3, 2_100)


def test_one_unreadable_report_changes_nothing_and_two_make_foreign_load_unknown() -> None:
    load = ForeignLoad()
    for _ in range(3):
        load.see(report(5), 0, 0, 10.0)
    assert load.see(None, 0, 0, 10.0).requests == 5
    assert load.see({"kv_cache_usage_perc": 0.5}, 0, 0, 10.0) == NOBODY
    assert load.see(report(5), 0, 0, 10.0) == NOBODY  # a first one again


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 8), min_size=2, max_size=60), st.data())
def test_our_own_requests_are_never_foreign_for_any_report_delay_within_its_period(
    history: list[int], data: st.DataObject
) -> None:
    """`history`: our requests at each instant; a report shows any instant since the report before."""
    load, last = ForeignLoad(), 0
    while last < len(history) - 1:
        now = data.draw(st.integers(last + 1, len(history) - 1))
        shown = data.draw(st.sampled_from(history[last : now + 1]))
        assert load.see(report(shown), max(history[last : now + 1]), 0, 100.0) == NOBODY
        last = now


def full(active: int, foreign: int, queued: int = 0, slots: int = 8, slowdown: float = 1.0) -> Occupancy:
    return Occupancy(slots, active, foreign, queued, slowdown)


def test_slots_held_by_others_stay_theirs_while_any_slot_is_free() -> None:
    assert least_own_slots(full(0, 8), [full(2, 5)], waiting=9) == 0
    assert least_own_slots(full(0, 7), [full(0, 8)], waiting=9) == 0
    assert least_own_slots(full(0, 8), [full(0, 8)], waiting=0) == 0
    assert least_own_slots(full(8, 0), [full(0, 8)], waiting=9) == 0  # nothing foreign: plain fullness
    assert least_own_slots(full(0, 8, slowdown=2.0), [full(0, 7)], waiting=9) == 0


def test_free_slots_of_slower_workers_which_may_stay_free_leave_no_others_to_others() -> None:
    assert least_own_slots(full(0, 8), [full(0, 7, slowdown=2.0)], waiting=9) == 1


def test_a_router_takes_up_to_half_of_slots_held_by_others_step_by_step() -> None:
    active, steps = 0, []
    while (least := least_own_slots(full(active, 8), [], waiting=9)) > active:
        steps.append(least - active)
        active = least
    assert active == 4 and steps == [1, 1, 1, 1]
    assert least_own_slots(full(10, 64, slots=64), [], waiting=9) == 14


def test_a_router_queues_beside_others_only_below_a_sixteenth_of_all_slots() -> None:
    assert least_own_slots(full(0, 64, queued=30, slots=64), [], waiting=9) == 4
    assert least_own_slots(full(4, 64, queued=30, slots=64), [], waiting=9) == 0
    assert least_own_slots(full(0, 8, queued=4), [full(8, 0)], waiting=9) == 0  # our own slots will free
    assert least_own_slots(full(0, 8, queued=4), [full(0, 8, queued=4)], waiting=9) == 1
