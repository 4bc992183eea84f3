"""Answers with a structure, token by token."""

import pytest

from balanceroute.emulator.structure import Plan, structure_of
from balanceroute.engine.tokens import EOS_ID, decode_bytes, encode

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
THINKS = {"enable_thinking": True}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"tools": TOOLS}, id="a call after content"),
        pytest.param(
            {"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": THINKS}, id="a call after reasoning"
        ),
        pytest.param(
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": THINKS}, id="JSON after reasoning"
        ),
    ],
)
def test_free_text_before_a_grammars_part_ends_with_a_whole_character(body: dict[str, object]) -> None:
    """Half a one would be the first character of the JSON, which no client could then read."""
    structure = structure_of(body, chat=True)
    assert structure is not None
    for number in range(200):
        plan = Plan(structure, encode(f"request {number}"))
        stream, ids = plan.stream(), []
        while (token := stream.next()) != EOS_ID:
            ids.append(token)
        words, brace, _ = decode_bytes(ids).partition(b"{")
        assert brace and words.decode("utf-8")  # raises where it ends within a character
