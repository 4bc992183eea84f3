"""The running means behind patience and ageing."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.types import Outcome
from balanceroute.core.workload_means import WorkloadMeans
from tests.unit.core.builders import a_request, a_scheduler, pool_all

sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=120)


@given(sizes)
def test_the_prompt_mean_is_an_ewma_that_starts_from_the_mean_of_the_first_fifty(prompts: list[int]) -> None:
    means = WorkloadMeans()
    for tokens in prompts:
        means.see_prompt(tokens)
    ewma = sum(prompts[:50]) / len(prompts[:50])
    for tokens in prompts:
        ewma += 0.02 * (tokens - ewma)
    assert means.prompt_tokens == pytest.approx(ewma)


@given(sizes)
def test_the_prompt_mean_stays_between_the_smallest_and_the_largest_prompt(prompts: list[int]) -> None:
    means = WorkloadMeans()
    for tokens in prompts:
        means.see_prompt(tokens)
        assert min(prompts) * 0.999 <= means.prompt_tokens <= max(prompts) * 1.001


def test_the_mean_wait_of_a_class_starts_from_that_of_all_and_then_follows_its_own_waits() -> None:
    means = WorkloadMeans()
    for _ in range(50):
        means.see_wait(4.0, 0)
    assert means.wait_of(0) == means.wait_s == means.wait_of(1), "with one class both are the same"
    means.see_wait(100.0, 1)
    assert means.wait_of(1) == means.wait_s > means.wait_of(0)
    means.see_wait(0.0, 0)
    assert means.wait_of(1) > means.wait_s > means.wait_of(0)


def test_however_many_priorities_clients_name_the_means_of_classes_in_use_are_kept() -> None:
    means = WorkloadMeans()
    for priority in range(1, 1_000):
        means.see_wait(0.0, 0)
        means.see_wait(1.0, priority)
    assert len(means.class_wait_s) == 64 and means.wait_of(0) == 0.0 and means.wait_of(1) == means.wait_s


@given(sizes)
def test_the_deviation_is_an_average_of_distances_from_the_mean_so_far(prompts: list[int]) -> None:
    means = WorkloadMeans()
    deviation = 0.0
    for number, tokens in enumerate(prompts, 1):
        means.see_prompt(tokens)
        deviation += max(0.02, 1 / number) * (abs(tokens - means.prompt_tokens) - deviation)
    assert means.deviation_tokens == pytest.approx(deviation)


def test_equal_prompts_do_not_deviate() -> None:
    means = WorkloadMeans()
    for _ in range(100):
        means.see_prompt(700)
    assert means.deviation_tokens == pytest.approx(0.0, abs=1e-9)


def test_rare_huge_prompts_hardly_change_the_usual_mean() -> None:
    means = WorkloadMeans()
    for number in range(5000):
        means.see_prompt(150_000 if number % 250 == 249 else 600)
    assert 600 < means.usual_tokens < 800
    assert WorkloadMeans().usual_tokens == 0.0


@given(st.integers(1, 200_000), sizes)
def test_the_usual_mean_follows_when_all_prompts_become_larger(small: int, prompts: list[int]) -> None:
    means = WorkloadMeans()
    for tokens in [small, *prompts, *[200_000] * 2000]:
        means.see_prompt(tokens)
    assert means.usual_tokens == pytest.approx(200_000, rel=0.01)


def test_answers_are_averaged_plainly_at_first_and_then_with_a_short_memory() -> None:
    means = WorkloadMeans()
    for tokens in (10, 20, 60):
        means.see_answer(tokens, 100)
    assert means.answer_tokens == pytest.approx(30.0)
    for _ in range(2000):
        means.see_answer(500, 100)
    assert means.answer_tokens == pytest.approx(500.0, rel=1e-3)


@pytest.mark.parametrize(
    ("power", "slope"), [(-0.5, True), (-0.05, False), (0.5, False)], ids=["longer", "nearly alike", "shorter"]
)
def test_answers_have_to_do_with_prompts_only_where_those_of_small_prompts_are_clearly_longer(
    power: float, slope: bool
) -> None:
    random, means = Random(1), WorkloadMeans()
    for number in range(1000):
        prompt = int(1000 * random.lognormvariate(0.0, 1.0))
        means.see_answer(int(400 * (prompt / 1000) ** power * random.lognormvariate(0.0, 0.8)), prompt)
        if number < 99:
            assert means.answer_slope() == 0.0, "chance, so far"
    assert (means.answer_slope() < 0.0) is slope


def test_the_slope_of_answers_is_that_of_the_line_through_them() -> None:
    means = WorkloadMeans()
    for number in range(400):
        means.see_answer(900 if number % 2 else 100, 10 if number % 2 else 1000)
    assert means.answer_slope() == pytest.approx(-800 / math.log(100), rel=0.02)
    assert means.log_prompt == pytest.approx(math.log(100), rel=0.02)


def test_prompts_that_are_all_alike_say_nothing_of_answers() -> None:
    means = WorkloadMeans()
    for number in range(400):
        means.see_answer(number, 1000)
    assert means.answer_slope() == 0.0


def test_only_complete_answers_enter_the_means() -> None:
    scheduler = a_scheduler("pool_fifo", workers=1, slots=4)
    pool_all(scheduler, {"a": 10, "b": 10, "c": 10})
    scheduler.admit(0.0)
    for request, tokens in (("a", 7), ("b", 90)):
        scheduler.progress(request, tokens, 1.0)
    scheduler.finish("a", Outcome.FINISHED, 2.0)
    scheduler.finish("b", Outcome.CANCELLED, 2.0)
    assert (scheduler.snapshot.means.answer_tokens, scheduler.snapshot.means.answers) == (7.0, 1)


@pytest.mark.parametrize("decode_first", [False, True])
def test_a_prompt_that_is_only_scored_has_no_answer_that_could_enter_the_means(decode_first: bool) -> None:
    scheduler = a_scheduler(config=SchedulerConfig(decode_first=decode_first))
    scheduler.submit(a_request("scored", 5000), 0.0)
    scheduler.admit(0.0) if decode_first else scheduler.dispatch(0.0)
    scheduler.finish("scored", Outcome.FINISHED, 1.0)
    means = scheduler.snapshot.means
    assert (means.answers, means.log_prompt) == (0, 0.0)


def test_each_of_the_first_fifty_prompts_has_the_same_weight() -> None:
    """`sizes` above has seldom so many."""
    means = WorkloadMeans()
    for tokens in [100] * 49 + [5100]:
        means.see_prompt(tokens)
    ewma = 200.0  # the mean of the fifty
    for tokens in [100] * 49 + [5100]:
        ewma += 0.02 * (tokens - ewma)
    assert means.prompt_tokens == pytest.approx(ewma)


def test_the_patience_factor_is_at_most_six() -> None:
    means = WorkloadMeans(prompt_tokens=100.0)
    assert [means.patience_factor(tokens) for tokens in (0, 1000, 5000, 500_000)] == [1.0, 2.0, 6.0, 6.0]
