"""The details of a usage, beside its three counts.

Details of the prompt come from the prefiller: a decoder counts pulled KV as cached.
"""

from collections.abc import Iterable
from typing import Any, Final

from balanceroute.proxy.wire.bounds import UNCOUNTED

_OF_PREFILLERS: Final = "created_cache_tokens"

Details = dict[str, Any]


def prompt_details_of(usage: Details) -> Details | None:
    """The details of the prompt in a prefiller's checked usage; None: there are none."""
    details = usage.get("prompt_tokens_details")
    present = {name: value for name, value in (details or {}).items() if value is not None and value != UNCOUNTED}
    return present or None


def put_prompt_details(usage: Details, added: Details | None) -> bool:
    """Put the prefiller's details of the prompt (`added`) into a decoder's usage; returns whether that changed it."""
    details = usage.get("prompt_tokens_details")
    known = details if isinstance(details, dict) else {}
    # engines send null for a cache that they don't count, and their clients expect the field
    wanted = {name: value for name, value in known.items() if name != _OF_PREFILLERS or value is None} | (added or {})
    if known.get("cached_tokens") and "cached_tokens" not in (added or {}):
        wanted["cached_tokens"] = 0
    if wanted == known:
        return False
    usage["prompt_tokens_details"] = wanted
    return True


def summed(details: Iterable[object]) -> Details:
    """The details of several usages, each figure summed (such as reasoning tokens)."""
    total: Details = {}
    for each in details:
        for name, value in (each if isinstance(each, dict) else {}).items():
            if isinstance(value, dict):
                total[name] = summed((total.get(name), value))
            elif isinstance(value, int):
                total[name] = total.get(name, 0) + value
    return total
