"""What depends on when a worker's bytes come and when a client takes them: workers by script, not emulated."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.proxy.admission.decider import Answer
from balanceroute.proxy.app import RouterApp, create_app
from balanceroute.proxy.life.retries import MAX_FRUITLESS
from tests.integration.router import JUDGED_S, looked_on, served
from tests.plain_http import PLAIN
from tests.unit.proxy.servers import CHUNKED_HEAD, Script, chunked, plain, read_request, worker
from tests.waiting import PATIENCE_S, pace, until

pytestmark = pytest.mark.anyio
PROBED = {
    "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3},
    "kv_transfer_params": {"remote_block_ids": [1]},
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
METRICS = b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'


def event(ids: list[int], finish: str | None = None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return b"data: %s\n\n" % json.dumps({"id": "a", "created": 1, "choices": [choice]}).encode()


def streaming(tokens: int, interval_s: float, bodies: list[dict[str, Any]] | None = None, *, text: str = "x") -> Script:
    """A worker that tells the role at once and then a token per interval; as a prefiller it pins. Keeps `bodies`."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            if not head.startswith(b"POST /v1/"):
                writer.write(plain(METRICS))
                continue
            if bodies is not None:
                bodies.append(json.loads(body))
            if not json.loads(body).get("stream"):
                writer.write(plain(json.dumps(PROBED).encode()))
            else:
                writer.write(CHUNKED_HEAD + chunked(event([], role="assistant", content=""), last=False))
                for token in range(tokens):
                    await pace(interval_s)
                    writer.write(chunked(event([token], content=text), last=False))
                writer.write(chunked(event([], "length", content=""), b"data: [DONE]\n\n"))

    return script


@asynccontextmanager
async def routing(script: Script, **limits: Any) -> AsyncIterator[tuple[RouterApp, httpx.AsyncClient]]:
    """A router in front of one prefiller and one decoder that both run the script."""
    async with worker(script) as prefiller, worker(script) as decoder:
        tree = {
            "prefill": {"workers": [{"url": prefiller.url}]},
            "decode": {"workers": [{"url": decoder.url}], "max_num_seqs": 8},
            "predictor": {"kind": "none"},
            "limits": limits,
        }
        config = validate(tree)
        app = create_app(config, strict=True)
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, **PLAIN) as client:
            yield app, client


async def test_a_chat_may_run_longer_than_its_first_event_may_take_and_is_measured_from_its_first_token() -> None:
    limits = {"first_byte_timeout_s": {"decode": JUDGED_S}, "idle_timeout_s": 5.0}
    async with routing(streaming(20, JUDGED_S / 10), **limits) as (_, client):
        reply = await client.post("/v1/chat/completions", json=CHAT)
        assert reply.text.endswith("data: [DONE]\n\n") and reply.text.count('"x"') == 20
        metrics = (await client.get("/metrics")).text
        assert "balanceroute_request_ttft_seconds_count 1.0" in metrics
        assert "balanceroute_request_tpot_seconds_count 1.0" in metrics
        assert "balanceroute_generated_tokens_total 20.0" in metrics


async def test_a_slow_reader_is_limited_by_client_timeouts_not_by_worker_timeouts() -> None:
    long = "x" * 2**18
    limits = {"idle_timeout_s": JUDGED_S, "client_stall_timeout_s": 30.0}
    async with routing(streaming(40, 0.001, text=long), **limits) as (app, client):
        await client.get("/ready")
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=2**16)
        body = json.dumps(CHAT).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: any(leg.blocked_by_client for leg in app.services.legs))
        await looked_on(app.services, 2 * limits["idle_timeout_s"])
        answer = await reader.read(-1)
        writer.close()
        assert answer.count(b"x" * 2**18) == 40 and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert app.services.metrics.requests.value("finished") == 1


async def test_a_priority_beyond_its_bounds_is_clamped_for_the_router_and_reaches_the_engines_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies: list[dict[str, Any]] = []
    caplog.set_level("INFO")
    orders: dict[str, int] = {}
    async with routing(streaming(1, 0.0, bodies), priority={"min": -2, "max": 5}) as (app, client):
        ledger = app.services.ledger
        on_answer = ledger.on_answer

        def noting(request_id: str, answer: Answer) -> None:
            orders[request_id] = ledger.scheduler.snapshot.requests[request_id].priority
            on_answer(request_id, answer)

        ledger.on_answer = noting
        for asked in ({"priority": -100}, {"priority": 3}, {"priority": 100}, {}):
            assert (await client.post("/v1/chat/completions", json={**CHAT, **asked})).status_code == 200
    assert list(orders.values()) == [-2, 3, 5, 0]
    assert [body.get("priority") for body in bodies] == [-100, -100, 3, 3, 100, 100, None, None]
    lines = [vars(record) for record in caplog.records if record.message == "priority clamped"]
    assert [(line["asked"], line["priority"]) for line in lines] == [(-100, -2), (100, 5)]
    assert all(line["request"] for line in lines)


def scripted(
    probed: Callable[[dict[str, Any]], dict[str, Any]], streamed: Callable[[dict[str, Any]], Sequence[bytes]]
) -> Script:
    """A worker whose answers to probes, and whose events, are made from their bodies."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, content = await read_request(reader)
            if not head.startswith(b"POST /v1/"):
                writer.write(plain(METRICS))
                continue
            body = json.loads(content)
            if body.get("stream"):
                writer.write(CHUNKED_HEAD + chunked(*streamed(body)))
            else:
                writer.write(plain(json.dumps(probed(body)).encode()))

    return script


def failing(tokens: bytes, end: bytes, streams: list[dict[str, Any]]) -> Script:
    """A worker whose every stream has a role, these events and this end. Keeps their bodies."""

    def streamed(body: dict[str, Any]) -> Sequence[bytes]:
        streams.append(body)
        return event([], role="assistant", content=""), tokens, end

    return scripted(lambda _: PROBED, streamed)


ENGINE_ERROR = b'data: {"error": {"message": "grammar rejected", "code": 500}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("end", "tries", "code"),
    [(ENGINE_ERROR, 3, 500), (b"data: [DONE]\n\n", MAX_FRUITLESS, 502)],
    ids=["error", "given back"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_every_try_leaves_after_a_token_without_text_ends(
    end: bytes, tries: int, code: int, stream: bool
) -> None:
    """Such a token is generated again by the next try, so the answer does not grow."""
    streams: list[dict[str, Any]] = []
    got = b""
    async with routing(failing(event([7]), end, streams)) as (_, client):
        asked = {**CHAT, "max_tokens": 200, "stream": stream}
        with suppress(httpx.RemoteProtocolError):  # the unclean end after an error event
            async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
                assert reply.status_code == (200 if stream else code)
                async for chunk in reply.aiter_bytes():
                    got += chunk
        assert len(streams) == tries
        assert b'"code":%d' % code in got.replace(b" ", b"")


async def test_an_answer_that_starts_again_and_fails_alike_ends_with_the_engines_error_and_blames_no_worker() -> None:
    streams: list[dict[str, Any]] = []
    async with routing(failing(event([7], content="{") + event([8], content="}"), ENGINE_ERROR, streams)) as (
        app,
        client,
    ):
        asked = {**CHAT, "max_tokens": 200, "stream": False, "response_format": {"type": "json_object"}}
        reply = await client.post("/v1/chat/completions", json=asked)
        assert (reply.status_code, reply.json()["error"]["message"], len(streams)) == (500, "grammar rejected", 3)
        assert not any(worker.circuit.doubtful for worker in app.services.fleet)


def counting_reasoning(bodies: list[dict[str, Any]]) -> Script:
    """A worker that gives its first answer back after a token; usages tell that each token was reasoning."""

    def probed(body: dict[str, Any]) -> dict[str, Any]:
        return PROBED | {"usage": {"prompt_tokens": len(body["prompt"])}, "system_fingerprint": "fp"}

    def streamed(body: dict[str, Any]) -> Sequence[bytes]:
        bodies.append(body)
        choice = {"index": 0, "text": "x", "token_ids": [9], "prompt_token_ids": body["prompt"]}
        end = {"stop_reason": "recomputed"} if len(bodies) == 1 else {"finish_reason": "length"}
        usage = {"completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}}
        figures = {"metrics": {"mean_itl_ms": 1}, "system_fingerprint": "fp"}
        events = {"choices": [choice | end]}, {"choices": [], "usage": {"prompt_tokens": 3} | usage} | figures
        text = b"".join(b"data: %s\n\n" % json.dumps({"id": "a", "created": 1} | each).encode() for each in events)
        return text, b"data: [DONE]\n\n"

    return scripted(probed, streamed)


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_omits_reasoning_tokens_when_one_of_several_choices_was_resumed(
    stream: bool,
) -> None:
    bodies: list[dict[str, Any]] = []
    asked = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 99, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with routing(counting_reasoning(bodies)) as (_, client):
        for begun, expected in ((1, None), (3, {"reasoning_tokens": 2})):
            text = (await client.post("/v1/completions", json=asked | options)).text
            last = json.loads(text.split("data: ")[-2] if stream else text)
            assert last["usage"].get("completion_tokens_details") == expected, f"after {begun} decodes"
            assert last["system_fingerprint"] == "fp"
            assert "mean_itl_ms" not in text, "an engine's figures of one choice are none of all"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_scoring_stream_has_the_engines_fingerprint_for_any_number_of_choices(
    n: int,
) -> None:
    asked = {"prompt": [1, 2, 3], "n": n, "max_tokens": 0, "echo": True, "stream": True}
    async with routing(counting_reasoning([])) as (_, client):
        options = {"stream_options": {"include_usage": True}}
        text = (await client.post("/v1/completions", json=asked | options)).text
        assert json.loads(text.split("data: ")[-2])["system_fingerprint"] == "fp"


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_that_engines_always_send_reaches_a_client_that_did_not_request_it(n: int) -> None:
    bodies: list[dict[str, Any]] = []
    asked = {"prompt": [1, 2, 3], "n": n, "max_tokens": 99, "stream": True}
    async with routing(counting_reasoning(bodies)) as (_, client):
        for hidden in ({}, {"include_reasoning": False}):
            text = (await client.post("/v1/completions", json=asked | hidden)).text
            last = json.loads(text.split("data: ")[-2])
            assert (last["choices"] == []) is (not hidden), "the router asks for one itself where it gets no ids"
            assert text.endswith("data: [DONE]\n\n")


def thinking(gone_on: asyncio.Event, streams: list[dict[str, Any]]) -> Script:
    """As vLLM with a reasoning parser: it tells each token of its reasoning, or nothing until that is over."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, content = await read_request(reader)
            body = json.loads(content) if head.startswith(b"POST /v1/") else None
            if body is None:
                writer.write(plain(METRICS))
            elif not body.get("stream"):
                writer.write(plain(json.dumps(PROBED).encode()))
            else:
                streams.append(body)
                writer.write(CHUNKED_HEAD + chunked(event([], role="assistant", content=""), last=False))
                tokens = 0
                while not gone_on.is_set():
                    await pace(0.02)
                    tokens += 1
                    if body.get("include_reasoning", True):
                        writer.write(chunked(event([tokens], reasoning="secret"), last=False))
                usage = {"usage": {"prompt_tokens": 3, "completion_tokens": tokens + 1}}
                last = json.loads(event([7], "stop", content="answer")[6:]) | usage
                writer.write(chunked(b"data: %s\n\n" % json.dumps(last).encode(), b"data: [DONE]\n\n"))

    return script


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("beside", [{}, {"logprobs": True}], ids=["hidden by the router", "hidden by the engine"])
async def test_hidden_reasoning_may_take_longer_than_idle_timeout_s(stream: bool, beside: dict[str, Any]) -> None:
    limits = {"first_byte_timeout_s": {"decode": JUDGED_S}, "idle_timeout_s": JUDGED_S}
    gone_on = asyncio.Event()
    asked = {**CHAT, "stream": stream, "include_reasoning": False, "max_tokens": 9999} | beside
    streams: list[dict[str, Any]] = []
    async with routing(thinking(gone_on, streams), **limits) as (app, client):
        reply = asyncio.ensure_future(client.post("/v1/chat/completions", json=asked))
        await until(lambda: any(leg.reply is not None and leg.reply.status == 200 for leg in app.services.legs))
        await looked_on(app.services, 2 * JUDGED_S)
        gone_on.set()
        text = (await reply).text
        assert "answer" in text and "secret" not in text and "error" not in text
        assert len(streams) == 1, "no worker was given up"


@pytest.mark.parametrize("limit", [9, 99], ids=["whole", "assembled"])
@pytest.mark.parametrize("stop", ["recomputed", ["x", "recomputed"]])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_that_is_the_engines_marker_ends_an_answer_and_does_not_give_it_back(
    stream: bool, stop: Any, limit: int
) -> None:
    bodies: list[dict[str, Any]] = []
    choice = {"index": 0, "text": "so ", "token_ids": [7, 8], "finish_reason": "stop", "stop_reason": "recomputed"}
    answer = {"id": "a", "created": 1, "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}

    def probed(body: dict[str, Any]) -> dict[str, Any]:
        if body["max_tokens"] == 1:
            return PROBED
        bodies.append(body)
        return answer

    def streamed(body: dict[str, Any]) -> Sequence[bytes]:
        bodies.append(body)
        return b"data: %s\n\n" % json.dumps(answer).encode(), b"data: [DONE]\n\n"

    async with routing(scripted(probed, streamed)) as (_, client):
        asked = {"prompt": [1, 2, 3], "max_tokens": limit, "stop": stop, "stream": stream}
        text = (await client.post("/v1/completions", json=asked)).text
        got = json.loads(text.split("data: ")[1] if stream else text)["choices"][0]
        assert (got["text"], got["finish_reason"], got["stop_reason"]) == ("so ", "stop", "recomputed")
        assert len(bodies) == 1
