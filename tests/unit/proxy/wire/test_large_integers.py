"""Numbers reach an engine as the client has written them."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire import large_integers, payloads
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.derived_requests import split
from balanceroute.proxy.wire.message_requests import parse_messages

KV = b'{"do_remote_prefill":true}'
LARGE = "1" + "0" * 300


@pytest.mark.parametrize(
    "number", [str(2**63 - 1), str(2**64 - 1), str(2**64), str(-(2**63)), str(-(2**63) - 1), LARGE]
)
@pytest.mark.parametrize("field", ['"novel":%s', '"tools":[{"parameters":{"maximum":%s}}]', '"vllm_xargs":{"a":[%s]}'])
def test_an_integer_of_any_size_reaches_the_engines_digit_for_digit(field: str, number: str) -> None:
    text = (field % number).encode()
    request = parse("completions", b'{"prompt":"x","max_tokens":9,%s}' % text)
    for body in (payloads.decode_body(request, KV), payloads.probe_body(request)):
        assert text in body


def test_millions_of_token_ids_are_parsed_once_even_beside_a_large_integer() -> None:
    """Beside a large integer their second reading took seconds, in which nobody's stream went on."""
    ids = b",".join([b"1"] * 300_000)
    request = parse("completions", b'{"prompt":[[%b]],"novel":%d}' % (ids, 2**64))
    assert orjson.dumps(request.rest["novel"]) == b"%d" % 2**64 and request.prompt_json.count(b",") == 299_999
    alone = parse("completions", b'{"prompt":[%b],"novel":%d}' % (ids, 2**64))  # these are not read at all
    assert orjson.dumps(alone.rest["novel"]) == b"%d" % 2**64 and alone.prompt_json == request.prompt_json


def test_what_python_reads_again_is_bounded_and_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def loads(text: bytes, parse_int: Any) -> Any:
        read.append(len(text))
        return json.loads(text, parse_int=parse_int)

    monkeypatch.setattr(large_integers, "json", SimpleNamespace(loads=loads))
    messages = b'"messages":[{"role":"user","content":"%b"}]' % (b"\\n" * 2**20)
    request = parse("chat", b'{%b,"novel":[%d]}' % (messages, 2**64))
    assert b"%d" % 2**64 in payloads.decode_body(request, KV) and sum(read) < 100
    read.clear()
    many = parse("chat", b'{"messages":[{"role":"user","content":"a"}],"novel":[%b%d]}' % (b"1," * 2**18, 2**64))
    assert orjson.loads(payloads.decode_body(many, KV))["novel"][-1] == float(2**64) and not read
    with pytest.raises(InvalidRequest, match="fields"):
        parse("chat", b"{%b}" % b",".join(b'"%d":%d' % (n, 2**64) for n in range(300)))
    assert not read


numbers = st.integers() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(numbers | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(trees)
def test_the_engines_get_the_values_that_python_parses_from_the_body(tree: Any) -> None:
    body = json.dumps({"prompt": "x", "novel": tree}).encode()
    read = json.loads(payloads.decode_body(parse("completions", body), KV))["novel"]
    assert repr(read) == repr(tree)


@pytest.mark.parametrize("field", ["max_tokens", "seed", "min_tokens", "n", "priority"])
def test_a_too_large_integer_in_a_router_field_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        split(parse("completions", b'{"prompt":["a","b"],"%s":%d}' % (field.encode(), 2**70)))
    assert refused.value.param == field


def test_integers_in_anthropic_tools_are_kept_digit_for_digit() -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"maximum": 2**64}}}}
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    body = payloads.decode_body(parse_messages(json.dumps(asked).encode()), KV)
    assert b'"maximum":%d' % 2**64 in body


def a_call(text: str, number: int) -> bytes:
    """A body for Anthropic's API: a message with this text, and a call with this argument."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": number}}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": [call]}]
    return json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode()


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_integers_in_anthropic_calls_are_kept_digit_for_digit(number: int) -> None:
    body = payloads.decode_body(parse_messages(a_call("a" * 2**20, number)), KV)
    assert b'{\\"a\\":%d}' % number in body


@pytest.mark.parametrize(("bound", "most"), [("_MAX_MESSAGES_BYTES", 50), ("_MAX_VALUES", 5)])
def test_messages_that_are_looked_at_and_read_again_are_bounded(
    monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(large_integers, bound, most)
    body = payloads.decode_body(parse_messages(a_call("a", 2**64)), KV)
    assert b'{\\"a\\":%d}' % 2**64 not in body


@pytest.mark.parametrize("parsed", [lambda body: parse("chat", body), parse_messages])
@pytest.mark.parametrize("where", ['"messages":%s,"a":%d', '"messages":[{"role":"user","content":"a"}],"a":[%s,%d]'])
def test_beside_a_large_integer_a_body_nested_too_deeply_is_refused(
    parsed: Callable[[bytes], object], where: str
) -> None:
    """The levels that orjson reads are more than Python or msgspec can."""
    text = where % ("[" * 1020 + "]" * 1020, 2**64)
    with pytest.raises(InvalidRequest):
        parsed(b"{%b}" % text.encode())
