"""`best_subset` against brute force over every reachable sum and every subset."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from balanceroute.core import subset
from balanceroute.core.subset import Score, Subset, best_subset

EXAMPLES = settings(max_examples=200, deadline=None)
Shape = tuple[float, Score]

prompts = st.one_of(st.integers(1, 12), st.integers(1, 5_000))
identical_prompts = st.builds(lambda size, n: [size] * n, prompts, st.integers(1, 14))
candidates = st.one_of(st.lists(prompts, min_size=1, max_size=14), identical_prompts)
few_candidates = st.lists(st.integers(1, 9), min_size=1, max_size=7)
margins = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 20_000), st.integers(0, 40).map(lambda m: m + 0.5))


def br_h_score(kinks: Sequence[tuple[float, int]], alpha: int, beta: int) -> Shape:
    """The BR-H score with integer weights, so that ties are exact; and where it stops rising."""
    slope = reward = alpha * sum(weight for _, weight in kinks)
    peak = math.inf
    for margin, weight in sorted(kinks):
        slope -= beta * weight
        if slope <= 0:
            peak = margin
            break
    return peak, lambda total: reward * total - beta * sum(w * max(0, total - m) for m, w in kinks)


shapes = st.builds(
    br_h_score,
    st.lists(st.tuples(margins, st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 6),
)


def searches(sizes: Sequence[int], max_count: int, peak: float, score: Score) -> list[Subset]:
    """What is chosen, and what each of the two searches gives whatever the size of the problem."""
    count = min(max_count, len(sizes))
    reachable_peak = min(peak, sum(sizes))
    return [
        best_subset(sizes, max_count, peak, score),
        subset._best_by_enumeration(sizes, count, reachable_peak, score),
        subset._best_by_bitsets(sizes, count, reachable_peak, score),
    ]


def exhaustive_best_subset(sizes: Sequence[int], max_count: int, score: Score) -> Subset:
    """Score every subset, knowing nothing about the score: the oracle.

    Ties go to the smaller sum, then to the earliest candidates. O(n^max_count) calls of `score`.
    """
    indices = range(len(sizes))
    subsets = [chosen for size in range(1, max_count + 1) for chosen in combinations(indices, size)]
    sums = [sum(sizes[i] for i in chosen) for chosen in subsets]
    scored = {total: score(total) for total in set(sums)}
    _, best, latest_first = min((-scored[total], total, c[::-1]) for total, c in zip(sums, subsets, strict=True))
    return latest_first[::-1], scored[best]


def reachable_sums(sizes: Sequence[int], max_count: int) -> set[int]:
    by_count = [{0}] + [set[int]() for _ in range(max_count)]
    for size in sizes:
        for count in range(max_count, 0, -1):
            by_count[count] |= {total + size for total in by_count[count - 1]}
    return set().union(*by_count[1:])


@EXAMPLES
@given(candidates, st.integers(1, 15), shapes)
def test_no_reachable_sum_scores_higher_than_the_chosen_one(sizes: list[int], max_count: int, shape: Shape) -> None:
    peak, score = shape
    best = max(map(score, reachable_sums(sizes, max_count)))
    for chosen, claimed in searches(sizes, max_count, peak, score):
        assert list(chosen) == sorted(set(chosen)) and 1 <= len(chosen) <= max_count
        assert score(sum(sizes[i] for i in chosen)) == claimed == best


@EXAMPLES
@given(few_candidates, st.integers(1, 7), shapes)
@example([5, 2, 3], 2, br_h_score([(4, 1)], 1, 2))  # one candidate above the peak equals a sum of two below it
@example([2, 3, 5], 2, br_h_score([(4, 1)], 1, 2))
def test_of_the_subsets_with_the_chosen_sum_the_earliest_candidates_win(
    sizes: list[int], max_count: int, shape: Shape
) -> None:
    peak, score = shape
    subsets = [c for n in range(1, max_count + 1) for c in combinations(range(len(sizes)), n)]
    for chosen, _ in searches(sizes, max_count, peak, score):
        rivals = [c for c in subsets if sum(sizes[i] for i in c) == sum(sizes[i] for i in chosen)]
        assert chosen == min(rivals, key=lambda c: c[::-1])


@EXAMPLES
@given(few_candidates, st.integers(1, 7), st.integers(0, 40), st.integers(2, 5))
def test_the_oracle_agrees_when_no_slope_is_flat(sizes: list[int], max_count: int, margin: int, workers: int) -> None:
    """BR-0 rises by 1 and falls by G - 1 per token: only the two probes can tie, so one answer is right."""
    peak, score = br_h_score([(margin, 1)], 1, workers)
    assert best_subset(sizes, max_count, peak, score) == exhaustive_best_subset(sizes, max_count, score)


@EXAMPLES
@given(st.lists(st.integers(1, 60), min_size=6, max_size=14), st.integers(2, 14), st.integers(0, 300))
def test_checkpoints_recover_the_same_subset_as_keeping_every_state(
    sizes: list[int], max_count: int, margin: int
) -> None:
    peak, score = br_h_score([(margin, 1)], 1, 8)
    peak, count = min(peak, sum(sizes)), min(max_count, len(sizes))
    kept = subset._best_by_bitsets(sizes, count, peak, score)
    budget, subset.STATE_BYTES = subset.STATE_BYTES, 0
    try:
        assert subset._best_by_bitsets(sizes, count, peak, score) == kept
    finally:
        subset.STATE_BYTES = budget


def test_a_peak_beyond_every_sum_takes_the_largest_candidates() -> None:
    assert best_subset([3, 9, 9, 4], 2, math.inf, float) == ((1, 2), 18.0)


def test_flat_slopes_take_the_largest_sum_on_the_plateau() -> None:
    """Neither probe scores higher; the larger load is admitted, because it keeps more slots busy."""
    flat: Callable[[int], float] = lambda total: min(total, 10) - max(0, total - 20)  # noqa: E731
    assert best_subset([10, 5, 4], 3, 20, flat) == ((0, 1, 2), 10)


def test_a_search_over_64_long_prompts_ends() -> None:
    """The largest problem that the settings allow: 64 candidates of up to 200k tokens."""
    sizes = [1 + (7_919 * i * i) % 200_000 for i in range(64)]
    chosen, score = best_subset(sizes, 20, 2_000_000, lambda total: total - 8 * max(0, total - 2_000_000))
    assert sum(sizes[i] for i in chosen) == score == 2_000_000
