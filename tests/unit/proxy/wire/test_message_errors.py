"""Errors in Anthropic's form and words."""

import orjson
import pytest

from balanceroute.errors import UpstreamStatus
from balanceroute.proxy.wire.fields import MAX_INTEGER
from balanceroute.proxy.wire.message_errors import message_error_body, message_refusal
from balanceroute.proxy.wire.responses import error_body

COUNTED = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains {} input tokens, which exceeds"
    " this limit even without any output tokens. Please reduce the length of the input prompt."
)
UNCOUNTED = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 40000 characters (more than"
    " 30720 characters, which is the upper bound for 2048 input tokens). Please reduce the length of the input prompt."
)
OUTPUT_TOO = (
    "This model's maximum context length is 2048 tokens. However, you requested {} output tokens and your prompt"
    " contains {}, for a total of at least 2049 tokens. Please reduce the length of the input prompt or the number of"
    " requested output tokens."
)
OLD = (
    "This model's maximum context length is 2048 tokens. However, your request has 3000 input tokens. Please reduce the"
    " length of the input messages."
)
OLD_OUTPUT_TOO = (
    "'max_tokens' or 'max_completion_tokens' is too large: 2000. This model's maximum context length is 2048 tokens and"
    " your request has 100 input tokens (2000 > 2048 - 100)."
)
FEWER = (
    "input length and `max_tokens` exceed context limit: {} > 2048, decrease input length or `max_tokens` and try again"
)
LIMIT = "max_tokens=100000 cannot be greater than max_model_len=2048. Please request fewer output tokens."


@pytest.mark.parametrize(
    ("engine_text", "expected"),
    [
        (COUNTED.format("3000"), "prompt is too long: 3000 tokens > 2048 maximum"),
        (COUNTED.format("at least 2049"), "prompt is too long: 2049 tokens > 2048 maximum"),
        (UNCOUNTED, f"prompt is too long: {UNCOUNTED}"),
        (OUTPUT_TOO.format(1, "at least 2048 input tokens"), "prompt is too long: 2048 tokens > 2048 maximum"),
        (OUTPUT_TOO.format(0, "3000 input tokens"), "prompt is too long: 3000 tokens > 2048 maximum"),
        (OUTPUT_TOO.format(1, "40000 characters"), f"prompt is too long: {OUTPUT_TOO.format(1, '40000 characters')}"),
        (OUTPUT_TOO.format(2000, "at least 49 input tokens"), FEWER.format("49 + 2000")),
        (OUTPUT_TOO.format(3000, "20 characters"), OUTPUT_TOO.format(3000, "20 characters")),
        (OLD, "prompt is too long: 3000 tokens > 2048 maximum"),
        (OLD_OUTPUT_TOO, FEWER.format("100 + 2000")),
        (OUTPUT_TOO.format(MAX_INTEGER, "100 input tokens"), FEWER.format(f"100 + {MAX_INTEGER}")),
        (OLD_OUTPUT_TOO.replace(": 2000", f": {MAX_INTEGER}"), FEWER.format(f"100 + {MAX_INTEGER}")),
        (LIMIT, LIMIT),
        (COUNTED.format("9" * 5000), COUNTED.format("9" * 5000)),
    ],
)
def test_only_a_prompt_that_is_too_long_alone_or_with_its_output_gets_anthropics_error_text(
    engine_text: str, expected: str
) -> None:
    body = orjson.loads(message_error_body(400, error_body(400, engine_text), "r"))
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": expected},
        "request_id": "r",
    }


@pytest.mark.parametrize(("status", "kind"), [(422, "invalid_request_error"), (502, "api_error")])
def test_a_status_without_a_type_of_its_own_is_the_client_s_fault_or_the_server_s(status: int, kind: str) -> None:
    assert orjson.loads(message_error_body(status, error_body(status, "x"), "r"))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":"no such model"}', "no such model"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"error":{"code":7}}', '{"error":{"code":7}}'),
    ],
)
def test_a_worker_s_error_of_any_shape_is_anthropic_s_with_its_text(body: bytes, message: str) -> None:
    error = UpstreamStatus("x", status=404, body=body, worker="d0", tier="decode")
    assert orjson.loads(message_refusal(error, [])[2])["error"] == {"type": "not_found_error", "message": message}
