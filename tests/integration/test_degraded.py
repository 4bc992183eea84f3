"""Workers that tell too little of themselves, or something else than they were said to: said clearly, and served on."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from balanceroute.emulator import ClusterShape, Connector
from tests.integration.router import running
from tests.integration.test_proxy_answers import completion
from tests.security.evil_worker import Asked, attacked, reply, well_prefilled
from tests.waiting import until

pytestmark = pytest.mark.anyio

Page = Callable[[Asked], bytes]
GAUGE = b'vllm:kv_cache_usage_perc{engine="0"} %s\n'


def page(body: bytes, status: str = "200 OK") -> Page:
    """Workers whose /metrics is this, and whose /health is well."""
    return lambda asked: reply(body, status=status, kind="text/plain") if asked.target == "/metrics" else reply({})


UNTELLING: dict[str, Page] = {
    "404": page(b"", "404 Not Found"),
    "401": page(b"", "401 Unauthorized"),
    "500": page(b"", "500 Internal Server Error"),
    "a redirect": page(b"", "302 Found"),
    "no gauge": page(b"python_info 1.0\n"),
    "empty": page(b""),
    "not a number": page(GAUGE % b"abc"),
    "NaN": page(GAUGE % b"NaN"),
    "infinite": page(GAUGE % b"+Inf"),
    "1e300": page(GAUGE % b"1e300"),
    "negative": page(GAUGE % b"-5"),
    "not text": page(b"\xff\xfe\x00" * 100),
    "another engine's label": page(b'vllm:kv_cache_usage_perc{engine="\xff"} x\n'),
    "huge": page(b"# \n" * 2_000_000),
    "a block of a million digits": page(b'vllm:cache_config_info{block_size="%s"} 1.0\n' % (b"9" * 1_000_000)),
}


@pytest.mark.parametrize("others", UNTELLING.values(), ids=UNTELLING.keys())
async def test_a_metrics_page_without_usage_is_reported_once_and_requests_are_served(
    others: Page, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked() as router:
        router.prefiller.others = others
        prefiller = router.app.services.ledger.scheduler.snapshot.prefillers[0]
        await until(lambda: prefiller.kv_usage is None)
        for _ in range(3):
            assert (await router.complete()).status_code == 200
        ready = await router.client.get("/ready")
        assert ready.status_code == 200 and ready.json()["status"] == "degraded"
        assert ready.json()["reasons"][0].startswith("p0: its /metrics ")
        assert (await router.client.get("/dashboard/data")).json()["degraded_by"] == ready.json()["reasons"]
        assert 'balanceroute_degraded_workers{kind="metrics"} 1.0' in await router.metrics()
        assert [record.message for record in caplog.records if record.message == "degraded"] == ["degraded"]
        await router.sound()
        router.prefiller.others = page(GAUGE % b"0.25")
        await until(lambda: prefiller.kv_usage == 0.25)
        assert (await router.client.get("/ready")).json()["status"] == "ready"


async def test_unknown_kv_usage_limits_concurrent_probes() -> None:
    """Of 20 requests, the prefiller is asked for 8 at once; the others wait."""
    async with attacked() as router:
        router.prefiller.others = UNTELLING["404"]
        snapshot = router.app.services.ledger.scheduler.snapshot
        await until(lambda: snapshot.prefillers[0].kv_usage is None)
        go = asyncio.Event()

        async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(well_prefilled(asked))

        router.prefiller.respond = respond
        requests = [asyncio.ensure_future(router.complete()) for _ in range(20)]
        await until(lambda: len(router.prefiller.asked) == 8 and len(snapshot.queued) == 12)
        go.set()
        assert {reply.status_code for reply in await asyncio.gather(*requests)} == {200}
        assert len(router.prefiller.asked) == 20


async def test_a_prefiller_with_an_unreachable_metrics_page_counts_as_full_while_another_is_available() -> None:
    async with running(QUICK, health={"interval_s": 0.05, "timeout_s": 0.2}) as router:
        services = router.app.services
        silent, well = (
            services.fleet[prefiller.spec.id] for prefiller in services.ledger.scheduler.snapshot.prefillers
        )
        await hang_metrics(router.cluster.prefill_urls[0], router.client)
        snapshot = services.ledger.scheduler.snapshot
        await until(lambda: services.metrics.scrapes_failed.value(silent.id) > 5)
        assert snapshot.prefiller(silent.id).kv_usage == 1.0
        assert silent.healthy and well.healthy
        assert services.degraded_by == [f"{silent.id}: its /metrics did not answer within 0.2 s"]
        answers = [await router.client.post("/v1/completions", json=completion(max_tokens=2)) for _ in range(4)]
        assert {reply.status_code for reply in answers} == {200}
        await hang_metrics(router.cluster.prefill_urls[1], router.client)
        await until(lambda: snapshot.prefiller(silent.id).kv_usage is None)  # or nobody would be served any more
        assert (await router.client.post("/v1/completions", json=completion(max_tokens=2))).status_code == 200


async def test_requests_get_503_at_once_without_a_healthy_prefiller() -> None:
    async with attacked() as router:
        router.prefiller.others = lambda asked: reply({}, status="404 Not Found")  # /health too
        await until(lambda: not router.app.services.fleet["p0"].healthy)
        answer = await router.complete()
        assert answer.status_code == 503 and not router.prefiller.asked
        await until(lambda: router.app.services.degraded_by == [])  # that it is down says more


NIXL = ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.02, connector=Connector.NIXL)
LAYERWISE = ClusterShape(
    prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.02, connector=Connector.MOONCAKE_LAYERWISE
)
QUICK = ClusterShape(prefillers=2, decoders=1, max_num_seqs=8, time_scale=0.02)


async def hang_metrics(url: str, client: httpx.AsyncClient) -> None:
    """Have an emulated worker's page hang, and nothing else."""
    reply = await client.post(f"{url}/_emulator/fault", json={"kind": "stall", "path": "/metrics", "count": 10_000})
    assert reply.status_code == 200, reply.text


async def test_a_wrong_connector_is_reported_and_its_shorter_lease_applies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(NIXL, connector="mooncake_v1") as router:
        services = router.app.services
        assert (services.config.pool_ttl_s, services.drainer.pin_s) == (240.0, 480.0)
        for _ in range(3):
            assert (await router.client.post("/v1/completions", json=completion(max_tokens=2))).status_code == 200
        assert (services.config.pool_ttl_s, services.drainer.pin_s) == (20.0, 30.0)
        assert services.ledger.scheduler.config.pool_ttl_s == 20.0
        ready = await router.client.get("/ready")
        assert ready.status_code == 200 and ready.json()["status"] == "degraded"
        assert ready.json()["reasons"][0].endswith("set connector: nixl")
        assert len([record for record in caplog.records if record.message == "degraded"]) == 1
        await router.settled()


async def test_the_operators_kv_pin_s_overrides_the_connectors_lease() -> None:
    async with running(NIXL, connector="mooncake_v1", prefill={"kv_pin_s": 100.0}, pool={"ttl_s": 90.0}) as router:
        assert (await router.client.post("/v1/completions", json=completion(max_tokens=2))).status_code == 200
        assert router.app.services.config.pool_ttl_s == 90.0
        assert (await router.client.get("/ready")).json()["status"] == "degraded"


async def test_a_prefiller_that_pins_is_refused_in_decode_first_mode() -> None:
    """The decode worker would wait for a push that never comes."""
    async with running(LAYERWISE) as router:
        services = router.app.services
        params = {"remote_block_ids": [[1]], "remote_num_tokens": 3, "tp_size": 1}
        prefiller = next(iter(services.fleet))

        async def pulling(method: str, path: str, *args: Any, **options: Any) -> Any:
            answer = await asked(method, path, *args, **options)
            if path == "/v1/completions":
                body = orjson.loads(await answer.read(2**20))
                answer.keep(orjson.dumps({**body, "kv_transfer_params": params}))
            return answer

        asked, prefiller.upstream.request = prefiller.upstream.request, pulling  # type: ignore[method-assign]
        reply = await router.client.post("/v1/completions", json=completion(max_tokens=2))
        assert reply.status_code == 502 and "set connector: nixl" in reply.json()["error"]["message"]
        ready = await router.client.get("/ready")
        assert ready.status_code == 200 and "set connector: nixl" in ready.json()["reasons"][0]


async def test_the_configured_connector_raises_no_condition() -> None:
    for connector in (Connector.NIXL, Connector.MOONCAKE_V1):
        shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=8, time_scale=0.02, connector=connector)
        async with running(shape) as router:
            assert (await router.client.post("/v1/completions", json=completion(max_tokens=2))).status_code == 200
            assert (await router.client.get("/ready")).json()["status"] == "ready"
            assert router.app.services.fleet[next(iter(router.app.services.fleet)).id].kv_connector == str(connector)


async def test_a_decode_worker_that_never_requests_a_prefill_is_reported_before_requests_time_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("balanceroute.proxy.life.layerwise.CALLBACK_S", 0.05)
    async with running(NIXL, connector="mooncake_layerwise") as router:
        asking = asyncio.ensure_future(router.client.post("/v1/completions", json=completion(max_tokens=2)))
        await until(lambda: any(record.message == "degraded" for record in caplog.records))
        ready = await router.client.get("/ready")
        assert ready.status_code == 200 and ready.json()["status"] == "degraded"
        assert "asked for no prefill" in ready.json()["reasons"][0]
        asking.cancel()
        await asyncio.wait([asking])
        await router.settled()


async def test_a_decode_worker_that_requests_a_prefill_late_clears_its_condition(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("balanceroute.proxy.life.layerwise.CALLBACK_S", 0.0)
    async with running(LAYERWISE) as router:
        assert (await router.client.post("/v1/completions", json=completion(max_tokens=2))).status_code == 200
        assert (await router.client.get("/ready")).json()["status"] == "ready"
        assert "no longer degraded" in [record.message for record in caplog.records]
