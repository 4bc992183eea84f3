"""When an engine's reports show that it has fewer slots than the configuration says."""

from itertools import cycle

import pytest

from balanceroute.proxy.telemetry.engine_slots import POLLS, EngineSlots

QUEUES = {"num_requests_running": 8.0, "waiting_for_capacity": 3.0, "kv_cache_usage_perc": 0.1}
LATER = QUEUES | {"kv_cache_usage_perc": 0.11}  # it has generated


def seen(*reports: dict[str, float], polls: int = POLLS, slots: int = 64) -> int:
    """What the reports show, in turn, so many of them."""
    known = EngineSlots()
    return [known.see("d0", samples, slots) for _, samples in zip(range(polls), cycle(reports), strict=False)][-1]


def test_an_engine_that_lets_requests_wait_below_its_configured_slots_has_fewer() -> None:
    assert seen(QUEUES, LATER) == 8
    assert seen(QUEUES, LATER, polls=POLLS - 1) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"waiting_for_capacity": 0.0},
        {"num_requests_running": 64.0},
        {"num_requests_running": 0.0},
        {"kv_cache_usage_perc": 0.9},
    ],
    ids=["none waits", "all slots are in use", "paused", "short of memory"],
)
def test_what_another_cause_explains_shows_nothing(other: dict[str, float]) -> None:
    assert seen(QUEUES | other, LATER | other) == 0


def test_an_engine_that_pauses_with_requests_in_its_slots_shows_nothing() -> None:
    """It keeps those that it runs, and starts none of the waiting ones, however many slots are free."""
    assert seen(QUEUES) == 0
    assert seen(*[LATER] * 5, *[QUEUES] * 3 * POLLS, polls=3 * POLLS) == 0, "it generated before"


@pytest.mark.parametrize("finished", [1, 8, 20])
def test_requests_that_leave_in_each_step_do_not_make_its_slots_fewer(finished: int) -> None:
    """An engine reports at the end of a step: without those that finished in it, whose slots the next ones get."""
    full = {"num_requests_running": 128.0 - finished}
    assert seen(QUEUES | full, LATER | full, slots=128) == 0


@pytest.mark.parametrize("name", list(QUEUES))
def test_an_engine_that_does_not_report_all_of_it_is_not_judged(name: str) -> None:
    reports = [{other: value for other, value in each.items() if other != name} for each in (QUEUES, LATER)]
    assert seen(*reports) == 0


def test_the_reports_must_be_consecutive_and_the_most_that_it_ran_is_what_it_has() -> None:
    known = EngineSlots()
    running = [8.0] * (POLLS - 1) + [0.0] + [7.0] * (POLLS - 1) + [8.0]
    reports = [
        each | {"num_requests_running": count} for count, each in zip(running, cycle((QUEUES, LATER)), strict=False)
    ]
    assert [known.see("d0", samples, 64) for samples in reports] == [0] * (2 * POLLS - 1) + [8]


def test_it_holds_in_quiet_times_and_ends_when_the_engine_runs_more_or_is_gone() -> None:
    known, quiet = EngineSlots(), {"num_requests_running": 1.0, "kv_cache_usage_perc": 0.0}
    for end in (lambda: known.see("d0", {"num_requests_running": 9.0}, 64), lambda: known.forget("d0")):
        for _ in range(POLLS):
            known.see("d0", QUEUES, 64)
            known.see("d0", LATER, 64)
        assert known.see("d0", quiet, 64) == 8
        end()
        assert known.see("d0", quiet, 64) == 0
