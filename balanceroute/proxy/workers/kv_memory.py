"""A decode worker's KV capacity, in tokens as the ledger counts them.

The ledger counts every token of every request. The engine may use less memory: equal beginnings share blocks, and some
layers keep only a window. So the reported size is the least capacity. If more of it is free than the ledger's load
leaves, the free part counts, except while requests wait there for memory: they are in the ledger, but have none.
"""

from collections.abc import Mapping


def kv_capacity_tokens(samples: Mapping[str, float], load_tokens: int, ahead: int) -> int:
    """The load at which nothing more fits; 0: unknown.

    Reads `kv_capacity_tokens`, `kv_cache_usage_perc` and `num_requests_waiting`.

    Args: load_tokens: the ledger's load there, with foreign load. ahead: requests that may wait there for a slot.
    """
    capacity = samples.get("kv_capacity_tokens", 0.0)
    usage = samples.get("kv_cache_usage_perc")
    if capacity and usage is not None and samples.get("num_requests_waiting", 0.0) <= ahead:
        capacity = max(capacity, load_tokens + capacity * (1.0 - usage))
    return int(capacity)
