"""The simulated prefill tier with prefix caches."""

from dataclasses import replace

import numpy as np
import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.errors import InputError
from balanceroute.simulator import PrefillTier, Replay, Setting, replay_prefill
from balanceroute.traces import Trace, generate_conversations


def a_trace(rows: list[tuple[float, int, tuple[int, ...]]]) -> Trace:
    arrivals, prompts, prefix = zip(*rows, strict=True)
    n = len(rows)
    return Trace(np.array(arrivals, dtype=float), np.array(prompts), np.full(n, 2), np.array([""] * n), prefix)


def test_a_prefiller_computes_one_prompt_at_a_time_and_only_what_it_has_not_cached() -> None:
    tier = PrefillTier(1, 100.0, 10_240)
    assert tier.compute("p0", (1,), 600, 1.0) == (7.0, 0)
    assert tier.compute("p0", (1, 2), 1100, 2.0) == (7.0 + 5.88, 512)
    assert tier.compute("p0", (1, 2), 1024, 20.0) == (20.01, 1023)  # one token at least
    assert tier.computed_ratio == pytest.approx((600 + 588 + 1) / (600 + 1100 + 1024))


def test_the_second_turn_waits_for_less_and_the_full_blocks_alone_are_cached() -> None:
    trace = a_trace([(0.0, 1200, (1, 2, 3)), (100.0, 1300, (1, 2, 3))])  # the third block is not full in the first
    figures = replay_prefill(trace, "prefix_affinity", 2, 100.0, 10_240)
    assert figures.computed_ratio == pytest.approx((1200 + 1300 - 1024) / 2500)
    assert figures.latency_p99_s == pytest.approx(12.0, rel=0.02)


def test_the_router_predicts_the_caches_of_engines_without_other_clients() -> None:
    figures = replay_prefill(generate_conversations(600), "prefix_affinity", 4, 6000.0, 200_000)
    assert figures.hit_ratio > 0.1
    assert figures.predicted_hit_ratio == pytest.approx(figures.hit_ratio, rel=0.01)


def test_affinity_computes_less_and_answers_sooner_than_least_tokens() -> None:
    trace = generate_conversations(1500)
    least, affinity = (
        replay_prefill(trace, policy, 4, 6000.0, 500_000) for policy in ("least_tokens", "prefix_affinity")
    )
    assert affinity.computed_ratio < 0.9 * least.computed_ratio
    assert affinity.latency_p50_s < least.latency_p50_s
    assert affinity.latency_p99_s < 1.05 * least.latency_p99_s


def test_without_caches_affinity_is_least_tokens() -> None:
    trace = generate_conversations(300)
    assert replay_prefill(trace, "prefix_affinity", 4, 6000.0, 0) == replay_prefill(trace, "least_tokens", 4, 6000.0, 0)


def test_a_trace_without_prefixes_is_refused() -> None:
    with pytest.raises(InputError, match="prefix_blocks"):
        replay_prefill(replace(generate_conversations(5), prefix=()), "least_tokens", 1, 1.0, 0)


def test_a_replay_through_decode_too_tells_latency_and_the_share_that_was_computed() -> None:
    setting = Setting(
        n_workers=2, slots=8, prefillers=2, prefill_tokens_per_s=3000.0, prefill_policy="prefix_affinity",
        prefix_cache_tokens=300_000,
    )  # fmt: skip
    trace = generate_conversations(60, rate_per_s=1.0)
    figures = {
        cache: Replay(
            trace, PolicySettings(policy="br_0"), replace(setting, prefix_cache_tokens=cache), check_invariants=True
        ).run().figures
        for cache in (0, 300_000)
    }  # fmt: skip
    assert figures[0].prefill_computed_ratio == 1.0
    assert figures[300_000].prefill_computed_ratio < 0.8
    assert 0 < figures[300_000].prefill_p50_s < figures[0].prefill_p50_s


def test_an_unknown_prefill_policy_is_named() -> None:
    with pytest.raises(InputError, match="'psychic': one of least_tokens, prefix_affinity, round_robin"):
        Setting(prefill_policy="psychic").checked()


@pytest.mark.parametrize("seed", [0, 1])
def test_conversations_grow_by_turns_and_equal_seeds_give_equal_ones(seed: int) -> None:
    trace = generate_conversations(500, seed=seed)
    again = generate_conversations(500, seed=seed)
    assert trace.prefix == again.prefix and (trace.arrival_s == again.arrival_s).all()
    assert (np.diff(trace.arrival_s) >= 0).all() and trace.arrival_s[0] == 0
    assert all(len(trace.prefix[i]) == trace.prompt_tokens[i] // 512 for i in range(len(trace)))
    whole = {prefix for prefix in trace.prefix if prefix}
    grown = sum(any(prefix[:cut] in whole for cut in range(1, len(prefix))) for prefix in trace.prefix)
    assert grown > 200
