"""Errors in Anthropic's form and words."""

import orjson
import pytest

from balanceroute.proxy.wire.message_errors import message_error_body
from balanceroute.proxy.wire.responses import error_body

COUNTED = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains {} input tokens, which exceeds"
    " this limit even without any output tokens. Please reduce the length of the input prompt."
)
UNCOUNTED = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 40000 characters (more than"
    " 30720 characters, which is the upper bound for 2048 input tokens). Please reduce the length of the input prompt."
)
LIMIT = "max_tokens=100000 cannot be greater than max_model_len=2048. Please request fewer output tokens."


@pytest.mark.parametrize(
    ("engine_text", "expected"),
    [
        (COUNTED.format("3000"), "prompt is too long: 3000 tokens > 2048 maximum"),
        (COUNTED.format("at least 2049"), "prompt is too long: 2049 tokens > 2048 maximum"),
        (UNCOUNTED, f"prompt is too long: {UNCOUNTED}"),
        (LIMIT, LIMIT),
    ],
    ids=["counted", "cut-before-counting", "characters", "another-limit"],
)
def test_only_an_over_long_prompt_gets_anthropics_error_text(engine_text: str, expected: str) -> None:
    body = orjson.loads(message_error_body(400, error_body(400, engine_text), "r"))
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": expected},
        "request_id": "r",
    }
