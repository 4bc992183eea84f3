"""What one choice of an event carries for the client: which kinds of text, which tokens."""

from typing import Any, Final, TypeGuard

TEXT: Final = "text"
REASONING: Final = "reasoning"
TOOL_CALLS: Final = "tool_calls"
_REASONING_KEYS: Final = ("reasoning", "reasoning_content")  # of a delta; engines have renamed it
_KIND_OF_KEY: Final = {**dict.fromkeys(_REASONING_KEYS, REASONING), "tool_calls": TOOL_CALLS}


def kinds_of(choice: dict[str, Any]) -> list[str]:
    """The kinds of text that a choice carries, in their order in an answer; empty for a role or an empty delta."""
    if choice.get("text"):
        return [TEXT]
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return []
    found = {_KIND_OF_KEY.get(name, TEXT) for name, value in delta.items() if value and name != "role"}
    return [kind for kind in (REASONING, TEXT, TOOL_CALLS) if kind in found]


def continues(before: str | None, after: str) -> bool:
    """Whether text of the kind `after` may follow text of the kind `before`, at which an answer was cut off.

    Text may turn to a tool call. Any other change means that the second engine has misread where the answer stands.
    """
    return before is None or after == before or (before == TEXT and after == TOOL_CALLS)


def drop_reasoning(choices: list[dict[str, Any]]) -> bool:
    """Take reasoning out of the choices of an event; returns whether there was any."""
    deltas = [delta for choice in choices if isinstance(delta := choice.get("delta"), dict)]
    return any([delta.pop(name, None) for delta in deltas for name in _REASONING_KEYS])


def tells_tokens(choice: dict[str, Any]) -> bool:
    """Whether a choice, even without text, has tokens for a client that wants their ids or logprobs."""
    return bool(choice.get("token_ids")) or any((choice.get("logprobs") or {}).values())


def text_of(choice: dict[str, Any]) -> str:
    """The text or reasoning of a choice; empty without one."""
    delta = choice.get("delta")
    text = choice.get("text") if not isinstance(delta, dict) else delta.get("content") or delta.get("reasoning")
    return text if isinstance(text, str) else ""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)
