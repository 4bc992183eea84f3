"""Requests made of a client's request: one per choice, the rest of an interrupted one, and the same one changed.

Each is an ordinary `ClientRequest`, so workers' bodies are made of it like those of any other.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.fields import as_integer, integer
from balanceroute.proxy.wire.prompts import batch_of, embeds_tokens

MIN_SEED: Final = -(2**63)  # vLLM's bounds of `seed`
MAX_SEED: Final = 2**63 - 1
NO_SEED: Final = -1  # to vLLM the same as none
_TRUNCATE: Final = "truncate_prompt_tokens"
CACHE_SALT: Final = "cache_salt"
_DONE_BY_IDS: Final = frozenset((_TRUNCATE, "suffix"))  # already applied to the prompt's ids


def with_priority(request: ClientRequest, priority: int | None) -> ClientRequest:
    """The request with a header's priority; None: unchanged."""
    if priority is None or priority == request.priority:
        return request
    return replace(request, rest=request.rest | {"priority": priority}, priority=priority)


def split(request: ClientRequest) -> list[ClientRequest]:
    """One single-prompt, single-answer request per choice, in the order of the choices' indices.

    Choices of one prompt differ in their seed exactly as vLLM's own children of an `n` request do (seed + i).

    Raises: InvalidRequest: the seed is out of vLLM's range, or would get there.
    """
    if request.single:
        return [request]
    seed = request.rest.get("seed")
    if seed is not None and type(seed) is not int:
        seed = integer(request.rest, "seed", least=None)  # engines also read "5"; here it must be an integer to add to
    if seed is not None and not MIN_SEED <= seed <= MAX_SEED - (request.n - 1):
        raise InvalidRequest(f"seed must be from {MIN_SEED} to {MAX_SEED} for every choice.", param="seed")
    parts = []
    for rest, prompt_json, tokens in _prompts_of(request):
        for k in range(request.n):
            own = {name: value for name, value in rest.items() if name != "n"}
            if seed is not None and seed != NO_SEED:
                own["seed"] = seed + k
            parts.append(
                replace(request, rest=own, prompt_json=prompt_json, prompt_tokens=max(1, tokens), n=1, prompts=1)
            )
    return parts


def _prompts_of(request: ClientRequest) -> list[tuple[dict[str, Any], bytes, int]]:
    """For each prompt: the body's other fields, the prompt as JSON, its tokens."""
    rest = request.rest
    if request.endpoint == "completions":
        embeds = rest.get("prompt_embeds")
        if isinstance(embeds, list):
            return [(rest | {"prompt_embeds": part}, b"", embeds_tokens(part)) for part in embeds]
        batch = [] if embeds else batch_of(request.prompt_json)
        if batch:
            return [(rest, prompt_json, tokens) for prompt_json, tokens in batch]
    return [(rest, request.prompt_json, request.prompt_tokens)]


def resume(request: ClientRequest, prompt_ids: Sequence[int], generated: Sequence[int]) -> ClientRequest:
    """The request that continues a recomputed or lost one.

    A completion sends all ids as its prompt. A chat keeps its messages, which tools and parsers need, and hands the ids
    over in `kv_transfer_params`.

    Args: request: the client's original. prompt_ids: of its own prompt. generated: all ids of the answer so far, over
    all workers that took part in it.

    Raises: ValueError: nothing is left to generate; the caller ends the answer with "length" instead.
    """
    limit = request.effective_limit
    left = None if limit is None else limit - len(generated)
    if left is not None and left < 1:
        raise ValueError(f"the limit of {limit} tokens is used up")
    ids = orjson.dumps([*prompt_ids, *generated])
    rest = {name: value for name, value in request.rest.items() if name not in _DONE_BY_IDS}
    limit_field = request.limit_field
    if left is not None:
        limit_field = limit_field or "max_tokens"
        rest[limit_field] = left
        if limit_field == "max_completion_tokens":
            rest.pop("max_tokens", None)  # it still has the whole limit; workers ignore it beside the other field
    min_tokens = max(0, request.min_tokens - len(generated))
    if "min_tokens" in rest:
        rest["min_tokens"] = min_tokens
    completions = request.endpoint == "completions"
    return replace(
        request,
        rest=rest,
        limit_field=limit_field,
        limit=left,
        min_tokens=min_tokens,
        prompt_tokens=len(prompt_ids) + len(generated),
        prompt_wishes=None,
        prompt_json=ids if completions else request.prompt_json,
        resume_ids=b"" if completions else ids,
    )


def cut_alike(request: ClientRequest, prompt_tokens: int | None) -> ClientRequest:
    """The request with a negative `truncate_prompt_tokens` replaced by `prompt_tokens`, or removed (None).

    A negative value means "as many as fit", in some engines "as fit beside `max_tokens`", which the router sets to 1
    for a prefiller. So prefiller and decoder would cut the prompt differently, and the decoder would pull the wrong KV.
    """
    if (as_integer(request.rest.get(_TRUNCATE)) or 0) >= 0:
        return request
    rest = {name: value for name, value in request.rest.items() if name != _TRUNCATE}
    if prompt_tokens is not None:
        rest[_TRUNCATE] = prompt_tokens
    return replace(request, rest=rest)


def kept_apart(request: ClientRequest) -> ClientRequest:
    """The request with a unique cache salt: no prefix cache shares its KV with another request, in either direction.

    For a pull that may come too late: if the prefiller has given the blocks to another request, the decoder would cache
    that one's KV under this prompt.
    """
    return replace(request, rest=request.rest | {CACHE_SALT: secrets.token_hex(8)})
