"""Load on the decode workers that is not ours: clients that go there directly, and a second router."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.proxy.app import RouterApp, create_app
from tests.integration.router import configuration, patient, running, served
from tests.integration.test_proxy_answers import completion
from tests.plain_http import PLAIN
from tests.waiting import until

pytestmark = pytest.mark.anyio

SHAPE = ClusterShape(prefillers=2, decoders=2, max_num_seqs=4, time_scale=0.1)
SLOTS = 12  # of fewer, too few change hands between two reports to tell others' requests from old reports of one's own
SHARED = ClusterShape(prefillers=2, decoders=2, max_num_seqs=SLOTS, time_scale=0.2)
OFTEN = {"prefill": {"poll_interval_s": 0.1}}


def foreign(app: RouterApp) -> list[int]:
    return [worker.foreign_requests for worker in app.services.ledger.scheduler.snapshot.workers]


@pytest.mark.parametrize("policy", ["br_h", "target_fit", "join_shortest_queue"])
async def test_foreign_load_on_a_decode_worker_diverts_requests_until_it_is_gone(policy: str) -> None:
    async with running(SHAPE, routing={"policy": policy}, **OFTEN) as router:
        busy, quiet = router.cluster.decode
        async with httpx.AsyncClient(**PLAIN, timeout=None) as direct:
            body = completion(max_tokens=30_000, stream=False)  # longer than the test, which ends them
            tasks = [
                asyncio.get_running_loop().create_task(
                    direct.post(f"{router.cluster.decode_urls[0]}/v1/completions", json=body)
                )
                for _ in range(8)
            ]
            await until(lambda: foreign(router.app)[0] == 8)
            data = (await router.client.get("/dashboard/data")).json()
            assert [worker["foreign_requests"] for worker in data["workers"]] == [8, 0]
            assert data["workers"][0]["foreign_tokens"] > 0 == data["workers"][1]["foreign_tokens"]
            before = busy.counters["requests"]
            replies = await asyncio.gather(
                *(router.client.post("/v1/completions", json=completion(max_tokens=5)) for _ in range(6))
            )
            assert all(reply.status_code == 200 for reply in replies)
            assert (busy.counters["requests"] - before, quiet.counters["requests"]) == (0, 6)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: foreign(router.app) == [0, 0])
        replies = await asyncio.gather(
            *(router.client.post("/v1/completions", json=completion(max_tokens=50)) for _ in range(8))
        )
        assert busy.counters["requests"] > before
        await router.settled()


async def test_two_routers_share_a_cluster_without_queues_at_the_engines() -> None:
    async with EmulatedCluster(patient(SHARED)) as cluster:
        config = configuration(cluster, **OFTEN, decode={"overlap_requests": "auto"})
        apps = [create_app(config, strict=True) for _ in range(2)]
        async with (
            served(apps[0]) as first,
            served(apps[1]) as second,
            httpx.AsyncClient(**PLAIN, timeout=120.0) as client,
        ):
            done: Counter[str] = Counter()
            ended = asyncio.Event()

            async def drive(url: str, tokens: int) -> None:
                while not ended.is_set():
                    reply = await client.post(f"{url}/v1/completions", json=completion(max_tokens=tokens, stream=False))
                    assert reply.status_code == 200
                    done[url] += 1

            def queued() -> int:
                return sum(len(worker.rank.waiting) for worker in cluster.decode)

            async with asyncio.TaskGroup() as crowd:
                for number in range(32):  # each router alone could fill the cluster
                    for url in (first, second):
                        crowd.create_task(drive(url, 60 + 4 * number))
                await until(lambda: queued() >= SLOTS)  # both have filled it, and neither has seen the other yet
                await until(lambda: queued() <= SLOTS // 3)
                served_before, queues = Counter(done), []
                await until(lambda: _look(queues, queued()) and sum((done - served_before).values()) >= 50)
                ended.set()
            shares = done - served_before
            assert sum(queues) / len(queues) < SLOTS, queues  # unaware: as many as there are slots
            assert min(shares.values()) > 0.25 * sum(shares.values()), shares


def _look(queues: list[Any], queue: int) -> bool:
    queues.append(queue)
    return True
