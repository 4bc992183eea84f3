"""Looks of all processes come at the same times; a late one tells that the process stood still."""

import pytest

from balanceroute.proxy.telemetry.ticks import Looks, until_tick_s


@pytest.mark.parametrize("period_s", [0.25, 1.0])
@pytest.mark.parametrize("late", [-0.004, 0.0, 0.02, 0.4], ids=["early", "in time", "late", "very late"])
def test_all_processes_check_at_the_same_times(period_s: float, late: float) -> None:
    for number in (1, 7, 4_000_000):
        now = (number + late) * period_s  # a timer fires a little before its time, or late
        assert now + until_tick_s(now, period_s) == pytest.approx((number + 1) * period_s)


def test_a_very_late_check_leaves_one_out_instead_of_running_twice() -> None:
    assert 10.2 + until_tick_s(10.2, 0.25) == pytest.approx(10.5)


def test_a_process_that_starts_at_any_time_checks_at_the_times_of_the_others() -> None:
    for now in (0.0, 0.1, 5.13, 1e6 + 0.001):
        at_s = now + until_tick_s(now, 0.25)
        assert at_s * 4 == pytest.approx(round(at_s * 4)) and 0.125 <= at_s - now <= 0.375


def test_a_look_that_comes_too_late_after_the_last_one_tells_that_the_process_stood_still() -> None:
    looks = Looks()
    assert [looks.stood_still(now, 1.0) for now in (50.0, 50.9, 51.9, 53.0, 53.5)] == [False, False, False, True, False]
