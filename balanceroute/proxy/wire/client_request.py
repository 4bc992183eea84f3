"""A client's request: its body, parsed and checked once.

Checked are the fields that the router reads, and what a decoder would refuse only after the prefill has pinned KV (a
limit below 1, `min_tokens` above the limit, null for `min_tokens` or `n`, `stop_token_ids` that are none). Workers
check the rest.

`kv_transfer_params`, and every other field that could carry them, are removed: a client must not send them to workers.

**Assembled answers.** An answer for a client that does not stream is also built from a worker's stream
(`ClientRequest.assembled`), because only a stream shows its progress. Two kinds are not streamed: requests with a field
whose answer `answers.py` can't rebuild, and those with a limit of at most `FOLLOWED_ABOVE_TOKENS`. Such an answer grows
by a KV block or two, so until it is counted, its worker's load is wrong by no more than that.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.bounds import RECOMPUTED
from balanceroute.proxy.wire.fields import as_boolean, as_integers, boolean, integer, kind
from balanceroute.proxy.wire.json_body import as_json, load_object, load_prompt
from balanceroute.proxy.wire.json_size import MAX_FIELDS
from balanceroute.proxy.wire.prompts import take_messages, take_prompt

Endpoint = Literal["completions", "chat"]
LimitField = Literal["max_tokens", "max_completion_tokens"]

DEFAULT_COMPLETION_LIMIT: Final = 16  # vLLM's default of max_tokens on completions; chat fills the context
FOLLOWED_ABOVE_TOKENS: Final = 64  # tokens; an event costs about 20 us of CPU, a whole short answer about 50

MAX_NAME: Final = 256  # characters of a field's name
MAX_READ_BYTES: Final = 16_384  # bytes of each of `_READ_LATER`
_SHORT_BYTES: Final = 512  # of an array, object or text that is not kept as JSON
_MAX_SHORT_BYTES: Final = 4096  # of all these arrays and objects of a body together
_READ_LATER: Final = frozenset(("stop", "stream_options", "model", "cache_salt"))
_READ_IF_SHORT: Final = frozenset(("response_format", "structured_outputs", "tool_choice"))  # else they bind the answer

_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id")
_CARRIERS: Final = frozenset((*_INTERNAL_FIELDS, "vllm_xargs"))
_NESTED: Final = frozenset((dict, list))
_PROMPT_FIELDS: Final = frozenset(("echo", "prompt_logprobs"))
# With one of these, `include_reasoning: false` changes more in an engine than what it sends: a grammar begins with the
# first token; an engine with a reasoning parser (only the engine knows) sends no ids or logprobs of any token.
_CHANGED_BY_HIDING: Final = (
    *("logprobs", "return_token_ids", "tools", "tool_choice", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
)
# With these fields alone, `answers.py` can rebuild the unstreamed answer from a stream without loss.
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
    request_id vllm_xargs stream_interval session_id truncation_side logprob_token_ids repetition_detection
    watermarking use_beam_search""".split()
)


@dataclass(frozen=True, slots=True)
class PromptWishes:
    """What the client wants in the answer about its prompt. Only a prefiller knows it, because it computes the prompt.

    A decoder that pulls KV skips that computation. Asked for a prompt's logprobs, engines die, or (vLLM 0.32) pull
    nothing and compute the prompt anew, while the prefiller keeps its KV.
    So these fields are taken out of the body for the decoder, the probe asks the prefiller for them, and
    `prompt_echo.py` merges both answers.

    A chat with `echo` begins with its last message, which the router writes itself: such a chat, too, has an engine
    tell its prompt's logprobs.

    Attributes: `echo`: the answer begins with the prompt. `logprobs`: how many per token, of an echoed prompt as well.
    `prompt_logprobs`: how many per token of the prompt. `last_message`: the text that a chat's answer begins with.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    last_message: bytes = b""


@dataclass(slots=True, init=False)
class ClientRequest:
    """A client's request, parsed once and never changed; `derived_requests.py` makes others of it.

    `prompt_json` is the prompt (completions) or the messages (chat) as JSON. It is equal for equal prompts, whatever
    their whitespace; the predictors hash it. `rest` holds every other field that may reach a worker, larger arrays and
    objects as `orjson.Fragment`. `limit` is what the client wrote into `limit_field`; both are None where it set no
    limit. `prompt_tokens`: see `prompts.py`.
    """

    endpoint: Endpoint
    rest: dict[str, Any]
    prompt_json: bytes
    prompt_tokens: int
    stream: bool
    assembled: bool  # an unstreamed answer is built from a worker's stream, see above
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
    prompt_wishes: PromptWishes | None
    scores_only: bool  # `echo` with `max_tokens` 0: a prefiller alone serves that
    resume_ids: bytes = field(repr=False)  # of a resumed chat: the ids so far, as a JSON list

    # a generated `__init__` stays Python where this module is compiled, and would be a tenth of reading a request
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
        self.model, self.priority = model, priority
        self.prompt_wishes, self.scores_only = prompt_wishes, scores_only
        self.resume_ids = resume_ids

    @property
    def path(self) -> str:
        """The route of the workers that serves this request."""
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    @property
    def effective_limit(self) -> int | None:
        """The most tokens that the request may generate; None: limited by the context only."""
        if self.scores_only:
            return 0
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
    def stops_at_marker(self) -> bool:
        """Whether one of its stop strings is what an engine marks a request with that it gives back."""
        stop = self.rest.get("stop")
        return stop is not None and (stop == RECOMPUTED or (isinstance(stop, list) and RECOMPUTED in stop))

    @property
    def hides_reasoning(self) -> bool:
        """Whether the decode worker streams reasoning that the router removes for the client.

        An engine that hides reasoning itself is silent for minutes meanwhile, and sends no token ids.
        """
        return self._unwanted_reasoning and self.endpoint == "chat" and not any(map(self.rest.get, _CHANGED_BY_HIDING))

    @property
    def counted_by_usage(self) -> bool:
        """Whether tokens are counted by the cumulative usage of each event, which the decode worker is asked for.

        True if the worker hides reasoning itself: it may send no token ids.
        """
        return self._unwanted_reasoning and not self.hides_reasoning

    @property
    def _unwanted_reasoning(self) -> bool:
        """Whether the client wants no reasoning, and the decode worker streams the answer."""
        return "include_reasoning" in self.rest and (
            self.streams_upstream and as_boolean(self.rest["include_reasoning"]) is False
        )


def parse(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Parse a client's body. Raises: InvalidRequest: with the message and parameter of an OpenAI error."""
    return request_of(endpoint, load_prompt(body) if endpoint == "completions" else load_object(body))


def request_of(endpoint: Endpoint, data: dict[str, Any]) -> ClientRequest:
    """Check a body that was read as `data`, which becomes part of the request. Raises: InvalidRequest."""
    if len(data) > MAX_FIELDS:
        raise InvalidRequest(f"The body has more than {MAX_FIELDS} fields.")
    if data and max(map(len, data)) > MAX_NAME:
        raise InvalidRequest(f"The name of a field is longer than {MAX_NAME} characters.")
    if not _CARRIERS.isdisjoint(data):
        _remove_internal_fields(data)
    if endpoint == "completions":
        (prompt_json, tokens, prompts), messages = take_prompt(data), 0
    else:
        (prompt_json, tokens, messages), prompts = take_messages(data), 1
    stream = "stream" in data and boolean(data, "stream")
    include_usage, continuous = _stream_options(data, stream) if "stream_options" in data else (False, False)
    wishes = None if _PROMPT_FIELDS.isdisjoint(data) else _prompt_wishes(endpoint, data, stream, prompt_json)
    assembled = not stream and wishes is None and ASSEMBLED_FIELDS.issuperset(data)
    scores_only = wishes is not None and wishes.echo and integer(data, "max_tokens", least=None) == 0
    limit_field, limit = (None, None) if scores_only else _limit(endpoint, data)
    min_tokens = _min_tokens(endpoint, data, limit) if "min_tokens" in data else 0
    if data.get("stop_token_ids") is not None:
        _check_stop_ids(data["stop_token_ids"])
    if "use_beam_search" in data:
        _refuse_beam_search(data)
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest(f"model must be a string, not {kind(model)}.", param="model")
    request = ClientRequest(
        endpoint=endpoint,
        rest=data,
        prompt_json=prompt_json,
        prompt_tokens=tokens or 1,
        stream=stream,
        assembled=assembled and _is_worth_streaming(endpoint, limit),
        include_usage=include_usage,
        continuous_usage=continuous,
        return_token_ids="return_token_ids" in data and boolean(data, "return_token_ids"),
        n=_n(endpoint, data) if "n" in data else 1,
        prompts=prompts,
        messages=messages,
        limit_field=limit_field,
        limit=limit,
        min_tokens=min_tokens,
        model=model,
        priority=(integer(data, "priority", least=None) or 0) if "priority" in data else 0,
        prompt_wishes=wishes,
        scores_only=scores_only,
    )
    _keep_as_json(data)
    return request


# ------------------------------------------------------------------------------------- fields


def _remove_internal_fields(data: dict[str, Any]) -> None:
    """Remove fields that only a router may send to a worker.

    Engines take `vllm_xargs` into the sampling parameters' `extra_args`, where KV parameters are, too.
    """
    for name in _INTERNAL_FIELDS:
        data.pop(name, None)
    xargs = data.get("vllm_xargs")
    if isinstance(xargs, dict):
        for name in _INTERNAL_FIELDS:
            xargs.pop(name, None)


def _keep_as_json(data: dict[str, Any]) -> None:
    """Keep larger values as JSON, because they take more bytes while a request waits: arrays and objects up to 24 times
    as many, a text of which one character is not ASCII up to 4 times.

    Raises: InvalidRequest: one can't be serialised again; no prefiller should work for it. One that the router reads
    later is too large.
    """
    left = _MAX_SHORT_BYTES
    for name, value in data.items():
        kind_of = type(value)
        is_long_text = kind_of is str and len(value) > _SHORT_BYTES
        if not is_long_text and kind_of not in _NESTED:
            continue
        if is_long_text and name not in _READ_LATER and value.isascii():
            continue
        text = as_json([value])  # a level deeper, as it will be
        if name in _READ_LATER:
            if len(text) > MAX_READ_BYTES:
                raise InvalidRequest(f"{name} is larger than {MAX_READ_BYTES} bytes.", param=name)
        elif name in _READ_IF_SHORT and len(text) <= _SHORT_BYTES:
            continue
        elif is_long_text or (len(text) > min(left, _SHORT_BYTES) and name != "prompt_embeds"):
            data[name] = orjson.Fragment(text[1:-1])
        else:
            left -= len(text)


def _n(endpoint: Endpoint, data: dict[str, Any]) -> int:
    """How many answers are wanted of each prompt; null is a chat's 1, as in the engines, and no number elsewhere."""
    n = integer(data, "n", least=1)
    if n is None and endpoint == "completions":
        raise _null("n")
    return n or 1


def _min_tokens(endpoint: Endpoint, data: dict[str, Any], limit: int | None) -> int:
    min_tokens = integer(data, "min_tokens", least=0)
    if min_tokens is None:
        raise _null("min_tokens")
    if limit is None and endpoint == "completions":
        limit = DEFAULT_COMPLETION_LIMIT
    if limit is not None and min_tokens > limit:
        text = f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        raise InvalidRequest(text, param="min_tokens")
    return min_tokens


def _check_stop_ids(ids: object) -> None:
    if as_integers(ids) is None:
        raise InvalidRequest("stop_token_ids must be a list of token ids.", param="stop_token_ids")


def _null(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be an integer, not null.", param=name)


def _refuse_beam_search(data: dict[str, Any]) -> None:
    if boolean(data, "use_beam_search"):
        text = "use_beam_search cannot be served: its requests carry no KV transfer."
        raise InvalidRequest(text, param="use_beam_search")


def _stream_options(data: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    """Whether the client wants a usage at the end of its stream, and one in every event."""
    options = data.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise InvalidRequest(f"stream_options must be an object, not {kind(options)}.", param="stream_options")
    if options and not stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    include = stream and boolean(options, "include_usage")
    return include, include and boolean(options, "continuous_usage_stats")


def _prompt_wishes(endpoint: Endpoint, data: dict[str, Any], stream: bool, prompt_json: bytes) -> PromptWishes | None:
    """Move what the client wants to know of its prompt out of `data`; None: nothing.

    Raises: InvalidRequest: a stream with logprobs of the prompt, alone (vLLM refuses that as well) or with `echo` (the
    first event can't wait for them).
    """
    wanted = integer(data, "prompt_logprobs", least=-1)
    data.pop("prompt_logprobs", None)
    if stream and wanted is not None:
        if wanted != 0:
            raise InvalidRequest("prompt_logprobs are not available when stream=True.", param="prompt_logprobs")
        wanted = None  # vLLM accepts it, and streams none
    echo = boolean(data, "echo")
    data.pop("echo", None)
    if endpoint == "chat":
        if echo and not stream and wanted is None:
            wanted = integer(data, "top_logprobs", least=None) or 0
        last = _last_message(data, prompt_json).encode() if echo else b""  # as a text it may take 4 times as many bytes
        return PromptWishes(prompt_logprobs=wanted, last_message=last) if last or wanted is not None else None
    logprobs = integer(data, "logprobs", least=None)
    if echo and stream and logprobs is not None:
        text = "echo with logprobs is not available when stream=True: the prompt's logprobs come from a prefiller."
        raise InvalidRequest(text, param="echo")
    return PromptWishes(echo, logprobs, wanted) if echo or wanted is not None else None


def _last_message(data: dict[str, Any], messages_json: bytes) -> str:
    """The text of a chat's last message, if the answer is of the same role; else nothing.

    The role is the assistant's, which engines can be told otherwise (`--response-role`), or continues the last message.
    """
    last = orjson.loads(messages_json)[-1]
    if last.get("role") != "assistant" and as_boolean(data.get("add_generation_prompt", True)) is not False:
        return ""
    content = last.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _limit(endpoint: Endpoint, data: dict[str, Any]) -> tuple[LimitField | None, int | None]:
    """The client's limit of tokens, and its field's name. Raises: InvalidRequest."""
    if "max_completion_tokens" in data and endpoint == "chat":  # completions have no such field: engines ignore it
        completion = integer(data, "max_completion_tokens", least=1)
        if completion is not None:
            integer(data, "max_tokens", least=None)  # engines accept both, and use the other one
            return "max_completion_tokens", completion
    total = integer(data, "max_tokens", least=1) if "max_tokens" in data else None
    if total is None and endpoint == "completions":
        data.pop("max_tokens", None)  # new engines take null for their default; older ones end with 500
    return ("max_tokens", total) if total is not None else (None, None)


def _is_worth_streaming(endpoint: Endpoint, limit: int | None) -> bool:
    """Whether an answer may become long enough to follow its growth, at the cost of an event per token."""
    if limit is None:
        return endpoint == "chat"
    return limit > FOLLOWED_ABOVE_TOKENS
