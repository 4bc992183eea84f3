"""Answers with a structure: reasoning, a grammar, tool calls. What an engine knows of them is kept beside the tokens.

A plan says which part each token of an answer belongs to. It is made from the prompt of *this* request, as in an
engine, so it shows what a resumed request (prompt + ids so far) gets:

* reasoning is `THINK_TOKENS` of the model's words; the parser counts those at the prompt's end, as real parsers look
  for the end of reasoning in its ids. With `chat_template_kwargs.parser_forgets` it does not: what is left of the
  reasoning comes as content.
* a grammar starts at its root: one JSON object, whatever has been written before. The same for a tool call's arguments.

    enable_thinking (chat_template_kwargs)   THINK_TOKENS words of reasoning, then the rest
    a grammar                                one JSON object
    tool_choice required, or named           one call; its arguments are the JSON object
    tools, tool_choice auto                  LEAD_TOKENS words of content, then one call
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from balanceroute.emulator.errors import bad_type
from balanceroute.engine import TokenStream
from balanceroute.engine.tokens import EOS_ID, FIRST_WORD_ID, LEAD_ID, encode, generated_suffix, prompt_digest

THINK_TOKENS = 12
LEAD_TOKENS = 8
_WORDS = 6


class Part(StrEnum):
    """The part of a chat's answer that a token belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "tool_calls"


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure that a request demands of its answer."""

    thinks: bool = False
    forgets: bool = False
    grammar: bool = False
    calls: str | None = None  # the function's name
    leads: bool = False  # content before the call


def structure_of(body: Mapping[str, Any], *, chat: bool) -> Structure | None:
    """The structure that a body asks for; None for plain text."""
    template = body.get("chat_template_kwargs") if chat else None
    template = template if isinstance(template, dict) else {}
    form = body.get("response_format")
    grammar = isinstance(form, dict) and form.get("type") not in (None, "text")
    grammar |= any(body.get(name) for name in ("structured_outputs", "guided_json", "guided_regex", "guided_grammar"))
    calls, leads = _call(body) if chat else (None, False)
    thinks = bool(template.get("enable_thinking"))
    if not (thinks or grammar or calls):
        return None
    return Structure(thinks, bool(template.get("parser_forgets")), grammar, calls, leads)


def _call(body: Mapping[str, Any]) -> tuple[str | None, bool]:
    choice, tools = body.get("tool_choice", "auto"), body.get("tools")
    if not tools or choice == "none":
        return None, False
    if isinstance(choice, dict):
        return _function_of(choice, "tool_choice"), False
    return _function_of(tools[0] if isinstance(tools, list) else tools, "tools"), choice == "auto"


def _function_of(tool: object, param: str) -> str:
    """The function's name. Raises: ApiError: it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_type(param, "model_type", "Input should be a valid tool", tool)
    return name


class Plan:
    """One answer's parts, and the stream of its tokens."""

    def __init__(self, structure: Structure, prompt: Sequence[int]) -> None:
        age = generated_suffix(prompt)
        self.structure = structure
        self._shown_as_content = structure.forgets and age > 0
        self._think = max(0, THINK_TOKENS - age) if structure.thinks else 0
        written = max(0, age - THINK_TOKENS) if structure.thinks else age
        self._lead = max(0, LEAD_TOKENS - written) if structure.leads else 0
        bound = structure.grammar or structure.calls
        self._tail = encode(_object(prompt[: len(prompt) - age])) if bound else []
        self._prompt = prompt

    @property
    def length(self) -> int | None:
        """Tokens until it ends by itself, the end of text included; None: only the request's limit ends it."""
        return self._think + self._lead + len(self._tail) + 1 if self._tail else None

    def part(self, position: int) -> Part:
        """The part that the token at this position of the output belongs to."""
        if position < self._think and not self._shown_as_content:
            return Part.REASONING
        return Part.CALL if self.structure.calls and position >= self._think + self._lead else Part.CONTENT

    def stream(self, corruption: bytes = b"") -> "PlannedStream":
        """The stream of its tokens."""
        return PlannedStream(TokenStream(self._prompt, corruption=corruption), self._think + self._lead, self._tail)


class PlannedStream:
    """The model's own words first, which end with a whole character, then what the grammar forces."""

    def __init__(self, words: TokenStream, count: int, tail: Sequence[int]) -> None:
        self._words, self._count, self._tail = words, count, tail
        self._position = 0

    def next(self, *, eos: bool = False) -> int:
        """The next id; `eos` forces the end of text."""
        position = self._position - self._count
        self._position += 1
        if eos:
            return EOS_ID
        if position < 0 or not self._tail:
            word = self._words.next()
            return FIRST_WORD_ID if word == LEAD_ID and position == -1 and self._tail else word
        return self._tail[position] if position < len(self._tail) else EOS_ID


def _object(prompt: Sequence[int]) -> str:
    digest = prompt_digest(prompt)
    words = ", ".join(f'"{digest >> 8 * place & 255:02x}"' for place in range(_WORDS))
    return f'{{"words": [{words}]}}'
