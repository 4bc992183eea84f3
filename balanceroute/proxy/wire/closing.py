"""The last events of a stream whose end no worker sends: finish reason, usage and [DONE], as an engine writes them."""

from typing import Any, Final

import orjson

DONE_EVENT: Final = b"data: [DONE]\n\n"


def event_bytes(event: dict[str, Any]) -> bytes:
    """An event of a stream as it is sent."""
    return b"data: %s\n\n" % orjson.dumps(event)


def event_head(answer_id: str | None, created: int | None, model: str | None, *, chat: bool) -> dict[str, Any]:
    """The fields that begin every event of an answer."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """A usage by counts alone."""
    total_tokens = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total_tokens}


def ended_by_length(
    model: str | None, prompt_tokens: int, tokens: int, *, chat: bool, with_usage: bool, continuous: bool = False
) -> bytes:
    """The last events of an answer that has reached its limit with `tokens`, as a worker would send them.

    `with_usage`: the client wants a usage. `continuous`: it wants one in each event.
    """
    head = event_head("", 0, model, chat=chat)
    part: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = usage_of(prompt_tokens, tokens)
    finish = event_bytes({**head, "choices": [choice], **({"usage": usage} if continuous else {})})
    last = event_bytes({**head, "choices": [], "usage": usage}) if with_usage else b""
    return finish + last + DONE_EVENT
