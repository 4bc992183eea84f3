"""Non-stream answers made from a stream, compared with what the worker says unstreamed."""

import tracemalloc
from typing import Any

import orjson
import pytest

from balanceroute.errors import BadUpstreamReply, ReplyTooLarge
from balanceroute.proxy.wire import client_request
from balanceroute.proxy.wire.answers import (
    MAX_ANSWER_BYTES,
    AnswerAssembler,
    UnreadableEvent,
    correct_answer,
    opened,
    with_usage,
)
from balanceroute.proxy.wire.bounds import MAX_COMMAS
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd
from tests.unit.proxy.captures import body_of, capture_files
from tests.unit.proxy.wire.requests import a_request
from tests.unit.proxy.wire.test_sse import DONE, chat, completion, event, usage


def assemble(endpoint: client_request.Endpoint, wire: bytes, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "x", "messages": [{"role": "user"}]} | fields
    request = client_request.parse(endpoint, orjson.dumps(body))
    scanner = EventScanner(want_token_ids=request.return_token_ids, want_usage=True)
    assembler = AnswerAssembler(request)
    for i in range(0, len(wire), 61):
        assembler.feed(scanner.feed(wire[i : i + 61]))
    assert scanner.end is StreamEnd.DONE
    answer: dict[str, Any] = orjson.loads(assembler.answer(scanner))
    return answer


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one greedy request have in common: all but ids, times and fields that are null."""
    choice = {k: v for k, v in answer["choices"][0].items() if v is not None}
    if "message" in choice:
        choice["message"] = {k: v for k, v in choice["message"].items() if v is not None}
    counts = {k: v for k, v in answer["usage"].items() if v is not None}
    return {"object": answer["object"], "model": answer["model"], "choice": choice, "usage": counts}


@pytest.mark.parametrize(
    ("endpoint", "streamed", "unstreamed"),
    [
        ("completions", "single/021-compl-stream-usage", "single/010-compl"),
        ("chat", "single/032-chat-stream-usage", "single/030-chat"),
        ("chat", "single/033-chat-stream-usage-token_ids", "single/030-chat"),
        ("completions", "extra/501-stop_token_ids-stream", "extra/502-stop_token_ids"),
        ("completions", "extra/503-stop_string-stream", "extra/504-stop_string"),
    ],
)
def test_an_assembled_answer_equals_the_workers_unstreamed_one(
    endpoint: client_request.Endpoint, streamed: str, unstreamed: str
) -> None:
    wire = body_of(capture_files(f"{streamed}.resp")[0])[1]
    whole = orjson.loads(body_of(capture_files(f"{unstreamed}.resp")[0])[1])
    whole["choices"][0]["token_ids"] = None
    whole["choices"][0]["prompt_token_ids"] = None
    answer = assemble(endpoint, wire)
    assert without_identity(answer) == without_identity(whole)
    assert answer.keys() == whole.keys() - {"ec_transfer_params", "metrics"}  # which no stream has
    assert list(answer["usage"]) == list(whole["usage"])  # in its order, too


def test_an_assembled_chat_with_ids_equals_the_workers() -> None:
    wire = body_of(capture_files("single/033-chat-stream-usage-token_ids.resp")[0])[1]
    whole = orjson.loads(body_of(capture_files("single/036-chat-token_ids.resp")[0])[1])
    answer = assemble("chat", wire, return_token_ids=True)
    assert without_identity(answer) == without_identity(whole)
    assert answer["prompt_token_ids"] == whole["prompt_token_ids"]


def test_an_answer_without_worker_usage_has_the_routers_count() -> None:
    request = client_request.parse("completions", b'{"prompt":"x"}')
    scanner, assembler = (
        EventScanner(want_usage=True, prompt_tokens=4, prompt_details={"cached_tokens": 3}),
        AnswerAssembler(request),
    )
    wire = event(usage(4, 0)) + event(completion("a", [1, 2], finish_reason="length")) + DONE
    assembler.feed(scanner.feed(wire))
    got = orjson.loads(assembler.answer(scanner))["usage"]
    assert (got["prompt_tokens"], got["completion_tokens"], got["total_tokens"]) == (4, 2, 6)
    assert got["prompt_tokens_details"] == {"cached_tokens": 3}


def test_tool_calls_and_reasoning_are_merged_from_their_deltas() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "let "},
        {"reasoning": "me"},
        {"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"index": 1, "id": "t1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    wire = b"".join(event(chat(delta, [1])) for delta in deltas)
    wire += event(chat({}, [], finish_reason="tool_calls", stop_reason=None)) + event(usage(3, 7)) + DONE
    choice = assemble("chat", wire)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "let me"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"function": {"name": "f", "arguments": '{"a":1}'}, "id": "t0", "type": "function"},
        {"function": {"name": "g", "arguments": "{}"}, "id": "t1", "type": "function"},
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_answer_that_ends_within_its_reasoning_has_null_content(name: str) -> None:
    """vLLM with a reasoning parser and a stop string that the first token ends: its unstreamed answer says null."""
    wire = event(chat({"role": "assistant", "content": ""}, [])) + event(
        chat({name: ""}, [7], finish_reason="stop", stop_reason="w7")
    )
    message = assemble("chat", wire + event(usage(3, 1)) + DONE)["choices"][0]["message"]
    assert (message[name], message["content"]) == ("", None)


def test_an_empty_answer_without_reasoning_has_an_empty_text() -> None:
    wire = event(chat({"role": "assistant", "content": ""}, [])) + event(chat({}, [7], finish_reason="stop"))
    assert assemble("chat", wire + event(usage(3, 1)) + DONE)["choices"][0]["message"]["content"] == ""


def test_an_unstreamed_answer_is_counted_by_its_ids_and_without_them_by_its_usage() -> None:
    request = client_request.parse("completions", b'{"prompt":"x"}')
    for ids, tokens in (([1, 2], 2), (None, 5)):
        reply = {"choices": [{"text": "a", "token_ids": ids}], "usage": {"completion_tokens": 5}}
        assert correct_answer(request, orjson.dumps(reply), worker="d0").tokens == tokens


def test_logprobs_of_all_events_are_joined() -> None:
    parts = [{"tokens": [t], "token_logprobs": [-0.5], "text_offset": [i]} for i, t in enumerate("abc")]
    wire = b"".join(event(completion(t, [1], logprobs=p)) for t, p in zip("abc", parts, strict=True))
    wire += event(completion("", [], finish_reason="length")) + event(usage(1, 3)) + DONE
    logprobs = assemble("completions", wire)["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["a", "b", "c"], "token_logprobs": [-0.5] * 3, "text_offset": [0, 1, 2]}


def test_text_offsets_of_an_unstreamed_answer_count_its_tokens_as_engines_do() -> None:
    """In a stream each event's begin at the length of the text that was sent: special tokens have none there."""
    parts = [("a", ["token_id:7"], [0]), ("", ["<special>"], [1]), ("bc", ["b", "c"], [1, 2])]
    wire = b"".join(
        event(completion(text, [1], logprobs={"tokens": tokens, "text_offset": offsets}))
        for text, tokens, offsets in parts
    )
    wire += event(completion("", [], finish_reason="length")) + event(usage(1, 4)) + DONE
    logprobs = assemble("completions", wire)["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["token_id:7", "<special>", "b", "c"], "text_offset": [0, 10, 19, 20]}


def test_logprobs_of_an_answer_under_way_take_hardly_more_memory_than_their_json() -> None:
    """As objects 20 per token took 7.7 kB: a gigabyte for an answer of 128,000 tokens."""
    listed = [[{"token": f" {i}.{k}", "logprob": -i / 7, "bytes": [32, i]} for k in range(20)] for i in range(200)]
    scored = [{"token": " a", "logprob": -0.5, "bytes": [32], "top_logprobs": top} for top in listed]
    events = [event(chat({"content": "a"}, [1], logprobs={"content": [each]})) for each in scored]
    assembler = AnswerAssembler(a_request("chat"))
    scanner = EventScanner(want_usage=True)
    tracemalloc.start()
    try:
        for each in events:
            assembler.feed(scanner.feed(each))
        assert tracemalloc.get_traced_memory()[0] < 1.5 * len(orjson.dumps(scored))
    finally:
        tracemalloc.stop()
    scanner.feed(event(chat({}, [], finish_reason="stop")) + DONE)
    assert orjson.loads(assembler.answer(scanner))["choices"][0]["logprobs"] == {"content": scored}


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("kind", ["text", "chat", "call", "scored"])
def test_an_answer_tells_what_it_keeps_which_is_far_less_than_its_events(kind: str, ids: bool) -> None:
    request = a_request("completions" if kind == "text" else "chat", return_token_ids=ids)
    first, word = {"name": "f", "arguments": ""}, {"arguments": " a word"}
    scores = {"logprobs": {"content": [{"token": " a word", "logprob": -0.5}]}}
    parts = [
        {
            "text": lambda n: completion(" a word", [n]),
            "chat": lambda n: chat({"content": " a word"}, [n]),
            "call": lambda n: chat({"tool_calls": [{"index": 0, "function": word if n else first}]}, [n]),
            "scored": lambda n: chat({"content": " a word"}, [n], **scores),
        }[kind](n)
        for n in range(500)
    ]
    events = b"".join(map(event, parts))

    def assembled() -> AnswerAssembler:
        assembler = AnswerAssembler(request)
        assembler.feed(EventScanner(want_token_ids=ids, want_usage=True).feed(events))
        return assembler

    assembled()  # what the first run of this code leaves, such as coverage's notes, is not of the answer
    tracemalloc.start()
    try:
        assembler = assembled()
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(events) / 3 > kept_bytes > assembler.kept_bytes > kept_bytes / 3


@pytest.mark.parametrize("chats", [False, True])
def test_a_choice_keeps_the_fields_that_an_engine_has_added_to_it(chats: bool) -> None:
    spans = [{"start": 0, "end": 2, "version": "7"}]
    end: dict[str, Any] = {"finish_reason": "stop", "weight_versions": spans}
    last = chat({}, [2], **end) if chats else completion("", [2], **end)
    wire = event(last) + event(usage(3, 1)) + DONE
    answer = assemble("chat" if chats else "completions", wire)
    assert answer["choices"][0]["weight_versions"] == spans


def test_an_answer_from_two_workers_is_one_answer() -> None:
    request = client_request.parse("completions", b'{"prompt":"x","max_tokens":100,"return_token_ids":true}')
    scanner = EventScanner(want_token_ids=True, want_usage=True, prompt_tokens=4)
    assembler = AnswerAssembler(request)
    marker = completion("", [], finish_reason="stop", stop_reason="recomputed")
    assembler.feed(scanner.feed(event(completion("ab", [1, 2])) + event(marker) + DONE))
    scanner.resume()
    last = completion("c", [3], finish_reason="length")
    assembler.feed(scanner.feed(event(last | {"id": "other"}) + event(usage(6, 1)) + DONE))
    answer = orjson.loads(assembler.answer(scanner))
    assert (answer["id"], answer["choices"][0]["text"]) == ("cmpl-1", "abc")
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}], ids=["none", "null"])
def test_a_tool_call_cut_off_after_its_name_has_empty_arguments(arguments: dict[str, Any]) -> None:
    """OpenAI's clients read them in every call; a stream tells the name alone first."""
    call = {"index": 0, "id": "t0", "type": "function", "function": {"name": "f", **arguments}}
    wire = event(chat({"role": "assistant", "content": ""}, [])) + event(chat({"tool_calls": [call]}, [1]))
    wire += event(chat({}, [2], finish_reason="length")) + event(usage(3, 2)) + DONE
    choice = assemble("chat", wire)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"] == [
        {"type": "function", "id": "t0", "function": {"name": "f", "arguments": ""}}
    ]


def test_a_tool_call_without_a_name_is_left_out() -> None:
    """vLLM 0.32 with `qwen3_coder`, a request without `tools`, an answer that a stop string cuts within a call."""
    wire = event(chat({"role": "assistant", "content": ""}, [])) + event(chat({"content": "<tool_call>\n"}, [1]))
    last = chat({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, [2], finish_reason="tool_calls")
    choice = assemble("chat", wire + event(last) + event(usage(3, 2)) + DONE)["choices"][0]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] == "<tool_call>\n"
    assert choice["finish_reason"] == "stop"


def test_a_role_that_only_the_first_event_tells_is_in_the_assembled_answer() -> None:
    wire = event(chat({"role": "assistant", "content": ""}, None)) + event(chat({"role": None, "content": "a"}, None))
    answer = assemble("chat", wire + event(chat({"role": None, "content": "b"}, None, finish_reason="stop")) + DONE)
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "ab")


def test_fields_that_are_no_texts_have_their_last_value() -> None:
    """Annotations, audio, logprobs of a refusal, and whatever engines may add."""
    logprobs = [
        {"content": [{"token": "a"}], "refusal": None},
        {"content": [{"token": "b"}], "refusal": [{"token": "c"}]},
    ]
    more: list[dict[str, Any]] = [{"novel": 1, "audio": None, "refusal": None}, {"novel": 2, "audio": {"id": "a"}}]
    wire = b"".join(
        event(chat({"content": t, **m}, [1], logprobs=p)) for t, m, p in zip("ab", more, logprobs, strict=True)
    )
    choice = assemble("chat", wire + event(chat({"novel": None}, [], finish_reason="stop")) + DONE)["choices"][0]
    message = choice["message"]
    assert (message["content"], message["novel"], message["audio"], message["refusal"]) == ("ab", 2, {"id": "a"}, None)
    assert choice["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}], "refusal": [{"token": "c"}]}


def test_an_unreadable_event_has_no_place_in_an_assembled_answer() -> None:
    wire = event(completion("a", [1])) + b"data: hello\n\ndata: 5\n\n"
    wire += event(completion("b", [2], finish_reason="stop")) + DONE
    assert assemble("completions", wire)["choices"][0]["text"] == "ab"


def test_an_answer_that_is_too_large_to_assemble_or_too_deep_to_write_is_an_error() -> None:
    request = client_request.parse("completions", b'{"prompt":"x"}')
    large, deep, scanner = AnswerAssembler(request), AnswerAssembler(request), EventScanner(want_usage=True)
    with pytest.raises(UnreadableEvent, match="larger than"):
        for _ in range(5):
            large.feed(b":" * (MAX_ANSWER_BYTES // 4))
    nested = b'"novel":' + b"[" * 300 + b"]" * 300
    deep.feed(scanner.feed(event(completion("a", [1], finish_reason="stop"))[:-3] + b"," + nested + b"}\n\n" + DONE))
    with pytest.raises(UnreadableEvent, match="can't be written"):
        deep.answer(scanner)


def test_what_an_engine_says_in_the_place_of_an_index_is_told_to_nobody() -> None:
    """Errors are logged, and answers are not."""
    with pytest.raises(BadUpstreamReply) as told:
        assemble("chat", event(chat({"tool_calls": [{"index": "secret", "function": {"name": "f"}}]}, [1])))
    assert str(told.value) == "an event is no part of an answer (the index of a tool call is no number)"


def test_an_engines_figures_of_a_request_are_in_the_assembled_answer_unless_it_went_on_elsewhere() -> None:
    """vLLM tells `metrics` of drafts, and of times where it is started so, in the last event of a stream."""
    figures = {"metrics": {"speculative_decoding": {"num_spec_steps": 2}}}
    wire = event(completion("a", [1], finish_reason="length")) + event(usage(1, 1) | figures) + DONE
    assert assemble("completions", wire)["metrics"] == figures["metrics"]
    scanner = EventScanner(want_usage=True)
    assembler = AnswerAssembler(client_request.parse("completions", b'{"prompt":"x"}'))
    assembler.feed(scanner.feed(event(completion("b", [2]))))
    scanner.resume()
    assembler.feed(scanner.feed(wire))
    assert not orjson.loads(assembler.answer(scanner)).get("metrics")


def test_ids_that_the_engine_does_not_send_are_null() -> None:
    """vLLM tells none with `include_reasoning: false`."""
    wire = event(chat({"content": "a"}, None, finish_reason="stop")) + event(usage(1, 1)) + DONE
    assert assemble("chat", wire, return_token_ids=True)["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    "wire",
    [
        b": ping\n" + event(completion("a", [1])) + event(completion("b", [2], finish_reason="stop")) + DONE,
        b"\xff\xfe\r\n" + event(completion("a", [1])) + event(completion("b", [2], finish_reason="stop")) + DONE,
        event(completion("a", [1]), newline=b"\r\n")
        + event(completion("b", [2], finish_reason="stop"), newline=b"\r\n")
        + DONE,
    ],
    ids=["comment in an event", "garbage in an event", "crlf"],
)
def test_no_text_is_lost_whatever_else_its_event_holds(wire: bytes) -> None:
    assert assemble("completions", wire)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    "choice",
    [
        *({"token_ids": 5}, {"index": []}, {"index": "0"}, {"delta": 7}),
        *({"delta": {"tool_calls": [1]}}, {"delta": {"tool_calls": [{"index": None}]}}),
    ],
)
def test_an_event_that_is_no_part_of_an_answer_ends_it_for_good(choice: dict[str, Any]) -> None:
    assembler = AnswerAssembler(client_request.parse("completions", b'{"prompt":"x"}'))
    with pytest.raises(BadUpstreamReply) as caught:
        assembler.feed(event(completion("a", [1], **choice)))
    assert not caught.value.retryable


def test_an_unstreamed_answer_is_counted_and_stripped() -> None:
    body = body_of(capture_files("single/036-chat-token_ids.resp")[0])[1]
    corrected = correct_answer(
        client_request.parse("chat", b'{"messages":[{}]}'), body, worker="d0", prompt_details={"cached_tokens": 3}
    )
    answer = orjson.loads(corrected.body)
    assert (corrected.tokens, corrected.finish_reason, corrected.recomputed) == (8, "length", False)
    assert corrected.prompt_ids == corrected.usage["prompt_tokens"]
    assert answer["choices"][0]["token_ids"] is answer["prompt_token_ids"] is None
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_client_gets_no_ids_that_it_did_not_ask_for_and_never_the_place_of_its_kv() -> None:
    choice = {"text": "a", "token_ids": [1], "prompt_token_ids": [7, 8], "finish_reason": "stop"}
    body = orjson.dumps({"choices": [choice], "prompt_token_ids": [7, 8], "kv_transfer_params": {"remote_host": "h"}})
    for wanted in (False, True):
        request = client_request.parse("completions", orjson.dumps({"prompt": "x", "return_token_ids": wanted}))
        answer = orjson.loads(correct_answer(request, body, worker="d0").body)
        of_prompt = [7, 8] if wanted else None
        assert answer["choices"][0]["token_ids"] == ([1] if wanted else None)
        assert answer["choices"][0]["prompt_token_ids"] == answer["prompt_token_ids"] == of_prompt
        assert answer["kv_transfer_params"] is None


def test_an_unstreamed_reply_with_too_many_values_is_not_read() -> None:
    body = b'{"choices":[{"text":"a","token_ids":[1]}],"more":[' + b"[]," * MAX_COMMAS + b"1,1]}"
    with pytest.raises(ReplyTooLarge):
        correct_answer(client_request.parse("completions", b'{"prompt":"x"}'), body, worker="d0")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"choices":[]}',
        b'{"choices":[{"token_ids":5}]}',
        b'{"choices":[{"token_ids":["a"]}]}',
        b'{"choices":[1]}',
        b'{"choices":[{"text":"\xff","token_ids":[1]}]}',
        b'{"choices":[{"logprobs":[],"token_ids":[1]}]}',
        b'{"choices":[{"message":"a","token_ids":[1]}]}',
        b'{"choices":[{"text":"a","token_ids":[1]}],"more":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_an_unstreamed_reply_that_is_no_completion_is_a_bad_reply(body: bytes) -> None:
    with pytest.raises(BadUpstreamReply):
        correct_answer(client_request.parse("chat", b'{"messages":[{}]}'), body, worker="d0")


def test_logprobs_of_an_unstreamed_answer_stay_json() -> None:
    """As values those of some thousand tokens stopped the event loop for half a second."""
    logprobs = b'{"content": [ %b]}' % b",".join([b'{"token":"[\\"","logprob":-1.50,"top_logprobs":[{},{}]}'] * 1000)
    body = b'{"id":"x","choices":[{"index":0,"text":"a","logprobs":%b,"token_ids":[1]}],"usage":null}' % logprobs
    tracemalloc.start()
    try:
        corrected = correct_answer(client_request.parse("completions", b'{"prompt":"x"}'), body, worker="d0")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
    assert corrected.body == body.replace(b'"token_ids":[1]', b'"token_ids":null')


def test_an_answer_is_opened_without_making_values_of_its_logprobs() -> None:
    """To merge eight choices of some thousand tokens with 20 logprobs each stopped the event loop for seconds."""
    top = [{"token": f" {k}", "logprob": -k / 7, "bytes": [32, k]} for k in range(20)]
    choice = {"index": 0, "message": {"content": "a"}, "logprobs": {"content": [{"top_logprobs": top}] * 200}}
    whole = {"id": "chatcmpl-1", "choices": [choice], "created": 7, "usage": {"completion_tokens": 200}}
    body = orjson.dumps(whole)
    tracemalloc.start()
    try:
        answer = opened(body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
    assert answer["usage"] == whole["usage"]
    assert orjson.dumps(answer) == body
    assert with_usage(body, {"completion_tokens": 200}) == body
    assert opened(b'{"choices":[{"a":1},2]}')["usage"] is None
