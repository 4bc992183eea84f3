"""Tests of the ends of streams that no worker writes: what a client reads in them."""

import orjson
import pytest

from balanceroute.proxy.wire.closing import ended_by_length


@pytest.mark.parametrize(
    ("chat", "kind", "part"), [(True, "chat.completion.chunk", {"delta": {}}), (False, "text_completion", {"text": ""})]
)
def test_an_answer_at_its_limit_ends_with_its_finish_its_usage_and_done(
    chat: bool, kind: str, part: dict[str, object]
) -> None:
    finish, usage, done, rest = ended_by_length("m", 7, 5, chat=chat, with_usage=True).split(b"\n\n")
    finish_event = orjson.loads(finish.removeprefix(b"data: "))
    usage_event = orjson.loads(usage.removeprefix(b"data: "))

    assert (finish_event["object"], usage_event["object"], usage_event["model"]) == (kind, kind, "m")
    assert finish_event["choices"] == [
        {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert usage_event["choices"] == []
    assert usage_event["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert (done, rest) == (b"data: [DONE]", b"")
