"""A large field, kept as JSON, makes no other request than a small one, kept as values."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.life.resumption import grammar_of, parses_calls, resumption
from balanceroute.proxy.wire.client_request import ClientRequest, parse
from balanceroute.proxy.wire.derived_requests import cut_alike, kept_apart, resume, split, with_priority
from balanceroute.proxy.wire.event_contents import REASONING, TEXT, TOOL_CALLS
from balanceroute.proxy.wire.message_requests import parse_messages
from balanceroute.proxy.wire.payloads import decode_body, drain_body, probe_body, push_body, score_body
from balanceroute.proxy.wire.prompt_blocks import PromptBlocks
from balanceroute.proxy.wire.sse import Cut
from tests.unit.proxy.wire.requests import KV

PAD = "~" * 600
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"maximum": 1.5, "enum": [None, True, "é"]}}}
TOOL: dict[str, Any] = {"name": "f", "parameters": SCHEMA | {"description": "PAD"}}
# each with a place for the pad
OF_ALL: dict[str, Any] = {
    "vllm_xargs": {"a": 1, "kv_transfer_params": "b", "c": "PAD"},
    "chat_template_kwargs": {"enable_thinking": False, "b": "PAD"},
}
OF_ENGINES: dict[str, Any] = OF_ALL | {
    "logit_bias": {"5": -100, "PAD": 1},
    "stop": ["ab", "sPAD"],
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "novel": "PAD"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "PAD", "schema": SCHEMA}},
    "structured_outputs": {"json": SCHEMA | {"title": "PAD"}},
    "tool_choice": {"type": "function", "function": {"name": "f", "novel": "PAD"}},
    "tools": [{"type": "function", "function": TOOL}],
    "documents": [{"title": "PAD", "text": "b"}],
    "guided_choice": ["a", "PAD"],
    "bad_words": ["b", "PAD"],
    "metadata": {"a": "PAD"},
    "a_field_of_tomorrow": [[{"a": [1, 2.5, "PAD"]}]],
    "chat_template": "éPAD",
    "guided_regex": "éPAD",
}
OF_MESSAGES: dict[str, Any] = OF_ALL | {
    "stop_sequences": ["ab", "sPAD"],
    "tools": [{"name": "f", "input_schema": SCHEMA | {"title": "PAD"}}],
    "output_format": {"type": "json_schema", "schema": SCHEMA | {"title": "PAD"}},
}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [[1, 2, 3], "x" * 3000]},
    "chat": {"messages": [{"role": "user", "content": "x" * 3000}]},
    "messages": {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "x" * 3000}]},
}
PLAIN = st.fixed_dictionaries(
    {},
    optional={
        **{"n": st.integers(1, 2), "seed": st.just(5), "temperature": st.just(0.5), "echo": st.booleans()},
        **{"include_reasoning": st.booleans(), "truncate_prompt_tokens": st.sampled_from([-1, 5])},
        **{"min_tokens": st.just(1), "cache_salt": st.just("s"), "max_completion_tokens": st.just(90)},
    },
)
CUTS = [
    Cut(frozenset(kinds), 5, flushed, misparsed=False)
    for kinds in ({TEXT}, {REASONING}, {REASONING, TEXT}, {TOOL_CALLS})
    for flushed in ("", "xa", None)
]


def read(endpoint: str, body: dict[str, Any], pad: str) -> ClientRequest:
    raw = orjson.dumps(body).replace(b"PAD", pad.encode())
    if endpoint == "messages":
        return parse_messages(raw)
    return parse("completions" if endpoint == "completions" else "chat", raw)


def made_of(request: ClientRequest) -> list[object]:
    """All that the router makes of a request, without the pad."""
    made: list[object] = [request.assembled, request.single, request.hides_reasoning, request.counted_by_usage]
    made += [request.stops_at_marker, request.limit, request.include_usage, request.continuous_usage]
    made += [grammar_of(request.rest), parses_calls(request), [resumption(request, cut) for cut in CUTS]]
    requests = [request, with_priority(request, 3), cut_alike(request, 7), *split(request)]
    requests.append(resume(split(request)[0], [1, 2], [3]))
    for each in requests:
        bodies = [probe_body(each), push_body(each, KV), decode_body(each, KV), decode_body(each, KV, "salt")]
        if each.prompt_wishes is not None:
            bodies.append(score_body(each))
        made += [body.replace(PAD.encode(), b"") for body in bodies]
        drained = orjson.loads(drain_body(kept_apart(each), KV).replace(PAD.encode(), b""))
        made.append({name: value for name, value in drained.items() if name != "cache_salt"})  # a random one
    return made


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    endpoint = draw(st.sampled_from(sorted(BODIES)))
    fields = OF_MESSAGES if endpoint == "messages" else OF_ENGINES
    names = draw(st.lists(st.sampled_from(sorted(fields)), unique=True))
    body = {name: fields[name] for name in names}
    if endpoint != "messages":
        body |= draw(PLAIN)
    if "stream_options" in names or draw(st.booleans()):
        body["stream"] = True
    return endpoint, BODIES[endpoint] | body


@given(bodies())
def test_a_large_field_has_the_effects_and_the_bytes_of_a_small_one(asked: tuple[str, dict[str, Any]]) -> None:
    large, small = read(*asked, PAD), read(*asked, "")
    assert made_of(large) == made_of(small)
    blocks = PromptBlocks(5)
    assert blocks.of(large, 100) == blocks.of(read(*asked, PAD), 100)
