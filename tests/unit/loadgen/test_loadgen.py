"""The load generator against a scripted server on a loopback socket."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from balanceroute.errors import InputError
from balanceroute.loadgen import LoadOptions, LoadReport, run_load
from balanceroute.loadgen.client import Client, Reply
from balanceroute.loadgen.prompts import PromptText
from balanceroute.loadgen.run import first_model
from balanceroute.traces import Trace
from tests.unit.proxy.servers import CHUNKED_HEAD, chunked, plain, read_request, worker
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

Body = dict[str, object]
Answer = Callable[[Body, asyncio.StreamWriter], Awaitable[None]]
MODELS = b'{"data": [{"id": "tiny"}]}'


def a_trace(outputs: list[int], keys: list[str] | None = None) -> Trace:
    n = len(outputs)
    return Trace(np.arange(n) * 0.001, np.full(n, 20), np.array(outputs), np.array(keys or [""] * n, dtype=np.str_))


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": "x", "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": tokens}})


async def whole_answer(body: Body, writer: asyncio.StreamWriter, piece: int = 1 << 20) -> None:
    """As many tokens as asked for, in pieces of any size."""
    n = int(str(body["max_tokens"]))
    text = token() * (n - 1) + token("length") + usage(n) + event(b"[DONE]")
    writer.write(CHUNKED_HEAD)
    for start in range(0, len(text), piece):
        writer.write(chunked(text[start : start + piece], last=False))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def serving(answer: Answer, bodies: list[Body] | None = None, models: bytes = MODELS) -> AsyncIterator[str]:
    """A server on a free port; the URL to reach it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            head, raw = await read_request(reader)
            if head.startswith(b"GET /v1/models"):
                writer.write(plain(models))
                continue
            body = json.loads(raw)
            if bodies is not None:
                bodies.append(body)
            await answer(body, writer)

    async with worker(script) as running:
        yield running.url


async def loaded(trace: Trace, answer: Answer, bodies: list[Body] | None = None, **options: object) -> LoadReport:
    async with serving(answer, bodies) as url:
        return await run_load(trace, LoadOptions(url, **options))  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="no uvloop there")
def test_load_runs_on_uvloop() -> None:
    import uvloop

    async def run() -> LoadReport:
        async with serving(whole_answer) as url:
            return await run_load(a_trace([1, 5, 9]), LoadOptions(url))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run())
    assert (report.completed, report.errors) == (3, {})
    measured_ms = 1000 * np.array([report.duration_s, *(getattr(report.latency_s, q) for q in ("p50", "p99", "max"))])
    assert np.abs(measured_ms - measured_ms.round()).max() > 1e-5  # not counted in whole ones, as uvloop's clock does


async def test_complete_answers_are_counted_and_timed() -> None:
    bodies: list[Body] = []
    began_s = time.monotonic()
    report = await loaded(a_trace([1, 5, 9]), whole_answer, bodies)
    assert (report.requests, report.completed, report.errors) == (3, 3, {})
    assert 0 < report.ttft_s.max <= report.latency_s.max <= report.duration_s <= time.monotonic() - began_s
    assert report.late_s.n == 3 and report.late_s.max <= report.duration_s
    assert report.output_tokens == 15
    assert report.ttft_s.n == 3
    assert report.tpot_s.n == 2  # one token has no second one to measure to
    assert report.itl_s.n == 0 + 4 + 8
    assert sorted(int(str(body["max_tokens"])) for body in bodies) == [1, 5, 9]
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "tiny" for body in bodies)
    assert all(len(body["prompt"]) == 20 for body in bodies)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1, 7, 50, 4096])
async def test_events_are_counted_for_any_split_of_the_bytes(piece: int) -> None:
    report = await loaded(a_trace([6]), lambda body, writer: whole_answer(body, writer, piece))
    assert (report.completed, report.itl_s.n) == (1, 5)


@pytest.mark.parametrize("piece", [1, 7, 4096])
async def test_crlf_line_ends_and_comments_of_an_endpoint_are_accepted(piece: int) -> None:
    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        comment = b": keep-alive\n\n"
        text = comment + token() * 3 + comment + token("length") + usage(4) + event(b"[DONE]")
        text = text.replace(b"\n", b"\r\n")
        writer.write(CHUNKED_HEAD)
        for start in range(0, len(text), piece):
            writer.write(chunked(text[start : start + piece], last=False))
        writer.write(b"0\r\n\r\n")

    report = await loaded(a_trace([4]), answer)
    assert (report.completed, report.errors, report.itl_s.n) == (1, {}, 3)


async def answer_503(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}")


async def answer_404(body: Body, writer: asyncio.StreamWriter) -> None:
    error_body = b'{"error": {"message": "The model `x`\\n does not exist.", "type": "NotFoundError", "code": 404}}'
    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(error_body) + error_body)


async def answer_odd_events(body: Body, writer: asyncio.StreamWriter) -> None:
    odd: list[object] = [5, None, [], "error", {"choices": 5}, {"choices": [7]}, {"usage": 3}, {"usage": {"a": 1}}]
    nested = event(b"[" * 5000)
    events = token() * 4 + nested + b"".join(map(event, odd)) + usage(4) + event(b"[DONE]")
    writer.write(CHUNKED_HEAD + chunked(events))


async def answer_short(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD + chunked(token() + token("stop") + usage(2) + event(b"[DONE]")))


async def answer_without_end(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD + chunked(token() * 4))


async def answer_without_finish(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD + chunked(token() * 4 + usage(4) + event(b"[DONE]")))


async def answer_error_event(body: Body, writer: asyncio.StreamWriter) -> None:
    error = event({"error": {"message": "gone", "type": "upstream_error"}})
    writer.write(CHUNKED_HEAD + chunked(token() + error))


async def answer_cut(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED_HEAD + chunked(token(), last=False))
    await writer.drain()
    writer.close()


async def answer_nonsense(body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\r\n\r\n")


async def answer_never(body: Body, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0)


async def test_an_endpoint_that_needs_a_key_is_reported_with_both_ways_to_give_one() -> None:
    with pytest.raises(InputError, match=r"no model list \(status 401: no key\); set --api-key or OPENAI_API_KEY"):
        await first_model(Refusing("http://127.0.0.1:1"))


class Refusing(Client):
    """An endpoint that wants a key."""

    async def get(self, path: str) -> Reply:
        reply = Reply()
        reply.status, reply.tail = 401, b'{"error": {"message": "no key"}}'
        return reply


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answer_503, "status 503"),
        (answer_404, "status 404: The model `x` does not exist."),
        (answer_odd_events, "no finish reason"),
        (answer_short, "too few tokens"),
        (answer_without_end, "no end marker"),
        (answer_without_finish, "no finish reason"),
        (answer_error_event, "error event: upstream_error: gone"),
        (answer_cut, "connection closed before the end of the answer"),
        (answer_nonsense, "not HTTP"),
        (answer_never, "timed out"),
    ],
)
async def test_an_invalid_field_of_an_answer_is_named(answer: Answer, reason: str) -> None:
    report = await loaded(a_trace([4]), answer, timeout_s=0.3 if answer is answer_never else PATIENCE_S)
    assert report.completed == 0
    assert [kind for kind in report.errors if kind.startswith(reason)], report.errors


async def test_tokens_before_an_error_event_are_counted_and_the_event_is_none() -> None:
    report = await loaded(a_trace([4]), answer_error_event)
    assert report.output_tokens == 1


async def test_errors_of_one_kind_are_counted_together_under_the_first_message() -> None:
    number = 0

    async def refuse(body: Body, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        error_body = b'{"detail": "request %d"}' % number
        writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n" % len(error_body) + error_body)

    report = await loaded(a_trace([4] * 3), refuse)
    assert list(report.errors.values()) == [3] and next(iter(report.errors)).startswith("status 400: request ")


async def test_the_first_model_of_a_long_list_is_asked_for() -> None:
    listed = [{"id": f"model {number}", "object": "model"} for number in range(1000)]
    models, asked = json.dumps({"data": listed}).encode(), list[Body]()
    async with serving(whole_answer, asked, models) as url:
        report = await run_load(a_trace([3]), LoadOptions(url))
    assert report.completed == 1
    assert asked[0]["model"] == "model 0"


async def test_a_connection_is_used_again_and_one_that_the_server_had_closed_is_replaced() -> None:
    requests: list[int] = []  # of each connection

    async def serve_two(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(0)
        while not writer.is_closing():
            await read_request(reader)
            requests[-1] += 1
            if requests[-1] > 2:
                writer.close()
            else:
                writer.write(plain(MODELS))

    async with worker(serve_two) as running:
        client = Client(running.url)
        for _ in range(4):
            assert (await client.get("/v1/models")).status == 200
        client.close()
    assert requests == [3, 2]


async def test_the_time_scale_stretches_the_arrivals() -> None:
    report = await loaded(a_trace([1] * 5), whole_answer, time_scale=20.0)
    assert report.duration_s >= 0.08


async def test_progress_is_reported_until_every_request_has_ended() -> None:
    progress: list[tuple[int, int]] = []
    async with serving(whole_answer) as url:
        await run_load(a_trace([1, 1]), LoadOptions(url), lambda sent, ended: progress.append((sent, ended)))
    assert progress[-1] == (2, 2)


async def test_a_run_that_is_stopped_reports_what_was_sent_and_names_what_was_cut_off() -> None:
    stop = asyncio.Event()

    def on_progress(sent: int, ended: int) -> None:
        if ended == 3:
            stop.set()

    async with serving(whole_answer) as url:
        trace = replace(a_trace([1, 1, 1, 1, 1]), arrival_s=np.array([0.0, 0.0, 0.0, 1e6, 2e6]))
        report = await run_load(trace, LoadOptions(url), on_progress, stop)
    assert (report.requests, report.completed, report.errors) == (3, 3, {})


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:80", "ftp://x", "http://", "http://x:notaport", "http://[::1", "http://\u00e9"),
        *("http://no..name", f"http://{'x' * 64}.name"),
    ],
)
async def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="is not a URL"):
        await run_load(a_trace([1]), LoadOptions(url))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://me:secret@h:1", "leave out user and password"),
        ("http://h:1?tenant=a", "leave out the query, it would not be sent"),
        ("http://h:1/sub#there", "leave out the fragment, it would not be sent"),
    ],
    ids=["a password", "a query", "a fragment"],
)
async def test_url_parts_that_no_request_carries_are_refused_without_showing_a_password(url: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        await run_load(a_trace([1]), LoadOptions(url))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://[::1]:80", "[::1]:80"), ("https://h/sub", "h")],
    ids=["IPv6", "of a path"],
)
async def test_the_host_header_is_that_of_the_url(url: str, host: str) -> None:
    assert f"Host: {host}\r\n" in Client(url).head


@pytest.mark.parametrize("key", ["", "two words", "two\nlines", "\u00e9"])
async def test_a_key_that_fits_into_no_header_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="api key: accepted are printable ASCII characters"):
        await run_load(a_trace([1]), LoadOptions("http://127.0.0.1:1", api_key=key))


async def test_an_endpoint_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="cannot connect"):
        await run_load(a_trace([1]), LoadOptions("http://127.0.0.1:1"))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 5000, 300_000])
def test_prompts_have_exactly_the_wanted_number_of_three_digit_ids(tokens: int) -> None:
    ids = json.loads(PromptText().prompt("k1", tokens))
    assert len(ids) == tokens
    assert 100 <= min(ids) <= max(ids) <= 999


def test_equal_keys_give_equal_prompts_and_other_keys_share_no_beginning() -> None:
    text = PromptText(seed=3)
    assert text.prompt("a", 100) == PromptText(seed=3).prompt("a", 100)
    beginnings = {text.prompt(f"k{i}", 8) for i in range(1000)}
    assert len(beginnings) == 1000
    assert PromptText(seed=4).prompt("a", 100) != text.prompt("a", 100)
