"""Anthropic's messages as chats: what each field becomes, and what is refused by its name."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.emulator.requests import parse_generation
from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.message_requests import chat_of, parse_messages, tokenize_body
from balanceroute.proxy.wire.payloads import decode_body, probe_body
from tests.examples import examples

TOOL = {"name": "look_up", "description": "Looks a word up.", "input_schema": {"properties": {"word": {}}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(messages) or [user("hi")], **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def result(of: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, **({} if content is None else {"content": content}), **more}


def call(name: str = "look_up", call_id: str = "t1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def test_a_plain_message_is_a_chat_with_the_same_words() -> None:
    assert chat_of(body()) == {"model": "m", "max_tokens": 9, "messages": [user("hi")]}


def test_a_stream_is_asked_for_with_its_usage() -> None:
    chat = chat_of(body(stream=True))
    assert chat["stream"] is True and chat["stream_options"] == {"include_usage": True}
    assert "stream" not in chat_of(body(stream=False))


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        ("max_tokens", "9", 9),
        ("max_tokens", 9.0, 9),
        ("temperature", "0.5", 0.5),
        ("top_p", "1", 1.0),
        ("top_k", "4", 4),
        ("seed", 5.0, 5),
        ("min_p", "0.1", 0.1),
        ("ignore_eos", "true", True),
        ("watermarking", False, False),
        ("stream", 1, True),
        ("stop_token_ids", ["7", 8.0], [7, 8]),
    ],
)
def test_numbers_and_flags_are_read_as_the_engines_do(field: str, given: object, meant: object) -> None:
    read = chat_of(body(**{field: given}))[field]
    assert (read, type(read)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_tokens", 4.5),
        ("max_tokens", [4]),
        ("seed", 2**63),
        ("top_k", 1e30),
        ("temperature", "warm"),
        ("temperature", "nan"),
        ("repetition_penalty", "inf"),
        ("stream", "perhaps"),
        ("stream", 2),
    ],
)
def test_an_invalid_number_or_flag_is_refused_with_its_name(field: str, given: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_of(body(**{field: given}))
    assert caught.value.param == field


def test_system_texts_from_anywhere_become_the_first_message_without_billing_lines() -> None:
    blocks = [
        text("x-anthropic-billing-header: cc=1f"),
        text("Be", cache_control={"type": "ephemeral"}),
        text(" brief."),
    ]
    chat = chat_of(body(user("hi"), {"role": "system", "content": " Now."}, user("go"), system=blocks))
    assert chat["messages"] == [{"role": "system", "content": "Be brief. Now."}, user("hi"), user("go")]
    assert chat_of(body(system="Be brief."))["messages"][0] == {"role": "system", "content": "Be brief."}


def test_an_empty_unsupported_field_is_accepted() -> None:
    assert chat_of(body(mcp_servers=[], container=None, thinking=None, metadata={}, min_p=None)) == chat_of(body())


def test_one_text_block_is_a_text_and_several_are_parts() -> None:
    assert chat_of(body(user([text("a")])))["messages"] == [user("a")]
    assert chat_of(body(user([text("a"), IMAGE])))["messages"] == [user([text("a"), IMAGE_PART])]


def test_an_image_by_its_url_is_passed_on() -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert chat_of(body(user([block])))["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    ]


def test_a_document_of_text_is_its_title_and_text() -> None:
    block = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    assert chat_of(body(user([block])))["messages"][0]["content"] == [text("T"), text("words")]
    block = {"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}}
    assert chat_of(body(user([block])))["messages"][0]["content"] == [text("a"), IMAGE_PART]


def test_parallel_tool_results_come_first_then_their_images_and_the_users_text() -> None:
    message = user([result("t1", [text("a"), IMAGE, text("b")]), result("t2", "c"), text("and now?")])
    assert chat_of(body(message))["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "t2", "content": "c"},
        user([IMAGE_PART, text("and now?")]),
    ]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result("t"), ""),
        (result("t", []), ""),
        (result("t", is_error=True), "Error"),
        (result("t", "No such word.", is_error=True), "No such word."),
    ],
    ids=["none", "empty", "failed-without-a-word", "failed"],
)
def test_a_tool_result_keeps_its_content(block: dict[str, Any], expected: str) -> None:
    assert chat_of(body(user([block])))["messages"] == [{"role": "tool", "tool_call_id": "t", "content": expected}]


def test_an_assistants_blocks_become_reasoning_text_and_tool_calls() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    turn = assistant(
        [thought, {"type": "redacted_thinking", "data": "x"}, text("I look."), call(word="a"), call(call_id="t2")]
    )
    (message,) = chat_of(body(turn))["messages"]
    assert message["reasoning"] == "Hm." and message["content"] == "I look."
    assert [one["id"] for one in message["tool_calls"]] == ["t1", "t2"]
    assert [orjson.loads(one["function"]["arguments"]) for one in message["tool_calls"]] == [{"word": "a"}, {}]


def test_thinking_without_text_is_dropped() -> None:
    kept = {"type": "thinking", "thinking": "", "signature": "s"}
    (message,) = chat_of(body(assistant([kept, text("Yes.")])))["messages"]
    assert message == {"role": "assistant", "content": "Yes."}


def test_a_final_assistant_text_is_continued_and_a_tool_call_is_not() -> None:
    chat = chat_of(body(user("hi"), assistant("The answer is (")))
    assert chat["continue_final_message"] is True and chat["add_generation_prompt"] is False
    assert "continue_final_message" not in chat_of(body(user("hi"), assistant([call()])))
    assert "continue_final_message" not in chat_of(body(assistant("a"), user("hi")))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}),
    ],
)
def test_tools_are_functions_and_a_choice_is_one_of_theirs(choice: Any, expected: Any) -> None:
    chat = chat_of(body(tools=[TOOL], tool_choice=choice))
    parameters = {"type": "object", "properties": {"word": {}}}
    function = {"name": "look_up", "description": "Looks a word up.", "parameters": parameters}
    assert chat["tools"] == [{"type": "function", "function": function}] and chat["tool_choice"] == expected
    assert "parallel_tool_calls" not in chat


def test_parallel_calls_are_forbidden_where_the_client_forbids_them() -> None:
    chat = chat_of(body(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert chat["parallel_tool_calls"] is False


def test_thinking_is_switched_and_bounded() -> None:
    chat = chat_of(body(max_tokens=4096, thinking={"type": "enabled", "budget_tokens": 2048}))
    assert chat["thinking_token_budget"] == 2048
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    off = chat_of(body(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True, "a": 1}))
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "thinking": True, "a": 1}
    assert "chat_template_kwargs" not in chat_of(body(thinking={"type": "adaptive"}))


def test_sampling_output_and_the_user_have_their_names_in_a_chat() -> None:
    chat = chat_of(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            stop_sequences=["\n\n", "END"],
            metadata={"user_id": "u1"},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        )
    )
    assert (chat["temperature"], chat["top_p"], chat["top_k"]) == (0.5, 0.9, 5)
    assert chat["stop"] == ["\n\n", "END"] and chat["user"] == "u1" and chat["reasoning_effort"] == "low"
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_tool_fields_only_for_anthropics_service_are_ignored() -> None:
    more = {"cache_control": {"type": "ephemeral"}, "defer_loading": True, "eager_input_streaming": True}
    assert chat_of(body(tools=[TOOL | more])) == chat_of(body(tools=[TOOL]))


def test_request_fields_only_for_anthropics_service_are_ignored() -> None:
    more = {"service_tier": "auto", "cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}}
    assert chat_of(body(**more)) == chat_of(body())


def test_the_routers_own_fields_keep_their_meaning() -> None:
    assert parse_messages(orjson.dumps(body(priority=-3, min_tokens=2))).priority == -3


FILE = {"type": "document", "source": {"type": "file", "file_id": "f"}}
WRONG = {
    "model": body(model=None),
    "max_tokens": body(max_tokens=0),
    "messages": body() | {"messages": []},
    "messages.0": body() | {"messages": ["hi"]},
    "messages.0.role": body({"role": "tool", "content": "a"}),
    "messages.0.content": body(user(5)),
    "messages.1.content.0.type": body(user("a"), user([{"type": "search_result"}])),
    "messages.0.content.0.text": body(user([{"type": "text"}])),
    "messages.0.content.0.source": body(user([{"type": "image"}])),
    "messages.0.content.0.source.type": body(user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])),
    "messages.0.content.0.source.data": body(
        user([{"type": "image", "source": {"type": "base64", "media_type": "image/png"}}])
    ),
    "messages.0.content.0.tool_use_id": body(user([{"type": "tool_result"}])),
    "messages.0.content.0.content.0.type": body(user([result("t", [{"type": "tool_reference", "tool_name": "a"}])])),
    "messages.0.content.0.citations": body(
        user([{"type": "document", "citations": {"enabled": True}, "source": {"type": "text", "data": "a"}}])
    ),
    "messages.0.content.0.transformations": body(user([IMAGE | {"transformations": [{"type": "crop"}]}])),
    "messages.0.content.0.type": body(assistant([IMAGE])),
    "messages.0.content.1.source.type": body(user([{"type": "text", "text": "a"}, FILE])),
    "messages.0.content.0.source.content.0.type": body(
        user([{"type": "document", "source": {"type": "content", "content": [FILE]}}])
    ),
    "messages.0.content.0.input": body(assistant([{"type": "tool_use", "id": "a", "name": "b", "input": "c"}])),
    "system": body(system=5),
    "system.0.type": body(system=[IMAGE]),
    "stop_sequences.1": body(stop_sequences=["a", ""]),
    "temperature": body(temperature=-1),
    "top_p": body(top_p=1.5),
    "top_k": body(top_k="many"),
    "stop_sequences": body(stop_sequences="END"),
    "tools": body(tools={}  or "a"),
    "tools.0.type": body(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    "tools.0.input_schema": body(tools=[{"name": "a"}]),
    "tools.0.input_examples": body(tools=[TOOL | {"input_examples": [{"word": "a"}]}]),
    "tool_choice": body(tool_choice={"type": "any"}),
    "tool_choice.type": body(tools=[TOOL], tool_choice={"type": "some"}),
    "tool_choice.name": body(tools=[TOOL], tool_choice={"type": "tool", "name": "other"}),
    "thinking.type": body(thinking={"type": "always"}),
    "thinking.budget_tokens": body(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 2000}),
    "output_config.effort": body(output_config={"effort": "huge"}),
    "output_config.task_budget": body(output_config={"task_budget": {"type": "tokens", "total": 20000}}),
    "output_config.format.type": body(output_config={"format": {"type": "yaml"}}),
    "metadata.user_id": body(metadata={"user_id": 5}),
    "stream": body(stream="perhaps"),
    "mcp_servers": body(mcp_servers=[{"url": "https://example.org"}]),
    "container": body(container="c1"),
    "kv_transfer_params": body(kv_transfer_params={"remote_host": "h"}),
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_a_field_that_cannot_be_translated_is_refused_by_its_name(path: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_messages(orjson.dumps(WRONG[path]))
    assert raised.value.param == path and str(raised.value).startswith(f"{path}: ") and raised.value.status == 400


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (body(user([{"type": "document", "source": {"data": "a"}}])), "messages.0.content.0.source.type"),
        (body(user([{"type": "image", "source": {"url": "http://a"}}])), "messages.0.content.0.source.type"),
        (body(user([{"text": "a"}])), "messages.0.content.0.type"),
        (body(assistant([{"text": "a"}])), "messages.0.content.0.type"),
        (body(system=[{"text": "a"}]), "system.0.type"),
        (body(tools=[TOOL], tool_choice={"name": "a"}), "tool_choice.type"),
        (body(thinking={"budget_tokens": 2000}), "thinking.type"),
        (body(output_config={"format": {"schema": {}}}), "output_config.format.type"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_missing_type_is_refused_as_a_missing_field(given: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{path}: Field required$"):
        parse_messages(orjson.dumps(given))


@pytest.mark.parametrize(
    "fields",
    [
        {"PAD": 1},
        {"tools": [TOOL | {"PAD": 1}]},
        {"output_config": {"PAD": 1}},
        {"vllm_xargs": {"PAD": {}}},
        {"thinking": {"type": "PAD"}},
        {"tool_choice": {"type": "PAD"}},
    ],
    ids=str,
)
def test_a_refusal_quotes_the_beginning_of_what_a_client_wrote(fields: dict[str, Any]) -> None:
    """The name of a field may be as large as a body; its refusal was, too, and was searched for other errors' words."""
    raw = orjson.dumps(body(**fields)).replace(b"PAD", b"x" * 100_000)
    with pytest.raises(InvalidRequest) as refused:
        parse_messages(raw)
    assert "xxx" in str(refused.value) and len(str(refused.value)) < 200 and len(refused.value.param or "") < 100


def test_a_budget_of_thinking_is_refused_beside_any_smaller_limit_and_counted_without_one() -> None:
    asked = body(max_tokens=1, thinking={"type": "enabled", "budget_tokens": 2000})
    with pytest.raises(InvalidRequest, match="less than max_tokens, 1"):
        parse_messages(orjson.dumps(asked))
    del asked["max_tokens"]
    assert b"enable_thinking" in tokenize_body(orjson.dumps(asked))


def test_a_schema_is_as_deep_as_a_chat_takes_or_is_refused() -> None:
    """A chat holds it one level deeper than the message that it comes in."""
    refused = []
    for depth in (248, 249, 250, 251, 252):
        raw = orjson.dumps(body()).replace(b'"max_tokens"', b'"tools":[{"name":"a","input_schema":%s}],"max_tokens"')
        try:
            assert probe_body(parse_messages(raw % (b'{"a":' * depth + b"{}" + b"}" * depth)))
        except InvalidRequest as error:
            refused.append((depth, error.status))
    assert refused == [(250, 400), (251, 400), (252, 400)]


@pytest.mark.parametrize("read", [parse_messages, tokenize_body])
def test_a_call_s_input_that_is_too_deep_to_be_written_is_refused(read: Callable[[bytes], object]) -> None:
    call = body(user("a"), assistant([{"type": "tool_use", "id": "a", "name": "b", "input": {"deep": 7}}]))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read(orjson.dumps(call).replace(b'"deep":7', b'"deep":' + b"[" * 300 + b"]" * 300))


def test_a_choice_of_tools_without_any_tools_is_left_out() -> None:
    for kind in ("auto", "none"):
        assert "tool_choice" not in chat_of(body(tool_choice={"type": kind}))


def test_tokens_are_counted_of_the_same_conversation_without_a_limit() -> None:
    counted = body(user("hi"), system="Be brief.", tools=[TOOL], temperature=1)
    del counted["max_tokens"]
    asked = orjson.loads(tokenize_body(orjson.dumps(counted)))
    chat = chat_of({**counted, "max_tokens": 1})
    assert asked == {name: chat[name] for name in ("model", "messages", "tools")}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
    ids=["alone", "without thinking", "with the template's variable"],
)
def test_tokens_are_counted_with_the_variables_that_an_effort_gives_a_template(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """As vLLM sets them in a chat; its /tokenize does not know `reasoning_effort`."""
    asked = orjson.loads(tokenize_body(orjson.dumps(body(output_config={"effort": "low"}, **fields))))
    assert asked["chat_template_kwargs"] == {**expected, "reasoning_effort": "low"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3000) | st.floats(0, 2) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
TEXTS = st.builds(text, st.text(max_size=5))
IMAGES = st.sampled_from([IMAGE, {"type": "image", "source": {"type": "url", "url": "u"}}])
DOCUMENTS = st.builds(lambda t: {"type": "document", "source": {"type": "text", "data": t}}, st.text(max_size=5))
RESULTS = st.builds(result, st.text(max_size=3), st.none() | st.text(max_size=5) | st.lists(TEXTS | IMAGES, max_size=3))
USER_CONTENTS = st.lists(TEXTS | IMAGES | DOCUMENTS | RESULTS | JSON, max_size=4) | st.text(max_size=5)
CALLS = st.builds(lambda given: call(**{"word": given}), JSON)
THOUGHTS = st.just({"type": "thinking", "thinking": "Hm.", "signature": "s"})
ASSISTANT_CONTENTS = st.lists(TEXTS | CALLS | THOUGHTS, max_size=4) | st.text(max_size=5)
TURNS = st.lists(st.builds(user, USER_CONTENTS) | st.builds(assistant, ASSISTANT_CONTENTS), min_size=1, max_size=4)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "system": st.text(max_size=5) | st.lists(TEXTS, max_size=3),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 9),
    "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
    "tools": st.lists(st.just(TOOL), max_size=2),
    "tool_choice": st.sampled_from([{"type": kind, "name": "look_up"} for kind in ("auto", "any", "tool", "none")]),
    "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}]),
    "output_config": st.just({"effort": "high"}),
    "metadata": st.just({"user_id": "u"}),
    "service_tier": st.just("auto"),
    "chat_template_kwargs": st.just({"a": 1}),
    "vllm_xargs": st.just({"a": 1, "b": ["c"]}),
    "cache_salt": st.text(max_size=5),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "watermarking": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=3),
    **{name: st.integers(0, 5) for name in ("min_tokens", "priority", "seed")},
    **{name: st.floats(0, 1) for name in ("min_p", "presence_penalty", "frequency_penalty")},
    "repetition_penalty": st.floats(0.5, 2),
}
FIELDS = st.fixed_dictionaries({}, optional=VALID)
ODD = st.dictionaries(
    st.sampled_from(["max_tokens", *VALID]), JSON | st.floats(-3, 3), max_size=1
)  # in the place of a valid value


@settings(max_examples=examples(150), deadline=None)
@given(TURNS, FIELDS, st.integers(1025, 3000), ODD)
def test_any_body_is_refused_with_a_field_name_or_becomes_a_valid_chat(
    turns: list[Any], fields: dict[str, Any], limit: int, odd: dict[str, Any]
) -> None:
    raw = orjson.dumps(body(*turns, **fields) | {"max_tokens": limit} | odd)
    try:
        request = parse_messages(raw)
    except InvalidRequest as error:
        assert error.status == 400 and error.param
        return
    chat = {**request.rest, "messages": orjson.loads(request.prompt_json)}
    assert parse("chat", orjson.dumps(chat)).rest == request.rest
    for upstream in (probe_body(request), decode_body(request, b"{}")):
        parse_generation(orjson.loads(upstream), chat=True, model="m", max_model_len=100_000)


@given(st.binary(max_size=40) | st.builds(orjson.dumps, JSON))
def test_no_body_raises_anything_but_invalid_request(raw: bytes) -> None:
    for read in (parse_messages, tokenize_body):
        with pytest.raises(InvalidRequest):
            read(raw)
