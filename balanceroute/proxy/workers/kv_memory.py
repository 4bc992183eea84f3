"""How many KV tokens fit a decode worker, counted as the ledger counts them.

The ledger counts every token of every request. The engine may hold less: prompts that begin alike share their blocks,
and some layers keep only a window. So the size that it tells is the least that fits, and where more of it is free than
the ledger leaves, what is free counts. Not while requests wait there for memory: these are in the ledger and have none.
"""

from collections.abc import Mapping


def kv_capacity_tokens(samples: Mapping[str, float], load_tokens: int, ahead: int) -> int:
    """The load at which nothing more fits; 0: not known. Reads `kv_capacity_tokens`, `kv_cache_usage_perc` and
    `num_requests_waiting`.

    Args: load_tokens: what the ledger has there, whoever sent it. ahead: requests that may wait there for a slot.
    """
    capacity = samples.get("kv_capacity_tokens", 0.0)
    usage = samples.get("kv_cache_usage_perc")
    if capacity and usage is not None and samples.get("num_requests_waiting", 0.0) <= ahead:
        capacity = max(capacity, load_tokens + capacity * (1.0 - usage))
    return int(capacity)
