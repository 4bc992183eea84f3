"""Bodies for the workers, by the HTTP contract; and every recorded request of a real client."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.wire.client_request import Endpoint, parse
from balanceroute.proxy.wire.derived_requests import resume, split
from balanceroute.proxy.wire.payloads import PROBE_KV_PARAMS, decode_body, drain_body, probe_body, push_body
from tests.unit.proxy.captures import body_of, capture_files, request_of
from tests.unit.proxy.wire.requests import KV, a_request, load

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
FIELDS = st.fixed_dictionaries(
    {"stream": st.booleans()},
    optional={
        "n": st.integers(1, 5),
        "max_tokens": st.integers(1, 10**6),
        "min_tokens": st.integers(0, 1),
        "priority": st.integers(-(2**63), 2**63 - 1),
        "model": st.text(max_size=4),
        "seed": st.integers(-(2**63), 2**63 - 5),  # a choice more adds one
        "novel": JSON,
    },
)
PROMPTS = [
    ("completions", "prompt", ["a", [1, 2], ["a", "b"], [[1], [2, 3]]]),
    ("chat", "messages", [[{"role": "user", "content": "a"}]]),
]


@pytest.mark.parametrize(("endpoint", "name", "prompts"), PROMPTS, ids=["completions", "chat"])
@given(fields=FIELDS, data=st.data())
def test_any_accepted_body_yields_bodies_for_every_worker(
    endpoint: Endpoint, name: str, prompts: list[Any], fields: dict[str, Any], data: st.DataObject
) -> None:
    body = fields | {name: data.draw(st.sampled_from(prompts))}
    for part in split(parse(endpoint, orjson.dumps(body))):
        assert load(probe_body(part))["max_tokens"] == 1
        assert load(decode_body(part, KV))["kv_transfer_params"] == orjson.loads(KV)


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
    probe = load(probe_body(request))
    assert (probe["stream"], probe["max_tokens"], probe["min_tokens"], probe["max_completion_tokens"]) == (
        False,
        1,
        1,
        1,
    )
    assert probe["kv_transfer_params"] == PROBE_KV_PARAMS
    assert len(PROBE_KV_PARAMS) == 6
    assert probe["return_token_ids"] is True
    assert not {"stream_options", "n"} & probe.keys()
    assert (probe["tools"], probe["temperature"]) == ([{"type": "function"}], 0.5)
    assert probe["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_prefiller_is_asked_for_logprobs_as_the_client_asks_so_that_it_refuses_what_engines_refuse(
    endpoint: Endpoint,
) -> None:
    fields = {"logprobs": 1000, "top_logprobs": 2, "logprob_token_ids": [5, 6]}
    request = a_request(endpoint, **fields)
    for body in (probe_body(request), push_body(request, KV), decode_body(request, KV)):
        assert fields.items() <= load(body).items()
    assert not fields.keys() & load(drain_body(request, KV)).keys(), "a drain is not for the client"


def test_only_the_decode_worker_gets_logprob_token_ids_beside_an_echo() -> None:
    """An engine refuses them with an echo that ends with the prompt."""
    request = a_request(logprobs=1, logprob_token_ids=[5, 6], echo=True)
    for body in (probe_body(request), drain_body(request, KV)):
        assert "logprob_token_ids" not in load(body)
    assert load(decode_body(request, KV))["logprob_token_ids"] == [5, 6]


def test_only_the_decode_worker_gets_stop_token_ids() -> None:
    """With the probe's `min_tokens` an engine masks them, which it would not do for the client; too many end it."""
    request = a_request(stop_token_ids=list(range(200)))
    for body in (probe_body(request), drain_body(request, KV), push_body(request, KV)):
        assert "stop_token_ids" not in load(body)
    assert load(decode_body(request, KV))["stop_token_ids"] == list(range(200))


def test_the_probe_has_no_max_completion_tokens_unless_the_client_sent_it() -> None:
    assert "max_completion_tokens" not in load(probe_body(a_request(max_tokens=5)))


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_of_a_client_never_reach_a_worker(name: str) -> None:
    request = a_request(**{name: {"evil": 1}, "vllm_xargs": {"kv_transfer_params": {"evil": 1}, "ok": 2}})
    for body in (
        probe_body(request),
        decode_body(request, KV),
        drain_body(request, KV),
    ):
        assert b"evil" not in body
        assert load(body)["vllm_xargs"] == {"ok": 2}


def test_the_decode_body_is_the_clients_with_ids_and_the_raw_transfer_parameters() -> None:
    request = a_request(stream=True, max_tokens=9, n=1, logit_bias={"5": 1.5}, unknown_field=[1])
    body = decode_body(request, KV)
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
    body = load(decode_body(request, KV))
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("beside", [{"logprobs": True}, {"return_token_ids": True}, {"tool_choice": "required"}])
@pytest.mark.parametrize("no", [False, "false", 0])
def test_continuous_usage_is_asked_for_where_ids_may_be_withheld(no: Any, beside: dict[str, Any]) -> None:
    request = a_request("chat", stream=True, include_reasoning=no, **beside)
    body = load(decode_body(request, KV))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["include_reasoning"] == no and not request.hides_reasoning


@pytest.mark.parametrize("no", [False, "false", 0])
def test_unwanted_reasoning_is_requested_from_the_worker_and_hidden_by_the_router(no: Any) -> None:
    request = a_request("chat", stream=True, include_reasoning=no, logprobs=None)
    body = load(decode_body(request, KV))
    assert request.hides_reasoning and body["include_reasoning"] is True and "stream_options" not in body
    short = a_request("chat", max_tokens=5, include_reasoning=no)
    assert load(decode_body(short, KV))["include_reasoning"] == no, "an engine's own answer in one piece"


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (64, 64), (65, 64), (10**6, 64), ("500", 64), (None, None)])
def test_the_stream_interval_of_a_worker_is_at_most_64(asked: Any, expected: Any) -> None:
    request = a_request("chat", stream=True, stream_interval=asked)
    assert load(decode_body(request, KV))["stream_interval"] == expected


def test_the_drain_body_asks_for_one_token_of_the_pinned_kv() -> None:
    body = load(drain_body(a_request(stream=True, max_tokens=100, min_tokens=50), KV))
    assert (body["stream"], body["max_tokens"], body["min_tokens"]) == (False, 1, 0)
    assert body["kv_transfer_params"] == orjson.loads(KV)


def test_a_clients_salt_and_a_workers_make_one_that_engines_take_and_that_differs_with_either() -> None:
    """vLLM takes 128 characters at most."""
    salts = {
        load(decode_body(a_request(cache_salt=own), KV, of_worker))["cache_salt"]
        for own in ("a" * 128, "a" * 127 + "b", "a")
        for of_worker in ("00000001" + "f" * 16, "00000002" + "f" * 16)
    }
    assert len(salts) == 6 and all(len(salt) <= 128 for salt in salts)
    assert load(decode_body(a_request(), KV, "1f"))["cache_salt"] == "1f"


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "mine"}])
def test_a_drains_cache_entry_serves_no_other_request(fields: dict[str, str]) -> None:
    """The KV may be another prompt's by then: an engine that refuses a request has its prefiller free it."""
    request = a_request(**fields)
    salts = {load(drain_body(request, KV))["cache_salt"] for _ in range(2)}
    assert len(salts) == 2 and not salts & set(fields.values())
    assert load(decode_body(request, KV)).get("cache_salt") == fields.get("cache_salt")


def test_building_one_body_does_not_change_the_next() -> None:
    request = a_request("chat", max_tokens=300, stream_options=None)
    first = decode_body(request, KV)
    probe_body(request)
    drain_body(request, KV)
    assert decode_body(request, KV) == first


@pytest.mark.parametrize("params", [b"{}", b'{"a":1}', b' { "a" : 1 } ', b"{ }"])
def test_resume_ids_join_any_transfer_parameters(params: bytes) -> None:
    resumed = resume(a_request("chat"), [1], [2])
    joined = load(decode_body(resumed, params))["kv_transfer_params"]
    ids = {"prompt_token_ids": [1, 2], "_vllm_ascend_recompute_token_ids": [1, 2]}  # engines know one of the two
    assert joined == orjson.loads(params) | ids


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
        request = parse(endpoint, body)  # type: ignore[arg-type]
        sent = orjson.loads(body)
        sent.pop("kv_transfer_params", None)
        sent.pop("request_id", None)
        decode = load(decode_body(request, KV))
        ours = {"return_token_ids", "stream_options", "stream", "echo", "prompt_logprobs"}
        assert not {"echo", "prompt_logprobs"} & set(decode), "no decoder survives a prompt's logprobs"
        assert {k: v for k, v in decode.items() if k in sent and k not in ours} == {
            k: v for k, v in sent.items() if k not in ours
        }, path
    assert taken > 80
