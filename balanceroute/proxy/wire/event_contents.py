"""The contents of one choice of an event: kinds of text, tokens."""

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

TEXT: Final = "text"
REASONING: Final = "reasoning"
TOOL_CALLS: Final = "tool_calls"
REASONING_KEYS: Final = ("reasoning", "reasoning_content")  # the field's two names; engines have renamed it
_KIND_OF_KEY: Final = {**dict.fromkeys(REASONING_KEYS, REASONING), "tool_calls": TOOL_CALLS}


def kinds_of(choice: dict[str, Any]) -> list[str]:
    """The kinds of text in a choice, in their order in an answer; empty: only a role, or an empty delta."""
    if choice.get("text"):
        return [TEXT]
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return []
    found = {_KIND_OF_KEY.get(name, TEXT) for name, value in delta.items() if value and name != "role"}
    return [kind for kind in (REASONING, TEXT, TOOL_CALLS) if kind in found]


def text_field(choice: dict[str, Any]) -> str | None:
    """The name of the field with a choice's text; None: there is no text, or more than one."""
    if choice.get("text"):
        return "text"
    delta = choice.get("delta")
    filled = [name for name, value in delta.items() if value and name != "role"] if isinstance(delta, dict) else []
    return filled[0] if len(filled) == 1 else None


def continues(before: str | None, after: str) -> bool:
    """Whether an answer that was cut off in text of the kind `before` may continue with the kind `after`.

    Text may be followed by a tool call. Any other change means that the second engine has misparsed the answer so far.
    """
    return before is None or after == before or (before == TEXT and after == TOOL_CALLS)


def drop_reasoning(choices: list[dict[str, Any]]) -> bool:
    """Remove reasoning from the choices of an event; returns whether there was any."""
    deltas = [delta for choice in choices if isinstance(delta := choice.get("delta"), dict)]
    return any([delta.pop(name, None) for delta in deltas for name in REASONING_KEYS])


def reasoning_of(contents: Mapping[str, Any]) -> Any:
    """The reasoning in a delta or a message, under either of its names; None: there is none."""
    return next((contents[name] for name in REASONING_KEYS if contents.get(name)), None)


def has_token_data(choice: dict[str, Any]) -> bool:
    """Whether a choice has token ids or logprobs for the client, even without text."""
    return bool(choice.get("token_ids")) or any((choice.get("logprobs") or {}).values())


def text_of(choice: dict[str, Any]) -> str:
    """The text or reasoning of a choice; empty without one."""
    delta = choice.get("delta")
    text = choice.get("text") if not isinstance(delta, dict) else delta.get("content") or reasoning_of(delta)
    return text if isinstance(text, str) else ""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)
