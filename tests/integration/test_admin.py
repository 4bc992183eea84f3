"""The set of workers, health, drains and what an operator sees and does."""

import asyncio
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from balanceroute.config import Config, DecodeWorker
from balanceroute.core.types import Role
from balanceroute.emulator import ClusterShape, EmulatedCluster
from balanceroute.errors import ConfigError
from balanceroute.journal import rerun
from balanceroute.proxy.app import create_app
from balanceroute.proxy.ops.admin import AT_ONCE
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.reload import reload
from balanceroute.proxy.workers.fleet import MOST_GONE
from tests.integration.router import Router, configuration, patient, running, served
from tests.integration.test_proxy_answers import completion
from tests.plain_http import PLAIN
from tests.unit.proxy.reloading import apply
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

SHAPE = ClusterShape(prefillers=2, decoders=3, max_num_seqs=8, time_scale=0.02)


def states(router: Router) -> dict[str, str]:
    """The workers' states by the emulator's names."""
    snapshot = router.app.services.ledger.scheduler.snapshot
    urls = [*router.cluster.prefill_urls, *router.cluster.decode_urls]
    names = dict(zip(urls, router.cluster.workers, strict=True))
    return {names[worker.spec.url]: worker.state.value for worker in [*snapshot.prefillers, *snapshot.workers]}


def only_first_decoder(config: Config) -> Config:
    decode = config.decode.model_copy(update={"workers": config.decode.workers[:1]})
    return config.model_copy(update={"decode": decode})


async def test_a_worker_added_at_run_time_serves_and_leaves_when_it_is_empty() -> None:
    async with running(SHAPE, adjust=only_first_decoder, routing={"policy": "round_robin"}) as router:
        services, new = router.app.services, router.cluster.decode_urls[1].removeprefix("http://")
        reply = await router.client.post("/instances/add", json={"type": "decode", "instances": new})
        assert reply.status_code == 200
        assert new in reply.json()["current_decode_instances"]
        await until(lambda: services.fleet[new].state.value == "up")
        asks = [router.client.post("/v1/completions", json=completion(max_tokens=60)) for _ in range(6)]
        work = asyncio.gather(*asks)
        await until(lambda: services.fleet[new].in_use)
        reply = await router.client.post("/instances/remove", json={"type": "decode", "instances": [new]})
        assert new not in reply.json()["current_decode_instances"]
        assert [answer.status_code for answer in await work] == [200] * 6
        await until(lambda: new not in services.fleet)
        assert f'worker="{new}"' not in (await router.client.get("/metrics")).text
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        await router.settled()


@pytest.mark.parametrize("by_reload", [True, False], ids=["by-reload", "by-an-operator"])
async def test_workers_that_join_are_asked_for_their_health_at_once(by_reload: bool) -> None:
    """A tier whose workers are all replaced serves nobody until the new ones have answered."""
    async with running(SHAPE, adjust=only_first_decoder, health={"interval_s": 3600.0}) as router:
        services, urls = router.app.services, router.cluster.decode_urls[1:]
        await until(lambda: all(worker.seen_healthy for worker in services.fleet))
        if by_reload:
            await reload(services, configuration(router.cluster, decode={"workers": [{"url": url} for url in urls]}))
        else:
            assert (await router.client.post("/instances/add", json={"type": "decode", "instances": urls})).is_success
        names = [url.removeprefix("http://") for url in urls]
        await until(lambda: all(services.fleet[name].state.value == "up" for name in names))


async def test_a_worker_that_was_removed_cannot_be_undrained_but_the_others_of_its_server_can() -> None:
    """It gets nothing new until it is added again: 200 would say that it does."""
    async with running(ClusterShape(prefillers=1, decoders=2, ranks_per_url=2, time_scale=0.02)) as router:
        fleet, url = router.app.services.fleet, router.cluster.decode_urls[0]
        first, second = fleet.of(Role.DECODE)
        first.in_use = 1  # so that it can't go at once
        for route, instance in (("remove", {"url": url, "dp_rank": 0}), ("drain", {"url": url, "dp_rank": 1})):
            body = {"type": "decode", "instances": instance}
            assert (await router.client.post(f"/instances/{route}", json=body)).status_code == 200
        body = {"type": "decode", "instances": {"url": url, "dp_rank": 0}}
        reply = await router.client.post("/instances/undrain", json=body)
        assert reply.status_code == 400 and "was removed, and leaves; add it again" in reply.json()["error"]["message"]
        reply = await router.client.post("/instances/undrain", json={"type": "decode", "instances": url})
        assert reply.status_code == 200 and not second.drained and first.leaving
        first.in_use = 0


@pytest.mark.parametrize("by_reload", [True, False], ids=["by-reload", "by-an-operator"])
async def test_hundreds_of_workers_join_and_leave_over_several_turns_of_the_loop(by_reload: bool) -> None:
    """All streams would stand still meanwhile."""
    count, seen = 5 * AT_ONCE, list[int]()
    async with running(SHAPE, health={"interval_s": 3600.0}) as router:
        services, urls = router.app.services, router.cluster.decode_urls
        new = [f"http://127.0.0.1:{port}" for port in range(1, count + 1)]

        async def change(what: str, there: list[str]) -> None:
            if by_reload:
                workers = [{"url": url} for url in (*urls, *there)]
                await reload(services, configuration(router.cluster, decode={"workers": workers}))
            else:
                body = {"type": "decode", "instances": new}
                assert (await router.client.post(f"/instances/{what}", json=body)).is_success

        for what, there in (("add", new), ("remove", [])):
            changing = asyncio.ensure_future(change(what, there))
            while not changing.done():
                seen.append(sum(not worker.leaving for worker in services.fleet))
                await asyncio.sleep(0)
            await changing
        assert max(seen) == min(seen) + count
        assert all(abs(after - before) <= AT_ONCE for before, after in pairwise(seen))
        await until(lambda: len(list(services.fleet)) == min(seen))


async def test_hundreds_of_idle_workers_are_gone_when_their_removal_is_answered() -> None:
    """So that the same call may be followed by one that adds them with other settings, however many they are."""
    new = [f"http://127.0.0.1:{port}" for port in range(1, 2 * MOST_GONE + 1)]
    async with running(SHAPE, health={"interval_s": 3600.0}) as router:
        before = len(list(router.app.services.fleet))
        for change, slots, there in (("add", 8, len(new)), ("remove", 8, 0), ("add", 4, len(new))):
            instances = [{"url": url, "max_num_seqs": slots} for url in new]
            reply = await router.client.post(f"/instances/{change}", json={"type": "decode", "instances": instances})
            assert reply.status_code == 200, reply.text
            assert len(list(router.app.services.fleet)) == before + there


async def test_a_drained_worker_gets_nothing_new_until_it_is_undrained() -> None:
    async with running(SHAPE, routing={"policy": "round_robin"}) as router:
        url = router.cluster.decode_urls[0]
        body = {"type": "decode", "instances": [url]}
        assert (await router.client.post("/instances/drain", json=body)).status_code == 200
        for _ in range(4):
            await router.client.post("/v1/completions", json=completion())
        admitted = router.app.services.metrics.admissions
        name = url.removeprefix("http://")
        assert admitted.value(name, "stage_3") == 0
        await router.client.post("/instances/undrain", json=body)
        for _ in range(4):
            await router.client.post("/v1/completions", json=completion())
        assert admitted.value(name, "stage_3") > 0


@pytest.mark.parametrize(
    ("route", "good", "bad"),
    [
        ("add", "127.0.0.1:1", 0),
        ("add", "127.0.0.1:1", "127.0.0.1:1"),
        ("add", "127.0.0.1:1", {"url": "127.0.0.1:2", "slots": -1}),
        ("drain", 0, "127.0.0.1:1"),
        ("remove", 0, "127.0.0.1:1"),
        ("drain", 0, {"url": 1, "dp_rank": 1}),
        ("undrain", 0, {"url": 1, "rank": 0}),
    ],
    ids=[
        "one here already",
        "one twice",
        "a bad field",
        "drain of an unknown one",
        "removal of an unknown one",
        "drain of an unknown rank",
        "a field that workers don't have",
    ],
)
async def test_a_change_of_several_workers_that_cannot_all_be_made_changes_none(
    route: str, good: str | int, bad: str | int | dict[str, object]
) -> None:
    async with running(SHAPE) as router:
        fleet, urls = router.app.services.fleet, router.cluster.decode_urls
        before = [(worker.id, worker.state, worker.drained, worker.leaving) for worker in fleet]
        instances = [urls[each] if isinstance(each, int) else each for each in (good, bad)]
        for each in instances:
            if isinstance(each, dict) and isinstance(each["url"], int):
                each["url"] = urls[each["url"]]
        reply = await router.client.post(f"/instances/{route}", json={"type": "decode", "instances": instances})
        assert reply.status_code in (400, 404)
        assert [(worker.id, worker.state, worker.drained, worker.leaving) for worker in fleet] == before


async def test_a_rank_is_drained_by_its_rank_or_id_and_all_ranks_by_their_url() -> None:
    async with running(ClusterShape(prefillers=1, decoders=4, ranks_per_url=4, time_scale=0.02)) as router:
        fleet, url = router.app.services.fleet, router.cluster.decode_urls[0]
        name = url.removeprefix("http://")

        async def change(route: str, instance: str | dict[str, object]) -> None:
            body = {"type": "decode", "instances": [instance]}
            assert (await router.client.post(f"/instances/{route}", json=body)).status_code == 200

        def drained() -> list[str]:
            return [worker.id for worker in fleet if worker.drained]

        await change("drain", {"url": url, "dp_rank": 1})
        assert drained() == [f"{name}@1"]
        await change("drain", {"url": name, "id": f"{name}@2"})
        assert drained() == [f"{name}@1", f"{name}@2"]
        await change("remove", {"url": url, "dp_rank": 1})
        assert [worker.id for worker in fleet.of(Role.DECODE)] == [f"{name}@{rank}" for rank in (0, 2, 3)]
        await change("drain", name)
        assert len(drained()) == 3
        await change("undrain", url)
        assert drained() == []


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://127.0.0.1", "http://127.0.0.1/behind"])
async def test_a_worker_is_named_as_it_is_listed_whatever_its_url_leaves_out(url: str) -> None:
    async with running(SHAPE) as router:
        add = {"type": "prefill", "instances": url}
        listed = (await router.client.post("/instances/add", json=add)).json()["current_prefill_instances"][-1]
        reply = await router.client.post("/instances/remove", json={"type": "prefill", "instances": listed})
        assert reply.status_code == 200 and listed not in reply.json()["current_prefill_instances"]


async def test_readiness_fails_and_names_the_workers_when_all_decode_workers_are_drained() -> None:
    async with running(SHAPE) as router:
        body = {"type": "decode", "instances": router.cluster.decode_urls}
        names = [url.removeprefix("http://") for url in router.cluster.decode_urls]
        await router.client.post("/instances/drain", json=body)
        reply = await router.client.get("/ready")
        assert reply.status_code == 503
        assert reply.json() == {
            "status": "no healthy workers",
            "workers_up": {"prefill": 2, "decode": 0},
            "workers_drained": {name: "it was drained by an operator" for name in names},
        }
        await router.client.post("/instances/undrain", json={"type": "decode", "instances": names[:1]})
        reply = await router.client.get("/ready")
        assert reply.status_code == 200 and reply.json()["workers_up"] == {"prefill": 2, "decode": 1}


async def test_a_worker_that_never_answers_is_dropped_after_its_attempts() -> None:
    async with running(SHAPE, lifecycle={"join_attempts": 2, "join_interval_s": 0.1}) as router:
        await router.client.post("/instances/add", json={"type": "prefill", "instances": "127.0.0.1:1"})
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        await until(lambda: "127.0.0.1:1" not in router.app.services.fleet)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"type":"x","instances":"a:1"}', b'{"type":"decode"}', b'{"type":"decode","instances":[1]}'],
)
async def test_a_malformed_change_is_refused(body: bytes) -> None:
    async with running(SHAPE) as router:
        reply = await router.client.post("/instances/add", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400 and "instances" in reply.json()["error"]["message"]


async def test_changes_need_the_admin_token_where_one_is_set() -> None:
    async with running(SHAPE, auth={"admin_token": "s3cret"}) as router:
        body = {"type": "decode", "instances": router.cluster.decode_urls[0]}
        assert (await router.client.post("/instances/drain", json=body)).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert (await router.client.post("/instances/drain", json=body, headers=headers)).status_code == 200


async def test_a_router_that_starts_before_some_workers_serves_and_adds_them_later() -> None:
    def with_dead_decoder(config: Config) -> Config:
        dead = DecodeWorker.model_validate({"url": "http://127.0.0.1:1", "id": "dead"})
        decode = config.decode.model_copy(update={"workers": (dead, *config.decode.workers)})
        return config.model_copy(update={"decode": decode})

    async with running(SHAPE, adjust=with_dead_decoder) as router:
        fleet = router.app.services.fleet
        await until(lambda: fleet["dead"].state.value == "down")
        replies = [await router.client.post("/v1/completions", json=completion()) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200] * 4
        assert (await router.client.get("/ready")).status_code == 200


async def test_health_checks_notice_workers_that_go_down_and_come_back() -> None:
    async with running(SHAPE, health={"interval_s": 0.05, "failure_threshold": 2}) as router:
        await router.cluster.inject("d1", "stop")
        await until(lambda: states(router)["d1"] == "down")
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        await router.cluster.inject("d1", "start")
        await until(lambda: states(router)["d1"] == "up")
        await router.settled()


async def test_without_any_decoder_requests_are_refused_at_once_and_readiness_fails() -> None:
    async with running(SHAPE, health={"interval_s": 0.05, "failure_threshold": 1}) as router:
        for name in ("d0", "d1", "d2"):
            await router.cluster.inject(name, "stop")
        await until(lambda: {states(router)[name] for name in ("d0", "d1", "d2")} == {"down"})
        reply = await router.client.post("/v1/completions", json=completion())
        assert reply.status_code == 503 and "retry-after" in reply.headers
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.client.get("/health")).status_code == 200


async def test_a_decoder_without_progress_is_taken_out_although_its_health_is_200() -> None:
    health = {"interval_s": 0.05, "stall_after_s": 0.3, "open_for_s": 0.2}
    async with running(SHAPE, health=health, limits={"idle_timeout_s": 1.5}) as router:
        body = completion(max_tokens=200, stream=True)
        asks = asyncio.gather(*(router.client.post("/v1/completions", json=body) for _ in range(6)))
        services = router.app.services
        await until(lambda: all(worker.running for worker in services.ledger.scheduler.snapshot.workers))
        await router.cluster.inject("d0", "freeze")
        await until(lambda: states(router)["d0"] == "down")
        await router.cluster.inject("d0", "unfreeze")
        assert [reply.status_code for reply in await asks] == [200] * 6
        await until(lambda: states(router)["d0"] == "up")
        await router.settled()


async def test_requests_that_a_worker_runs_for_others_are_reported_as_divergence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(SHAPE, prefill={"poll_interval_s": 0.02}) as router:
        caplog.set_level(logging.WARNING)
        async with httpx.AsyncClient(base_url=router.cluster.decode_urls[0], **PLAIN, timeout=PATIENCE_S) as other:
            work = asyncio.ensure_future(other.post("/v1/completions", json=completion(max_tokens=30_000)))
            divergence = router.app.services.metrics.divergence
            name = router.cluster.decode_urls[0].removeprefix("http://")
            await until(lambda: divergence.lasting(name) == 1.0)
            text = (await router.client.get("/metrics")).text
            assert f'balanceroute_ledger_divergence{{worker="{name}"}} 1.0' in text
            assert "worker and ledger disagree" in caplog.text
            work.cancel()
            await asyncio.wait([work])
        await until(lambda: divergence.lasting(name) == 0.0)


async def test_a_reload_changes_bounds_and_workers_and_refuses_what_needs_a_restart() -> None:
    async with running(SHAPE, adjust=only_first_decoder) as router:
        services = router.app.services
        old = services.config
        everyone = old.decode.model_copy(
            update={"workers": tuple(DecodeWorker(url=url) for url in router.cluster.decode_urls[1:])}
        )
        first = old.decode.workers[0].worker_id
        queue = old.queue.model_copy(update={"max_queued": 7})
        await apply(services, old.model_copy(update={"decode": everyone, "queue": queue}))
        assert services.ledger.scheduler.config.max_queued == 7
        prompt = "x" * 4096
        assert (await router.client.post("/tokenize", json={"prompt": prompt})).status_code == 200
        limits = old.limits.model_copy(update={"max_body_bytes": 2048})
        await apply(services, services.config.model_copy(update={"limits": limits}))
        assert (await router.client.post("/tokenize", json={"prompt": prompt})).status_code == 413
        await until(lambda: first not in services.fleet)
        await until(lambda: all(worker.state.value == "up" for worker in services.fleet))
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        listen = old.listen.model_copy(update={"port": 1})
        with pytest.raises(ConfigError, match="listen"):
            await apply(services, services.config.model_copy(update={"listen": listen}))


async def test_a_request_that_any_worker_can_answer_is_passed_on() -> None:
    async with running(SHAPE) as router:
        assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == "emulated"
        assert (await router.client.get("/version")).status_code == 200
        tokens = (await router.client.post("/tokenize", json={"model": "emulated", "prompt": "abc"})).json()["tokens"]
        text = (await router.client.post("/detokenize", json={"model": "emulated", "tokens": tokens})).json()
        assert text["prompt"] == "abc"
        assert (await router.client.get("/healthcheck")).json() == {
            "status": "ok",
            "prefill_instances": 2,
            "decode_instances": 3,
            "request_num": 0,
        }
        reply = await router.client.post("/v1/responses", json={})
        assert reply.status_code == 404 and reply.json()["error"]["code"] == 404
        assert (await router.client.get("/nowhere")).status_code == 404
        assert (await router.client.post("/reset_prefix_cache")).status_code == 200


async def test_rerunning_a_journal_of_live_decisions_gives_the_same_decisions(tmp_path: Path) -> None:
    async with EmulatedCluster(patient(SHAPE)) as cluster:
        config = configuration(cluster)
        app = create_app(config, journal=tmp_path / "journal", strict=True)
        async with served(app) as url, httpx.AsyncClient(base_url=url, **PLAIN, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(client.post("/v1/completions", json=completion()) for _ in range(10)))
    report = rerun(tmp_path / "journal")
    assert report.difference is None and report.admissions == 10


async def test_other_policies_and_predictors_take_over_under_load_and_no_request_is_lost() -> None:
    shape = ClusterShape(prefillers=2, decoders=3, max_num_seqs=3, time_scale=0.02)
    async with running(shape, routing={"policy": "least_kv"}) as router:
        services = router.app.services
        scheduler = services.ledger.scheduler

        async def ask(number: int) -> None:
            body = completion(max_tokens=20 + number, stream=number % 2 == 0)
            reply = await router.client.post("/v1/completions", json=body)
            assert reply.status_code == 200
            if number % 2 == 0:
                assert reply.text.endswith("data: [DONE]\n\n")
            else:
                assert reply.json()["usage"]["completion_tokens"] == 20 + number

        asks = [asyncio.ensure_future(ask(number)) for number in range(60)]
        for policy, kind, horizon in (
            ("br_h", "survival", 20),
            ("target_fit", "survival", 20),
            ("br_h", "exact_match", 7),
            ("join_shortest_queue", "none", 7),
            ("br_0", "none", 7),
            ("br_h", "survival", 40),
        ):
            await until(lambda: len(scheduler.snapshot.pool))
            tree = services.config.model_dump() | {}
            tree["routing"] |= {"policy": policy, "horizon_steps": horizon}
            tree["predictor"] |= {"kind": kind}
            await reload(services, Config.model_validate(tree))
            scheduler.snapshot.check_invariants()
            assert services.ledger.scheduler.policy.name == policy
        await asyncio.gather(*asks)
        await router.settled()
        assert router.cluster.violations() == {}
        assert "refits" in services.tasks and not services.tasks["refits"].done()
        assert 'policy="br_h"' in (await router.client.get("/metrics")).text


async def test_requests_and_changes_of_workers_go_on_while_a_reload_reads_a_long_file_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = threading.Event()

    def long_read(config: Config) -> Perimeter:
        assert served.wait(PATIENCE_S)
        return Perimeter(config)

    monkeypatch.setattr("balanceroute.proxy.reload.Perimeter", long_read)
    async with running(SHAPE) as router:
        services = router.app.services

        async def reload_alone() -> None:
            async with services.changing:
                await reload(services, services.config)

        reloading = asyncio.ensure_future(reload_alone())
        await until(services.changing.locked)
        assert (await router.client.post("/v1/completions", json=completion())).status_code == 200
        body = {"type": "decode", "instances": router.cluster.decode_urls[:1]}
        assert (await router.client.post("/instances/drain", json=body)).status_code == 200
        assert not reloading.done()
        served.set()
        await reloading
        assert services.reloads == 1


async def test_a_switch_of_policy_does_not_reread_the_key_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: a, sha256: {'ab' * 32}}}\n")
    async with running(SHAPE, auth={"client_keys": str(keys)}) as router:
        keys.write_text("half writ")
        assert (await router.client.post("/routing/policy", json={"policy": "least_kv"})).status_code == 200
        known = router.app.services.perimeter.keys
        assert known is not None and [key.name for key in known] == ["a"]


async def refused(
    router: Router, *instances: str | dict[str, Any], kind: str = "decode", change: str = "add", **beside: Any
) -> str:
    """Why these instances cannot be added, or changed otherwise; no worker has come or gone then."""
    fleet = router.app.services.fleet
    before = [worker.id for worker in fleet]
    body = {"type": kind, "instances": [*instances], **beside}
    reply = await router.client.post(f"/instances/{change}", json=body)
    assert reply.status_code == 400 and [worker.id for worker in fleet] == before
    message: str = reply.json()["error"]["message"]
    return message


@pytest.mark.parametrize(("kind", "tier"), [("decode", "decode"), ("prefill", "decode"), ("decode", "prefill")])
async def test_a_server_is_not_added_again_under_another_name(kind: str, tier: str) -> None:
    async with running(SHAPE) as router:
        url = (router.cluster.decode_urls if tier == "decode" else router.cluster.prefill_urls)[0]
        assert "is the server of worker" in await refused(router, {"url": url, "id": "alias"}, kind=kind)


async def test_the_routers_own_address_cannot_be_added_as_a_worker() -> None:
    async with running(SHAPE) as router:
        own = f"127.0.0.1:{router.app.services.config.listen.port}"
        assert "this router's own address" in await refused(router, "127.0.0.1:1", own)


async def test_one_server_is_not_added_twice_by_one_request_but_two_of_its_ranks_are() -> None:
    async with running(SHAPE) as router:
        url = "http://127.0.0.1:1"
        assert "is the server of worker a" in await refused(router, {"url": url, "id": "a"}, {"url": url, "id": "b"})
        ranks = {"type": "decode", "instances": [{"url": url, "dp_rank": 0}, {"url": url, "dp_rank": 1}]}
        assert (await router.client.post("/instances/add", json=ranks)).status_code == 200
        for other in ({"url": url}, {"url": router.cluster.decode_urls[0], "dp_rank": 0}):
            assert "is the server of worker" in await refused(router, other)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"max_num_seq": 3}, "decode.workers.max_num_seq: unknown key; did you mean decode.workers.max_num_seqs?"),
        ({"max_num_seqs": 0}, "decode.workers.max_num_seqs = 0: accepted is an integer, 1 to 65536"),
    ],
    ids=["unknown", "out of bounds"],
)
async def test_a_wrong_field_of_an_instance_is_named_as_in_the_configuration(
    entry: dict[str, int], expected: str
) -> None:
    async with running(SHAPE) as router:
        assert expected in await refused(router, {"url": "http://127.0.0.1:1", **entry})


async def test_a_field_of_an_instance_beside_the_instances_is_refused_as_it_would_change_nothing() -> None:
    async with running(SHAPE) as router:
        message = await refused(router, "127.0.0.1:1", max_num_seqs=3)
        assert "max_num_seqs is a field of an instance" in message


async def test_fields_that_mean_nothing_here_are_ignored_in_a_change_as_by_the_example_proxy() -> None:
    async with running(SHAPE) as router:
        body = {"type": "decode", "instances": "127.0.0.1:1", "reason": "scale out", "model": None}
        assert (await router.client.post("/instances/add", json=body)).status_code == 200
        assert "127.0.0.1:1" in router.app.services.fleet


@pytest.mark.parametrize("change", ["add", "remove"])
async def test_an_instance_without_a_port_is_refused_rather_than_taken_for_port_80(change: str) -> None:
    async with running(SHAPE) as router:
        assert "HOST:PORT" in await refused(router, "127.0.0.1", change=change)
