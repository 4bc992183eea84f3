"""One brain, several relays: they answer, limit and judge as one router."""

import asyncio
import errno
import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from balanceroute.config import Config, validate
from balanceroute.core.types import WorkerState
from balanceroute.emulator import ClusterShape
from balanceroute.proxy.brain_app import reload_brain
from balanceroute.proxy.life.suspicion import Suspect
from balanceroute.proxy.link.remote import RemoteBrain
from balanceroute.proxy.ops import forwarding, to_brain
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.perimeter.routes import ACCESS
from balanceroute.proxy.run_folder import kept_counts
from balanceroute.proxy.run_folder.changes import Changes, saved_changes
from balanceroute.proxy.run_folder.kept_counts import LEADER, KeptCounts
from balanceroute.proxy.workers.circuit import CircuitState
from tests.integration.relayed import SLOW, Relay, a_brain, a_relay, answered, relayed
from tests.integration.router import FAST, running, sent_to_workers
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


async def test_an_operators_change_at_one_relay_holds_for_all_relays() -> None:
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
    [
        ("/v1/completions", "POST"),
        ("/state", "GET, HEAD"),
        ("/instances/add", "POST"),
        ("/tokenize", "POST"),
        ("/health", "GET, HEAD"),
        ("/ping", "GET, HEAD, POST"),
        ("/dashboard", "GET, HEAD"),
        ("/", "GET, HEAD"),
    ],
)
async def test_a_method_that_is_not_served_is_answered_with_those_that_are(path: str, allowed: str) -> None:
    async with relayed(FAST, count=1, auth={"admin_token": "a-token-of-some-length"}) as router:
        client = router.relays[0].client
        for method in ("DELETE", "PUT", "OPTIONS", "TRACE"):
            reply = await client.request(method, path)
            assert (reply.status_code, reply.headers["allow"]) == (405, allowed), method


async def test_each_route_answers_each_method_at_a_relay_as_without_relays() -> None:
    auth = {"admin_token": "a-token-of-some-length"}
    async with relayed(FAST, count=1, auth=auth) as router, running(FAST, auth=auth) as alone:
        paths = [path.replace("{", "").replace("}", "") for path in ACCESS]
        for method, path in product(("GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE"), paths):
            here, there = await router.relays[0].client.request(method, path), await alone.client.request(method, path)
            answers = [(reply.status_code, reply.headers.get("allow")) for reply in (here, there)]
            assert answers[0] == answers[1], (method, path, here.text)
            if there.status_code == 405:
                assert here.headers["content-length"] == there.headers["content-length"], (method, path)


async def test_a_brains_answer_states_its_length() -> None:
    async with relayed(FAST, count=1) as router:
        client = router.relays[0].client
        head, whole = await client.head("/dashboard"), await client.get("/dashboard")
        for reply in (head, whole):
            assert reply.headers["content-length"] == str(len(whole.content))
            assert "transfer-encoding" not in reply.headers


async def test_the_relay_checks_the_admin_token() -> None:
    async with relayed(FAST, count=1, auth={"admin_token": "a-token-of-some-length"}) as router:
        client = router.relays[0].client
        assert (await client.get("/state")).status_code == 401
        headers = {"authorization": "Bearer a-token-of-some-length"}
        assert (await client.get("/state", headers=headers)).status_code == 200
        cookie = (await client.post("/dashboard/session", headers=headers)).headers["set-cookie"]
        assert "balanceroute_session=" in cookie


@pytest.mark.parametrize(
    ("auth", "sent", "arrives"),
    [
        ({}, "the-workers", "Bearer the-workers"),
        ({"worker_api_key": "configured"}, "mine", "Bearer configured"),
        ({"admin_token": "a-token-of-some-length"}, "a-token-of-some-length", None),
    ],
    ids=["the-callers", "the-configured", "never-the-admin-token"],
)
async def test_calls_to_all_workers_carry_the_credential_that_they_carry_without_relays(
    auth: dict[str, str], sent: str, arrives: str | None
) -> None:
    headers = {"authorization": f"Bearer {sent}"}
    async with relayed(FAST, count=1, auth=auth) as router:
        seen = sent_to_workers(router.brain.services)
        for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
            await router.relays[0].client.post(path, headers=headers)
        posted = [each.get("authorization") for method, _, each in seen if method == "POST"]
        assert posted == [arrives] * 3 * len({worker.spec.url for worker in router.brain.services.fleet})


async def test_a_worker_that_hangs_is_named_by_a_call_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_brain.CHANGE_S > forwarding.TIMEOUT_S
    monkeypatch.setattr(to_brain, "READ_S", 0.1)
    monkeypatch.setattr(forwarding, "TIMEOUT_S", 0.5)
    async with relayed(FAST, count=1) as router:
        hanging = next(iter(router.brain.services.fleet))
        hanging.upstream.request = hangs  # type: ignore[method-assign]
        answer = await router.relays[0].client.post("/start_profile")
        assert answer.status_code == 500
        assert f"{hanging.id}: no answer in time" in answer.json()["failed"]


async def hangs(*args: Any, **rest: Any) -> None:
    await asyncio.Event().wait()


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
        router.brain.end()  # what was answered is kept
        await until(lambda: relay.app.services.membership.member is None)
        async with a_brain(router.config, router.folder, relays=["relay-0"]) as brain:
            await until(lambda: states(relay).get("by-hand") is WorkerState.UP)
            assert states(relay)[drained] is WorkerState.DRAINING and brain.services.fleet[drained].drained
            await until(lambda: taken not in states(relay) and added not in states(relay))
            assert brain.services.config.routing.policy == "random"
        assert saved_changes(router.folder.changes, 4711) == Changes(4711)  # of another life of the router


@pytest.mark.parametrize("taken_out_by", ["an operator", "an operator, after it was added by hand", "a configuration"])
async def test_streams_go_on_at_a_worker_that_leaves_when_another_brain_leads(taken_out_by: str) -> None:
    async with relayed(SLOW, count=1) as router:
        relay, config = router.relays[0], router.config
        url = router.cluster.decode_urls[1]
        name = url.removeprefix("http://")
        without = without_worker(config, url)

        async def change(what: str) -> None:
            body = {"type": "decode", "instances": name}
            assert (await relay.client.post(f"/instances/{what}", json=body)).status_code == 200

        if "by hand" in taken_out_by:
            config = without
            await change("remove")
            await until(lambda: name not in router.brain.services.fleet)
            await reload_brain(router.brain, without, Perimeter(without))
            await change("add")
            await until(lambda: states(relay).get(name) is WorkerState.UP)
        for decoder in ("d0", "d1"):  # they go on when the next brain leads, however late that is
            await router.cluster.inject(decoder, "stop_barrier")
        streams = asyncio.gather(*(answered(relay, number) for number in range(4)))
        await until(lambda: len(router.brain.services.ledger.scheduler.snapshot.worker(name).active) == 2)
        if taken_out_by == "a configuration":
            config = without
            await reload_brain(router.brain, without, Perimeter(without))
        else:
            await change("remove")
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        async with a_brain(config, router.folder, relays=["relay-0"], again=True) as brain:
            await until(brain.hub.settled.is_set)
            assert brain.services.fleet[name].leaving
            for decoder in ("d0", "d1"):
                await router.cluster.inject(decoder, "start_barrier")
            await streams
            await until(
                lambda: name not in brain.services.fleet and not brain.services.ledger.scheduler.snapshot.requests
            )


def without_worker(config: Config, url: str) -> Config:
    tree = config.model_dump(mode="json", exclude_unset=True)
    workers = tree["decode"]["workers"]
    return validate(tree | {"decode": tree["decode"] | {"workers": [each for each in workers if each["url"] != url]}})


def counted(page: str) -> dict[str, float]:
    """Every series of a page that must not fall, but the predictor's."""
    families = text_string_to_metric_families(page)
    samples = [sample for family in families if family.type in ("counter", "histogram") for sample in family.samples]
    values = {f"{sample.name}{sample.labels}": sample.value for sample in samples}
    return {
        series: value for series, value in values.items() if "_predictor_" not in series and "_created" not in series
    }


async def scraped(relay: Relay) -> dict[str, float]:
    """Its page, as soon as all have told what they have counted."""
    page = ""

    async def is_there() -> bool:
        nonlocal page
        answer = await relay.client.get("/metrics")
        page = answer.text
        return answer.status_code == 200

    await until(is_there)
    return counted(page)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "deposed"])
async def test_the_next_brain_continues_the_counts_that_the_former_one_has_shown(killed: bool) -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        await asyncio.gather(*(answered(relay, number) for number in range(20)))
        before = await scraped(relay)
        shown = KeptCounts(router.folder).of(LEADER)
        assert sum(value for series, value in before.items() if "admissions_total" in series) == 20
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        if killed:
            KeptCounts(router.folder).keep(LEADER, shown)
        async with a_brain(router.config, router.folder, relays=["relay-0"]):
            after = await scraped(relay)
            assert {
                series: after.get(series) for series, value in before.items() if after.get(series, -1.0) < value
            } == {}
            await answered(relay, 20)
            last = await scraped(relay)
            assert sum(value for series, value in last.items() if "admissions_total" in series) == 21
        await until(lambda: relay.app.services.membership.member is None)


class UnreachedBrain:
    """A relay's brain that no report reaches, as when the connection breaks."""

    def __init__(self, brain: RemoteBrain) -> None:
        self._brain = brain

    def report(self, message: object) -> None:
        """As `RemoteBrain.report`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._brain, name)


async def test_counts_that_a_relay_has_not_sent_to_the_brain_yet_are_kept() -> None:
    async with relayed(FAST, count=1) as router:
        async with a_relay(router.config, router.folder, "relay-7") as relay:
            await until(lambda: relay.app.services.known.is_set())
            for number in range(3):
                await answered(relay, number)
            relay.app.services.send_counts()
            assert finished(await scraped(relay)) == 3
            relay.app.services.brain = UnreachedBrain(relay.app.services.brain)  # type: ignore[assignment]
            for number in range(2):
                await answered(relay, number)
        await until(lambda: len(router.brain.hub.members) == 1)
        assert finished(await scraped(router.relays[0])) == 5


def finished(series: dict[str, float]) -> float:
    """How many requests were answered to their end."""
    return series["balanceroute_requests_total{'outcome': 'finished'}"]


async def test_metrics_answers_503_when_no_descriptor_is_left_to_read_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counts_of_others(kept: KeptCounts, known: object) -> list[bytes]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        await scraped(relay)
        with monkeypatch.context() as patched:
            patched.setattr(KeptCounts, "of_others", counts_of_others)
            answer = await relay.client.get("/metrics")
            assert answer.status_code == 503 and "Too many open files" in answer.json()["error"]["message"]
        await scraped(relay)


async def test_no_count_falls_or_doubles_when_files_of_relays_that_are_gone_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_counts, "GONE_S", 2.0)
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        async with a_relay(router.config, router.folder, "relay-0.2") as other:
            for number in range(3):
                await answered(other, number)
            await answered(relay, 3)

        async def all_told() -> bool:
            return finished(await scraped(relay)) == 4

        await until(all_told)
        gone = KeptCounts(router.folder).file("relay-0.2")

        async def all_kept() -> bool:
            assert finished(await scraped(relay)) == 4
            return not gone.exists()

        await until(all_kept)
        assert finished(await scraped(relay)) == 4 and KeptCounts(router.folder).gone() == set()
        router.brain.end()
        await until(lambda: relay.app.services.membership.member is None)
        async with a_brain(router.config, router.folder, relays=["relay-0"]):
            await until(lambda: relay.app.services.membership.member is not None)
            assert finished(await scraped(relay)) == 4


async def test_a_brain_that_no_longer_leads_neither_stores_nor_shows_counts() -> None:
    async with relayed(FAST, count=1) as router:
        relay = router.relays[0]
        await answered(relay, 1)
        await scraped(relay)
        router.folder.lead.unlink()  # as far as it can tell, somebody else has put another one there
        KeptCounts(router.folder).keep(LEADER, b"another brain's")
        assert (await relay.client.get("/metrics")).status_code == 503
        await until(lambda: relay.app.services.membership.member is None)
        assert KeptCounts(router.folder).of(LEADER) == b"another brain's"


async def test_a_brain_continues_above_a_lost_epoch_only_while_it_leads() -> None:
    async with relayed(FAST, count=1) as router:
        ended: list[bool] = []
        router.brain.end = lambda: ended.append(True)
        assert router.brain.superseded(7) == router.brain.lead.epoch == 8 and not ended
        router.brain.lead.release()
        assert router.brain.superseded(9) is None and ended


async def test_a_brain_that_leads_no_more_has_no_members_before_its_server_ends() -> None:
    async with relayed(FAST, count=1) as router:
        router.brain.end = lambda: None  # on a busy machine that takes long
        router.folder.lead.unlink()
        await until(lambda: router.relays[0].app.services.membership.member is None)
        assert not router.brain.hub.members


async def test_a_workers_state_that_one_relay_reports_reaches_all() -> None:
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
        await until(lambda: not router.brain.services.ledger.scheduler.snapshot.requests)


async def test_a_keys_limit_holds_over_relays_that_share_no_memory(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    entry = {"name": "a", "sha256": hashlib.sha256(b"key").hexdigest(), "max_in_flight": 2}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    keys.chmod(0o600)
    async with relayed(SLOW, apart=True, auth={"client_keys": str(keys)}) as router:
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


async def test_the_brain_reports_a_connector_that_differs_from_the_configured_one() -> None:
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


async def test_a_worker_loss_that_one_relay_explains_clears_requests_of_other_relays() -> None:
    async with relayed(FAST) as router:
        here, there = (relay.app.services for relay in router.relays)
        cause, bystander = Suspect(), Suspect()
        there.suspicions.lost(bystander, "d1", there.loop.time())
        here.suspicions.lost(cause, "d0", here.loop.time())
        assert here.suspicions.lost(cause, "d1", here.loop.time())
        await until(lambda: bystander.explained == 1)
        assert not bystander.given_up
