"""Makes all request bodies for workers.

    ClientRequest --probe_body()---> prefiller (one token, no stream, KV pinned)
                  --decode_body()--> decoder    (the client's wishes + the pulled KV)
                  --drain_body()---> decoder    (pull the KV, one token, thrown away)
                  --score_body()---> prefiller  (the prompt's logprobs only)
                  --push_body()----> prefiller  (layerwise: KV goes to a waiting decoder)

The prompt is the only large part. Its JSON is spliced into each body unchanged (`orjson.Fragment`), so a 1 MB prompt
costs one copy per body. To splice changed fields into the client's bytes instead would leave duplicate keys, about
which parsers disagree.

A prefiller's `kv_transfer_params` are spliced unchanged into one decode or drain body; the caller must use them only
once.

All bodies are made in this file, because a field that one of them leaves out another one must have.
"""

from hashlib import sha256
from typing import Any, Final

import orjson

from balanceroute.proxy.wire.client_request import FOLLOWED_ABOVE_TOKENS, ClientRequest
from balanceroute.proxy.wire.derived_requests import CACHE_SALT, kept_apart
from balanceroute.proxy.wire.fields import as_integer

PROBE_KV_PARAMS: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PROBE_KV_PARAMS: Final = orjson.dumps(PROBE_KV_PARAMS)
# keys of kv_transfer_params: the first for vLLM >= 0.27, the second for vllm-ascend with its recompute patch
RESUME_IDS_KEYS: Final = (b"prompt_token_ids", b"_vllm_ascend_recompute_token_ids")
# Stop ids make no difference to one token, and with `min_tokens` 1 they may end an engine: the second model runner of
# vLLM 0.32 at the 129th
_NOT_FOR_ONE_TOKEN: Final = frozenset(("stream_options", "n", "best_of", "stop_token_ids"))
_LOGPROBS: Final = frozenset(("logprobs", "top_logprobs", "logprob_token_ids"))


def probe_body(request: ClientRequest) -> bytes:
    """The body for the prefiller: one token, no stream, the KV pinned for a remote decode.

    `min_tokens` 1 prevents that the one token ends the text, after which the engine pins nothing. Logprobs are asked
    for as the client does: settings that engines refuse are refused before the prompt is computed.
    """
    return _dump(request, _prefill_fields(request), _with_resume_ids(request, _PROBE_KV_PARAMS))


def push_body(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The body for a prefiller that pushes its KV: one token, and the decode worker's parameters, which say where its
    blocks are.
    """
    return _dump(request, _prefill_fields(request), _with_resume_ids(request, kv_transfer_params))


def score_body(request: ClientRequest) -> bytes:
    """The body for a prefiller that alone answers a request for its prompt's scores: the client's, unstreamed."""
    rest = {name: value for name, value in request.rest.items() if name not in ("stream", "stream_options")}
    return _dump(request, rest | _wishes_of(request) | {"max_tokens": 0}, None)


def decode_body(request: ClientRequest, kv_transfer_params: bytes, cache_salt: str = "") -> bytes:
    """The body for the decode worker: the client's fields, the KV to pull, and token ids for an exact count.

    `cache_salt`: this worker's, in addition to the client's own; both together may be longer than engines take (vLLM
    from 0.32: 128 characters), so the two become one of fixed length.
    """
    rest = dict(request.rest)
    rest["return_token_ids"] = True
    if cache_salt:
        own = rest.get(CACHE_SALT)
        rest[CACHE_SALT] = sha256(f"{own} {cache_salt}".encode()).hexdigest() if own else cache_salt
    if request.assembled:
        rest["stream"] = True
        rest["stream_options"] = {"include_usage": True}
    if request.hides_reasoning:
        rest["include_reasoning"] = True
    if "stream_interval" in rest and (as_integer(rest["stream_interval"]) or 0) > FOLLOWED_ABOVE_TOKENS:
        rest["stream_interval"] = FOLLOWED_ABOVE_TOKENS  # a worker that is silent for longer counts as lost
    if request.counted_by_usage:
        options = rest.get("stream_options") or {}
        rest["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    return _dump(request, rest, _with_resume_ids(request, kv_transfer_params))


def drain_body(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The body that makes a decoder pull KV that no request needs, so that the prefiller frees it.

    The KV may be gone already: a decoder that refuses a request (vLLM from 0.23) has its prefiller free the KV. So the
    pulled blocks get a unique cache salt (`kept_apart`).
    """
    rest = _one_token(kept_apart(request), min_tokens=0)
    for name in _LOGPROBS.intersection(rest):
        del rest[name]
    return _dump(request, rest, _with_resume_ids(request, kv_transfer_params))


def _prefill_fields(request: ClientRequest) -> dict[str, Any]:
    """The fields of a prefill: one token, and the client's `PromptWishes`.

    With `echo`, `max_tokens` 0 makes an engine answer with the prompt alone (its text, its tokens and their logprobs).
    It generates one token all the same, so the KV is pinned. `return_token_ids` would leave the text out, and
    `logprob_token_ids` be refused.
    """
    rest = _one_token(request, min_tokens=1)
    wishes = request.prompt_wishes
    if wishes is not None:
        rest |= _wishes_of(request)
        if wishes.echo:
            rest |= {"max_tokens": 0, "return_token_ids": request.return_token_ids}
            rest.pop("logprob_token_ids", None)
    return rest


def _wishes_of(request: ClientRequest) -> dict[str, Any]:
    wishes = request.prompt_wishes
    assert wishes is not None
    asked = {"prompt_logprobs": wishes.prompt_logprobs}
    if wishes.echo:
        asked |= {"echo": True, "logprobs": wishes.logprobs}
    return {name: value for name, value in asked.items() if value is not None}


def _one_token(request: ClientRequest, *, min_tokens: int) -> dict[str, Any]:
    rest = dict(request.rest)
    for name in _NOT_FOR_ONE_TOKEN.intersection(rest):
        del rest[name]
    rest["stream"] = False
    rest["max_tokens"] = 1
    rest["min_tokens"] = min_tokens
    if "max_completion_tokens" in rest:
        rest["max_completion_tokens"] = 1
    rest["return_token_ids"] = True  # a resume starts from the prompt's ids
    return rest


def _with_resume_ids(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The KV parameters, as JSON, with the ids from which a resumed chat continues."""
    if not request.resume_ids:
        return kv_transfer_params
    head = kv_transfer_params.rstrip()[:-1]
    comma = b"" if head.rstrip().endswith(b"{") else b","
    ids = b",".join(b'"%b":%b' % (key, request.resume_ids) for key in RESUME_IDS_KEYS)
    return b"".join((head, comma, ids, b"}"))


def _dump(request: ClientRequest, rest: dict[str, Any], kv_transfer_params: bytes | None) -> bytes:
    if request.prompt_json:
        name = "prompt" if request.endpoint == "completions" else "messages"
        rest[name] = orjson.Fragment(request.prompt_json)
    if kv_transfer_params is not None:
        rest["kv_transfer_params"] = orjson.Fragment(kv_transfer_params)
    return orjson.dumps(rest)
