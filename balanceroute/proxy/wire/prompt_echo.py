"""Merges the prompt's part of an answer, `echo` and prompt logprobs, with the decoder's part.

The prefiller's reply to the probe has the prompt's part (`client_request.PromptWishes`), the decoder's answer the rest.

    completions, echo              choice.text = prompt + answer
    completions, echo + logprobs   choice.logprobs: the prompt's lists, then the answer's, with text offsets shifted
    chats, echo                    message.content = last message + answer
    prompt_logprobs                of the choice (completions) or of the answer (chat)

A request with `echo` and `max_tokens: 0` has no answer: the prefiller's reply is all there is (`scored_answer`, or
`scored_events` for a client that streams).
"""

from typing import Any

import orjson

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.answer_identity import WHOLE, Part
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.closing import DONE_EVENT, event_bytes, event_head

_SHAPE_ERRORS = (TypeError, KeyError, IndexError, AttributeError, ValueError)


def prompt_text(request: ClientRequest, reply: dict[str, Any] | None) -> str:
    """The text with which a stream's first text begins; "": no echo.

    It is the prompt's, from the prefiller (`reply`), or a chat's last message. An engine that is asked for token ids
    leaves the prompt's text out of an echo; so does the router.
    """
    wishes = request.prompt_wishes
    if wishes is None:
        return ""
    if not wishes.echo or request.return_token_ids or reply is None:
        return wishes.last_message.decode()
    text = reply["choices"][0].get("text")
    return text if isinstance(text, str) else ""


def with_prompt(request: ClientRequest, answer: bytes, reply: dict[str, Any]) -> bytes:
    """The decoder's whole answer to one prompt, with the prompt's part from the prefiller.

    Raises: BadUpstreamReply: the two do not fit together.
    """
    wishes = request.prompt_wishes
    assert wishes is not None
    try:
        whole = orjson.loads(answer)
        choice, prompt_choice = whole["choices"][0], reply["choices"][0]
        if wishes.echo:
            choice["text"] = prompt_text(request, reply) + (choice.get("text") or "")
            if wishes.logprobs is not None:
                choice["logprobs"] = _joined(prompt_choice["logprobs"], choice["logprobs"])
        if request.endpoint == "chat":
            if wishes.last_message:
                choice["message"]["content"] = wishes.last_message.decode() + (choice["message"].get("content") or "")
            whole["prompt_logprobs"] = reply.get("prompt_logprobs")
        else:
            choice["prompt_logprobs"] = prompt_choice.get("prompt_logprobs")
        return orjson.dumps(whole)
    except _SHAPE_ERRORS as exc:
        text = f"the prefiller's word on the prompt does not fit the answer ({type(exc).__name__}: {exc})"
        raise BadUpstreamReply(text, worker="", tier="prefill") from exc


def _joined(prompt: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Join the logprobs of completions: four parallel lists; offsets count characters of the whole text."""
    start = prompt["text_offset"][-1] + len(prompt["tokens"][-1])
    shifted = {**answer, "text_offset": [start + offset for offset in answer["text_offset"]]}
    return {
        name: _one_list(values, shifted[name]) if isinstance(values, list | orjson.Fragment) else values
        for name, values in prompt.items()
    }


def _one_list(prompt: list[Any] | orjson.Fragment, answer: list[Any]) -> orjson.Fragment:
    parts = orjson.dumps(prompt)[1:-1], orjson.dumps([*answer])[1:-1]
    return orjson.Fragment(b"[%b]" % b",".join(filter(None, parts)))


def scored_answer(reply: dict[str, Any]) -> bytes:
    """The whole answer to a request without generated text."""
    return orjson.dumps({**reply, "kv_transfer_params": None})


def scored_events(request: ClientRequest, reply: dict[str, Any], part: Part = WHOLE) -> bytes:
    """The same as a stream: one event with everything, then the usage if asked for, and [DONE]."""
    choice = reply["choices"][0]
    head = event_head(
        part.public_id or reply.get("id"), part.created or reply.get("created"), reply.get("model"), chat=False
    )
    shown = ("text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    shown_choice = {"index": part.index or 0} | {name: choice.get(name) for name in shown}
    events: list[dict[str, Any]] = [{**head, "choices": [shown_choice]}]
    usage = {name: value for name, value in (reply.get("usage") or {}).items() if value is not None}
    if request.continuous_usage:
        events[0]["usage"] = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
    if request.include_usage and part.closing_events:
        events.append({**head, "choices": [], "usage": usage})
    if part.closing_events and reply.get("system_fingerprint"):
        events[-1]["system_fingerprint"] = reply["system_fingerprint"]
    text = b"".join(map(event_bytes, events))
    return text + DONE_EVENT if part.closing_events else text
