"""What goes wrong at workers, and what the client sees of it: its whole answer, or a proper error."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape, requests
from balanceroute.emulator.connectors import Connector
from balanceroute.emulator.requests import chat_prompt
from balanceroute.engine.tokens import continuation, decode
from balanceroute.proxy.wire.client_request import parse
from balanceroute.proxy.workers.circuit import CircuitState
from balanceroute.proxy.workers.drainer import Drain
from tests.integration.router import JUDGED_S, Router, looked_on, pushed_back, running
from tests.integration.test_proxy_answers import PROMPT, chat, completion, events, texts
from tests.waiting import until

pytestmark = pytest.mark.anyio

PAIR = ClusterShape(prefillers=2, decoders=2, max_num_seqs=8, time_scale=0.02)
FOUR = ClusterShape(prefillers=4, decoders=4, max_num_seqs=8, time_scale=0.02)
QUICK = {"retry": {"base_delay_s": 0.001, "max_delay_s": 0.01}}


async def inject_everywhere(router: Router, role: str, kind: str, **values: Any) -> None:
    for name in router.cluster.workers:
        if name.startswith(role):
            await router.cluster.inject(name, kind, **values)


def assert_one_stream(parts: list[Any], tokens: int) -> None:
    """One answer: one id, one created, at most one role, one finish, one [DONE], the right tokens."""
    events = [part for part in parts if isinstance(part, dict)]
    assert parts.count("[DONE]") == 1 and parts[-1] == "[DONE]"
    assert len({part["id"] for part in events}) == 1 and len({part["created"] for part in events}) == 1
    choices = [choice for part in events for choice in part["choices"]]
    assert sum("role" in choice.get("delta", {}) for choice in choices) <= 1
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert finishes == ["length"]
    usage = [part["usage"] for part in events if part.get("usage")]
    assert [u["completion_tokens"] for u in usage] == [tokens]


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_comes_even_when_the_worker_closes_between_the_last_token_and_its_usage(stream: bool) -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "close", after_events=80)
        body = completion(max_tokens=80, stream=stream)
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = await router.client.post("/v1/completions", json=body)
        usage = events(reply.text)[-1]["usage"] if stream else reply.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 80)
        await router.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["stall", "error_event", "half_event", "reset"])
async def test_a_finished_answer_is_complete_whatever_its_worker_sends_before_done(fault: str, stream: bool) -> None:
    idle_s = 1.5 if fault == "stall" else 30.0  # the answer itself must not be late, however busy the machine
    async with running(PAIR, limits={"idle_timeout_s": idle_s}, **QUICK) as router:
        await inject_everywhere(router, "d", fault, after_events=80)  # in place of the usage
        body = completion(max_tokens=80, stream=stream)
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = await router.client.post("/v1/completions", json=body)
        parts = [part for part in events(reply.text) if part != "[DONE]"] if stream else [reply.json()]
        finishes = [c["finish_reason"] for part in parts for c in part["choices"] if c["finish_reason"]]
        assert finishes == ["length"]
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 80))
        assert parts[-1]["usage"]["completion_tokens"] == 80
        assert router.cluster.prefill[0].counters["requests"] + router.cluster.prefill[1].counters["requests"] == 1
        await router.settled()


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("fault", ["recompute", "no_finish", "reset", "close", "half_event", "error_event"])
async def test_a_stream_that_breaks_anywhere_resumes_token_by_token(fault: str, after: int) -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", fault, after_events=after)
        body = completion(max_tokens=24, stream=True, stream_options={"include_usage": True})
        reply = await router.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        parts = events(reply.text)
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 24))
        assert_one_stream(parts, 24)
        assert parts[-2]["usage"]["prompt_tokens"] == len(PROMPT)
        assert "recomputed" not in reply.text
        await router.settled()
        assert router.cluster.violations() == {}


@pytest.mark.parametrize("fault", ["recompute", "no_finish", "reset", "error_event"])
async def test_an_unstreamed_answer_survives_the_same_faults(fault: str) -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", fault, after_events=5)
        answer = (await router.client.post("/v1/completions", json=completion(max_tokens=100))).json()
        assert answer["choices"][0]["text"] == decode(continuation(PROMPT, 100))
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(PROMPT), "completion_tokens": 100}
        await router.settled()


async def test_a_chat_that_is_recomputed_keeps_its_role_and_its_tokens() -> None:
    async with running(PAIR, **QUICK) as router:
        whole = (await router.client.post("/v1/chat/completions", json=chat())).json()
        await inject_everywhere(router, "d", "recompute", after_events=4)
        body = chat(stream=True, stream_options={"include_usage": True})
        parts = events((await router.client.post("/v1/chat/completions", json=body)).text)
        assert "".join(texts(parts)) == whole["choices"][0]["message"]["content"]
        assert_one_stream(parts, 12)
        await router.settled()


async def test_an_unstreamed_answer_that_is_recomputed_is_requested_again() -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "recompute", after_events=4)
        answer = (await router.client.post("/v1/completions", json=completion(echo=False))).json()
        assert answer["choices"][0]["text"] == decode(continuation(PROMPT, 12))


async def test_many_recomputes_of_one_request_end_in_one_answer() -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "recompute", after_events=3, count=3)
        body = completion(max_tokens=40, stream=True, stream_options={"include_usage": True})
        parts = events((await router.client.post("/v1/completions", json=body)).text)
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 40))
        assert_one_stream(parts, 40)
        await router.settled()
        assert router.cluster.violations() == {}


@pytest.mark.parametrize(
    ("role", "fault", "policy"),
    [
        ("p", "status", "br_0"),
        ("p", "reset_before_reply", "br_0"),
        ("d", "status", "br_0"),
        ("d", "reset_before_reply", "br_0"),
        ("d", "status", "join_shortest_queue"),
        ("d", "reset_before_reply", "round_robin"),
        ("d", "status", "least_kv"),
    ],
)
async def test_one_bad_worker_among_several_fails_no_request(role: str, fault: str, policy: str) -> None:
    async with running(FOUR, routing={"policy": policy}) as router:
        await router.cluster.inject(f"{role}1", fault, status=503, count=None)
        for _ in range(10):
            replies = await asyncio.gather(
                *(router.client.post("/v1/completions", json=completion(stream=n % 2 == 0)) for n in range(4))
            )
            assert [reply.status_code for reply in replies] == [200] * 4
        await router.settled()


@pytest.mark.parametrize(
    ("role", "fault", "values", "status"),
    [
        ("p", "status", {"status": 500}, 500),
        ("p", "reset_before_reply", {}, 502),
        ("p", "null_params", {}, 502),
        ("d", "status", {"status": 500}, 500),
        ("d", "reset_before_reply", {}, 502),
        ("d", "error_event", {"after_events": 0}, 500),
        ("d", "reset", {"after_events": 0}, 502),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_when_every_worker_fails_before_the_first_byte_the_client_gets_a_status(
    role: str, fault: str, values: dict[str, Any], status: int, stream: bool
) -> None:
    async with running(FOUR, **QUICK) as router:
        await inject_everywhere(router, role, fault, count=None, **values)
        body = completion(stream=stream, max_tokens=100)
        reply = await router.client.post("/v1/completions", json=body)
        assert reply.status_code == status, reply.text
        assert set(reply.json()["error"]) >= {"message", "type", "code"}
        await inject_everywhere(router, role, "clear")
        await router.settled()


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("role", ["p", "d"])
async def test_requests_wait_while_every_worker_pushes_back_and_none_fails(role: str, status: int) -> None:
    async with running(PAIR, retry={**QUICK["retry"], "max_attempts": 1}) as router:
        await inject_everywhere(router, role, "status", status=status, count=None)
        bodies = [completion(max_tokens=24, stream=n % 2 == 0) for n in range(12)]
        asks = asyncio.gather(*(router.client.post("/v1/completions", json=body) for body in bodies))
        await pushed_back(router, {"p": "prefill", "d": "decode"}[role])
        assert not asks.done()
        await inject_everywhere(router, role, "clear")
        assert [reply.status_code for reply in await asks] == [200] * 12
        await router.settled()
        metrics = router.app.services.metrics
        assert metrics.drains.value("orphaned") == metrics.orphaned_kv == 0
        assert router.cluster.violations() == {}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["p", "d"])
async def test_endless_back_pressure_of_workers_ends_with_503_at_the_queue_deadline(role: str, stream: bool) -> None:
    async with running(PAIR, queue={"deadline_s": 1.0}, **QUICK) as router:
        await inject_everywhere(router, role, "status", status=429, count=None)
        began_s = asyncio.get_running_loop().time()
        reply = await router.client.post("/v1/completions", json=completion(stream=stream))
        assert asyncio.get_running_loop().time() - began_s >= 1.0
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == 503
        assert router.app.services.metrics.requests.value("expired") == 1
        await inject_everywhere(router, role, "clear")
        await router.settled()


async def test_an_answer_that_has_begun_may_wait_beyond_the_queue_deadline() -> None:
    deadline_s = 2.0  # of the wait for its first token, however busy the machine
    async with running(PAIR, queue={"deadline_s": deadline_s}, **QUICK) as router:
        body = completion(max_tokens=300, stream=True, stream_options={"include_usage": True})
        async with router.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            first = await anext(lines)
            await inject_everywhere(router, "d", "status", status=503, count=None)
            await inject_everywhere(router, "d", "recompute_now")
            await pushed_back(router, "decode")
            await looked_on(router.app.services, deadline_s)
            await inject_everywhere(router, "d", "clear")
            parts = events("\n".join([first, *[line async for line in lines]]).rstrip("\n") + "\n\n")
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 300))
        assert_one_stream(parts, 300)
        await router.settled()


async def test_null_params_are_retried_once_and_never_reach_a_decode_worker() -> None:
    async with running(PAIR, **QUICK) as router:
        await router.cluster.inject("p0", "null_params", count=None)
        replies = [await router.client.post("/v1/completions", json=completion()) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200] * 4
        assert router.cluster.violations() == {}


async def test_a_clients_error_is_neither_retried_nor_counted_against_the_worker() -> None:
    async with running(PAIR) as router:
        for _ in range(10):
            reply = await router.client.post("/v1/completions", json=completion(model="nope"))
            assert reply.status_code == 404
        assert all(worker.circuit.failures == 0 for worker in router.app.services.fleet)
        assert router.app.services.metrics.retries.value("prefill") == 0


async def test_a_prefiller_with_another_model_than_the_others_gives_no_client_a_404() -> None:
    async with running(PAIR, **QUICK) as router:
        for _ in range(4):
            await router.client.post("/v1/completions", json=completion())
        await router.cluster.inject("p1", "status", status=404, count=None)
        replies = [await router.client.post("/v1/completions", json=completion()) for _ in range(12)]
        assert [reply.status_code for reply in replies] == [200] * 12
        known, other = router.app.services.fleet.of(Role.PREFILL)
        assert other.circuit.doubtful, "it was asked, and rests"
        reply = await router.client.post("/v1/completions", json=completion(model="nope"))
        assert reply.status_code == 404 and not known.circuit.doubtful
        await router.settled()


@pytest.mark.parametrize(
    "body",
    [
        completion(logprobs=1000),
        completion(logprobs=1000, stream=True),
        completion(logprobs=1000, prompt_logprobs=1),
        chat(logprobs=True, top_logprobs=21),
        chat(top_logprobs=2),
    ],
    ids=["too many", "too many, streamed", "too many, and the prompt's", "too many in a chat", "without logprobs"],
)
async def test_logprobs_that_engines_refuse_are_refused_before_a_prompt_is_computed(body: dict[str, Any]) -> None:
    async with running(PAIR) as router:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = await router.client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400) and "logprobs" in reply.text
        await router.settled()
        assert router.app.services.metrics.drains.value("drained") == 0, "its KV was pinned"


async def test_without_resume_the_client_gets_an_error_event_and_an_unclean_end() -> None:
    async with running(PAIR, retry={"resume_on_worker_loss": False}) as router:
        await inject_everywhere(router, "d", "reset", after_events=4)
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with router.client.stream("POST", "/v1/completions", json=completion(stream=True)) as reply:
                assert reply.status_code == 200
                async for chunk in reply.aiter_bytes():
                    got += chunk
        parts = events(got.decode())
        assert "[DONE]" not in parts
        assert parts[-1]["error"]["code"] == 502
        await router.settled()


async def test_streams_of_a_killed_engine_resume_on_the_others() -> None:
    async with running(PAIR, **QUICK) as router:
        tokens = 150  # each takes a turn of the loop at least: none ends before the last one has begun
        body = completion(max_tokens=tokens, stream=True, stream_options={"include_usage": True})
        asks = [asyncio.ensure_future(router.client.post("/v1/completions", json=body)) for _ in range(8)]
        services = router.app.services
        await until(lambda: sum(w.running for w in services.ledger.scheduler.snapshot.workers) == 8)
        await router.cluster.inject("d0", "stop")
        for reply in await asyncio.gather(*asks):
            parts = events(reply.text)
            assert "".join(texts(parts)) == decode(continuation(PROMPT, tokens))
            assert_one_stream(parts, tokens)
        await router.settled()


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_worker_that_stalls_times_out(role: str) -> None:
    limits = {"idle_timeout_s": JUDGED_S, "first_byte_timeout_s": {"prefill": JUDGED_S, "decode": JUDGED_S}}
    async with running(PAIR, limits=limits, **QUICK) as router:
        await router.cluster.inject(f"{role}0", "stall", count=None, after_events=3)
        replies = await asyncio.gather(
            *(router.client.post("/v1/completions", json=completion(stream=True)) for _ in range(4))
        )
        for reply in replies:
            assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 12))
        await router.cluster.inject(f"{role}0", "clear")


async def test_a_request_past_its_own_deadline_gets_504_that_names_the_limit_and_no_worker() -> None:
    async with running(PAIR) as router:
        await inject_everywhere(router, "d", "freeze")
        reply = await router.client.post("/v1/completions", json=completion(), headers={"X-Request-Timeout": "1.5"})
        assert reply.status_code == 504
        message = reply.json()["error"]["message"]
        assert "X-Request-Timeout" in message and "worker" not in message
        await inject_everywhere(router, "d", "unfreeze")
        await router.settled()


async def test_a_request_that_waits_too_long_in_the_queue_gets_503_and_in_the_pool_is_drained() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=1, time_scale=0.1)
    async with running(shape, pool={"ttl_s": 2.0}, queue={"deadline_s": 2.0}) as router:
        await router.cluster.inject("d0", "stop_barrier")  # the only slot stays taken until the second one is late
        first = asyncio.ensure_future(router.client.post("/v1/completions", json=completion()))
        await until(lambda: router.app.services.ledger.scheduler.snapshot.workers[0].active)
        late = await router.client.post("/v1/completions", json=completion())
        assert late.status_code == 503 and late.headers["retry-after"]
        await router.cluster.inject("d0", "start_barrier")
        assert (await first).status_code == 200
        await router.settled()
        assert router.app.services.metrics.drains.value("drained") == 1


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=1, time_scale=0.05)
    async with running(shape, queue={"max_queued": 2}, pool={"max_entries": 1}) as router:
        await router.cluster.inject("d0", "freeze")  # until all have come
        body = completion(max_tokens=30)
        asked = [asyncio.ensure_future(router.client.post("/v1/completions", json=body)) for _ in range(10)]
        services = router.app.services
        await until(lambda: services.exchanges + sum(ask.done() for ask in asked) == 10 and services.exchanges <= 5)
        await router.cluster.inject("d0", "unfreeze")
        replies = await asyncio.gather(*asked)
        codes = sorted(reply.status_code for reply in replies)
        assert set(codes) == {200, 429} and codes.count(429) >= 5
        assert all("retry-after" in reply.headers for reply in replies if reply.status_code == 429)
        await router.settled()


async def test_garbage_and_unusual_framing_between_events_change_nothing() -> None:
    for fault in ("merge_events", "split_bytes", "late_done"):
        async with running(PAIR) as router:
            await inject_everywhere(router, "d", fault, delay_s=0.05)
            reply = await router.client.post("/v1/completions", json=completion(stream=True))
            assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 12)), fault
            await router.settled()


@asynccontextmanager
async def blocked(max_tokens: int, stall_timeout_s: float, field: bytes = b"") -> AsyncIterator[Router]:
    """A router whose only client does not read the stream that it has asked for; `field`: a line of that head."""
    limits = {"client_buffer_bytes": 4096, "client_stall_timeout_s": stall_timeout_s}
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=2, time_scale=0.0005, max_model_len=500_000)
    async with running(shape, limits=limits, send_buffer_bytes=4096) as router:
        host, port = router.url.removeprefix("http://").split(":")
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        narrow.connect((host, int(port)))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        body = json.dumps(completion(max_tokens=max_tokens, stream=True)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
        writer.write(head % (field, len(body)) + body)
        await until(lambda: any(leg.blocked_by_client for leg in router.app.services.legs))
        yield router
        writer.close()


async def test_a_client_that_stops_reading_is_disconnected_and_delays_no_other() -> None:
    async with blocked(max_tokens=100_000, stall_timeout_s=0.5) as router:
        other = await router.client.post("/v1/completions", json=completion())
        assert other.status_code == 200
        await router.settled()
        assert router.app.services.metrics.requests.value("cancelled") == 1


async def test_a_deadline_ends_a_request_whose_client_does_not_read() -> None:
    async with blocked(max_tokens=400_000, stall_timeout_s=600.0, field=b"x-request-timeout: 8\r\n") as router:
        assert router.app.services.exchanges == 1
        await router.settled()


@pytest.mark.parametrize("connector", [Connector.MOONCAKE_V1, Connector.MOONCAKE_LAYERWISE])
async def test_a_chat_is_not_started_over_by_an_engine_that_cannot_take_token_ids(
    connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "chat_prompt", lambda body, params: chat_prompt(body, None))
    async with running(replace(PAIR, connector=connector), **QUICK) as router:
        await inject_everywhere(router, "d", "recompute", after_events=4)
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with router.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as reply:
                async for chunk in reply.aiter_bytes():
                    got += chunk
        assert "can't go on from token ids" in events(got.decode())[-1]["error"]["message"]
        await inject_everywhere(router, "d", "clear")
        await router.settled()


async def test_a_request_that_is_recomputed_for_ever_without_a_token_ends_in_502() -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "recompute", after_events=0, count=None)
        reply = await router.client.post("/v1/completions", json=completion(stream=True))
        assert reply.status_code == 502, reply.text
        assert "again and again" in reply.json()["error"]["message"]
        await inject_everywhere(router, "d", "clear")
        await router.settled()


async def test_a_trial_whose_client_leaves_releases_its_worker() -> None:
    async with running(PAIR, health={"open_for_s": 0.05, "interval_s": 60.0}) as router:
        services = router.app.services
        for worker in services.fleet:
            worker.circuit.open(services.ledger.now(), "status 500")
        await until(lambda: all(worker.circuit.state is CircuitState.HALF_OPEN for worker in services.fleet))
        await inject_everywhere(router, "d", "freeze")
        asked = [
            asyncio.ensure_future(router.client.post("/v1/completions", json=completion(stream=True))) for _ in range(3)
        ]
        tried = services.fleet.of(Role.DECODE)
        await until(lambda: len(services.legs) == len(asked) and all(worker.in_use for worker in tried))
        for ask in asked:
            ask.cancel()
        await inject_everywhere(router, "d", "unfreeze")
        reply = await router.client.post("/v1/completions", json=completion())
        assert reply.status_code == 200
        await router.settled()


async def test_kv_is_drained_through_a_second_worker_when_the_freest_one_is_busy() -> None:
    shape = ClusterShape(prefillers=1, decoders=3, max_num_seqs=8, time_scale=0.02)
    async with running(shape, **QUICK) as router:
        await router.cluster.inject("d1", "status", status=503, count=None)
        await router.cluster.inject("d2", "status", status=503, count=None)
        bodies = [completion(max_tokens=24, stream=True) for _ in range(6)]
        replies = await asyncio.gather(*(router.client.post("/v1/completions", json=body) for body in bodies))
        assert [reply.status_code for reply in replies] == [200] * 6
        await router.settled()
        metrics = router.app.services.metrics
        assert metrics.drains.value("drained") > 0
        assert metrics.drains.value("orphaned") == metrics.orphaned_kv == 0


async def test_a_compressed_reply_is_a_failed_try_and_no_byte_of_it_reaches_the_client() -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", "gzip")
        reply = await router.client.post("/v1/completions", json=completion(max_tokens=24, stream=True))
        assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 24))
        await router.settled()


@pytest.mark.parametrize(
    ("fault", "resumes"), [("recompute", True), ("reset", False), ("no_finish", False), ("close", False)]
)
async def test_text_held_back_for_a_stop_string_is_never_lost_silently(fault: str, resumes: bool) -> None:
    async with running(PAIR, **QUICK) as router:
        await inject_everywhere(router, "d", fault, after_events=7)
        body = completion(max_tokens=24, stream=True, stop=["</s>"])
        whole = decode(continuation(PROMPT, 24))
        if resumes:
            reply = await router.client.post("/v1/completions", json=body)
            assert "".join(texts(events(reply.text))) == whole
        else:
            got = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async with router.client.stream("POST", "/v1/completions", json=body) as stream:
                    async for piece in stream.aiter_bytes():
                        got += piece
            parts = events(got.decode())
            assert "error" in parts[-1] and whole.startswith("".join(texts(parts[:-1])))
        await router.settled()


async def test_kv_that_expired_while_the_router_was_suspended_is_prefilled_again_and_never_sent() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=1, time_scale=0.02)
    async with running(shape, prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 90.0}) as router:
        services = router.app.services
        first = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(max_tokens=1500)))
        await until(lambda: any(leg.decoder_id for leg in services.legs))
        second = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(max_tokens=24)))
        await until(lambda: len(services.ledger.scheduler.snapshot.pool) == 1)
        waiting = next(
            leg for leg in services.legs if leg.id in services.ledger.scheduler.snapshot.requests and not leg.decoder_id
        )
        waiting.kv.pinned_s -= 85.0  # as if the process had been stopped for so long
        assert (await second).json()["choices"][0]["text"] == decode(continuation(PROMPT, 24))
        assert (await first).status_code == 200
        assert router.cluster.prefill[0].counters["requests"] == 3
        assert services.metrics.drains.value("orphaned") == 1
        assert router.cluster.violations() == {}


async def test_kv_whose_lease_is_nearly_over_is_left_to_expire() -> None:
    async with running(PAIR, prefill={"kv_pin_s": 2.0}, pool={"ttl_s": 1.0}) as router:
        services = router.app.services
        request = parse("completions", json.dumps(completion()).encode())
        params = b'{"do_remote_prefill":true}'  # would be a violation if it were sent
        services.drainer.drain(Drain("late", request, params, b"", services.ledger.now() - 1.9))
        await router.settled()
        assert services.metrics.drains.value("orphaned") == 1
        assert router.cluster.violations() == {}


async def test_a_router_that_drains_closes_each_connection_with_its_answer() -> None:
    async with running(PAIR) as router:
        before = await router.client.post("/v1/completions", json=completion(max_tokens=2))
        assert before.status_code == 200 and "connection" not in before.headers
        router.app.services.begin_drain()
        for ask in (router.client.post("/v1/completions", json=completion()), router.client.get("/ready")):
            refused = await ask
            assert refused.status_code == 503 and refused.headers["connection"] == "close"
