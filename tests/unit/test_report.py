"""The definitions of the reported figures, by numbers made by hand."""

import math

import pytest

from balanceroute import report


def test_ttft_and_tpot_of_a_stream_of_four_tokens() -> None:
    assert report.ttft_s(10.0, 10.25) == 0.25
    assert report.tpot_s(10.25, 10.85, 4) == pytest.approx(0.2)


def test_tpot_of_a_single_token_is_undefined() -> None:
    assert report.tpot_s(1.0, 1.0, 1) is None


def test_itl_spreads_the_tokens_of_a_chunk_over_the_gap_before_it() -> None:
    assert report.itl_s([1.0, 1.3, 1.4], [2, 3, 1]).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_itl_of_one_chunk_is_empty() -> None:
    assert report.itl_s([1.0], [5]).tolist() == []


def test_level_full_workers_have_balance_one() -> None:
    step_s = 1e-6 * 1000 + 0.02
    assert report.balance(
        4 * 8 / step_s, 1000, n_workers=4, slots=8, step_cost_s=1e-6, step_overhead_s=0.02
    ) == pytest.approx(1.0)


def test_a_distribution_of_nothing_is_not_a_number_and_counts_zero() -> None:
    empty = report.Distribution.of([])
    assert empty.n == 0
    assert math.isnan(empty.p99)
    assert math.isnan(report.percentile([], 50))


def test_percentiles_interpolate() -> None:
    assert report.percentile([0, 10], 50) == 5
    seen = report.Distribution.of([1, 2, 3, 4])
    assert (seen.n, seen.mean, seen.p50, seen.max) == (4, 2.5, 2.5, 4.0)
    assert (seen.p95, seen.p99) == pytest.approx((3.85, 3.97))


def test_waits_are_listed_by_prompt_size() -> None:
    prompt_tokens = list(range(100))
    waits_s = [1.0 if tokens < 50 else 2.0 if tokens < 90 else 3.0 if tokens < 99 else 4.0 for tokens in prompt_tokens]
    assert report.wait_p99_by_size(waits_s[::-1], prompt_tokens[::-1]) == (1.0, 2.0, 3.0, 4.0)
