"""The class of a continuation, field by field."""

from typing import Any

import orjson
import pytest

from balanceroute.proxy.life.resumption import Fidelity, grammar_of, resumption
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.event_contents import REASONING, TEXT, TOOL_CALLS
from balanceroute.proxy.wire.sse import Cut

IMAGE = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, {"type": "text", "text": "hi"}]


def fidelity(fields: dict[str, Any], *kinds: str, flushed: str | None = "", misparsed: bool = False) -> Fidelity:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    cut = Cut(frozenset(kinds or {TEXT}), 5, flushed, misparsed)
    return resumption(parse("chat", orjson.dumps(body)), cut).fidelity


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Fidelity.EXACT),
        ({"temperature": 0.7, "top_p": 0.9, "logit_bias": {"5": 1}, "repetition_penalty": 1.2}, Fidelity.EXACT),
        ({"max_tokens": 50}, Fidelity.ADJUSTED),
        ({"min_tokens": 5}, Fidelity.ADJUSTED),
        ({"presence_penalty": 0.1, "max_tokens": 50}, Fidelity.APPROXIMATE),
        ({"presence_penalty": 0, "frequency_penalty": 0.0}, Fidelity.EXACT),
        ({"seed": 0}, Fidelity.APPROXIMATE),
        ({"seed": 7, "temperature": 0}, Fidelity.EXACT),
        ({"thinking_token_budget": 100}, Fidelity.APPROXIMATE),
        ({"bad_words": ["x"]}, Fidelity.APPROXIMATE),
        ({"a_field_of_tomorrow": 1}, Fidelity.APPROXIMATE),
        ({"response_format": {"type": "text"}}, Fidelity.EXACT),
        ({"response_format": {"type": "json_object"}}, Fidelity.INVALID),
        ({"structured_outputs": {"regex": "a+"}}, Fidelity.INVALID),
        ({"structured_outputs": {"disable_any_whitespace": True}}, Fidelity.EXACT),
        ({"guided_choice": ["a", "b"]}, Fidelity.INVALID),
        ({"tool_choice": "required"}, Fidelity.INVALID),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, Fidelity.INVALID),
        ({"tool_choice": "auto", "tools": [{"type": "function"}]}, Fidelity.EXACT),
        ({"messages": [{"role": "user", "content": IMAGE}]}, Fidelity.INVALID),
        ({"messages": [{"role": "user", "content": IMAGE[1:]}]}, Fidelity.EXACT),
    ],
)
def test_every_request_field_has_a_resumption_class(fields: dict[str, Any], expected: Fidelity) -> None:
    assert fidelity(fields) is expected


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"description": "x" * 1000}}},
        {"structured_outputs": {"regex": "x" * 1000}},
        {"tool_choice": {"type": "function", "function": {"name": "x" * 1000}}},
    ],
    ids=["response_format", "structured_outputs", "tool_choice"],
)
def test_a_large_grammar_is_one_too(field: dict[str, Any]) -> None:
    assert fidelity(field) is Fidelity.INVALID


def test_a_long_stop_string_is_compared_no_further_than_the_text_reaches() -> None:
    """Each of its beginnings would be copied otherwise."""
    assert fidelity({"stop": "ab" * 8_000}, flushed="xab") is Fidelity.INVALID
    assert fidelity({"stop": "ab" * 8_000}, flushed="xb") is Fidelity.EXACT


def test_a_format_that_binds_nothing_does_so_beside_many_small_fields_too() -> None:
    many = {f"novel_{size}_{number}": [1] * size for size in (100, 20, 1) for number in range(30)}
    free = {"response_format": {"type": "text"}, "structured_outputs": {"json": None}}
    asked = parse("chat", orjson.dumps({"messages": [{"role": "user", "content": "a"}]} | many | free))
    assert grammar_of(asked.rest) == ""


def test_parser_and_grammar_state_depends_on_the_kinds_of_text_so_far() -> None:
    bound = {"response_format": {"type": "json_object"}}
    assert fidelity(bound, REASONING) is Fidelity.EXACT
    assert fidelity(bound, REASONING, TEXT) is Fidelity.INVALID
    assert fidelity({}, TEXT, TOOL_CALLS) is Fidelity.INVALID
    assert fidelity({}, REASONING, misparsed=True) is Fidelity.INVALID


@pytest.mark.parametrize(
    ("stop", "flushed", "expected"),
    [
        (["END"], "nothing like it", Fidelity.EXACT),
        (["END"], "so far E", Fidelity.INVALID),
        ("END", "so far EN", Fidelity.INVALID),
        (["."], None, Fidelity.EXACT),
        (["END"], None, Fidelity.INVALID),
    ],
)
def test_a_stop_string_may_lie_across_the_cut(stop: Any, flushed: str | None, expected: Fidelity) -> None:
    assert fidelity({"stop": stop}, flushed=flushed) is expected
    included = fidelity({"stop": stop, "include_stop_str_in_output": True}, flushed=flushed)
    assert included is (Fidelity.EXACT if stop == ["."] else Fidelity.INVALID)
