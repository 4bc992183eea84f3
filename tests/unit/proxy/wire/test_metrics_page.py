"""What the router reads of the metrics of an engine."""

import pytest

from balanceroute.proxy.wire.metrics_page import of_worker, read_samples

TEXT = b"""# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="7",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 40.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 2.0
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
            "waiting_for_capacity": 1.0,
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


@pytest.mark.parametrize(("label", "expected"), [("True", 1.0), ("False", 0.0), (None, None)])
def test_the_state_and_counters_of_prefix_caching_are_read_when_present(
    label: str | None, expected: float | None
) -> None:
    config = "" if label is None else f',enable_prefix_caching="{label}"'
    text = (
        f'vllm:cache_config_info{{block_size="16"{config},engine="0",num_gpu_blocks="10"}} 1.0\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 862.0\n'
        'vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 256.0\n'
    )
    samples = read_samples(text.encode())["0"]
    assert samples.get("prefix_caching") == expected
    assert (samples["prefix_cache_queries_total"], samples["prefix_cache_hits_total"]) == (862.0, 256.0)


@pytest.mark.parametrize(
    ("drafts", "accepted", "tokens_per_step"),
    [("400.0", "600.0", 2.5), ("0.0", "0.0", None), ("1.0", "1e9", None), ("4.0", "NaN", 1.0), ("-4.0", "6.0", None)],
    ids=["drafts", "none yet", "too many", "no number", "negative"],
)
def test_tokens_per_step_are_read_from_draft_counters(
    drafts: str, accepted: str, tokens_per_step: float | None
) -> None:
    text = (
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1200.0\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 300.0\n'
    )
    samples = read_samples(text.encode()).get("0", {})
    assert samples == ({} if tokens_per_step is None else {"tokens_per_step": tokens_per_step})


def test_an_external_rank_s_only_engine_is_its_own_whatever_its_number() -> None:
    assert of_worker({"5": {"kv_cache_usage_perc": 0.1}}, 0) == {"kv_cache_usage_perc": 0.1}


def test_the_size_of_a_block_is_that_of_the_kv_cache_and_not_of_a_state_beside_it() -> None:
    """As vLLM tells it of models that have both attention and Mamba layers."""
    labels = b'block_size="16",effective_attention_block_size="528",engine="0",mamba_block_size="262144"'
    samples = read_samples(b'vllm:cache_config_info{%s,num_gpu_blocks="100"} 1.0\n' % labels)
    assert samples["0"] == {"kv_block_tokens": 16, "kv_capacity_tokens": 1600}


@pytest.mark.parametrize("labels", [b'model_name="a}b",engine="1"', b'search_engine="x", engine="1"'])
def test_a_sample_is_read_whatever_its_other_labels_are(labels: bytes) -> None:
    assert read_samples(b"vllm:kv_cache_usage_perc{%s}  0.5\n" % labels) == {"1": {"kv_cache_usage_perc": 0.5}}


def test_ranks_of_a_node_of_hybrid_load_balancing_are_counted_within_it_and_labelled_over_all_nodes() -> None:
    samples = {engine: {"num_requests_running": float(engine)} for engine in ("10", "8", "11", "9")}
    assert [of_worker(samples, rank) for rank in range(4)] == [samples[engine] for engine in ("8", "9", "10", "11")]
    assert of_worker(samples, 4) is None and of_worker(samples, 8) is None
    overlapping = {engine: {"num_requests_running": float(engine)} for engine in ("1", "2")}
    assert [of_worker(overlapping, rank) for rank in range(2)] == [overlapping["1"], overlapping["2"]]


def test_engines_with_labels_that_are_no_ranks_belong_to_no_rank() -> None:
    assert of_worker({"a": {"num_requests_running": 1.0}, "9" * 5000: {"num_requests_running": 2.0}}, 0) is None


def test_a_page_with_too_many_engines_is_read_only_in_part() -> None:
    line = b'vllm:num_requests_running{engine="%d"} 1.0\n'
    assert 1000 < len(read_samples(b"".join(line % engine for engine in range(50_000)))) < 2000


def test_oversized_samples_are_not_read() -> None:
    labels = b"," * 2**20
    page = b'vllm:kv_cache_usage_perc{%b,engine="0"} 0.5\nvllm:num_requests_running{engine="0"} 1.0\n' % labels
    assert read_samples(page) == {"0": {"num_requests_running": 1.0}}


def test_the_last_sample_of_a_page_without_a_last_line_end_is_whole() -> None:
    assert read_samples(b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 25') == {
        "0": {"num_requests_running": 1.0},
        "1": {"num_requests_running": 25.0},
    }
