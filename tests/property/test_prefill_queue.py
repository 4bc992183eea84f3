"""The queue for prefillers against its definition, as requests come, leave from the middle, and come back.

Prefills end here without a measured time, so the pace is the first guess, and a request's place is known from its size.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.prefill_queue import MOST_AHEAD
from balanceroute.core.prefill_work import FIRST_S_PER_TOKEN
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from tests.unit.core.builders import a_scheduler

DEADLINE_S = 40.0
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "dispatch", "fail", "leave"]),
        st.integers(0, 50),
        st.sampled_from([0, 1, 600, 6_000, 6_001, 60_000, 300_000, 10**7]),
        st.integers(-1, 1),
        st.sampled_from([0.0, 0.0, 0.1, 1.0, 10.0]),
    ),
    min_size=10,
    max_size=60,
)


@dataclass
class Waiting:
    """A queued request of the model."""

    name: str
    priority: int
    arrived_s: float
    order: int
    size: int

    def place(self, ageing: float) -> tuple[int, float, int]:
        ahead_s = min(ageing * self.size * FIRST_S_PER_TOKEN, MOST_AHEAD * DEADLINE_S)
        return self.priority, self.arrived_s + ahead_s, self.order


@pytest.mark.parametrize("ageing", [0.0, 1.0, 1_000.0])
@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_the_next_prefill_is_of_the_lowest_class_and_the_earliest_place(
    ageing: float, events: list[tuple[str, int, int, int, float]]
) -> None:
    scheduler = a_scheduler(config=SchedulerConfig(ageing=ageing, queue_deadline_s=DEADLINE_S))
    queued: list[Waiting] = []
    prefilling: list[Waiting] = []
    now = 0.0
    for number, (event, pick, size, priority, passes) in enumerate(events):
        now += passes
        if event == "submit":
            request = Waiting(f"r{number}", priority, now, number, size)
            scheduler.submit(RequestSpec(request.name, size, priority), now)
            queued.append(request)
        elif event == "dispatch":
            served = [prefill.request for prefill in scheduler.dispatch(now, 1 + pick % 3)]
            expected = sorted(queued, key=lambda each: each.place(ageing))[: 1 + pick % 3]
            assert served == [each.name for each in expected]
            queued = [each for each in queued if each.name not in served]
            prefilling += expected
        elif event == "fail" and prefilling:
            back = prefilling.pop(pick % len(prefilling))
            scheduler.prefill_failed(back.name, now)
            queued.append(back)
        elif event == "leave":
            leave(scheduler, queued if pick % 2 else prefilling, pick, now)
    assert sorted(scheduler.snapshot.queued) == sorted(each.name for each in queued)
    scheduler.snapshot.check_invariants()


def leave(scheduler: Scheduler, requests: list[Waiting], pick: int, now: float) -> None:
    """The client of one of these requests leaves."""
    if requests:
        gone = requests.pop(pick % len(requests))
        scheduler.finish(gone.name, Outcome.CANCELLED, now)
