"""INV-11: a scheduler that is told steps, as in a replay, decides as one that is told tokens, as in a router.

Both are told the same, whatever the order: arrivals, first steps, steps, new forecasts, requests that are requeued or
leave. What differs is how they keep count, and that a replay tells when a request begins to run.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, Phase, RequestSpec
from tests.unit.core.builders import a_scheduler

HORIZON = 6
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "admit", "start", "step", "step", "step", "requeue", "finish"]),
        st.integers(0, 20),
        st.integers(1, 300),
        st.integers(0, HORIZON),
    ),
    min_size=20,
    max_size=60,
)


def a_pair(every_tokens: int) -> tuple[Scheduler, Scheduler]:
    """Told steps, and told tokens."""
    by_step, by_token = (
        a_scheduler(
            "br_h",
            config=SchedulerConfig(refresh_every_tokens=every_tokens, lock_step=lock_step),
            horizon_steps=HORIZON,
        )
        for lock_step in (True, False)
    )
    return by_step, by_token


@settings(max_examples=100, deadline=None)
@given(st.integers(1, HORIZON), EVENTS)
def test_counting_by_steps_or_by_tokens_a_scheduler_decides_alike(
    every_tokens: int, events: list[tuple[str, int, int, int]]
) -> None:
    by_step, by_token = both = a_pair(every_tokens)
    for index, (event, pick, tokens, remaining) in enumerate(events):
        now, expected = float(index), float(remaining)
        decoding = [tracker.id for tracker in by_step.snapshot.decoding()]
        if event == "arrive":
            limit = None if tokens % 2 else tokens
            for each in both:
                each.submit_prefilled(RequestSpec(f"r{index}", tokens, max_new_tokens=limit), now, expected)
        elif event == "admit":
            assert by_step.admit(now) == by_token.admit(now)
        elif event == "step":
            running = [name for name in decoding if by_step.snapshot.requests[name].running]
            by_step.step(now)
            for name in running:
                by_token.progress(name, 1, now)
            due, due_by_token = (sorted(tracker.id for tracker in each.due_refreshes()) for each in both)
            assert due == due_by_token
            for name in due:
                for each in both:
                    each.refresh(name, expected, now)
        elif event == "start":  # all but perhaps the first
            for name in decoding[pick % 2 :]:
                if not by_step.snapshot.requests[name].running:
                    by_step.start(name, now)
                    by_token.began(name, now)
        elif decoding:
            name = decoding[pick % len(decoding)]
            for each in both:
                if event == "finish":
                    each.finish(name, Outcome.FINISHED, now)
                else:
                    each.requeue(name, now)
                    each.dispatch(now)
                    assert each.snapshot.requests[name].phase is Phase.PREFILLING
                    each.prefilled(name, each.snapshot.requests[name].prompt_tokens, now, expected)
        assert by_step.snapshot.projected_loads().tolist() == by_token.snapshot.projected_loads().tolist()
        for each in both:
            each.snapshot.check_invariants()
