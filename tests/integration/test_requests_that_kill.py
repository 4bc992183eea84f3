"""Requests that no decoder survives: few decoders meet them, and nobody else pays."""

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from balanceroute.config import validate
from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import continuation, decode
from balanceroute.proxy.app import RouterApp, create_app
from tests.integration.router import Router, running, served
from tests.integration.test_proxy_answers import PROMPT, chat, completion, events, texts
from tests.plain_http import PLAIN
from tests.security.evil_worker import Answer, Asked, Evil, other, reply, well_decoded, well_prefilled
from tests.unit.proxy.servers import worker
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

SIX = ClusterShape(prefillers=2, decoders=6, max_num_seqs=8, time_scale=0.02)
LAYERWISE = ClusterShape(
    prefillers=2,
    decoders=6,
    max_num_seqs=8,
    time_scale=0.02,
    connector="mooncake_layerwise",  # type: ignore[arg-type]
)
QUICK = {"retry": {"base_delay_s": 0.001, "max_delay_s": 0.01}}
KILLS = {"vllm_xargs": {"kill_decoder": True}}


def dead(router: Router) -> list[str]:
    return [worker.name for worker in router.cluster.decode if worker.dead]


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_kills_decoders_reaches_two_of_them_and_no_third(
    shape: ClusterShape, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(shape, **QUICK) as router:
        with caplog.at_level(logging.WARNING):
            reply = await router.client.post("/v1/completions", json=completion(stream=stream, max_tokens=100, **KILLS))
        assert reply.status_code == 502
        assert "2 decode workers" in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"
        assert len(dead(router)) == 2
        assert router.app.services.metrics.given_up_requests.value() == 1
        records = [record for record in caplog.records if "given up" in record.getMessage()]
        assert [sorted(record.workers) for record in records] and all(record.request for record in records)  # type: ignore[attr-defined]
        good = await router.client.post("/v1/completions", json=completion())
        assert good.json()["choices"][0]["text"] == decode(continuation(PROMPT, 12))
        await router.settled()


async def test_requests_beside_a_request_that_kills_all_get_their_answers() -> None:
    async with running(SIX, routing={"policy": "join_shortest_queue"}, **QUICK) as router:

        async def one(n: int) -> Any:
            body = completion([*PROMPT, 300 + n], max_tokens=20 + n, stream=n % 2 == 0)
            return await router.client.post("/v1/completions", json=body)

        asked = [asyncio.ensure_future(one(n)) for n in range(20)]
        killer = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(**KILLS)))
        asked += [asyncio.ensure_future(one(n)) for n in range(20, 40)]
        replies = await asyncio.gather(*asked)
        assert (await killer).status_code == 502
        assert [reply.status_code for reply in replies] == [200] * 40
        for n, reply in enumerate(replies):
            parts = events(reply.text) if n % 2 == 0 else [reply.json()]
            assert "".join(texts(parts)) == decode(continuation([*PROMPT, 300 + n], 20 + n))
        assert len(dead(router)) == 2
        assert router.app.services.metrics.given_up_requests.value() == 1
        await router.settled()


@contextlib.asynccontextmanager
async def before(
    decoders: dict[str, Evil], prefillers: dict[str, Evil] | None = None
) -> AsyncIterator[tuple[RouterApp, httpx.AsyncClient]]:
    """A router before these workers, and a client of it."""
    prefillers = prefillers or {"p0": Evil(well_prefilled)}
    async with contextlib.AsyncExitStack() as stack:
        urls = {
            name: (await stack.enter_async_context(worker(one.script))).url
            for name, one in {**prefillers, **decoders}.items()
        }
        tree = {
            "prefill": {"workers": [{"url": urls[name], "id": name} for name in prefillers]},
            "decode": {"workers": [{"url": urls[name], "id": name} for name in decoders], "max_num_seqs": 8},
            "routing": {"policy": "round_robin"},
            "predictor": {"kind": "none"},
            **QUICK,
        }
        app = create_app(validate(tree))
        url = await stack.enter_async_context(served(app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, **PLAIN, timeout=PATIENCE_S))
        yield app, client


@pytest.mark.parametrize("n_killers", [2, 5])
async def test_two_killing_requests_that_share_their_first_worker_reach_one_more_each(n_killers: int) -> None:
    """Whoever else is on the second one, and whatever has been explained by then."""
    all_there = asyncio.Event()

    async def dies(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await all_there.wait()
        dead = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
        writer.write(reply(dead, status="500 Internal Server Error"))

    decoders = {f"d{n}": Evil(well_decoded, respond=dies) for n in range(n_killers + 4)}
    others = [name for name in decoders if name != "d0"]
    async with before(decoders) as (app, client):
        fleet = app.services.fleet
        for name in others:
            fleet.drain(fleet[name])

        def ask(name: str) -> "asyncio.Future[httpx.Response]":
            asked = client.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": name})
            return asyncio.ensure_future(asked)

        asked = [ask(f"killer{n}") for n in range(n_killers)]
        await until(lambda: len(decoders["d0"].asked) == n_killers)
        for name in others:
            fleet.undrain(fleet[name])
        all_there.set()
        asked += [
            ask(f"late{n}") for n in range(2)
        ]  # which are there for the first time where others are for the second
        assert {answer.status_code for answer in await asyncio.gather(*asked)} <= {502, 503}
        met = {
            one: [name for name, decoder in decoders.items() if any(a.id.startswith(f"{one}-") for a in decoder.asked)]
            for one in [f"killer{n}" for n in range(n_killers)] + ["late0", "late1"]
        }
        assert all(len(names) <= 2 for names in met.values()), met
        assert all(len(met[f"killer{n}"]) == 2 for n in range(n_killers)), met


async def test_a_waiting_suspect_learns_of_a_workers_death_before_it_is_sent_there() -> None:
    """Else it would lose a second worker that another request had already killed, and be taken for the cause."""
    gone: set[str] = set()
    go_on = {"d0": asyncio.Event(), "d1": asyncio.Event()}

    def an_evil(name: str) -> Evil:
        async def dies(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await go_on[name].wait()
            gone.add(name)
            writer.transport.abort()

        def health(asked: Asked) -> bytes:
            return reply({}, status="503 Service Unavailable") if name in gone else other(asked)

        return Evil(well_decoded, others=health, respond=dies if name in go_on else None)

    decoders = {name: an_evil(name) for name in ("d0", "d1", "d2")}
    async with before(decoders) as (app, client):
        fleet, ledger = app.services.fleet, app.services.ledger

        def only(wanted: str) -> None:
            for name in decoders:
                (fleet.undrain if name == wanted else fleet.drain)(fleet[name])

        only("d0")
        asked = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi"})) for _ in range(2)]
        await until(lambda: len(decoders["d0"].asked) == 2)
        only("d1")
        go_on["d0"].set()
        await until(lambda: len(decoders["d1"].asked) == 1 and ledger.decoder("d1").active == 2)
        only("d2")
        fleet.undrain(fleet["d1"])  # so that nothing but the death keeps the other from going there
        go_on["d1"].set()
        assert sorted(answer.status_code for answer in await asyncio.gather(*asked)) == [200, 502]
        assert len(decoders["d1"].asked) == 1
        assert app.services.metrics.given_up_requests.value() == 1


async def test_a_request_that_kills_whose_client_leaves_is_not_drained_through_a_third_decoder() -> None:
    async with running(SIX, **QUICK) as router:
        ask = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(**KILLS)))
        await until(lambda: dead(router))
        ask.cancel()
        await asyncio.wait([ask])
        await router.settled()
        assert sum(worker.counters["killed_by_request"] for worker in router.cluster.decode) <= 2


@pytest.mark.parametrize("fault", ["reset_before_reply", "close"])
async def test_a_broken_connection_to_a_living_decode_worker_does_not_count_as_a_death(fault: str) -> None:
    async with running(SIX, retry={"max_attempts": 4, "base_delay_s": 0.001, "max_delay_s": 0.01}) as router:
        for name in ("d0", "d1", "d2", "d3", "d4", "d5"):
            await router.cluster.inject(name, fault)
        for worker in router.cluster.decode[3:]:
            worker.faults.clear()
        reply = await router.client.post("/v1/completions", json=completion(stream=True))
        assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 12))
        assert router.app.services.metrics.given_up_requests.value() == 0
        await router.settled()


# -- prompt logprobs: deadly to the decoders of today's engines


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("limit", [1, 12, 100])
async def test_prompt_logprobs_come_from_the_prefiller_alone(shape: ClusterShape, limit: int) -> None:
    async with running(shape) as router:
        body = completion(prompt_logprobs=0, max_tokens=limit, logprobs=1)
        choice = (await router.client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert [next(iter(each)) for each in choice["prompt_logprobs"][1:]] == [str(token) for token in PROMPT[1:]]
        assert len(choice["logprobs"]["tokens"]) == limit
        reply = await router.client.post("/v1/chat/completions", json=chat(prompt_logprobs=2))
        assert len(reply.json()["prompt_logprobs"]) == reply.json()["usage"]["prompt_tokens"]
        assert dead(router) == []
        await router.settled()


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("prompt", ["the quick brown fox", PROMPT], ids=["text", "ids"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 1, "n": 2}, {"return_token_ids": True}])
async def test_an_echo_equals_that_of_a_single_server(shape: ClusterShape, prompt: Any, fields: dict[str, Any]) -> None:
    async with running(shape) as router:
        body = completion(prompt, echo=True, **fields)
        ours = (await router.client.post("/v1/completions", json=body)).json()
        plain = (await router.client.post(f"{router.cluster.prefill_urls[0]}/v1/completions", json=body)).json()
        assert ours["choices"] == plain["choices"]
        assert ours["usage"] == plain["usage"]
        assert dead(router) == []
        await router.settled()


CONTINUED = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so the"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, CONTINUED, CONTINUED | {"logprobs": True, "top_logprobs": 2, "max_tokens": 90}, CONTINUED | {"n": 2}],
    ids=["of the user", "continued", "logprobs", "n"],
)
async def test_an_echo_of_a_chats_last_message_equals_that_of_a_single_server(
    shape: ClusterShape, stream: bool, fields: dict[str, Any]
) -> None:
    """Such a chat has an engine tell its prompt's logprobs, too, though none were asked for."""
    async with running(shape) as router:
        body = chat(echo=True, stream=stream, **fields)
        url = f"{router.cluster.prefill_urls[0]}/v1/chat/completions"
        ours, plain = [await router.client.post(to, json=body) for to in ("/v1/chat/completions", url)]
        if stream:
            assert told(ours.text) == told(plain.text)
        else:
            assert ours.json()["choices"] == plain.json()["choices"]
            assert ours.json()["prompt_logprobs"] == plain.json()["prompt_logprobs"] is not None
        assert dead(router) == []
        await router.settled()


def told(stream: str) -> dict[int, str]:
    """The text of each choice."""
    whole: dict[int, str] = {}
    for part in events(stream)[:-1]:
        for choice in part["choices"]:
            whole[choice["index"]] = whole.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return whole


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("prompt", ["the quick brown fox", ["the quick brown fox"]])
async def test_a_stream_begins_with_the_echo(shape: ClusterShape, prompt: Any) -> None:
    async with running(shape) as router:
        body = completion(prompt, echo=True, stream=True)
        parts = events((await router.client.post("/v1/completions", json=body)).text)
        url = f"{router.cluster.prefill_urls[0]}/v1/completions"
        plain = events((await router.client.post(url, json=body)).text)
        assert "".join(texts(parts)) == "".join(texts(plain))
        assert "".join(texts(parts)).startswith("the quick brown fox")
        await router.settled()


async def test_an_echoing_stream_that_is_cut_echoes_once() -> None:
    async with running(SIX, **QUICK) as router:
        for after in (0, 5):
            for worker in router.cluster.decode:
                await router.cluster.inject(worker.name, "recompute", after_events=after)
            body = completion("the quick brown fox", echo=True, stream=True, max_tokens=30)
            text = "".join(texts(events((await router.client.post("/v1/completions", json=body)).text)))
            url = f"{router.cluster.prefill_urls[0]}/v1/completions"
            plain = "".join(texts(events((await router.client.post(url, json=body)).text)))
            assert text == plain
            for worker in router.cluster.decode:
                worker.faults.clear()
        await router.settled()


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2}, {"logprobs": 0, "prompt": ["abc def", "ghi"]}])
async def test_a_prompt_is_scored_without_any_decoder(shape: ClusterShape, fields: dict[str, Any]) -> None:
    async with running(shape) as router:
        body = completion("the quick brown fox", echo=True) | {"max_tokens": 0} | fields
        ours = await router.client.post("/v1/completions", json=body)
        plain = await router.client.post(f"{router.cluster.prefill_urls[0]}/v1/completions", json=body)
        assert ours.status_code == plain.status_code == 200
        assert ours.json()["choices"] == plain.json()["choices"]
        if "n" not in fields:  # vLLM counts the prompt's one token per answer
            assert ours.json()["usage"] == plain.json()["usage"]
        assert sum(worker.counters["requests"] for worker in router.cluster.decode) == 0
        if "logprobs" not in fields:
            streamed = await router.client.post("/v1/completions", json=body | {"stream": True})
            parts = events(streamed.text)
            whole = [choice["text"] for choice in ours.json()["choices"]]
            assert sorted(texts(parts)) == sorted(whole) and parts[-1] == "[DONE]"
        await router.settled()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1, "stream": True},
        {"prompt_logprobs": -1, "stream": True},
        {"echo": True, "logprobs": 1, "stream": True},
        {"max_tokens": 0},
    ],
    ids=["stream", "stream-all", "stream-echo", "no-echo"],
)
async def test_impossible_prompt_scoring_is_refused_with_the_reason(fields: dict[str, Any]) -> None:
    async with running(SIX) as router:
        reply = await router.client.post("/v1/completions", json=completion(**{"max_tokens": 12} | fields))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in ("prompt_logprobs", "echo", "max_tokens")
        assert sum(worker.counters["requests"] for worker in router.cluster.prefill) == 0


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("many", [{"n": 4}, {"prompt": ["a b", "c d", "e f"]}], ids=["n", "prompts"])
async def test_choices_of_one_killing_request_together_reach_two_decode_workers(
    shape: ClusterShape, stream: bool, many: dict[str, Any]
) -> None:
    async with running(shape, **QUICK) as router:
        body = completion(stream=stream) | KILLS | many
        reply = await router.client.post("/v1/completions", json=body)
        assert reply.status_code == 502
        assert len(dead(router)) == 2
        assert router.app.services.metrics.given_up_requests.value() == 1
        await router.settled()


@pytest.mark.parametrize("prompts", [["kills", "good"], ["good", "kills"], ["kills", "good", "good", "good"]])
async def test_a_killing_prompt_reaches_two_decode_workers_whatever_other_prompts_the_request_has(
    prompts: list[str],
) -> None:
    async def dies(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b"kills" in asked.body:
            dead = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
            writer.write(reply(dead, status="500 Internal Server Error"))
        else:
            writer.write(well_decoded(asked))

    decoders = {f"d{n}": Evil(well_decoded, respond=dies) for n in range(6)}
    async with before(decoders) as (app, client):
        answer = await client.post("/v1/completions", json={"prompt": prompts})
        assert answer.status_code == 502
        met = [name for name, decoder in decoders.items() if any(b"kills" in asked.body for asked in decoder.asked)]
        assert len(met) == 2
        assert app.services.metrics.given_up_requests.value() == 1


async def test_more_choices_than_slots_are_answered_though_a_decoder_dies_under_the_first() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=2, time_scale=0.02, lease_s=300.0)
    async with running(shape, **QUICK) as router:
        decoders = {
            url.removeprefix("http://"): worker
            for url, worker in zip(router.cluster.decode_urls, router.cluster.decode, strict=True)
        }
        for name in ("d0", "d1"):
            await router.cluster.inject(name, "freeze")
        ask = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(n=9)))

        def waiting_at() -> list[str]:
            return [leg.at_worker for leg in router.app.services.legs if leg.at_worker in decoders]

        await until(waiting_at)
        at = waiting_at()
        assert len(at) == 1
        for name, worker in decoders.items():
            worker.rank.stalled = False
            if name in at:
                worker.kill_engine()
        reply = await ask
        assert reply.status_code == 200, reply.text
        assert [choice["text"] for choice in reply.json()["choices"]] == [decode(continuation(PROMPT, 12))] * 9
        await router.settled()


@pytest.mark.parametrize("shape", [SIX, LAYERWISE], ids=["pull", "layerwise"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_when_a_third_decode_worker_dies_under_it(shape: ClusterShape, stream: bool) -> None:
    async with running(shape, **QUICK) as router:
        body = completion(stream=stream, max_tokens=2000)
        got = io.StringIO()

        async def asked() -> int:
            async with router.client.stream("POST", "/v1/completions", json=body) as reply:
                with contextlib.suppress(httpx.RemoteProtocolError):  # an answer that is broken off ends so
                    async for text in reply.aiter_text():
                        got.write(text)
                return reply.status_code

        ask = asyncio.ensure_future(asked())

        def strike() -> bool:
            for worker in router.cluster.decode:
                tokens = sum(
                    leg.answer.scanner.generated.in_segment for leg in router.app.services.legs if leg.streaming_from
                )
                if worker.rank.running and tokens and not worker.dead:
                    worker.kill_engine()
            return ask.done()

        await until(strike)
        assert await ask == (200 if stream else 502)
        assert len(dead(router)) == 3
        assert "3 decode workers" in got.getvalue()
        assert router.app.services.metrics.given_up_requests.value() == 1
        await router.settled()


UNKNOWN = {"error": {"message": "KeyError: 'high'", "type": "InternalServerError", "param": None, "code": 500}}


def chokes(well: Answer) -> Answer:
    """A worker whose chat template has no word for one `reasoning_effort`: vLLM says 500, and lives."""

    def answer(asked: Asked) -> bytes:
        if "reasoning_effort" in asked.data:
            return reply(UNKNOWN, status="500 Internal Server Error")
        return well(asked)

    return answer


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_request_that_gets_500_from_all_workers_takes_none_of_them_out(tier: str, n_workers: int) -> None:
    def of(tier_of: str, well: Answer) -> dict[str, Evil]:
        return {f"{tier_of[0]}{n}": Evil(chokes(well) if tier_of == tier else well) for n in range(n_workers)}

    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with before(of("decode", well_decoded), of("prefill", well_prefilled)) as (app, client):
        for stream in (False, True, False, True):
            odd = {**body, "stream": stream, "reasoning_effort": "high"}
            reply = await client.post("/v1/chat/completions", json=odd)
            assert (reply.status_code, reply.json()) == (500, UNKNOWN)
            assert (await client.post("/v1/chat/completions", json={**body, "stream": stream})).status_code == 200
            assert not [one.id for one in app.services.fleet if one.circuit.doubtful]
