"""Request bodies: what a client asked for, and what each worker is asked for in its name.

One client body becomes up to five bodies on the wire:

    client body --parse()--> ClientRequest --probe_body()---> prefiller (one token, no stream, KV pinned)
                                           --decode_body()--> decoder    (the client's wishes + the pulled KV)
                                           --drain_body()---> decoder    (pull the KV, one token, thrown away)
                                           --score_body()---> prefiller  (nothing but what the prompt is worth)
                                           --push_body()----> prefiller  (layerwise: KV goes to a waiting decoder)
                             resume() ---> ClientRequest                 (prompt + generated ids, lower limit)

A resumed request is an ordinary `ClientRequest` again, so its probe and decode bodies need no code of their
own.

The prompt is the only large part. It is parsed once and serialised once (`prompt_json`); every body splices
those bytes in as they are (`orjson.Fragment`), so a 1 MB prompt costs one copy per body and nothing else.
The parsed prompt is dropped at once: a list of token ids is several times larger in Python than on the
wire. Splicing into the client's own bytes would save that one dump, but leaves duplicate keys wherever the
client already sent a field that has to change, and parsers disagree about those.

`kv_transfer_params` (and what else could smuggle them in) never pass from a client to a worker. What a
prefiller returned is spliced whole into exactly one decode or drain body; using it once is the caller's
duty.

A non-stream client is served from a stream as well (`ClientRequest.assembled`), because only a stream tells
the router how far a request has come. Two kinds go through unstreamed: bodies with a field whose answer
`answers.py` cannot rebuild, and answers of at most `FOLLOWED_ABOVE_TOKENS`, whose whole growth is less than a
KV block or two: their worker's load is off by no more than that, until they end and are counted.

All bodies are made in this one file, because what one of them leaves out another one must have: a field that is moved
between probe and decode is moved in one place.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import orjson

from balanceroute.errors import BadUpstreamReply, InvalidRequest, NotJson
from balanceroute.proxy.wire.bounds import ABORT, MAX_PARAMS_BYTES, aborted, checked_choice, checked_usage, token_count
from balanceroute.proxy.wire.fields import as_boolean, as_integer, boolean, checked, integer, kind
from balanceroute.proxy.wire.json_size import check_size
from balanceroute.proxy.wire.large_integers import with_large_integers
from balanceroute.proxy.wire.usage import prompt_details_of

Endpoint = Literal["completions", "chat"]
LimitField = Literal["max_tokens", "max_completion_tokens"]

DEFAULT_COMPLETION_LIMIT: Final = 16  # vLLM's default of max_tokens on completions; chat fills the context
FOLLOWED_ABOVE_TOKENS: Final = 64  # an event costs about 20 us of CPU, a whole short answer about 50
PROBE_KV_PARAMS: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PROBE_KV_PARAMS: Final = orjson.dumps(PROBE_KV_PARAMS)
# of kv_transfer_params: vLLM >= 0.27 looks for the first, a vllm-ascend with its recompute patch for the second
RESUME_IDS_KEYS: Final = (b"prompt_token_ids", b"_vllm_ascend_recompute_token_ids")

MAX_DEPTH: Final = 250  # orjson reads 1024 levels and writes 254
MIN_SEED: Final = -(2**63)  # vLLM's bounds of `seed`
MAX_SEED: Final = 2**63 - 1

_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id")
_CARRIERS: Final = frozenset((*_INTERNAL_FIELDS, "vllm_xargs"))
_NOT_FOR_ONE_TOKEN: Final = frozenset(
    ("stream_options", "n", "logprobs", "top_logprobs", "logprob_token_ids", "echo", "best_of")
)
_NESTED: Final = frozenset((dict, list))
_PROMPT_FIELDS: Final = frozenset(("echo", "prompt_logprobs"))
_TRUNCATE: Final = "truncate_prompt_tokens"
_SALT: Final = "cache_salt"
_IN_IDS: Final = frozenset((_TRUNCATE, "suffix", "echo"))  # the ids are what these made of the prompt; said already
# What `include_reasoning: false` also changes in an engine: a grammar then begins with the first token, and where a
# parser is set (which only the engine knows), ids and logprobs are told of no token.
_BESIDE_REASONING: Final = (
    *("logprobs", "return_token_ids", "tools", "tool_choice", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
)
_EMBEDDING_BYTES: Final = 4096  # of one token, on the wire: some KiB
# Fields whose effect on a streamed answer `answers.py` can turn into the non-stream answer without loss.
ASSEMBLED_FIELDS: Final = frozenset(
    """model prompt messages stream stream_options max_tokens max_completion_tokens min_tokens temperature
    top_p top_k min_p n stop stop_token_ids ignore_eos seed user priority presence_penalty frequency_penalty
    repetition_penalty length_penalty logit_bias logprobs top_logprobs skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens add_special_tokens include_stop_str_in_output
    bad_words allowed_token_ids logits_processors response_format structured_outputs guided_json
    guided_regex guided_choice guided_grammar tools tool_choice parallel_tool_calls reasoning_effort
    thinking_token_budget include_reasoning chat_template chat_template_kwargs add_generation_prompt
    continue_final_message documents mm_processor_kwargs media_io_kwargs cache_salt store metadata
    service_tier safety_identifier prompt_cache_key verbosity return_token_ids return_tokens_as_token_ids
    request_id vllm_xargs stream_interval""".split()
)


@dataclass(frozen=True, slots=True)
class PromptWishes:
    """What the client wants to have said about its prompt; only a prefiller, which computes the prompt, can say it.

    A decoder that pulls KV skips that computation: asked for a prompt's logprobs, today's engines die. So these
    fields are taken out of what workers get, and the prefiller's probe asks for them (`prompt_echo.py` merges them).
    `logprobs` is how many the client wants per token, of the prompt too when it is echoed.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(slots=True, init=False)
class ClientRequest:
    """What one client asked for, parsed once; nobody changes one, `replace` makes others.

    `prompt_json` is the prompt (completions) or the messages (chat) as JSON, equal for equal prompts, whatever the
    whitespace; the predictors hash it. `rest` is every other field that may reach a worker. `limit` is what the client
    wrote into `limit_field`, both None if it set none. `prompt_tokens` is exact for token ids,
    else an estimate of one token per 4 bytes of text.
    """

    endpoint: Endpoint
    rest: dict[str, Any]
    prompt_json: bytes
    prompt_tokens: int
    stream: bool
    assembled: bool  # a non-stream answer is to be built from a worker's stream (the module's theory)
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    n: int
    prompts: int
    messages: int  # of a chat
    limit_field: LimitField | None
    limit: int | None
    min_tokens: int
    model: str | None
    priority: int
    request_id: str | None
    prompt_wishes: PromptWishes | None
    scores_only: bool  # echo without an answer: a prefiller alone serves it
    resume_ids: bytes = field(repr=False)  # chat only: the ids to go on from, as a JSON list

    # a dataclass' own `__init__` stays Python where this is compiled, and would be a tenth of reading a request
    def __init__(
        self,
        endpoint: Endpoint,
        rest: dict[str, Any],
        prompt_json: bytes,
        prompt_tokens: int,
        stream: bool,
        assembled: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        return_token_ids: bool = False,
        n: int = 1,
        prompts: int = 1,
        messages: int = 0,
        limit_field: LimitField | None = None,
        limit: int | None = None,
        min_tokens: int = 0,
        model: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
        prompt_wishes: PromptWishes | None = None,
        scores_only: bool = False,
        resume_ids: bytes = b"",
    ) -> None:
        """The fields, in their order."""
        self.endpoint, self.rest, self.prompt_json, self.prompt_tokens = endpoint, rest, prompt_json, prompt_tokens
        self.stream, self.assembled = stream, assembled
        self.include_usage, self.continuous_usage = include_usage, continuous_usage
        self.return_token_ids, self.n, self.prompts, self.messages = return_token_ids, n, prompts, messages
        self.limit_field, self.limit, self.min_tokens = limit_field, limit, min_tokens
        self.model, self.priority, self.request_id = model, priority, request_id
        self.prompt_wishes, self.scores_only = prompt_wishes, scores_only
        self.resume_ids = resume_ids

    @property
    def path(self) -> str:
        """The route of the workers that serves this request."""
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    @property
    def effective_limit(self) -> int | None:
        """The most tokens that the request may generate; None is "as many as the context holds"."""
        if self.limit is None and self.endpoint == "completions":
            return DEFAULT_COMPLETION_LIMIT
        return self.limit

    @property
    def single(self) -> bool:
        """Whether this is one prompt with one answer, the only shape that a KV transfer can carry."""
        return self.n == 1 and self.prompts == 1

    @property
    def streams_upstream(self) -> bool:
        """Whether the decode worker is asked for a stream."""
        return self.stream or self.assembled

    @property
    def hides_reasoning(self) -> bool:
        """Whether the decode worker streams its reasoning though the client wants none, and it is taken out here.

        An engine that is to hide it is silent while it reasons, for minutes, and tells no token ids.
        """
        return self._without_reasoning and self.endpoint == "chat" and not any(map(self.rest.get, _BESIDE_REASONING))

    @property
    def counted_by_usage(self) -> bool:
        """Whether the decode worker is asked for usages that the client did not ask for.

        It hides its reasoning itself: it may be silent for long, and tell no token ids.
        """
        return self._without_reasoning and not self.hides_reasoning

    @property
    def _without_reasoning(self) -> bool:
        return "include_reasoning" in self.rest and (
            self.streams_upstream and as_boolean(self.rest["include_reasoning"]) is False
        )


@dataclass(slots=True)
class PrefillResult:
    """What a prefiller answered to a probe; `kv_transfer_params` is raw JSON, None if it pinned nothing.

    `prompt_details` is all that its usage says of the prompt, `cached_tokens` among it. `reply_id` is the answer's own
    `id`, whatever the worker put there.
    """

    kv_transfer_params: bytes | None
    prompt_tokens: int
    cached_tokens: int | None
    prompt_token_ids: "array[int] | None"
    reply_id: Any = None
    reply: dict[str, Any] | None = None  # the whole of it, where the client has `PromptWishes`
    prompt_details: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------- from the client


def parse(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Parse a client's body.

    Only what the router itself reads is checked, and what a decoder would refuse after the prefill has
    pinned KV (a limit below 1, `min_tokens` above it); the workers judge the rest.

    Raises: InvalidRequest: with the message and parameter of an OpenAI error.
    """
    return request_of(endpoint, _loaded(body))


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises: InvalidRequest: it is none, too large, or too deep to be written."""
    data = _loaded(body)
    check_depth(body, data)
    return data


def _loaded(body: bytes) -> dict[str, Any]:
    check_size(body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise NotJson(f"The body is not valid JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {kind(data)}.")
    return with_large_integers(body, data)


def request_of(endpoint: Endpoint, data: dict[str, Any]) -> ClientRequest:
    """The request of a body that has been read, and becomes part of it. Raises: InvalidRequest."""
    request_id = data.get("request_id")
    if not _CARRIERS.isdisjoint(data):
        _clean(data)
    if endpoint == "completions":
        (prompt_json, tokens, prompts), messages = _take_prompt(data), 0
    else:
        (prompt_json, tokens, messages), prompts = _take_messages(data), 1
    if not _NESTED.isdisjoint(map(type, data.values())):
        _as_json(data)  # refused now, before anybody has worked for it, if it can't be written again
    stream = "stream" in data and boolean(data, "stream")
    include_usage, continuous = _stream_options(data, stream) if "stream_options" in data else (False, False)
    assembled = not stream and ASSEMBLED_FIELDS.issuperset(data)
    wishes = None if _PROMPT_FIELDS.isdisjoint(data) else _prompt_wishes(endpoint, data, stream)
    scores_only = wishes is not None and wishes.echo and integer(data, "max_tokens", least=None) == 0
    limit_field, limit = (None, None) if scores_only else _limit(endpoint, data)
    min_tokens = (integer(data, "min_tokens", least=0) or 0) if "min_tokens" in data else 0
    if limit is not None and min_tokens > limit:
        raise InvalidRequest(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.",
            param="min_tokens",
        )
    if "use_beam_search" in data and boolean(data, "use_beam_search"):
        raise InvalidRequest(
            "use_beam_search cannot be served: its requests carry no KV transfer.", param="use_beam_search"
        )
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model must be a string, not {kind(model)}.", param="model")
    return ClientRequest(
        endpoint=endpoint,
        rest=data,
        prompt_json=prompt_json,
        prompt_tokens=tokens or 1,
        stream=stream,
        assembled=assembled and _followed(endpoint, limit),
        include_usage=include_usage,
        continuous_usage=continuous,
        return_token_ids="return_token_ids" in data and boolean(data, "return_token_ids"),
        n=(integer(data, "n", least=1) or 1) if "n" in data else 1,
        prompts=prompts,
        messages=messages,
        limit_field=limit_field,
        limit=limit,
        min_tokens=min_tokens,
        model=model,
        priority=(integer(data, "priority", least=None) or 0) if "priority" in data else 0,
        request_id=request_id if isinstance(request_id, str) else None,
        prompt_wishes=wishes,
        scores_only=scores_only,
    )


def with_priority(request: ClientRequest, priority: int | None) -> ClientRequest:
    """The request with the priority that a header says; None: it says none."""
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
        seed = integer(request.rest, "seed", least=None)  # "5", as the engines read it, so that it can be counted up
    if isinstance(seed, int) and not MIN_SEED <= seed <= MAX_SEED - (request.n - 1):
        raise InvalidRequest(f"seed must be from {MIN_SEED} to {MAX_SEED} for every choice.", param="seed")
    parts = []
    for rest, prompt_json, tokens in _prompts_of(request):
        for k in range(request.n):
            own = {name: value for name, value in rest.items() if name != "n"}
            if isinstance(own.get("seed"), int):
                own["seed"] = checked("seed", own["seed"] + k, least=None)
            parts.append(
                replace(request, rest=own, prompt_json=prompt_json, prompt_tokens=max(1, tokens), n=1, prompts=1)
            )
    return parts


def _prompts_of(request: ClientRequest) -> list[tuple[dict[str, Any], bytes, int]]:
    """Each prompt by itself: the body's other fields, the prompt as JSON, its tokens."""
    rest = request.rest
    if request.endpoint == "completions":
        embeds = rest.get("prompt_embeds")
        if isinstance(embeds, list):
            return [(rest | {"prompt_embeds": part}, b"", len(part) // _EMBEDDING_BYTES) for part in embeds]
        prompts = None if embeds else orjson.loads(request.prompt_json)
        if prompts is not None and _is_batch(prompts):
            return [(rest, _as_json(prompt), _prompt_tokens(prompt)) for prompt in prompts]
    return [(rest, request.prompt_json, request.prompt_tokens)]


def resume(request: ClientRequest, prompt_ids: Sequence[int], generated: Sequence[int]) -> ClientRequest:
    """The request that goes on where a recomputed or lost one stopped.

    `prompt_ids` are the ids of the client's own prompt and `generated` every id that this request has
    generated so far, over all its lives; `request` is the client's original. Completions send all ids as
    the prompt; chat keeps the messages (tools and parsers need them) and hands the ids over in
    `kv_transfer_params`.

    Raises: ValueError: nothing is left to generate; the caller ends the answer with "length" instead.
    """
    left = remaining_limit(request, len(generated))
    if left is not None and left < 1:
        raise ValueError(f"the limit of {request.effective_limit} tokens is used up")
    ids = orjson.dumps([*prompt_ids, *generated])
    rest = {name: value for name, value in request.rest.items() if name not in _IN_IDS}
    limit_field = request.limit_field
    if left is not None:
        limit_field = limit_field or "max_tokens"
        rest[limit_field] = left
        if limit_field == "max_completion_tokens":
            rest.pop("max_tokens", None)  # the worker ignores it beside the other, and it is not reduced
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
    """The request with a prompt that every worker cuts to so many tokens; None: nobody cuts it.

    `truncate_prompt_tokens: -1` is as many as fit, in some engines as fit beside `max_tokens`. These differ between
    prefiller and decoder, which would then pull the KV of another prompt.
    """
    if (as_integer(request.rest.get(_TRUNCATE)) or 0) >= 0:
        return request
    rest = {name: value for name, value in request.rest.items() if name != _TRUNCATE}
    if prompt_tokens is not None:
        rest[_TRUNCATE] = prompt_tokens
    return replace(request, rest=rest)


def kept_apart(request: ClientRequest) -> ClientRequest:
    """The request under a salt that no other one has: its KV in prefix caches serves nobody else, nor theirs it.

    A decoder that pulls from blocks that are another request's by then caches that under this prompt.
    """
    return replace(request, rest=request.rest | {_SALT: secrets.token_hex(8)})


def remaining_limit(request: ClientRequest, generated_tokens: int) -> int | None:
    """Tokens that the client's limit still allows after `generated_tokens`; None where it set no limit."""
    limit = request.effective_limit
    return None if limit is None else limit - generated_tokens


# ------------------------------------------------------------------------------------- to the workers


def probe_body(request: ClientRequest) -> bytes:
    """The body for the prefiller: one token, no stream, its KV pinned for a remote decode.

    `min_tokens` 1 keeps the one token from being a stop, which would pin nothing.
    """
    return _dump(request, _prefill_fields(request), _with_resume_ids(request, _PROBE_KV_PARAMS))


def score_body(request: ClientRequest) -> bytes:
    """The body for the prefiller that answers a request for the prompt alone: what the client sent, unstreamed."""
    rest = {name: value for name, value in request.rest.items() if name not in ("stream", "stream_options")}
    return _dump(request, rest | _wishes_of(request) | {"max_tokens": 0}, None)


def push_body(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The body for a prefiller that pushes: one token, and what the decode worker said of where its blocks are."""
    return _dump(request, _prefill_fields(request), _with_resume_ids(request, kv_transfer_params))


def _prefill_fields(request: ClientRequest) -> dict[str, Any]:
    """One token, and the client's wishes about its prompt.

    With `echo`, `max_tokens` 0 makes an engine generate one token all the same (so its KV is pinned) and answer with
    the prompt alone: its text, its tokens and their logprobs. `return_token_ids` would leave the text out.
    """
    rest = _one_token(request, min_tokens=1)
    wishes = request.prompt_wishes
    if wishes is not None:
        rest |= _wishes_of(request)
        if wishes.echo:
            rest |= {"max_tokens": 0, "return_token_ids": request.return_token_ids}
    return rest


def _wishes_of(request: ClientRequest) -> dict[str, Any]:
    wishes = request.prompt_wishes
    assert wishes is not None
    asked = {"prompt_logprobs": wishes.prompt_logprobs}
    if wishes.echo:
        asked |= {"echo": True, "logprobs": wishes.logprobs}
    return {name: value for name, value in asked.items() if value is not None}


def decode_body(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The body for the decode worker: the client's wishes, the KV to pull, and token ids for the exact count."""
    rest = dict(request.rest)
    rest["return_token_ids"] = True
    if request.assembled:
        rest["stream"] = True
        rest["stream_options"] = {"include_usage": True}
    if request.hides_reasoning:
        rest["include_reasoning"] = True
    if "stream_interval" in rest and (as_integer(rest["stream_interval"]) or 0) > FOLLOWED_ABOVE_TOKENS:
        rest["stream_interval"] = FOLLOWED_ABOVE_TOKENS  # a worker that tells nothing for longer is taken for lost
    if request.counted_by_usage:
        options = rest.get("stream_options") or {}
        rest["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    return _dump(request, rest, _with_resume_ids(request, kv_transfer_params))


def drain_body(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
    """The body that makes a decoder pull (and so free) KV that nobody waits for any more.

    It may be gone already: engines that refuse a request (vLLM from 0.23) have its prefiller free it. So what is pulled
    is cached apart.
    """
    rest = _one_token(kept_apart(request), min_tokens=0)
    return _dump(request, rest, _with_resume_ids(request, kv_transfer_params))


def _one_token(request: ClientRequest, *, min_tokens: int) -> dict[str, Any]:
    rest = dict(request.rest)
    for name in _NOT_FOR_ONE_TOKEN.intersection(rest):
        del rest[name]
    rest["stream"] = False
    rest["max_tokens"] = 1
    rest["min_tokens"] = min_tokens
    if "max_completion_tokens" in rest:
        rest["max_completion_tokens"] = 1
    rest["return_token_ids"] = True  # the prompt's ids are what a resume starts from
    return rest


def _with_resume_ids(request: ClientRequest, kv_transfer_params: bytes) -> bytes:
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


# ------------------------------------------------------------------------------------- from the workers


def parse_probe_reply(body: bytes, *, worker: str, keep: bool = False) -> PrefillResult:
    """Read a prefiller's 200; `keep` it whole in the result, for what it says about the prompt.

    Raises: BadUpstreamReply: not a completion, or one that was aborted. Null `kv_transfer_params` are no error here:
    the caller retries.
    """
    try:
        reply = orjson.loads(body)
        usage = checked_usage(reply.get("usage"))
        details = prompt_details_of(usage)
        params = reply.get("kv_transfer_params")
        choice = checked_choice(reply["choices"][0])
        if choice.get("finish_reason") == ABORT:
            raise aborted(worker, "prefill")
        ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        prompt_tokens = usage.get("prompt_tokens")
        if prompt_tokens is None:
            prompt_tokens = token_count(len(ids) if ids else 0, "prompt_token_ids")
        pinned = orjson.dumps(params) if isinstance(params, dict) and params else None
        if keep:
            orjson.dumps(reply)  # what can't be written again is found here, where another prefiller may be asked
        if pinned is not None and len(pinned) > MAX_PARAMS_BYTES:
            raise ValueError(f"kv_transfer_params are larger than {MAX_PARAMS_BYTES} bytes")
        return PrefillResult(
            kv_transfer_params=pinned,
            prompt_tokens=prompt_tokens,
            cached_tokens=None if details is None else details.get("cached_tokens"),
            prompt_token_ids=array("I", ids) if ids else None,
            reply=reply if keep else None,
            reply_id=reply.get("id"),
            prompt_details=details,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as exc:
        raise BadUpstreamReply(
            f"the prefiller's reply is not a completion ({type(exc).__name__}: {exc})",
            worker=worker,
            tier="prefill",
        ) from exc


# ------------------------------------------------------------------------------------- fields


def _take_prompt(data: dict[str, Any]) -> tuple[bytes, int, int]:
    """Remove the prompt from `data`: its JSON, its tokens, how many prompts it holds."""
    prompt = data.pop("prompt", None)
    if embeds := data.pop("prompt_embeds", None):
        data["prompt_embeds"] = embeds
        return b"", *_embeds_in(embeds, prompt)
    if prompt is None or prompt == [] or prompt == "":
        raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if _is_batch(prompt):
        if not all(map(_is_one_prompt, prompt)):
            prompt = [_ids_read(part) for part in prompt]
        if not all(map(_is_one_prompt, prompt)):
            raise InvalidRequest("Each prompt must be a string or a list of token ids.", param="prompt")
        return _as_json(prompt), sum(map(_prompt_tokens, prompt)), len(prompt)
    if not _is_one_prompt(prompt):
        prompt = _ids_read(prompt)
    if not _is_one_prompt(prompt):
        raise InvalidRequest("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    return _as_json(prompt), _prompt_tokens(prompt), 1


def _embeds_in(embeds: object, prompt: object) -> tuple[int, int]:
    """The tokens of `prompt_embeds`, about, and how many prompts they are. OpenAI's clients say "" beside them."""
    if prompt not in (None, "", []):
        raise InvalidRequest("prompt and prompt_embeds cannot be served in one request.", param="prompt_embeds")
    parts = embeds if isinstance(embeds, list) else [embeds]
    if not all(isinstance(part, str) and part for part in parts):
        raise InvalidRequest("prompt_embeds must be a string or a list of strings.", param="prompt_embeds")
    return sum(map(len, parts)) // _EMBEDDING_BYTES, len(parts)


def _take_messages(data: dict[str, Any]) -> tuple[bytes, int, int]:
    """Remove the messages from `data`: their JSON, their tokens, how many there are."""
    messages = data.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list.", param="messages")
    text_bytes = 0
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRequest("Each message must be an object.", param="messages")
        text_bytes += _text_bytes(message.get("content"))
    return _as_json(messages), text_bytes // 4 + 4 * len(messages), len(messages)


def _as_json(value: object) -> bytes:
    """A part of a client's body as JSON again. Raises: InvalidRequest: nested deeper than `MAX_DEPTH`."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"The body is nested too deeply; accepted are about {MAX_DEPTH} levels.") from None


def _text_bytes(content: object) -> int:
    if isinstance(content, str):
        return len(content) if content.isascii() else len(content.encode("utf-8", "replace"))
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return sum(_text_bytes(text) for text in texts if isinstance(text, str))
    return 0


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and set(map(type, prompt)) == {int}


def _ids_read(prompt: Any) -> Any:
    """Token ids as the engines read them, such as `5.0`; what holds something else is left as it is."""
    if not isinstance(prompt, list) or not {int, float}.issuperset(map(type, prompt)):
        return prompt
    ids = list(map(int, prompt))
    return ids if ids == prompt else prompt


def _prompt_tokens(prompt: str | list[int]) -> int:
    return _text_bytes(prompt) // 4 if isinstance(prompt, str) else len(prompt)


def _stream_options(data: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    options = data.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise InvalidRequest(f"stream_options must be an object, not {kind(options)}.", param="stream_options")
    if options and not stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    include = stream and boolean(options, "include_usage")
    return include, include and boolean(options, "continuous_usage_stats")


def _limit(endpoint: Endpoint, data: dict[str, Any]) -> tuple[LimitField | None, int | None]:
    if "max_completion_tokens" in data and endpoint == "chat":  # completions have no such field: engines overlook it
        completion = integer(data, "max_completion_tokens", least=1)
        if completion is not None:
            integer(data, "max_tokens", least=None)  # engines read it, and go by the other
            return "max_completion_tokens", completion
    total = integer(data, "max_tokens", least=1) if "max_tokens" in data else None
    if total is None and endpoint == "completions":
        data.pop("max_tokens", None)  # null is their default to new engines; older ones answer 500 in the end
    return ("max_tokens", total) if total is not None else (None, None)


def _followed(endpoint: Endpoint, limit: int | None) -> bool:
    """Whether an unstreamed answer may become long enough to be worth an event per token."""
    if limit is None:
        return endpoint == "chat"
    return limit > FOLLOWED_ABOVE_TOKENS


def _clean(data: dict[str, Any]) -> None:
    """Take out what only a router may say.

    `vllm_xargs` become the sampling parameters' extra_args, the same place that carries KV parameters.
    """
    for name in _INTERNAL_FIELDS:
        data.pop(name, None)
    xargs = data.get("vllm_xargs")
    if isinstance(xargs, dict):
        for name in _INTERNAL_FIELDS:
            xargs.pop(name, None)


def _prompt_wishes(endpoint: Endpoint, data: dict[str, Any], stream: bool) -> PromptWishes | None:
    """Take out of `data` what the client wants to know of its prompt; None if that is nothing.

    Raises: InvalidRequest: logprobs of a prompt in a stream, as on vLLM; with `echo`, too: a stream's first event
    cannot wait for them.
    """
    wanted = integer(data, "prompt_logprobs", least=-1)
    data.pop("prompt_logprobs", None)
    if stream and wanted is not None:
        if wanted != 0:
            raise InvalidRequest("prompt_logprobs are not available when stream=True.", param="prompt_logprobs")
        wanted = None  # vLLM takes it, and streams none
    echo, logprobs = False, None
    if endpoint == "completions":  # a chat's echo concerns its last message, and is the workers' business
        echo = boolean(data, "echo")
        data.pop("echo", None)
        logprobs = integer(data, "logprobs", least=None)
    if echo and stream and logprobs is not None:
        text = "echo with logprobs is not available when stream=True: the prompt's logprobs come from a prefiller."
        raise InvalidRequest(text, param="echo")
    return PromptWishes(echo, logprobs, wanted) if echo or wanted is not None else None


def check_depth(body: bytes, data: dict[str, Any]) -> None:
    """Refuse now, before anybody has worked for it, what can't be written again. Raises: InvalidRequest."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _as_json(data)
