"""One brain, several relays: they answer, limit and judge as one router."""

import asyncio
import hashlib
from pathlib import Path

import httpx
import pytest
import yaml

from balanceroute.config import validate
from balanceroute.core.types import WorkerState
from balanceroute.emulator import ClusterShape
from balanceroute.errors import InputError
from balanceroute.prediction import FinishedRequest, Model, save_model
from balanceroute.proxy.brain import reload_brain
from balanceroute.proxy.changes import Changes, KeptChanges
from balanceroute.proxy.life.suspicion import Suspect
from balanceroute.proxy.workers.circuit import CircuitState
from tests.integration.relayed import LINEAGE, SLOW, Relay, a_brain, answered, relayed
from tests.integration.router import FAST
from tests.integration.test_proxy_answers import completion
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_all_relays_serve_from_one_set_of_slots() -> None:
    async with relayed(FAST) as router:
        await asyncio.gather(*(answered(router.relays[number % 2], number) for number in range(80)))
        assert all(relay.app.services.metrics.requests.value("finished") == 40 for relay in router.relays)
        await router.settled()


def states(relay: Relay) -> dict[str, WorkerState]:
    return {worker.id: worker.state for worker in relay.app.services.fleet}


async def test_what_an_operator_does_at_one_relay_holds_for_all() -> None:
    async with relayed(FAST) as router:
        one, other = router.relays
        url = router.cluster.decode_urls[0]
        worker = url.removeprefix("http://")
        body = {"type": "decode", "instances": url}
        assert (await one.client.post("/instances/drain", json=body)).status_code == 200
        await until(lambda: all(states(relay)[worker] is WorkerState.DRAINING for relay in router.relays))
        assert (await other.client.post("/instances/undrain", json=body)).status_code == 200
        await until(lambda: all(states(relay)[worker] is WorkerState.UP for relay in router.relays))
        assert (await one.client.post("/instances/remove", json=body)).status_code == 200
        await until(lambda: all(worker not in states(relay) for relay in router.relays))
        assert (await other.client.post("/instances/add", json=body)).status_code == 200
        await until(lambda: all(states(relay).get(worker) is WorkerState.UP for relay in router.relays))
        assert (await one.client.post("/routing/policy", json={"policy": "random"})).json()["before"] == "br_0"
        assert (await other.client.get("/state")).json()["policy"] == "random"
        await router.settled()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/ping", 200),
        ("/ready", 200),
        ("/healthcheck", 200),
        ("/metrics", 200),
        ("/state", 200),
        ("/dashboard", 200),
        ("/dashboard/data", 200),
        ("/v1/models", 200),
        ("/v1/completions", 405),
        ("/v1/metaserver", 404),
        ("/nowhere", 404),
    ],
)
async def test_every_route_is_there_at_every_relay(path: str, status: int) -> None:
    async with relayed(FAST, count=1) as router:
        answer = await router.relays[0].client.get(path)
        assert answer.status_code == status
        assert len(answer.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/completions", "POST"), ("/state", "GET, HEAD"), ("/instances/add", "POST"), ("/tokenize", "POST")],
)
async def test_a_method_that_is_not_served_is_answered_with_those_that_are(path: str, allowed: str) -> None:
    async with relayed(FAST, count=1) as router:
        client = router.relays[0].client
        for method in ("DELETE", "PUT", "OPTIONS"):
            reply = await client.request(method, path)
            assert reply.status_code == 405, method
            assert sorted(reply.headers["allow"].split(", ")) == allowed.split(", ")


async def test_the_head_of_an_answer_of_the_brain_has_its_length() -> None:
    async with relayed(FAST, count=1) as router:
        client = router.relays[0].client
        head, whole = await client.head("/dashboard"), await client.get("/dashboard")
        for reply in (head, whole):
            assert reply.headers["content-length"] == str(len(whole.content))
            assert "transfer-encoding" not in reply.headers


async def test_the_admin_token_is_asked_for_at_the_relay() -> None:
    async with relayed(FAST, count=1, auth={"admin_token": "a-token-of-some-length"}) as router:
        client = router.relays[0].client
        assert (await client.get("/state")).status_code == 401
        headers = {"authorization": "Bearer a-token-of-some-length"}
        assert (await client.get("/state", headers=headers)).status_code == 200
        cookie = (await client.post("/dashboard/session", headers=headers)).headers["set-cookie"]
        assert "balanceroute_session=" in cookie


async def test_the_next_brain_knows_what_operators_have_changed() -> None:
    async with relayed(FAST, count=1) as router:
        client, relay = router.relays[0].client, router.relays[0]
        taken, drained, added = (url.removeprefix("http://") for url in router.cluster.decode_urls[:3])
        await client.post("/routing/policy", json={"policy": "random"})
        for what, urls in (("remove", [taken, added]), ("drain", [drained])):
            body = {"type": "decode", "instances": urls}
            assert (await client.post(f"/instances/{what}", json=body)).status_code == 200
        await until(lambda: added not in router.brain.services.fleet)
        joins = {"type": "decode", "instances": {"url": added, "id": "by-hand"}}
        assert (await client.post("/instances/add", json=joins)).status_code == 200
        await until(lambda: states(relay).get("by-hand") is WorkerState.UP)
        await until(lambda: KeptChanges(router.folder.changes, LINEAGE).last.added)
        router.brain.end()
        await until(lambda: relay.app.services.brain.member is None)
        async with a_brain(router.config, router.folder, relays=1) as brain:
            await until(lambda: states(relay).get("by-hand") is WorkerState.UP)
            assert states(relay)[drained] is WorkerState.DRAINING and brain.services.fleet[drained].drained
            await until(lambda: taken not in states(relay) and added not in states(relay))
            assert brain.services.config.routing.policy == "random"
        assert KeptChanges(router.folder.changes, 4711).last == Changes(4711)  # of another life of the router


async def test_a_brain_that_takes_over_leads_without_a_predictor_whose_file_is_broken_until_a_reload_finds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model.npz"
    model.write_text("half written")
    predictor = {"kind": "survival", "model": str(model)}
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        tree = router.config.model_dump(exclude_unset=True)
        routing = {"policy": "br_h", "horizon_steps": 4}
        config = validate(tree | {"routing": routing, "predictor": predictor})
        router.brain.end()
        await until(lambda: relay.app.services.brain.member is None)
        with pytest.raises(InputError):
            async with a_brain(config, router.folder, relays=1):
                pass
        async with a_brain(config, router.folder, relays=1, again=True) as brain:
            assert brain.services.forecasts is None and "leading without the predictor" in caplog.text
            await answered(relay, 1)
            await reload_brain(brain, config)
            assert brain.services.forecasts is None and brain.read is config
            rows = [FinishedRequest("", 10, length, "stop", float(length)) for length in range(1, 100)]
            save_model(model, Model("survival", 4, rows))
            await reload_brain(brain, config)
            assert brain.services.forecasts is not None
            await answered(relay, 2)


async def test_what_one_relay_finds_out_about_a_worker_all_know() -> None:
    async with relayed(FAST, health={"interval_s": 3600.0, "open_for_s": 3600.0}) as router:
        await router.cluster.inject("d0", "status", status=500, count=None)
        worker = router.cluster.decode_urls[0].removeprefix("http://")
        one, other = router.relays

        async def is_known() -> bool:
            await asyncio.gather(*(answered(one, number) for number in range(8)))
            return states(other)[worker] is WorkerState.DOWN

        await until(is_known)
        assert router.brain.services.fleet[worker].circuit.state is CircuitState.OPEN
        assert other.app.services.metrics.requests.value("finished") == 0
        await until(lambda: not router.brain.services.ledger.requests)


async def test_a_keys_limit_holds_over_all_relays(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    entry = {"name": "a", "sha256": hashlib.sha256(b"key").hexdigest(), "max_in_flight": 2}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    keys.chmod(0o600)
    async with relayed(SLOW, auth={"client_keys": str(keys)}) as router:
        one, other = router.relays
        headers = {"authorization": "Bearer key"}
        ask = completion(max_tokens=2000, stream=True, ignore_eos=True)
        async with (
            one.client.stream("POST", "/v1/completions", json=ask, headers=headers),
            one.client.stream("POST", "/v1/completions", json=ask, headers=headers),
        ):
            theirs = other.app.services.perimeter.keys
            assert theirs is not None
            await until(lambda: next(iter(theirs)).elsewhere == 2)
            refused = await other.client.post("/v1/completions", json=completion(), headers=headers)
            assert refused.status_code == 429
            state = router.brain.services.perimeter.keys
            assert state is not None and next(iter(state)).elsewhere == 2
        await until(lambda: next(iter(theirs)).elsewhere == 0)
        await router.settled()


async def test_a_connector_that_is_not_the_configured_one_is_told_by_the_brain() -> None:
    shape = ClusterShape(prefillers=1, decoders=1, max_num_seqs=4, time_scale=0.02)
    async with relayed(shape, connector="nixl") as router:
        await answered(router.relays[0], 1)
        ready: httpx.Response = await router.relays[1].client.get("/ready")
        await until(lambda: any("mooncake_v1" in reason for reason in router.brain.services.degraded_by))
        ready = await router.relays[1].client.get("/ready")
        assert ready.json()["status"] == "degraded"


async def test_the_brain_takes_part_in_a_drain_and_relays_refuse() -> None:
    async with relayed(FAST) as router:
        router.brain.services.begin_drain()
        await until(lambda: all(relay.app.services.tickets.draining for relay in router.relays))
        refused = await router.relays[1].client.post("/v1/completions", json=completion())
        assert refused.status_code == 503 and "shutting down" in refused.text


async def test_a_worker_that_died_of_one_relay_s_request_is_no_evidence_against_another_s() -> None:
    async with relayed(FAST) as router:
        here, there = (relay.app.services for relay in router.relays)
        cause, bystander = Suspect(), Suspect()
        there.suspicions.lost(bystander, "d1", there.loop.time())
        here.suspicions.lost(cause, "d0", here.loop.time())
        assert here.suspicions.lost(cause, "d1", here.loop.time())
        await until(lambda: bystander.explained == 1)
        assert not bystander.given_up
