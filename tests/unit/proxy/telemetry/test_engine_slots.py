"""When an engine's reports show that it has fewer slots than the configuration says."""

import pytest

from balanceroute.proxy.telemetry.engine_slots import POLLS, EngineSlots

QUEUES = {"num_requests_running": 8.0, "waiting_for_capacity": 3.0, "kv_cache_usage_perc": 0.1}


def seen(samples: dict[str, float], polls: int = POLLS, slots: int = 64) -> int:
    known = EngineSlots()
    return [known.see("d0", samples, slots) for _ in range(polls)][-1]


def test_an_engine_that_lets_requests_wait_below_its_configured_slots_has_fewer() -> None:
    assert seen(QUEUES) == 8


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
    assert seen(QUEUES | other) == 0


@pytest.mark.parametrize("name", list(QUEUES))
def test_an_engine_that_does_not_report_all_of_it_is_not_judged(name: str) -> None:
    assert seen({other: value for other, value in QUEUES.items() if other != name}) == 0


def test_the_reports_must_be_consecutive_and_the_most_that_it_ran_is_what_it_has() -> None:
    known = EngineSlots()
    reports = [QUEUES] * (POLLS - 1) + [QUEUES | {"waiting_for_capacity": 0.0}]
    reports += [QUEUES | {"num_requests_running": 7.0}] * (POLLS - 1) + [QUEUES]
    assert [known.see("d0", samples, 64) for samples in reports] == [0] * (2 * POLLS - 1) + [8]


def test_it_holds_in_quiet_times_and_ends_when_the_engine_runs_more_or_is_gone() -> None:
    known, quiet = EngineSlots(), {"num_requests_running": 1.0, "kv_cache_usage_perc": 0.0}
    for end in (lambda: known.see("d0", {"num_requests_running": 9.0}, 64), lambda: known.forget("d0")):
        for _ in range(POLLS):
            known.see("d0", QUEUES, 64)
        assert known.see("d0", quiet, 64) == 8
        end()
        assert known.see("d0", quiet, 64) == 0
