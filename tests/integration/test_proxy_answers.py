"""The main path: client -> router -> emulated cluster -> client, and what must hold whatever happens on it."""

import asyncio
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from tests.integration.router import FAST, Router, Sent, running, sent_to_workers
from tests.waiting import until

pytestmark = pytest.mark.anyio

PROMPT = list(range(FIRST_TRIPLE_ID, FIRST_TRIPLE_ID + 40))


def completion(prompt: Any = None, **fields: Any) -> dict[str, Any]:
    return {"model": "emulated", "prompt": prompt or PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}


def chat(content: str = "tell me", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    return {"model": "emulated", "messages": messages, "max_tokens": 12, "ignore_eos": True, **fields}


def events(text: str) -> list[Any]:
    """The data of each event; "[DONE]" as it is."""
    return [
        block[6:] if block == "data: [DONE]" else json.loads(block[6:])
        for block in text.split("\n\n")
        if block.startswith("data: ")
    ]


def texts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        for choice in part["choices"] if isinstance(part, dict) else ():
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""


async def test_completion_gives_the_model_s_own_tokens_and_exact_usage() -> None:
    async with running() as router:
        reply = await router.client.post("/v1/completions", json=completion())
        answer = reply.json()
        assert reply.status_code == 200
        assert answer["choices"][0]["text"] == decode(continuation(PROMPT, 12))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == 40
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["token_ids"] is None
        assert int(reply.headers["content-length"]) == len(reply.content)
        await router.settled()


async def test_streamed_completion_gives_the_same_and_ends_with_one_done() -> None:
    async with running() as router:
        body = completion(stream=True, stream_options={"include_usage": True})
        reply = await router.client.post("/v1/completions", json=body)
        parts = events(reply.text)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert parts.count("[DONE]") == 1 and parts[-1] == "[DONE]"
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 12))
        assert parts[-2]["usage"]["completion_tokens"] == 12
        assert '"token_ids":[' not in reply.text
        await router.settled()


async def test_token_ids_reach_a_client_that_requested_them() -> None:
    async with running() as router:
        body = completion(stream=True, return_token_ids=True)
        parts = events((await router.client.post("/v1/completions", json=body)).text)
        ids = [i for p in parts[:-1] for c in p["choices"] for i in c.get("token_ids") or ()]
        assert ids == continuation(PROMPT, 12)
        whole = (await router.client.post("/v1/completions", json=completion(return_token_ids=True))).json()
        assert whole["choices"][0]["token_ids"] == ids
        assert whole["choices"][0]["prompt_token_ids"] == PROMPT


async def test_a_chat_has_the_same_text_streamed_or_not() -> None:
    async with running() as router:
        whole = (await router.client.post("/v1/chat/completions", json=chat())).json()
        parts = events((await router.client.post("/v1/chat/completions", json=chat(stream=True))).text)
        roles = [c["delta"]["role"] for p in parts[:-1] for c in p["choices"] if "role" in c["delta"]]
        assert roles == ["assistant"]
        assert "".join(texts(parts)) == whole["choices"][0]["message"]["content"]
        assert whole["object"] == "chat.completion"
        assert all("usage" not in part for part in parts[:-1])
        await router.settled()


@pytest.mark.parametrize("field", ["echo", "a_field_of_tomorrow"])
async def test_a_request_whose_answer_cannot_be_assembled_goes_through_unstreamed(field: str) -> None:
    async with running() as router:
        reply = await router.client.post("/v1/completions", json=completion(**{field: False}))
        assert reply.json()["choices"][0]["text"] == decode(continuation(PROMPT, 12))
        assert reply.json()["usage"]["completion_tokens"] == 12
        await router.settled()


def a_body(n: int) -> tuple[str, dict[str, Any], list[int]]:
    """The n-th of a mixed load: route, body, the tokens that must come back."""
    draw = random.Random(n)
    start = FIRST_TRIPLE_ID + draw.randrange(5000)
    prompt = list(range(start, start + draw.randrange(1, 400)))
    body = completion(prompt, max_tokens=draw.randrange(1, 60), stream=n % 2 == 0)
    return "/v1/completions", body, continuation(prompt, body["max_tokens"])


@pytest.mark.parametrize("policy", ["br_h", "join_shortest_queue", "target_fit"])
async def test_fifty_at_once_get_each_their_own_answer_under(policy: str) -> None:
    async with running(routing={"policy": policy}, decode={"max_num_seqs": 4}) as router:

        async def one(n: int) -> None:
            path, body, tokens = a_body(n)
            reply = await router.client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            if body["stream"]:
                text = "".join(texts(events(reply.text)[:-1]))
            else:
                text = reply.json()["choices"][0]["text"]
                assert reply.json()["usage"]["completion_tokens"] == len(tokens)
            assert text == decode(tokens)

        await asyncio.gather(*map(one, range(50)))
        await router.settled()
        assert router.cluster.violations() == {}
        assert router.app.services.metrics.requests.value("finished") == 50


async def test_the_predictor_learns_from_finished_requests_and_forecasts_running_ones() -> None:
    async with running(predictor={"kind": "survival"}, routing={"policy": "br_h", "horizon_steps": 8}) as router:
        for _ in range(3):
            bodies = [completion(max_tokens=30, stream=True) for _ in range(10)]
            await asyncio.gather(*(router.client.post("/v1/completions", json=body) for body in bodies))
        await router.settled()
        forecasts = router.app.services.forecasts
        assert forecasts.metrics.error_tokens.count == 30
        assert forecasts.forecaster.refreshes > 0


async def test_ranks_behind_one_url_are_selected_by_the_header() -> None:
    shape = ClusterShape(prefillers=1, decoders=4, ranks_per_url=4, max_num_seqs=2, time_scale=0.02)
    async with running(shape, routing={"policy": "round_robin"}) as router:
        await asyncio.gather(*(router.client.post("/v1/completions", json=completion()) for _ in range(8)))
        await router.settled()
        served = [worker.load for worker in router.app.services.ledger.scheduler.snapshot.workers]
        assert served == [0, 0, 0, 0]
        admitted = router.app.services.metrics.admissions
        assert all(
            admitted.value(worker.id, "stage_3") == 2 for worker in router.app.services.fleet if worker.rank_line
        )
        assert router.cluster.violations() == {}


async def vanish_at_any_moment(router: Router, clients: int) -> None:
    """So many clients that each send a whole request, stay for some part of its life, and hang up.

    The answers are too long to be complete by then, however slow the machine is.
    """
    draw = random.Random(7)

    def work_done() -> int:
        """Requests that prefillers have taken, and tokens that have been generated, since the cluster began."""
        workers = router.cluster.workers.values()
        return sum(w.counters["requests"] + w.counters["generation_tokens"] for w in workers)

    async def vanish(n: int) -> None:
        prompt = list(range(300, 300 + draw.randrange(1, 600)))
        body = json.dumps(completion(prompt, max_tokens=5_000, stream=n % 3 > 0)).encode()
        leaves_at = draw.randrange(400)
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(router.url).port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: work_done() >= leaves_at)
        writer.close()

    await asyncio.gather(*map(vanish, range(clients)))
    await router.settled()
    requests = router.app.services.metrics.requests
    assert requests.value("cancelled") == clients
    assert requests.value("failed") == 0


async def test_a_client_that_disconnects_at_any_moment_leaks_nothing() -> None:
    shape = ClusterShape(prefillers=2, decoders=2, max_num_seqs=4, time_scale=0.3, prefill_tokens_per_s=5_000)
    async with running(shape) as router:
        await vanish_at_any_moment(router, 60)
        assert router.cluster.violations() == {}


async def sent_if_one_leaves_the_pool(*faults: str) -> list[Sent]:
    """What workers are sent of two requests, the second of which leaves the pool; `faults`: the prefiller's with it."""
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=1, time_scale=0.1)
    async with running(shape) as router:
        snapshot = router.app.services.ledger.scheduler.snapshot
        seen = sent_to_workers(router.app.services)
        await router.cluster.inject("d0", "stop_barrier")  # the only slot stays taken until the second one has left
        first = asyncio.create_task(router.client.post("/v1/completions", json=completion()))  # noqa: TID251
        await until(lambda: len(snapshot.workers[0].active) == 1)
        for fault in faults:
            await router.cluster.inject("p0", fault)
        second = asyncio.create_task(router.client.post("/v1/completions", json=completion()))  # noqa: TID251
        await until(lambda: len(snapshot.pool) == 1)
        second.cancel()
        await asyncio.wait([second])
        await until(lambda: not snapshot.pool)
        await router.cluster.inject("d0", "start_barrier")
        assert (await first).status_code == 200
        await router.settled()
        assert router.app.services.metrics.drains.value("drained") == 1
        assert router.cluster.violations() == {}
        return seen


async def test_kv_of_a_request_that_left_the_pool_is_drained_through_a_decoder() -> None:
    seen = await sent_if_one_leaves_the_pool()
    assert all(head["content-type"] == "application/json" for _, _, head in seen)  # vLLM refuses a body without


async def test_a_drain_carries_the_request_id_that_the_prefiller_knows() -> None:
    """Before vllm-ascend 0.14 a decode worker names its own request to the prefiller whose KV it has pulled."""
    seen = await sent_if_one_leaves_the_pool("null_params")  # its second try has another id than the client's request
    ids = [head["x-request-id"] for _, _, head in seen]
    (again,) = {name for name in ids if name.endswith("-2")}
    assert ids.count(again) == 2  # its probe and its drain
    assert len(set(ids)) == 3  # the other request's, and that of the first try


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"", 400, None),
        (b'{"model":"emulated"}', 400, "prompt"),
        (b'{"model":"emulated","prompt":7}', 400, "prompt"),
        (b'{"model":"emulated","prompt":"a","max_tokens":"many"}', 400, "max_tokens"),
        (b'{"model":"emulated","prompt":"a","stream":"maybe"}', 400, "stream"),
        (b'{"model":"nope","prompt":"a"}', 404, "model"),
        (b'{"model":"emulated","prompt":"%s"}' % (b"a" * 4000), 413, None),
    ],
    ids=["cut", "list", "empty", "no-prompt", "prompt-type", "limit-type", "stream-type", "unknown-model", "too-large"],
)
async def test_bad_input_gets_an_openai_error_body(body: bytes, status: int, param: str | None) -> None:
    async with running(limits={"max_body_bytes": 2048}) as router:
        reply = await router.client.post("/v1/completions", content=body)
        error = reply.json()["error"]
        assert reply.status_code == status, reply.text
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status and error["param"] == param and error["message"]
        await router.settled()


async def test_a_compressed_body_is_refused_by_its_encoding_and_a_plain_one_read() -> None:
    body = b'{"model":"emulated","prompt":"a","max_tokens":2}'
    async with running() as router:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        for path in ("/v1/completions", "/v1/messages", "/v1/messages/count_tokens"):
            refused = await router.client.post(path, content=gzip.compress(body), headers=headers)
            assert refused.status_code == 415 and "Content-Encoding" in refused.json()["error"]["message"]
        assert (await router.client.post("/v1/completions", content=body, headers=headers)).status_code == 200
        cut = await router.client.post("/v1/completions", content=body[:-1], headers={"content-encoding": "Identity"})
        wrong = await router.client.post("/v1/completions", content=body.replace(b"2", b"-2"), headers=headers)
        assert (cut.status_code, wrong.status_code, wrong.json()["error"]["param"]) == (400, 400, "max_tokens")


async def test_a_refusal_of_the_decode_worker_reaches_the_client_and_pins_nothing() -> None:
    async with running(ClusterShape(prefillers=1, decoders=1, time_scale=0.02)) as router:
        await router.cluster.inject("d0", "status", status=400)
        reply = await router.client.post("/v1/completions", json=completion(stream=True))
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == 400
        await router.settled()
        assert router.app.services.metrics.drains.value("drained") == 1


async def test_a_client_cannot_send_kv_transfer_parameters() -> None:
    async with running() as router:
        own = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x"}
        reply = await router.client.post("/v1/completions", json=completion(kv_transfer_params=own))
        assert reply.status_code == 200
        assert reply.json()["kv_transfer_params"] is None
        assert router.cluster.violations() == {}


async def test_a_full_prefiller_gets_no_probe_until_its_usage_falls() -> None:
    async with running(prefill={"poll_interval_s": 60.0}) as router:
        ledger = router.app.services.ledger
        snapshot = ledger.scheduler.snapshot
        await until(lambda: all(worker.reported for worker in snapshot.workers))
        await until(lambda: all(p.cache_known != (None, 0) for p in ledger.view().prefillers))  # polled once
        for prefiller in snapshot.prefillers:
            ledger.report_prefiller(prefiller.spec.id, 0.95)
        ask = asyncio.ensure_future(router.client.post("/v1/completions", json=completion()))
        await until(lambda: snapshot.queued)
        assert ledger.dispatch() == [] and list(snapshot.queued) and not ask.done()
        ledger.report_prefiller(snapshot.prefillers[1].spec.id, 0.5)
        assert (await ask).status_code == 200
        await router.settled()


async def test_a_prefiller_that_cannot_be_read_counts_as_full() -> None:
    async with running(prefill={"poll_interval_s": 0.02}) as router:
        await router.cluster.inject("p0", "stop")
        snapshot = router.app.services.ledger.scheduler.snapshot
        await until(lambda: snapshot.prefillers[0].kv_usage == 1.0)
        assert snapshot.prefillers[1].kv_usage < 0.1


async def test_explain_can_read_the_state_page() -> None:
    async with running() as router:
        from balanceroute.core.snapshot_json import snapshot_from_dict

        state = await router.state()
        assert state["policy"] == "br_0" and "beta" in state["params"]
        snapshot, _ = snapshot_from_dict(state, 0)
        assert len(snapshot.workers) == 4


async def test_requests_in_a_pipeline_are_answered_in_order() -> None:
    async with running() as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for n in (3, 5):
            body = json.dumps(completion(max_tokens=n)).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
        tokens = []
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            tokens.append(json.loads(await reader.readexactly(length))["usage"]["completion_tokens"])
        assert tokens == [3, 5]
        writer.close()
        await writer.wait_closed()
        await router.settled()


async def test_workers_see_authorization_and_trace_headers_but_not_the_client_s_rank_or_encoding() -> None:
    async with running(FAST) as router:
        headers = {
            "Authorization": "Bearer k",
            "traceparent": "00-1-2-01",
            "X-data-parallel-rank": "7",
            "X-Request-Id": "mine",
        }
        seen = sent_to_workers(router.app.services)
        reply = await router.client.post("/v1/completions", json=completion(), headers=headers)
        assert reply.headers["x-request-id"] == "mine"
    assert len(seen) == 2
    for _, _, head in seen:
        assert head["authorization"] == "Bearer k" and head["traceparent"] == "00-1-2-01"
        assert "x-data-parallel-rank" not in head and "accept-encoding" not in head
        assert head["x-request-id"].startswith("mine-")


PROMPTS = [list(range(start, start + 30)) for start in (400, 500, 600)]


async def test_a_list_of_prompts_with_n_answers_each_comes_back_in_order_with_one_usage() -> None:
    async with running() as router:
        body = completion(PROMPTS, n=2, max_tokens=9)
        answer = (await router.client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
        expected = [decode(continuation(prompt, 9)) for prompt in PROMPTS for _ in range(2)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == 90 and answer["usage"]["completion_tokens"] == 54
        await router.settled()
        assert router.cluster.violations() == {}


async def test_the_same_streamed_keeps_each_choice_s_order_and_ends_once() -> None:
    async with running() as router:
        body = completion(PROMPTS, max_tokens=9, stream=True, stream_options={"include_usage": True})
        parts = events((await router.client.post("/v1/completions", json=body)).text)
        assert parts[-1] == "[DONE]" and parts.count("[DONE]") == 1
        assert len({part["id"] for part in parts[:-1]}) == 1
        for index, prompt in enumerate(PROMPTS):
            mine = [c for p in parts[:-1] for c in p["choices"] if c["index"] == index]
            assert "".join(choice["text"] for choice in mine) == decode(continuation(prompt, 9))
        assert parts[-2]["choices"] == [] and parts[-2]["usage"]["completion_tokens"] == 27
        await router.settled()


async def test_chat_choices_each_have_a_role_and_an_index() -> None:
    async with running() as router:
        whole = (await router.client.post("/v1/chat/completions", json=chat(n=3))).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        parts = events((await router.client.post("/v1/chat/completions", json=chat(n=3, stream=True))).text)
        roles = [c["index"] for p in parts[:-1] for c in p["choices"] if "role" in c["delta"]]
        assert sorted(roles) == [0, 1, 2]


async def test_more_choices_than_can_be_served_are_refused() -> None:
    async with running() as router:
        reply = await router.client.post("/v1/completions", json=completion(n=500))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"


async def test_one_failing_choice_fails_the_request_and_leaves_nothing() -> None:
    shape = ClusterShape(prefillers=2, decoders=2, max_num_seqs=8, time_scale=0.02)
    async with running(shape) as router:
        await router.cluster.inject("p0", "status", status=400, count=1)
        reply = await router.client.post("/v1/completions", json=completion(PROMPTS, max_tokens=50))
        assert reply.status_code == 400
        await router.settled()
        assert router.cluster.violations() == {}


async def test_a_client_that_leaves_while_several_answers_run_leaves_nothing() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=2, time_scale=0.1)
    async with running(shape) as router:
        asked = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(n=6, max_tokens=300)))
        snapshot = router.app.services.ledger.scheduler.snapshot
        await until(lambda: sum(len(worker.active) for worker in snapshot.workers) == 4)
        asked.cancel()
        await router.settled()
        assert router.app.services.metrics.requests.value("cancelled") == 1
        assert router.cluster.violations() == {}


async def test_proxy_settings_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with running() as router:
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        assert (await router.client.get("/v1/models")).status_code == 200


async def test_priority_is_honoured_while_requests_wait() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=1, time_scale=0.05)
    async with running(shape) as router:
        order: list[int] = []

        async def ask(priority: int) -> None:
            reply = await router.client.post("/v1/completions", json=completion(max_tokens=40, priority=priority))
            assert reply.status_code == 200
            order.append(priority)

        await router.cluster.inject("d0", "stop_barrier")  # the only slot stays taken until the others wait for it
        asked = [asyncio.ensure_future(ask(5))]
        snapshot = router.app.services.ledger.scheduler.snapshot
        await until(lambda: snapshot.workers[0].active)
        asked += [asyncio.ensure_future(ask(priority)) for priority in (3, 2, 1)]
        await until(lambda: len(snapshot.pool) == 3)
        await router.cluster.inject("d0", "start_barrier")
        await asyncio.gather(*asked)
        assert order == [5, 1, 2, 3]
