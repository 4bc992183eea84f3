"""Workloads with everything drawn."""

import numpy as np
import pytest

from balanceroute.traces.drawn import MAX_ANSWER, MAX_PROMPT, RARE_FROM, drawn_workload

NUMBERS = range(40)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_trace_has_the_means_that_were_drawn_and_is_the_same_again(number: int) -> None:
    workload = drawn_workload(number)
    trace = workload.trace(4000)
    assert len(trace) == 4000
    assert (np.diff(trace.arrival_s) >= 0).all()
    for tokens, mean, most in (
        (trace.prompt_tokens, workload.prompt_tokens, MAX_PROMPT),
        (trace.output_tokens, workload.answer_tokens, MAX_ANSWER),
    ):
        assert tokens.min() >= 1
        assert tokens.max() <= most
        assert tokens.mean() == pytest.approx(mean, rel=0.02)
    again = drawn_workload(number).trace(4000)
    assert (again.prompt_tokens == trace.prompt_tokens).all()
    assert (again.arrival_s == trace.arrival_s).all()
    assert (drawn_workload(number).trace(4000, seed=1).prompt_tokens != trace.prompt_tokens).any()


def test_the_workloads_differ_in_every_respect() -> None:
    drawn = [drawn_workload(number) for number in NUMBERS]
    for name, least in (
        ("prompts", 4), ("prompt_tokens", 40), ("answer_tokens", 40), ("answers_follow", 2), ("wave_requests", 3),
    ):  # fmt: skip
        assert len({getattr(each, name) for each in drawn}) >= least, name
    assert any(each.answer_sigma == 0.0 for each in drawn)
    assert any(each.answer_sigma > 0.0 for each in drawn)
    assert len({str(each) for each in drawn}) == len(drawn)


@pytest.mark.parametrize("number", range(RARE_FROM, RARE_FROM + 20))
def test_rare_sizes_are_few_and_much_larger_than_the_others(number: int) -> None:
    prompts = drawn_workload(number).trace(20_000).prompt_tokens
    share = (prompts > 15 * np.median(prompts)).mean()
    assert 0.0005 < share < 0.015


def test_answer_lengths_and_arrival_waves_follow_the_drawn_workload() -> None:
    for number in NUMBERS:
        workload = drawn_workload(number)
        trace = workload.trace(6000)
        large = trace.prompt_tokens > np.median(trace.prompt_tokens)
        ratio = trace.output_tokens[large].mean() / trace.output_tokens[~large].mean()
        assert bool(ratio > 2.0) is workload.answers_follow, workload
        gaps = np.diff(trace.arrival_s)
        period = workload.wave_requests or 100
        slow = (np.arange(1, len(trace)) // period) % 2 == 1
        assert bool(gaps[slow].mean() > 2.0 * gaps[~slow].mean()) is bool(workload.wave_requests), workload
