"""What a relay knows and tells beside its tickets: workers, counts, its clients' keys, the age of its files."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from balanceroute.config import Config, digest_of, with_sections
from balanceroute.core.types import Role
from balanceroute.emulator import Connector, EmulatedCluster
from balanceroute.proxy import relay_services
from balanceroute.proxy.brain_app import reload_brain
from balanceroute.proxy.client.services import ClientServices
from balanceroute.proxy.life.suspicion import Suspect
from balanceroute.proxy.link.messages import Activity, Counted, Learned, Report
from balanceroute.proxy.link.remote import NOBODY, RemoteBrain
from balanceroute.proxy.perimeter.key_table import FAR, REQUESTS
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.perimeter.perimeter import Perimeter
from balanceroute.proxy.relay_services import COUNTS_S, RelayServices
from balanceroute.proxy.run_folder import kept_counts
from balanceroute.proxy.run_folder.folder import RunFolder
from balanceroute.proxy.run_folder.kept_counts import KeptCounts
from balanceroute.proxy.run_folder.relay_locks import RelayLocks
from balanceroute.proxy.telemetry.metrics import Metrics
from balanceroute.proxy.workers import addresses, pins
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.fleet import Worker
from tests.integration.relayed import Relay, a_brain, a_relay, answered, relayed
from tests.integration.router import FAST, configuration, patient
from tests.integration.test_proxy_answers import completion
from tests.integration.test_proxy_faults import PAIR
from tests.unit.proxy.link.brains import Heard
from tests.waiting import until

pytestmark = pytest.mark.anyio


class RecordedBrain:
    """A relay's brain, and the kinds of what is reported to it."""

    def __init__(self, brain: RemoteBrain, sent_types: list[type]) -> None:
        self._brain, self._sent_types = brain, sent_types

    def report(self, message: Report) -> None:
        """As `RemoteBrain.report`."""
        self._sent_types.append(type(message))
        self._brain.report(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._brain, name)


def a_key(folder: Path, **limits: int) -> Path:
    """A file of one key, `key`."""
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{"name": "a", "sha256": digest_of(b"key").hex(), **limits}]}))
    path.chmod(0o600)
    return path


@asynccontextmanager
async def a_new_relay(folder: Path, deadline_s: float, name: str = "relay-0") -> AsyncIterator[tuple[Config, Relay]]:
    """One that no brain has told anything."""
    async with EmulatedCluster(patient(FAST)) as cluster:
        config = configuration(cluster, queue={"deadline_s": deadline_s})
        async with a_relay(config, RunFolder(folder), name) as relay:
            yield config, relay


async def test_a_call_that_any_worker_answers_waits_until_a_brain_names_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, waits = RelayServices.know_workers, []

    async def counted(services: RelayServices, within_s: float) -> None:
        waits.append(within_s)
        await wait(services, within_s)

    monkeypatch.setattr(RelayServices, "know_workers", counted)
    async with a_new_relay(tmp_path, deadline_s=60.0) as (config, relay):
        asks = asyncio.gather(
            relay.client.get("/v1/models"),
            relay.client.post("/tokenize", json={"model": "emulated", "prompt": "abc"}),
        )
        await until(lambda: len(waits) == 2)
        async with a_brain(config, RunFolder(tmp_path), relays=["relay-0"]):
            assert [answer.status_code for answer in await asks] == [200, 200]


async def test_a_call_that_any_worker_answers_gets_503_with_the_reason_without_a_brain(tmp_path: Path) -> None:
    async with a_new_relay(tmp_path, deadline_s=0.1) as (_, relay):
        answer = await relay.client.get("/v1/models")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "no brain leads" in answer.json()["error"]["message"]


async def test_a_relay_reaches_workers_that_it_has_not_used_yet_while_no_name_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups, outage = list[str](), asyncio.Event()

    async def look_up(host: str) -> list[str]:
        lookups.append(host)
        if outage.is_set():
            await asyncio.Event().wait()
        return ["127.0.0.1"]

    monkeypatch.setattr(addresses, "look_up", look_up)
    monkeypatch.setattr(addresses, "FRESH_S", 3600.0)  # each process looks once for each worker

    def named(urls: list[str]) -> dict[str, Any]:
        return {"workers": [{"url": url.replace("127.0.0.1", "worker.cluster")} for url in urls]}

    async with EmulatedCluster(patient(FAST)) as cluster:
        workers = {"prefill": named(cluster.prefill_urls), "decode": named(cluster.decode_urls)}
        config, folder = configuration(cluster, **workers), RunFolder(tmp_path)
        async with a_brain(config, folder, relays=["relay-0"]), a_relay(config, folder, "relay-0") as relay:
            await until(lambda: len(lookups) == 2 * len(cluster.prefill_urls + cluster.decode_urls))
            outage.set()
            await answered(relay, 0)


async def test_a_relay_renews_the_times_of_its_run_folder_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_services, "FRESHEN_S", 0.05)
    async with relayed(FAST, count=1) as router:
        file = router.folder.operators
        os.utime(file, (0, 0))
        await until(lambda: file.stat().st_mtime > 0)


async def test_removed_files_of_a_relay_are_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MEND_S", 0.05)
    async with relayed(FAST, count=1) as router:
        for file in (KeptCounts(router.folder).file("relay-0"), router.folder.pins("relay-0")):
            await until(file.exists)
            file.unlink()
            await until(file.exists)


async def test_a_restarted_relay_drops_counts_of_workers_that_left_meanwhile(tmp_path: Path) -> None:
    folder, before = RunFolder(tmp_path), Metrics(lambda: NOBODY, "level_fit")
    before.upstream_errors.inc("gone:1", "decode", "ConnectFailed")
    before.retries.inc("decode", by=7)
    KeptCounts(folder).keep("relay-0", before.counts())
    async with a_new_relay(tmp_path, deadline_s=60.0) as (config, relay):
        async with a_brain(config, folder, relays=["relay-0"]):
            await until(lambda: b"gone:1" not in KeptCounts(folder).of("relay-0"))
            assert relay.app.services.metrics.retries.value("decode") == 7


async def test_files_of_former_relays_go_where_the_brain_is_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_counts, "GONE_S", 1.0)
    monkeypatch.setattr(relay_services, "LIFE_S", 0.2)
    folder = RunFolder(tmp_path)
    for former in ("relay-0", "relay-1"):
        os.close(RelayLocks(folder).lock(former))
        KeptCounts(folder).keep(former, b"{}")
    async with a_new_relay(tmp_path, deadline_s=0.1, name="relay-0.2") as (config, relay):
        services = relay.app.services
        services.config = config.model_copy(
            update={"listen": config.listen.model_copy(update={"brains": ("10.0.0.1:1",)})}
        )
        await until(lambda: KeptCounts(folder).gone() == set())
        assert RelayLocks(folder).running() == ["relay-0.2"]


async def test_key_use_without_a_brain_is_reported_to_the_next_brain(tmp_path: Path) -> None:
    auth = {"client_keys": str(a_key(tmp_path, requests_per_minute=9))}
    async with relayed(FAST, apart=True, auth=auth) as router:
        one, other = (relay.app.services for relay in router.relays)
        (ours,), (theirs,) = one.perimeter.keys or (), other.perimeter.keys or ()
        other.keys_elsewhere("relay-0", (KeyUse("a", 5, 0, 0),))  # in flight, says the brain that is there
        router.brain.end()
        await until(lambda: one.membership.member is None and other.membership.member is None)
        for _ in range(9):
            ours.enter(one.loop.time())
            ours.leave(one.loop.time())
        looked_s = one.last_look_s
        await until(lambda: one.last_look_s > looked_s + 0.5)  # it has had the time to tell nobody
        async with a_brain(router.config, router.folder):
            await until(lambda: one.membership.member is not None and other.membership.member is not None)
            await until(lambda: theirs.elsewhere == 0)
            await until(lambda: theirs.row.own(REQUESTS + FAR) == 9)
        await until(lambda: one.membership.member is None and other.membership.member is None)


async def test_relays_share_what_may_leave_silent_workers_whatever_their_machines_configure() -> None:
    async with relayed(FAST, apart=True, listen={"relays": 1}) as router:
        await until(lambda: all(relay.app.services.movers == 2 for relay in router.relays))


async def test_a_worker_loss_explained_without_a_brain_reaches_other_relays_with_the_next_brain() -> None:
    async with relayed(FAST) as router:
        here, there = (relay.app.services for relay in router.relays)
        cause, bystander = Suspect(), Suspect()
        there.suspicions.lost(bystander, "d1", there.loop.time())
        router.brain.end()
        await until(lambda: here.membership.member is None and there.membership.member is None)
        here.suspicions.lost(cause, "d0", here.loop.time())
        assert here.suspicions.lost(cause, "d1", here.loop.time())
        async with a_brain(router.config, router.folder):
            await until(lambda: bystander.explained == 1)
        await until(lambda: here.membership.member is None and there.membership.member is None)


async def test_a_doubtful_prefix_cache_is_not_reused_by_any_relay_or_under_any_brain() -> None:
    """The cache is the engine's, so it is every relay's; and it stays when the brain, or a relay, is another one."""

    def decoder(relay: Relay, number: int = 0) -> Worker:
        return relay.app.services.fleet.of(Role.DECODE)[number]

    def salts(*relays: Relay) -> set[str]:
        return {decoder(relay).cache_salt for relay in relays}

    async with relayed(FAST) as router:
        here, there = router.relays
        here.app.services.fleet.doubt_cache(decoder(here))
        await until(lambda: len(salts(*router.relays)) == 1 and "" not in salts(*router.relays))
        router.brain.end()
        await until(lambda: all(each.app.services.membership.member is None for each in (here, there)))
        there.app.services.fleet.doubt_cache(decoder(there))  # of what it has cached since
        latest = salts(there)
        assert latest != salts(here)
        async with a_brain(router.config, router.folder), a_relay(router.config, router.folder, "relay-2") as new:
            await until(new.app.services.known.is_set)
            await until(lambda: salts(here, there, new) == latest)
            assert decoder(new, 1).cache_salt == ""
        await until(lambda: all(each.app.services.membership.member is None for each in (here, there)))


async def test_a_connector_condition_of_one_relay_holds_for_all_until_any_relay_learns_the_connector() -> None:
    async with relayed(FAST) as router:
        here, there = (relay.app.services for relay in router.relays)
        conditions = router.brain.services.metrics.conditions
        name = here.fleet.of(Role.PREFILL)[0].id
        here.doubt_connector(here.fleet[name], "it is no kv_producer")
        await until(lambda: conditions.reasons == [f"{name}: it is no kv_producer"])
        there.note_connector(there.fleet[name], router.config.connector)
        await until(lambda: conditions.reasons == [])


@pytest.mark.parametrize(
    ("role", "connector", "shortened"),
    [(Role.DECODE, "mooncake_layerwise", False), (Role.PREFILL, "mooncake_v1", False), (Role.PREFILL, "nixl", True)],
    ids=["a decode worker has asked for a prefill", "the configured connector", "another one, with a shorter timeout"],
)
async def test_what_one_relay_learns_of_a_connector_holds_for_all_relays_and_under_every_brain(
    role: Role, connector: str, shortened: bool
) -> None:
    configured = "mooncake_layerwise" if role is Role.DECODE else "mooncake_v1"
    async with relayed(replace(FAST, connector=Connector(configured)), connector=configured) as router:
        here, there = (relay.app.services for relay in router.relays)
        name = here.fleet.of(role)[0].id
        others = [worker.id for worker in here.fleet if worker.id != name]

        def known(*services: ClientServices) -> bool:
            assert all(each.fleet[other].kv_connector is None for each in services for other in others)
            goes = [each.config.pool_ttl_s < router.config.pool_ttl_s for each in services]
            return {each.fleet[name].kv_connector for each in services} == {connector} and set(goes) == {shortened}

        here.note_connector(here.fleet[name], connector)
        await until(lambda: known(here, there, router.brain.services))
        router.brain.end()
        await until(lambda: here.membership.member is None and there.membership.member is None)
        async with (
            a_brain(router.config, router.folder) as brain,
            a_relay(router.config, router.folder, "relay-2") as new,
        ):
            await until(new.app.services.known.is_set)
            await until(lambda: known(here, there, new.app.services, brain.services))
        await until(lambda: here.membership.member is None and there.membership.member is None)


async def test_a_relay_that_was_away_while_a_worker_returned_as_another_version_takes_its_new_connector() -> None:
    async with relayed(FAST) as router:
        here, there = (relay.app.services for relay in router.relays)
        name = here.fleet.of(Role.PREFILL)[0].id
        here.note_connector(here.fleet[name], "nixl")
        at_brain = router.brain.services.fleet[name]
        await until(lambda: at_brain.kv_connector == there.fleet[name].kv_connector == "nixl")
        member, here.membership.listener = here.membership.member, Heard()  # as if it heard nothing
        at_brain.kv_connector, at_brain.ended_at = None, 2.0
        there.fleet[name].kv_connector = None
        there.note_connector(there.fleet[name], "mooncake_v1")
        await until(lambda: at_brain.kv_connector == "mooncake_v1")
        here.membership.listener = here
        assert here.brain.outbox.frames is not None
        here.brain.outbox.frames.abort("the network broke")
        await until(lambda: here.membership.member not in (None, member))
        await until(lambda: here.fleet[name].kv_connector == "mooncake_v1")
        assert at_brain.kv_connector == "mooncake_v1"


async def test_a_prefiller_that_cannot_push_costs_its_request_and_no_connection_to_the_brain() -> None:
    connector = Connector.MOONCAKE_LAYERWISE
    async with relayed(replace(FAST, connector=connector), count=1, connector=str(connector)) as router:
        services = router.relays[0].app.services
        member, name = services.membership.member, services.fleet.of(Role.PREFILL)[0].id
        with pytest.raises(WrongConnector):
            services.note_connector(services.fleet[name], "nixl")
        conditions = router.brain.services.metrics.conditions
        await until(lambda: bool(conditions.reasons))
        assert "are of nixl" in conditions.reasons[0]
        router.brain.services.fleet[name].kv_connector = "nixl"  # as at a brain that is to have it, after a takeover
        services.metrics.conditions.forget(name)
        router.brain.hub.news.workers_changed()
        await until(lambda: bool(services.metrics.conditions.reasons))
        services.brain.report(Learned(name, None))  # whatever is said later is heard over the same connection
        await until(lambda: conditions.reasons == [])
        assert services.membership.member == member


async def test_operators_see_the_drains_and_orphans_of_all_relays_and_of_those_that_have_left() -> None:
    async with relayed(PAIR, prefill={"kv_pin_s": 60.0}) as router:
        here, there = router.relays
        for decoder in ("d0", "d1"):
            await router.cluster.inject(decoder, "status", status=503, count=None)
        ask = asyncio.ensure_future(here.client.post("/v1/completions", json=completion()))
        await until(lambda: any(worker.prefiller.pinned for worker in router.cluster.prefill))
        ask.cancel()
        there.app.services.drainer.orphan()
        async with a_relay(router.config, router.folder, "relay-2") as third:
            third.app.services.drainer.orphan()
            await until(lambda: router.brain.services.metrics.orphaned_elsewhere == 2)
        await until(lambda: len(router.brain.hub.members) == 2)

        async def seen() -> bool:
            state, page = (await there.client.get("/state")).json(), (await here.client.get("/metrics")).text
            return state["drains_pending"] == 1 and "\nbalanceroute_kv_orphans 2.0\n" in page

        await until(seen)
        for decoder in ("d0", "d1"):
            await router.cluster.inject(decoder, "clear")
        await router.settled()


@pytest.mark.parametrize("way", ["POST /routing/policy", "SIGHUP"])
async def test_relays_make_the_keys_of_prompts_as_a_predictor_that_came_later_does(way: str) -> None:
    async with relayed(FAST, predictor={"kind": "exact_match", "key_header": "x-kind"}) as router:
        brain, relays = router.brain.services, [relay.app.services for relay in router.relays]
        assert [services.keyer for services in relays] == [None, None]  # br_0 predicts nothing

        def known() -> bool:
            asked = [(b'"a prompt"', ""), (b'"a prompt"', "a kind")]
            keyers = [services.keyer for services in (brain, *relays)]
            keys = [None if keyer is None else [keyer.key(*each) for each in asked] for keyer in keyers]
            return None not in keys and all(each == keys[0] for each in keys)

        if way == "SIGHUP":
            predicting = with_sections(router.config, routing={"policy": "br_h"})
            await reload_brain(router.brain, predicting, Perimeter(predicting))
        else:
            answer = await router.relays[0].client.post("/routing/policy", json={"policy": "br_h"})
            assert answer.status_code == 200, answer.text
        await until(known)
        without = with_sections(router.config, routing={"policy": "br_h"}, predictor={"kind": "exact_match"})
        await reload_brain(router.brain, without, Perimeter(without))
        await until(known)
        await reload_brain(router.brain, router.config, Perimeter(router.config))
        await until(lambda: [services.keyer for services in relays] == [None, None])


async def test_an_idle_relay_sends_each_brain_its_activity_and_counts_only_once() -> None:
    async with relayed(FAST, count=1) as router:
        services = router.relays[0].app.services
        await until(lambda: services.counts_file.has(services.metrics.counts()) and services.sent_activity is not None)
        sent_types: list[type] = []
        services.brain = RecordedBrain(services.brain, sent_types)  # type: ignore[assignment]
        looked_s = services.last_look_s
        await until(lambda: services.last_look_s > looked_s + 2 * COUNTS_S)
        assert sent_types == []
        router.brain.end()
        await until(lambda: services.membership.member is None)
        async with a_brain(router.config, router.folder, relays=["relay-0"]):
            await until(lambda: sorted(sent_types, key=str) == [Activity, Counted])
        await until(lambda: services.membership.member is None)
