"""The running means behind patience and ageing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.core.snapshot import WorkloadMeans

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
