"""Chats' answers as Anthropic's messages, against a real engine's own and against the official client's reading."""

import json
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.message_answers import PING, Counts, MessageStream, message_of
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd
from tests.at_first_use import AtFirstUse
from tests.unit.proxy.captures import body_of, capture_files

types = AtFirstUse("anthropic.types")
COUNTS = Counts(9, None, 5)


@cache
def official() -> TypeAdapter[Any]:
    """What the official client reads as an event."""
    return TypeAdapter(types.RawMessageStreamEvent)


def a_stream(counts: Counts = COUNTS) -> EventScanner:
    return EventScanner(want_usage=True, translation=lambda: MessageStream("msg_1", "asked", lambda: counts))


def chunk(delta: dict[str, Any], finish: str | None = None, stop: Any = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": [7]}
    if finish:
        choice["stop_reason"] = stop
    return event({"id": "chatcmpl-1", "model": "tiny", "choices": [choice]})


def event(data: Any) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(data)


def called(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": index, "function": function, **({"id": f"call_{index}"} if name else {})}]}


ROLE = chunk({"role": "assistant", "content": ""})
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = b"data: [DONE]\n\n"


def events_in(out: bytes) -> list[dict[str, Any]]:
    """The data of named events, each of which says its own name; pings are left out."""
    parts = []
    for block in out.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n")
        parts.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + parts[-1]["type"].encode()
    return [part for part in parts if part["type"] != "ping"]


def read_by_the_client(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make; fails on any that the official client's types do not allow."""
    for part in parts:
        official().validate_python(part, strict=True)
    message: dict[str, Any] = parts[0]["message"]
    for part in parts[1:]:
        if part["type"] == "content_block_start":
            assert part["index"] == len(message["content"])
            message["content"].append({**part["content_block"], "json": ""})
        elif part["type"] == "content_block_delta":
            block = message["content"][part["index"]]
            for name, value in part["delta"].items():
                name = "json" if name == "partial_json" else name
                if name != "type":
                    block[name] += value
        elif part["type"] == "message_delta":
            message |= {**part["delta"], "usage": part["usage"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return message


def whole(choice: dict[str, Any], **usage: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, **usage}
    return json.loads(message_of(orjson.dumps({"model": "tiny", "choices": [choice], "usage": usage}), "msg_1"))


# -------------------------------------------------------------------------------- the engine's own answers


def test_a_captured_answer_becomes_the_engines_own_message() -> None:
    """Two requests of one prompt, sampled: what the engine says of its chat is said of the message that it made."""
    (path,) = capture_files("single/071-messages.resp")
    own = json.loads(body_of(path)[1])
    message = {"role": "assistant", "content": own["content"][0]["text"], "reasoning": None}
    mine = whole({"message": message, "finish_reason": "length", "stop_reason": None})
    assert own | {"id": "msg_1", "stop_sequence": None} == mine


def test_a_captured_stream_becomes_the_engines_own_events() -> None:
    (path,) = capture_files("single/072-messages-stream.resp")
    own = events_in(b"".join(b.lstrip(b"\n") + b"\n\n" for b in body_of(path)[1].split(b"\n\n") if b.strip()))
    texts = [part["delta"]["text"] for part in own if part["type"] == "content_block_delta"]
    chunks = [chunk({"content": text}, "length" if text is texts[-1] else None) for text in texts]
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    stream = a_stream()
    mine = events_in(b"".join(map(stream.feed, [ROLE, *chunks, usage, DONE])))
    own[0]["message"]["id"] = "msg_1"
    assert mine == own


@pytest.mark.parametrize(
    "name", ["single/032-chat-stream-usage", "single/033-chat-stream-usage-token_ids", "single/031-chat-stream",
             "single/038-chat-stream-100-ignore_eos", "extra/507-chat-eos-stream"]
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 10**9], ids=["bytes", "pieces", "at-once"])
def test_the_official_client_reads_a_captured_stream_as_the_complete_text(name: str, size: int) -> None:
    (path,) = capture_files(f"{name}.resp")
    wire = body_of(path)[1]
    stream = a_stream()
    out = [stream.feed(wire[at : at + size]) for at in range(0, len(wire), size)]
    message = read_by_the_client(events_in(b"".join(out)))
    chats = [json.loads(block[6:]) for block in wire.decode().split("\n\n") if block.startswith("data: {")]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in chats if part["choices"])
    assert "".join(block["text"] for block in message["content"]) == text
    finish = next(p["choices"][0]["finish_reason"] for p in chats if p["choices"] and p["choices"][0]["finish_reason"])
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[finish]


# ------------------------------------------------------------------------------------------------ the whole


def test_a_message_has_thinking_text_and_tool_calls_in_this_order() -> None:
    function = {"name": "look_up", "arguments": '{"word": "a"}'}
    message = {"content": "I look.", "reasoning": "Hm.", "tool_calls": [{"id": "c1", "function": function}]}
    message_sent = whole(
        {"message": message, "finish_reason": "tool_calls"}, prompt_tokens_details={"cached_tokens": 4}
    )
    assert message_sent["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "msg_1"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "a"}},
    ]
    assert message_sent["stop_reason"] == "tool_use"
    assert message_sent["usage"] == {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 5}


def test_an_empty_answer_has_one_empty_text() -> None:
    assert whole({"message": {"content": ""}, "finish_reason": "stop"})["content"] == [{"type": "text", "text": ""}]


STOPS = [
    ("length", None, "max_tokens", None),
    ("stop", None, "end_turn", None),
    ("stop", 151643, "end_turn", None),
    ("stop", "END", "stop_sequence", "END"),
    ("content_filter", None, "refusal", None),
    ("repetition", None, None, None),
]


@pytest.mark.parametrize(("finish", "stop", "reason", "sequence"), STOPS)
def test_a_finish_reason_is_a_stop_reason_streamed_or_not(finish: str, stop: Any, reason: Any, sequence: Any) -> None:
    once = whole({"message": {"content": "a"}, "finish_reason": finish, "stop_reason": stop})
    parts = events_in(a_stream().feed(ROLE + chunk({"content": "a"}, finish, stop) + USAGE + DONE))
    for end in (once, parts[-2]["delta"]):
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "finish", "stop", "reason"),
    [
        ('{"a": 1}', "tool_calls", None, "tool_use"),
        ('{"a": 1}', "stop", None, "tool_use"),
        ('{"a": 1}', "stop", "END", "tool_use"),
        ('{"a": ', "stop", "END", "stop_sequence"),
        ('{"a": ', "length", None, "max_tokens"),
        ("", "tool_calls", None, "tool_use"),
        ("", "tool_calls", "END", "stop_sequence"),
        ("{}", "tool_calls", "END", "tool_use"),
    ],
)
def test_a_cut_tool_call_is_not_marked_as_executable(arguments: str, finish: str, stop: Any, reason: str) -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    once = whole({"message": {"content": None, "tool_calls": calls}, "finish_reason": finish, "stop_reason": stop})
    out = a_stream().feed(ROLE + chunk(called(0, arguments, "f")) + chunk({}, finish, stop) + USAGE + DONE)
    assert once["stop_reason"] == events_in(out)[-2]["delta"]["stop_reason"] == reason
    assert once["content"][0]["input"] == ({"a": 1} if arguments == '{"a": 1}' else {})


def test_a_tool_call_without_a_name_is_no_tool_use() -> None:
    """vLLM 0.32 with `qwen3_coder` ends so where an answer without `tools` is cut within a call."""
    out = a_stream().feed(ROLE + chunk({"content": "so"}) + chunk(called(0, "{}"), "tool_calls") + USAGE + DONE)
    message = read_by_the_client(events_in(out))
    assert [block["type"] for block in message["content"]] == ["text"]
    assert events_in(out)[-2]["delta"]["stop_reason"] == "end_turn"


def test_a_call_s_large_integers_keep_their_digits_streamed_or_not() -> None:
    arguments = '{"wei": 123456789012345678901234567890, "price": 1.10}'
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    once = whole({"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"})
    out = a_stream().feed(ROLE + chunk(called(0, arguments, "f")) + chunk({}, "tool_calls") + USAGE + DONE)
    streamed = read_by_the_client(events_in(out))
    assert once["content"][0]["input"] == streamed["content"][0]["input"] == json.loads(arguments)


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"choices":[]}', b'{"choices":[{"message":5}]}'])
def test_a_reply_that_is_not_a_chat_completion_is_a_bad_reply(answer: bytes) -> None:
    with pytest.raises(BadUpstreamReply):
        message_of(answer, "msg_1")


# ----------------------------------------------------------------------------------------------- the stream


def test_the_first_event_has_the_prompt_tokens_before_the_engine_counted_them() -> None:
    out = a_stream(Counts(9, 4, 1)).feed(ROLE)
    (start,) = events_in(out)
    assert start["message"]["usage"] == {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 0}
    assert start["message"]["model"] == "tiny" and PING in out


def test_thinking_text_and_parallel_calls_are_consecutive_blocks() -> None:
    chunks = [ROLE, *(chunk({"reasoning": word}) for word in ("H", "m.")), chunk({"content": "I look."})]
    chunks += [chunk(called(0, "", "f")), chunk(called(0, '{"a": ')), chunk(called(0, "1}"))]
    chunks += [chunk(called(1, '{"b"', "g")), chunk(called(1, ": 2}")), chunk({}, "tool_calls"), USAGE, DONE]
    stream = a_stream()
    parts = events_in(b"".join(map(stream.feed, chunks)))
    message = read_by_the_client(parts)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][0]["thinking"] == "Hm." and message["content"][0]["signature"]
    assert [block["input"] for block in message["content"][2:]] == [{"a": 1}, {"b": 2}]
    assert message["stop_reason"] == "tool_use" and message["usage"]["output_tokens"] == 5
    kinds = [part["type"].removeprefix("content_block_") for part in parts]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert [part["index"] for part in parts if part["type"] == "content_block_start"] == [0, 1, 2, 3]


def test_text_within_a_tool_call_is_a_block_after_it() -> None:
    chunks = [ROLE, chunk(called(0, '{"a"', "f")), chunk({"content": "\n"}), chunk(called(0, ": 1}"))]
    stream = a_stream()
    message = read_by_the_client(events_in(b"".join(map(stream.feed, [*chunks, chunk({}, "tool_calls"), USAGE, DONE]))))
    assert [block["type"] for block in message["content"]] == ["tool_use", "text"]
    assert message["content"][0]["input"] == {"a": 1} and message["content"][1]["text"] == "\n"


def test_text_within_a_tool_call_is_a_block_of_its_own_before_the_next_call() -> None:
    deltas = [called(0, '{"a": 1', "f"), {"content": "and"}, called(0, "}"), called(1, "{}", "g"), {"content": "end"}]
    stream = a_stream()
    events = [ROLE, *map(chunk, deltas), chunk({}, "tool_calls"), USAGE, DONE]
    message = read_by_the_client(events_in(b"".join(map(stream.feed, events))))
    assert [block.get("text") or block["input"] for block in message["content"]] == [{"a": 1}, "and", {}, "end"]


def test_a_tool_call_without_an_id_gets_one_streamed_or_not() -> None:
    """Clients answer to it in their next message."""
    calls = [{"index": place, "function": {"name": "f", "arguments": "{}"}} for place in range(2)]
    message = whole({"message": {"tool_calls": calls}, "finish_reason": "tool_calls"})
    stream = a_stream()
    events = [ROLE, *(chunk({"tool_calls": [call]}) for call in calls), chunk({}, "tool_calls"), USAGE, DONE]
    streamed = read_by_the_client(events_in(b"".join(map(stream.feed, events))))
    ids = [block["id"] for block in message["content"]]
    assert ids == [block["id"] for block in streamed["content"]] and len(set(ids)) == 2 and all(ids)


def test_an_end_without_usage_has_the_routers_count() -> None:
    parts = events_in(a_stream().feed(ROLE + chunk({"content": "a"}, "stop") + DONE))
    assert [part["type"] for part in parts[-2:]] == ["message_delta", "message_stop"]
    assert parts[-2]["usage"] == {"input_tokens": 9, "output_tokens": 5}


@pytest.mark.parametrize(
    "delta",
    [
        {"content": 5},
        {"content": ["a"]},
        {"tool_calls": 5},
        {"tool_calls": [5]},
        {"tool_calls": [{"index": "0", "function": {"name": "f"}}]},
        {"tool_calls": [{"function": {"arguments": {}, "name": 1}}]},
    ],
)
def test_an_event_that_is_no_part_of_a_message_ends_it(delta: dict[str, Any]) -> None:
    stream = a_stream()
    assert not stream.feed(chunk(delta)) and stream.end is StreamEnd.MALFORMED and stream.tokens == 0


def test_an_event_with_more_than_its_text_is_no_pattern_for_those_after_it() -> None:
    both, calls = {"reasoning": "a", "content": "b"}, {"content": "d", **called(0, "{}", "f")}
    deltas = [{"content": "a"}, both, *[{**both, "content": "c"}] * 2, {"content": ""}, calls, {"content": "f"}]
    events = [ROLE, *map(chunk, deltas), chunk({"content": "e"}), chunk({}, "stop"), USAGE, DONE]
    stream = a_stream()
    message = read_by_the_client(events_in(b"".join(map(stream.feed, events))))
    texts = [(block["type"], block.get("thinking") or block.get("text")) for block in message["content"]]
    assert texts[:3] == [("text", "a"), ("thinking", "a"), ("text", "b")]
    assert [kind for kind, _ in texts].count("thinking") == 3 and texts[-3:] == [
        ("text", "cd"),
        ("tool_use", None),
        ("text", "fe"),
    ]


def test_an_event_without_choices_and_usage_is_no_part_of_a_message() -> None:
    odd = event({"id": "chatcmpl-1", "choices": [], "novel": 1})
    with_odd, without = (a_stream().feed(ROLE + chunk({"content": "a"}) + each + USAGE + DONE) for each in (odd, b""))
    assert with_odd == without


def test_no_content_follows_the_message_delta() -> None:
    out = a_stream().feed(ROLE + chunk({"content": "a"}) + chunk({}, "stop") + USAGE + chunk({"content": "b"}) + DONE)
    assert [part["type"] for part in events_in(out)][-2:] == ["message_delta", "message_stop"]


def test_tokens_without_text_are_counted_and_send_no_event() -> None:
    stream = a_stream()
    stream.feed(ROLE + chunk({"content": "a"}))
    assert stream.feed(chunk({"content": ""}) * 3) == b"" and stream.tokens == 5
    assert events_in(stream.feed(chunk({"content": "b"})))[0]["delta"]["text"] == "b"


def test_a_delta_of_an_ended_tool_call_is_an_error() -> None:
    stream = a_stream()
    stream.feed(ROLE + chunk(called(0, "{", "f")) + chunk(called(1, "{}", "g")))
    assert not stream.feed(chunk(called(0, "}"))) and stream.end is StreamEnd.MALFORMED


TEXTS = st.text(max_size=6) | st.sampled_from(['"', "\\", 'a"b', "\n\n", "data: ", '"},"x":"', "\\\\", "é", "\u2028"])
DELTAS = st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), TEXTS), max_size=12)


def parsed_each(events: list[bytes]) -> bytes:
    """What the events are told as where every one of them is parsed."""
    stream = MessageStream("msg_1", "asked", lambda: COUNTS)
    return b"".join(stream.event(orjson.loads(data[6:])) if b"{" in data else stream.end() for data in events)


@given(DELTAS, st.data())
def test_text_arrives_complete_and_in_order_for_any_grouping_of_events(
    deltas: list[tuple[str, str]], data: st.DataObject
) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    events = [ROLE, *(chunk({key: word}) for key, word in deltas), chunk({}, "stop"), usage, DONE]
    stream, out, at = a_stream(), [], 0
    while at < len(events):
        many = data.draw(st.integers(1, 4))
        out.append(stream.feed(b"".join(events[at : at + many])))
        at += many
    assert b"".join(out) == parsed_each(events)  # to the byte, whether an event was matched or parsed
    parts = events_in(b"".join(out))
    message = read_by_the_client(parts)
    joined: list[tuple[str, str]] = []
    for key, word in deltas:
        kind = "text" if key == "content" else "thinking"
        if word and joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + word)
        elif word:
            joined.append((kind, word))
    assert [(block["type"], block[block["type"]]) for block in message["content"]] == joined
    indices = [part["index"] for part in parts if part["type"] == "content_block_start"]
    assert indices == [part["index"] for part in parts if part["type"] == "content_block_stop"] == [*range(len(joined))]
