"""What a body asks for, and which bodies are refused."""

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import MAX_NAME, MAX_READ_BYTES, Endpoint, parse
from balanceroute.proxy.wire.derived_requests import resume, split
from balanceroute.proxy.wire.json_size import MAX_FIELDS
from balanceroute.proxy.wire.payloads import decode_body
from balanceroute.proxy.wire.prompt_echo import prompt_text
from tests.unit.proxy.wire.requests import KV, a_request, load, parsed_and_measured


def test_parse_reads_what_the_router_needs() -> None:
    request = a_request(
        "chat",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        max_tokens=9,
        max_completion_tokens=5,
        min_tokens=2,
        priority=-3,
        n=2,
        request_id="mine",
    )
    assert "request_id" not in request.rest
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)
    assert (request.return_token_ids, request.n, request.single) == (True, 2, False)
    assert (request.limit_field, request.limit, request.min_tokens) == ("max_completion_tokens", 5, 2)
    assert (request.model, request.priority) == ("m", -3)


@pytest.mark.parametrize(
    ("endpoint", "body", "message"),
    [
        ("completions", b'{"prompt": "x"', "not valid JSON"),
        ("completions", b"\xff", "not valid JSON"),
        ("completions", b"[1]", "must be a JSON object, not a list"),
        ("completions", b"{}", "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": ""}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": []}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": 5}', "prompt must be"),
        ("completions", b'{"prompt": [1, "a"]}', "prompt must be"),
        ("completions", b'{"prompt": [true]}', "prompt must be"),
        ("completions", b'{"prompt": ["a", 1]}', "Each prompt"),
        ("completions", b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1, got 0"),
        ("completions", b'{"prompt": "a", "max_tokens": "a few"}', "max_tokens must be an integer, not a string"),
        ("completions", b'{"prompt": "a", "max_tokens": 4.5}', "max_tokens must be an integer, not a number"),
        ("completions", b'{"prompt": "a", "max_tokens": []}', "max_tokens must be an integer, not a list"),
        ("completions", b'{"prompt": "a", "max_tokens": "9223372036854775808"}', "an integer of 64 bits"),
        (
            "completions",
            b'{"prompt": "a", "max_tokens": 3, "min_tokens": 9}',
            "less than or equal to max_tokens=3",
        ),
        ("completions", b'{"prompt": "a", "min_tokens": 17}', "less than or equal to max_tokens=16"),
        ("chat", b'{"messages": [{}], "min_tokens": null}', "min_tokens must be an integer, not null"),
        ("completions", b'{"prompt": "a", "n": null}', "n must be an integer, not null"),
        ("completions", b'{"prompt": "a", "n": 0}', "n must be at least 1"),
        ("completions", b'{"prompt": "a", "stop_token_ids": 7}', "stop_token_ids must be a list"),
        ("completions", b'{"prompt": "a", "stop_token_ids": 0}', "stop_token_ids must be a list"),
        ("chat", b'{"messages": [{}], "stop_token_ids": ["7", "b"]}', "stop_token_ids must be a list"),
        ("completions", b'{"prompt": "a", "stream": "perhaps"}', "stream must be true or false"),
        (
            "completions",
            b'{"prompt": "a", "stream_options": {"include_usage": true}}',
            "only be defined when `stream=True`",
        ),
        ("completions", b'{"prompt": "a", "stream": true, "stream_options": 1}', "must be an object"),
        ("completions", b'{"prompt": "a", "model": 7}', "model must be a string, not a number"),
        ("completions", b'{"prompt": "a", "use_beam_search": true}', "carry no KV transfer"),
        ("completions", b'{"prompt_embeds": ""}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt_embeds": [5]}', "prompt_embeds must be a string or a list"),
        ("completions", b'{"prompt": "a", "prompt_embeds": "AAAA"}', "cannot be served in one request"),
        ("chat", b"{}", "messages must be a non-empty list"),
        ("chat", b'{"messages": "hi"}', "messages must be a non-empty list"),
        ("chat", b'{"messages": ["hi"]}', "Each message must be an object"),
    ],
)
def test_bad_bodies_are_refused_with_the_reason(endpoint: Endpoint, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(endpoint, body)


def test_numbers_and_flags_are_read_as_the_engines_read_them() -> None:
    fields = {"prompt": "a", "max_tokens": 4.0, "min_tokens": "2", "n": "3", "priority": True, "stream": "true"}
    request = parse("completions", orjson.dumps(fields))
    assert (request.limit, request.min_tokens, request.n, request.priority, request.stream) == (4, 2, 3, 1, True)
    sent = load(decode_body(split(request)[0], KV))
    assert (sent["max_tokens"], sent["min_tokens"], sent["stream"]) == (4, 2, True)
    assert a_request(echo="1", max_tokens="0", use_beam_search="off").scores_only


def test_empty_stream_options_request_no_usage() -> None:
    assert not parse("completions", b'{"prompt": "a", "stream_options": {}}').include_usage


def test_a_chat_with_null_for_n_asks_for_one_answer_and_any_number_of_tokens_fits_a_chat_without_a_limit() -> None:
    request = a_request("chat", n=None, min_tokens=5000)
    assert (request.n, request.min_tokens) == (1, 5000)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
def test_a_request_for_zero_tokens_is_refused_before_a_prefill(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least 1"):
        a_request("chat", **{name: 0})


def test_a_stream_may_ask_for_no_prompt_logprobs() -> None:
    """vLLM refuses a stream with any, and takes 0."""
    request = parse("completions", b'{"prompt": "a", "stream": true, "prompt_logprobs": 0}')
    assert request.prompt_wishes is None and "prompt_logprobs" not in request.rest


def test_a_null_limit_of_a_completion_means_no_limit() -> None:
    request = a_request(max_tokens=None)
    assert request.effective_limit == 16
    assert "max_tokens" not in load(decode_body(request, KV))
    assert load(decode_body(a_request("chat", max_tokens=None), KV))["max_tokens"] is None


@pytest.mark.parametrize("older", [0, -3, 100_000])
def test_max_completion_tokens_overrides_max_tokens_as_in_the_engines(older: int) -> None:
    request = a_request("chat", max_tokens=older, max_completion_tokens=5)
    assert (request.limit_field, request.effective_limit) == ("max_completion_tokens", 5)
    assert load(decode_body(request, KV))["max_tokens"] == older
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer"):
        a_request("chat", max_tokens="many", max_completion_tokens=5)


@pytest.mark.parametrize("newer", [0, 5, 500, "many"])
def test_completions_overlook_max_completion_tokens_as_the_engines_do(newer: object) -> None:
    request = a_request(max_tokens=100, max_completion_tokens=newer)
    assert request.effective_limit == 100
    assert load(decode_body(resume(request, [1], [2] * 60), KV))["max_tokens"] == 40
    assert a_request(max_completion_tokens=newer).effective_limit == 16


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode))
def test_no_body_raises_anything_but_invalid_request(body: bytes) -> None:
    for endpoint in ("completions", "chat"):
        with suppress(InvalidRequest):  # now and then one is a request
            parse(endpoint, body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 64}, {"max_tokens": 500, "echo": True}, {"max_tokens": 500, "novel": 1}, {}]
)
def test_short_and_unknown_unstreamed_requests_stay_unstreamed(fields: dict[str, Any]) -> None:
    request = a_request(**fields)
    assert not request.streams_upstream
    assert "stream" not in load(decode_body(request, KV))


@pytest.mark.parametrize(
    "field", ["session_id", "truncation_side", "logprob_token_ids", "repetition_detection", "watermarking"]
)
def test_fields_that_change_nothing_in_the_form_of_an_answer_leave_it_followed_token_by_token(field: str) -> None:
    assert a_request(max_tokens=500, **{field: None}).assembled and a_request("chat", **{field: None}).assembled


@pytest.mark.parametrize("field", [{"echo": False}, {"prompt_logprobs": None}, {"use_beam_search": False}], ids=repr)
def test_a_field_that_is_switched_off_leaves_an_answer_followed_token_by_token(field: dict[str, Any]) -> None:
    assert a_request(max_tokens=500, **field).assembled and a_request("chat", **field).assembled


@pytest.mark.parametrize("field", ["max_tokens", "n", "priority", "min_tokens"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_an_integer_that_no_engine_can_hold_is_a_bad_request(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse("completions", b'{"prompt": "a", "%b": %d}' % (field.encode(), value))
    assert refused.value.param == field


@pytest.mark.parametrize(
    "field",
    [
        b'"novel":[%b]' % b",".join([b"{}"] * 100_000),
        b'"stop_token_ids":[%b]' % b",".join([b"300"] * 100_000),
        b'"logit_bias":{%b}' % b",".join(b'"%d":1' % token for token in range(100_000)),
        b'"vllm_xargs":{"a":[%b]}' % b",".join([b'"a"'] * 100_000),
    ],
    ids=["objects", "numbers", "keys", "strings"],
)
def test_a_parsed_request_takes_hardly_more_memory_than_its_body(field: bytes) -> None:
    """It is kept while it waits; by 24 times as many bytes, 2000 waiting requests of 1 MB took 40 GB."""
    body = b'{"prompt":"a",%b}' % field
    request, kept_bytes = parsed_and_measured("completions", body)
    assert kept_bytes < 1.2 * len(body)
    assert field in decode_body(request, b"{}")


@pytest.mark.parametrize("field", ["user", "chat_template", "prompt_embeds", "novel"])
def test_a_text_with_one_character_that_is_not_ascii_takes_no_more_memory_than_its_body(field: str) -> None:
    """A request with a user of 30 MB and one emoji kept 120 MB while it waited."""
    text = orjson.dumps("x" * 1_000_000 + "\N{GRINNING FACE}")
    body = b'{%b"%b":%b}' % (b"" if field == "prompt_embeds" else b'"prompt":"a",', field.encode(), text)
    request, kept_bytes = parsed_and_measured("completions", body)
    assert kept_bytes < 1.2 * len(body)
    assert text in decode_body(request, b"{}")


def test_the_message_that_an_answer_begins_with_takes_no_more_memory_than_in_its_body() -> None:
    text = "x" * 1_000_000 + "\N{GRINNING FACE}"
    body = orjson.dumps({"messages": [{"role": "assistant", "content": text}], "echo": True})
    request, kept_bytes = parsed_and_measured("chat", body)
    assert kept_bytes < 2.2 * len(text)
    assert prompt_text(request, None) == text


@pytest.mark.parametrize(
    "fields",
    [
        b",".join(b'"novel_%d":[%b]' % (number, b",".join([b"{}"] * 150)) for number in range(250)),
        b'"stream":true,"stop":[%b]' % b",".join([b'"aa"'] * 3000),
        b'"stream":true,"stream_options":{"novel":[%b]}' % b",".join([b"{}"] * 5000),
    ],
    ids=["many small fields", "stop", "stream_options"],
)
def test_what_a_request_keeps_as_values_takes_no_megabyte(fields: bytes) -> None:
    """With 250 small arrays a request of 120 kB kept 3 MB: 10,000 connections could hold 30 GB."""
    request, kept_bytes = parsed_and_measured("completions", b'{"prompt":"a",%b}' % fields)
    assert kept_bytes < 500_000
    assert fields.removeprefix(b'"stream":true,') in decode_body(request, b"{}")


@pytest.mark.parametrize("field", ["model", "n", "priority", "return_token_ids"])
def test_a_large_value_of_a_wrong_type_is_called_what_it_is(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be .*, not a list"):
        parse("completions", orjson.dumps({"prompt": "a", field: [1] * 1000}))


def test_what_is_kept_as_values_is_bounded() -> None:
    many = {str(number): 1 for number in range(MAX_FIELDS)}
    read_later: list[dict[str, Any]] = [{"stop": ["x" * 100] * (MAX_READ_BYTES // 100)}]
    read_later += [{name: "x" * MAX_READ_BYTES} for name in ("stop", "model", "cache_salt")]
    refused = [(many, "256 fields"), ({"x" * (MAX_NAME + 1): 1}, f"longer than {MAX_NAME} characters")]
    refused += [(fields, f"{next(iter(fields))} is larger than {MAX_READ_BYTES} bytes") for fields in read_later]
    for fields, text in refused:
        with pytest.raises(InvalidRequest, match=text):
            parse("completions", orjson.dumps({"prompt": "a", **fields}))
