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


def ended_by_length(model: str | None, usage: dict[str, int] | None, *, chat: bool) -> bytes:
    """The last events of an answer that has reached its limit, as a worker would send them.

    `usage`: where the client wants one in each event; the one at the end is the scanner's to add.
    """
    head = event_head("", 0, model, chat=chat)
    part: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    return event_bytes({**head, "choices": [choice], **({"usage": usage} if usage else {})}) + DONE_EVENT
