"""The page of the cluster and the numbers that it draws."""

import asyncio
import re

import pytest

from balanceroute.emulator import ClusterShape
from tests.integration.router import running
from tests.integration.test_proxy_answers import completion

pytestmark = pytest.mark.anyio


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with running() as router:
        reply = await router.client.get("/dashboard")
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert not re.findall(r"""(?:src|href)\s*=|https?://|@import|url\(""", reply.text)
        assert "innerHTML" not in reply.text  # a worker's name is text, whatever is in it


async def test_the_numbers_of_an_idle_cluster_are_there_and_zero() -> None:
    async with running() as router:
        data = (await router.client.get("/dashboard/data")).json()
        assert [len(data["workers"]), len(data["prefillers"])] == [4, 2]
        assert {worker["load_tokens"] for worker in data["workers"]} == {0}
        assert data["waiting"] == {"queued": 0, "prefilling": 0, "pooled": 0, "pooled_tokens": 0}
        assert data["generated_tokens"] == 0 and data["policy"] == "br_0"


async def test_loads_tokens_and_quantiles_follow_the_requests_without_naming_them() -> None:
    async with running(ClusterShape(prefillers=1, decoders=2, max_num_seqs=4, time_scale=0.1)) as router:
        body = completion(max_tokens=200)
        jobs = [asyncio.ensure_future(router.client.post("/v1/completions", json=body)) for _ in range(4)]
        tokens = [0.0]
        loaded = False
        while not all(job.done() for job in jobs):
            reply = await router.client.get("/dashboard/data")
            assert all(job_id not in reply.text for job_id in router.app.services.ledger.tickets)
            data = reply.json()
            loaded = loaded or all(worker["load_tokens"] > 40 and worker["active"] == 2 for worker in data["workers"])
            tokens.append(data["generated_tokens"])
            await asyncio.sleep(0.02)
        data = (await router.client.get("/dashboard/data")).json()
        assert loaded and len({count for count in tokens if 0 < count < 800}) > 3
        assert data["generated_tokens"] == 800 and data["requests"]["finished"] == 4
        for name in ("ttft_s", "tpot_s"):
            assert sum(data[name]["counts"]) == 4 and len(data[name]["counts"]) == len(data[name]["bounds"]) + 1
        await router.settled()
