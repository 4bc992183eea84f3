"""A request body of `/v1/completions` or `/v1/chat/completions`, checked as vLLM checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from balanceroute.emulator.errors import ApiError, bad_type, bad_value
from balanceroute.emulator.structure import Structure, structure_of
from balanceroute.engine.tokens import EOS_ID, TURN_ID, VOCAB_SIZE, encode

KILLS_DECODER = "kill_decoder"  # in `vllm_xargs`: a request that no decoder survives
COMPLETION_DEFAULT_MAX_TOKENS = 16  # vLLM's, seen in the captures; chat has none
MAX_LOGPROBS = 20  # vLLM's default of `--max-logprobs`


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything of a body that the emulated engine acts upon; `prompts` has one id list per prompt."""

    chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stream_interval: int | None
    logprobs: int | None
    echo: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    request_id: str | None
    kv_transfer_params: Mapping[str, Any] | None
    prompt_logprobs: int | None = None
    structure: Structure | None = None
    kills_decoder: bool = False
    cache_salt: str | None = None
    repeats: str = ""  # of a chat: the text that its answer begins with

    @property
    def echo_only(self) -> bool:
        """Whether the answer is the prompt; one token is generated all the same, and not shown."""
        return self.echo and self.max_tokens == 0

    @property
    def is_probe(self) -> bool:
        """Whether the KV is to be kept for a decoder."""
        return bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode"))

    def limit_for(self, prompt_tokens: int, max_model_len: int) -> int:
        """Most output tokens of a prompt: what was asked for, within the context."""
        asked = self.max_tokens
        if asked is None:
            asked = max_model_len if self.chat else COMPLETION_DEFAULT_MAX_TOKENS
        return max(1, min(asked, max_model_len - prompt_tokens))


def parse_body(raw: bytes, content_type: str | None) -> dict[str, Any]:
    """The JSON object of a body. Raises: ApiError 400 as vLLM words it."""
    if "json" not in (content_type or ""):  # a missing header is refused too
        raise ApiError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind="Bad Request",
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        place = f"body.{error.pos}"
        detail = (
            f"{{'type': 'json_invalid', 'loc': '{place}', 'msg': 'JSON decode error',"
            f" 'input': '<dict of 0 items>', 'ctx': {{'error': '{error.msg}'}}}}"
        )
        raise ApiError(f"1 validation error:\n  {detail}", param=place, kind="Bad Request") from error
    if not isinstance(body, dict):
        raise ApiError(
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be"
            " a valid dictionary or object to extract fields from'}",
            param="body",
            kind="Bad Request",
        )
    return body


def parse_generation(body: dict[str, Any], *, chat: bool, model: str, max_model_len: int) -> GenerationRequest:
    """Check a body and render its prompts to ids. Raises: ApiError with vLLM's status and text."""
    fields = _Fields(body)
    check_model(body, model)
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options is not None and not stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    params = fields.mapping("kv_transfer_params")
    max_tokens = _limit(fields, chat, max_model_len)
    min_tokens = fields.integer("min_tokens") or 0
    _check_sampling(fields, min_tokens, max_tokens)
    prompts = chat_prompt(body, params) if chat else text_prompts(body.get("prompt"))
    for prompt in prompts:
        _check_prompt(prompt, max_model_len)
    option = _Fields(options or {})
    include_usage = option.flag("include_usage")
    return GenerationRequest(
        chat=chat,
        model=model,
        prompts=prompts,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        n=_choices(fields),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and option.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
        stream_interval=fields.integer("stream_interval"),
        logprobs=_logprobs(fields, chat),
        echo=fields.flag("echo"),
        stop=_stops(body.get("stop")),
        stop_token_ids=frozenset(_id_list(body.get("stop_token_ids") or (), "stop_token_ids")),
        request_id=fields.text("request_id"),
        kv_transfer_params=params,
        prompt_logprobs=_prompt_logprobs(fields, chat, stream),
        structure=structure_of(body, chat=chat),
        cache_salt=fields.text("cache_salt"),
        repeats=_repeated(fields, body) if chat else "",
        kills_decoder=bool((fields.mapping("vllm_xargs") or {}).get(KILLS_DECODER)),
    )


def check_model(body: Mapping[str, Any], model: str) -> None:
    """Raises: ApiError 404: the body names another model."""
    wanted = _Fields(body).text("model")
    if wanted not in (None, "", model):
        raise ApiError(f"The model `{wanted}` does not exist. Valid aliases: {model}.", status=404, param="model")


def ids_to_decode(body: Mapping[str, Any]) -> tuple[int, ...]:
    """The `tokens` of `/detokenize`. Raises: ApiError 400."""
    ids = _id_list(body.get("tokens"), "tokens")
    if ids:
        _check_vocabulary(ids)
    return ids


class _Fields:
    """Typed reads of an untyped object; what JSON cannot mean is refused as pydantic refuses it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def integer(self, name: str) -> int | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError as error:
                text = "Input should be a valid integer, unable to parse string as an integer"
                raise bad_type(name, "int_parsing", text, value) from error
        if not isinstance(value, int | float):
            raise bad_type(name, "int_type", "Input should be a valid integer", value)
        if value != int(value):
            text = "Input should be a valid integer, got a number with a fractional part"
            raise bad_type(name, "int_from_float", text, value)
        return int(value)

    def number(self, name: str) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float):
            raise bad_type(name, "float_type", "Input should be a valid number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is None:
            return False
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise bad_type(name, "bool_parsing", "Input should be a valid boolean, unable to interpret input", value)

    def text(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise bad_type(name, "string_type", "Input should be a valid string", value)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise bad_type(name, "dict_type", "Input should be a valid dictionary", value)
        return value


def _limit(fields: _Fields, chat: bool, max_model_len: int) -> int | None:
    name = "max_tokens"
    value = fields.integer("max_tokens")
    if value == 0 and not chat and fields.flag("echo"):
        return 0
    if chat and (newer := fields.integer("max_completion_tokens")) is not None:
        name, value = "max_completion_tokens", newer
    if value is not None and value < 1:
        raise bad_value(f"{name} must be at least 1, got {value}.", name, value)
    if value is not None and value > max_model_len:
        raise bad_value(
            f"{name}={value} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            name,
            value,
        )
    return value


def _check_sampling(fields: _Fields, min_tokens: int, max_tokens: int | None) -> None:
    if min_tokens < 0:
        raise bad_value(f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens", min_tokens)
    if max_tokens and min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    temperature = fields.number("temperature")
    if temperature is not None and temperature < 0:
        raise bad_value(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    top_p = fields.number("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise bad_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)


def _choices(fields: _Fields) -> int:
    n = fields.integer("n")
    if n is not None and n < 1:
        raise bad_value(f"n must be at least 1, got {n}.", "n", n)
    return n or 1


def _logprobs(fields: _Fields, chat: bool) -> int | None:
    top = fields.integer("top_logprobs") if chat else None
    if chat:
        wanted = (top or 0) if fields.flag("logprobs") else None
    else:
        wanted = fields.integer("logprobs")
    if top and wanted is None:
        text = "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)"
        raise ApiError(text, param="top_logprobs")
    if wanted is not None and wanted > MAX_LOGPROBS:
        text = f"Requested sample logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise bad_value(text, "logprobs", wanted)
    return wanted


def _prompt_logprobs(fields: _Fields, chat: bool, stream: bool) -> int | None:
    wanted = fields.integer("prompt_logprobs")
    if wanted and stream:
        text = "`prompt_logprobs` are not available when `stream=True`. (parameter=prompt_logprobs)"
        raise ApiError(text, param="prompt_logprobs")
    if wanted is None and fields.flag("echo"):
        return (fields.integer("top_logprobs") or 0) if chat else fields.integer("logprobs")
    return wanted


def _repeated(fields: _Fields, body: dict[str, Any]) -> str:
    """What a chat's `echo` repeats: its last message, if the answer is of the same role."""
    last = body["messages"][-1]
    same_role = last["role"] == "assistant" or body.get("add_generation_prompt") is False
    return _content(last.get("content"), -1) if same_role and fields.flag("echo") else ""


def _stops(stop: object) -> tuple[str, ...]:
    values = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise bad_type("stop", "string_type", "Input should be a valid string", stop)
    return tuple(value for value in values if value)


def _id_list(value: object, param: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(type(token) is int for token in value):
        raise bad_type(param, "list_type", "Input should be a valid list", value)
    return tuple(value)


def text_prompts(prompt: object) -> tuple[tuple[int, ...], ...]:
    """Ids of the `prompt` field: text, ids, or a list of either. Raises: ApiError 400."""
    if prompt is None or prompt in ("", []):
        raise ApiError(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            param="prompt",
        )
    if isinstance(prompt, str):
        return (tuple(encode(prompt)),)
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return (tuple(prompt),)
        if all(isinstance(item, str) and item for item in prompt):
            return tuple(tuple(encode(item)) for item in prompt)
        if all(isinstance(item, list) and item for item in prompt):
            return tuple(_id_list(item, "prompt") for item in prompt)
    raise bad_type("prompt.str", "string_type", "Input should be a valid string", prompt)


def chat_prompt(body: dict[str, Any], params: dict[str, Any] | None) -> tuple[tuple[int, ...], ...]:
    """Ids of `messages`, or those given to take their place. Raises: ApiError 400."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise bad_type("messages", "list_type", "Input should be a valid list", messages)
    if not messages:
        raise ApiError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for name in ("prompt_token_ids", "_vllm_ascend_recompute_token_ids"):
        if params and params.get(name):
            return (_id_list(params[name], f"kv_transfer_params.{name}"),)
    return (tuple(render_chat(messages, continue_final=bool(body.get("continue_final_message")))),)


def render_chat(messages: Sequence[Any], *, continue_final: bool = False) -> list[int]:
    """The chat template: each message between a turn id and the end of text, then the assistant's turn."""
    ids: list[int] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_type(f"messages.{index}", "model_type", "Input should be a valid message", message)
        ids += [TURN_ID, *encode(message["role"] + "\n"), *encode(_content(message.get("content"), index))]
        if not (continue_final and index == len(messages) - 1):
            ids += [EOS_ID, *encode("\n")]
    return ids if continue_final else [*ids, TURN_ID, *encode("assistant\n")]


def _content(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise bad_type(f"messages.{index}.content", "string_type", "Input should be a valid string", content)


def _check_prompt(prompt: tuple[int, ...], max_model_len: int) -> None:
    if len(prompt) >= max_model_len:
        raise bad_value(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
            f" {len(prompt)} input tokens, which exceeds this limit even without any output tokens."
            " Please reduce the length of the input prompt.",
            "input_tokens",
            len(prompt),
        )
    _check_vocabulary(prompt)


def _check_vocabulary(ids: tuple[int, ...]) -> None:
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < VOCAB_SIZE:
        raise ApiError(f"Token id {worst} is out of vocabulary")
