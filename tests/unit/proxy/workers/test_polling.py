"""Polls: one question at a time per URL, and nobody waits for a URL that hangs."""

import asyncio
from collections import Counter
from typing import cast

import pytest

from balanceroute.core.types import Role, WorkerSpec
from balanceroute.proxy.workers.circuit import Circuit, CircuitConfig
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.polling import BATCH, LOOK_S, Polling
from balanceroute.proxy.workers.upstream import Upstream
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time
from tests.waiting import until

pytestmark = pytest.mark.anyio


def workers(*urls: str) -> Fleet:
    made = []
    for rank, url in enumerate(urls):
        spec = WorkerSpec(f"w{rank}", Role.DECODE, url, rank)
        made.append(Worker(spec, Upstream(url), Circuit(CircuitConfig(), lambda _: None)))
    return cast(Fleet, made)


def fatal(group: list[Worker], error: Exception) -> None:
    raise error


async def test_a_hanging_url_is_polled_once_while_the_others_are_polled_every_period() -> None:
    asked: Counter[str] = Counter()

    async def ask(group: list[Worker]) -> None:
        asked[group[0].spec.url] += 1
        if group[0].spec.url == "http://hangs":
            await asyncio.Event().wait()

    polling = Polling(workers("http://hangs", "http://answers"), ask, fatal)
    running = asyncio.ensure_future(polling.run(lambda: 0.001))
    await until(lambda: asked["http://answers"] > 3)
    running.cancel()
    assert asked["http://hangs"] == 1


async def test_ranks_of_one_url_share_one_question() -> None:
    groups: list[list[str]] = []

    async def ask(group: list[Worker]) -> None:
        groups.append([worker.id for worker in group])

    await Polling(workers("http://a", "http://a", "http://b"), ask, fatal).once()
    assert groups == [["w0", "w1"], ["w2"]]


@with_virtual_time
async def test_after_a_first_round_at_once_many_urls_are_polled_spread_over_the_period() -> None:
    now = asyncio.get_running_loop().time
    asked_s: dict[str, list[float]] = {}
    began_s = now()

    async def ask(group: list[Worker]) -> None:
        asked_s.setdefault(group[0].spec.url, []).append(round(now() - began_s, 6))

    polling = Polling(workers(*(f"http://{number}" for number in range(2 * BATCH + 1))), ask, fatal)
    running = asyncio.ensure_future(polling.run(lambda: 3.0, spread=True))
    await let_pass(8.5)
    running.cancel()
    assert list(asked_s.values()) == BATCH * [[0, 3, 6]] + BATCH * [[0, 4, 7]] + [[0, 5, 8]]


@with_virtual_time
async def test_a_round_over_many_urls_begins_over_several_turns_of_the_loop_and_ends_with_its_polling() -> None:
    asked: list[str] = []

    async def ask(group: list[Worker]) -> None:
        asked.append(group[0].spec.url)

    polling = Polling(workers(*(f"http://{number}" for number in range(3 * BATCH))), ask, fatal)
    running = asyncio.ensure_future(polling.run(lambda: 600.0))
    while len(asked) < 3 * BATCH:
        before = len(asked)
        await asyncio.sleep(0)
        assert len(asked) <= before + BATCH
    polling.start()
    running.cancel()
    await asyncio.wait([running])
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(asked) <= 4 * BATCH and not polling._open


@with_virtual_time
async def test_a_period_that_becomes_shorter_does_not_wait_for_the_end_of_the_long_one() -> None:
    asked: Counter[str] = Counter()
    period_s = 600.0

    async def ask(group: list[Worker]) -> None:
        asked[group[0].spec.url] += 1

    running = asyncio.ensure_future(Polling(workers("http://a"), ask, fatal).run(lambda: period_s))
    await let_pass(60)
    assert asked["http://a"] == 1
    period_s = 1.0
    await let_pass(LOOK_S + 3)
    assert asked["http://a"] > 3
    running.cancel()


async def test_a_poll_that_raises_is_reported_and_does_not_stop_the_others() -> None:
    asked: Counter[str] = Counter()
    reported: list[tuple[str, str]] = []

    async def ask(group: list[Worker]) -> None:
        asked[group[0].spec.url] += 1
        if group[0].spec.url == "http://breaks":
            raise KeyError("x")

    def on_bug(group: list[Worker], error: Exception) -> None:
        reported.append((group[0].id, repr(error)))

    polling = Polling(workers("http://breaks", "http://answers"), ask, on_bug)
    running = asyncio.ensure_future(polling.run(lambda: 0.001))
    await until(lambda: asked["http://answers"] > 3 and asked["http://breaks"] > 3)
    running.cancel()
    assert set(reported) == {("w0", "KeyError('x')")}


async def test_a_bug_ends_the_rounds_where_bugs_are_fatal() -> None:
    async def ask(group: list[Worker]) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Polling(workers("http://a"), ask, fatal).run(lambda: 0.0)
