"""What follows when a decode worker is lost: go on from its last token, start again, or end."""

from typing import Any

import orjson
import pytest

from balanceroute.config import validate
from balanceroute.errors import BadUpstreamReply, ConnectionLost, NotResumable, UpstreamError, UpstreamStatus
from balanceroute.proxy.client.outlets import PartAnswer
from balanceroute.proxy.life.answer import MAX_RESTARTS, Answer
from balanceroute.proxy.life.layerwise import Layerwise
from balanceroute.proxy.wire.payloads import decode_body, probe_body
from balanceroute.proxy.wire.probe_reply import PrefillResult
from tests.unit.proxy.life.legs import PROMPT_IDS, Client, a_leg, a_request
from tests.unit.proxy.virtual_time import a_config, a_router, with_virtual_time

PREFILLED = PrefillResult(b"{}", len(PROMPT_IDS), None, PROMPT_IDS)


def an_answer(client: Any, resume_on_worker_loss: bool = True, **fields: Any) -> Answer:
    services = a_router(a_config(retry={"resume_on_worker_loss": resume_on_worker_loss}))
    answer = Answer(services, a_request(**fields), client)
    answer.prompt_counted(PREFILLED)
    answer.begin(PREFILLED)
    return answer


def give(answer: Answer, *ids: int) -> None:
    """Tokens come from the worker and go to the client."""
    for token in ids:
        choice = {"index": 0, "text": f" {token}", "finish_reason": None, "token_ids": [token]}
        event = {"id": "cmpl-r", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        out = answer.scanner.feed(b"data: %s\n\n" % orjson.dumps(event))
        if not answer.outlet.started:
            answer.outlet.start()
        answer.outlet.write(out)


def lost() -> UpstreamError:
    return ConnectionLost("reset", worker="d0", tier="decode")


@with_virtual_time
async def test_a_prompt_with_a_truncation_limit_is_truncated_as_by_its_prefiller() -> None:
    """Engines leave room for `max_tokens`, and a probe asks for one."""
    answer = an_answer(Client(), truncate_prompt_tokens=-1)
    for body in (decode_body(answer.request, b"{}"), probe_body(answer.request)):
        assert orjson.loads(body)["truncate_prompt_tokens"] == len(PROMPT_IDS)
    answer.check_prefill(next(iter(answer._services.fleet)), PREFILLED)  # it is the client's request all the same


@with_virtual_time
async def test_an_uncounted_decode_first_prompt_is_not_truncated_by_its_limit() -> None:
    """Decode first: prefiller and decoder would cut it differently."""
    decode_first = {"connector": "mooncake_layerwise", "layerwise": {"callback_url": "http://router:8000"}}
    config = validate({**a_config().model_dump(exclude_unset=True), **decode_first})
    leg = a_leg(a_router(config), truncate_prompt_tokens=-1)
    Layerwise(leg)
    assert "truncate_prompt_tokens" not in leg.answer.request.rest


@with_virtual_time
async def test_a_cut_answer_resumes_from_prompt_and_tokens_with_the_remaining_limit() -> None:
    answer = an_answer(Client())
    give(answer, *range(20, 24))
    assert answer.resume(lost(), "d0")
    asked = orjson.loads(probe_body(answer.request))
    assert asked["prompt"] == [*PROMPT_IDS, 20, 21, 22, 23]
    assert orjson.loads(decode_body(answer.request, b"{}"))["max_tokens"] == 6


@with_virtual_time
async def test_a_cut_answer_without_a_token_restarts_with_the_original_request() -> None:
    answer = an_answer(Client())
    original = answer.request
    assert answer.resume(lost(), "d0") and answer.request is original


@with_virtual_time
async def test_a_cut_answer_at_its_token_limit_ends_as_a_worker_would_end_it() -> None:
    client = Client()
    answer = an_answer(client, max_tokens=2, stream_options={"include_usage": True}, model="alias")
    give(answer, 20, 21)
    assert not answer.resume(lost(), "d0")
    await answer.end_by_length()
    assert client.ended and client.got.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in client.got and b'"completion_tokens":2' in client.got
    assert client.got.count(b'"model":"m"') == 4, "all events have the name that the worker's have"


@pytest.mark.parametrize("continuous", [True, False])
@with_virtual_time
async def test_a_cut_answer_at_its_token_limit_tells_its_usage_where_a_worker_would(continuous: bool) -> None:
    client = Client()
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    answer = an_answer(client, max_tokens=2, stream_options=options)
    give(answer, 20, 21)
    assert not answer.resume(lost(), "d0")
    await answer.end_by_length()
    finish, usage = (orjson.loads(event) for event in client.got.split(b"data: ")[-3:-1])
    assert finish.get("usage") == (usage["usage"] if continuous else None)
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@with_virtual_time
async def test_a_cut_answer_that_another_worker_cannot_continue_ends_with_the_reason() -> None:
    answer = an_answer(Client(), response_format={"type": "json_object"})
    give(answer, 20)
    with pytest.raises(NotResumable, match="response_format"):
        answer.resume(lost(), "d0")


@with_virtual_time
async def test_an_engines_own_error_ends_an_answer_that_cannot_be_continued_in_its_own_words() -> None:
    answer = an_answer(Client(), response_format={"type": "json_object"})
    give(answer, 20)
    own = UpstreamStatus("error event", worker="d0", tier="decode", status=500, body=b'{"error": {"code": 500}}')
    with pytest.raises(UpstreamStatus) as raised:
        answer.resume(own, "d0")
    assert raised.value is own


@with_virtual_time
async def test_an_unsent_answer_restarts_a_limited_number_of_times() -> None:
    request = a_request(response_format={"type": "json_object"}, stream=False)
    answer = Answer(a_router(), request, PartAnswer(request))
    answer.begin(PREFILLED)
    for _ in range(MAX_RESTARTS):
        give(answer, 20)
        assert answer.resume(lost(), "d0")
        assert answer.request is request and answer.scanner.tokens == 0
    give(answer, 20)
    with pytest.raises(NotResumable):
        answer.resume(lost(), "d0")


@with_virtual_time
async def test_a_restart_after_a_resume_reports_the_size_of_the_clients_prompt() -> None:
    request = a_request(stream=False)
    client = PartAnswer(request)
    answer = an_answer(client, stream=False)
    give(answer, 20, 21)
    assert answer.resume(lost(), "d0")
    answer.scanner.generated.exact = False  # the second worker does not tell its tokens
    answer.prefilled(PrefillResult(b"{}", len(PROMPT_IDS) + 2, 0, [*PROMPT_IDS, 20, 21]))
    assert answer.resume(lost(), "d1")
    assert answer.request is answer._original
    give(answer, 20)
    assert answer.resume(lost(), "d2")
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": 1, "total_tokens": len(PROMPT_IDS) + 1}
    choice = {"index": 0, "text": "x", "finish_reason": "stop", "token_ids": [7]}
    event = {"id": "cmpl-r", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    answer.scanner.feed(b"data: %s\n\n" % orjson.dumps(event))
    answer.scanner.feed(b"data: %s\n\ndata: [DONE]\n\n" % orjson.dumps(event | {"choices": [], "usage": usage}))
    assert answer.scanner.usage is not None and answer.scanner.usage["prompt_tokens"] == len(PROMPT_IDS)


@with_virtual_time
async def test_without_resume_on_worker_loss_a_begun_answer_ends_with_the_loss() -> None:
    answer = an_answer(Client(), resume_on_worker_loss=False)
    give(answer, 20)
    assert not answer.may_move
    with pytest.raises(ConnectionLost):
        answer.resume(lost(), "d0")


@with_virtual_time
async def test_a_recompute_resumes_also_without_resume_on_worker_loss() -> None:
    answer = an_answer(Client(), resume_on_worker_loss=False)
    give(answer, 20)
    assert answer.resume(None, "d0")


@with_virtual_time
async def test_a_worker_that_refuses_the_resumed_request_does_not_count_as_lost() -> None:
    answer = an_answer(Client(), resume_on_worker_loss=False)
    give(answer, 20)
    refused = UpstreamStatus("status 503", worker="d0", tier="decode", status=503, body=b"")
    assert answer.resume(refused, "d0")


@with_virtual_time
async def test_a_second_loss_resumes_from_the_clients_prompt_and_not_from_the_last_prefilled_one() -> None:
    answer = an_answer(Client())
    give(answer, 20)
    assert answer.resume(lost(), "d0")
    answer.prefilled(PrefillResult(b"{}", len(PROMPT_IDS) + 1, None, [*PROMPT_IDS, 20]))
    give(answer, 21)
    assert answer.resume(lost(), "d1")
    assert orjson.loads(probe_body(answer.request))["prompt"] == [*PROMPT_IDS, 20, 21]


@with_virtual_time
async def test_a_resumed_prefill_of_another_prompt_is_an_error_but_a_first_one_is_not() -> None:
    """An engine that ignores the token ids of a chat prefills the client's prompt alone, and would begin anew."""
    answer = an_answer(Client())
    worker = answer._services.fleet["p0"]
    for count in (1, len(PROMPT_IDS), 99):  # the client's own words: only an engine knows how many tokens they are
        answer.check_prefill(worker, PrefillResult(b"{}", count, None, None))
    give(answer, 20)
    assert answer.resume(lost(), "d0")
    answer.check_prefill(worker, PrefillResult(b"{}", len(PROMPT_IDS) + 1, None, None))
    for count in (1, len(PROMPT_IDS), len(PROMPT_IDS) + 2):
        with pytest.raises(BadUpstreamReply, match=f"prefilled {count} tokens, not 4"):
            answer.check_prefill(worker, PrefillResult(b"{}", count, None, None))


@with_virtual_time
async def test_a_stream_may_move_before_the_first_token_and_afterwards_only_with_all_token_ids() -> None:
    schema = {"response_format": {"type": "json_object"}}  # state that another decode worker does not have
    answer = an_answer(Client(), **schema)
    assert answer.may_move
    answer.outlet.start()
    assert answer.may_move  # its head alone is no token
    give(answer, 20)
    assert not answer.may_move
    answer = an_answer(Client())
    give(answer, 20)
    assert answer.may_move
    answer = an_answer(Client())
    answer.outlet.start()
    choice = {"index": 0, "text": " 20", "finish_reason": None}  # of an engine that gives no ids
    event = {"id": "cmpl-r", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    event["usage"] = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    answer.scanner.feed(b"data: %s\n\n" % orjson.dumps(event))
    assert answer.scanner.tokens == 1 and not answer.may_move


@with_virtual_time
async def test_an_unsent_answer_may_always_move() -> None:
    request = a_request(response_format={"type": "json_object"}, stream=False)
    answer = Answer(a_router(), request, PartAnswer(request))
    answer.begin(PREFILLED)
    event = {"id": "cmpl-r", "object": "text_completion", "created": 1, "model": "m"}
    event["choices"] = [{"index": 0, "text": " 20", "finish_reason": None, "token_ids": [20]}]
    answer.scanner.feed(b"data: %s\n\n" % orjson.dumps(event))
    assert answer.scanner.tokens == 1 and not answer.outlet.started and answer.may_move
