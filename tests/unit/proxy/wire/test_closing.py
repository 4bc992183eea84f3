"""Tests of the ends of streams that no worker writes: what a client reads in them."""

import orjson
import pytest

from balanceroute.proxy.wire.closing import ended_by_length


@pytest.mark.parametrize(
    ("chat", "kind", "part"), [(True, "chat.completion.chunk", {"delta": {}}), (False, "text_completion", {"text": ""})]
)
@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 7}])
def test_an_answer_at_its_limit_ends_with_its_finish_and_done(
    chat: bool, kind: str, part: dict[str, object], usage: dict[str, int] | None
) -> None:
    finish, done, rest = ended_by_length("m", usage, chat=chat).split(b"\n\n")
    finish_event = orjson.loads(finish.removeprefix(b"data: "))

    assert (finish_event["object"], finish_event["model"], finish_event.get("usage")) == (kind, "m", usage)
    assert finish_event["choices"] == [
        {"index": 0, **part, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert (done, rest) == (b"data: [DONE]", b"")
