"""Prompts go where most of them is cached: the router in front of emulated prefillers with prefix caches."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape, Connector, EmulatedCluster
from balanceroute.proxy.reload import reload
from tests.integration.relayed import Relayed, relayed
from tests.integration.router import Router, running
from tests.waiting import until

pytestmark = pytest.mark.anyio

SHAPE = ClusterShape(
    prefillers=2, decoders=2, max_num_seqs=16, time_scale=0.02, block_size=16, prefill_blocks=2_000, prefix_caching=True
)
AFFINITY = {"policy": "prefix_affinity"}


def text(seed: str, size: int = 1100) -> str:
    return " ".join(f"{seed}{number}" for number in range(size))[:size]


async def polled(router: Router) -> None:
    """Wait until every prefiller's counters have been read: hits are counted from then on."""
    await until(lambda: all(p.cache_known != (None, 0) for p in router.app.services.ledger.view().prefillers))


async def ask(router: Router, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Conversation:
    """Each turn's prompt is all that was said before. The clients take turns."""

    def __init__(self, name: str, *clients: httpx.AsyncClient) -> None:
        self.name, self.clients = name, itertools.cycle(clients)
        self.messages: list[dict[str, str]] = []

    async def turn(self) -> None:
        self.messages.append({"role": "user", "content": text(f"{self.name}{len(self.messages)}-")})
        answer = await next(self.clients).post(
            "/v1/chat/completions", json={"messages": self.messages, "max_tokens": 4, "ignore_eos": True}
        )
        assert answer.status_code == 200, answer.text
        self.messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})


async def converse(router: Router, name: str, turns: int) -> None:
    conversation = Conversation(name, router.client)
    for _ in range(turns):
        await conversation.turn()


def computed(cluster: EmulatedCluster) -> tuple[int, int]:
    """Prompt tokens that came, and those that some prefiller had."""
    counters = [worker.counters for worker in cluster.prefill]
    return sum(c["prompt_tokens"] for c in counters), sum(c["prefix_hits"] for c in counters)


async def found_by_conversations(router: Router | Relayed, *clients: httpx.AsyncClient) -> float:
    """The share of the prompt tokens of five conversations that some prefiller had."""
    conversations = [Conversation(name, *clients) for name in ("ant", "bee", "cat", "dog", "elk")]
    for _ in range(5):
        for conversation in conversations:
            await conversation.turn()
    await router.settled()
    prompt, hits = computed(router.cluster)
    return hits / prompt


async def hit_ratio(policy: str, prefillers: int = 2) -> float:
    shape = replace(SHAPE, prefillers=prefillers)
    async with running(shape, prefill={"policy": policy}) as router:
        return await found_by_conversations(router, router.client)


async def test_conversations_find_nearly_as_much_cached_on_two_prefillers_as_on_one() -> None:
    one = await hit_ratio("least_tokens", prefillers=1)
    two = await hit_ratio("prefix_affinity")
    spread = await hit_ratio("round_robin")
    assert two >= 0.9 * one > 0.5
    assert spread < two


async def relayed_hit_ratio(relays: int) -> float:
    async with relayed(SHAPE, count=relays, prefill=AFFINITY) as router:
        return await found_by_conversations(router, *(relay.client for relay in router.relays))


async def test_conversations_find_as_much_cached_if_their_turns_come_through_different_relays() -> None:
    assert await relayed_hit_ratio(3) >= 0.95 * await relayed_hit_ratio(1) > 0.5


@pytest.mark.parametrize("details", [False, True], ids=["by the counters", "by the answers"])
async def test_predicted_hits_equal_those_of_the_engines(details: bool) -> None:
    shape = replace(SHAPE, prompt_tokens_details=details)
    async with running(shape, prefill=AFFINITY) as router:
        await polled(router)
        for name in ("ant", "bee", "cat"):
            await converse(router, name, 4)
        await router.settled()
        found = computed(router.cluster)[1]
        assert found > 0

        async def prefix_hits() -> list[dict[str, int]]:
            return [prefiller["prefix_hits"] for prefiller in (await router.state())["prefillers"]]

        async def all_told() -> bool:
            return sum(entry["real_tokens"] or 0 for entry in await prefix_hits()) == found

        await until(all_told)  # the counters are polled
        hits = await prefix_hits()
        predicted = sum(entry["predicted_tokens"] for entry in hits)
        assert 0.7 * found <= predicted <= 1.3 * found
        assert [entry["missed_tokens"] for entry in hits] == [0, 0]
        page = (await router.client.get("/metrics")).text
        assert "balanceroute_prefix_hit_tokens_total{" in page


async def test_a_prefiller_that_caches_nothing_is_named_and_no_prompt_waits_for_it() -> None:
    async with running(replace(SHAPE, prefix_caching=False), prefill=AFFINITY) as router:

        async def is_named() -> bool:
            ready = (await router.client.get("/ready")).json()
            return "prefix caching is off" in str(ready.get("reasons"))

        await until(is_named)
        await converse(router, "ant", 4)
        state = await router.state()
        assert [prefiller["prefix_cache"]["blocks"] for prefiller in state["prefillers"]] == [0, 0]
        assert all(worker.counters["requests"] == 2 for worker in router.cluster.prefill)


async def test_prefixes_are_used_by_default_where_they_are_cached_without_a_condition_elsewhere() -> None:
    async def run(prefix_caching: bool) -> list[int]:
        async with running(replace(SHAPE, prefix_caching=prefix_caching)) as router:

            async def sizes_are_told() -> bool:
                caches = [prefiller["prefix_cache"] for prefiller in (await router.state())["prefillers"]]
                return all(cache["capacity_tokens"] is not None for cache in caches)

            await until(sizes_are_told)
            await converse(router, "ant", 4)
            assert (await router.client.get("/ready")).json()["status"] == "ready"
            return sorted(worker.counters["requests"] for worker in router.cluster.prefill)

    assert await run(prefix_caching=False) == [2, 2]
    assert await run(prefix_caching=True) == [0, 4]


async def test_a_reset_prefix_cache_is_forgotten() -> None:
    async with running(SHAPE, prefill=AFFINITY) as router:
        await converse(router, "ant", 2)
        cached = [prefiller["prefix_cache"]["tokens"] for prefiller in (await router.state())["prefillers"]]
        assert sum(cached) > 0
        assert (await router.client.post("/reset_prefix_cache")).status_code == 200
        cached = [prefiller["prefix_cache"]["tokens"] for prefiller in (await router.state())["prefillers"]]
        assert cached == [0, 0]


async def test_counters_show_that_a_restarted_prefiller_has_a_cold_cache() -> None:
    async with running(SHAPE, prefill=AFFINITY, health={"interval_s": 60.0}) as router:
        ledger = router.app.services.ledger
        await polled(router)
        await converse(router, "ant", 3)
        warm = next(p for p in ledger.view().prefillers if p.cache_tokens)
        await until(lambda: bool(ledger.prefiller(warm.id).hit_tokens))
        index = [prefiller.id for prefiller in ledger.view().prefillers].index(warm.id)
        await router.cluster.inject(f"p{index}", "stop")
        await router.cluster.inject(f"p{index}", "start")
        await until(lambda: ledger.prefiller(warm.id).cache_tokens == 0)


async def test_the_policy_changes_while_requests_are_under_way() -> None:
    async with running(SHAPE, prefill=AFFINITY) as router:
        services = router.app.services
        tree = services.config
        load = asyncio.gather(*(converse(router, name, 4) for name in ("ant", "bee", "cat", "dog", "elk")))
        for turn, policy in enumerate(("least_tokens", "prefix_affinity", "round_robin", "prefix_affinity") * 3):
            await until(lambda turn=turn: load.done() or computed(router.cluster)[0] > 100 * turn)
            changed = tree.prefill.model_copy(update={"policy": policy})
            await reload(services, tree.model_copy(update={"prefill": changed}))
        await load
        await router.settled()
        await converse(router, "fox", 3)
        assert sum(prefiller["prefix_cache"]["tokens"] for prefiller in (await router.state())["prefillers"]) > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [({"cache_salt": "a"}, {"cache_salt": "b"}), ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]})],
    ids=["cache_salt", "tools"],
)
async def test_prompts_that_an_engine_caches_separately_are_predicted_separately(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    async with running(SHAPE, prefill=AFFINITY) as router:
        await ask(router, text("same", 3000), **first)
        await ask(router, text("same", 3000), **second)
        await router.settled()
        hits = [prefiller["prefix_hits"]["predicted_tokens"] for prefiller in (await router.state())["prefillers"]]
        assert hits == [0, 0]


async def sent(router: Router, path: str, body: dict[str, Any]) -> None:
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("way", ["messages", "token ids", "layerwise"])
async def test_every_kind_of_prompt_returns_to_the_prefiller_of_its_prefix(way: str) -> None:
    connector = Connector.MOONCAKE_LAYERWISE if way == "layerwise" else Connector.MOONCAKE_V1
    async with running(replace(SHAPE, connector=connector), prefill=AFFINITY) as router:
        for turn in range(1, 5):
            if way == "messages":
                conversation = [{"role": "user", "content": text("said", 1200 * turn)}]
                await sent(router, "/v1/messages", {"model": "emulated", "max_tokens": 2, "messages": conversation})
            elif way == "token ids":
                ids = [50 + number % 97 for number in range(700 * turn)]
                await sent(router, "/v1/completions", {"prompt": ids, "max_tokens": 2})
            else:
                await sent(router, "/v1/completions", {"prompt": text("said", 1200 * turn), "max_tokens": 2})
        await router.settled()
        counts = sorted(worker.counters["requests"] for worker in router.cluster.prefill)
        assert counts == [0, 4]
        prompt, hits = computed(router.cluster)
        assert hits > 0.5 * prompt


async def test_a_huge_prompt_does_not_keep_short_ones_waiting_behind_it() -> None:
    shape = replace(SHAPE, prefill_blocks=4_000, max_model_len=60_000)
    async with running(shape, prefill={**AFFINITY, "max_inflight": 4}) as router:
        services = router.app.services
        for number in range(8):
            await ask(router, text(f"mean{number}-", 1500))
        for name in ("p0", "p1"):  # it is still there when the last short one is done
            await router.cluster.inject(name, "slow_prefill", factor=1e6)
        huge = asyncio.ensure_future(ask(router, text("huge", 50_000)))
        await until(lambda: any(worker.prefiller.running for worker in router.cluster.prefill))
        for name in ("p0", "p1"):
            await router.cluster.inject(name, "slow_prefill", factor=1.0)
        before = [worker.counters["requests"] for worker in router.cluster.prefill]
        await asyncio.gather(*(ask(router, text(f"short{number}-", 200)) for number in range(6)))
        after = [worker.counters["requests"] for worker in router.cluster.prefill]
        busy = [bool(prefiller.inflight) for prefiller in services.ledger.view().prefillers]
        assert [now - then for now, then in zip(after, before, strict=True)] == [0 if b else 6 for b in busy]
        huge.cancel()
