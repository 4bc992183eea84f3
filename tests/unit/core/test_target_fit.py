"""TargetFit in situations small enough to check by hand; the scarce branch has its oracle in tests/property."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from balanceroute.core.fit_rules import LEVEL_FIT, TARGET_FIT, FitRules, TargetFitParams, caps_s
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.scarce_fit import Window
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot_json import snapshot_from_dict, snapshot_to_dict
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from tests.unit.core.builders import a_request, a_scheduler, admitted, hold, pool_all


def occupied(
    loads: list[list[int]],
    *,
    slots: int,
    policy: str = "target_fit",
    slowdowns: Sequence[float] = (),
    **settings: object,
) -> Scheduler:
    """Workers that hold requests of these sizes."""
    scheduler = a_scheduler(policy, workers=len(loads), slots=slots, slowdowns=slowdowns, **settings)
    hold(scheduler, loads, now=-1e6)
    see_waits(scheduler, 0.0)
    return scheduler


def test_in_slack_the_largest_prompt_goes_to_the_lightest_worker() -> None:
    scheduler = occupied([[500], [100], [300]], slots=4)
    pool_all(scheduler, {"a": 10, "b": 90, "c": 250})
    assert admitted(scheduler) == [("c", "d1"), ("b", "d2"), ("a", "d1")]


@pytest.mark.parametrize("loads", [[[100] * 4] * 2, [[100] * 8, [100] * 7]], ids=["many free slots", "one"])
def test_a_request_that_raises_the_envelope_is_held_back_for_a_moment(loads: list[list[int]]) -> None:
    scheduler = occupied(loads, slots=8)
    pool_all(scheduler, {"large": 300}, now=10.0)
    assert admitted(scheduler, 10.1) == []
    due = scheduler.recheck_s(10.1)
    assert 10.5 <= due <= 13.0, "0.5 s, and up to six times as long for a prompt above the mean"
    assert [request for request, _ in admitted(scheduler, due)] == ["large"]
    assert scheduler.recheck_s(due) == math.inf


def test_a_request_that_reaches_the_envelope_and_no_more_is_not_held_back() -> None:
    scheduler = occupied([[100] * 4, [100] * 5], slots=8)
    pool_all(scheduler, {"more": 101}, now=10.0)
    assert admitted(scheduler, 10.0) == []
    pool_all(scheduler, {"as much": 100}, now=10.0)
    assert admitted(scheduler, 10.0) == [("as much", "d0")]


def test_what_stays_below_an_envelope_that_another_has_just_raised_goes_with_it() -> None:
    """It alone would be held back; the score says by how much each raises the envelope."""
    scheduler = occupied([[100] * 4, [100] * 4], slots=8)
    pool_all(scheduler, {"old": 300}, now=10.0)
    due = scheduler.recheck_s(10.0)
    pool_all(scheduler, {"new": 200}, now=due)
    assert [(each.request, each.worker, each.score) for each in scheduler.admit(due)] == [
        ("old", "d0", -300.0),
        ("new", "d1", 0.0),
    ]


@pytest.mark.parametrize(("answers", "hold_s"), [(100, 0.1), (99, 0.5)])
def test_a_hold_lasts_at_most_a_tenth_of_the_mean_answer_once_measured(answers: int, hold_s: float) -> None:
    scheduler = occupied([[100] * 4, [100] * 4], slots=8)
    means, overlap = scheduler.snapshot.means, scheduler.snapshot.overlap
    means.answers, means.answer_tokens, overlap.token_s = answers, 20.0, 0.05
    pool_all(scheduler, {"large": 300}, now=10.0)
    assert scheduler.recheck_s(10.0) == pytest.approx(10.0 + hold_s * means.patience_factor(300))
    assert admitted(scheduler, 10.0) == []
    read, _ = snapshot_from_dict(snapshot_to_dict(scheduler.snapshot, 10.0), horizon_steps=0)
    assert scheduler.policy.recheck_s(read, 10.0) == scheduler.recheck_s(10.0), "a recorded decision is the same again"
    assert admitted(scheduler, scheduler.recheck_s(10.0)) == [("large", "d0")]


@pytest.mark.parametrize("policy", ["target_fit", "level_fit"])
@pytest.mark.parametrize(("answer_tokens", "tokens_per_step", "held"), [(9, 1, False), (10, 1, True), (20, 3, False)])
def test_nothing_is_held_back_where_a_step_is_more_than_a_tenth_of_the_mean_answer(
    policy: str, answer_tokens: int, tokens_per_step: int, held: bool
) -> None:
    """A slot of answers of four steps that stays empty for one has lost a fourth of what it can serve."""
    scheduler = occupied([[100] * 4, [100] * 4], slots=8, policy=policy)
    means = scheduler.snapshot.means
    means.answers, means.answer_tokens = 100, float(answer_tokens)  # of one token each there is no time per token
    scheduler.report_tokens_per_step("d1", float(tokens_per_step), 10.0)
    pool_all(scheduler, {"large": 300}, now=10.0)
    assert math.isfinite(scheduler.recheck_s(10.0)) is held
    assert admitted(scheduler, 10.0) == ([] if held else [("large", "d0")])


@pytest.mark.parametrize("policy", ["target_fit", "level_fit"])
def test_an_endless_hold_begins_once_the_mean_answer_bounds_it(policy: str) -> None:
    scheduler = occupied([[100] * 4, [100] * 4], slots=8, hold_s=math.inf, policy=policy)
    means, overlap = scheduler.snapshot.means, scheduler.snapshot.overlap
    pool_all(scheduler, {"large": 300}, now=10.0)
    assert admitted(scheduler, 10.0) == [("large", "d0")], "it would be held for ever, and nobody be asked again"
    means.answers, means.answer_tokens, overlap.token_s = 100, 20.0, 0.05
    pool_all(scheduler, {"larger": 900}, now=10.0)
    assert admitted(scheduler, 10.0) == []
    assert scheduler.recheck_s(10.0) == pytest.approx(10.0 + 0.1 * means.patience_factor(900))


@pytest.mark.parametrize("policy", ["target_fit", "level_fit"])
def test_nothing_is_held_back_while_the_pool_is_full(policy: str) -> None:
    def decided(max_pooled: int) -> list[tuple[str, str]]:
        scheduler = occupied([[100] * 4, [100] * 4], slots=8, policy=policy)
        scheduler.configure(SchedulerConfig(max_pooled=max_pooled), 10.0)
        pool_all(scheduler, {"large": 300}, now=10.0)
        scheduler.submit(RequestSpec("prefilling", 100), 10.0)
        assert bool(scheduler.dispatch(10.0)) is (max_pooled > 1)
        document = snapshot_to_dict(scheduler.snapshot, 10.1)
        pairs = admitted(scheduler, 10.1)
        again = Scheduler(scheduler.policy)
        again.snapshot, _ = snapshot_from_dict(document, 0)
        assert [(each.request, each.worker) for each in again.admit(10.1)] == pairs, "a document decides alike"
        return pairs

    assert decided(3) == []
    assert decided(2) == decided(1) == [("large", "d0")]


def test_a_hold_of_zero_never_holds() -> None:
    scheduler = occupied([[100] * 4, [100] * 4], slots=8, hold_s=0.0)
    pool_all(scheduler, {"large": 300}, now=10.0)
    assert scheduler.recheck_s(10.0) == math.inf
    assert admitted(scheduler, 10.0) == [("large", "d0")]


def test_nothing_is_held_while_some_worker_has_few_requests() -> None:
    scheduler = occupied([[100] * 4, [100] * 3], slots=8)
    pool_all(scheduler, {"large": 500}, now=10.0)
    assert admitted(scheduler, 10.0) == [("large", "d1")]


def test_a_worker_that_is_down_counts_not_as_one_with_few_requests() -> None:
    scheduler = occupied([[100] * 4, [100] * 4, []], slots=8)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    pool_all(scheduler, {"large": 300})
    assert admitted(scheduler) == []


@pytest.mark.parametrize(("slots", "held"), [(8, True), (9, False)])
def test_level_fit_holds_nothing_while_less_than_half_of_all_slots_are_in_use(slots: int, held: bool) -> None:
    scheduler = occupied([[100] * 4, [100] * 4], slots=slots, policy="level_fit")
    pool_all(scheduler, {"large": 500}, now=10.0)
    assert admitted(scheduler, 10.0) == ([] if held else [("large", "d0")])


def test_a_scarce_slot_is_filled_up_to_the_mean() -> None:
    """d0 holds 1000 in its two slots, d1 400 in one of two. The mean is 700, so 300 fits it best; 600 reaches max L."""
    scheduler = occupied([[500, 500], [400]], slots=2)
    pool_all(scheduler, {"a": 600, "b": 300, "c": 100})
    assert admitted(scheduler) == [("b", "d1")]


def test_an_overdue_request_precedes_every_younger_one() -> None:
    scheduler = occupied([[500, 500], [400]], slots=2)
    scheduler.submit_prefilled(RequestSpec("old", 5_000), 0.0)
    pool_all(scheduler, {"b": 300}, now=399.0)
    (action,) = scheduler.admit(400.0)
    assert (action.request, action.stage) == ("old", 0)


def test_load_is_scaled_by_the_slowdown_of_the_worker() -> None:
    """d1 holds fewer tokens, but takes 1.5 times as long for each: 1.5 * 800 > 1000."""
    scheduler = occupied([[1000], [800]], slots=2, slowdowns=[1.0, 1.5])
    pool_all(scheduler, {"a": 10})
    assert admitted(scheduler) == [("a", "d0")]


def test_a_worker_that_is_down_counts_neither_for_the_mean_nor_for_the_envelope() -> None:
    scheduler = occupied([[500, 500], [400], [9_000]], slots=2)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    pool_all(scheduler, {"a": 600, "b": 300, "c": 100})
    assert admitted(scheduler) == [("b", "d1")]


def test_more_free_slots_than_the_window_are_filled_in_rounds() -> None:
    scheduler = a_scheduler("target_fit", workers=3, slots=200)
    pool_all(scheduler, {f"r{index}": 10 + index for index in range(700)})
    assert len(admitted(scheduler)) == 600


FULL = [7_500] * 4


def level_fitting(loads: list[list[int]], *, slots: int, mean_prompt: float, mean_output: float = 0.0) -> Scheduler:
    """`occupied` workers under level_fit, with the means of a workload that has run for long."""
    scheduler = occupied(loads, slots=slots, policy="level_fit")
    means = scheduler.snapshot.means
    means.prompts, means.prompt_tokens = 1000, mean_prompt
    means.answers, means.answer_tokens = 1000, mean_output
    return scheduler


def see_means(scheduler: Scheduler, mean_prompt: float, wait_s: float) -> None:
    """The running means, whatever the requests of the test have made of them."""
    scheduler.snapshot.means.prompt_tokens = mean_prompt
    see_waits(scheduler, wait_s)


def see_waits(scheduler: Scheduler, wait_s: float) -> None:
    """The mean wait of all classes."""
    scheduler.snapshot.means.wait_s = wait_s
    scheduler.snapshot.means.class_wait_s.clear()


def test_level_fit_considers_the_oldest_requests_as_many_as_there_are_slots() -> None:
    """300 would fit d1 best, but four have waited longer, and there are four slots. A worker that is down has none."""
    scheduler = level_fitting([[500, 500], [400], []], slots=2, mean_prompt=200)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    pool_all(scheduler, {"a": 10, "b": 200, "c": 100, "d": 20, "e": 300})
    assert admitted(scheduler) == [("b", "d1")]


def test_the_level_is_below_the_mean_by_a_workers_growth_between_departures() -> None:
    """The mean is 700 and the growth to come (1 - 1/2) * 400: d1 comes back to 500, for which 100 fits best."""
    scheduler = level_fitting([[500, 500], [400]], slots=2, mean_prompt=200, mean_output=400)
    pool_all(scheduler, {"a": 600, "b": 300, "c": 100})
    see_means(scheduler, 1000 / 3, 0.0)
    assert admitted(scheduler) == [("c", "d1")]


def test_a_worker_that_is_slow_grows_by_as_much_more_between_departures() -> None:
    """The mean is 2,500 and its growth to come 2 * 1.1 * (1 - 1/2) * 400: from 1,000 to 2,060 it takes 530 tokens."""
    scheduler = occupied([[2_000, 2_000], [500]], slots=2, policy="level_fit", slowdowns=[1.0, 2.0])
    means = scheduler.snapshot.means
    means.answers, means.answer_tokens = 1000, 400.0
    pool_all(scheduler, {"a": 640, "b": 530, "c": 50})
    see_means(scheduler, 1220 / 3, 0.0)
    assert admitted(scheduler) == [("b", "d1")]


def test_many_small_waiting_prompts_lower_the_level() -> None:
    """The growth of 75 would let 300 stay the best; the prompts that wait are 100 below those that arrive.

    The level falls by 75 for the growth and, as twice 100 is more, by half a prompt in all: to 482, for which 105 fits
    best.
    """
    scheduler = level_fitting([[500, 500], [400]], slots=2, mean_prompt=200, mean_output=150)
    pool_all(scheduler, {"a": 600, "b": 300, "c": 105})
    see_means(scheduler, 335 + 100, 0.0)
    assert admitted(scheduler) == [("c", "d1")]


def test_many_large_waiting_prompts_raise_the_level_even_with_short_answers() -> None:
    """By half a mean prompt, less the growth: from 699 to 748. By no more than the growth of 1, 300 would fit best."""
    scheduler = level_fitting([[500, 500], [400]], slots=2, mean_prompt=100, mean_output=2)
    pool_all(scheduler, {"a": 300, "b": 345})
    see_means(scheduler, 100, 0.0)
    assert admitted(scheduler) == [("b", "d1")]


def test_a_huge_prompt_counts_in_the_stock_as_one_of_five_mean_prompts() -> None:
    drops = []
    for size in (1_000, 1_500, 90_000):
        scheduler = level_fitting([[2_000] * 4] * 2, slots=4, mean_prompt=300.0, mean_output=400.0)
        pool_all(scheduler, {"a": 200, "b": 200, "c": 200, "d": 200, "large": size})
        see_means(scheduler, mean_prompt=300.0, wait_s=0.0)
        drops.append(Window(scheduler.snapshot, 0.0, TargetFitParams(60.0, 0.5), LEVEL_FIT, False).drop)
    assert drops[0] > drops[1] == drops[2]


def test_a_large_prompt_may_raise_the_envelope_shortly_before_its_cap() -> None:
    """Its cap is 4 s and .7 times that more, for a prompt 30 times the mean."""

    def at(age_s: float) -> list[tuple[str, str]]:
        scheduler = level_fitting([[1000, 1000], [900]], slots=2, mean_prompt=100)
        scheduler.submit_prefilled(RequestSpec("large", 3000), 1000.0 - age_s)
        pool_all(scheduler, {"a": 1000, "b": 100}, now=1000.0)
        see_means(scheduler, 100, 0.0)
        return admitted(scheduler, 1000.0)

    assert at(5.0) == [("a", "d1")]
    assert at(7.0) == [("large", "d1")]


@pytest.mark.parametrize(("running", "first"), [(90_000, "huge"), (900, "b")], ids=["one runs", "none does"])
def test_huge_prompts_with_nearly_the_same_wait_follow_an_admitted_one(running: int, first: str) -> None:
    """Where another one makes no step longer, .8 of the cap of 6.48 s is enough for a prompt 800 times the mean."""
    loads = [[running, 100], *([[900, 100]] * 6), [900]]
    scheduler = level_fitting(loads, slots=2, mean_prompt=100)
    scheduler.submit_prefilled(RequestSpec("huge", 80_000), 1000.0 - 0.8 * 6.48)
    pool_all(scheduler, {"a": 1000, "b": 100}, now=1000.0)
    see_means(scheduler, 100, 0.0)
    scheduler.snapshot.means.deviation_tokens = 100.0
    assert admitted(scheduler, 1000.0) == [(first, "d7")]


def with_a_huge_prompt(free: list[int], *, others: list[int] = FULL, age_s: float, policy: str = "level_fit") -> str:
    """Who gets the slot of a worker that holds `free`, beside three with 30,000 tokens each and no free slot.

    The huge prompt is twenty times the mean. Its cap is 102 s, and departures make its room within 37.5 s.
    """
    scheduler = occupied([FULL, FULL, others, free], slots=4, policy=policy)
    means, scheduler.snapshot.overlap.token_s = scheduler.snapshot.means, 0.05
    means.prompts, means.answers, means.answer_tokens, means.usual_tokens = 1000, 1000, 200.0, 1000.0
    scheduler.submit_prefilled(RequestSpec("huge", 20_000), 1000.0 - age_s)
    pool_all(scheduler, {"small": 100, "fits": 700}, now=1000.0)
    see_means(scheduler, 1_000, wait_s=10.0)
    ((request, _),) = admitted(scheduler, 1000.0)
    return request


def test_the_lightest_worker_makes_room_for_a_huge_prompt_shortly_before_its_cap() -> None:
    assert with_a_huge_prompt([9_700] * 3, age_s=45.0) == "fits"
    assert with_a_huge_prompt([9_700] * 3, age_s=65.0) == "small"


def test_a_huge_prompt_waits_until_there_is_room_for_three_quarters_of_it() -> None:
    assert with_a_huge_prompt([5_001] * 3, age_s=65.0) == "small"
    assert with_a_huge_prompt([5_000] * 3, age_s=65.0) == "huge"


def test_no_other_worker_keeps_low_while_the_lightest_makes_room() -> None:
    """The mean is lower by what is missing on the lightest; the level of the others is not."""
    assert with_a_huge_prompt([9_700] * 3, others=[5_000] * 4, age_s=65.0) == "fits"


def test_past_its_cap_a_huge_prompt_goes_to_the_worker_that_makes_room_and_later_to_any() -> None:
    assert with_a_huge_prompt([9_700] * 3, age_s=101.0) == "small"
    assert with_a_huge_prompt([9_700] * 3, age_s=103.0) == "huge"
    assert with_a_huge_prompt([9_700] * 3, others=[5_000] * 4, age_s=106.0) == "fits"
    assert with_a_huge_prompt([9_700] * 3, others=[5_000] * 4, age_s=108.0) == "huge"


def test_target_fit_makes_no_room() -> None:
    assert with_a_huge_prompt([9_700] * 3, age_s=65.0, policy="target_fit") == "fits"


def test_a_prompt_is_admitted_before_the_pools_ttl_ends() -> None:
    """Behind long waits a large prompt would go first after 6 * 40 * 1.7 s; the pool keeps it for 100."""
    for pool_ttl_s, expected in ((math.inf, "young"), (100.0, "old")):
        scheduler = occupied([[500, 500], [400]], slots=2, policy="level_fit")
        scheduler.configure(SchedulerConfig(pool_ttl_s=pool_ttl_s), 0.0)
        scheduler.submit_prefilled(RequestSpec("old", 9_000), 0.0)
        pool_all(scheduler, {"young": 300, "other": 310}, now=80.0)
        see_means(scheduler, 500.0, wait_s=40.0)
        document = snapshot_to_dict(scheduler.snapshot, 80.0)
        ((request, _),) = admitted(scheduler, 80.0)
        assert request == expected
        again = Scheduler(scheduler.policy)
        again.snapshot, _ = snapshot_from_dict(document, 0)
        assert again.admit(80.0)[0].request == expected, "a document decides alike"


def test_nothing_is_held_back_while_a_later_class_waits_for_the_same_slots() -> None:
    scheduler = occupied([[100] * 4, [100] * 4], slots=8)
    pool_all(scheduler, {"large": 300}, now=10.0)
    scheduler.submit_prefilled(RequestSpec("later", 10, 1), 10.0)
    assert [request for request, _ in admitted(scheduler, 10.1)] == ["large", "later"]


def with_memory(loads: list[list[int]], *, slots: int) -> Scheduler:
    """`level_fitting` workers, each with KV memory for 1,000 tokens, none of which is kept for growth."""
    scheduler = level_fitting(loads, slots=slots, mean_prompt=300.0)
    for worker in scheduler.snapshot.workers:
        scheduler.report_decoder_memory(worker.spec.id, 1_000, 0.0)
    return scheduler


def test_a_smaller_request_takes_the_slot_of_one_that_does_not_fit_the_memory() -> None:
    """d1 holds 400 in one of its two slots. 700 would bring it to the level of d0, and its memory ends at 1,000."""
    scheduler = with_memory([[500, 600], [400]], slots=2)
    pool_all(scheduler, {"fits best": 700, "fits": 200, "is smaller": 10})
    document = snapshot_to_dict(scheduler.snapshot, 0.0)
    assert admitted(scheduler) == [("fits", "d1")]
    again = Scheduler(scheduler.policy)
    again.snapshot, _ = snapshot_from_dict(document, 0)
    assert admitted(again) == [("fits", "d1")], "a document decides alike"


@pytest.mark.parametrize("capacity_tokens", [0, 5_000], ids=["is not known", "is large"])
def test_with_slots_for_all_a_request_goes_to_the_least_load_among_the_workers_that_it_fits(
    capacity_tokens: int,
) -> None:
    scheduler = with_memory([[400], [900], [500]], slots=3)
    pool_all(scheduler, {"large": 700, "small": 400})
    for worker in ("d1", "d2"):
        scheduler.report_decoder_memory(worker, capacity_tokens, 0.0)
    assert admitted(scheduler) == [("large", "d2"), ("small", "d0")]


def test_requests_that_wait_for_memory_are_served_in_order_and_passed_by_those_that_fit() -> None:
    scheduler = with_memory([[400], [500]], slots=4)
    pool_all(scheduler, {"a": 700, "b": 550, "c": 300, "d": 200, "e": 150})
    assert admitted(scheduler) == [("b", "d0"), ("c", "d1"), ("d", "d1")]


def test_of_more_requests_than_slots_one_that_fills_the_memory_to_its_last_token_fits() -> None:
    scheduler = with_memory([[400, 500], [450, 500]], slots=3)
    pool_all(scheduler, {"a": 600, "b": 100, "c": 650})
    assert admitted(scheduler) == [("b", "d0")]


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.DOWN])
def test_past_its_cap_a_request_waits_for_no_room_on_a_worker_that_takes_none(state: WorkerState) -> None:
    scheduler = with_memory([[450, 490], [100]], slots=3)
    scheduler.set_worker_state("d1", state, 0.0)
    pool_all(scheduler, {"old": 300, "other": 301})
    cap_s = 1.1 * LEVEL_FIT.least_cap * PolicySettings().max_wait_s
    assert admitted(scheduler, now=0.9 * cap_s) == []
    assert admitted(scheduler, now=1.1 * cap_s) == [("old", "d0")]


def test_where_memory_is_short_each_request_goes_to_the_worker_that_is_the_lightest_by_then() -> None:
    scheduler = with_memory([[400], [450]], slots=4)
    pool_all(scheduler, {"a": 100, "b": 100, "c": 460})
    assert admitted(scheduler) == [("a", "d0"), ("b", "d1"), ("c", "d0")]


def test_a_slot_stays_free_until_a_waiting_request_fits_the_memory() -> None:
    scheduler = with_memory([[400, 500], [450, 500]], slots=3)
    pool_all(scheduler, {"a": 600, "b": 650})
    assert admitted(scheduler) == []
    scheduler.finish("d1.1", Outcome.FINISHED, 0.0)
    assert admitted(scheduler) == []
    pool_all(scheduler, {"c": 540})
    assert admitted(scheduler) == [("c", "d1")]


def test_in_front_of_a_later_class_a_request_goes_where_it_fits_or_where_most_room_is() -> None:
    """In 100 and 50 tokens: the smaller one goes to the larger load, as it does not fit the other any more."""
    scheduler = with_memory([[400, 500], [450, 500]], slots=8)
    pool_all(scheduler, {"fits nowhere": 600, "fits": 40})
    scheduler.submit_prefilled(RequestSpec("later", 10, 1), 0.0)
    assert admitted(scheduler) == [("fits nowhere", "d0"), ("fits", "d1"), ("later", "d1")]


def test_without_memory_no_later_class_passes_a_request_that_waits_for_memory() -> None:
    scheduler = with_memory([[500, 500], [400, 600]], slots=8)
    pool_all(scheduler, {"first": 600})
    scheduler.submit_prefilled(RequestSpec("later", 1, 1), 0.0)
    assert admitted(scheduler) == []
    scheduler.finish("d1.0", Outcome.FINISHED, 0.0)
    assert admitted(scheduler) == [("first", "d1")]
    scheduler.finish("d1.1", Outcome.FINISHED, 0.0)
    assert admitted(scheduler) == [("later", "d1")]


def test_a_request_that_waits_for_memory_beside_a_free_slot_schedules_no_recheck() -> None:
    scheduler = with_memory([[400, 500], [450, 500]], slots=3)
    pool_all(scheduler, {"large": 300}, now=10.0)
    for now in (10.0, 11.0):
        assert admitted(scheduler, now) == []
    assert scheduler.recheck_s(11.0) == math.inf


def test_an_idle_worker_takes_a_request_larger_than_its_memory() -> None:
    scheduler = with_memory([[], [400]], slots=2)
    pool_all(scheduler, {"huge": 5_000})
    assert admitted(scheduler) == [("huge", "d0")]


@pytest.mark.parametrize(("waiting", "busy"), [(5, 1), (9, 1), (5, 0)], ids=["slots for all", "scarce", "all idle"])
def test_an_idle_worker_gets_no_more_than_its_memory_holds(waiting: int, busy: int) -> None:
    """One that comes back while many wait got a request for each of its slots."""
    scheduler = with_memory([[], [400] * busy], slots=4)
    pool_all(scheduler, {f"r{number}": 450 for number in range(waiting)})
    taken = [worker for _, worker in admitted(scheduler)]
    assert taken.count("d0") == 2


def test_past_its_cap_a_request_goes_to_the_worker_with_most_room_and_past_twice_its_cap_to_any() -> None:
    def the_slot_is_on(index: int, caps: float, others: int) -> list[str]:
        loads = [[450, 490], [400, 490]]
        loads[1 - index].append(5)
        scheduler = with_memory(loads, slots=3)
        pool_all(scheduler, {"old": 300} | {f"other{n}": 301 for n in range(others)})
        see_means(scheduler, mean_prompt=300.0, wait_s=0.0)
        cap_s = 1.1 * LEVEL_FIT.least_cap * PolicySettings().max_wait_s
        return [worker for _, worker in admitted(scheduler, now=caps * cap_s)]

    assert the_slot_is_on(0, 0.9, others=1) == the_slot_is_on(1, 0.9, others=1) == []
    assert the_slot_is_on(0, 1.1, others=1) == [] and the_slot_is_on(1, 1.1, others=1) == ["d1"]
    assert the_slot_is_on(0, 2.1, others=1) == ["d0"]
    assert the_slot_is_on(0, 0.9, others=0) == [] and the_slot_is_on(0, 1.1, others=0) == ["d0"]


@pytest.mark.parametrize(
    ("size_of_mean", "wait_s", "cap_s"),
    [
        (1, 0.1, 1.07 * 4),  # a fifteenth of max_wait_s
        (1, 2.0, 1.07 * 12.6),  # 6.3 mean waits
        (4, 2.0, 1.28 * 12.6),
        (11, 2.0, 1.62 * 12.6),
        (500, 2.0, 1.62 * 12.6),
        (500, 30.0, 1.62 * 189),
    ],
)
def test_caps_are_a_few_mean_waits_and_longer_for_large_prompts(size_of_mean: int, wait_s: float, cap_s: float) -> None:
    snapshot = a_scheduler("level_fit").snapshot
    snapshot.means.prompt_tokens, snapshot.means.wait_s = 100.0, wait_s
    caps = caps_s(
        np.array([100.0 * size_of_mean, 100.0]), snapshot, TargetFitParams(60.0, 0.5), LEVEL_FIT, snapshot.pool_is_full
    )
    assert caps[0] == pytest.approx(cap_s)
    assert caps[1] == pytest.approx(1.07 * max(4.0, 6.3 * wait_s))


def test_the_caps_of_a_class_are_measured_by_its_own_waits() -> None:
    scheduler = a_scheduler("level_fit", slots=1)
    scheduler.submit_prefilled(a_request("first", 100, priority=0), 0.0)
    scheduler.submit_prefilled(a_request("behind", 100, priority=3), 0.0)
    snapshot, params = scheduler.snapshot, TargetFitParams(60.0, 0.5)
    snapshot.means.prompt_tokens, snapshot.means.wait_s = 100.0, 2.0
    snapshot.means.class_wait_s[3] = 20.0
    assert caps_s(np.array([100.0]), snapshot, params, LEVEL_FIT, False)[0] == pytest.approx(1.07 * 6.3 * 2.0)
    scheduler.finish("first", Outcome.CANCELLED, 0.0)
    assert caps_s(np.array([100.0]), snapshot, params, LEVEL_FIT, False)[0] == pytest.approx(1.07 * 6.3 * 20.0)


@pytest.mark.parametrize(
    ("token_s", "wait_s", "cap_s"),
    [
        (0.0, 0.1, 4.0),  # not known yet
        (0.05, 0.1, 4.0),  # an answer of 1.5 s
        (0.02, 0.1, 1.8),
        (0.02, 2.0, 12.6),  # 6.3 mean waits
    ],
)
def test_short_answers_limit_the_cap_of_every_request(token_s: float, wait_s: float, cap_s: float) -> None:
    snapshot = a_scheduler("level_fit").snapshot
    means, params = snapshot.means, TargetFitParams(60.0, 0.5)
    means.prompt_tokens, means.usual_tokens, means.wait_s = 100.0, 100.0, wait_s
    means.answer_tokens, means.answers, snapshot.overlap.token_s = 30.0, 100, token_s
    assert caps_s(np.array([100.0]), snapshot, params, LEVEL_FIT, snapshot.pool_is_full) == pytest.approx(
        [1.07 * cap_s]
    )
    assert caps_s(np.array([100.0]), snapshot, params, TARGET_FIT, snapshot.pool_is_full) == pytest.approx([1.1 * 60.0])


@pytest.mark.parametrize(
    ("max_pooled", "place_s"),
    [(1, 60.0), (2, 40.0), (8, 10.0), (32, 2.5), (math.inf, 0.0)],
    ids=["max_wait_s", "one for each worker", "four", "sixteen", "no bound"],
)
def test_while_a_pool_that_is_small_for_its_workers_is_full_large_prompts_wait_longer(
    max_pooled: float, place_s: float
) -> None:
    scheduler = a_scheduler("level_fit", workers=3)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    snapshot, means = scheduler.snapshot, scheduler.snapshot.means
    pool_all(scheduler, {str(number): 100 for number in range(32)})
    means.prompt_tokens, means.wait_s, means.answer_tokens, means.answers = 100.0, 0.0, 200.0, 100
    snapshot.max_pooled, sizes, params = max_pooled, np.array([100.0, 250.0, 500.0, 900.0]), TargetFitParams(60.0, 0.5)
    patience = np.array([1.07, 1.175, 1.35, 1.62])
    assert caps_s(sizes, snapshot, params, LEVEL_FIT, snapshot.pool_is_full) == pytest.approx(4.0 * patience), (
        "no answer's time is known yet"
    )
    snapshot.overlap.token_s = 0.1
    places = patience * np.maximum(4.0, place_s * np.array([0.2, 0.5, 1.0, 1.0]))
    assert caps_s(sizes, snapshot, params, LEVEL_FIT, snapshot.pool_is_full) == pytest.approx(places)
    assert caps_s(sizes, snapshot, params, TARGET_FIT, snapshot.pool_is_full) == pytest.approx(
        [66.0, 75.0, 90.0, 114.0]
    )
    read, _ = snapshot_from_dict(snapshot_to_dict(snapshot, 0.0), horizon_steps=0)
    assert caps_s(sizes, read, params, LEVEL_FIT, read.pool_is_full) == pytest.approx(places), (
        "a recorded decision is the same again"
    )
    assert caps_s(sizes, snapshot, params, LEVEL_FIT, False) == pytest.approx(4.0 * patience), "there is room"


@pytest.mark.parametrize("policy", ["level_fit", "target_fit"])
def test_without_patience_who_has_waited_longest_goes_first_before_any_wait_is_known(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=2, slots=1, max_wait_s=0.0)
    scheduler.set_worker_state("d1", WorkerState.DRAINING, 0.0)
    for name, size, ready_s in (("old", 700, 0.0), ("b", 10, 8.0), ("c", 90, 8.5), ("new", 400, 9.0)):
        pool_all(scheduler, {name: size}, now=ready_s)
    assert admitted(scheduler, now=9.0) == [("old", "d0")]


def test_a_prompt_with_hardly_more_cost_than_a_mean_request_waits_hardly_longer() -> None:
    snapshot = a_scheduler("level_fit").snapshot
    snapshot.means.prompt_tokens, snapshot.means.wait_s, snapshot.request_tokens = 100.0, 2.0, 900.0
    caps = caps_s(np.array([100.0, 1100.0]), snapshot, TargetFitParams(60.0, 0.5), LEVEL_FIT, snapshot.pool_is_full)
    assert caps == pytest.approx([1.07 * 12.6, 1.14 * 12.6])


@pytest.mark.parametrize("request_tokens", [0, 300])
@pytest.mark.parametrize(
    ("usual_requests", "cap_s"),
    [(49, 1.62 * 12.6), (64, 2 * 10 * 1.0), (128, 2 * 10 * 2.0), (2000, 180.0)],
    ids=["large", "less than what others wait", "an outlier", "the most"],
)
def test_an_outlier_waits_in_proportion_to_its_cost_for_the_others(
    usual_requests: int, cap_s: float, request_tokens: int
) -> None:
    scheduler = a_scheduler("level_fit", workers=3)
    scheduler.set_worker_state("d2", WorkerState.DOWN, 0.0)
    snapshot, means = scheduler.snapshot, scheduler.snapshot.means
    snapshot.request_tokens = request_tokens
    means.prompt_tokens, means.usual_tokens = 150.0, 100.0  # huge ones raise the mean
    means.wait_s, means.answer_tokens, means.answers = 2.0, 200.0, 100
    # a usual request costs its prompt, half of its answer, and c
    sizes = np.array([(200.0 + request_tokens) * usual_requests - request_tokens])
    others = caps_s(sizes, snapshot, TargetFitParams(60.0, 0.5), LEVEL_FIT, snapshot.pool_is_full)
    assert others == pytest.approx([1.62 * 12.6]), "how long an answer takes is not known yet"
    snapshot.overlap.token_s = 0.05
    assert caps_s(sizes, snapshot, TargetFitParams(60.0, 0.5), LEVEL_FIT, snapshot.pool_is_full) == pytest.approx(
        [max(cap_s, 1.62 * 12.6)]
    )


@pytest.mark.parametrize(("usual_requests", "cap_s"), [(49.9, 1.62 * 12.6), (50.0, 2 * 100 * 50 / 64)])
def test_from_fifty_usual_requests_on_a_prompt_is_an_outlier(usual_requests: float, cap_s: float) -> None:
    snapshot = a_scheduler("level_fit", workers=2).snapshot
    means = snapshot.means
    means.prompt_tokens = means.usual_tokens = 100.0
    means.wait_s, means.answer_tokens, means.answers, snapshot.overlap.token_s = 2.0, 200.0, 100, 0.5
    sizes = np.array([200.0 * usual_requests])
    assert caps_s(sizes, snapshot, TargetFitParams(60.0, 0.5), LEVEL_FIT, False) == pytest.approx([cap_s])


@pytest.mark.parametrize("rules", [LEVEL_FIT, TARGET_FIT], ids=["level_fit", "target_fit"])
def test_no_cap_outlasts_the_pool_where_waits_have_a_cap(rules: FitRules) -> None:
    snapshot = a_scheduler("level_fit").snapshot
    snapshot.means.wait_s, snapshot.longest_wait_s, sizes = 100.0, 180.0, np.array([1.0, 9e9])
    for max_wait_s, cap_s in ((60.0, 180.0), (math.inf, math.inf)):
        assert caps_s(sizes, snapshot, TargetFitParams(max_wait_s, 0.5), rules, False).tolist() == [cap_s] * 2


def test_a_single_worker_admits_in_waiting_order_as_far_as_memory_allows() -> None:
    scheduler = level_fitting([[400] * 4], slots=4, mean_prompt=300.0)
    pool_all(scheduler, {"a": 5_000, "b": 10, "c": 300})
    for number, name in enumerate("ab"):
        scheduler.finish(f"d0.{number}", Outcome.FINISHED, 1.0)
        assert admitted(scheduler, now=1.0) == [(name, "d0")]
    scheduler.report_decoder_memory("d0", 6_000, 1.0)
    pool_all(scheduler, {"large": 3_000, "small": 20}, now=1.0)
    scheduler.finish("b", Outcome.FINISHED, 1.0)
    scheduler.finish("d0.2", Outcome.FINISHED, 1.0)
    assert admitted(scheduler, now=1.0) == [("c", "d0"), ("small", "d0")]


def test_the_weight_of_a_wait_is_unchanged_where_answers_are_far_longer_than_prompts() -> None:
    """The youngest fits best by some tokens: of thousands that its answer may have, they are nothing."""
    scheduler = level_fitting([[40_000, 40_000, 10], [81_000, 10]], slots=3, mean_prompt=20.0, mean_output=1_000.0)
    pool_all(scheduler, {"old": 39}, now=0.0)
    pool_all(scheduler, {"young": 5}, now=3.0)
    see_waits(scheduler, 1.0)
    scheduler.snapshot.means.prompt_tokens = 20.0
    assert admitted(scheduler, now=3.0) == [("old", "d1")]


@pytest.mark.parametrize(("covariance", "first"), [(-900.0, "mean"), (0.0, "small")], ids=["long", "alike"])
def test_a_full_worker_gets_no_small_prompt_whose_answer_will_fill_it_further(covariance: float, first: str) -> None:
    """A prompt of 20 has an answer of 4,500 tokens more than the mean one, of which its slot holds half on average."""
    scheduler = level_fitting([[9_000, 9_000], [19_000]], slots=2, mean_prompt=3_000.0, mean_output=1_000.0)
    pool_all(scheduler, {"small": 20, "mean": 1_100})
    see_means(scheduler, 3_000.0, 0.0)
    means = scheduler.snapshot.means
    means.log_prompt, means.log_variance, means.log_covariance, means.answers = 7.5, 0.9, covariance, 100
    document = snapshot_to_dict(scheduler.snapshot, 0.0)
    assert admitted(scheduler) == [(first, "d1")]
    again = Scheduler(scheduler.policy)
    again.snapshot, _ = snapshot_from_dict(document, 0)
    assert again.admit(0.0)[0].request == first, "a document decides alike"


def test_where_prompts_are_nearly_alike_a_far_smaller_one_counts_as_ten_mean_answers_more_at_most() -> None:
    scheduler = level_fitting([[1_000], [1_000]], slots=2, mean_prompt=1_000.0, mean_output=500.0)
    means = scheduler.snapshot.means
    means.answers = 0
    for number in range(400):
        means.see_answer(*((100, 1_010) if number % 2 else (900, 1_000)))
    pool_all(scheduler, {"tiny": 5, "small": 1_000, "large": 1_010})
    window = Window(scheduler.snapshot, 0.0, TargetFitParams(60.0, 0.5), LEVEL_FIT, False)
    tiny, small, large = window.added(scheduler.snapshot.workers[0].spec)
    assert tiny == pytest.approx(5 + 10 * 500 / 2, rel=0.02)
    assert (small, large) == (pytest.approx(1_000 + 400 / 2, rel=0.02), pytest.approx(1_010 - 400 / 2, rel=0.02))


@pytest.mark.parametrize(("deviation_tokens", "first"), [(0.0, "young"), (700.0, "old")], ids=["alike", "different"])
def test_the_weight_of_a_wait_grows_with_the_variation_of_prompts(deviation_tokens: float, first: str) -> None:
    scheduler = level_fitting([[3_000] * 3, [3_000] * 2], slots=3, mean_prompt=1_000.0)
    pool_all(scheduler, {"old": 500}, now=0.0)
    pool_all(scheduler, {"young": 1_500}, now=3.0)
    see_means(scheduler, mean_prompt=1_000.0, wait_s=1.0)
    scheduler.snapshot.means.deviation_tokens = deviation_tokens
    assert admitted(scheduler, now=3.0) == [(first, "d1")]


def test_an_overdue_request_also_waits_when_no_memory_is_left() -> None:
    scheduler = with_memory([[450, 550], [400, 600]], slots=3)
    scheduler.submit_prefilled(RequestSpec("old", 300), 0.0)
    assert admitted(scheduler, now=1_000.0) == []
    scheduler.finish("d0.0", Outcome.FINISHED, 1_000.0)
    assert admitted(scheduler, now=1_000.0) == [("old", "d0")]


def test_memory_is_reserved_for_the_growth_of_running_requests() -> None:
    """Two mean answers of 10; and 1/32 of the memory where that is less."""
    for mean_output, fits in ((10.0, 580), (1_000.0, 568)):  # 1,000 / 32 is 31.25
        for size in (fits, fits + 1):
            scheduler = level_fitting([[400]], slots=2, mean_prompt=300.0, mean_output=mean_output)
            scheduler.report_decoder_memory("d0", 1_000, 0.0)
            pool_all(scheduler, {"a": size})
            assert bool(admitted(scheduler)) == (size == fits)


def test_target_fit_ignores_memory() -> None:
    scheduler = occupied([[400]], slots=2)
    scheduler.report_decoder_memory("d0", 500, 0.0)
    pool_all(scheduler, {"large": 700})
    assert admitted(scheduler, now=1_000.0) == [("large", "d0")]


def alone(policy: str, loads: list[list[int]], *, slots: int, max_wait_s: float = 60.0) -> Scheduler:
    """Workers that step alone, after mean waits of 10 s."""
    scheduler = occupied(loads, slots=slots, policy=policy, max_wait_s=max_wait_s)
    scheduler.configure(SchedulerConfig(shared_barrier=False), 0.0)
    see_waits(scheduler, 10.0)
    return scheduler


@pytest.mark.parametrize(
    ("policy", "waited_s", "first"),
    [("level_fit", 5.0, "fits"), ("level_fit", 10.1, "waits"), ("target_fit", 10.1, "fits")],
)
def test_independent_workers_limit_a_cap_to_the_mean_wait(policy: str, waited_s: float, first: str) -> None:
    scheduler = alone(policy, [[500, 500], [400]], slots=2)
    scheduler.snapshot.means.prompt_tokens = 400.0
    pool_all(scheduler, {"waits": 5000}, now=100.0 - waited_s)
    pool_all(scheduler, {"fits": 500}, now=100.0)
    document = snapshot_to_dict(scheduler.snapshot, 100.0)
    assert admitted(scheduler, 100.0) == [(first, "d1")]
    again = Scheduler(scheduler.policy)
    again.snapshot, _ = snapshot_from_dict(document, 0)
    assert [each.request for each in again.admit(100.0)] == [first], "a document decides alike"


@pytest.mark.parametrize(("policy", "held"), [("level_fit", False), ("target_fit", True)])
def test_where_workers_step_alone_nothing_is_held_back_beside_a_free_slot(policy: str, held: bool) -> None:
    scheduler = alone(policy, [[100] * 4, [100] * 4], slots=8)
    pool_all(scheduler, {"large": 300}, now=100.0)
    assert admitted(scheduler, 100.0) == ([] if held else [("large", "d0")])


def test_independent_workers_keep_an_infinite_cap_infinite() -> None:
    scheduler = alone("level_fit", [[500, 500], [400]], slots=2, max_wait_s=math.inf)
    pool_all(scheduler, {"waits": 5000}, now=0.0)
    pool_all(scheduler, {"fits": 500}, now=100.0)
    assert admitted(scheduler, 100.0) == [("fits", "d1")]


def test_independent_workers_wait_for_memory_like_others() -> None:
    scheduler = alone("level_fit", [[400], [400]], slots=2)
    for name in ("d0", "d1"):
        scheduler.report_decoder_memory(name, 1000, 0.0)
    pool_all(scheduler, {"large": 900}, now=80.0)
    pool_all(scheduler, {"small": 100, "other": 100}, now=100.0)
    assert admitted(scheduler, 100.0) == [("small", "d0"), ("other", "d1")]


@pytest.mark.parametrize("short_of_memory", [False, True])
def test_a_prompt_that_costs_too_much_on_a_slower_worker_goes_to_a_fast_one_beside_a_smaller_prompt(
    short_of_memory: bool,
) -> None:
    """Alone it goes there, too: what waits beside it must not keep it waiting while an idle worker has room."""
    scheduler = a_scheduler("level_fit", workers=0)
    for name, slowdown in (("slow", 1.3), ("fast", 1.0), ("idle", 1.0)):
        spec = WorkerSpec(name, Role.DECODE, slots=8, slowdown=slowdown, request_tokens=5_000)
        scheduler.add_worker(spec, 0.0)
    pool_all(scheduler, {"runs": 10_000})
    assert admitted(scheduler) == [("runs", "fast")]
    if short_of_memory:
        scheduler.report_decoder_memory("fast", 60_000, 0.0)
    pool_all(scheduler, {"large": 50_000, "small": 100})
    assert admitted(scheduler) == [("large", "idle"), ("small", "slow")]


def test_a_prompt_past_its_limit_goes_to_a_fast_worker_short_of_memory_where_a_slower_one_would_cost_too_much() -> None:
    """The slower worker has room for it, which must not keep it waiting while small prompts fill the fast one."""
    scheduler = a_scheduler("level_fit", workers=0)
    for name, slowdown in (("d0", 1.0), ("d1", 2.0)):
        spec = WorkerSpec(name, Role.DECODE, slots=8, slowdown=slowdown, request_tokens=5_000)
        scheduler.add_worker(spec, 0.0)
    hold(scheduler, [[5_000] * 4, [2_000, 8_000]])
    for name in ("d0", "d1"):
        scheduler.report_decoder_memory(name, 45_000, 0.0)
    pool_all(scheduler, {"large": 27_000, "small": 5_000})
    assert admitted(scheduler) == [("small", "d0")]
    pool_all(scheduler, {"next": 5_000}, now=60.0)
    assert admitted(scheduler, 60.0)[0] == ("large", "d0")


@pytest.mark.parametrize(
    ("prompt_tokens", "deviation_tokens", "answer_tokens", "taken"),
    [
        (30_000, 0.0, 0.0, False),
        (30_000, 15_000.0, 0.0, True),  # prompts differ: small ones keep the slower worker level
        (300, 0.0, 0.0, True),  # such loads hardly change the time of a step
        (2_000, 0.0, 0.0, True),
        (2_000, 0.0, 4_000.0, False),  # each holds as much again on average
        (2_000, 1_400.0, 4_000.0, True),
    ],
)
@pytest.mark.parametrize("waiting", [1, 9])
def test_a_slower_worker_that_small_prompts_do_not_keep_level_keeps_slots_free(
    waiting: int, prompt_tokens: int, deviation_tokens: float, answer_tokens: float, *, taken: bool
) -> None:
    """Four workers of eight requests, and one that takes twice as long with four: the loads are level."""
    scheduler = a_scheduler("level_fit", workers=5, slots=8, slowdowns=[1.0, 1.0, 1.0, 1.0, 2.0], hold_s=0.0)
    held = prompt_tokens + int(answer_tokens / 2)
    hold(scheduler, [[held] * 8] * 4 + [[held] * 4])
    pool_all(scheduler, {f"w{number}": prompt_tokens for number in range(waiting)})
    means = scheduler.snapshot.means
    means.prompt_tokens, means.deviation_tokens, means.answer_tokens = prompt_tokens, deviation_tokens, answer_tokens
    assert {worker for _, worker in admitted(scheduler)} == ({"d4"} if taken else set())


@pytest.mark.parametrize(("slowdowns", "taken"), [([1.0, 1.0, 2.0, 2.0], True), ([1.0, 1.0, 1.0, 2.0], False)])
def test_several_slower_workers_keep_slots_free_only_where_that_is_worth_it_for_all_together(
    slowdowns: list[float], *, taken: bool
) -> None:
    """One request less on one of them makes no step shorter while another one stays as loaded."""
    scheduler = a_scheduler("level_fit", workers=4, slots=8, slowdowns=slowdowns, hold_s=0.0)
    hold(scheduler, [[6_000] * (4 if slowdown > 1.0 else 8) for slowdown in slowdowns])
    pool_all(scheduler, {"next": 6_000})
    assert bool(admitted(scheduler)) is taken


def test_a_slower_worker_that_has_grown_above_all_others_is_no_reason_to_fill_another_one_as_high() -> None:
    """Each answer that grows raised the limit for the next request, until all slots were in use."""
    slowdowns = [1.0] * 5 + [2.0] * 3
    scheduler = a_scheduler("level_fit", workers=8, slots=8, slowdowns=slowdowns, hold_s=0.0)
    hold(scheduler, [[30_000] * 8] * 5 + [[30_000] * 5] + [[30_000] * 4] * 2)
    pool_all(scheduler, {"next": 30_000})
    assert admitted(scheduler) == []


def test_a_slower_worker_is_filled_to_the_level_of_its_own_barrier_group() -> None:
    scheduler = a_scheduler("level_fit", workers=0, hold_s=0.0)
    for group, slots, slowdowns in (("small", 4, (1.0, 1.0, 2.0)), ("large", 16, (1.0, 1.0))):
        for slowdown in slowdowns:
            name = f"d{len(scheduler.snapshot.workers)}"
            scheduler.add_worker(WorkerSpec(name, Role.DECODE, "", None, slots, slowdown, group), 0.0)
    hold(scheduler, [[30_000] * 4] * 2 + [[30_000] * 2] + [[30_000] * 16] * 2)
    pool_all(scheduler, {"next": 30_000})
    assert admitted(scheduler) == []


@pytest.mark.parametrize(
    ("groups", "taken"),
    [
        (["a", "a", "a", "b"], True),
        (["a", "a", "b", ""], True),  # it steps alone
        (["a", "a", "b", "b"], False),
        (["a", "a", "a", "a"], False),
        (["", "", "", ""], False),  # none is named: all are of one
    ],
)
def test_a_slower_worker_keeps_slots_free_only_beside_faster_ones_of_its_barrier_group(
    groups: list[str], *, taken: bool
) -> None:
    """No others wait for it: they serve as much, whatever it has."""
    scheduler = a_scheduler("level_fit", workers=0, hold_s=0.0)
    for index, (group, slowdown) in enumerate(zip(groups, (1.0, 1.0, 1.0, 2.0), strict=True)):
        scheduler.add_worker(WorkerSpec(f"d{index}", Role.DECODE, "", None, 8, slowdown, group), 0.0)
    hold(scheduler, [[30_000] * 8] * 3 + [[30_000] * 4])
    pool_all(scheduler, {"next": 30_000})
    read, _ = snapshot_from_dict(snapshot_to_dict(scheduler.snapshot, 0.0), horizon_steps=0)
    assert bool(list(scheduler.policy.decide(read, 0.0))) is taken, "a recorded decision is the same again"
    assert bool(admitted(scheduler)) is taken


def with_slots(*slots: int, request_tokens: int = 0) -> Scheduler:
    """Workers that differ in their slots alone."""
    scheduler = a_scheduler("level_fit", workers=0, hold_s=0.0)
    for index, each in enumerate(slots):
        spec = WorkerSpec(f"d{index}", Role.DECODE, slots=each, request_tokens=request_tokens)
        scheduler.add_worker(spec, 0.0)
    return scheduler


@pytest.mark.parametrize(
    ("prompt_tokens", "deviation_tokens", "request_tokens", "taken"),
    [
        (30_000, 0.0, 0, False),
        (30_000, 15_000.0, 0, True),  # prompts differ: small ones keep it level
        (30_000, 15_000.0, 30_000, False),  # not where each request costs as much again
        (300, 0.0, 0, True),  # such loads hardly change the time of a step
    ],
)
@pytest.mark.parametrize("waiting", [1, 60])
def test_a_worker_with_many_more_slots_than_most_keeps_those_free_that_cost_more_than_they_serve(
    waiting: int, prompt_tokens: int, deviation_tokens: float, request_tokens: int, *, taken: bool
) -> None:
    """Three workers of eight slots, all in use, and one of 64 with as many requests: full it would slow all down."""
    scheduler = with_slots(8, 8, 8, 64, request_tokens=request_tokens)
    hold(scheduler, [[prompt_tokens] * 8] * 4)
    pool_all(scheduler, {f"w{number}": prompt_tokens for number in range(waiting)})
    scheduler.snapshot.means.deviation_tokens = deviation_tokens
    assert {worker for _, worker in admitted(scheduler)} == ({"d3"} if taken else set())


def test_where_half_of_the_workers_have_more_slots_all_are_filled() -> None:
    """Together they serve more with all slots in use, however long the steps are then."""
    scheduler = with_slots(8, 8, 64, 64)
    hold(scheduler, [[3_000] * 8] * 2 + [[3_000] * 20] * 2)
    pool_all(scheduler, {f"w{number}": 3_000 for number in range(100)})
    assert len(admitted(scheduler)) == 88


def test_a_worker_with_a_few_slots_more_is_filled_though_what_runs_there_is_large_by_chance() -> None:
    scheduler = with_slots(8, 8, 10)
    hold(scheduler, [[3_000] * 8] * 2 + [[4_000] * 9])
    pool_all(scheduler, {"next": 3_000, "waits": 3_000})
    assert admitted(scheduler) == [("next", "d2")]


@pytest.mark.parametrize("request_tokens", [0, 13_400])
@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_equal_workers_are_filled_whatever_their_loads(request_tokens: int, slowdown: float) -> None:
    scheduler = a_scheduler("level_fit", slots=8, slowdowns=[slowdown] * 3, request_tokens=request_tokens, hold_s=0.0)
    hold(scheduler, [[300] * 7, [300] * 7, [30_000] * 7])
    pool_all(scheduler, {f"w{number}": 30_000 for number in range(4)})
    assert sorted(worker for _, worker in admitted(scheduler)) == ["d0", "d1", "d2"]


@pytest.mark.parametrize("slowdowns", [[0.5, 1.0, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0]])
def test_most_workers_are_filled_even_where_a_few_are_faster(slowdowns: list[float]) -> None:
    """One fast worker of four does not keep the slots of the three others free, however long their steps; two do."""
    scheduler = a_scheduler("level_fit", workers=4, slots=8, slowdowns=slowdowns, request_tokens=30_000, hold_s=0.0)
    hold(scheduler, [[3_000] * (8 if slowdown == 0.5 else 4) for slowdown in slowdowns])
    pool_all(scheduler, {"next": 3_000})
    assert bool(admitted(scheduler)) is (slowdowns.count(1.0) > 2)
