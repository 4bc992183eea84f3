"""The page of the cluster and the numbers that it draws."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape
from tests.integration.router import Router, running
from tests.integration.test_proxy_answers import completion
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with running() as router:
        reply = await router.client.get("/dashboard")
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        paths = re.findall(r"""(?:src|href)="([^"]+)""" + '"', reply.text)
        assert len(paths) == 5 and all(path.startswith("/dashboard/assets/") for path in paths if path != "data:,")
        for path in paths[1:]:
            asset = await router.client.get(path)
            assert asset.status_code == 200 and asset.headers["x-content-type-options"] == "nosniff"
            if "uPlot" not in path:
                assert not re.findall(r"""https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", asset.text)
                assert "innerHTML" not in asset.text  # a worker's name is text, whatever is in it
        assert (await router.client.get("/dashboard/assets/page.html")).status_code == 404
        assert (await router.client.get("/dashboard/assets/..%2fpage.html")).status_code == 404


async def test_a_process_serves_its_own_dashboard_page_while_its_files_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_file(*_: object) -> bytes:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("pathlib.Path.read_bytes", no_file)
    async with running() as router:
        for path in ("", "/assets/dashboard.js", "/assets/uPlot.min.css"):
            reply = await router.client.get(f"/dashboard{path}")
            assert reply.status_code == 200 and reply.text


async def test_the_address_alone_leads_to_the_dashboard() -> None:
    async with running() as router:
        reply = await router.client.get("/", follow_redirects=False)
        assert (reply.status_code, reply.headers["location"]) == (307, "/dashboard")


async def update_when(router: Router, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first news of the stream that the test waits for."""
    async with asyncio.timeout(PATIENCE_S):
        headers = {"accept": "text/event-stream"}
        async with router.client.stream("GET", "/dashboard/stream", headers=headers, timeout=None) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and found(update := json.loads(line.removeprefix("data: "))):
                    return update
    raise AssertionError("the stream ended")


async def test_a_page_that_is_opened_later_sees_the_past_and_the_stream_goes_on_from_there() -> None:
    async with running() as router:
        update = await update_when(router, lambda update: router.app.services.tasks["recorder"] and update["sample"])
        past = (await router.client.get("/dashboard/data")).json()["past"]
        assert past["at"][0] <= update["sample"]["at"] and len(past["at"]) == len(past["series"]["load_max"])
        assert set(past["loads"]) == {worker["id"] for worker in update["workers"]}
        assert past["series"]["ttft_p50_s"][-1] is None  # of no request, and not 0
        assert (await router.client.get("/dashboard/stream")).json()["sample"]["at"] >= update["sample"]["at"]


async def test_the_stream_begins_with_all_events_so_that_none_is_lost_between_data_and_stream() -> None:
    async with running() as router:
        await update_when(router, lambda update: update["sample"] is not None)
        before = (await router.client.get("/dashboard/data")).json()["events"]
        await router.client.post("/routing/policy", json={"policy": "least_kv"})
        await router.client.get("/dashboard/data")  # of another page: the event is older than the stream
        update = await update_when(router, lambda update: True)
        assert [event["text"] for event in update["events"][len(before) :]] == ["policy br_0 → least_kv"]
        assert update["events"][: len(before)] == before


async def test_a_dead_worker_is_named_with_since_when_and_why_and_its_load_is_unknown() -> None:
    async with running(health={"interval_s": 0.05, "failure_threshold": 2}) as router:
        worker = router.cluster.decode[0]
        worker_id = router.app.services.fleet.of(Role.DECODE)[0].id
        await update_when(router, lambda update: update["sample"] is not None)
        worker.kill_engine()
        # the sample of this news may be older than the worker's end
        update = await update_when(router, lambda update: update["sample"]["loads"][worker_id] is None)
        (down,) = [w for w in update["workers"] if w["state"] == "down"]
        assert down["since"] and down["id"] == worker_id and down["why"] == "its /health answers 503"
        assert (await router.client.get("/ready")).json()["workers_down"] == {worker_id: down["why"]}
        data = (await router.client.get("/dashboard/data")).json()
        assert data["past"]["loads"][worker_id][-1] is None
        assert [event["text"] for event in data["events"] if event["kind"] == "down"] == [
            f"{worker_id} is down: its /health answers 503"
        ]


async def test_a_drain_and_another_policy_are_events_and_the_knobs_are_those_of_the_policy() -> None:
    async with running() as router:
        await update_when(router, lambda update: update["sample"] is not None)
        url = router.cluster.decode_urls[0]
        drained = await router.client.post("/instances/drain", json={"type": "decode", "instances": [url]})
        switched = await router.client.post("/routing/policy", json={"policy": "least_kv"})
        assert (drained.status_code, switched.json()["before"]) == (200, "br_0")
        update = await update_when(router, lambda update: update["policy"] == "least_kv" and len(update["events"]) > 1)
        texts = [event["text"] for event in (await router.client.get("/dashboard/data")).json()["events"]]
        assert any(text.endswith("is drained") for text in texts) and "policy br_0 → least_kv" in texts
        assert update["knobs"].keys() == {"seed"}
        reply = await router.client.post("/v1/completions", json=completion())
        assert reply.status_code == 200
        assert router.app.services.ledger.scheduler.policy.name == "least_kv"
        await router.settled()


@pytest.mark.parametrize("body", [b"{}", b"no", b'{"policy": "os:system"}', b'{"policy": 3}', b"[]"])
async def test_an_unknown_policy_is_refused_and_nothing_is_imported(body: bytes) -> None:
    async with running() as router:
        headers = {"content-type": "application/json"}
        reply = await router.client.post("/routing/policy", content=body, headers=headers)
        assert reply.status_code == 400 and "level_fit" in reply.json()["error"]["message"]
        assert (await router.client.get("/dashboard/what_if?policy=os:system")).status_code == 400
        assert (await router.client.get("/dashboard/what_if")).status_code == 400
        assert (await router.client.get("/dashboard/what_if?" + "policy=br_0&" * 5)).status_code == 400


async def test_what_if_lists_other_policies_side_by_side_and_changes_nothing() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=1)
    async with running(shape) as router:
        body = completion(max_tokens=300)
        jobs = [asyncio.ensure_future(router.client.post("/v1/completions", json=body)) for _ in range(6)]
        await update_when(router, lambda update: update["waiting"]["pooled"] >= 4)
        reply = await router.client.get("/dashboard/what_if?policy=level_fit&policy=join_shortest_queue")
        found = reply.json()
        assert [each["policy"] for each in found["policies"]] == ["level_fit", "join_shortest_queue"]
        level, jsq = found["policies"]
        assert level["admitted"] == 0 and level["reason"] == "no slot is left free"
        assert jsq["admitted"] == found["waiting"] >= 1  # it queues them at the workers
        assert all(reply.status_code == 200 for reply in await asyncio.gather(*jobs))
        await router.settled()


async def test_each_listed_decision_has_its_runner_up() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=2, time_scale=0.1)
    async with running(shape) as router:
        await update_when(router, lambda update: update["sample"] is not None)  # somebody watches
        requests = asyncio.ensure_future(keep_asking(router))
        update = await update_when(
            router, lambda update: any(" to " in row["runner_up"] for row in update["decisions"])
        )
        requests.cancel()
        assert all(row["runner_up"] for row in update["decisions"]), "what is not known is not listed"
        assert update["decision_count"] >= len(update["decisions"])
        row = update["decisions"][0]
        assert row["worker"] in {worker["id"] for worker in update["workers"]} and row["policy"] == "br_0"
        assert [each["number"] for each in update["decisions"]] == sorted(
            (each["number"] for each in update["decisions"]), reverse=True
        )
        await asyncio.wait([requests])
        await router.settled()  # no decision comes between the two answers
        listed = (await router.client.get("/decisions", params={"last": 100})).json()
        last = (await router.client.get("/decisions", params={"last": 2})).json()["decisions"]
        numbers = [row["number"] for row in listed["decisions"]]
        assert listed["count"] >= len(numbers) > 0 and [row["number"] for row in last] == numbers[:2]
        known = {each["number"]: each for each in update["decisions"]}
        again = [each for each in listed["decisions"] if each["number"] in known]
        assert bool(again) == (listed["count"] - max(known) <= 100), (
            "what the page showed is there, too, if it is not too old"
        )
        for each in again:
            shown = known[each["number"]]
            assert all(each[name] == shown[name] for name in ("request", "worker", "score", "runner_up_score"))
            assert abs(each["at"] - (time.time() - each["age_s"])) < 60


@pytest.mark.parametrize("last", ["0", "101", "-1", "x", "9" * 400, "²", "000000001" + "0" * 5000])
async def test_an_invalid_number_of_decisions_is_refused(last: str) -> None:
    async with running() as router:
        reply = await router.client.get("/decisions", params={"last": last})
        assert reply.status_code == 400 and "1 to 100" in reply.json()["error"]["message"]
        assert (await router.client.get("/decisions")).json() == {"count": 0, "decisions": []}


async def test_requesting_decisions_turns_on_their_recording() -> None:
    shape = ClusterShape(prefillers=1, decoders=2, max_num_seqs=2, time_scale=0.1)
    async with running(shape) as router:
        requests = asyncio.ensure_future(keep_asking(router))
        async with asyncio.timeout(PATIENCE_S):
            found: list[dict[str, Any]] = []
            while not any(" to " in (row["runner_up"] or "") for row in found):
                found = (await router.client.get("/decisions")).json()["decisions"]
        requests.cancel()
        await asyncio.wait([requests])
        await router.settled()


async def keep_asking(router: Router) -> None:
    while True:
        replies = [router.client.post("/v1/completions", json=completion(max_tokens=20)) for _ in range(4)]
        await asyncio.gather(*replies)


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
            assert all(job_id not in reply.text for job_id in router.app.services.tickets.by_id)
            data = reply.json()
            loaded = loaded or all(worker["load_tokens"] > 40 and worker["active"] == 2 for worker in data["workers"])
            tokens.append(data["generated_tokens"])
        data = (await router.client.get("/dashboard/data")).json()
        assert loaded and len({count for count in tokens if 0 < count < 800}) > 3
        assert data["generated_tokens"] == 800 and data["requests"]["finished"] == 4
        for name in ("ttft_s", "tpot_s"):
            assert sum(data[name]["counts"]) == 4 and len(data[name]["counts"]) == len(data[name]["bounds"]) + 1
        await router.settled()
