"""Prefill work in seconds: how fast a prefiller is, how much it gets at once, and who waits for whom."""

import pytest

from balanceroute.core.prefill_queue import AGEING
from balanceroute.core.prefill_work import FIRST_S_PER_TOKEN, Pace, work_tokens
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome, RequestSpec
from tests.unit.core.builders import a_scheduler

HUGE = 200_000


def bounded(max_inflight: int | None = 1, prefillers: int = 1, **bounds: float) -> Scheduler:
    config = SchedulerConfig(max_prefill_inflight=max_inflight, **bounds)  # type: ignore[arg-type]
    return a_scheduler(prefillers=prefillers, config=config)


def submit(scheduler: Scheduler, name: str, tokens: int, now: float, priority: int = 0) -> list[str]:
    scheduler.submit(RequestSpec(name, tokens, priority), now)
    return [prefill.request for prefill in scheduler.dispatch(now)]


def served_one_by_one(scheduler: Scheduler, now: float) -> list[str]:
    """Who follows the request `running`, and one another, on a prefiller that takes one at a time."""
    running, order = "running", []
    while True:
        scheduler.finish(running, Outcome.FINISHED, now)
        prefills = scheduler.dispatch(now)
        scheduler.snapshot.check_invariants()
        if not prefills:
            return order
        running = prefills[0].request
        order.append(running)


def test_a_cached_token_is_a_sixteenth_of_one_that_is_computed() -> None:
    assert work_tokens(1600, 0) == 100
    assert work_tokens(1600, 1600) == 1600


def test_the_measured_pace_excludes_idle_time() -> None:
    pace, now = Pace(), 0.0
    assert pace.s_per_token == pytest.approx(FIRST_S_PER_TOKEN)
    for _ in range(400):
        now += 1000.0
        pace.pass_time(now, busy=False)
        now += 2.0
        pace.pass_time(now, busy=True)
        pace.done(1000.0)
    assert pace.s_per_token == pytest.approx(0.002, rel=0.01)


def test_a_probe_that_fails_late_does_not_change_the_pace() -> None:
    pace = Pace()
    before = pace.s_per_token
    pace.pass_time(600.0, busy=True)
    pace.failed()
    pace.pass_time(600.0, busy=True)
    assert pace.s_per_token == before


def test_a_huge_prompt_waits_for_short_ones_that_come_soon_after_it() -> None:
    scheduler = bounded()
    assert submit(scheduler, "running", 1000, 0.0) == ["running"]
    for number, (name, tokens) in enumerate([("huge", HUGE), ("a", 500), ("b", 2000), ("c", 100)]):
        assert submit(scheduler, name, tokens, 0.1 * number) == []
    assert served_one_by_one(scheduler, 1.0) == ["a", "c", "b", "huge"]


def test_ageing_lets_a_huge_prompt_precede_later_ones() -> None:
    scheduler = bounded()
    submit(scheduler, "running", 1000, 0.0)
    submit(scheduler, "huge", HUGE, 0.0)
    ahead_s = AGEING * HUGE * FIRST_S_PER_TOKEN
    submit(scheduler, "just before", 10, ahead_s - 1.0)
    submit(scheduler, "after", 10, ahead_s + 1.0)
    assert served_one_by_one(scheduler, ahead_s + 2.0) == ["just before", "huge", "after"]


def test_ageing_is_at_most_half_of_the_queue_deadline() -> None:
    scheduler = bounded(queue_deadline_s=10.0)
    submit(scheduler, "running", 1000, 0.0)
    submit(scheduler, "huge", 10 * HUGE, 0.0)
    submit(scheduler, "after", 10, 6.0)
    assert served_one_by_one(scheduler, 7.0) == ["huge", "after"]


def test_a_lower_class_goes_first_whatever_its_size() -> None:
    scheduler = bounded()
    submit(scheduler, "running", 1000, 0.0)
    submit(scheduler, "short", 10, 0.0, priority=1)
    submit(scheduler, "huge", HUGE, 1.0, priority=0)
    assert served_one_by_one(scheduler, 2.0) == ["huge", "short"]


def test_a_huge_prompt_fills_a_prefiller_that_takes_several_of_mean_size() -> None:
    scheduler = bounded(max_inflight=4, prefillers=2)
    for number in range(50):
        assert submit(scheduler, f"w{number}", 1000, 0.0) == [f"w{number}"]
        scheduler.finish(f"w{number}", Outcome.FINISHED, 0.0)
    assert submit(scheduler, "huge", HUGE, 0.0) == ["huge"]
    taken = [submit(scheduler, f"s{number}", 1000, 0.0) for number in range(6)]
    assert taken == [["s0"], ["s1"], ["s2"], ["s3"], [], []]  # all on the other one
    assert sorted(p.inflight for p in scheduler.snapshot.prefillers) == [1, 4]


def test_prompts_of_one_size_are_bounded_by_their_number() -> None:
    scheduler = bounded(max_inflight=3)
    assert [len(submit(scheduler, f"r{number}", 700, 0.0)) for number in range(5)] == [1, 1, 1, 0, 0]


def test_a_client_that_leaves_the_queue_is_not_dispatched() -> None:
    scheduler = bounded()
    submit(scheduler, "running", 1000, 0.0)
    submit(scheduler, "gone", 10, 0.0)
    scheduler.finish("gone", Outcome.CANCELLED, 0.0)
    assert served_one_by_one(scheduler, 1.0) == []
    assert submit(scheduler, "next", 10, 2.0) == ["next"]
