"""The scanner against a naive reference that parses everything, and against what a real vLLM sent."""

import copy
from itertools import cycle
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.proxy.wire.answer_identity import Part
from balanceroute.proxy.wire.bounds import MAX_CHOICES
from balanceroute.proxy.wire.json_size import MAX_FIELDS
from balanceroute.proxy.wire.sse import MAX_IDLE_EVENTS, MAX_LINES, MAX_NODES, EventScanner, StreamEnd
from tests.examples import examples
from tests.unit.proxy.captures import body_of, capture_files

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any], *, spaced: bool = False, newline: bytes = b"\n") -> bytes:
    if spaced:
        import json

        return b"data: " + json.dumps(body).encode() + newline * 2
    return b"data: " + orjson.dumps(body) + newline * 2


def completion(text: str, ids: list[int] | None, **choice: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": ids,
            }
            | choice
        ],
    }


def chat(delta: dict[str, Any], ids: list[int] | None, *, id: str = "chatcmpl-1", **choice: Any) -> dict[str, Any]:
    return {
        "id": id,
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": ids} | choice],
    }


def usage(prompt: int, generated: int, **extra: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "choices": [], "usage": counts | extra}


def parsed(out: bytes) -> list[Any]:
    blocks = [block.strip() for block in out.split(b"\n\n") if block.strip()]
    return [orjson.loads(b[6:]) if b.startswith(b"data: {") else b for b in blocks]


def texts(out: bytes) -> str:
    found = ""
    for body in parsed(out):
        for choice in body.get("choices", ()) if isinstance(body, dict) else ():
            found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return found


# ---------------------------------------------------------------------------------------- random streams

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            '","token_ids":[1,2,3]',
            '{"token_ids":[9]}',
            "\\",
            '\\"',
            '"finish_reason":"stop"',
            "\n\n",
            "data: x",
        ]
    ),
)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
EVENTS = st.one_of(
    st.builds(completion, TEXTS, IDS),
    st.builds(completion, TEXTS, IDS),
    st.builds(lambda text, ids: chat({"content": text}, ids), TEXTS, IDS),
    st.builds(lambda text, ids: chat({"reasoning": text}, ids), TEXTS, IDS),
    st.builds(lambda text, ids: chat({"content": "", "reasoning": text}, ids), TEXTS, IDS),
    st.builds(lambda ids: chat({"role": "assistant", "content": ""}, ids), st.none()),
    st.builds(lambda ids: chat({}, ids), IDS),
    st.builds(lambda t, ids: completion(t, ids, logprobs={"tokens": [t], "token_logprobs": [-1e-9]}), TEXTS, IDS),
    st.builds(lambda t, ids: completion(t, ids, prompt_token_ids=[5, 6]), TEXTS, IDS),
    st.builds(
        lambda t, ids: completion(t, ids) | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}},
        TEXTS,
        IDS,
    ),
)
STREAMS = st.lists(st.tuples(EVENTS, st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=8)


def reference(bodies: list[dict[str, Any]], want_ids: bool) -> tuple[list[int], list[dict[str, Any]]]:
    """Ids and events for the client by parsing everything, with none of the scanner's code."""
    ids: list[int] = []
    out = []
    for original in bodies:
        body = copy.deepcopy(original)
        body.pop("usage", None)
        choice = body["choices"][0]
        ids += choice["token_ids"] or []
        body["id"] = bodies[0]["id"]
        if not want_ids:
            if choice.get("delta") == {}:
                continue
            choice["token_ids"] = None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
        out.append(body)
    return ids, out


@pytest.mark.parametrize(
    "delta",
    [{"content": "", "reasoning": "a"}, {"reasoning": "", "content": "a"}, {"content": "", "refusal": "a"}],
    ids=lambda delta: "+".join(delta),
)
def test_text_beside_an_empty_field_has_been_shown_however_often_it_comes(delta: dict[str, Any]) -> None:
    """Else it would be generated again after a loss, and the client would read it twice."""
    scanner = EventScanner()
    for token in range(4):
        assert scanner.feed(event(chat(delta, [token])))
    scanner.resume()
    assert scanner.tokens == 4


def test_an_event_without_choices_and_usage_has_the_id_of_the_answer_and_no_kv_parameters() -> None:
    scanner = EventScanner(part=Part(public_id="p", created=9, index=2, closing_events=False))
    odd = {**completion("", []), "choices": [], "novel": 1, "kv_transfer_params": {"remote_host": "10.0.0.1"}}
    assert parsed(scanner.feed(event(odd))) == [{**odd, "id": "p", "created": 9, "kv_transfer_params": None}]


def test_an_empty_text_beside_a_former_one_is_no_later_event_without_text() -> None:
    scanner = EventScanner()
    scanner.feed(event(chat({"content": "b", "reasoning": "a"}, [1])))
    scanner.feed(event(chat({"content": "", "reasoning": "a"}, [2])))
    scanner.resume()
    assert scanner.tokens == 2


def test_reasoning_beside_an_empty_content_is_matched_without_parsing() -> None:
    scanner = EventScanner()
    first, other = (event(chat({"content": "", "reasoning": text}, [1])) for text in "ab")
    scanner.feed(first)
    assert scanner.matcher.match(other) == other.replace(b"[1]", b"null")


@settings(max_examples=examples(150), deadline=None)
@given(STREAMS, st.booleans(), st.data())
def test_scanner_equals_a_full_parse_of_every_event_for_any_chunking(
    stream: list[tuple[dict[str, Any], bool, bytes]], want_ids: bool, data: st.DataObject
) -> None:
    wire = b"".join(event(body, spaced=spaced, newline=newline) for body, spaced, newline in stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    scanner = EventScanner(want_token_ids=want_ids)
    out = b"".join(scanner.feed(wire[a:b]) for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True))
    ids, expected = reference([body for body, _, _ in stream], want_ids)
    assert scanner.generated.ids.tolist() == ids
    assert scanner.tokens == len(ids)
    assert parsed(out) == expected


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_an_event_split_at_every_byte_gives_the_same_bytes(newline: bytes) -> None:
    bodies = [completion("a", [1]), completion('q"\\', [2, 3]), completion("é", [4]), completion("b", [5])]
    wire = b"".join(event(body, newline=newline) for body in bodies)
    whole = EventScanner().feed(wire)
    for cut in range(len(wire)):
        scanner = EventScanner()
        assert scanner.feed(wire[:cut]) + scanner.feed(wire[cut:]) == whole
        assert scanner.generated.ids.tolist() == [1, 2, 3, 4, 5]
    scanner = EventScanner()
    assert b"".join(scanner.feed(wire[i : i + 1]) for i in range(len(wire))) == whole


@pytest.mark.parametrize(
    "ends",
    [(b"\n",), (b"\r\n",), (b"\r",), (b"\r\n", b"\r"), (b"\n", b"\r\n"), (b"\r", b"\r\n", b"\r\n", b"\n")],
    ids=lambda ends: "+".join(end.hex() for end in ends),
)
def test_an_event_of_several_lines_is_the_same_with_any_line_ends_and_pieces(ends: tuple[bytes, ...]) -> None:
    body = orjson.dumps(completion("a", [1], finish_reason="stop")).replace(b",", b",\ndata: ")
    wire = b": hi\n\nevent: x\ndata: %b\n\n" % body + DONE
    expected = EventScanner().feed(wire)
    assert texts(expected) == "a"
    wire = b"".join(line + end for line, end in zip(wire.split(b"\n")[:-1], cycle(ends), strict=False))
    for cut in range(len(wire)):
        scanner = EventScanner()
        assert scanner.feed(wire[:cut]) + scanner.feed(wire[cut:]) == expected
        assert scanner.end is StreamEnd.DONE


def test_a_byte_order_mark_at_the_start_of_a_stream_hides_no_token() -> None:
    good = event(completion("a", [1])) + event(completion("b", [2]))
    scanner = EventScanner(want_token_ids=True)
    assert b"".join(scanner.feed(byte.to_bytes()) for byte in b"\xef\xbb\xbf" + good) == good
    scanner.resume()
    assert scanner.feed(b"\xef\xbb\xbf" + good) == good
    assert scanner.generated.ids.tolist() == [1, 2, 1, 2]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [
                    b"data: ",
                    b"\n\n",
                    b"\r\n\r\n",
                    b"{",
                    b'{"choices":',
                    b'[{"token_ids":[1,-1,"x",2e99]}]}',
                    b'[{"delta":7,"index":"x","finish_reason":3,"stop_reason":"recomputed"}]}',
                    b"[null]}\n\n",
                    b'{"choices":[],"usage":{"completion_tokens":"x","prompt_tokens_details":7}}\n\n',
                    b'{"choices":[],"usage":{"completion_tokens":-5}}\n\n',
                    b'{"error":1}\n\n',
                    b"[" * 500 + b"]" * 500,
                    event(completion("a", [1])),
                    event(completion("a", [1])).replace(b"[1]", b"[99999999999]"),
                    event(completion("a", [1])).replace(b"[1]", b"[1,,2]"),
                    event(chat({"content": "a"}, [1])),
                    DONE,
                ]
            ),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_no_input_raises(pieces: list[bytes], resumed: bool) -> None:
    scanner = EventScanner(want_usage=True, want_continuous_usage=True)
    for piece in pieces:
        assert isinstance(scanner.feed(piece), bytes)
    scanner.close()
    if resumed:
        scanner.resume()
        for piece in pieces:
            scanner.feed(piece)
    assert scanner.tokens >= 0
    assert scanner.close() in StreamEnd


# ---------------------------------------------------------------------------------------- what is stripped


def test_unasked_token_ids_become_null_as_a_worker_not_asked_for_them_would_send() -> None:
    scanner = EventScanner()
    out = scanner.feed(event(completion("a", [1], prompt_token_ids=[8, 9])) + event(completion("b", [2])))
    assert out == event(completion("a", None)) + event(completion("b", None))
    assert scanner.generated.prompt_ids is not None
    assert scanner.generated.prompt_ids.tolist() == [8, 9]


def test_asked_token_ids_pass_byte_for_byte() -> None:
    wire = event(completion("a", [1], prompt_token_ids=[8, 9])) + event(completion("b", [2])) * 3
    assert EventScanner(want_token_ids=True).feed(wire) == wire


def test_prompt_ids_are_stripped_however_often_they_come() -> None:
    scanner = EventScanner()
    out = scanner.feed(event(completion("a", [1], prompt_token_ids=[8, 9])) * 3)
    assert out == event(completion("a", None)) * 3
    assert scanner.generated.ids.tolist() == [1, 1, 1]


def test_prompt_ids_of_a_resumed_life_are_not_the_clients_prompt() -> None:
    scanner = EventScanner(want_token_ids=True)
    scanner.feed(event(completion("a", [1], prompt_token_ids=[8])))
    scanner.resume()
    out = scanner.feed(event(completion("b", [2], prompt_token_ids=[8, 1])))
    assert out == event(completion("b", [2]))
    assert scanner.generated.prompt_ids is not None
    assert scanner.generated.prompt_ids.tolist() == [8]


def test_prompt_ids_that_were_not_sent_yet_are_sent_by_the_next_worker() -> None:
    scanner = EventScanner(want_token_ids=True)
    marker = completion("", [], prompt_token_ids=[8, 9], finish_reason="stop", stop_reason="recomputed")
    assert scanner.feed(event(marker)) == b""
    assert scanner.end is StreamEnd.RECOMPUTED
    scanner.resume()
    begun = event(completion("a", [1], prompt_token_ids=[8, 9]))
    assert scanner.feed(begun) == begun
    scanner.resume()
    assert scanner.feed(event(completion("b", [2], prompt_token_ids=[8, 9, 1]))) == event(completion("b", [2]))


def test_prompt_ids_of_a_chat_are_sent_once_with_its_role() -> None:
    scanner = EventScanner(want_token_ids=True)
    scanner.resume()
    begun = event({**chat({"role": "assistant", "content": ""}, None), "prompt_token_ids": [8, 9]})
    assert scanner.feed(begun) == begun
    scanner.resume()
    assert scanner.feed(begun) == b""


def test_text_that_looks_like_token_ids_is_not_counted() -> None:
    scanner = EventScanner()
    text = ',"token_ids":[1,2,3]}]}'
    assert texts(scanner.feed(event(completion("a", [1])) + event(completion(text, [2])))) == "a" + text
    assert scanner.generated.ids.tolist() == [1, 2]


def test_empty_deltas_that_only_carry_ids_are_dropped_but_counted() -> None:
    scanner = EventScanner()
    assert scanner.feed(event(chat({}, [1, 2]))) == b""
    assert scanner.tokens == 2


def test_usage_that_was_not_asked_for_is_dropped() -> None:
    scanner = EventScanner()
    scanner.feed(event(completion("a", None, finish_reason="length")))
    assert scanner.feed(event(usage(3, 5))) == b""
    assert scanner.usage is not None
    assert scanner.tokens == 5


@pytest.mark.parametrize("told", ["before the end", "with the end", "never"])
def test_usage_that_was_asked_for_comes_once_before_done_wherever_the_worker_has_it(told: str) -> None:
    scanner = EventScanner(want_usage=True, prompt_tokens=3)
    counts = usage(3, 2)
    scanner.feed(event(completion("a", [1])) + (event(counts) if told == "before the end" else b""))
    end = completion("b", [2], finish_reason="stop") | ({"usage": counts["usage"]} if told == "with the end" else {})
    *_, last, done = parsed(scanner.feed(event(end) + DONE))
    assert done == DONE.strip() and last == {**usage(3, 2), "model": "m"} and scanner.usage == last["usage"]


@pytest.mark.parametrize("with_done", [True, False])
def test_a_made_usage_counts_each_token_once_over_workers_of_which_the_last_tells_no_ids(with_done: bool) -> None:
    scanner = EventScanner(want_usage=True, prompt_tokens=3)
    scanner.feed(event(completion("a", [1])) + event(completion("b", [2])))
    scanner.resume()
    out = scanner.feed(event(completion("c", None, finish_reason="stop")) + (DONE if with_done else b""))
    made = parsed(out)[1] if with_done else parsed(scanner.missing_usage())[0]
    assert made["usage"] == usage(3, 3)["usage"] and scanner.tokens == 3


def test_continuous_usage_counts_where_no_ids_come() -> None:
    scanner = EventScanner()
    for n in (1, 3, 4):
        scanner.feed(event(completion("x", None) | {"usage": {"prompt_tokens": 2, "completion_tokens": n}}))
    assert scanner.tokens == 4
    assert not scanner.generated.exact


def test_cached_tokens_are_those_of_the_prefiller() -> None:
    last = event(completion("a", [1], finish_reason="stop"))
    final = event(usage(10, 1, prompt_tokens_details={"cached_tokens": 9}))
    out = EventScanner(want_usage=True, prompt_details={"cached_tokens": 4}).feed(last + final)
    assert parsed(out)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    out = EventScanner(want_usage=True).feed(last + final)
    assert parsed(out)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_is_complete_whose_engine_has_not_counted_cached_tokens() -> None:
    scanner = EventScanner(want_usage=True, prompt_details={"cached_tokens": 4})
    final = event(usage(10, 1, prompt_tokens_details={"cached_tokens": -1}))
    out = scanner.feed(event(completion("a", [1], finish_reason="stop")) + final + DONE)
    assert scanner.end is StreamEnd.DONE
    assert parsed(out)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 9}}], ids=["at the end", "always"])
def test_continuous_usage_has_prompt_details_only_when_the_engine_sends_them(details: dict[str, Any]) -> None:
    """vLLM tells them in the last usage, and no others were to be told here."""
    scanner = EventScanner(want_usage=True, want_continuous_usage=True, prompt_details={"cached_tokens": 4})
    out = scanner.feed(event(completion("a", [1]) | {"usage": usage(10, 1, **details)["usage"]}))
    expected = {"prompt_tokens_details": {"cached_tokens": 4}} if details else {}
    assert parsed(out)[0]["usage"] == usage(10, 1)["usage"] | expected


@pytest.mark.parametrize("unasked", [False, True])
def test_usage_requested_only_by_the_router_is_dropped_and_other_usage_passed_on(unasked: bool) -> None:
    """An engine with `--enable-force-include-usage` sends them unasked, in every event."""
    scanner = EventScanner(unasked_usage=unasked, prompt_tokens=10)
    scanner.feed(event(completion("a", [1]) | {"usage": usage(10, 1)["usage"]}))
    scanner.resume()
    last = event(completion("b", [2], finish_reason="length") | {"usage": usage(11, 1)["usage"]}) + event(usage(11, 1))
    usages = [body["usage"] for body in parsed(scanner.feed(last)) if body.get("usage")]
    assert usages == ([usage(10, 2)["usage"]] * 2 if unasked else [])
    scanner = EventScanner(unasked_usage=unasked, prompt_tokens=10)
    scanner.feed(event(completion("a", [1], finish_reason="length")))
    assert scanner.missing_usage() == b"", "one that nobody has told is made up for nobody"


@pytest.mark.parametrize(
    "garbage", [b"\xff\xfe\x00\r\n: \x80{]\n", b"HTTP/1.1 500\n", b"data: \xff\n\n", b"\x1f\x8b\x08\x00\n\n"]
)
def test_unreadable_events_are_dropped_and_cost_no_token(garbage: bytes) -> None:
    good = event(completion("a", [1]))
    scanner = EventScanner(want_token_ids=True)
    assert scanner.feed(garbage + good) == good
    assert scanner.tokens == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"b"', b'"\xff"'),
        (b'"b"', b'"b'),
        (b"]}", b"]"),
        (b"{", b"{\ndata: {"),
        (b'"b"', b'NaN, "x": "%b"' % (b"y" * 2**16)),
    ],
    ids=["not UTF-8", "an open string", "an open object", "two objects", "only Python's, and large"],
)
@pytest.mark.parametrize("first", [b"", event(completion("a", [1]) | {"novel": 1})], ids=["first", "later"])
def test_a_damaged_event_ends_the_stream_because_its_tokens_would_be_lost_unnoticed(
    first: bytes, old: bytes, new: bytes
) -> None:
    scanner = EventScanner()
    told = scanner.feed(first)
    damaged = event(completion("b", [2])).replace(old, new, 1)
    assert scanner.feed(damaged + event(completion("c", [3], finish_reason="stop")) + DONE) == b""
    assert scanner.end is StreamEnd.MALFORMED and "damaged" in scanner.fault
    assert scanner.tokens == len(parsed(told))


@pytest.mark.parametrize("ids", [b"9" * 5000, b"9" * 5000 + b",1"], ids=["one", "several"])
def test_an_id_of_more_digits_than_python_reads_does_not_raise(ids: bytes) -> None:
    scanner = EventScanner()
    for token in (1, 2):
        scanner.feed(event(completion("a", [token])))
    scanner.feed(event(completion("b", [3])).replace(b"[3]", b"[%b]" % ids))
    assert scanner.end is StreamEnd.MALFORMED and scanner.generated.ids.tolist() == [1, 2]


def test_comments_and_events_that_are_not_json_pass_unchanged() -> None:
    wire = b": ping\n\ndata: not json\n\nevent: x\ndata: 5\n\n"
    assert EventScanner().feed(wire) == wire


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b'"\\ud83d"'], ids=["nan", "infinity", "half a pair"])
def test_what_only_python_takes_for_json_is_counted_and_reaches_the_client_as_json(value: bytes) -> None:
    """Uncounted it would be left out of whole answers, and after a finish reason in it the answer would go on."""
    scanner = EventScanner()
    body = completion("a", [1], logprobs={"token_logprobs": ["V"]})
    out = scanner.feed(event(body).replace(b'"V"', value) + event(completion("b", [2])))
    last = completion("c", [3], finish_reason="stop", logprobs={"token_logprobs": ["V"]})
    out += scanner.feed(event(last).replace(b'"V"', value) + DONE)
    told = [body["choices"][0] for body in parsed(out)[:-1]]
    assert [(choice["text"], choice["token_ids"]) for choice in told] == [("a", None), ("b", None), ("c", None)]
    assert told[0]["logprobs"] == {"token_logprobs": ["?" if value.startswith(b'"') else None]}
    assert scanner.end is StreamEnd.DONE and scanner.generated.ids.tolist() == [1, 2, 3]


# ---------------------------------------------------------------------------------------- ends


def test_done_after_a_finish_reason_is_passed_on() -> None:
    scanner = EventScanner()
    out = scanner.feed(event(completion("a", [1], finish_reason="length")) + DONE)
    assert out.endswith(DONE)
    assert scanner.end is StreamEnd.DONE
    assert scanner.finish_reason == "length"


@pytest.mark.parametrize("at_once", [True, False])
def test_an_event_that_is_sent_again_after_the_finish_reason_brings_no_text_and_no_token(at_once: bool) -> None:
    scanner = EventScanner(want_usage=True)
    ordinary = event(completion(" a", [1]))
    last = event(completion(" b", [2], finish_reason="length"))
    sent = [ordinary, ordinary, last, last, ordinary, event(usage(5, 3)), DONE]
    out = b"".join(map(scanner.feed, [b"".join(sent)] if at_once else sent))
    assert texts(out) == " a a b" and scanner.tokens == 3 and scanner.end is StreamEnd.DONE
    assert out.count(b'"length"') == out.count(b'"usage"') == 1 and out.endswith(DONE)


def test_an_empty_finish_reason_ends_no_answer() -> None:
    scanner = EventScanner()
    parts = [event(completion(text, [n], finish_reason="")) for n, text in enumerate("abc")]
    assert texts(scanner.feed(b"".join(parts))) == "abc" and scanner.finish_reason is None
    scanner.feed(event(completion("d", [3], finish_reason="stop")) + DONE)
    assert scanner.end is StreamEnd.DONE and scanner.tokens == 4


def test_done_without_a_finish_reason_is_held_back() -> None:
    scanner = EventScanner()
    assert scanner.feed(DONE) == b""
    assert scanner.end is StreamEnd.UNFINISHED


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_a_recomputed_marker_never_reaches_the_client(reason: str) -> None:
    scanner = EventScanner()
    marker = event(completion("", [], finish_reason=reason, stop_reason="recomputed"))
    assert scanner.feed(event(completion("a", [1]))) != b""
    assert scanner.feed(marker + event(usage(1, 1)) + DONE) == b""
    assert scanner.end is StreamEnd.RECOMPUTED


def test_text_without_ids_or_usage_counts_by_events_and_is_never_dropped() -> None:
    scanner = EventScanner()
    texts = [completion(text, None) for text in ("a", "", "b")]
    scanner.feed(b"".join(map(event, texts)))
    assert (scanner.tokens, scanner.generated.exact) == (2, False)
    scanner.resume()
    assert (scanner.tokens, scanner.generated.exact) == (2, False)


def test_logprobs_without_text_ids_or_usage_count_where_there_are_some() -> None:
    """As of half a character; the client has them, so they must not come again."""
    scanner = EventScanner()
    scored = [completion("", None, logprobs=LOGPROBS), completion("", None, logprobs={"tokens": [], "text_offset": []})]
    scanner.feed(b"".join(map(event, scored)))
    assert (scanner.tokens, scanner.generated.exact) == (1, False)
    scanner.resume()
    assert scanner.tokens == 1


def test_an_abort_is_no_end_of_an_answer_and_never_reaches_the_client() -> None:
    """As vLLM 0.32 sends it, with the last token, when it is stopped."""
    scanner = EventScanner()
    last = completion("b", [2], finish_reason="abort")
    out = scanner.feed(event(completion("a", [1])) + event(last) + event(usage(3, 2)) + DONE)
    assert parsed(out) == [completion("a", None), completion("b", None)]
    assert (scanner.end, scanner.tokens, scanner.finish_reason) == (StreamEnd.ABORTED, 2, None)
    assert scanner.cut().flushed == "b"


def test_usage_without_a_finish_reason_is_held_back_for_the_resumed_stream() -> None:
    scanner = EventScanner(want_usage=True, prompt_tokens=3)
    out = scanner.feed(event(completion("a", [1])) + event(usage(3, 1)) + DONE)
    assert scanner.end is StreamEnd.UNFINISHED
    scanner.resume()
    out += scanner.feed(event(completion("b", [2], finish_reason="stop")) + event(usage(4, 1)) + DONE)
    usages = [body["usage"] for body in parsed(out) if isinstance(body, dict) and body.get("usage")]
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in usages] == [(3, 2)]


def test_text_that_came_merged_with_the_marker_is_not_lost() -> None:
    scanner = EventScanner()
    out = scanner.feed(event(completion("tail", [4], finish_reason="stop", stop_reason="recomputed")))
    assert parsed(out) == [completion("tail", None)]
    assert scanner.end is StreamEnd.RECOMPUTED
    assert scanner.tokens == 1


@pytest.mark.parametrize(
    ("ids", "text", "flushed"), [([1], "", ""), ([2, 2], "b", None), ([1], "a", None)], ids=["alone", "merged", "new"]
)
@pytest.mark.parametrize("want_ids", [False, True])
def test_an_id_repeated_in_a_recompute_marker_does_not_count(
    ids: list[int], text: str, flushed: str | None, want_ids: bool
) -> None:
    """As vllm-ascend 0.11 to 0.14 does; the answer would go on with that token twice."""
    scanner = EventScanner(want_token_ids=want_ids)
    scanner.feed(event(completion("a", [1])))
    marker = completion(text, ids, finish_reason="stop", stop_reason="recomputed")
    assert scanner.feed(event(marker) + DONE) == b""
    assert scanner.end is StreamEnd.RECOMPUTED and scanner.cut().flushed == flushed
    scanner.resume()
    assert list(scanner.generated.ids) == [1]


def test_a_recompute_marker_that_begins_with_the_former_workers_last_id_is_recognised() -> None:
    scanner = EventScanner()
    scanner.feed(event(completion("a", [1])))
    scanner.close()
    scanner.resume()
    out = scanner.feed(event(completion("a", [1], finish_reason="stop", stop_reason="recomputed")))
    assert texts(out) == "a" and list(scanner.generated.ids) == [1, 1]


@pytest.mark.parametrize(("ids", "end"), [([2], None), (None, None), ([], StreamEnd.RECOMPUTED)])
def test_a_marker_that_is_also_a_stop_string_is_one_only_where_no_token_comes_with_it(
    ids: list[int] | None, end: StreamEnd | None
) -> None:
    scanner = EventScanner(stops_at_marker=True)
    scanner.feed(event(completion("a", [1])))
    scanner.feed(event(completion("b", ids, finish_reason="stop", stop_reason="recomputed")))
    assert scanner.end is end and scanner.finish_reason == (None if end else "stop")


LOGPROBS = {"text_offset": [0], "token_logprobs": [-1.0], "tokens": ["?"], "top_logprobs": [None]}
EMPTY_LOGPROBS = {name: [] for name in LOGPROBS}


@pytest.mark.parametrize(("want_ids", "logprobs"), [(True, None), (False, LOGPROBS), (True, LOGPROBS)])
def test_tokens_in_a_recompute_marker_are_sent_to_clients_that_want_tokens(
    want_ids: bool, logprobs: dict[str, Any] | None
) -> None:
    """An engine with a stream interval holds tokens back, and half of a character has no text yet."""
    scanner = EventScanner(want_token_ids=want_ids)
    scanner.feed(event(completion("a", [1])))
    marker = completion("", [2], finish_reason="stop", stop_reason="recomputed", logprobs=logprobs)
    (marker_sent,) = parsed(scanner.feed(event(marker)))
    assert scanner.end is StreamEnd.RECOMPUTED
    scanner.resume()
    assert list(scanner.generated.ids) == [1, 2]
    part = marker_sent["choices"][0]
    assert part["token_ids"] == ([2] if want_ids else None) and part["logprobs"] == logprobs
    assert part["finish_reason"] is part["stop_reason"] is None


@pytest.mark.parametrize("want_ids", [False, True])
@pytest.mark.parametrize("logprobs", [None, EMPTY_LOGPROBS])
def test_a_recompute_marker_without_tokens_is_not_sent(want_ids: bool, logprobs: dict[str, Any] | None) -> None:
    scanner = EventScanner(want_token_ids=want_ids)
    scanner.feed(event(completion("a", [1])))
    marker = completion("", [], finish_reason="stop", stop_reason="recomputed", logprobs=logprobs)
    assert scanner.feed(event(marker)) == b"" and scanner.end is StreamEnd.RECOMPUTED


@pytest.mark.parametrize("want_ids", [False, True])
def test_kv_transfer_parameters_never_reach_the_client(want_ids: bool) -> None:
    scanner = EventScanner(want_token_ids=want_ids, want_usage=True)
    params = {"kv_transfer_params": {"remote_host": "10.0.0.1"}}
    sent = b""
    for part in (completion("a", [1]), completion("b", [2]), completion("c", [3], finish_reason="stop"), usage(9, 3)):
        sent += scanner.feed(event(part | params))
    assert texts(sent) == "abc" and scanner.usage is not None and list(scanner.generated.ids) == [1, 2, 3]
    assert b"remote_host" not in sent and sent.count(b'"kv_transfer_params":null') == 4


def test_weight_versions_are_told_unless_they_are_of_the_rest_of_an_answer_only() -> None:
    """vLLM 0.33 tells ranges of an engine's own tokens, in the event that finishes a choice."""
    last = completion("b", [2], finish_reason="stop", weight_versions=[{"start": 0, "end": 1, "version": "7"}])
    scanner = EventScanner()
    scanner.feed(event(completion("a", [1])))
    scanner.resume()
    assert b"weight_versions" not in scanner.feed(event(last)) and scanner.finish_reason == "stop"
    assert b'"version":"7"' in EventScanner().feed(event(last))


def test_an_error_event_ends_the_stream_and_is_kept_for_the_caller() -> None:
    scanner = EventScanner()
    assert scanner.feed(event({"error": {"message": "boom", "code": 500}}) + DONE) == b""
    assert scanner.end is StreamEnd.ERROR
    assert scanner.error is not None
    assert orjson.loads(scanner.error)["error"]["code"] == 500


def test_a_stream_that_stops_is_classified_by_its_finish_reason() -> None:
    cut = EventScanner()
    cut.feed(event(completion("a", [1])) + b'data: {"half')
    assert cut.close() is StreamEnd.UNFINISHED
    finished = EventScanner()
    finished.feed(event(completion("a", [1], finish_reason="stop")))
    assert finished.close() is StreamEnd.NO_DONE


def test_an_event_above_the_limit_ends_the_stream_and_holds_no_memory() -> None:
    scanner = EventScanner(max_event_bytes=1000)
    for _ in range(30):
        scanner.feed(b"x" * 100)
    assert scanner.end is StreamEnd.MALFORMED and "larger" in scanner.fault
    assert scanner.feed(b"y" * 10_000) == b""


# ---------------------------------------------------------------------------------------- resume


def test_text_offsets_of_a_resumed_answer_continue_those_before() -> None:
    scanner = EventScanner(prefix="echoed")
    scanner.feed(event(completion("abc", [1], logprobs=LOGPROBS | {"tokens": ["token_id:1"]})))
    scanner.feed(event(completion("", [9], logprobs=LOGPROBS | {"tokens": ["<special>"], "text_offset": [3]})))
    scanner.close()
    scanner.resume()
    (part,) = parsed(scanner.feed(event(completion("d", [2], logprobs=LOGPROBS | {"tokens": ["d"]}))))
    assert part["choices"][0]["logprobs"]["text_offset"] == [3], "engines count the text that they have sent"


@pytest.mark.parametrize(("logprobs", "halved"), [(None, False), (LOGPROBS, True)], ids=["text", "logprobs"])
def test_half_of_a_character_can_be_generated_anew_unless_logprobs_have_shown_its_tokens(
    logprobs: dict[str, Any] | None, halved: bool
) -> None:
    scanner = EventScanner()
    scanner.feed(event(completion("ab", [1, 2], logprobs=logprobs)))
    scanner.close()
    assert scanner.cut(broken=1).halved is halved


def test_a_client_that_wants_ids_gets_the_prompt_s_once_although_its_answer_is_resumed() -> None:
    scanner = EventScanner(want_token_ids=True)
    out = b""
    for _ in range(2):
        out += scanner.feed(event(completion("", [], prompt_token_ids=[8, 9]))) + scanner.feed(
            event(completion("a", None))
        )
        scanner.close()
        scanner.resume()
    told = [part["choices"][0]["prompt_token_ids"] for part in parsed(out)]
    assert [ids for ids in told if ids] == [[8, 9]]


def test_a_resumed_answer_is_one_unbroken_stream() -> None:
    scanner = EventScanner(want_usage=True, prompt_tokens=10)
    out = scanner.feed(event(chat({"role": "assistant", "content": ""}, None)))
    out += scanner.feed(event(chat({"content": "a"}, [1])) + event(chat({"content": "b"}, [2])))
    scanner.feed(event(chat({"content": ""}, [], finish_reason="stop", stop_reason="recomputed")) + DONE)
    scanner.resume()
    assert scanner.tokens == 2
    second = [
        chat({"role": "assistant", "content": ""}, None, id="other") | {"created": 99},
        chat({"content": "c"}, [3], id="other") | {"created": 99},
        chat({"content": "d"}, [4], id="other") | {"created": 99},
        chat({"content": "e"}, [5], id="other", finish_reason="length", stop_reason=None) | {"created": 99},
        usage(12, 3) | {"id": "other", "created": 99},
    ]
    out += scanner.feed(b"".join(map(event, second)) + DONE)
    events = parsed(out)
    assert texts(out) == "abcde"
    assert [e["id"] for e in events[:-1]] == ["chatcmpl-1"] * 7
    assert {e["created"] for e in events[:-1]} == {7}
    assert sum("role" in (c["delta"] or {}) for e in events[:-2] for c in e["choices"]) == 1
    assert events[-2]["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert events[-1] == b"data: [DONE]"
    assert scanner.generated.ids.tolist() == [1, 2, 3, 4, 5]


def test_a_resume_drops_tokens_whose_text_was_never_sent() -> None:
    scanner = EventScanner()
    scanner.feed(event(completion("a", [1])) + event(completion("", [2])) + event(completion("", [3])))
    scanner.resume()
    assert scanner.generated.ids.tolist() == [1]
    assert scanner.tokens == 1


def test_a_resume_keeps_every_token_whose_id_was_sent() -> None:
    scanner = EventScanner(want_token_ids=True)
    scanner.feed(event(completion("a", [1])) + event(completion("", [2])))
    scanner.resume()
    assert scanner.generated.ids.tolist() == [1, 2]


def test_ids_that_were_never_received_are_unknown_after_a_resume() -> None:
    """A worker that tells its count by usage alone: whoever went on from `ids` would leave out what has been told."""
    scanner = EventScanner()
    scanner.feed(event(completion("a", None) | {"usage": usage(3, 1)["usage"]}))
    scanner.feed(event(completion("b", None) | {"usage": usage(3, 2)["usage"]}))
    assert (scanner.tokens, scanner.generated.exact) == (2, False)
    scanner.resume()
    assert not scanner.generated.exact


def test_usage_of_a_resumed_stream_without_a_prefillers_count_excludes_the_earlier_tokens() -> None:
    scanner = EventScanner(want_usage=True)
    scanner.feed(event(completion("a", [1])) + event(completion("b", [2])))
    scanner.resume()
    out = scanner.feed(event(completion("c", [3], finish_reason="stop")) + event(usage(12, 1)) + DONE)
    usages = [body["usage"] for body in parsed(out) if isinstance(body, dict) and body.get("usage")]
    assert usages == [{"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}]


@pytest.mark.parametrize("ids", [[], [7]])
def test_a_chat_begins_with_the_message_that_it_repeats_which_is_no_token(ids: list[int]) -> None:
    scanner = EventScanner(prompt_tokens=5, prefix="so the")
    out = scanner.feed(event(chat({"role": "assistant", "content": ""}, ids)) + event(chat({"reasoning": "hm"}, [8])))
    out += scanner.feed(event(chat({"content": " fox"}, [9])) + event(chat({"content": " runs"}, [10])))
    deltas = [body["choices"][0]["delta"] for body in parsed(out)]
    assert deltas[0] == {"role": "assistant", "content": "so the"}
    assert [delta.get("content") for delta in deltas[1:]] == [None, " fox", " runs"]
    assert scanner.tokens == 3 + len(ids)


@pytest.mark.parametrize("continuous", [False, True])
def test_reasoning_tokens_are_reported_only_for_an_answer_of_one_worker(continuous: bool) -> None:
    """A worker knows those that it has generated itself: of a resumed answer they would be too few."""

    def reasoned(text: str, **fields: Any) -> bytes:
        sent = {"prompt_tokens": 9, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}}
        return event(chat({"reasoning": text}, [1], **fields) | ({"usage": sent} if continuous else {}))

    last = event(usage(9, 1, completion_tokens_details={"reasoning_tokens": 1}))
    scanner = EventScanner(want_usage=True, want_continuous_usage=continuous)
    sent = scanner.feed(reasoned("a", finish_reason="stop") + last)
    assert sent.count(b'"reasoning_tokens":1') == (2 if continuous else 1)
    scanner = EventScanner(want_usage=True, want_continuous_usage=continuous)
    scanner.feed(reasoned("a"))
    scanner.resume()
    sent = scanner.feed(reasoned("b", finish_reason="stop") + last)
    assert b'"completion_tokens":2' in sent and b"reasoning_tokens" not in sent


@pytest.mark.parametrize(("text", "shown"), [(b"so\\u00e9", "bso\u00e9"), (b"\xff", ""), (b"\\x", "")])
def test_the_last_texts_are_known_of_matched_events_too(text: bytes, shown: str) -> None:
    scanner = EventScanner()
    scanner.feed(event(completion("a", [1])) + event(completion("b", [2])))
    assert scanner.last_text == "ab"
    scanner.feed(event(completion("c", [3])).replace(b'"text":"c"', b'"text":"%b"' % text))
    assert scanner.tokens == 3 and scanner.last_text == shown


@pytest.mark.parametrize("at_once", [True, False])
def test_the_last_texts_are_of_one_kind_and_each_counts_once(at_once: bool) -> None:
    scanner = EventScanner()
    wires = [event(chat({"reasoning": text}, [1])) for text in "abc"] + [event(chat({"content": "d"}, [2]))]
    for wire in [b"".join(wires[:3])] if at_once else wires[:3]:
        scanner.feed(wire)
    assert scanner.last_text == "bc"
    scanner.feed(event(chat({"reasoning": "x"}, [3])) + wires[3])
    assert scanner.last_text == "d"
    scanner.resume()
    scanner.feed(event(chat({"role": "assistant", "content": ""}, [])) + event(chat({"content": "e"}, [4])))
    assert scanner.last_text == "de"


def test_details_that_an_engine_sends_as_null_are_null_also_in_a_resumed_answer() -> None:
    counted = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "completion_tokens_details": None}
    scanner = EventScanner(want_usage=True, want_continuous_usage=True)
    sent = scanner.feed(event(chat({"content": "a"}, [1]) | {"usage": counted}))
    scanner.resume()
    sent += scanner.feed(event(chat({"content": "b"}, [2]) | {"usage": counted | {"prompt_tokens": 10}}))
    first, last = (body["usage"] for body in parsed(sent))
    assert first == counted and last == counted | {"completion_tokens": 2, "total_tokens": 11}


def test_a_continuous_usage_does_not_fall_by_tokens_that_were_given_back() -> None:
    scanner = EventScanner(want_usage=True, want_continuous_usage=True, prompt_tokens=10)
    told = []
    for texts in ("a", "", ""), ("", "", "b"), ("c",):
        earlier = scanner.tokens
        for more, text in enumerate(texts, 1):
            sent = completion(text, [7]) | {"usage": usage(10 + earlier, more)["usage"]}
            told += [body["usage"]["completion_tokens"] for body in parsed(scanner.feed(event(sent)))]
        scanner.resume()
    assert told == [1, 2, 3, 3, 3, 4, 5]
    scanner.feed(event(completion("", [], finish_reason="stop")))
    assert parsed(scanner.feed(event(usage(15, 0))))[0]["usage"]["completion_tokens"] == 5


def test_a_usage_that_no_worker_has_sent_names_the_model_as_the_events_before_it() -> None:
    scanner = EventScanner(want_usage=True, prompt_tokens=3)
    scanner.feed(event(completion("a", [1], finish_reason="length") | {"model": "full/name"}))
    (made,) = parsed(scanner.missing_usage())
    assert made["model"] == "full/name" and made["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ({"reasoning": "so"}, {"content": "x"}, StreamEnd.MISPARSED),
        ({"content": "x"}, {"reasoning": "so"}, StreamEnd.MISPARSED),
        ({"content": "x"}, {"tool_calls": [{"index": 0}]}, None),
        ({"content": "x"}, {"content": "y"}, None),
    ],
)
@pytest.mark.parametrize("lives", [1, 2])
def test_a_resumed_answer_continues_with_the_kind_of_text_at_the_cut(
    before: dict[str, object], after: dict[str, object], ends: StreamEnd | None, lives: int
) -> None:
    """Also where a life without any text lies between the two."""
    scanner = EventScanner()
    scanner.feed(event(chat(before, [1])))
    for _ in range(lives):
        scanner.resume()
    scanner.feed(event(chat(after, [2])))
    assert scanner.end is ends


@pytest.mark.parametrize("kind", ["reasoning", "content"])
def test_the_kind_of_text_is_known_even_if_the_first_token_has_no_text(kind: str) -> None:
    """Half of a character has none."""
    other = "content" if kind == "reasoning" else "reasoning"
    scanner = EventScanner()
    for text in ("", "so", " it"):
        scanner.feed(event(chat({kind: text}, [1])))
    assert scanner.cut().kinds == {"text" if kind == "content" else "reasoning"}
    scanner.resume()
    for text in ("", " is"):
        scanner.feed(event(chat({kind: text}, [1])))
    scanner.feed(event(chat({other: "now"}, [1])))
    assert scanner.end is None  # this worker has turned to it by itself
    scanner.resume()
    for text in ("", " is"):
        scanner.feed(event(chat({kind: text}, [1])))
    assert scanner.end is StreamEnd.MISPARSED


def test_without_a_prefillers_count_no_usage_is_made_up() -> None:
    scanner = EventScanner(want_usage=True)
    scanner.feed(event(completion("a", [1], finish_reason="stop")))
    assert scanner.missing_usage() == b""


def test_one_choice_of_several_gets_its_index_and_the_common_id() -> None:
    scanner = EventScanner(part=Part(public_id="cmpl-all", created=1, index=3, closing_events=False))
    out = scanner.feed(b"".join(event(completion(t, [1])) for t in "abc"))
    out += scanner.feed(event(completion("d", [1], finish_reason="stop")) + DONE)
    assert [(e["id"], e["created"], e["choices"][0]["index"]) for e in parsed(out)] == [("cmpl-all", 1, 3)] * 4
    assert scanner.end is StreamEnd.DONE


# ---------------------------------------------------------------------------------------- real vLLM


def test_every_recorded_stream_is_counted_exactly() -> None:
    """Where the recording asked for ids or usage, the count equals the worker's own final usage."""
    counted = 0
    for path in capture_files("*/*.resp"):
        head, body = body_of(path)
        if b"text/event-stream" not in head or b'"index":1' in body:  # a scanner's is the stream of one answer
            continue
        scanner = EventScanner(want_usage=True)
        pieces = b"".join(scanner.feed(body[i : i + 97]) for i in range(0, len(body), 97))
        scanner.close()
        once = EventScanner(want_usage=True)
        assert once.feed(body) == pieces, path
        assert b'"token_ids":[' not in pieces
        finals = [e for e in parsed(body) if isinstance(e, dict) and e.get("usage") and not e.get("choices")]
        if finals:
            counted += 1
            assert scanner.tokens == finals[0]["usage"]["completion_tokens"], path
            assert scanner.end is StreamEnd.DONE, path
        assert texts(pieces) == texts(body), path
    assert counted > 30


@pytest.mark.parametrize("want_ids", [False, True], ids=["no ids", "ids"])
def test_after_a_worker_that_sent_nothing_a_recorded_stream_is_unchanged(want_ids: bool) -> None:
    for path in capture_files("*/*.resp"):
        head, body = body_of(path)
        if b"text/event-stream" not in head:
            continue
        alone, second = (EventScanner(want_token_ids=want_ids, want_usage=True) for _ in range(2))
        assert second.feed(b"") == b""
        second.close()
        second.resume()
        assert second.feed(body) == alone.feed(body), path
        assert (second.close(), second.tokens, second.usage) == (alone.close(), alone.tokens, alone.usage), path


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_blank_lines_without_number_are_no_events(line_end: bytes) -> None:
    """So many events without a token would end the stream."""
    scanner, text = EventScanner(), event(completion("a", None), newline=line_end)
    out = scanner.feed(line_end * (MAX_IDLE_EVENTS + 1) + text + line_end * 5000)
    out += scanner.feed(line_end * 5001) + scanner.feed(text)
    assert scanner.end is None and out == event(completion("a", None)) * 2 and scanner.tokens == 2


IDLE = {
    "comments": b": ping\n\n",
    "no field": b"x\n\n",
    "no object": b"data: 1\n\n",
    "no choices": b"data: {}\n\n",
    "no tokens": event(chat({"role": "assistant"}, None)),
}


@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_too_many_events_without_a_token_are_malformed(idle: bytes) -> None:
    scanner = EventScanner()
    for before in (MAX_IDLE_EVENTS - 1, 2):  # together too many
        scanner.feed(idle * before + event(completion("a", [5])))
    assert scanner.end is None and scanner.tokens == 2
    scanner.feed(idle * (MAX_IDLE_EVENTS + 1))
    assert scanner.end is StreamEnd.MALFORMED and "bring no token" in scanner.fault


def test_an_event_with_too_many_lines_choices_or_fields_is_malformed() -> None:
    lines, choices, fields = EventScanner(), EventScanner(), EventScanner()
    lines.feed(b"data:\n" * (MAX_LINES + 1) + b"\n")
    assert lines.end is StreamEnd.MALFORMED and "lines" in lines.fault
    many = completion("a", [5])
    choices.feed(event(many | {"choices": many["choices"] * (MAX_CHOICES + 1)}))
    assert choices.end is StreamEnd.MALFORMED and "choices" in choices.fault and choices.tokens == 0
    fields.feed(event(completion("a", [5]) | {f"field{i}": i for i in range(MAX_FIELDS)}))
    assert fields.end is StreamEnd.MALFORMED and "fields" in fields.fault and fields.tokens == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"choices": {"0": {"text": "a"}}},
        {"choices": ["a"]},
        {"choices": [{"index": 0, "text": "a", "token_ids": "5"}]},
        {"choices": [{"index": 0, "text": ["a"], "token_ids": [5]}]},
        {"usage": {"prompt_tokens": 3, "completion_tokens": -1}},
        {"usage": [3]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10**12}},
    ],
    ids=str,
)
def test_an_event_that_no_engine_sends_ends_the_stream_and_is_not_passed_on(fields: dict[str, Any]) -> None:
    scanner = EventScanner(want_usage=True)
    sent = scanner.feed(event(completion("a", [5])))
    assert not scanner.feed(event(completion("b", [6]) | fields))
    assert scanner.end is StreamEnd.MALFORMED and "no part of an answer" in scanner.fault
    assert sent and scanner.tokens == 1 and scanner.usage is None


def test_an_event_with_too_many_values_is_malformed_and_one_with_the_ids_of_a_long_prompt_is_not() -> None:
    values, ids = EventScanner(), EventScanner()
    values.feed(event(completion("a", [5]))[:-3] + b',"more":[' + b"[]," * MAX_NODES + b"0]}\n\n")
    assert values.end is StreamEnd.MALFORMED and "arrays" in values.fault and values.tokens == 0
    ids.feed(event(completion("a", [5]))[:-3] + b',"prompt_token_ids":[' + b"1234567," * 2 * MAX_NODES + b"0]}\n\n")
    assert ids.end is None and len(ids.generated.prompt_ids or ()) == 2 * MAX_NODES + 1


def test_hidden_reasoning_is_counted_and_kept_for_a_resume_and_reaches_no_client() -> None:
    scanner = EventScanner(hide_reasoning=True)
    wire = [
        event(chat({"role": "assistant", "content": ""}, None)),
        event(chat({"reasoning": "hmm"}, [1])),
        event(chat({"reasoning": "secret"}, [2])),
        event(chat({"reasoning_content": "old"}, [3])),
        event(chat({"reasoning": " end", "content": "a"}, [4])),
        event(chat({"reasoning": " end", "content": "b"}, [5])),
        event(chat({"content": "c"}, [6])),
        event(chat({"content": "d"}, [7])),
    ]
    out = [scanner.feed(piece) for piece in wire]
    assert not any(out[1:4])
    assert [choice["choices"][0]["delta"] for choice in parsed(b"".join(out))] == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in "abcd"),
    ]
    assert scanner.tokens == 7 and scanner.generated.kept_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    cut = EventScanner(hide_reasoning=True)
    for piece in wire[:3]:
        cut.feed(piece)
    assert cut.cut().kinds == {"reasoning"} and cut.generated.kept_ids.tolist() == [1, 2]
    end = scanner.feed(event(chat({"reasoning": "x"}, [8], finish_reason="length")))
    assert parsed(end) == [chat({}, None, finish_reason="length")]
