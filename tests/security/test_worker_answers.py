"""Workers that answer what no engine can mean: the client gets a 502 with the reason, and nothing of it stays.

Never a traceback, never a number that reaches the ledger, never more tries than a failure has.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.security.evil_worker import (
    Asked,
    Attacked,
    answered,
    attacked,
    events,
    probed,
    reply,
    token,
    well_decoded,
    well_prefilled,
)

pytestmark = pytest.mark.anyio
TRIES = 3  # retry.max_attempts
HUGE = int("9" * 400)
DEEP = b"[" * 400 + b"]" * 400
ABYSS = b"[" * 100_000 + b"]" * 100_000
Answer = Callable[[Asked], bytes]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Attacked]:
    async with attacked(retry={"max_attempts": 1}, health={"failure_threshold": 1}) as router:
        yield router


@pytest.fixture
async def router(shared: Attacked) -> AsyncIterator[Attacked]:
    """One router for all: what an attack leaves behind would show in the next."""
    shared.prefiller.asked.clear()
    shared.decoder.asked.clear()
    yield shared
    await shared.unharmed()


def with_usage(**changes: Any) -> Answer:
    return lambda asked: reply(probed(asked, usage={"prompt_tokens": 3, **changes}))


def spliced(answer: Callable[[Asked], dict[str, Any]], value: bytes) -> Answer:
    """The good answer with one more field, which `json` would not write."""
    return lambda asked: reply(reply_body(answer(asked))[:-1] + b',"more":' + value + b"}")


def reply_body(answer: dict[str, Any]) -> bytes:
    return reply(answer).partition(b"\r\n\r\n")[2]


def changed(**changes: Any) -> Answer:
    """A decoder's whole answer whose only choice is changed."""

    def answer(asked: Asked) -> bytes:
        whole = answered(asked)
        whole["choices"][0].update(changes)
        return reply(whole)

    return answer


def raw(data: bytes) -> Answer:
    return lambda asked: data


STATUSES: dict[str, Answer] = {
    "status 099": raw(b"HTTP/1.1 099 X\r\ncontent-length: 2\r\n\r\n{}"),
    "status 999": raw(b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}"),
    "status 600": raw(b"HTTP/1.1 600 X\r\ncontent-length: 2\r\n\r\n{}"),
    "status 000": raw(b"HTTP/1.1 000 X\r\ncontent-length: 2\r\n\r\n{}"),
    "status of four digits": raw(b"HTTP/1.1 2000 X\r\ncontent-length: 2\r\n\r\n{}"),
    "a flood of 1xx": raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
    "an upgrade": raw(b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"),
    "201 with a body": lambda asked: reply(well_body(asked), status="201 Created"),
    "204": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "206 with a body": lambda asked: reply(well_body(asked), status="206 Partial Content"),
    "a redirect": lambda asked: reply(b"", status="302 Found", headers=("location: http://169.254.169.254/",)),
    "304": raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "a head without end": raw(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2**20),
    "fields without end": raw(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}"),
    "length and chunks": raw(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "a length without bound": raw(b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 40 + b"\r\n\r\n{}"),
    "not HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "the preface of HTTP/2": raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": raw(b"<html>hello</html>"),
    "lines of LF alone": raw(b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}"),
    "a coding that is not chunked": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "a chunk of -5 bytes": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n"),
    "early hints without end": raw(b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" * 10_000),
}


def well_body(asked: Asked) -> bytes:
    return reply_body(answered(asked) if "kv_transfer_params" in asked.data and not _probe(asked) else probed(asked))


def _probe(asked: Asked) -> bool:
    return bool(asked.data["kv_transfer_params"].get("do_remote_decode"))


PROBES: dict[str, Answer] = {
    "prompt of 1e15 tokens": with_usage(prompt_tokens=10**15),
    "prompt of 1e300 tokens": with_usage(prompt_tokens=1e300),
    "prompt of -5 tokens": with_usage(prompt_tokens=-5),
    "prompt of half a token": with_usage(prompt_tokens=0.5),
    "prompt of true tokens": with_usage(prompt_tokens=True),
    "prompt of a text": with_usage(prompt_tokens="7"),
    "prompt of 400 digits": with_usage(prompt_tokens=HUGE),
    "cached tokens without bound": with_usage(prompt_tokens_details={"cached_tokens": 1e300}),
    "cached tokens that are an object": with_usage(prompt_tokens_details={"cached_tokens": {}}),
    "details that are a list": with_usage(prompt_tokens_details=[1]),
    "usage that is a list": lambda asked: reply(probed(asked, usage=[3])),
    "choices that are a text": lambda asked: reply(probed(asked, choices="abc")),
    "no choices": lambda asked: reply(probed(asked, choices=[])),
    "ids that are a text": lambda asked: reply(probed(asked, prompt_token_ids="abc")),
    "ids below zero": lambda asked: reply(probed(asked, prompt_token_ids=[-1])),
    "deep parameters": lambda asked: reply(
        reply_body(probed(asked, kv_transfer_params="DEEP")).replace(b'"DEEP"', b'{"a":' + DEEP + b"}")
    ),
    "an abyss": spliced(probed, ABYSS),
    "parameters of 20 MB": lambda asked: reply(probed(asked, kv_transfer_params={"x": "y" * 20_000_000})),
    "parameters that are a text": lambda asked: reply(probed(asked, kv_transfer_params="x")),
    "parameters that are a list": lambda asked: reply(probed(asked, kv_transfer_params=[1])),
    "not JSON": lambda asked: reply(b"<html>hello</html>", kind="text/html"),
    "a list": lambda asked: reply(b"[]"),
    "compressed": lambda asked: reply(b"\x1f\x8b\x08\x00", headers=("content-encoding: gzip",)),
    "trailers without end": raw(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 200_000
    ),
    "a trailer without end": raw(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\na: " + b"b" * 2**20
    ),
    "a chunk extension without end": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;" + b"b" * 2**20),
}
ANSWERS: dict[str, Answer] = {
    "answer of 1e15 tokens": lambda asked: reply(
        reply_body({**answered(asked), "usage": {"completion_tokens": 10**15}}).replace(b"[7, 8]", b"null")
    ),
    "answer of -5 tokens": lambda asked: reply(
        reply_body({**answered(asked), "usage": {"completion_tokens": -5}}).replace(b"[7, 8]", b"null")
    ),
    "reasoning tokens without bound": lambda asked: reply(
        answered(asked, usage={"completion_tokens_details": {"reasoning_tokens": 2**63}})
    ),
    "a finish reason that is an object": changed(finish_reason={"a": 1}),
    "a finish reason without end": changed(finish_reason="a" * 10_000),
    "a text that is an object": changed(text={"a": 1}),
    "a message that is a list": changed(message=["a"]),
    "ids that are a text": changed(token_ids="abc"),
    "ids that are no ids": changed(token_ids=[2**70]),
    "a choice that is a text": lambda asked: reply(answered(asked, choices=["abc"])),
    "deep": spliced(answered, DEEP),
    "an abyss": spliced(answered, ABYSS),
    "a web page": lambda asked: reply(b"<html>hello</html>", kind="text/html"),
}


@pytest.mark.parametrize("answer", [*STATUSES.values(), *PROBES.values()], ids=[*STATUSES, *PROBES])
async def test_an_invalid_prefiller_answer_is_a_502_with_its_reason(router: Attacked, answer: Answer) -> None:
    router.prefiller.answer = answer
    response = await router.complete()
    assert response.status_code == 502, response.text
    assert response.json()["error"]["message"].startswith("prefill worker: ")
    assert len(router.prefiller.asked) <= 2 and not router.decoder.asked
    assert await router.failures() > 0
    assert (await router.client.get("/state")).json()["waiting"] == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_too_deeply_nested_prompt_echo_is_a_502(router: Attacked, stream: bool) -> None:
    """The engine's reply goes to the client: what is read need not be what can be written."""
    router.prefiller.answer = lambda asked: reply(
        reply_body(probed(asked)).replace(b'"finish_reason"', b'"logprobs": {"tokens": ' + DEEP + b'}, "finish_reason"')
    )
    response = await router.complete(echo=True, max_tokens=0, stream=stream)
    assert response.status_code == 502, response.text
    assert response.json()["error"]["message"].startswith("prefill worker: ")


@pytest.mark.parametrize("answer", [*STATUSES.values(), *ANSWERS.values()], ids=[*STATUSES, *ANSWERS])
async def test_an_invalid_decode_worker_answer_is_a_502_with_its_reason(router: Attacked, answer: Answer) -> None:
    router.decoder.answer = answer
    response = await router.complete()
    assert response.status_code == 502, response.text
    assert response.json()["error"]["message"].startswith("decode worker: ")
    assert len(router.decoder.asked) <= 2


def stream_of(*changes: dict[str, Any], usage: Any = None) -> Answer:
    """A stream whose first event's choice is changed."""

    def answer(asked: Asked) -> bytes:
        first = token(asked, **changes[0]) if changes else token(asked)
        if usage is not None:
            first["usage"] = usage
        return events(first, token(asked, finish="length"))

    return answer


STREAMS: dict[str, Answer] = {
    "a web page": lambda asked: reply(b"<html>hello</html>", kind="text/html; charset=utf-8"),
    "a web page with the right type": lambda asked: reply(b"<html>hello</html>", kind="text/event-stream"),
    "events of the wrong type": lambda asked: events(token(asked), kind="text/plain"),
    "one JSON object": lambda asked: reply(answered(asked)),
    "nothing": lambda asked: reply(b"", kind="text/event-stream"),
    "comments without end": lambda asked: reply(b": hello\n\n" * 500_000, kind="text/event-stream"),
    "events that are not JSON": lambda asked: events(b"hello", b"hello", done=False),
    "usage of 1e15 tokens": stream_of(usage={"completion_tokens": 10**15}),
    "usage of 1e300 tokens": stream_of(usage={"completion_tokens": 1e300}),
    "usage of -5 tokens": stream_of(usage={"completion_tokens": -5}),
    "usage that is a text": stream_of(usage="many"),
    "choices that are a text": lambda asked: events({**token(asked), "choices": "abc"}),
    "a choice that is a text": lambda asked: events({**token(asked), "choices": ["abc"]}),
    "an index that is a text": stream_of({"index": "abc"}),
    "a delta that is a text": stream_of({"delta": "abc"}),
    "a text that is a list": stream_of({"text": ["abc"]}),
    "ids that are a text": stream_of({"token_ids": "abc"}),
    "a finish reason that is an object": stream_of({"finish_reason": {"a": 1}}),
}


@pytest.mark.parametrize("answer", [*STATUSES.values(), *STREAMS.values()], ids=[*STATUSES, *STREAMS])
async def test_an_invalid_stream_is_a_502_with_its_reason(router: Attacked, answer: Answer) -> None:
    router.decoder.answer = answer
    response = await router.complete(stream=True)
    assert response.status_code == 502, response.text
    assert response.json()["error"]["message"].startswith("decode worker: ")
    assert len(router.decoder.asked) == len(router.prefiller.asked) == 1


@pytest.mark.parametrize("name", ["a web page", "nothing", "usage of -5 tokens"])
async def test_a_bad_stream_is_retried_as_often_as_any_failure(name: str) -> None:
    async with attacked(decoder=STREAMS[name]) as router:
        assert (await router.complete(stream=True)).status_code == 502
        assert len(router.decoder.asked) == len(router.prefiller.asked) == TRIES


CALLS: dict[str, Any] = {
    "a function that is a text": [{"index": 0, "function": "abc"}],
    "a function that is a list": [{"index": 0, "function": ["abc"]}],
    "an index that is a text": [{"index": "abc", "function": {}}],
    "calls that are a text": "abc",
    "a call that is a text": ["abc"],
    "calls that are a number": 7,
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
async def test_tool_calls_that_cannot_be_put_together_are_a_502(router: Attacked, calls: Any) -> None:
    def answer(asked: Asked) -> bytes:
        return events(token(asked, delta={"tool_calls": calls}), token(asked, finish="tool_calls"))

    router.decoder.answer = answer
    response = await router.complete(chat=True, max_tokens=500)
    assert response.status_code == 502, response.text


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_is_too_deeply_nested_to_assemble_is_a_502(router: Attacked, n: int) -> None:
    def answer(asked: Asked) -> bytes:
        first = token(asked)
        first["choices"][0]["logprobs"] = {"content": ["DEEP"]}
        return events(reply_body(first).replace(b'"DEEP"', DEEP), token(asked, finish="length"))

    router.decoder.answer = answer
    assert (await router.complete(max_tokens=500, n=n)).status_code == 502


@pytest.mark.parametrize("wanted", ["9" * 400, "0" * 400 + "7", "-1", "1e9", "\u0663", "Wed, 21 Oct 2099 07:28:00 GMT"])
async def test_no_retry_after_of_a_worker_breaks_or_stops_the_router(wanted: str) -> None:
    def busy(asked: Asked) -> bytes:
        return f"HTTP/1.1 429 X\r\nretry-after: {wanted}\r\ncontent-length: 2\r\n\r\n{{}}".encode()

    async with attacked(prefiller=busy, queue={"deadline_s": 0.5}) as router:
        response = await router.complete()
        assert response.status_code == 503, response.text
        assert 1 <= int(response.headers["retry-after"]) <= 3600
        await router.sound()


BODIES = {
    "a web page": b"<html>",
    "half an object": b'{"error": {"message": ',
    "a list": b"[1]",
    "deep": b'{"error":' + DEEP + b"}",
    "an event inside": b'{"error":\r\n\r\ndata: {"choices":[]}\r\n\r\n{}}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_the_body_of_a_workers_error_is_an_openai_error_to_the_client(router: Attacked, body: bytes) -> None:
    router.prefiller.answer = lambda asked: reply(body, status="400 Bad Request")
    response = await router.complete()
    assert response.status_code == 400
    assert (
        response.json()["error"]["code"] == 400 and "prefill worker answered 400" in response.json()["error"]["message"]
    )


DENSE = b"[" + b"[]," * 2**23 + b"1]"  # 24 MiB


@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_an_answer_of_more_values_than_a_loop_may_read_at_once_is_a_502_and_asked_for_once(tier: str) -> None:
    """A client may ask for such a one, by logprobs of each token of its prompt."""
    async with attacked() as router:
        evil, well = (router.prefiller, probed) if tier == "prefill" else (router.decoder, answered)
        evil.answer = spliced(well, DENSE)
        response = await router.complete(prompt_logprobs=20)
        assert response.status_code == 502
        assert response.json()["error"]["message"].startswith(f"{tier} worker: its answer holds more than ")
        assert len(evil.asked) == 1 and not any(each.circuit.doubtful for each in router.app.services.fleet)
        await router.unharmed()


@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_client_whose_error_a_worker_explains_at_length_gets_it_at_once_and_harms_no_worker(tier: str) -> None:
    """vLLM before 0.32 quotes an invalid body in its 400, once for each element that is wrong."""
    explained = reply({"error": {"message": "why" * 2**20, "code": 400}}, status="400 Bad Request")
    async with attacked() as router:
        evil = router.prefiller if tier == "prefill" else router.decoder
        evil.answer = lambda asked: explained
        for stream in (False, True):
            response = await router.complete(stream=stream)
            assert response.status_code == 400 and len(response.content) < 1000
            assert response.json()["error"]["message"].startswith(f'{tier} worker answered 400: {{"error": {{"mess')
        assert router.app.services.metrics.retries.value(tier) == 0 == await router.failures()
        await router.unharmed()


@pytest.mark.parametrize(
    ("error", "events_told"),
    [
        (b'{"error":\t{"message": "m\\r\\rdata: x", "code": 500}}', [b'"choices"', b'{"error":{"message":"m']),
        (b'{"error":\r{"message": "m",\r\r"code": 500}}', [b'"choices"', b'{"error":{"message":"decode']),
    ],
    ids=["escaped", "whose lines end"],
)
async def test_a_client_sees_the_events_that_a_reader_of_the_worker_sees(
    error: bytes, events_told: list[bytes]
) -> None:
    def answer(asked: Asked) -> bytes:
        return events(token(asked), error, done=False)

    async with attacked(decoder=answer, retry={"resume_on_worker_loss": False}) as router:
        got = b""
        body = {"prompt": "hi", "max_tokens": 2, "stream": True}
        with suppress(httpx.RemoteProtocolError):  # it ends uncleanly, as it should
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                async for part in response.aiter_bytes():
                    got += part
        *seen, rest = got.split(b"\n\n")
        assert b"\r" not in got and not rest
        assert all(event.startswith(b"data: ") and event.count(b"\n") == 0 for event in seen)
        assert len(seen) == len(events_told)
        assert all(part in event for part, event in zip(events_told, seen, strict=True))


async def test_good_workers_pass_every_check_of_this_file() -> None:
    async with attacked(well_prefilled, well_decoded) as router:
        for chat in (False, True):
            for stream, max_tokens, n in ((False, 2, 1), (True, 2, 1), (False, 500, 1), (False, 2, 2)):
                response = await router.complete(chat=chat, stream=stream, max_tokens=max_tokens, n=n)
                assert response.status_code == 200, response.text
        assert await router.failures() == 0
        assert router.app.services.fleet["p0"].echoes_ids and router.app.services.fleet["d0"].echoes_ids


async def test_usage_with_image_details_is_passed_on_for_every_kind_of_answer() -> None:
    """As vLLM tells them with --enable-prompt-tokens-details."""
    details: dict[str, Any] = {"cached_tokens": 1, "multimodal_tokens": {"image": 2}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": details}

    def decoded(asked: Asked) -> bytes:
        if not asked.data.get("stream"):
            return reply(answered(asked, usage=usage))
        last = {**token(asked), "choices": [], "usage": usage}
        return events(token(asked), token(asked, finish="length"), last)

    async with attacked(lambda asked: reply(probed(asked, usage=usage)), decoded) as router:
        for chat in (False, True):
            for max_tokens in (2, 500):
                response = await router.complete(chat=chat, max_tokens=max_tokens)
                assert response.status_code == 200, response.text
                assert response.json()["usage"]["prompt_tokens_details"] == details
            response = await router.complete(chat=chat, max_tokens=2, n=2)
            assert response.json()["usage"]["prompt_tokens_details"] == details  # of one prompt
            for n in (1, 2):
                streamed = await router.complete(chat=chat, stream=True, n=n, stream_options={"include_usage": True})
                assert '"multimodal_tokens":{"image":2}' in streamed.text.replace(" ", "")
                assert streamed.text.endswith("data: [DONE]\n\n")
        assert await router.failures() == 0
