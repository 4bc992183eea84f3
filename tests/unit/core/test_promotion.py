"""Who joins the class in front, and when: to the admission and to the second."""

import pytest

from balanceroute.core.promotion import PATIENCE_SHARE, PROMOTION_PERIOD
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import RequestSpec
from tests.unit.core.builders import a_scheduler

TTL_S = 40.0
PATIENCE_S = PATIENCE_SHARE * TTL_S


def after(admissions: int, waiting: dict[str, tuple[int, float]]) -> Scheduler:
    """So many were admitted; then these came into the pool, each of a class and at a time, and no slot is free."""
    scheduler = a_scheduler(workers=1, slots=admissions, config=SchedulerConfig(pool_ttl_s=TTL_S))
    for number in range(admissions):
        scheduler.submit_prefilled(RequestSpec(f"before {number}", 10), 0.0)
        if number % 2:
            scheduler.admit(0.0)
    scheduler.admit(0.0)
    assert not len(scheduler.snapshot.pool) and not scheduler.snapshot.free_slots
    for name, (priority, ready_s) in waiting.items():
        scheduler.submit_prefilled(RequestSpec(name, 10, priority), ready_s)
    return scheduler


def due(scheduler: Scheduler, now: float) -> str | None:
    tracker = scheduler.due_promotion(now)
    return None if tracker is None else tracker.id


@pytest.mark.parametrize(("admissions", "found"), [(PROMOTION_PERIOD - 1, None), (PROMOTION_PERIOD, "later")])
def test_one_in_promotion_period_admissions_is_of_a_later_class(admissions: int, found: str | None) -> None:
    scheduler = after(admissions, {"first": (-3, 0.0), "later": (5, 0.0)})
    assert due(scheduler, TTL_S) == found
    scheduler.admit(TTL_S)
    assert scheduler.snapshot.requests["later"].priority == (-3 if found else 5)
    assert due(scheduler, TTL_S) is None, "nobody is behind any more, or the count begins anew"


def test_the_next_promotion_waits_for_a_full_period_of_admissions() -> None:
    scheduler = after(PROMOTION_PERIOD, {"first": (0, 0.0), "later": (1, 0.0), "latest": (1, 1.0)})
    scheduler.admit(PATIENCE_S)
    assert scheduler.snapshot.requests["later"].priority == 0
    assert due(scheduler, TTL_S) is None


def test_a_later_class_becomes_due_when_its_patience_ends() -> None:
    scheduler = after(PROMOTION_PERIOD, {"first": (0, 0.0), "later": (1, 5.0)})
    assert due(scheduler, 5.0 + PATIENCE_S - 0.001) is None
    assert due(scheduler, 5.0 + PATIENCE_S) == "later"


def test_the_longest_waiting_of_all_later_classes_is_due() -> None:
    waiting = {"first": (0, 0.0), "b young": (1, 3.0), "b": (1, 2.0), "c young": (2, 9.0), "c": (2, 1.0), "d": (3, 4.0)}
    scheduler = after(PROMOTION_PERIOD, waiting)
    assert due(scheduler, TTL_S) == "c"


def test_the_lowest_later_class_and_its_first_request_are_due_among_equal_waits() -> None:
    scheduler = after(PROMOTION_PERIOD, {"first": (0, 0.0), "c": (2, 1.0), "b": (1, 1.0), "b too": (1, 1.0)})
    assert due(scheduler, TTL_S) == "b"


def test_the_front_class_is_never_due_for_promotion() -> None:
    scheduler = after(PROMOTION_PERIOD, {"first": (0, 0.0), "later": (1, TTL_S)})
    assert due(scheduler, TTL_S) is None
