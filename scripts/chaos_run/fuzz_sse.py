"""Mutated events into every parser of the wire; none may raise what it does not promise.

    scripts/fuzz_sse [--inputs N] [--seed N] [--processes N] [--seconds N]

An input is a stream of one to six real events, as vLLM sends them, damaged by one to four mutations (bytes split off,
doubled, cut, flipped, inserted, swapped, events spliced into each other) and cut into reads at random places. It goes

* through an `EventScanner` of random settings, then as a second segment of the same answer: nothing may raise; what it
  gives goes through an `AnswerAssembler`: only BadUpstreamReply may come out;
* as a client's body through `client_request.parse` (and every body built from it): only InvalidRequest may come out;
* as a prefiller's and a decoder's reply through their readers: only BadUpstreamReply may come out.

Reproduce a failure with its seed: `--seed S --inputs 1 --processes 1`.
"""

import random
import traceback
from typing import Any, Final

import orjson

from balanceroute.errors import BadUpstreamReply, InvalidRequest
from balanceroute.proxy.wire.answer_identity import Part
from balanceroute.proxy.wire.answers import AnswerAssembler, correct_answer
from balanceroute.proxy.wire.client_request import ClientRequest, Endpoint, parse
from balanceroute.proxy.wire.derived_requests import split
from balanceroute.proxy.wire.payloads import decode_body, drain_body, probe_body
from balanceroute.proxy.wire.probe_reply import parse_probe_reply
from balanceroute.proxy.wire.sse import EventScanner
from scripts.chaos_run.fuzzing import Batch, Mutation, cut, double, drop, feed, flip, inserting, place, reads

SMALL_EVENT_LIMIT: Final = 400  # bytes, so that oversized events are met as well

_PARAMS: Final = b'{"remote_block_ids":[[1,2]],"remote_engine_id":"e"}'


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _completion(text: str, ids: list[int] | None, **choice: Any) -> dict[str, Any]:
    plain = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    plain |= {"prompt_token_ids": None, "token_ids": ids}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [plain | choice]}


def _chat(delta: dict[str, Any], ids: list[int] | None, **choice: Any) -> dict[str, Any]:
    plain = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": ids}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [plain | choice],
    }


_USAGE: Final = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
_CALL: Final = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
EVENTS: Final[tuple[bytes, ...]] = (
    _event(_completion(" w19942", [19942])),
    _event(_completion("", [198])),
    _event(_completion('say "token_ids":[1] \\', [1, 2, 3])),
    _event(_completion("à", [5], prompt_token_ids=[1, 2, 3, 4])),
    _event(_completion("x", [5], logprobs={"tokens": ["x"], "token_logprobs": [-0.5]})),
    _event(_completion("", [], finish_reason="stop", stop_reason="recomputed")),
    _event(_completion("end", [2], finish_reason="length")),
    _event(_completion("x", [5]) | {"usage": _USAGE}),
    _event(_chat({"role": "assistant", "content": ""}, None) | {"prompt_token_ids": [1, 2]}),
    _event(_chat({"content": " w31000"}, [31000])),
    _event(_chat({"reasoning": "hm\n"}, [7])),
    _event(_chat({}, [8])),
    _event(_chat({"tool_calls": [_CALL]}, [9])),
    _event(_chat({"content": ""}, [], finish_reason="tool_calls", stop_reason="recomputed")),
    _event(_chat({"content": "."}, [10], finish_reason="stop", stop_reason=None)),
    _event({"id": "cmpl-1", "object": "text_completion", "created": 7, "choices": [], "usage": _USAGE}),
    _event({"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}}),
    b"data: [DONE]\n\n",
    b": ping\n\n",
    b"event: note\r\ndata: 1\r\ndata: 2\r\n\r\n",
)
_WHOLE: Final[tuple[bytes, ...]] = (
    orjson.dumps(
        _completion("a", [1, 2], finish_reason="length", prompt_token_ids=[5])
        | {"usage": _USAGE, "kv_transfer_params": {"remote_block_ids": [[1]]}}
    ),
    orjson.dumps(
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}
        | {"usage": _USAGE | {"prompt_tokens_details": {"cached_tokens": 2}}, "prompt_token_ids": [1, 2]}
    ),
)
_BODIES: Final[tuple[bytes, ...]] = (
    b'{"prompt": "hello", "max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}}',
    b'{"prompt": [1, 2, 3], "n": 2, "seed": 4, "min_tokens": 1, "kv_transfer_params": {"a": 1}}',
    b'{"prompt": ["a", "b"], "priority": -1, "vllm_xargs": {"kv_transfer_params": 1}, "request_id": "x"}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\u00e0"}]}], "max_completion_tokens": 9}',
    b'{"messages": [{"role": "user", "content": "a"}], "include_reasoning": false, "stream": true, "tools": []}',
)
_PIECES: Final[tuple[bytes, ...]] = (
    *(b"\n", b"\r", b"\n\n", b"\r\n\r\n", b"\x00", b"\xff", b"\xc3", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":"),
    *(b"data:", b"data: ", b"[DONE]", b"null", b"-1", b"1e999", b"18446744073709551616", b"true", b'""', b"[" * 3000),
    *(b'"token_ids":[', b'"choices":[]', b'"choices":', b'"usage":{}', b'"error":', b'"finish_reason":"stop"'),
    *(b'"prompt":', b'"stream":', b'"n":', b'"max_tokens":', b"\xf0\x9f\x98\x80", b"\\ud800", b"\\u0000"),
)


def mutated(draw: random.Random, data: bytes) -> bytes:
    """`data` with one to four damages."""
    for _ in range(draw.randint(1, 4)):
        data = draw.choice(_MUTATIONS)(draw, data)
    return data


def _splice(draw: random.Random, data: bytes) -> bytes:
    other = draw.choice(EVENTS)
    return data[: place(draw, data)] + other[place(draw, other) :]


def _swap_value(draw: random.Random, data: bytes) -> bytes:
    """Another value behind a colon: still JSON, of a type that nobody expects."""
    colons = [at for at, byte in enumerate(data) if byte == 0x3A]
    if not colons:
        return data
    start = draw.choice(colons) + 1
    stop = min((at for at in (data.find(b",", start), data.find(b"}", start)) if at >= 0), default=len(data))
    value = draw.choice([b"null", b"0", b"-3", b"1.5", b'"x"', b"[]", b"{}", b"[null]", b"[{}]", b"true", b"[-1]"])
    return data[:start] + value + data[stop:]


_MUTATIONS: Final[tuple[Mutation, ...]] = (
    *(cut, drop, flip, inserting(_PIECES), double, _splice, _swap_value, _swap_value),
)


def one_input(seed: int) -> None:
    """One input, through all parsers. Raises whatever they should not."""
    draw = random.Random(seed)
    kind = draw.random()
    if kind < 0.7:
        _through_scanner(draw)
    elif kind < 0.85:
        _as_client_body(draw, mutated(draw, draw.choice(_BODIES)))
    else:
        _as_worker_reply(mutated(draw, draw.choice(_WHOLE)))


_REQUESTS: Final[tuple[ClientRequest, ...]] = (
    parse("completions", b'{"prompt": "a", "return_token_ids": true}'),
    parse("chat", b'{"messages": [{"role": "user", "content": "a"}]}'),
)


def _through_scanner(draw: random.Random) -> None:
    scanner = EventScanner(
        want_token_ids=draw.random() < 0.5,
        want_usage=draw.random() < 0.5,
        want_continuous_usage=draw.random() < 0.5,
        prompt_tokens=draw.choice([None, 3]),
        prompt_details=draw.choice([None, {"cached_tokens": 2}]),
        part=Part(index=draw.choice([None, 1]), closing_events=draw.random() < 0.8),
        max_event_bytes=draw.choice([SMALL_EVENT_LIMIT, 1 << 25]),
    )
    request = draw.choice(_REQUESTS)
    assembler: AnswerAssembler | None = AnswerAssembler(request)
    for _ in range(draw.choice([1, 1, 2, 3])):
        stream = b"".join(draw.choices(EVENTS, k=draw.randint(1, 6)))
        for data in reads(draw, mutated(draw, stream) if draw.random() < 0.95 else stream):
            relayed = scanner.feed(data)
            if assembler is not None:
                try:
                    assembler.feed(relayed)
                except BadUpstreamReply:
                    assembler = None  # the request ends here with an error; the scanner has to bear the rest
        scanner.close()
        if assembler is not None:
            orjson.loads(assembler.answer(scanner))
        scanner.resume()


def _as_client_body(draw: random.Random, body: bytes) -> None:
    endpoint: Endpoint = draw.choice(["completions", "chat"])
    try:
        request = parse(endpoint, body)
        if request.n * request.prompts > 1000:
            return  # the router bounds the number of choices itself
        parts = split(request)
    except InvalidRequest:
        return
    for part in parts:
        for built in (probe_body(part), decode_body(part, _PARAMS), drain_body(part, _PARAMS)):
            orjson.loads(built)


def _as_worker_reply(body: bytes) -> None:
    for read in (
        lambda: parse_probe_reply(body, worker="w"),
        lambda: correct_answer(_REQUESTS[0], body, worker="w"),
        lambda: correct_answer(_REQUESTS[1], body, worker="w", prompt_details={"cached_tokens": 1}),
    ):
        try:
            read()
        except BadUpstreamReply:
            continue


def run(arguments: tuple[int, int]) -> Batch:
    """So many inputs from a seed on."""
    first_seed, count = arguments
    failures = []
    for seed in range(first_seed, first_seed + count):
        try:
            one_input(seed)
        except Exception:  # that there is none is what is being tested
            failures.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return Batch(count, failures)


if __name__ == "__main__":
    feed("fuzz_sse", __doc__, run, seconds=1800.0)
