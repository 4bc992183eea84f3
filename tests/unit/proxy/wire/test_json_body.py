"""A body is refused at once where its JSON could not be written again."""

import tracemalloc

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InvalidRequest, NotJson
from balanceroute.proxy.wire.client_request import Endpoint, parse, request_of
from balanceroute.proxy.wire.json_body import MAX_DEPTH, MAX_IDS, load_object
from balanceroute.proxy.wire.json_size import MAX_COMMAS, MAX_NODES
from balanceroute.proxy.wire.payloads import decode_body, probe_body
from tests.unit.proxy.wire.requests import parsed_and_measured

NESTED = ["[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300]


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "objects"])
@pytest.mark.parametrize("field", ["prompt", "messages", "tools", "metadata"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_body_nested_deeper_than_can_be_serialised_is_refused(endpoint: Endpoint, field: str, nested: str) -> None:
    fields = {"prompt": '"a"', "messages": '[{"role": "user", "content": "a"}]', field: nested}
    with pytest.raises(InvalidRequest):
        parse(endpoint, ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode())


def test_a_body_of_the_accepted_depth_reaches_the_workers() -> None:
    depth = MAX_DEPTH - 1
    request = parse("completions", b'{"prompt": "a", "metadata": %b%b}' % (b"[" * depth, b"]" * depth))
    assert b"[" * depth in probe_body(request)


@pytest.mark.parametrize("depth", [255, 300, 1000, 5000, 100_000])
@pytest.mark.parametrize("field", ["x", "messages"])
def test_a_body_nested_too_deeply_is_a_bad_request(field: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"prompt": "a", "x": %b}' % nested
    if field == "messages":
        body = b'{"messages": [{"role": "user", "content": %b}]}' % nested
    with pytest.raises(InvalidRequest):
        parse("chat" if field == "messages" else "completions", body)


@pytest.mark.parametrize("depth", [130, 300, 505])
def test_parts_nested_in_the_text_of_parts_are_a_bad_request(depth: int) -> None:
    """Counting their text took more of Python's stack than there is."""
    nested = b'[{"text":' * depth + b'"a"' + b"}]" * depth
    with pytest.raises(InvalidRequest):
        parse("chat", b'{"messages": [{"role": "user", "content": %b}]}' % nested)


def test_many_brackets_side_by_side_are_no_depth() -> None:
    messages = b",".join([b'{"role": "user", "content": [{"type": "text", "text": "a"}]}'] * 500)
    assert parse("chat", b'{"messages": [%b]}' % messages).prompt_tokens > 500


@pytest.mark.parametrize("value", [b"[],", b'"",', b"{},"])
def test_a_body_with_more_values_than_are_read_at_once_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="The body holds more than"):
        parse("completions", b'{"prompt": "a", "metadata": [%b1]}' % (value * (MAX_NODES + 1)))


def parsed(body: bytes, *, as_values: bool) -> object:
    try:
        request = request_of("completions", load_object(body)) if as_values else parse("completions", body)
    except InvalidRequest as error:
        return type(error), str(error), error.param
    sizes = request.prompt_tokens, request.prompts, request.assembled, request.limit
    return request.prompt_json, sizes, {name: orjson.dumps(value) for name, value in request.rest.items()}


numbers = st.sampled_from(
    [b"0", b"17", b"151643", b"4294967296", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616"]
    + [b"-1", b"1.0", b"1e3", b"01", b"true", b"null", b'"a"', b"[2]", b"1 2", b"", b"\xff"]
)
ids = st.lists(numbers.filter(bytes.isdigit) | numbers, max_size=4).flatmap(
    lambda listed: st.sampled_from([b",", b", ", b"\t,\r\n "]).map(lambda comma: b"[ %b]" % comma.join(listed))
)
others = st.sampled_from(
    [b'"a":18446744073709551616', b'"prompt":"b"', b'"prompt":[7]', b'"prompt_embeds":"x"', b'"n":null']
    + [
        b'"echo":true',
        b'"a":"\xff"',
        b'"\xff":1',
        b'"a":{"prompt": [1,2]}',
        b'"a\\"prompt":[1]',
        b'"prompt":0',
        b'"max_tokens":5',
        b'"a":1e999',
        b"x",
    ]
)


@given(ids, st.lists(others, max_size=3), st.lists(others, max_size=3))
def test_a_large_prompt_of_token_ids_is_read_as_a_small_one(
    prompt: bytes, before: list[bytes], after: list[bytes]
) -> None:
    body = b"{%b}" % b",".join([*before, b'"prompt" : ' + prompt, b'"user":"%b"' % (b"x" * 2**16), *after])
    assert parsed(body, as_values=False) == parsed(body, as_values=True)


def test_a_body_full_of_token_ids_is_taken_but_no_other_with_millions_of_numbers() -> None:
    """Five million floats, of a prompt or elsewhere, stopped everybody's stream for a second."""
    assert parse("completions", b'{"prompt": [' + b"12345, " * 4_700_000 + b"1]}").prompt_tokens == 4_700_001
    for body in (b'{"prompt": [%b1]}', b'{"prompt": "a", "novel": [%b1]}', b'{"prompt": "a", "stop_token_ids": [%b1]}'):
        with pytest.raises(InvalidRequest, match="The body holds more than"):
            parse("completions", body % (b"1.0," * (MAX_COMMAS + 1)))


def test_more_token_ids_than_a_body_holds_by_default_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="The body holds more than"):
        parse("completions", b'{"prompt": [%b1]}' % (b"1," * MAX_IDS))


def test_a_large_prompt_of_token_ids_is_read_without_making_numbers_of_them() -> None:
    """Of 100,000 ids that took 12 ms, in which nobody's stream went on."""
    prompt = b"[%b]" % b",".join(b"%d" % token for token in range(100_000, 200_000))
    tracemalloc.start()
    try:
        request = parse("completions", b'{"model":"m","prompt":%b}' % prompt)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(prompt)
    finally:
        tracemalloc.stop()
    assert request.prompt_json == prompt and request.prompt_tokens == 100_000


@pytest.mark.parametrize("size", [100, 5000, 20_000, 100_000])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_prompt_of_text_takes_its_own_bytes(endpoint: Endpoint, size: int) -> None:
    """A thousand waiting requests with 11 MB of prompts took 108 MB; of 20 kB each kept 260 kB."""
    fields = {"prompt": "x" * size, "messages": [{"role": "user", "content": "x" * size}]}
    body = orjson.dumps({name: fields[name] for name in fields if (name == "prompt") is (endpoint == "completions")})
    request, kept_bytes = parsed_and_measured(endpoint, body)
    assert kept_bytes < size + 2000
    assert size < len(request.prompt_json) < size + 100


@pytest.mark.parametrize(
    "field", ['"user": "see \\ud83d"', '"metadata": {"a": ["\\udc00"], "b": 18446744073709551616}']
)
def test_a_label_that_was_cut_within_an_emoji_reaches_the_workers_as_it_is(field: str) -> None:
    """JavaScript's clients write such texts, and engines ignore them."""
    request = parse(
        "chat", b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "n": 2, %b}' % field.encode()
    )
    assert request.n == 2
    for body in (probe_body(request), decode_body(request, b"{}")):
        assert field.replace(" ", "") in body.decode().replace(" ", "")


@pytest.mark.parametrize(
    "fields",
    [
        b'"prompt": "\\ud83d"',
        b'"prompt": "a", "stop": ["\\ud83d"]',
        b'"prompt": "a", "cache_salt": "\\ud83d"',
        b'"prompt": "a", "vllm_xargs": {"a": "\\ud83d", "kv_transfer_params": {}}',
        b'"prompt": "a", "\\ud83d": 1',
        b'"prompt": "a", "tools": [{"name": "\\ud83d"}]',
        b'"prompt": "a", "guided_regex": "\\ud83d"',
        b'"prompt": "a", "echo": "\\ud83d"',
        b'"prompt": "a", "user": "\\ud83d", "temperature": 1e400',
        b'"prompt": "a", "metadata": ["\\ud83d", -1e400]',
        b'"prompt": "a", "user": "\\ud83d", "x": %b1%b' % (b"[" * 300, b"]" * 300),
        b'"prompt": "a", "metadata": %b"\\ud83d"%b' % (b"[" * 300, b"]" * 300),
        b'"prompt": "a", "user": "\\ud83d", "x": [%b1]' % (b"1," * 2**16),
        b'"prompt": "a", "user": "\\ud83d", "top_p": NaN',
        b'"prompt": "a", "user": "\\ud83d", "x": "\xff"',
        b'"prompt": "a", "user": "\\ud83d"}',
        b'"prompt": "a", "user": "\\ud83d", "x": "%b"' % (b"a" * 2**20),
        b'"prompt": "a", "user": "\\ud83d", "x": %b1%b' % (b"[" * 5000, b"]" * 5000),
    ],
)
def test_half_of_a_pair_in_a_label_opens_no_way_for_what_is_refused_elsewhere(fields: bytes) -> None:
    with pytest.raises(NotJson):
        parse("completions", b"{%b}" % fields)
