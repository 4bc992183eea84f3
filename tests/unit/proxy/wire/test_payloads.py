"""Bodies for the workers, by the HTTP contract; and every recorded request of a real client."""

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import BadUpstreamReply, InvalidRequest
from balanceroute.proxy.wire import payloads
from balanceroute.proxy.wire.payloads import PROBE_KV_PARAMS, ClientRequest, Endpoint
from tests.unit.proxy.captures import body_of, capture_files, request_of

KV = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"big":12345678901234567890,"f":1e-7}'


def a_request(endpoint: Endpoint = "completions", **fields: Any) -> ClientRequest:
    prompt = {"prompt": "hello"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return payloads.parse(endpoint, orjson.dumps({"model": "m"} | prompt | fields))


def load(body: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(body)
    return loaded


# ---------------------------------------------------------------------------------------- parse


def test_parse_reads_what_the_router_needs() -> None:
    request = a_request(
        "chat",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        max_tokens=9,
        max_completion_tokens=5,
        min_tokens=2,
        priority=-3,
        n=2,
        request_id="mine",
    )
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)
    assert (request.return_token_ids, request.n, request.single) == (True, 2, False)
    assert (request.limit_field, request.limit, request.min_tokens) == ("max_completion_tokens", 5, 2)
    assert (request.model, request.priority, request.request_id) == ("m", -3, "mine")


NESTED = ["[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300]


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "objects"])
@pytest.mark.parametrize("field", ["prompt", "messages", "tools", "metadata"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_is_nested_deeper_than_can_be_written_again_is_refused_at_once(
    endpoint: Endpoint, field: str, nested: str
) -> None:
    fields = {"prompt": '"a"', "messages": '[{"role": "user", "content": "a"}]', field: nested}
    with pytest.raises(InvalidRequest):
        payloads.parse(endpoint, ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode())


def test_what_is_nested_as_deep_as_is_accepted_reaches_the_workers() -> None:
    depth = payloads.MAX_DEPTH - 1
    request = payloads.parse("completions", b'{"prompt": "a", "metadata": %b%b}' % (b"[" * depth, b"]" * depth))
    assert b"[" * depth in payloads.probe_body(request)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63 - 1])
def test_a_seed_that_is_none_to_vllm_for_some_choice_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        payloads.split(a_request(seed=seed, n=2))


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [([1, 2, 3], 3, 1), ("x" * 40, 10, 1), (["ab", "cd" * 8], 4, 2), ([[1], [2, 3]], 3, 2), ("a", 1, 1)],
    ids=["ids", "text", "texts", "id-lists", "at-least-one"],
)
def test_prompt_tokens_are_exact_for_ids_and_estimated_for_text(prompt: Any, tokens: int, prompts: int) -> None:
    request = a_request(prompt=prompt)
    assert (request.prompt_tokens, request.prompts) == (tokens, prompts)


@pytest.mark.parametrize(("prompt", "read"), [([1.0, 2], [1, 2]), ([[3.0], [4]], [[3], [4]])], ids=["one", "batch"])
def test_token_ids_are_read_as_the_engines_read_them(prompt: Any, read: list[Any]) -> None:
    """Numbers that come out of tables are written `1.0`."""
    assert orjson.loads(a_request(prompt=prompt).prompt_json) == read
    for wrong in ([1.5], [1.0, None], [[1.0], [0.5]], [1.0, {}]):
        with pytest.raises(InvalidRequest):
            a_request(prompt=wrong)


def test_images_do_not_count_as_text() -> None:
    content = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "A" * 100_000}}]
    assert a_request("chat", messages=[{"role": "user", "content": content}]).prompt_tokens == 14


def test_equal_prompts_have_equal_keys_whatever_their_whitespace_and_other_fields() -> None:
    one = payloads.parse("completions", b'{"prompt": [1, 2,3], "max_tokens": 3}')
    two = payloads.parse("completions", b'{"seed":1,"prompt":[1,2,3]}')
    assert one.prompt_json == two.prompt_json


@pytest.mark.parametrize(
    ("endpoint", "body", "message"),
    [
        ("completions", b'{"prompt": "x"', "not valid JSON"),
        ("completions", b"\xff", "not valid JSON"),
        ("completions", b"[1]", "must be a JSON object, not a list"),
        ("completions", b"{}", "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": ""}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": []}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt": 5}', "prompt must be"),
        ("completions", b'{"prompt": [1, "a"]}', "prompt must be"),
        ("completions", b'{"prompt": [true]}', "prompt must be"),
        ("completions", b'{"prompt": ["a", 1]}', "Each prompt"),
        ("completions", b'{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1, got 0"),
        ("completions", b'{"prompt": "a", "max_tokens": "a few"}', "max_tokens must be an integer, not a string"),
        ("completions", b'{"prompt": "a", "max_tokens": 4.5}', "max_tokens must be an integer, not a number"),
        ("completions", b'{"prompt": "a", "max_tokens": []}', "max_tokens must be an integer, not a list"),
        ("completions", b'{"prompt": "a", "max_tokens": "9223372036854775808"}', "an integer of 64 bits"),
        (
            "completions",
            b'{"prompt": "a", "max_tokens": 3, "min_tokens": 9}',
            "less than or equal to max_tokens=3",
        ),
        ("completions", b'{"prompt": "a", "n": 0}', "n must be at least 1"),
        ("completions", b'{"prompt": "a", "stream": "perhaps"}', "stream must be true or false"),
        (
            "completions",
            b'{"prompt": "a", "stream_options": {"include_usage": true}}',
            "only be defined when `stream=True`",
        ),
        ("completions", b'{"prompt": "a", "stream": true, "stream_options": 1}', "must be an object"),
        ("completions", b'{"prompt": "a", "model": 7}', "model must be a string, not a number"),
        ("completions", b'{"prompt": "a", "use_beam_search": true}', "carry no KV transfer"),
        ("completions", b'{"prompt_embeds": ""}', "Either prompt or prompt_embeds"),
        ("completions", b'{"prompt_embeds": [5]}', "prompt_embeds must be a string or a list"),
        ("completions", b'{"prompt": "a", "prompt_embeds": "AAAA"}', "cannot be served in one request"),
        ("chat", b"{}", "messages must be a non-empty list"),
        ("chat", b'{"messages": "hi"}', "messages must be a non-empty list"),
        ("chat", b'{"messages": ["hi"]}', "Each message must be an object"),
    ],
)
def test_bad_bodies_are_refused_with_the_reason(endpoint: Endpoint, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        payloads.parse(endpoint, body)


def test_numbers_and_flags_are_read_as_the_engines_read_them() -> None:
    fields = {"prompt": "a", "max_tokens": 4.0, "min_tokens": "2", "n": "3", "priority": True, "stream": "true"}
    request = payloads.parse("completions", orjson.dumps(fields))
    assert (request.limit, request.min_tokens, request.n, request.priority, request.stream) == (4, 2, 3, 1, True)
    sent = load(payloads.decode_body(payloads.split(request)[0], KV))
    assert (sent["max_tokens"], sent["min_tokens"], sent["stream"]) == (4, 2, True)
    assert a_request(echo="1", max_tokens="0", use_beam_search="off").scores_only


def test_empty_stream_options_are_none() -> None:
    assert not payloads.parse("completions", b'{"prompt": "a", "stream_options": {}}').include_usage


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": ""}], ids=["none", "null", "empty"])
def test_embeddings_take_the_place_of_a_prompt(prompt: dict[str, Any]) -> None:
    request = payloads.parse("completions", orjson.dumps({**prompt, "prompt_embeds": "A" * 8192, "n": 2}))
    assert request.prompt_tokens == 2
    for part in payloads.split(request):
        sent = load(payloads.decode_body(part, KV))
        assert sent["prompt_embeds"] == "A" * 8192 and "prompt" not in sent


def test_each_of_several_embeddings_is_a_request_of_its_own() -> None:
    """One KV transfer carries one prompt: a decoder would give the first one's KV to all of them."""
    request = payloads.parse("completions", orjson.dumps({"prompt_embeds": ["A" * 4096, "B" * 8192]}))
    assert not request.single
    parts = payloads.split(request)
    assert [load(payloads.probe_body(part))["prompt_embeds"][:1] for part in parts] == ["A", "B"]
    assert [part.prompt_tokens for part in parts] == [1, 2]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
def test_nothing_to_generate_is_refused_before_a_prefill(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least 1"):
        a_request("chat", **{name: 0})


def test_a_limit_of_null_is_none_to_a_completion_whatever_its_engine_makes_of_null() -> None:
    request = a_request(max_tokens=None)
    assert request.effective_limit == 16
    assert "max_tokens" not in load(payloads.decode_body(request, KV))
    assert load(payloads.decode_body(a_request("chat", max_tokens=None), KV))["max_tokens"] is None


@pytest.mark.parametrize("older", [0, -3, 100_000])
def test_max_tokens_says_nothing_beside_max_completion_tokens_as_in_the_engines(older: int) -> None:
    request = a_request("chat", max_tokens=older, max_completion_tokens=5)
    assert (request.limit_field, request.effective_limit) == ("max_completion_tokens", 5)
    assert load(payloads.decode_body(request, KV))["max_tokens"] == older
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer"):
        a_request("chat", max_tokens="many", max_completion_tokens=5)


@pytest.mark.parametrize("newer", [0, 5, 500, "many"])
def test_completions_overlook_max_completion_tokens_as_the_engines_do(newer: object) -> None:
    request = a_request(max_tokens=100, max_completion_tokens=newer)
    assert request.effective_limit == 100
    assert load(payloads.decode_body(payloads.resume(request, [1], [2] * 60), KV))["max_tokens"] == 40
    assert a_request(max_completion_tokens=newer).effective_limit == 16


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode))
def test_no_body_raises_anything_but_invalid_request(body: bytes) -> None:
    for endpoint in ("completions", "chat"):
        with suppress(InvalidRequest):  # now and then one is a request
            payloads.parse(endpoint, body)  # type: ignore[arg-type]


FIELDS = [
    "prompt",
    "prompt_embeds",
    "messages",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "min_tokens",
    "priority",
    "model",
    "seed",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(["completions", "chat"]))
def test_any_accepted_body_yields_bodies_for_every_worker(fields: dict[str, Any], endpoint: Endpoint) -> None:
    try:
        request = payloads.parse(endpoint, orjson.dumps(fields))
    except InvalidRequest:
        return
    for part in payloads.split(request) if request.n * request.prompts < 100 else [request]:
        assert load(payloads.probe_body(part))["max_tokens"] == 1
        assert load(payloads.decode_body(part, KV))["kv_transfer_params"] == orjson.loads(KV)


# ---------------------------------------------------------------------------------------- probe


def test_the_probe_asks_for_one_token_and_pins_its_kv() -> None:
    request = a_request(
        "chat",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=500,
        max_completion_tokens=400,
        min_tokens=30,
        n=4,
        logprobs=True,
        top_logprobs=3,
        tools=[{"type": "function"}],
        temperature=0.5,
    )
    probe = load(payloads.probe_body(request))
    assert (probe["stream"], probe["max_tokens"], probe["min_tokens"], probe["max_completion_tokens"]) == (
        False,
        1,
        1,
        1,
    )
    assert probe["kv_transfer_params"] == PROBE_KV_PARAMS
    assert len(PROBE_KV_PARAMS) == 6
    assert probe["return_token_ids"] is True
    assert not {"stream_options", "n", "logprobs", "top_logprobs"} & probe.keys()
    assert (probe["tools"], probe["temperature"]) == ([{"type": "function"}], 0.5)
    assert probe["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("fields", [{}, {"echo": True}])
def test_only_the_decoder_is_asked_for_the_logprobs_of_certain_tokens(fields: dict[str, Any]) -> None:
    """An engine refuses that field without `logprobs`, and with an echo that ends with the prompt."""
    request = a_request(logprobs=1, logprob_token_ids=[5, 6], **fields)
    for body in (payloads.probe_body(request), payloads.drain_body(request, KV)):
        assert "logprob_token_ids" not in load(body)
    assert load(payloads.decode_body(request, KV))["logprob_token_ids"] == [5, 6]


def test_the_probe_has_no_max_completion_tokens_unless_the_client_sent_it() -> None:
    assert "max_completion_tokens" not in load(payloads.probe_body(a_request(max_tokens=5)))


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_of_a_client_never_reach_a_worker(name: str) -> None:
    request = a_request(**{name: {"evil": 1}, "vllm_xargs": {"kv_transfer_params": {"evil": 1}, "ok": 2}})
    for body in (
        payloads.probe_body(request),
        payloads.decode_body(request, KV),
        payloads.drain_body(request, KV),
    ):
        assert b"evil" not in body
        assert load(body)["vllm_xargs"] == {"ok": 2}


# ---------------------------------------------------------------------------------------- decode


def test_the_decode_body_is_the_clients_with_ids_and_the_raw_transfer_parameters() -> None:
    request = a_request(stream=True, max_tokens=9, n=1, logit_bias={"5": 1.5}, unknown_field=[1])
    body = payloads.decode_body(request, KV)
    assert KV in body
    expected = {
        "model": "m",
        "stream": True,
        "max_tokens": 9,
        "n": 1,
        "logit_bias": {"5": 1.5},
        "unknown_field": [1],
    }
    expected |= {
        "unknown_field": [1],
        "prompt": "hello",
        "return_token_ids": True,
        "kv_transfer_params": orjson.loads(KV),
    }
    assert load(body) == expected


def test_a_long_unstreamed_request_is_streamed_from_the_worker() -> None:
    request = a_request("chat")
    assert request.assembled
    body = load(payloads.decode_body(request, KV))
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 64}, {"max_tokens": 500, "echo": True}, {"max_tokens": 500, "novel": 1}, {}]
)
def test_short_and_unknown_unstreamed_requests_stay_unstreamed(fields: dict[str, Any]) -> None:
    request = a_request(**fields)
    assert not request.streams_upstream
    assert "stream" not in load(payloads.decode_body(request, KV))


@pytest.mark.parametrize("beside", [{"logprobs": True}, {"return_token_ids": True}, {"tool_choice": "required"}])
@pytest.mark.parametrize("no", [False, "false", 0])
def test_continuous_usage_is_asked_for_where_ids_may_be_withheld(no: Any, beside: dict[str, Any]) -> None:
    request = a_request("chat", stream=True, include_reasoning=no, **beside)
    body = load(payloads.decode_body(request, KV))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["include_reasoning"] == no and not request.hides_reasoning


@pytest.mark.parametrize("no", [False, "false", 0])
def test_reasoning_that_the_client_does_not_want_is_asked_for_and_hidden_here(no: Any) -> None:
    request = a_request("chat", stream=True, include_reasoning=no, logprobs=None)
    body = load(payloads.decode_body(request, KV))
    assert request.hides_reasoning and body["include_reasoning"] is True and "stream_options" not in body
    short = a_request("chat", max_tokens=5, include_reasoning=no)
    assert load(payloads.decode_body(short, KV))["include_reasoning"] == no, "an engine's own answer in one piece"


@pytest.mark.parametrize(("asked", "told"), [(1, 1), (64, 64), (65, 64), (10**6, 64), ("500", 64), (None, None)])
def test_a_worker_tells_of_its_tokens_at_least_every_64_whatever_the_client_wants(asked: Any, told: Any) -> None:
    request = a_request("chat", stream=True, stream_interval=asked)
    assert load(payloads.decode_body(request, KV))["stream_interval"] == told


def test_the_drain_body_asks_for_one_token_of_the_pinned_kv() -> None:
    body = load(payloads.drain_body(a_request(stream=True, max_tokens=100, min_tokens=50), KV))
    assert (body["stream"], body["max_tokens"], body["min_tokens"]) == (False, 1, 0)
    assert body["kv_transfer_params"] == orjson.loads(KV)


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "mine"}])
def test_what_a_drain_pulls_serves_no_other_request_from_a_prefix_cache(fields: dict[str, str]) -> None:
    """The KV may be another prompt's by then: an engine that refuses a request has its prefiller free it."""
    request = a_request(**fields)
    salts = {load(payloads.drain_body(request, KV))["cache_salt"] for _ in range(2)}
    assert len(salts) == 2 and not salts & set(fields.values())
    assert load(payloads.decode_body(request, KV)).get("cache_salt") == fields.get("cache_salt")


def test_building_one_body_does_not_change_the_next() -> None:
    request = a_request("chat", max_tokens=300, stream_options=None)
    first = payloads.decode_body(request, KV)
    payloads.probe_body(request)
    payloads.drain_body(request, KV)
    assert payloads.decode_body(request, KV) == first


# ---------------------------------------------------------------------------------------- split


def test_split_makes_one_request_per_prompt_and_choice_in_index_order() -> None:
    parts = payloads.split(a_request(prompt=[[1, 2], [3]], n=2, seed=10))
    assert [(orjson.loads(p.prompt_json), p.rest["seed"], p.prompt_tokens) for p in parts] == [
        ([1, 2], 10, 2),
        ([1, 2], 11, 2),
        ([3], 10, 1),
        ([3], 11, 1),
    ]
    assert all(part.single and "n" not in part.rest for part in parts)


def test_a_batch_of_one_prompt_is_sent_as_a_batch_of_one() -> None:
    assert load(payloads.probe_body(payloads.split(a_request(prompt=["a"]))[0]))["prompt"] == ["a"]


# ---------------------------------------------------------------------------------------- resume


def test_a_resumed_completion_sends_all_ids_and_a_smaller_limit() -> None:
    resumed = payloads.resume(a_request(max_tokens=50, min_tokens=20, stream=True), [1, 2], [3, 4, 5])
    body = load(payloads.decode_body(resumed, KV))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([1, 2, 3, 4, 5], 47, 17)
    assert load(payloads.probe_body(resumed))["prompt"] == [1, 2, 3, 4, 5]
    assert resumed.prompt_tokens == 5


def test_a_resumed_chat_keeps_its_messages_and_hands_the_ids_over() -> None:
    resumed = payloads.resume(a_request("chat", max_completion_tokens=50, max_tokens=9), [1], [3, 4])
    ids = {"prompt_token_ids": [1, 3, 4], "_vllm_ascend_recompute_token_ids": [1, 3, 4]}
    decode = load(payloads.decode_body(resumed, KV))
    assert decode["messages"] == [{"role": "user", "content": "hi"}]
    assert decode["kv_transfer_params"] == orjson.loads(KV) | ids
    assert decode["max_completion_tokens"] == 48
    assert "max_tokens" not in decode
    probe = load(payloads.probe_body(resumed))
    assert probe["kv_transfer_params"] == PROBE_KV_PARAMS | ids


@pytest.mark.parametrize("asked", [-1, "-1", -1.0])
def test_a_prompt_that_is_cut_by_its_limit_is_cut_alike_by_all(asked: object) -> None:
    """The prefiller has another limit than the decoder."""
    request = a_request(truncate_prompt_tokens=asked)
    assert load(payloads.decode_body(payloads.cut_alike(request, 7), b"{}"))["truncate_prompt_tokens"] == 7
    assert "truncate_prompt_tokens" not in load(payloads.decode_body(payloads.cut_alike(request, None), b"{}"))


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 5}])
def test_a_prompt_that_is_cut_to_a_number_is_left_as_it_is(fields: dict[str, object]) -> None:
    request = a_request(**fields)
    assert payloads.cut_alike(request, 7) is request


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 2}, {"suffix": "}"}])
def test_what_a_prompt_was_made_of_is_not_asked_for_again_with_its_ids(fields: dict[str, object]) -> None:
    """Engines refuse a suffix beside token ids."""
    resumed = payloads.resume(a_request(**fields), [1, 2], [3, 4])
    for body in (payloads.probe_body(resumed), payloads.decode_body(resumed, KV)):
        assert load(body).keys().isdisjoint(fields)


def test_a_chat_without_limit_resumes_without_limit() -> None:
    resumed = payloads.resume(a_request("chat"), [1], list(range(5000)))
    assert "max_tokens" not in load(payloads.decode_body(resumed, KV))


def test_a_completion_without_limit_resumes_within_the_default_of_16() -> None:
    resumed = payloads.resume(a_request(stream=True), [1], [2] * 10)
    assert load(payloads.decode_body(resumed, KV))["max_tokens"] == 6
    assert payloads.remaining_limit(a_request(), 10) == 6


def test_a_used_up_limit_cannot_be_resumed() -> None:
    with pytest.raises(ValueError, match="used up"):
        payloads.resume(a_request(max_tokens=3), [1], [2, 3, 4])


def test_the_way_to_the_worker_does_not_change_when_the_limit_shrinks() -> None:
    assert payloads.resume(a_request(max_tokens=100), [1], [2] * 90).assembled


@pytest.mark.parametrize("params", [b"{}", b'{"a":1}', b' { "a" : 1 } ', b"{ }"])
def test_resume_ids_join_any_transfer_parameters(params: bytes) -> None:
    resumed = payloads.resume(a_request("chat"), [1], [2])
    joined = load(payloads.decode_body(resumed, params))["kv_transfer_params"]
    ids = {"prompt_token_ids": [1, 2], "_vllm_ascend_recompute_token_ids": [1, 2]}  # engines know one of the two
    assert joined == orjson.loads(params) | ids


# ---------------------------------------------------------------------------------------- recordings


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[1]}', b'{"choices":"x"}'])
def test_a_probe_reply_that_is_no_completion_is_a_bad_reply(body: bytes) -> None:
    with pytest.raises(BadUpstreamReply):
        payloads.parse_probe_reply(body, worker="p0")


def test_transfer_parameters_without_end_are_a_bad_reply() -> None:
    reply = {
        "choices": [{}],
        "usage": {"prompt_tokens": 3},
        "kv_transfer_params": {"x": "y" * payloads.MAX_PARAMS_BYTES},
    }
    with pytest.raises(BadUpstreamReply, match="larger than"):
        payloads.parse_probe_reply(orjson.dumps(reply), worker="p0")


def test_a_probe_reply_without_transfer_parameters_says_so() -> None:
    reply = b'{"choices":[{}],"usage":{"prompt_tokens":3},"kv_transfer_params":null}'
    assert payloads.parse_probe_reply(reply, worker="p0").kv_transfer_params is None


@pytest.mark.parametrize("name", ["013-compl-token_ids-prompt", "036-chat-token_ids"])
def test_a_probe_with_return_token_ids_tells_the_prompts_ids(name: str) -> None:
    (path,) = capture_files(f"single/{name}.resp")
    result = payloads.parse_probe_reply(body_of(path)[1], worker="p0")
    assert result.prompt_token_ids is not None
    assert len(result.prompt_token_ids) == result.prompt_tokens


def test_recorded_probe_replies_give_their_transfer_parameters_unchanged() -> None:
    found = 0
    for path in [*capture_files("pd-*/*probe*.resp"), *capture_files("pd-hand/001*.resp")]:
        head, body = body_of(path)
        if not head.startswith(b"http/1.1 200") or b"application/json" not in head or not body:
            continue
        result = payloads.parse_probe_reply(body, worker="p0")
        told = orjson.loads(body)["kv_transfer_params"]
        if told:
            found += 1
            assert result.kv_transfer_params is not None
            assert orjson.loads(result.kv_transfer_params) == told
            if "140-probe" not in path.name:  # odd probes: a list of prompts, 100 tokens
                assert result.prompt_tokens == told["remote_num_tokens"]
    assert found > 10


def test_every_recorded_request_that_vllm_took_is_taken() -> None:
    taken = 0
    for path in capture_files("*/*.resp"):
        route, body = request_of(path)
        endpoint = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}.get(route)
        head, _ = body_of(path)
        if endpoint is None or not head.startswith(b"http/1.1 200"):
            continue
        if b"transfer-encoding" in path.with_suffix(".req").read_bytes().lower():
            continue
        taken += 1
        request = payloads.parse(endpoint, body)  # type: ignore[arg-type]
        sent = orjson.loads(body)
        sent.pop("kv_transfer_params", None)
        sent.pop("request_id", None)
        decode = load(payloads.decode_body(request, KV))
        ours = {"return_token_ids", "stream_options", "stream", "echo", "prompt_logprobs"}
        assert not {"echo", "prompt_logprobs"} & set(decode), "no decoder survives a prompt's logprobs"
        assert {k: v for k, v in decode.items() if k in sent and k not in ours} == {
            k: v for k, v in sent.items() if k not in ours
        }, path
    assert taken > 80


@pytest.mark.parametrize("depth", [255, 300, 1000, 5000, 100_000])
@pytest.mark.parametrize("field", ["x", "messages"])
def test_a_body_nested_too_deeply_is_a_bad_request(field: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"prompt": "a", "x": %b}' % nested
    if field == "messages":
        body = b'{"messages": [{"role": "user", "content": %b}]}' % nested
    with pytest.raises(InvalidRequest):
        payloads.parse("chat" if field == "messages" else "completions", body)


@pytest.mark.parametrize("depth", [130, 300, 505])
def test_parts_nested_in_the_text_of_parts_are_a_bad_request(depth: int) -> None:
    """Counting their text took more of Python's stack than there is."""
    nested = b'[{"text":' * depth + b'"a"' + b"}]" * depth
    with pytest.raises(InvalidRequest):
        payloads.parse("chat", b'{"messages": [{"role": "user", "content": %b}]}' % nested)


def test_many_brackets_side_by_side_are_no_depth() -> None:
    messages = b",".join([b'{"role": "user", "content": [{"type": "text", "text": "a"}]}'] * 500)
    assert payloads.parse("chat", b'{"messages": [%b]}' % messages).prompt_tokens > 500


@pytest.mark.parametrize("field", ["max_tokens", "n", "priority", "min_tokens"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_an_integer_that_no_engine_can_hold_is_a_bad_request(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        payloads.parse("completions", b'{"prompt": "a", "%b": %d}' % (field.encode(), value))
    assert refused.value.param == field


@pytest.mark.parametrize("seed", ["5", 5.0])
def test_a_seed_that_is_written_as_engines_read_it_differs_by_choice(seed: object) -> None:
    request = payloads.parse("completions", orjson.dumps({"prompt": "a", "n": 3, "seed": seed}))
    assert [part.rest["seed"] for part in payloads.split(request)] == [5, 6, 7]


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 - 1])
def test_a_seed_that_leaves_no_room_for_the_next_choice_is_a_bad_request(seed: int) -> None:
    request = payloads.parse("completions", b'{"prompt": "a", "n": 2, "seed": %d}' % seed)
    with pytest.raises(InvalidRequest) as refused:
        payloads.split(request)
    assert refused.value.param == "seed"
