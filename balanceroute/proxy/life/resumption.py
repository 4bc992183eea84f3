"""Which answers that were cut off can be continued on another decode worker.

A request that a decoder gives back, or that loses its decoder, continues from prompt + token ids. An engine's other
state of the request is lost. The table says, field by field, how close the rest of the answer comes to the
uninterrupted one (vLLM 0.32; earlier ones where they differ):

| state in the engine | fields | class | why |
|---|---|---|---|
| the prompt | `messages`, `prompt`, `chat_template*`, `tools`, `documents`, `add_*`, `continue_final_message`, \
`reasoning_effort`, `cache_salt`, `truncate_prompt_tokens`, `suffix`, `echo`, `prompt_logprobs` | exact | the ids \
are the prompt as it was; what was said of it has been said |
| none | `temperature`, `top_p`, `top_k`, `min_p`, `logit_bias`, `allowed_token_ids`, `stop_token_ids`, `ignore_eos`, \
`logprobs`, `top_logprobs`, `priority`, `skip_special_tokens`, `n` (a request per choice) | exact | looked at anew for \
every token |
| tokens of prompt and output alike | `repetition_penalty` | exact | what was output counts as prompt, and is counted |
| half of a character | detokenizer | exact, or invalid where its ids or their logprobs were told | an engine whose \
prompt ends within a character takes the whole prompt for text of the answer; ids of no whole character are given back \
(`seam.py`) |
| how many tokens there are | `max_tokens`, `max_completion_tokens`, `min_tokens`, usage, `logprobs.text_offset` | \
adjusted | less what has been generated; offsets and usage go on |
| tokens of the output only | `presence_penalty`, `frequency_penalty`, `bad_words`, `repetition_detection` | \
approximate | what was output before the cut does not count |
| the random generator | `seed` with a temperature | approximate | its draws begin anew; another answer, not a worse \
one |
| the thinking budget | `thinking_token_budget` | approximate | 0.32 counts thinking in the prompt, earlier ones do \
not |
| plugins | `logits_processors`, `vllm_xargs`, `watermarking`, fields unknown here | approximate | unknown |
| the grammar | `response_format` (but `text`), `structured_outputs`, `guided_*`, `tool_choice` (`required` or \
named) | \
invalid | it begins at its root: a second object after half of one. While only reasoning has come it has not begun: \
exact |
| the tool parser | a tool call has begun | invalid | half of its arguments would come as text, and indices begin at 0 |
| | `tools`, no call yet | exact, or invalid where the client has ids or logprobs of what the parser held back, or \
text of the same event | a parser that has found nothing is a new one; what it held back is given back (`seam.py`) |
| the reasoning parser | the answer is in its reasoning, or past it | exact or invalid | it looks for the end of \
reasoning in the prompt's ids; parsers that need to have seen the beginning take the rest of it for the answer. Which \
one it is shows: where what follows is of another kind than what was before the cut, it is not relayed |
| text held back | `stop` of one character | exact | nothing is held back |
| | `stop`, given back with its marker, or aborted | exact, or invalid where what was sent last may begin a stop \
string | that event has all that was held back; the rest of a stop string would not be recognised |
| | `stop`, decoder lost; `include_stop_str_in_output` | invalid | what was held back is gone; what was sent last is \
not known |
| what ids do not show | images, audio, `prompt_embeds` | invalid | 0.32 ignores ids beside media, 0.27 drops the \
media |

What is invalid is not continued: where the client has seen nothing of it the answer starts again from the original
prompt, else it ends with an error event: the engine's own, or one that says why it is not continued (`NotResumable`).
Everything else is continued: to lose a long stream costs its user more than an approximate penalty.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import orjson

from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.event_contents import REASONING, TOOL_CALLS
from balanceroute.proxy.wire.sse import Cut


class Fidelity(IntEnum):
    """How exactly an answer is continued; of several fields the worst counts."""

    EXACT = 0
    ADJUSTED = 1
    APPROXIMATE = 2
    INVALID = 3


@dataclass(frozen=True, slots=True)
class Resumption:
    """The class of a continuation, and the field or state that makes it so ("" for exact)."""

    fidelity: Fidelity
    because: str = ""


_EXACT = Resumption(Fidelity.EXACT)

_STATELESS: Final = frozenset(
    """model prompt messages stream stream_options temperature top_p top_k min_p n user priority repetition_penalty
    length_penalty logit_bias allowed_token_ids stop_token_ids ignore_eos logprobs top_logprobs logprob_token_ids
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side add_special_tokens
    include_stop_str_in_output tools parallel_tool_calls tool_choice functions function_call reasoning_effort
    include_reasoning chat_template chat_template_kwargs add_generation_prompt continue_final_message documents
    mm_processor_kwargs media_io_kwargs cache_salt store metadata service_tier safety_identifier prompt_cache_key
    verbosity return_token_ids return_tokens_as_token_ids request_id session_id stream_interval echo prompt_logprobs
    stop response_format structured_outputs guided_json guided_regex guided_choice guided_grammar suffix best_of
    guided_decoding_backend guided_whitespace_pattern use_beam_search""".split()
)
_COUNTS: Final = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_OFF: Final[tuple[Any, ...]] = (None, False, 0, "", [], {})  # values that switch a field off
_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
# options of `structured_outputs`; all other fields in it are constraints
_GRAMMAR_OPTIONS: Final = frozenset(
    ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern", "backend")
)


def resumption(request: ClientRequest, cut: Cut) -> Resumption:
    """The class of a continuation from `cut`; `request`: the client's original. See the module's table."""
    invalid = _invalid(request, cut)
    if invalid:
        return Resumption(Fidelity.INVALID, invalid)
    worst = _EXACT
    for name, value in request.rest.items():
        fidelity = _of_field(name, value, request.rest)
        if fidelity > worst.fidelity:
            worst = Resumption(fidelity, name)
    return worst


def _of_field(name: str, value: Any, rest: Mapping[str, Any]) -> Fidelity:
    if value in _OFF and name != "seed":
        return Fidelity.EXACT
    if name in _COUNTS:
        return Fidelity.ADJUSTED
    if name == "seed":
        drawn = value is not None and rest.get("temperature") != 0
        return Fidelity.APPROXIMATE if drawn else Fidelity.EXACT
    return Fidelity.EXACT if name in _STATELESS else Fidelity.APPROXIMATE


def _invalid(request: ClientRequest, cut: Cut) -> str:
    """The field or state that forbids a continuation; "": none."""
    if cut.misparsed:
        return "the reasoning parser"
    if TOOL_CALLS in cut.kinds:
        return "a tool call that has begun"
    if cut.kinds != {REASONING} and (grammar := grammar_of(request.rest)):
        return grammar
    if cut.halved:
        return "half of a character"
    if cut.withheld:
        return "text that its parser held back"
    if not request.prompt_json:
        return "prompt_embeds"
    if request.endpoint == "chat" and has_media(request.prompt_json):
        return "messages with media"
    return "stop" if _stop_may_be_missed(request.rest, cut) else ""


def parses_calls(request: ClientRequest) -> bool:
    """Whether an engine looks for tool calls in the answer, and holds back what may begin one."""
    return request.endpoint == "chat" and bool(request.rest.get("tools")) and request.rest.get("tool_choice") != "none"


def grammar_of(rest: Mapping[str, Any]) -> str:
    """The field that binds the answer to a grammar; "": none."""
    # what is kept as JSON (`ClientRequest.rest`) is large, and taken to bind
    wanted = rest.get("response_format")
    if isinstance(wanted, orjson.Fragment) or (isinstance(wanted, dict) and wanted.get("type") not in (None, "text")):
        return "response_format"
    bound = rest.get("structured_outputs")
    if isinstance(bound, orjson.Fragment) or (
        isinstance(bound, dict) and any(bound[name] not in (None, False) for name in bound.keys() - _GRAMMAR_OPTIONS)
    ):
        return "structured_outputs"
    for name in _GUIDED:
        if rest.get(name) is not None:
            return name
    choice = rest.get("tool_choice")
    return "tool_choice" if isinstance(choice, dict | orjson.Fragment) or choice == "required" else ""


def has_media(messages_json: bytes) -> bool:
    """Whether some message holds a part that is no text."""
    messages = orjson.loads(messages_json)
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts: Iterable[Any] = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS for part in parts)


_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal", "thinking")


def _stop_may_be_missed(rest: Mapping[str, Any], cut: Cut) -> bool:
    wanted = rest.get("stop")
    if not isinstance(wanted, list):
        wanted = [wanted]
    stops = [stop for stop in wanted if isinstance(stop, str) and len(stop) > 1]
    if not stops or not cut.tokens_in_segment:
        return False
    if rest.get("include_stop_str_in_output") or cut.flushed is None:
        return True
    most = len(cut.flushed) + 1  # a stop string may be much longer
    return any(cut.flushed.endswith(stop[:size]) for stop in stops for size in range(1, min(most, len(stop))))
