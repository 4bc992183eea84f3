"""What an answer says about its prompt, put together from a prefiller's reply and a decoder's answer."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.errors import BadUpstreamReply
from balanceroute.proxy.wire.answer_identity import Part
from balanceroute.proxy.wire.client_request import ClientRequest, parse
from balanceroute.proxy.wire.probe_reply import parse_probe_reply
from balanceroute.proxy.wire.prompt_echo import prompt_text, scored_answer, scored_events, with_prompt

PROMPT_LOGPROBS = {
    "tokens": ["one", " two"],
    "token_logprobs": [None, -1.0],
    "top_logprobs": [None, {}],
    "text_offset": [0, 3],
}
ANSWER_LOGPROBS = {"tokens": [" x"], "token_logprobs": [-2.0], "top_logprobs": [{}], "text_offset": [0]}


def a_request(**fields: Any) -> ClientRequest:
    body = {"model": "m", "prompt": "one two", "max_tokens": 5, "echo": True} | fields
    return parse("completions", orjson.dumps(body))


def a_reply(**choice: Any) -> dict[str, Any]:
    return {"id": "cmpl-r", "created": 7, "model": "m", "choices": [{"index": 0, "text": "one two"} | choice]}


def an_answer(**choice: Any) -> bytes:
    return orjson.dumps({"id": "cmpl-r", "choices": [{"index": 0, "text": " x", "logprobs": None} | choice]})


def test_an_echo_is_the_prompt_before_the_answer() -> None:
    whole = orjson.loads(with_prompt(a_request(), an_answer(), a_reply()))
    assert whole["choices"][0]["text"] == "one two x"


def test_an_echo_is_omitted_for_a_client_that_wants_token_ids() -> None:
    assert prompt_text(a_request(return_token_ids=True), a_reply()) == ""
    assert prompt_text(a_request(), a_reply(text=None)) == ""


def test_logprobs_of_prompt_and_answer_are_one_list_with_continuous_offsets() -> None:
    answer = with_prompt(a_request(logprobs=1), an_answer(logprobs=ANSWER_LOGPROBS), a_reply(logprobs=PROMPT_LOGPROBS))
    logprobs = orjson.loads(answer)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two", " x"]
    assert logprobs["text_offset"] == [0, 3, 7]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0]
    assert logprobs["top_logprobs"] == [None, {}, {}]


@given(st.lists(st.none() | st.dictionaries(st.text(), st.floats(-9, 0)), min_size=1), st.lists(st.none(), max_size=2))
def test_logprobs_of_a_kept_reply_are_joined_as_they_came(of_prompt: list[Any], of_answer: list[Any]) -> None:
    logprobs = {
        "tokens": ["a"] * len(of_prompt),
        "token_logprobs": [-1.0] * len(of_prompt),
        "top_logprobs": of_prompt,
        "text_offset": list(range(len(of_prompt))),
    }
    reply = a_reply(logprobs=logprobs, prompt_logprobs=of_prompt)
    kept = parse_probe_reply(orjson.dumps(reply), worker="p0", keep=True).reply
    assert kept is not None
    answered = {name: of_answer for name in ("tokens", "token_logprobs", "top_logprobs")} | {"text_offset": []}
    answer = with_prompt(a_request(logprobs=1, prompt_logprobs=1), an_answer(logprobs=answered), kept)
    choice = orjson.loads(answer)["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == of_prompt + of_answer
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * len(of_prompt) + of_answer
    assert choice["prompt_logprobs"] == of_prompt


@pytest.mark.parametrize("reply", [{"choices": []}, a_reply(logprobs=None), a_reply(logprobs={"tokens": []})])
def test_an_echo_that_does_not_fit_the_answer_is_a_bad_reply_of_the_prefiller(reply: dict[str, Any]) -> None:
    with pytest.raises(BadUpstreamReply) as bad:
        with_prompt(a_request(logprobs=1), an_answer(logprobs=ANSWER_LOGPROBS), reply)
    assert bad.value.tier == "prefill"


def test_a_scored_answer_omits_kv_transfer_parameters() -> None:
    reply = a_reply() | {"kv_transfer_params": {"remote_engine_id": "secret"}}
    assert orjson.loads(scored_answer(reply))["kv_transfer_params"] is None


def test_a_prompts_worth_alone_is_one_event_then_usage_then_done() -> None:
    request = a_request(max_tokens=0, stream=True, stream_options={"include_usage": True})
    usage_fields = {"usage": {"prompt_tokens": 2, "completion_tokens_details": None}, "system_fingerprint": "fp"}
    events = scored_events(request, a_reply() | usage_fields).split(b"\n\n")
    assert orjson.loads(events[0].removeprefix(b"data: "))["choices"][0]["text"] == "one two"
    last = orjson.loads(events[1].removeprefix(b"data: "))
    assert (last["usage"], last["system_fingerprint"]) == ({"prompt_tokens": 2}, "fp")
    assert events[2:] == [b"data: [DONE]", b""]


def test_a_scored_stream_has_usage_in_its_event_with_continuous_usage_stats() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = a_request(max_tokens=0, stream=True, stream_options=options)
    events = scored_events(request, a_reply() | {"usage": {"prompt_tokens": 2}}).split(b"\n\n")
    assert [orjson.loads(event.removeprefix(b"data: "))["usage"] for event in events[:2]] == [{"prompt_tokens": 2}] * 2


def test_a_scored_choice_has_the_common_id_its_index_and_no_end() -> None:
    request = a_request(max_tokens=0, stream=True)
    event = scored_events(request, a_reply(), Part(public_id="cmpl-all", created=9, index=3, closing_events=False))
    body = orjson.loads(event.removeprefix(b"data: "))
    assert (body["id"], body["created"], body["choices"][0]["index"]) == ("cmpl-all", 9, 3)
    assert event.count(b"data:") == 1
