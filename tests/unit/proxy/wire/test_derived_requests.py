"""One request per choice, the rest of an interrupted one, and the same request changed."""

import orjson
import pytest

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.wire.derived_requests import cut_alike, resume, split
from balanceroute.proxy.wire.payloads import PROBE_KV_PARAMS, decode_body, probe_body
from tests.unit.proxy.wire.requests import KV, a_request, load


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63 - 1])
def test_a_seed_that_means_no_seed_to_vllm_for_some_choice_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        split(a_request(seed=seed, n=2))


def test_each_of_several_embeddings_is_its_own_request() -> None:
    """One KV transfer carries one prompt: a decoder would give the first one's KV to all of them."""
    request = parse("completions", orjson.dumps({"prompt_embeds": ["A" * 4096, "B" * 8192]}))
    assert not request.single
    parts = split(request)
    assert [load(probe_body(part))["prompt_embeds"][:1] for part in parts] == ["A", "B"]
    assert [part.prompt_tokens for part in parts] == [1, 2]


def test_split_makes_one_request_per_prompt_and_choice_in_index_order() -> None:
    parts = split(a_request(prompt=[[1, 2], [3]], n=2, seed=10))
    assert [(orjson.loads(p.prompt_json), p.rest["seed"], p.prompt_tokens) for p in parts] == [
        ([1, 2], 10, 2),
        ([1, 2], 11, 2),
        ([3], 10, 1),
        ([3], 11, 1),
    ]
    assert all(part.single and "n" not in part.rest for part in parts)


def test_an_empty_text_of_several_prompts_reaches_an_engine_in_a_list() -> None:
    """As a prompt of its own engines refuse it."""
    parts = split(a_request(prompt=["", "a"])) + split(a_request(prompt=[""], n=2))
    assert [load(probe_body(part))["prompt"] for part in parts] == [[""], "a", [""], [""]]


def test_a_resumed_completion_sends_all_ids_and_a_smaller_limit() -> None:
    resumed = resume(a_request(max_tokens=50, min_tokens=20, stream=True), [1, 2], [3, 4, 5])
    body = load(decode_body(resumed, KV))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([1, 2, 3, 4, 5], 47, 17)
    assert load(probe_body(resumed))["prompt"] == [1, 2, 3, 4, 5]
    assert resumed.prompt_tokens == 5


def test_a_resumed_chat_keeps_its_messages_and_hands_the_ids_over() -> None:
    resumed = resume(a_request("chat", max_completion_tokens=50, max_tokens=9), [1], [3, 4])
    ids = {"prompt_token_ids": [1, 3, 4], "_vllm_ascend_recompute_token_ids": [1, 3, 4]}
    decode = load(decode_body(resumed, KV))
    assert decode["messages"] == [{"role": "user", "content": "hi"}]
    assert decode["kv_transfer_params"] == orjson.loads(KV) | ids
    assert decode["max_completion_tokens"] == 48
    assert "max_tokens" not in decode
    probe = load(probe_body(resumed))
    assert probe["kv_transfer_params"] == PROBE_KV_PARAMS | ids


@pytest.mark.parametrize("asked", [-1, "-1", -1.0])
def test_a_prompt_that_is_cut_by_its_limit_is_cut_alike_by_all(asked: object) -> None:
    """The prefiller has another limit than the decoder."""
    request = a_request(truncate_prompt_tokens=asked)
    assert load(decode_body(cut_alike(request, 7), b"{}"))["truncate_prompt_tokens"] == 7
    assert "truncate_prompt_tokens" not in load(decode_body(cut_alike(request, None), b"{}"))


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 5}])
def test_a_prompt_that_is_cut_to_a_number_is_left_as_it_is(fields: dict[str, object]) -> None:
    request = a_request(**fields)
    assert cut_alike(request, 7) is request


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 2}, {"suffix": "}"}])
def test_a_resumed_request_drops_the_fields_that_its_prompt_was_built_from(fields: dict[str, object]) -> None:
    """Engines refuse a suffix beside token ids."""
    resumed = resume(a_request(**fields), [1, 2], [3, 4])
    for body in (probe_body(resumed), decode_body(resumed, KV)):
        assert load(body).keys().isdisjoint(fields)


def test_a_chat_without_limit_resumes_without_limit() -> None:
    resumed = resume(a_request("chat"), [1], list(range(5000)))
    assert "max_tokens" not in load(decode_body(resumed, KV))


def test_a_completion_without_limit_resumes_within_the_default_of_16() -> None:
    resumed = resume(a_request(stream=True), [1], [2] * 10)
    assert load(decode_body(resumed, KV))["max_tokens"] == 6


def test_a_used_up_limit_cannot_be_resumed() -> None:
    with pytest.raises(ValueError, match="used up"):
        resume(a_request(max_tokens=3), [1], [2, 3, 4])


def test_streaming_from_the_worker_does_not_depend_on_the_remaining_limit() -> None:
    assert resume(a_request(max_tokens=100), [1], [2] * 90).assembled


def test_the_least_integer_that_engines_hold_is_a_seed_and_a_priority() -> None:
    request = a_request(n=2, seed=-(2**63), priority=-(2**63))
    assert [part.rest["seed"] for part in split(request)] == [-(2**63), 1 - 2**63]


@pytest.mark.parametrize("seed", ["5", 5.0])
def test_a_seed_that_is_written_as_engines_read_it_differs_by_choice(seed: object) -> None:
    request = parse("completions", orjson.dumps({"prompt": "a", "n": 3, "seed": seed}))
    assert [part.rest["seed"] for part in split(request)] == [5, 6, 7]


def test_no_choice_has_a_seed_where_the_seed_is_what_vllm_takes_for_none() -> None:
    """Counted on from -1, all choices but the first were the same in every answer."""
    assert [part.rest["seed"] for part in split(a_request(n=3, seed=-1))] == [-1, -1, -1]


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 - 1])
def test_a_seed_that_leaves_no_room_for_the_next_choice_is_a_bad_request(seed: int) -> None:
    request = parse("completions", b'{"prompt": "a", "n": 2, "seed": %d}' % seed)
    with pytest.raises(InvalidRequest) as refused:
        split(request)
    assert refused.value.param == "seed"
