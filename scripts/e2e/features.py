"""What a client may ask for, and how the router's answer compares with that of one plain server.

Each feature is a request; the same bytes go to the router and to a decoder, which, sent no kv_transfer_params, is a
server of its own. `differences` compares status and body: ids and times are dropped, streams are put together first,
numbers may differ in the third decimal (a prompt computed elsewhere is summed in another order).
"""

import json
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox jumps over the lazy dog and then it runs home"
IDS = list(range(40, 70))
# where the router differs, and why; docs/compatibility.md says the same
DIFFERS: dict[str, str] = {
    "stream echo logprobs": "400: the logprobs of a prompt come from its prefiller, not in a stream",
    **dict.fromkeys(
        ("n", "batch n", "echo n", "stream n", "chat n", "stream chat n"),
        "200: vLLM refuses n > 1 with temperature 0; here every choice is a request of its own",
    ),
    "beam search": "400: its requests carry no KV transfer",
    "responses": "404: recomputed requests would look complete on this route",
    "messages": "translated: stop_sequence also where it is null",
}
_DROPPED = {
    "id", "created", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics", "prompt_text",
    "routed_experts", "prompt_tokens_details", "completion_tokens_details", "input",
}  # fmt: skip


def features() -> list[tuple[str, str, dict[str, Any]]]:
    """(name, route, body) of every feature."""
    found = [(name, COMPLETIONS, _completion(**body)) for name, body in _COMPLETIONS.items()]
    found += [(f"stream {name}", COMPLETIONS, _completion(**body, stream=True)) for name, body in _STREAMED.items()]
    found += [(f"chat {name}", CHAT, _chat(**body)) for name, body in _CHATS.items()]
    found += [(f"stream chat {name}", CHAT, _chat(**body, stream=True)) for name, body in _STREAMED_CHATS.items()]
    found += [(name, route, body) for name, (route, body) in _OTHERS.items()]
    return found


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields


def _chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me about foxes"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0} | fields


_SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"max_tokens": 100, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "min_tokens": {"max_tokens": 20, "min_tokens": 20},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 70},
    "stop": {"stop": ["w7"], "max_tokens": 40},
    "stop list": {"stop": ["zzz", "w4", "w5"], "max_tokens": 80},
    "stop included": {"stop": ["w7"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop_token_ids": {"stop_token_ids": list(range(300, 600)), "max_tokens": 40},
    "logit_bias": {"logit_bias": {"50": 100}},
    "allowed_token_ids": {"allowed_token_ids": [50, 51, 52]},
    "bad_words": {"bad_words": ["quest"]},
    "presence_penalty": {"presence_penalty": 1.5, "max_tokens": 40},
    "frequency_penalty": {"frequency_penalty": 1.5, "max_tokens": 40},
    "repetition_penalty": {"repetition_penalty": 1.5, "max_tokens": 40},
    "seed": {"seed": 7, "temperature": 0.0},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "skip_special_tokens": {"skip_special_tokens": False, "max_tokens": 30},
    "spaces": {"spaces_between_special_tokens": False},
    "token ids": {"return_token_ids": True},
    "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": 1},
    "priority": {"priority": 3},
    "user": {"user": "someone"},
    "cache_salt": {"cache_salt": "abc"},
    "unknown field": {"a_field_of_tomorrow": 1},
    "n": {"n": 2},
}
_WRONG: dict[str, dict[str, Any]] = {
    "bad max_tokens": {"max_tokens": -1},
    "zero max_tokens": {"max_tokens": 0},
    "bad min_tokens": {"min_tokens": 50},
    "bad temperature": {"temperature": -1},
    "bad top_p": {"top_p": 3},
    "bad n": {"n": 0},
    "bad type": {"max_tokens": "many"},
    "bad model": {"model": "nobody"},
    "too long": {"max_tokens": 100000},
    "bad stream_options": {"stream_options": {"include_usage": True}},
    "bad logit_bias": {"logit_bias": {"a": 1}},
    "bad response_format": {"response_format": {"type": "nonsense"}},
}
_GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": {"regex": "[a-z]{3} [0-9]{2}"}, "max_tokens": 30},
    "choice": {"structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 30},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 30},
}
_COMPLETIONS: dict[str, dict[str, Any]] = {
    **_SHAPES,
    **_WRONG,
    **_GRAMMARS,
    "ids": {"prompt": IDS},
    "batch": {"prompt": ["one fox", "two dogs and more"]},
    "batch of ids": {"prompt": [IDS, IDS[:7]]},
    "batch n": {"prompt": ["one fox", "two dogs"], "n": 2},
    "truncate": {"truncate_prompt_tokens": 8},
    "no special tokens": {"add_special_tokens": False},
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "logprobs long": {"logprobs": 1, "max_tokens": 80, "ignore_eos": True},
    "echo": {"echo": True},
    "echo ids": {"echo": True, "prompt": IDS},
    "echo long": {"echo": True, "max_tokens": 80, "ignore_eos": True},
    "echo logprobs": {"echo": True, "logprobs": 2},
    "echo logprobs ids": {"echo": True, "logprobs": 1, "prompt": IDS},
    "echo logprobs one": {"echo": True, "logprobs": 1, "max_tokens": 1},
    "echo token ids": {"echo": True, "return_token_ids": True},
    "echo n": {"echo": True, "n": 2},
    "echo batch": {"echo": True, "logprobs": 1, "prompt": ["one fox", "two dogs and more"]},
    "scoring": {"echo": True, "max_tokens": 0},
    "scoring logprobs": {"echo": True, "max_tokens": 0, "logprobs": 2},
    "scoring batch": {"echo": True, "max_tokens": 0, "logprobs": 1, "prompt": ["one fox", "two dogs and more"]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "prompt_logprobs long": {"prompt_logprobs": 1, "max_tokens": 80, "ignore_eos": True},
    "prompt_logprobs and echo": {"prompt_logprobs": 1, "echo": True, "logprobs": 2},
    "bad prompt_logprobs": {"prompt_logprobs": -7},
    "empty prompt": {"prompt": ""},
    "no prompt": {"prompt": None},
    "beam search": {"use_beam_search": True, "n": 2},
}
_STREAMED: dict[str, dict[str, Any]] = {
    **{name: _SHAPES[name] for name in ("plain", "long", "one token", "stop", "stop included", "token ids", "n")},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "interval": {"stream_interval": 4, "max_tokens": 40},
    "logprobs": {"logprobs": 2, "max_tokens": 40},
    "batch": {"prompt": ["one fox", "two dogs and more"]},
    "echo": {"echo": True},
    "echo ids": {"echo": True, "prompt": IDS},
    "echo logprobs": {"echo": True, "logprobs": 1},
    "scoring": {"echo": True, "max_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "regex": _GRAMMARS["regex"],
    "bad model": {"model": "nobody"},
    "bad max_tokens": {"max_tokens": 100000},
}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_CALL = r'<tool_call>\n\{"name": "f", "arguments": \{"a": 12\}\}\n</tool_call>'  # as hermes' parser reads it
_CONTINUED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so the"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
_CHATS: dict[str, dict[str, Any]] = {
    **{name: body for name, body in _SHAPES.items() if name != "tokens as ids"},
    **{name: body for name, body in _WRONG.items() if name != "zero max_tokens"},
    **_GRAMMARS,
    "max_completion_tokens": {"max_completion_tokens": 9, "max_tokens": 30},
    "max_completion_tokens beside max_tokens 0": {"max_completion_tokens": 9, "max_tokens": 0},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs long": {"logprobs": True, "max_tokens": 80, "ignore_eos": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "echo continued": {"echo": True} | _CONTINUED,
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "tell me"}]}]},
    "continue": _CONTINUED,
    "no messages": {"messages": []},
    "bad role": {"messages": [{"content": "hello"}]},
    "tool_choice none": {"tools": _TOOLS, "tool_choice": "none"},
    "tool_choice required": {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 60},
    "tool_choice named": {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "tool call": {"tools": _TOOLS, "structured_outputs": {"regex": _CALL}, "max_tokens": 64},
}
_STREAMED_CHATS: dict[str, dict[str, Any]] = {
    **{name: _SHAPES[name] for name in ("plain", "long", "one token", "stop", "token ids", "n")},
    "usage": {"stream_options": {"include_usage": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "json": _GRAMMARS["json"],
    "echo continued": {"echo": True} | _CONTINUED,
    "no messages": {"messages": []},
}
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": PROMPT}),
    "tokenize chat": ("/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": IDS}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "hello"}),
    "messages": (
        "/v1/messages",
        {"model": "tiny", "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]},
    ),
}


def differences(url: str, plain_url: str, route: str, body: dict[str, Any]) -> list[str]:
    """Where the two answers differ, as paths into them with both values; nothing where they are equal."""
    ours, theirs = (_told(base + route, body) for base in (url, plain_url))
    if ours["status"] != theirs["status"]:
        return [f"status {ours['status']}, not {theirs['status']}: {str(ours)[:200]}"]
    if ours["status"] != 200:
        return []  # texts of errors are the router's own
    return _differ(ours, theirs, "")


def _told(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(url, json=body, timeout=120, trust_env=False)
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        return {"status": reply.status_code, "stream": _put_together(reply.text)}
    return {"status": reply.status_code, "body": reply.json()}


def _put_together(text: str) -> dict[str, Any]:
    """A stream as what its client ends up with: per choice its texts, ids, logprobs and finish."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices, "done": text.count("data: [DONE]"), "usage": None, "error": None}
    for line in text.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        whole["error"] = event.get("error") or whole["error"]
        whole["usage"] = event.get("usage") or whole["usage"]
        for part in event.get("choices", ()):
            choice = choices.setdefault(part["index"], {"finish_reason": None, "stop_reason": None})
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if part.get(name) is not None}
            delta = part.get("delta") or {"text": part.get("text")}
            scores = {f"logprobs.{name}": value for name, value in (part.get("logprobs") or {}).items()}
            for name, value in [*delta.items(), *scores.items(), ("ids", part.get("token_ids"))]:
                if isinstance(value, str | list) and value:
                    choice[name] = choice.get(name, type(value)()) + value
    return whole


def _differ(ours: Any, theirs: Any, at: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for name in sorted(ours.keys() | theirs.keys(), key=str):
            if name not in _DROPPED:
                found += _differ(ours.get(name), theirs.get(name), f"{at}.{name}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for each in _differ(a, b, f"{at}[{i}]")]
    numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
    if ours == theirs or (numbers and abs(ours - theirs) <= 0.01 + 0.001 * abs(theirs)):
        return []
    return [f"{at}: {str(ours)[:120]!r}, not {str(theirs)[:120]!r}"]
