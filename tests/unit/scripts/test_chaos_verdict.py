"""The judge of the chaos run: it must let the right answer pass and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.emulator.replies import Choice
from balanceroute.emulator.requests import parse_generation
from balanceroute.emulator.structure import Part
from balanceroute.emulator.worker import planned_length, stream_of
from balanceroute.engine.tokens import OutputLengths, continuation, decode
from scripts.chaos_run.asks import CHAT, COMPLETIONS, FUNCTION, MESSAGES, Ask, Asker, Behaviour, Mix, Right
from scripts.chaos_run.verdict import Kind, judge
from scripts.chaos_run.wire import Answer, Ended

PROMPT = [300, 301, 302]
IDS = tuple(continuation(PROMPT, 6))
ERROR = b'{"error":{"message":"no","type":"BadGateway","param":null,"code":502}}'
SSE = {b"content-type": b"text/event-stream; charset=utf-8"}


def an_ask(**fields: Any) -> Ask:
    plain = Ask(1, COMPLETIONS, b"{}", 10.0, prompt_tokens=3, choices=(Right(IDS, "length"),), stream=True)
    return replace(plain, **fields)


def an_event(place: int, **choice: Any) -> dict[str, Any]:
    last = place == len(IDS) - 1
    part = {"index": 0, "text": decode(IDS[: place + 1])[len(decode(IDS[:place])) :], "token_ids": None}
    part |= {"finish_reason": "length" if last else None, "stop_reason": None}
    return {"id": "cmpl-1", "created": 7, "choices": [part | choice]}


def a_stream(events: list[dict[str, Any]], done: bool = True, **fields: Any) -> Answer:
    body = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    return Answer(Ended.WHOLE, 200, SSE, body + (b"data: [DONE]\n\n" if done else b""), **fields)


def right_events() -> list[dict[str, Any]]:
    return [an_event(index) for index in range(len(IDS))]


def test_a_correct_stream_is_judged_right() -> None:
    assert judge(an_ask(), a_stream(right_events())).kind is Kind.RIGHT


def with_change(change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    events = right_events()
    change(events)
    return events


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda events: events.pop(2), Kind.WRONG),
        (lambda events: events.insert(2, events[1]), Kind.WRONG),
        (lambda events: events[3]["choices"][0].update(text=" w29999"), Kind.WRONG),
        (lambda events: events[3].update(id="cmpl-2"), Kind.WRONG),
        (lambda events: events[3].update(created=8), Kind.WRONG),
        (lambda events: events[-1]["choices"][0].update(finish_reason="stop"), Kind.WRONG),
        (lambda events: events[-1]["choices"][0].update(finish_reason=None), Kind.WRONG),
        (lambda events: events[2]["choices"][0].update(stop_reason="recomputed"), Kind.WRONG),
        (lambda events: events[2]["choices"][0].update(token_ids=[IDS[2]]), Kind.IMPROPER),
        (lambda events: events[0].update(prompt_token_ids=PROMPT), Kind.IMPROPER),
        (lambda events: events.append({"choices": [], "usage": {}, "id": "cmpl-1", "created": 7}), Kind.IMPROPER),
        (lambda events: events.append({"error": {"message": "x", "type": "y", "code": 1}}), Kind.IMPROPER),
        (lambda events: events[3].pop("choices"), Kind.IMPROPER),
    ],
    ids=[
        *("lost token", "repeated token", "other token", "other id", "other time", "other end", "no end"),
        *("marker", "ids unasked", "prompt ids unasked", "usage unasked", "error but clean end", "no choices"),
    ],
)
def test_every_change_of_a_correct_stream_is_detected(
    change: Callable[[list[dict[str, Any]]], Any], kind: Kind
) -> None:
    assert judge(an_ask(), a_stream(with_change(change))).kind is kind


def test_an_error_event_with_an_unclean_end_after_the_first_part_is_proper() -> None:
    events = [*right_events()[:3], orjson.loads(ERROR)]
    broken = replace(a_stream(events, done=False), ended=Ended.CUT)
    assert judge(an_ask(), broken).kind is Kind.BROKEN
    assert judge(an_ask(), replace(broken, ended=Ended.WHOLE)).kind is Kind.IMPROPER


def test_a_cut_without_an_error_event_is_improper_and_a_clean_end_too_early_is_wrong() -> None:
    early = a_stream(right_events()[:3], done=False)
    assert judge(an_ask(), replace(early, ended=Ended.CUT)).kind is Kind.IMPROPER
    assert judge(an_ask(), early).kind is Kind.WRONG


def test_the_part_that_a_leaving_client_received_is_checked() -> None:
    ask = an_ask(behaviour=Behaviour(leave_after_events=2))
    assert judge(ask, replace(a_stream(right_events()[:2], done=False), ended=Ended.LEFT)).kind is Kind.LEFT
    wrong = with_change(lambda events: events.pop(0))
    assert judge(ask, replace(a_stream(wrong[:2], done=False), ended=Ended.LEFT)).kind is Kind.WRONG


def test_choices_are_distinguished_by_index_and_each_must_be_right() -> None:
    other = tuple(continuation([400, 401], 6))
    ask = an_ask(choices=(Right(IDS, "length"), Right(other, "length")))
    texts = [decode(other[: place + 1])[len(decode(other[:place])) :] for place in range(6)]
    second = [an_event(place, index=1, text=texts[place]) for place in range(6)]
    mixed = [event for pair in zip(right_events(), second, strict=True) for event in pair]
    assert judge(ask, a_stream(mixed)).kind is Kind.RIGHT
    assert judge(ask, a_stream(right_events())).kind is Kind.WRONG
    mixed[0]["choices"][0]["index"], mixed[1]["choices"][0]["index"] = 1, 0
    assert judge(ask, a_stream(mixed)).kind is Kind.WRONG


def test_usage_is_needed_where_asked_for_and_must_be_right() -> None:
    ask = an_ask(want_usage=True)
    assert judge(ask, a_stream(right_events())).kind is Kind.IMPROPER
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    last = {"id": "cmpl-1", "created": 7, "choices": [], "usage": usage}
    assert judge(ask, a_stream([*right_events(), last])).kind is Kind.RIGHT
    assert judge(ask, a_stream([*right_events(), last, last])).kind is Kind.IMPROPER
    last["usage"] = usage | {"completion_tokens": 7}
    assert judge(ask, a_stream([*right_events(), last])).kind is Kind.WRONG


def in_chat(event: dict[str, Any], **delta: Any) -> dict[str, Any]:
    choice = {name: value for name, value in event["choices"][0].items() if name != "text"}
    return event | {"choices": [choice | {"delta": delta or {"content": event["choices"][0]["text"]}}]}


@pytest.mark.parametrize(
    ("roles_at", "kind"),
    [([0], Kind.RIGHT), ([], Kind.WRONG), ([0, 0], Kind.WRONG), ([1], Kind.WRONG)],
    ids=["first", "none", "two", "after the first text"],
)
def test_a_streamed_chat_has_one_role_which_comes_first(roles_at: list[int], kind: Kind) -> None:
    events = [in_chat(event) for event in right_events()]
    for place in roles_at:
        events.insert(place, in_chat(an_event(0), role="assistant", content=""))
    assert judge(an_ask(path=CHAT), a_stream(events)).kind is kind


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, Kind.RIGHT),
        ({"text": "w"}, Kind.WRONG),
        ({"finish_reason": "stop"}, Kind.WRONG),
        ({"stop_reason": "recomputed"}, Kind.WRONG),
        ({"index": 1}, Kind.WRONG),
        ({"token_ids": list(IDS)}, Kind.IMPROPER),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}, Kind.WRONG),
        ({"usage": None}, Kind.IMPROPER),
        ({"kv_transfer_params": {}}, Kind.IMPROPER),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else "",
)
def test_every_change_of_a_whole_answer_is_detected(change: dict[str, Any], kind: Kind, chat: bool) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    body: dict[str, Any] = {"usage": usage, "kv_transfer_params": None}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": None}
    choice["text"] = decode(IDS)
    for name, value in change.items():
        (body if name in body else choice)[name] = value
    if chat:
        choice["message"] = {"content": choice.pop("text")}
    answer = Answer(Ended.WHOLE, 200, {}, orjson.dumps(body | {"choices": [choice]}))
    assert judge(an_ask(path=CHAT if chat else COMPLETIONS, stream=False), answer).kind is kind


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(Ended.WHOLE, 502, {}, ERROR), Kind.REFUSED),
        (Answer(Ended.WHOLE, 503, {b"retry-after": b"1"}, ERROR), Kind.REFUSED),
        (Answer(Ended.WHOLE, 503, {}, ERROR), Kind.IMPROPER),
        (Answer(Ended.WHOLE, 400, {}, ERROR), Kind.IMPROPER),
        (Answer(Ended.WHOLE, 500, {}, b"Internal Server Error"), Kind.IMPROPER),
        (Answer(Ended.CUT, 502, {}, ERROR[:9]), Kind.IMPROPER),
        (Answer(Ended.NEVER), Kind.HANGING),
        (Answer(Ended.REFUSED), Kind.IMPROPER),
        (Answer(Ended.CUT), Kind.IMPROPER),
    ],
    ids=["502", "503", "503 without Retry-After", "400", "plain text", "cut", "late", "no connection", "no reply"],
)
def test_a_refusal_needs_a_fitting_status_and_an_error_body(answer: Answer, kind: Kind) -> None:
    assert judge(an_ask(), answer).kind is kind


def test_a_malformed_request_must_be_refused_with_an_error_body() -> None:
    ask = an_ask(malformed="no prompt", stream=False)
    assert judge(ask, Answer(Ended.WHOLE, 400, {}, ERROR)).kind is Kind.REFUSED
    assert judge(ask, Answer(Ended.WHOLE, 200, {}, b"{}")).kind is Kind.WRONG


def a_message(*texts: str, **delta: Any) -> list[dict[str, Any]]:
    usage = {"input_tokens": 3, "output_tokens": 6}
    end = {"stop_reason": "max_tokens", "stop_sequence": None} | delta
    parts = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}} for text in texts]
    start = {"type": "message_start", "message": {"usage": usage | {"output_tokens": 0}}}
    return [start, {"type": "ping"}, *parts, {"type": "message_delta", "delta": end, "usage": usage}]


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([*a_message(decode(IDS)), {"type": "message_stop"}], Kind.RIGHT),
        ([*a_message(decode(IDS)[:9], decode(IDS)[9:]), {"type": "message_stop"}], Kind.RIGHT),
        (a_message(decode(IDS)), Kind.IMPROPER),
        ([*a_message(decode(IDS)[1:]), {"type": "message_stop"}], Kind.WRONG),
        ([*a_message(decode(IDS), stop_reason="end_turn"), {"type": "message_stop"}], Kind.WRONG),
        ([*a_message(decode(IDS), stop_sequence="x"), {"type": "message_stop"}], Kind.WRONG),
        (a_message(decode(IDS))[1:], Kind.IMPROPER),
    ],
    ids=["whole", "in parts", "no stop", "a part lost", "other end", "stop string", "no start"],
)
def test_a_streamed_message_must_be_whole_and_right(events: list[dict[str, Any]], kind: Kind) -> None:
    assert judge(an_ask(path=MESSAGES), a_stream(events, done=False)).kind is kind


def test_a_stop_string_ends_the_right_answer_and_may_begin_only_where_it_was_broken_off() -> None:
    text = decode(IDS)
    right = Right(IDS, "length").until(text[8:14])
    assert right.text == text[:8] and right.ids == IDS[: len(right.ids)] and len(right.ids) < len(IDS)
    ask = an_ask(choices=(right,))
    last: dict[str, Any] = {"finish_reason": "stop", "stop_reason": text[8:14], "token_ids": None, "index": 0}
    whole = an_event(0) | {"choices": [last | {"text": text[:8]}]}
    assert judge(ask, a_stream([whole])).kind is Kind.RIGHT
    begun = an_event(0) | {"choices": [last | {"text": text[:10]}]}
    assert judge(ask, a_stream([begun])).kind is Kind.WRONG
    begun["choices"][0] |= {"finish_reason": None, "stop_reason": None}
    assert judge(ask, replace(a_stream([begun, orjson.loads(ERROR)], False), ended=Ended.CUT)).kind is Kind.BROKEN


@pytest.mark.parametrize(("name", "shift"), [("tokens", 0), ("text_offset", 0), ("text_offset", 1)])
def test_the_logprobs_of_every_token_are_needed_where_asked_for(name: str, shift: int) -> None:
    events, ask = right_events(), an_ask(want_logprobs=True)
    assert judge(ask, a_stream(events)).kind is Kind.WRONG
    place = 0
    for event, token in zip(events, IDS, strict=True):
        text = decode([token])
        event["choices"][0]["logprobs"] = {"tokens": [text], "text_offset": [place]}
        place += len(text)
    assert judge(ask, a_stream(events)).kind is Kind.RIGHT
    assert judge(an_ask(), a_stream(events)).kind is Kind.IMPROPER
    values = events[3]["choices"][0]["logprobs"][name]
    values[:] = [values[0] + 1] if shift else []
    assert judge(ask, a_stream(events)).kind is Kind.WRONG


def test_reasoning_and_a_tool_call_must_be_right() -> None:
    right = Right(IDS, "tool_calls", shown="", reasoning="so", arguments="{}")
    ask = an_ask(path=CHAT, stream=False, choices=(right,))
    call = {"function": {"name": FUNCTION, "arguments": "{}"}}
    message: dict[str, Any] = {"content": None, "reasoning": "so", "tool_calls": [call]}
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}

    def verdict(**change: Any) -> Kind:
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message | change}
        body = orjson.dumps({"usage": usage, "choices": [choice]})
        return judge(ask, Answer(Ended.WHOLE, 200, {}, body)).kind

    assert verdict() is Kind.RIGHT
    for change in ({"content": "so"}, {"reasoning": ""}, {"tool_calls": []}, {"tool_calls": [call, call]}):
        assert verdict(**change) is Kind.WRONG


def test_the_same_seed_gives_the_same_requests() -> None:
    lengths = OutputLengths.parse("lognormal:40,0.8")
    first, second = Asker(5, Mix(), lengths), Asker(5, Mix(), lengths)
    asks = [first.next() for _ in range(300)]
    assert asks == [second.next() for _ in range(300)]
    assert {ask.path for ask in asks} >= {COMPLETIONS, CHAT, MESSAGES}
    assert any(ask.malformed for ask in asks) and any(ask.behaviour.leaves for ask in asks)


def test_the_right_answers_are_those_of_an_emulated_engine() -> None:
    lengths = OutputLengths.parse("lognormal:40,0.8", 5)
    shape, asker, met = ClusterShape(lengths=lengths), Asker(5, Mix(tools_share=0.5), lengths), set()
    for ask in [asker.next() for _ in range(600)]:
        if ask.malformed or ask.path == MESSAGES:
            continue
        request = parse_generation(
            orjson.loads(ask.body), chat=ask.chat, model=shape.model, max_model_len=shape.context_tokens
        )
        for index, right in enumerate(ask.choices):
            choice = Choice(index, request.prompts[index // request.n], request)
            stream, (count, ends) = stream_of(choice), planned_length(choice, request, shape)
            while choice.finish_reason is None:
                last = len(choice.ids) == count - 1
                choice.feed(stream.next(eos=ends and last), ("stop" if ends else "length") if last else None)
            text = choice.text if choice.plan is None else choice.texts.get(Part.CONTENT, "")
            shown = (decode(choice.prompt) if request.echo else "") + ("" if request.echo_only else text)
            parts = choice.texts.get(Part.REASONING, ""), choice.texts.get(Part.CALL, "")
            made = (tuple(choice.ids), choice.finish_reason, choice.stop_reason, shown, *parts)
            assert made == (right.ids, right.finish_reason, right.stop, right.text, right.reasoning, right.arguments)
            met.add((choice.plan is not None, request.echo, request.echo_only, right.stop is not None))
    assert len(met) >= 5, met
