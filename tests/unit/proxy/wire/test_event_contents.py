"""What a choice of an event carries for the client."""

from typing import Any

import pytest

from balanceroute.proxy.wire.event_contents import (
    REASONING,
    TEXT,
    TOOL_CALLS,
    continues,
    drop_reasoning,
    has_token_data,
    kinds_of,
    text_field,
    text_of,
)


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ({"text": "a"}, [TEXT]),
        ({"text": ""}, []),
        ({"delta": {"role": "assistant"}}, []),
        ({"delta": {"content": "", "reasoning": "a"}}, [REASONING]),
        ({"delta": {"tool_calls": [{}], "content": "a", "reasoning_content": "b"}}, [REASONING, TEXT, TOOL_CALLS]),
        ({"delta": {"novel": 1}}, [TEXT]),
    ],
)
def test_the_kinds_of_text_come_in_the_order_of_an_answer(choice: dict[str, Any], kinds: list[str]) -> None:
    assert kinds_of(choice) == kinds


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"text": "a"}, "text"),
        ({"text": ""}, None),
        ({"delta": {"role": "assistant", "content": "a"}}, "content"),
        ({"delta": {"content": "", "reasoning": "a", "tool_calls": []}}, "reasoning"),
        ({"delta": {"content": "a", "reasoning": "b"}}, None),
        ({"delta": {"role": "assistant"}}, None),
    ],
)
def test_a_text_has_a_field_if_it_is_the_only_one(choice: dict[str, Any], name: str | None) -> None:
    assert text_field(choice) == name


@pytest.mark.parametrize(
    ("before", "after", "may"),
    [
        (None, TEXT, True),
        (TEXT, TEXT, True),
        (TEXT, TOOL_CALLS, True),
        (TEXT, REASONING, False),
        (REASONING, TEXT, False),
    ],
)
def test_only_text_may_change_its_kind_at_a_cut(before: str | None, after: str, may: bool) -> None:
    assert continues(before, after) is may


def test_reasoning_is_taken_out_under_both_of_its_names() -> None:
    choices: list[dict[str, Any]] = [
        {"delta": {"content": "a", "reasoning": "b"}},
        {"delta": {"reasoning_content": "c"}},
    ]
    assert drop_reasoning(choices)
    assert choices == [{"delta": {"content": "a"}}, {"delta": {}}]
    assert not drop_reasoning(choices)


@pytest.mark.parametrize(
    ("choice", "tells"),
    [({"token_ids": [1]}, True), ({"logprobs": {"tokens": ["a"]}}, True), ({"logprobs": {"tokens": []}}, False)],
)
def test_ids_and_logprobs_tell_tokens_without_a_text(choice: dict[str, Any], tells: bool) -> None:
    assert has_token_data(choice) is tells


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"delta": {"reasoning": "b"}}, "b"),
        ({"delta": {"reasoning_content": "b"}}, "b"),
        ({"delta": {}}, ""),
        ({"text": None}, ""),
    ],
)
def test_the_text_of_a_choice_is_its_text_or_reasoning(choice: dict[str, Any], text: str) -> None:
    assert text_of(choice) == text
