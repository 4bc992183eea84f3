"""Translates the body of Anthropic's `/v1/messages` into that of `/v1/chat/completions`.

    system, and messages of role system    the first message, role system
    text, image, document (of text)        content of a message
    tool_result                            messages of role tool, before the user's other content; its images after them
    tool_use                               tool_calls of the assistant's message
    thinking                               its reasoning; redacted_thinking is left out (encrypted)
    a last message of the assistant        is continued
    tools, tool_choice                     functions; `any` is "required"
    thinking                               chat_template_kwargs and thinking_token_budget
    output_config                          reasoning_effort, response_format

System messages in the middle of a conversation are joined to the first one: some chat templates refuse them elsewhere,
and the router does not know the template. Agents' billing lines (`x-anthropic-billing-header`, a hash per request) are
left out, because they would defeat the prefix cache. Otherwise the chat is, as far as possible, the one that vLLM 0.32
makes on its own `/v1/messages`.

Fields for Anthropic's service only (`cache_control`, `service_tier`, ...) are accepted without effect. A field that
would have an effect, and can't be translated, is refused by name.

Source: https://docs.anthropic.com/en/api/messages; vLLM's `entrypoints/anthropic`.
"""

from collections.abc import Callable
from typing import Any, Final

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import ClientRequest, request_of
from balanceroute.proxy.wire.fields import MAX_INTEGER, as_boolean, as_integer, as_integers, as_number, checked
from balanceroute.proxy.wire.json_body import check_depth, load_writable_object

_WITHOUT_EFFECT: Final = frozenset(
    ("service_tier", "cache_control", "context_management", "diagnostics", "speed", "user_profile_id", "workspace_id")
)
_OURS: Final = frozenset(
    """model messages max_tokens stream system stop_sequences temperature top_p top_k tools tool_choice thinking
    output_config output_format metadata""".split()
)
_OF_TOOLS: Final = frozenset(
    """type name description input_schema strict
    cache_control eager_input_streaming defer_loading allowed_callers""".split()  # these have no effect
)
_OF_OUTPUT: Final = frozenset(("effort", "format"))
_TOKENIZED: Final = frozenset(
    "model messages tools chat_template_kwargs add_generation_prompt continue_final_message".split()
)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_BILLING: Final = "x-anthropic-billing-header"
_LEAST_BUDGET: Final = 1024  # tokens of thinking, as on Anthropic's API
_MAX_QUOTED: Final = 64  # characters of what a client wrote, in an error

Block = dict[str, Any]


def parse_messages(body: bytes) -> ClientRequest:
    """Parse the body of `/v1/messages` as a chat. Raises: InvalidRequest: it names the field."""
    return request_of("chat", chat_of(load_writable_object(body)))


def tokenize_body(body: bytes) -> bytes:
    """The body for a worker's `/tokenize`, for a `/v1/messages/count_tokens`. Raises: InvalidRequest."""
    chat = chat_of({**load_writable_object(body), "max_tokens": MAX_INTEGER})  # more than any budget of thinking
    check_depth(body, chat)  # a tool's schema is a level deeper in a chat
    if (effort := chat.get("reasoning_effort")) is not None:  # which engines make variables of the template, in a chat
        asked = chat.get("chat_template_kwargs", {})
        chat["chat_template_kwargs"] = {"enable_thinking": True, **asked, "reasoning_effort": effort}
    return orjson.dumps({name: value for name, value in chat.items() if name in _TOKENIZED})


def chat_of(data: dict[str, Any]) -> dict[str, Any]:
    """Translate a body of `/v1/messages` into a chat's. Raises: InvalidRequest."""
    _check_fields(data, _FIELDS)
    chat: dict[str, Any] = {
        name: read(data[name], name) for name, read in _OF_CHAT.items() if data.get(name) is not None
    }
    chat["model"] = _text(data.get("model"), "model")
    chat["max_tokens"] = _integer(data.get("max_tokens"), "max_tokens", least=1)
    _put_messages(chat, data)
    _put_sampling(chat, data)
    _put_tools(chat, data)
    _put_thinking(chat, data)
    _put_output(chat, data)
    if _flag(data.get("stream"), "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    user = _object(data.get("metadata") or {}, "metadata").get("user_id")
    if user is not None:
        chat["user"] = _text(user, "metadata.user_id")
    return chat


# ---------------------------------------------------------------------------------------------- the conversation


def _put_messages(chat: dict[str, Any], data: dict[str, Any]) -> None:
    given = data.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "This must be a non-empty list.")
    system = _system_texts(data.get("system") or "", "system")
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(given):
        path = f"messages.{place}"
        role = _object(message, path).get("role")
        content, inside = message.get("content"), f"{path}.content"
        if role == "system":
            system += _system_texts(content, inside)
        elif role == "user":
            messages += _user_messages(content, inside)
        elif role == "assistant":
            messages.append(_assistant_message(content, inside))
        else:
            raise _wrong(f"{path}.role", "This must be user, assistant or system.")
    if not messages:
        raise _wrong("messages", "At least one message of the user must have content.")
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    chat["messages"] = messages


def _system_texts(content: object, path: str) -> list[str]:
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_text_of(block, at) for at, block in _blocks(content, path)]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _user_messages(content: object, path: str) -> list[dict[str, Any]]:
    """Each tool's result as its own message, then the user's other content, if any."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    shown: list[Block] = []  # images in tools' results
    parts: list[Block] = []
    for at, block in _blocks(content, path):
        if block.get("type") == "tool_result":
            results.append(_tool_message(block, at, shown))
        else:
            parts += _parts_of(block, at)
    parts = shown + parts
    return [*results, {"role": "user", "content": _content_of(parts)}] if parts else results


def _tool_message(block: Block, path: str, images: list[Block]) -> dict[str, Any]:
    """A tool's result as text; its images are added to `images`, as a message of role tool can't hold any."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        texts = []
        for at, inner in _blocks(content, f"{path}.content"):
            for part in _parts_of(inner, at):
                if part["type"] == "text":
                    texts.append(part["text"])
                else:
                    images.append(part)
        text = "\n".join(texts)
    if not text and _flag(block.get("is_error"), f"{path}.is_error"):
        text = "Error"
    return {"role": "tool", "tool_call_id": _text(block.get("tool_use_id"), f"{path}.tool_use_id"), "content": text}


def _assistant_message(content: object, path: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    parts: list[Block] = []
    calls: list[Block] = []
    reasoning: list[str] = []
    for at, block in _blocks(content, path):
        kind = block.get("type")
        if kind == "text":
            parts += _parts_of(block, at)
        elif kind == "thinking":
            reasoning.append(_text(block.get("thinking"), f"{at}.thinking", empty=True))
        elif kind == "tool_use":
            calls.append(_call_of(block, at))
        elif kind != "redacted_thinking":
            raise _untranslatable(kind, at)
    message: dict[str, Any] = {"role": "assistant", "content": _content_of(parts) if parts else ""}
    if any(reasoning):  # Anthropic's API may omit the text of thinking
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _call_of(block: Block, path: str) -> Block:
    arguments = orjson.dumps(_object(block.get("input"), f"{path}.input")).decode()
    function = {"name": _text(block.get("name"), f"{path}.name"), "arguments": arguments}
    return {"id": _text(block.get("id"), f"{path}.id"), "type": "function", "function": function}


def _parts_of(block: Block, path: str) -> list[Block]:
    """A block of text, an image or a document as parts of a chat's content."""
    kind = block.get("type")
    if kind == "text":
        text = _text_of(block, path)
        return [{"type": "text", "text": text}] if text else []
    if kind == "image":
        if block.get("transformations"):
            raise _wrong(f"{path}.transformations", "This field cannot be translated into a chat.")
        source = _object(block.get("source"), f"{path}.source")
        return [{"type": "image_url", "image_url": {"url": _url_of(source, f"{path}.source")}}]
    if kind == "document":
        return _document_parts(block, path)
    raise _untranslatable(kind, path)


def _url_of(source: Block, path: str) -> str:
    kind = source.get("type")
    if kind == "url":
        return _text(source.get("url"), f"{path}.url")
    if kind == "base64":
        media_type = _text(source.get("media_type"), f"{path}.media_type")
        return f"data:{media_type};base64,{_text(source.get('data'), f'{path}.data')}"
    raise _wrong_type(kind, path, "An image comes as base64 or url, not as {}.")


def _document_parts(block: Block, path: str) -> list[Block]:
    """The text of a document, after its title and context."""
    if _object(block.get("citations") or {}, f"{path}.citations").get("enabled"):
        raise _wrong(f"{path}.citations", "Citations cannot be asked of a chat.")
    head = [_text(block[name], f"{path}.{name}") for name in ("title", "context") if block.get(name) is not None]
    source = _object(block.get("source"), f"{path}.source")
    kind = source.get("type")
    parts: list[Block]
    if kind == "text":
        parts = [{"type": "text", "text": _text(source.get("data"), f"{path}.source.data")}]
    elif kind == "content":
        content = source.get("content")
        inside = f"{path}.source.content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [part for at, inner in _blocks(blocks, inside) for part in _parts_of_document(inner, at)]
    else:
        raise _wrong_type(kind, f"{path}.source", "A document comes as text or content, not as {}.")
    return [{"type": "text", "text": text} for text in head if text] + parts


def _parts_of_document(block: Block, path: str) -> list[Block]:
    if block.get("type") == "document":
        raise _untranslatable("document", path)
    return _parts_of(block, path)


def _text_of(block: Block, path: str) -> str:
    if block.get("type") != "text":
        raise _untranslatable(block.get("type"), path)
    return _text(block.get("text"), f"{path}.text", empty=True)


def _content_of(parts: list[Block]) -> str | list[Block]:
    """A single text as a string, which every chat template accepts; several parts as a list."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _blocks(content: object, path: str) -> list[tuple[str, Block]]:
    """Each block with its path."""
    if not isinstance(content, list):
        raise _wrong(path, "This must be a text or a list of blocks.")
    return [(at := f"{path}.{place}", _object(block, at)) for place, block in enumerate(content)]


# ------------------------------------------------------------------------------------------------ all the rest


def _put_sampling(chat: dict[str, Any], data: dict[str, Any]) -> None:
    stops = data.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list):
            raise _wrong("stop_sequences", "This must be a list of texts.")
        chat["stop"] = [_text(stop, f"stop_sequences.{place}") for place, stop in enumerate(stops)]
    for name, least_is_in, most in (("temperature", True, float("inf")), ("top_p", False, 1.0)):
        if data.get(name) is None:
            continue
        value = _number(data[name], name)
        if value < 0 or (value == 0 and not least_is_in) or value > most:
            raise _wrong(name, f"{value} is out of range.")
        chat[name] = value
    if data.get("top_k") is not None and (top_k := _integer(data["top_k"], "top_k", least=0)):
        chat["top_k"] = top_k  # 0, no limit, is a chat's default


def _put_tools(chat: dict[str, Any], data: dict[str, Any]) -> None:
    given = data.get("tools") or []
    if not isinstance(given, list):
        raise _wrong("tools", "This must be a list.")
    tools = [_function_of(tool, f"tools.{place}") for place, tool in enumerate(given)]
    if tools:
        chat |= {"tools": tools, "tool_choice": "auto"}
    if data.get("tool_choice") is None:
        return
    choice = _object(data["tool_choice"], "tool_choice")
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise _wrong_type(kind, "tool_choice", "This must be auto, any, tool or none, not {}.")
    if not tools:
        if kind in ("any", "tool"):
            raise _wrong("tool_choice", "There are no tools to choose from.")
        return
    if _flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if kind == "tool":
        name = _text(choice.get("name"), "tool_choice.name")
        if all(tool["function"]["name"] != name for tool in tools):
            raise _wrong("tool_choice.name", f"There is no tool {_shown(name)}.")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind != "auto":
        chat["tool_choice"] = "required" if kind == "any" else "none"


def _function_of(tool: object, path: str) -> Block:
    """A client's own tool as a function; tools that Anthropic's service defines have a `type`."""
    fields = _object(tool, path)
    kind = fields.get("type")
    if kind not in (None, "custom"):
        raise _wrong_type(kind, path, "Only tools of type custom can be served, not {}.")
    _check_fields(fields, _OF_TOOLS, f"{path}.")
    schema = _object(fields.get("input_schema"), f"{path}.input_schema")
    function: Block = {"name": _text(fields.get("name"), f"{path}.name"), "parameters": {"type": "object", **schema}}
    if fields.get("description") is not None:
        function["description"] = _text(fields["description"], f"{path}.description", empty=True)
    if fields.get("strict") is not None:
        function["strict"] = _flag(fields["strict"], f"{path}.strict")
    return {"type": "function", "function": function}


def _put_thinking(chat: dict[str, Any], data: dict[str, Any]) -> None:
    """Translate `thinking`: templates switch it by a variable with one of two names; the engine applies a budget."""
    if data.get("thinking") is None:
        return
    thinking = _object(data["thinking"], "thinking")
    kind = thinking.get("type")
    if kind == "adaptive":
        return
    if kind not in ("enabled", "disabled"):
        raise _wrong_type(kind, "thinking", "This must be enabled, disabled or adaptive, not {}.")
    thinks = kind == "enabled"
    if thinks:
        budget = _integer(thinking.get("budget_tokens"), "thinking.budget_tokens", least=_LEAST_BUDGET)
        if budget >= chat["max_tokens"]:
            raise _wrong("thinking.budget_tokens", f"This must be less than max_tokens, {chat['max_tokens']}.")
        chat["thinking_token_budget"] = budget
    asked = chat.get("chat_template_kwargs", {})
    chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **asked}


def _put_output(chat: dict[str, Any], data: dict[str, Any]) -> None:
    config = _object(data.get("output_config") or {}, "output_config")
    _check_fields(config, _OF_OUTPUT, "output_config.")
    effort = config.get("effort")
    if effort is not None:
        if effort not in _EFFORTS:
            raise _wrong("output_config.effort", f"This must be one of {', '.join(_EFFORTS)}.")
        chat["reasoning_effort"] = effort
    for path, wanted in (("output_config.format", config.get("format")), ("output_format", data.get("output_format"))):
        if wanted is None:
            continue
        form = _object(wanted, path)
        if form.get("type") != "json_schema":
            raise _wrong_type(form.get("type"), path, "This must be json_schema, not {}.")
        schema = _object(form.get("schema"), f"{path}.schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}


# ------------------------------------------------------------------------------------------------------ values


def _check_fields(fields: dict[str, Any], known: frozenset[str], path: str = "") -> None:
    """Refuse unknown fields unless they are null. Raises: InvalidRequest. `path`: the prefix of their names, with its
    dot.
    """
    for name, value in fields.items():
        has_value = value is not None and value != [] and value != {}
        if has_value and name not in known:
            raise _wrong(f"{path}{name[:_MAX_QUOTED]}", "This field cannot be translated into a chat.")


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, "This must be an object." if value is not None else "Field required")
    return value


def _text(value: object, path: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _wrong(path, "This must be a text." if value is not None else "Field required")
    if not value and not empty:
        raise _wrong(path, "This must not be empty.")
    return value


def _number(value: object, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    number = as_number(value)
    if number is None:
        raise _wrong(path, "This must be a number.")
    return number


def _integer(value: object, path: str, *, least: int | None = None) -> int:
    integer = value if type(value) is int else as_integer(value)
    if integer is None:
        raise _wrong(path, "This must be an integer." if value is not None else "Field required")
    if least is not None and integer < least:
        raise _wrong(path, f"This must be at least {least}, got {integer}.")
    return checked(path, integer, least=None)


def _flag(value: object, path: str) -> bool:
    flag = bool(value) if value is None or isinstance(value, bool) else as_boolean(value)
    if flag is None:
        raise _wrong(path, "This must be true or false.")
    return flag


def _token_ids(value: object, path: str) -> list[int]:
    ids = as_integers(value)
    if ids is None or min(ids, default=0) < 0:
        raise _wrong(path, "This must be a list of token ids.")
    return ids


def _engine_arguments(value: object, path: str) -> dict[str, Any]:
    """Check `vllm_xargs`: strings, numbers and lists of them."""
    arguments = _object(value, path)
    for name, given in arguments.items():
        if not all(isinstance(each, str | int | float) for each in (given if isinstance(given, list) else [given])):
            raise _wrong(f"{path}.{name[:_MAX_QUOTED]}", "This must be a text, a number or a list of them.")
    return arguments


# fields of engines and of the router, named as in a chat
_OF_CHAT: Final[dict[str, Callable[[object, str], object]]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("priority", "min_tokens", "seed"), _integer),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "watermarking"), _flag),
    "cache_salt": _text,
    "chat_template_kwargs": _object,
    "stop_token_ids": _token_ids,
    "vllm_xargs": _engine_arguments,
}
_FIELDS: Final = _OURS | _WITHOUT_EFFECT | frozenset(_OF_CHAT)


def _untranslatable(kind: object, path: str) -> InvalidRequest:
    return _wrong_type(kind, path, "A block of type {} cannot be translated into a chat here.")


def _wrong_type(kind: object, path: str, text: str) -> InvalidRequest:
    return _wrong(f"{path}.type", "Field required" if kind is None else text.format(_shown(kind)))


def _wrong(path: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {text}", param=path)


def _shown(value: object) -> str:
    return repr(value)[:_MAX_QUOTED]
