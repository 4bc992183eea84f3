"""Whose silence it is: one worker's, a group's, the network's, or our own."""

import math

import pytest

from balanceroute.proxy.workers.silence import ALL_WORKERS, SETTLE_S, Attention, FrozenGroup, Vitals, frozen_groups

WINDOW_S = 5.0


def a_group(*silent_since_s: float | None, name: str = "decode") -> list[Vitals]:
    return [Vitals(f"{name}{i}", name, math.inf if since is None else since) for i, since in enumerate(silent_since_s)]


def names(vitals: list[Vitals], now: float) -> list[str]:
    return [group.name for group in frozen_groups(vitals, now, WINDOW_S)]


def test_a_group_is_frozen_when_most_of_it_fell_silent_at_once() -> None:
    group = a_group(100.0, 101.5, 100.2, None)
    assert frozen_groups(group, 110.0, WINDOW_S) == [
        FrozenGroup("decode", ("decode0", "decode1", "decode2"), 100.0),
    ]


@pytest.mark.parametrize("silent", [1, 2])
def test_a_group_is_not_frozen_when_half_of_it_or_less_is_silent(silent: int) -> None:
    assert names(a_group(*[100.0] * silent, *[None] * (4 - silent)), 130.0) == []


def test_a_group_of_two_is_frozen_only_when_both_are_silent() -> None:
    assert names(a_group(100.0, None), 130.0) == []
    assert names(a_group(100.0, 100.0), 130.0) == ["decode"]


def test_workers_that_fell_silent_at_different_times_are_no_frozen_group() -> None:
    assert names(a_group(100.0, 106.0, 112.0, None), 120.0) == []
    assert names(a_group(100.0, 104.0, 105.0, None), 120.0) == ["decode"]


def test_a_worker_that_fell_silent_later_does_not_hide_a_frozen_group() -> None:
    assert frozen_groups(a_group(100.0, 101.0, 102.0, 112.0, None), 120.0, WINDOW_S) == [
        FrozenGroup("decode", ("decode0", "decode1", "decode2"), 100.0)
    ]


def test_a_group_is_frozen_only_after_a_full_window_of_silence() -> None:
    assert names(a_group(100.0, 100.0), 104.9) == []
    assert names(a_group(100.0, 100.0), 105.0) == ["decode"]


def test_a_busy_worker_without_a_token_fits_any_time_of_silence() -> None:
    """Sent there after the freeze, its requests have waited from another time on than the streams beside it."""
    late = [Vitals("d2", "decode", 112.0, mute=True), Vitals("d3", "decode", 113.0, mute=True)]
    assert names([*a_group(100.0, None), *late], 120.0) == ["decode"]
    assert names([*a_group(100.0, None), *[Vitals(w.id, w.group, w.silent_since_s) for w in late]], 120.0) == []


def test_an_idle_down_worker_does_not_count_for_its_group() -> None:
    long_gone = [Vitals(f"d{i}", "decode", 0.0, votes=False) for i in range(2, 6)]
    assert names([*a_group(100.0, None), *long_gone], 120.0) == []
    assert names([*a_group(100.0, 100.0, None), *long_gone], 120.0) == ["decode"]
    assert names([*a_group(100.0), *long_gone], 120.0) == []  # the only one left is silent by itself


def test_groups_are_judged_separately() -> None:
    vitals = [*a_group(100.0, 100.0, name="a"), *a_group(None, None, None, name="b")]
    assert names(vitals, 120.0) == ["a"]


def test_independent_workers_form_only_the_group_of_all_workers() -> None:
    alone = [Vitals(f"d{i}", "", 100.0 if i < 2 else math.inf) for i in range(4)]
    assert names(alone, 120.0) == []
    alone[2] = Vitals("d2", "", 100.0)
    assert names(alone, 120.0) == [ALL_WORKERS]


def test_one_large_frozen_group_is_not_taken_for_a_network_failure() -> None:
    prefillers = [Vitals("p0", "", math.inf)]
    assert names([*a_group(100.0, 100.0, 100.0, 100.0), *prefillers], 120.0) == ["decode"]
    assert names([*a_group(100.0, 100.0, 100.0), Vitals("p0", "", 100.0)], 120.0) == ["decode", ALL_WORKERS]


def test_silence_seen_just_after_a_late_check_is_not_judged() -> None:
    attention = Attention()
    assert attention.look(10.0, 0.25) and attention.look(10.3, 0.25)
    assert not attention.look(30.0, 0.25)
    assert attention.since_s == 30.0
    assert not attention.look(30.25, 0.25)
    assert attention.look(30.25 + SETTLE_S, 0.25) is False  # late again
    for step in range(8):
        judged = attention.look(31.5 + step * 0.25, 0.25)
    assert judged


@pytest.mark.parametrize(
    ("pause", "since_s"),
    [
        ((20.0, 22.0), 12.0),  # it does not count
        ((38.0, 40.0), 12.0),  # 2 s are left, as before
        ((38.5, 40.5), 12.5),  # 1.5 s were left: less than the pause
        ((8.0, 11.0), 11.0),  # it began before
        ((20.0, 90.0), 90.0),  # the whole time again
        ((5.0, 9.0), 10.0),  # it was over
    ],
)
def test_a_pause_of_the_router_gives_back_the_time_and_leaves_no_less_than_it_took(
    pause: tuple[float, float], since_s: float
) -> None:
    attention = Attention()
    for look_s in pause:
        attention.look(look_s, 0.25)
    assert attention.attended_since_s(10.0, 30.0) == since_s
