"""Decode first, on an emulated layerwise cluster: prefillers push, decode workers ask, everything is released."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape
from balanceroute.engine.tokens import FIRST_TRIPLE_ID, continuation, decode
from balanceroute.proxy.life.layerwise import Layerwise
from tests.integration.router import Router, pushed_back, running
from tests.integration.test_proxy_answers import PROMPT, chat, completion, events, texts, vanish_at_any_moment
from tests.waiting import until

pytestmark = pytest.mark.anyio

LAYERWISE = {"connector": "mooncake_layerwise", "time_scale": 0.02}
SHAPE = ClusterShape(prefillers=2, decoders=4, max_num_seqs=8, **LAYERWISE)  # type: ignore[arg-type]
ONE = ClusterShape(prefillers=1, decoders=1, max_num_seqs=4, **LAYERWISE)  # type: ignore[arg-type]
TWO_BY_TWO = ClusterShape(prefillers=2, decoders=2, max_num_seqs=4, **LAYERWISE)  # type: ignore[arg-type]


def callbacks(router: Router, outcome: str) -> float:
    return router.app.services.metrics.callbacks.value(outcome)


def probes(router: Router) -> int:
    return sum(worker.counters["requests"] for worker in router.cluster.prefill)


def ids_of(parts: list[Any]) -> list[int]:
    return [i for p in parts if p != "[DONE]" for c in p["choices"] for i in c.get("token_ids") or ()]


async def ask(router: Router, **body: Any) -> httpx.Response:
    return await router.client.post("/v1/completions", json=completion(**body))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_completion_is_the_models_own_with_the_exact_prompt_size(stream: bool) -> None:
    async with running(SHAPE) as router:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = await ask(router, max_tokens=80, **options)
        assert reply.status_code == 200, reply.text
        parts = events(reply.text) if stream else []
        answer = parts[-2] if stream else reply.json()
        text = "".join(texts(parts)) if stream else answer["choices"][0]["text"]
        assert text == decode(continuation(PROMPT, 80))
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 80)
        await router.settled()
        assert probes(router) == 1 and callbacks(router, "accepted") == 1
        assert router.cluster.violations() == {}


async def test_a_chat_s_estimate_is_corrected_by_the_prefiller(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, seen = Layerwise._prefill_for, asyncio.Event()

    async def held(self: Layerwise, body: bytes) -> Any:
        await seen.wait()
        return await prefill(self, body)

    monkeypatch.setattr(Layerwise, "_prefill_for", held)
    async with running(ONE) as router:
        snapshot = router.app.services.ledger.scheduler.snapshot
        request = asyncio.ensure_future(router.client.post("/v1/chat/completions", json=chat("x" * 900, max_tokens=90)))
        sizes: set[int] = set()

        def look() -> bool:
            sizes.update(tracker.prompt_tokens for tracker in snapshot.decoding())
            return request.done()

        await until(lambda: look() or sizes)
        seen.set()
        await until(look)
        answer = (await request).json()
        assert answer["usage"]["prompt_tokens"] in sizes and len(sizes) == 2
        await router.settled()


@pytest.mark.parametrize("tier", ["p", "d"])
async def test_a_worker_with_another_model_than_the_others_gives_no_client_a_404(tier: str) -> None:
    health = {"interval_s": 3600.0}  # else the worker that refuses all comes back
    async with running(TWO_BY_TWO, retry={"base_delay_s": 0.001, "max_delay_s": 0.01}, health=health) as router:
        await asyncio.gather(*[ask(router) for _ in range(6)])
        await router.cluster.inject(f"{tier}1", "status", status=404, count=None)
        replies = await asyncio.gather(*[ask(router) for _ in range(6)])
        assert [reply.status_code for reply in replies] == [200] * 6
        known, other = router.app.services.fleet.of(Role.PREFILL if tier == "p" else Role.DECODE)
        assert other.circuit.doubtful, "it was asked, and rests"
        assert tier == "d" or router.app.services.metrics.recomputes.value("worker_lost") == 0, (
            "the decode worker waits"
        )
        assert (await ask(router, model="nope")).status_code == 404 and not known.circuit.doubtful
        await router.settled()


async def test_while_all_others_are_full_a_worker_with_another_model_fails_no_request() -> None:
    shape = replace(TWO_BY_TWO, max_num_seqs=1)
    quick: dict[str, Any] = {
        "retry": {"base_delay_s": 0.001, "max_delay_s": 0.01},
        "health": {"interval_s": 0.01, "failure_threshold": 1},
    }
    async with running(shape, **quick) as router:
        await asyncio.gather(*[ask(router) for _ in range(4)])
        await router.cluster.inject("d1", "status", status=404, count=None)
        replies = await asyncio.gather(*[ask(router, max_tokens=200) for _ in range(4)])
        assert [reply.status_code for reply in replies] == [200] * 4
        await router.settled()


async def test_fifty_at_once_get_each_their_own_answer() -> None:
    async with running(SHAPE) as router:

        async def one(n: int) -> None:
            draw = random.Random(n)
            start = FIRST_TRIPLE_ID + draw.randrange(5000)
            prompt = list(range(start, start + draw.randrange(1, 400)))
            tokens = continuation(prompt, draw.randrange(1, 60))
            reply = await ask(router, prompt=prompt, max_tokens=len(tokens), stream=n % 2 == 0)
            assert reply.status_code == 200, reply.text
            parts = events(reply.text) if n % 2 == 0 else []
            assert ("".join(texts(parts)) if parts else reply.json()["choices"][0]["text"]) == decode(tokens)

        await asyncio.gather(*map(one, range(50)))
        await router.settled()
        assert router.cluster.violations() == {}


async def test_several_answers_are_each_prefilled_and_merged() -> None:
    async with running(SHAPE) as router:
        answer = (await ask(router, prompt=[PROMPT, PROMPT[:20]], n=2)).json()
        expected = [decode(continuation(prompt, 12)) for prompt in (PROMPT, PROMPT, PROMPT[:20], PROMPT[:20])]
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == 60
        await router.settled()
        assert probes(router) == 4


@pytest.mark.parametrize("after", [0, 1, 30], ids=["before-the-first-token", "after-one", "after-thirty"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_recomputed_request_is_prefilled_a_second_time_and_goes_on_token_by_token(
    after: int, endpoint: str
) -> None:
    async with running(ONE) as router:
        await router.cluster.inject("d0", "recompute", after_events=after, count=1)
        if endpoint == "chat":
            path, body = "/v1/chat/completions", chat(max_tokens=80, stream=True, return_token_ids=True)
        else:
            path, body = "/v1/completions", completion(max_tokens=80, stream=True, return_token_ids=True)
        parts, undisturbed = [events((await router.client.post(path, json=body)).text) for _ in range(2)]
        assert parts[-1] == "[DONE]"
        assert ids_of(parts) == ids_of(undisturbed) and len(ids_of(parts)) == 80
        assert len({part["id"] for part in parts[:-1]}) == 1
        await router.settled()
        assert probes(router) == 3 and callbacks(router, "accepted") == 3 and callbacks(router, "repeated") == 0
        assert router.cluster.violations() == {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_only_the_decode_worker_has_counted_is_counted_exactly_over_a_recompute(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefiller's reply may be overtaken by what its KV made possible."""
    prefill = Layerwise._prefill_for

    async def lost_once(self: Layerwise, body: bytes) -> Any:
        result = await prefill(self, body)
        if probes(router) == 1:
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(Layerwise, "_prefill_for", lost_once)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = chat("how many tokens are these?" * 9, max_tokens=80, **options)
    async with running(ONE) as router:
        await router.cluster.inject("d0", "recompute", after_events=30, count=1)
        replies = [await router.client.post("/v1/chat/completions", json=body) for _ in range(2)]
        recomputed, undisturbed = [events(reply.text)[-2] if stream else reply.json() for reply in replies]
        assert recomputed["usage"]["prompt_tokens"] == undisturbed["usage"]["prompt_tokens"]
        await router.settled()
        assert probes(router) == 3


async def test_a_prefiller_that_is_down_is_passed_over_for_the_same_decode_worker() -> None:
    async with running(TWO_BY_TWO) as router:
        await router.cluster.inject("p0", "stop")
        replies = await asyncio.gather(*(ask(router) for _ in range(6)))
        assert [reply.json()["choices"][0]["text"] for reply in replies] == [decode(continuation(PROMPT, 12))] * 6
        await router.settled()
        assert callbacks(router, "accepted") == 6  # no decode was started over
        assert router.cluster.violations() == {}


async def test_a_prefiller_that_fails_on_the_way_makes_the_waiting_decode_start_over() -> None:
    async with running(TWO_BY_TWO) as router:
        await router.cluster.inject("p0", "status", status=500, count=1)
        await router.cluster.inject("p1", "status", status=500, count=1)
        reply = await ask(router, stream=True)
        assert "".join(texts(events(reply.text))) == decode(continuation(PROMPT, 12))
        await router.settled()
        assert callbacks(router, "accepted") == 3
        assert router.cluster.violations() == {}


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (500, 500)])
async def test_a_prefill_that_no_one_does_ends_the_waiting_decode_with_its_status(status: int, expected: int) -> None:
    async with running(ONE) as router:
        await router.cluster.inject("p0", "status", status=status, count=99)
        reply = await ask(router, stream=True)
        assert reply.status_code == expected and reply.json()["error"]["code"] == expected
        await router.settled()


@pytest.mark.parametrize("role", ["p", "d"])
async def test_requests_wait_while_every_worker_pushes_back_and_none_fails(role: str) -> None:
    async with running(TWO_BY_TWO, retry={"max_attempts": 1}) as router:
        for name in (f"{role}0", f"{role}1"):
            await router.cluster.inject(name, "status", status=503, count=None)
        asks = asyncio.gather(*(ask(router, stream=n % 2 == 0) for n in range(12)))
        await pushed_back(router, {"p": "prefill", "d": "decode"}[role])
        assert not asks.done()
        for name in (f"{role}0", f"{role}1"):
            await router.cluster.inject(name, "clear")
        assert [reply.status_code for reply in await asks] == [200] * 12
        await router.settled()
        assert router.cluster.violations() == {}


@pytest.mark.parametrize("role", ["p", "d"])
async def test_endless_back_pressure_of_workers_ends_with_503_at_the_queue_deadline(role: str) -> None:
    async with running(ONE, queue={"deadline_s": 1.0}) as router:
        await router.cluster.inject(f"{role}0", "status", status=429, count=None)
        began_s = asyncio.get_running_loop().time()
        reply = await ask(router, stream=True)
        assert asyncio.get_running_loop().time() - began_s >= 1.0
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        await router.settled()


async def test_without_any_reachable_prefiller_the_client_gets_a_5xx_and_nothing_stays() -> None:
    async with running(ONE, queue={"deadline_s": 0.5}) as router:
        await router.cluster.inject("p0", "stop")
        reply = await ask(router)
        assert reply.status_code in (502, 503)
        await router.settled()


async def test_a_decode_worker_waits_while_its_prefiller_is_full() -> None:
    async with running(ONE, prefill={"poll_interval_s": 60.0}) as router:
        ledger = router.app.services.ledger
        prefiller = ledger.scheduler.snapshot.prefillers[0]
        await until(lambda: ledger.prefiller(prefiller.spec.id).cache_known != (None, 0))  # the only poll is over
        ledger.report_prefiller(prefiller.spec.id, 0.95)
        work = asyncio.ensure_future(ask(router))
        await until(lambda: ledger.view().asking == 1)
        assert ledger.dispatch() == [] and prefiller.inflight == 0 and not work.done()
        ledger.report_prefiller(prefiller.spec.id, 0.5)
        assert (await work).status_code == 200
        await router.settled()


async def test_a_decode_worker_lost_mid_stream_is_resumed_on_another() -> None:
    async with running(TWO_BY_TWO) as router:
        for name in ("d0", "d1"):
            await router.cluster.inject(name, "reset", after_events=10, count=1)
        parts = events((await ask(router, stream=True, max_tokens=60)).text)
        assert "".join(texts(parts)) == decode(continuation(PROMPT, 60)) and parts[-1] == "[DONE]"
        await router.settled()
        assert set(router.cluster.violations()) <= {"layerwise_unmatched"}


async def test_a_client_that_disconnects_at_any_moment_leaks_nothing() -> None:
    shape = ClusterShape(
        prefillers=2,
        decoders=2,
        max_num_seqs=4,
        time_scale=0.3,
        prefill_tokens_per_s=5_000,
        connector="mooncake_layerwise",  # type: ignore[arg-type]
    )
    async with running(shape) as router:
        await vanish_at_any_moment(router, 40)
        # a prefiller may finish in the moment in which its decode worker is hung up on
        assert set(router.cluster.violations()) <= {"layerwise_unmatched"}


async def test_a_request_that_is_recomputed_for_ever_without_a_token_ends_in_502() -> None:
    async with running(ONE, retry={"base_delay_s": 0.0}) as router:
        await router.cluster.inject("d0", "recompute", after_events=0, count=None)
        reply = await ask(router, stream=True)
        assert reply.status_code == 502 and "again and again" in reply.json()["error"]["message"]
        await router.settled()
