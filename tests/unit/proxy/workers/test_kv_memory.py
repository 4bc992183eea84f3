"""How much fits a decode worker, by its reports and our ledger."""

import pytest

from balanceroute.proxy.workers.kv_memory import kv_capacity_tokens

SIZE = {"kv_capacity_tokens": 1_000.0}


@pytest.mark.parametrize(
    ("samples", "load_tokens", "fits"),
    [
        ({}, 300, 0),
        ({"kv_cache_usage_perc": 0.3}, 300, 0),
        (SIZE, 300, 1_000),
        (SIZE | {"kv_cache_usage_perc": 0.3}, 300, 1_000),
        (SIZE | {"kv_cache_usage_perc": 0.9}, 300, 1_000),
        (SIZE | {"kv_cache_usage_perc": 0.3}, 900, 1_600),
        (SIZE | {"kv_cache_usage_perc": 1.0}, 1_400, 1_400),
        (SIZE | {"kv_cache_usage_perc": 0.3, "num_requests_waiting": 2.0}, 900, 1_600),
        (SIZE | {"kv_cache_usage_perc": 0.3, "num_requests_waiting": 3.0}, 900, 1_000),
    ],
    ids=[
        "nothing is told",
        "no size",
        "no usage",
        "as counted",
        "more is used than we know of",
        "prompts share blocks",
        "they share blocks and nothing is free",
        "some wait for a slot",
        "some wait for memory",
    ],
)
def test_kv_capacity_is_the_reported_size_or_free_memory_plus_our_load(
    samples: dict[str, float], load_tokens: int, fits: int
) -> None:
    assert kv_capacity_tokens(samples, load_tokens, ahead=2) == fits
