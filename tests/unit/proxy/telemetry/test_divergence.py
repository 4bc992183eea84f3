"""When worker and ledger disagree for long, and only then."""

import pytest

from balanceroute.core.types import Role
from balanceroute.proxy.telemetry.divergence import WINDOW, Divergence
from balanceroute.proxy.workers.metrics_poller import of_worker, read_samples


def test_a_difference_counts_once_every_poll_of_the_window_had_it() -> None:
    divergence, role = Divergence(), Role.DECODE
    for poll in range(WINDOW):
        assert divergence.lasting("w") == 0
        divergence.see("w", role, {"num_requests_running": 5.0 + poll}, held=2, orphans=0)
    assert divergence.lasting("w") == 3


def test_one_poll_that_agrees_is_enough_to_be_at_peace() -> None:
    divergence, role = Divergence(), Role.DECODE
    for poll in range(3 * WINDOW):
        divergence.see("w", role, {"num_requests_running": 2.0 if poll % WINDOW == 3 else 9.0}, held=2, orphans=0)
        assert divergence.lasting("w") == 0


def test_a_decoder_that_reports_less_than_we_have_there_is_no_finding() -> None:
    divergence, role = Divergence(), Role.DECODE
    for _ in range(WINDOW):
        divergence.see("w", role, {"num_requests_running": 0.0}, held=4, orphans=0)
    assert divergence.lasting("w") == 0


def test_a_prefiller_s_usage_counts_only_when_nothing_of_ours_explains_it() -> None:
    divergence, role = Divergence(), Role.PREFILL
    for held, orphans in ((1, 0), (0, 1)):
        for _ in range(WINDOW):
            divergence.see("w", role, {"kv_cache_usage_perc": 0.4}, held=held, orphans=orphans)
        assert divergence.lasting("w") == 0
    for _ in range(WINDOW):
        divergence.see("w", role, {"kv_cache_usage_perc": 0.4}, held=0, orphans=0)
    assert divergence.lasting("w") == 0.4
    divergence.forget("w")
    assert divergence.workers() == []


TEXT = b"""# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="7",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 40.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc_other{engine="0"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="10",swap_space="4"} 1.0
vllm:cache_config_info{block_size="16",engine="7",kv_cache_size_tokens="4000",num_gpu_blocks="None"} 1.0
"""


def test_samples_are_read_per_engine() -> None:
    samples = read_samples(TEXT)
    assert samples == {
        "0": {
            "kv_cache_usage_perc": 0.25,
            "num_requests_running": 40.0,
            "kv_block_tokens": 128,
            "kv_capacity_tokens": 1280,
        },
        "7": {"kv_cache_usage_perc": 0.5, "kv_block_tokens": 16, "kv_capacity_tokens": 4000},
    }
    assert of_worker(samples, 7) == samples["7"]
    assert of_worker(samples, 3) is None
    whole = of_worker(samples, None)
    assert whole is not None and whole["kv_cache_usage_perc"] == 0.5
    assert of_worker({}, None) is None


@pytest.mark.parametrize(("label", "told"), [("True", 1.0), ("False", 0.0), (None, None)])
def test_the_state_of_prefix_caching_and_its_counters_are_read_where_they_are_told(
    label: str | None, told: float | None
) -> None:
    config = "" if label is None else f',enable_prefix_caching="{label}"'
    text = (
        f'vllm:cache_config_info{{block_size="16"{config},engine="0",num_gpu_blocks="10"}} 1.0\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 862.0\n'
        'vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 256.0\n'
    )
    samples = read_samples(text.encode())["0"]
    assert samples.get("prefix_caching") == told
    assert (samples["prefix_cache_queries_total"], samples["prefix_cache_hits_total"]) == (862.0, 256.0)


def test_an_external_rank_s_only_engine_is_its_own_whatever_its_number() -> None:
    assert of_worker({"5": {"kv_cache_usage_perc": 0.1}}, 0) == {"kv_cache_usage_perc": 0.1}
