"""What prefillers answer to probes, recorded and broken."""

import tracemalloc
from array import array
from typing import Any

import orjson
import pytest

from balanceroute.errors import BadUpstreamReply, NoCompletion, ReplyTooLarge
from balanceroute.proxy.wire.bounds import MAX_COMMAS, MAX_NODES_UNASKED, MAX_PARAMS_BYTES
from balanceroute.proxy.wire.probe_reply import parse_probe_reply
from tests.unit.proxy.captures import body_of, capture_files


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[1]}', b'{"choices":"x"}'])
def test_a_probe_reply_that_is_no_completion_is_a_bad_reply(body: bytes) -> None:
    with pytest.raises(BadUpstreamReply):
        parse_probe_reply(body, worker="p0")


def test_a_probe_reply_with_too_many_values_is_not_read() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":3},"more":[' + b"[]," * MAX_COMMAS + b"1,1]}"
    with pytest.raises(ReplyTooLarge):
        parse_probe_reply(body, worker="p0")


def test_only_a_probe_reply_with_something_for_the_client_may_have_very_many_values() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":3},"more":[' + b'"",' * MAX_NODES_UNASKED + b"1]}"
    assert parse_probe_reply(body, worker="p0", keep=True).prompt_tokens == 3
    with pytest.raises(ReplyTooLarge):
        parse_probe_reply(body, worker="p0")


def test_all_that_is_kept_of_a_probe_reply_is_counted() -> None:
    params, ids = {"x": "y" * 2**20}, list(range(2**18))
    reply = orjson.dumps({"choices": [{"prompt_token_ids": ids}], "kv_transfer_params": params})
    kept_bytes = parse_probe_reply(reply, worker="p0").kept_bytes
    assert kept_bytes == len(orjson.dumps(params)) + 4 * len(ids)
    assert parse_probe_reply(reply, worker="p0", keep=True).kept_bytes == kept_bytes + len(reply)
    assert parse_probe_reply(b'{"choices":[{}]}', worker="p0").kept_bytes == 0


def test_a_prompt_of_a_worker_without_usage_has_as_many_tokens_as_ids() -> None:
    for reply in ({"choices": [{"prompt_token_ids": [7, 8]}]}, {"choices": [{}], "prompt_token_ids": [7, 8]}):
        assert parse_probe_reply(orjson.dumps(reply), worker="p0").prompt_tokens == 2
    assert parse_probe_reply(b'{"choices":[{}]}', worker="p0").prompt_tokens == 0


def test_too_large_transfer_parameters_are_a_bad_reply() -> None:
    reply = {
        "choices": [{}],
        "usage": {"prompt_tokens": 3},
        "kv_transfer_params": {"x": "y" * MAX_PARAMS_BYTES},
    }
    with pytest.raises(BadUpstreamReply, match="larger than"):
        parse_probe_reply(orjson.dumps(reply), worker="p0")


@pytest.mark.parametrize("details", [{"note": "y" * 2**16}, {"y" * 2**16: 1}], ids=["text", "name"])
def test_too_large_details_of_a_usage_are_a_bad_reply(details: dict[str, Any]) -> None:
    """They are kept as long as the request, like nothing else that a prefiller may make as long as it likes."""
    reply = {"choices": [{}], "usage": {"prompt_tokens": 3, "prompt_tokens_details": details}}
    with pytest.raises(BadUpstreamReply, match="larger than"):
        parse_probe_reply(orjson.dumps(reply), worker="p0")


def test_a_probe_reply_without_transfer_parameters_is_an_error() -> None:
    reply = b'{"choices":[{}],"usage":{"prompt_tokens":3},"kv_transfer_params":null}'
    assert parse_probe_reply(reply, worker="p0").kv_transfer_params is None


@pytest.mark.parametrize("name", ["013-compl-token_ids-prompt", "036-chat-token_ids"])
def test_a_probe_with_return_token_ids_returns_the_prompts_ids(name: str) -> None:
    (path,) = capture_files(f"single/{name}.resp")
    result = parse_probe_reply(body_of(path)[1], worker="p0")
    assert result.prompt_token_ids is not None
    assert len(result.prompt_token_ids) == result.prompt_tokens


def test_recorded_probe_replies_give_their_transfer_parameters_unchanged() -> None:
    found = 0
    for path in [*capture_files("pd-*/*probe*.resp"), *capture_files("pd-hand/001*.resp")]:
        head, body = body_of(path)
        if not head.startswith(b"http/1.1 200") or b"application/json" not in head or not body:
            continue
        result = parse_probe_reply(body, worker="p0")
        params = orjson.loads(body)["kv_transfer_params"]
        if params:
            found += 1
            assert result.kv_transfer_params is not None
            assert orjson.loads(result.kv_transfer_params) == params
            if "140-probe" not in path.name:  # odd probes: a list of prompts, 100 tokens
                assert result.prompt_tokens == params["remote_num_tokens"]
    assert found > 10


def test_a_kept_reply_takes_little_more_memory_than_its_json() -> None:
    """It is kept until the decoder has answered: as objects 20 logprobs of 30,000 tokens took 250 MB."""
    of_a_token = {f"{100 + k}": {"logprob": -1.5, "rank": k, "decoded_token": f" {k}"} for k in range(20)}
    scored = [None, *([of_a_token] * 300)]
    ids = list(range(1000, 1301))
    for name in ("prompt_logprobs", "top_logprobs"):
        further = {"logprobs": {name: scored}} if name == "top_logprobs" else {name: scored}
        choice = {"index": 0, "text": "", "prompt_token_ids": ids} | further
        body = orjson.dumps({"choices": [choice], "usage": {"prompt_tokens": 301}})
        tracemalloc.start()
        try:
            kept = parse_probe_reply(body, worker="p0", keep=True)
            assert tracemalloc.get_traced_memory()[0] < 2.5 * len(body)
        finally:
            tracemalloc.stop()
        assert kept.prompt_token_ids is not None and kept.prompt_token_ids.tolist() == ids
        assert orjson.dumps(kept.reply) == body


def test_logprobs_within_logprobs_are_not_copied_level_by_level() -> None:
    """Of 4 MB with 200 levels the copies took 800 MB, and more than a second in which all streams stood still."""
    levels = 200
    inner = b'{"text":"%b"}' % (b"x" * 2**16)
    logprobs = b'{"logprobs":' * levels + inner + b"}" * levels
    body = b'{"choices":[{"text":"","logprobs":%b}],"usage":{"prompt_tokens":1}}' % logprobs
    tracemalloc.start()
    try:
        result = parse_probe_reply(body, worker="p0", keep=True)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(body)  # orjson takes 12 times a text that it reads
    finally:
        tracemalloc.stop()
    assert orjson.dumps(result.reply) == body


def test_a_long_list_stays_as_the_prefiller_wrote_it_but_on_one_line() -> None:
    body = b"""{"choices": [{"text": "ab", "logprobs": {"tokens": ["a"], "top_logprobs": [null,\r\n {"a": -1e0}]},
        "prompt_logprobs": [null,\n {"7": {"logprob": -0.50}}], "prompt_token_ids": [5, 7]}],
        "prompt_logprobs": null, "usage": {"prompt_tokens": 2}}"""
    result = parse_probe_reply(body, worker="p0", keep=True)
    assert result.reply is not None and result.prompt_token_ids == array("I", [5, 7])
    choice = result.reply["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a"] and result.reply["prompt_logprobs"] is None
    assert orjson.dumps(choice["logprobs"]["top_logprobs"]) == b'[null, {"a": -1e0}]'
    assert orjson.dumps(choice["prompt_logprobs"]) == b'[null, {"7": {"logprob": -0.50}}]'
    assert orjson.dumps(choice["prompt_token_ids"]) == b"[5,7]"


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"choices": {}}',
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{"prompt_logprobs": [}]}',
        b'{"choices": [{"prompt_logprobs": ["\xff"]}]}',
        b'{"choices": [{"logprobs": {"top_logprobs": [1}}]}',
        b'{"choices": [{}], "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_answer_is_none_also_where_the_long_lists_are_not_read(body: bytes) -> None:
    with pytest.raises(NoCompletion):
        parse_probe_reply(body, worker="p0", keep=True)
