"""What a usage says beside its three counts.

Of the prompt only its prefiller knows: a decoder counts pulled KV as cached, and next to nothing as written to a cache.
"""

from collections.abc import Iterable
from typing import Any, Final

_OF_PREFILLERS: Final = "created_cache_tokens"

Details = dict[str, Any]


def prompt_details_of(usage: Details) -> Details | None:
    """What a prefiller's checked usage says of the prompt; None if nothing."""
    details = usage.get("prompt_tokens_details")
    told = {name: value for name, value in (details or {}).items() if value is not None}
    return told or None


def put_prompt_details(usage: Details, told: Details | None) -> bool:
    """Have a decoder's usage say what the prefiller `told` of the prompt; returns whether that has changed it."""
    details = usage.get("prompt_tokens_details")
    known = details if isinstance(details, dict) else {}
    # null is what engines say of a cache that they don't count, and their clients look for the name
    wanted = {name: value for name, value in known.items() if name != _OF_PREFILLERS or value is None} | (told or {})
    if known.get("cached_tokens") and "cached_tokens" not in (told or {}):
        wanted["cached_tokens"] = 0
    if wanted == known:
        return False
    usage["prompt_tokens_details"] = wanted
    return True


def summed(details: Iterable[object]) -> Details:
    """The details of several usages as one, each figure summed, such as reasoning tokens or those of images."""
    total: Details = {}
    for each in details:
        for name, value in (each if isinstance(each, dict) else {}).items():
            if isinstance(value, dict):
                total[name] = summed((total.get(name), value))
            elif isinstance(value, int):
                total[name] = total.get(name, 0) + value
    return total
