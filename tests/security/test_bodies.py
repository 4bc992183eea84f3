"""Bodies: bounded on every route; JSON too deep, numbers too large and what is no JSON are a 400, never a traceback."""

import json

import pytest

from tests.security.deployment import Edge
from tests.security.wire import Answer, body, completion, request

pytestmark = pytest.mark.e2e

LIMIT = 2**20  # `conftest.LIMITS`
DEPTH = 200_000
HOT = ("/v1/completions", "/v1/chat/completions")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
PARSED = (*HOT, *MESSAGES, "/instances/add", "/instances/remove")
ROUTES = (*PARSED, "/tokenize", "/detokenize")  # those two pass on what they get, within its bounds


def refused(answer: Answer, *statuses: int) -> None:
    assert answer.status in statuses, answer
    assert answer.error()


@pytest.mark.parametrize("target", ROUTES)
def test_a_length_above_the_limit_is_a_413_before_the_body_comes(edge: Edge, target: str) -> None:
    with edge.connect() as connection:
        connection.send(request("POST", target, "Content-Type: application/json", f"Content-Length: {LIMIT + 1}"))
        answer = connection.answer("POST")
        refused(answer, 413)
        assert answer.closes and connection.has_ended()


@pytest.mark.parametrize("target", ROUTES)
def test_chunks_above_the_limit_are_a_413_before_all_have_arrived(edge: Edge, target: str) -> None:
    before = edge.rss_bytes()
    with edge.connect() as connection:
        connection.send(request("POST", target, "Content-Type: application/json", "Transfer-Encoding: chunked"))
        connection.send_until_stuck(b"10000\r\n" + b" " * 65536 + b"\r\n", 64 * LIMIT)
        refused(connection.answer("POST"), 413)
        assert connection.has_ended()
    assert edge.rss_bytes() - before < 16 * LIMIT


def test_a_body_of_just_the_limit_is_served(edge: Edge) -> None:
    content = body()
    assert edge.ask(request("POST", "/v1/completions", body=content.ljust(LIMIT))).status == 200


def test_a_client_that_reads_only_after_it_has_sent_everything_still_gets_its_413(edge: Edge) -> None:
    """Closing at once, with bytes unread, would reset the connection and throw the answer away."""
    with edge.connect() as connection:
        connection.send(request("POST", "/v1/completions", body=b" " * (LIMIT + 200_000)))
        assert connection.answer("POST").status == 413


@pytest.mark.parametrize("shape", ["[", '{"a":', '[{"a":', "[[],"], ids=["lists", "objects", "both", "empty"])
@pytest.mark.parametrize("target", PARSED)
def test_endless_nesting_is_a_400(edge: Edge, target: str, shape: str) -> None:
    content = shape * (DEPTH // len(shape))
    refused(edge.ask(request("POST", target, body=content.encode())), 400, 401, 403)


@pytest.mark.parametrize("depth", [100, 500, 1000, 2000, 5000])
@pytest.mark.parametrize("field", ["prompt", "tools", "metadata", "guided_json", "messages", "model"])
def test_a_field_nested_deeply_is_served_or_a_400(edge: Edge, field: str, depth: int) -> None:
    """At any depth: the parser's own limit, and that of what writes it again, may differ."""
    nested = "[" * depth + "]" * depth
    for target in (*HOT, *MESSAGES):
        fields = {"prompt": '"a"', "messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1", field: nested}
        content = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
        assert edge.ask(request("POST", target, body=content.encode())).status in (200, 400)


COSTLY = {
    "lists": '"x": [' + "[]," * 330_000 + "1]",
    "objects": '"x": [' + "{}," * 330_000 + "1]",
    "texts": '"stop": [' + '"",' * 330_000 + '""]',
    "keys": '"x": [' + '{"":0},' * 135_000 + "1]",
    "prompts": '"prompt": [' + "[]," * 330_000 + "[]]",
}


@pytest.mark.parametrize("fields", COSTLY.values(), ids=COSTLY)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(edge: Edge, fields: str) -> None:
    """32 MiB of them took a gigabyte, and stopped everybody's stream for seconds."""
    content = f'{{"prompt": "a", "messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, {fields}}}'
    for target in (*HOT, *MESSAGES):
        answer = edge.ask(request("POST", target, body=content.encode()))
        assert answer.status == 400 and "holds more than" in answer.error(), target


@pytest.mark.parametrize(
    "value", ["-1", "0", "1.5", "1e999", "9" * 400, "18446744073709551615", '"7"', "[]", "{}", "true"]
)
def test_an_unusual_number_in_a_message_is_served_or_a_400(edge: Edge, value: str) -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "thinking", "tools", "system")
    for name in names:
        fields = {"messages": '[{"role": "user", "content": "odd"}]', "max_tokens": "1", name: value}
        content = "{" + ", ".join(f'"{field}": {number_text}' for field, number_text in fields.items()) + "}"
        for target in MESSAGES:
            answer = edge.ask(request("POST", target, body=content.encode()))
            assert answer.status in (200, 400), (target, content, answer)


def test_text_that_resembles_json_values_is_served(edge: Edge) -> None:
    assert edge.ask(completion('[]{}\\"' * 100_000)).status == 200


NUMBERS = {
    "seed-of-64-bits-n-2": {"seed": 2**64 - 1, "n": 2},
    "seed-of-63-bits-n-2": {"seed": 2**63 - 1, "n": 2},
    "seed-negative-n-2": {"seed": -(2**63), "n": 2},
    "seed-fraction-n-2": {"seed": 0.5, "n": 2},
    "seed-text-n-2": {"seed": "1", "n": 2},
    "seed-null-n-2": {"seed": None, "n": 2},
    "seed-true-n-2": {"seed": True, "n": 2},
    "n-huge": {"n": 10**9},
    "n-negative": {"n": -1},
    "n-zero": {"n": 0},
    "n-fraction": {"n": 1.5},
    "n-text": {"n": "2"},
    "max-tokens-of-64-bits": {"max_tokens": 2**64 - 1},
    "max-tokens-negative": {"max_tokens": -1},
    "max-tokens-fraction": {"max_tokens": 1.5},
    "max-tokens-text": {"max_tokens": "1"},
    "min-tokens-huge": {"min_tokens": 2**63},
    "priority-huge": {"priority": 2**64 - 1},
    "priority-text": {"priority": "high"},
    "temperature-huge": {"temperature": 1e308},
    "logprobs-huge": {"logprobs": 2**64 - 1},
    "best-of-huge": {"best_of": 2**64 - 1},
    "prompt-of-huge-ids": {"prompt": [2**64 - 1] * 4},
    "prompt-of-negative-ids": {"prompt": [-1, -2]},
    "prompt-of-fractions": {"prompt": [0.5]},
    "prompt-of-nulls": {"prompt": [None]},
    "prompt-of-lists": {"prompt": [[[1]]]},
    "prompt-empty": {"prompt": []},
    "prompt-of-empties": {"prompt": [[], []]},
    "prompt-number": {"prompt": 7},
    "prompt-object": {"prompt": {"a": 1}},
    "prompts-without-number": {"prompt": ["a"] * 10_000},
    "stream-text": {"stream": "yes"},
    "stream-options-list": {"stream": True, "stream_options": []},
    "stream-options-text": {"stream": True, "stream_options": "usage"},
    "model-number": {"model": 7},
    "stop-of-numbers": {"stop": [1]},
    "kv-transfer-params": {"kv_transfer_params": {"do_remote_decode": True, "remote_host": "evil"}},
    "kv-transfer-params-text": {"kv_transfer_params": "evil"},
}


@pytest.mark.parametrize("fields", NUMBERS.values(), ids=NUMBERS)
def test_an_unusual_value_is_served_or_a_400(edge: Edge, fields: dict[str, object]) -> None:
    for stream in (False, True):
        answer = edge.ask(completion(**{"prompt": "odd", "stream": stream, **fields}))  # type: ignore[arg-type]
        assert answer.status in (200, 400), answer
    assert not any(b"evil" in seen.body for seen in edge.workers.seen)


RAW = {
    "empty": b"",
    "blank": b"   ",
    "nul": b"\x00",
    "text": b"hello",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "string": b'"a"',
    "half": b'{"prompt": "a"',
    "two": b'{"prompt": "a"}{"prompt": "b"}',
    "trailing-comma": b'{"prompt": "a",}',
    "single-quotes": b"{'prompt': 'a'}",
    "comment": b'{"prompt": "a"} // b',
    "not-a-number": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "number-of-400-digits": b'{"prompt": "a", "max_tokens": %b}' % (b"9" * 400),
    "number-of-a-megabyte": b'{"prompt": "a", "max_tokens": %b}' % (b"9" * (LIMIT - 100)),
    "exponent": b'{"prompt": "a", "max_tokens": 1e999}',
    "leading-zero": b'{"prompt": "a", "max_tokens": 01}',
    "byte-order-mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "broken-utf-8": b'{"prompt": "\xff"}',
    "overlong-utf-8": b'{"prompt": "\xc0\xaf"}',
    "surrogate-in-utf-8": b'{"prompt": "\xed\xa0\x80"}',
    "control-in-string": b'{"prompt": "a\x01"}',
    "newline-in-string": b'{"prompt": "a\n"}',
}


@pytest.mark.parametrize("target", PARSED)
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_a_body_that_is_no_json_object_is_a_400(edge: Edge, content: bytes, target: str) -> None:
    answer = edge.ask(request("POST", target, body=content))
    refused(answer, 400, 401, 403)


ODD_BUT_JSON = {
    "lone-surrogate": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "nul-escape": b'{"prompt": "a\\u0000b", "max_tokens": 1}',
    "same-key-twice": b'{"prompt": "a", "prompt": "b", "max_tokens": 1}',
    "empty-key": b'{"": 1, "prompt": "a", "max_tokens": 1}',
    "a-hundred-thousand-keys": b'{%b"prompt": "a", "max_tokens": 1}' % b"".join(b'"%d":0,' % n for n in range(100_000)),
    "a-hundred-thousand-ids": json.dumps({"prompt": [1] * 100_000, "max_tokens": 1}).encode(),
}


@pytest.mark.parametrize("content", ODD_BUT_JSON.values(), ids=ODD_BUT_JSON)
def test_unusual_json_is_served_or_a_400(edge: Edge, content: bytes) -> None:
    assert edge.ask(request("POST", "/v1/completions", body=content)).status in (200, 400, 413)


ODD_HEADERS = {
    "timeout-nan": "X-Request-Timeout: nan",
    "timeout-negative": "X-Request-Timeout: -1",
    "timeout-text": "X-Request-Timeout: soon",
    "timeout-400-digits": f"X-Request-Timeout: {'9' * 400}",
    "timeout-underscore": "X-Request-Timeout: 1_0",
}


@pytest.mark.parametrize("field", ODD_HEADERS.values(), ids=ODD_HEADERS)
def test_an_unusual_header_is_served_or_a_400(edge: Edge, field: str) -> None:
    assert edge.ask(completion("hello", field)).status in (200, 400)


def test_a_client_id_of_any_bytes_is_cleaned(edge: Edge) -> None:
    answer = edge.ask(completion("named", 'X-Request-Id: a"b\\c<d>é' + "e" * 500))
    assert answer.status == 200 and answer.headers["x-request-id"].startswith("abcde")
    assert len(answer.headers["x-request-id"]) < 128
