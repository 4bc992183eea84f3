"""Another policy at run time: which may be asked for, and what stays as it is."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette

from balanceroute import AdmissionPolicy, Choice, ClusterSnapshot
from balanceroute.config import Config
from balanceroute.core.policies import BUILT_IN, POLICIES
from balanceroute.errors import ConfigError, Draining
from balanceroute.proxy.ops.guard import ERROR_HANDLERS
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.ops.steering import Steering, with_policy
from tests.unit.proxy.virtual_time import a_config, a_router

pytestmark = pytest.mark.anyio


class Switched:
    """What the router was switched to; `error` is raised instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.to: list[Config] = []
        self.error = error

    async def __call__(self, config: Config) -> None:
        if self.error is not None:
            raise self.error
        self.to.append(config)


async def asked(services: Services, switch: Switched, body: bytes) -> httpx.Response:
    routes = Steering(lambda: services, switch, services.config).routes()
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post("/routing/policy", content=body)


async def test_a_policy_switch_keeps_every_other_setting() -> None:
    config = a_config(routing={"policy": "br_0", "s_greedy": 2}, queue={"deadline_s": 7.0})
    services, switch = a_router(config), Switched()
    reply = await asked(services, switch, b'{"policy": "least_kv"}')
    body = reply.json()
    assert (reply.status_code, body["policy"], body["before"]) == (200, "least_kv", "br_0")
    (new,) = switch.to
    assert new.routing.policy == "least_kv"
    assert new == config.model_copy(update={"routing": config.routing.model_copy(update={"policy": "least_kv"})})


async def test_the_policy_that_decides_already_is_no_switch() -> None:
    """A reload, which it would look like in log and dashboard, has not been asked for."""
    services, switch = a_router(a_config(routing={"policy": "br_0"})), Switched()
    reply = await asked(services, switch, b'{"policy": "br_0"}')
    assert (reply.status_code, reply.json()["before"], switch.to) == (200, "br_0", [])


@pytest.mark.parametrize(
    "body",
    [b"", b"no", b"[]", b"{}", b'{"policy": 3}', b'{"policy": "os:system"}', b'{"policy": "least_kv", "alpha": 3}'],
)
async def test_an_unknown_policy_is_a_400_that_lists_the_known_ones(body: bytes) -> None:
    switch = Switched()
    reply = await asked(a_router(), switch, body)
    assert reply.status_code == 400 and "level_fit" in reply.json()["error"]["message"] and not switch.to


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("routing: no"), 400), (Draining("leaving"), 503)], ids=["config", "draining"]
)
async def test_a_failed_policy_switch_is_reported_and_changes_nothing(error: Exception, status: int) -> None:
    reply = await asked(a_router(), Switched(error), orjson.dumps({"policy": "least_kv"}))
    assert reply.status_code == status and str(error) in reply.json()["error"]["message"]


class Patient(AdmissionPolicy):
    """A policy of one's own that admits nobody, with an option that it needs."""

    name = "patient"

    def __init__(self, *, patience_s: float) -> None:
        self.patience = patience_s

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        return iter(())


class Hurried(Patient):
    """One without options."""

    name = "never_in_a_hurry"

    def __init__(self) -> None:
        super().__init__(patience_s=0.0)


async def test_an_own_policy_keeps_its_options_when_it_is_switched_back_to() -> None:
    own = f"{__name__}:Patient"
    services, switch = a_router(a_config(routing={"policy": own, "options": {"patience_s": 5}})), Switched()

    async def take_over(new: Config) -> None:
        await switch(new)
        services.config = new

    app = Starlette(routes=Steering(lambda: services, take_over, services.config).routes())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for name in ("level_fit", own, own, "level_fit", own):
            reply = await client.post("/routing/policy", json={"policy": name})
            assert reply.status_code == 200, reply.text
    assert [new.routing.policy for new in switch.to] == ["level_fit", own, "level_fit", own]
    assert [new.routing.options for new in switch.to] == [{}, {"patience_s": 5}, {}, {"patience_s": 5}]


def test_policies_registered_by_one_test_are_unknown_to_the_next() -> None:
    """The one above is of no use without its option: whoever goes through all policies would stumble over it."""
    assert set(POLICIES) == BUILT_IN


async def test_a_brain_that_begins_under_another_policy_knows_the_options_of_the_configured_one() -> None:
    own = f"{__name__}:Patient"
    read, switch = a_config(routing={"policy": own, "options": {"patience_s": 5}}), Switched()
    services = a_router(with_policy(read, "br_0"))
    app = Starlette(routes=Steering(lambda: services, switch, read).routes())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        reply = await client.post("/routing/policy", json={"policy": own})
    assert reply.status_code == 200, reply.text
    assert [new.routing.options for new in switch.to] == [{"patience_s": 5}]


async def test_a_policy_of_a_newly_installed_package_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "patient-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    offers = f"[balanceroute.policies]\nnever_in_a_hurry = {__name__}:Hurried\nbroken = no_module_of_ours:X\n"
    (metadata / "entry_points.txt").write_text(offers)
    monkeypatch.syspath_prepend(str(tmp_path))
    switch = Switched()
    reply = await asked(a_router(), switch, b'{"policy": "never_in_a_hurry"}')
    assert reply.status_code == 200, reply.text
    assert [new.routing.policy for new in switch.to] == ["never_in_a_hurry"]
    reply = await asked(a_router(), switch, b'{"policy": "broken"}')
    assert reply.status_code == 400 and "no_module_of_ours" in reply.json()["error"]["message"]
    reply = await asked(a_router(), switch, b'{"policy": "of_nobody"}')
    assert reply.status_code == 400 and "never_in_a_hurry" in reply.json()["error"]["message"]


async def test_settings_that_do_not_go_with_the_policy_are_refused() -> None:
    config: Any = a_config(routing={"policy": "br_0", "pool_bypass": True})
    with pytest.raises(ConfigError, match="pool_bypass"):
        with_policy(config, "br_h")


async def test_a_policy_switch_during_a_reload_is_applied_to_the_reloaded_configuration() -> None:
    services, switch = a_router(a_config(queue={"deadline_s": 5.0})), Switched()
    async with services.changing:
        asking = asyncio.ensure_future(asked(services, switch, b'{"policy": "least_kv"}'))
        services.config = a_config(queue={"deadline_s": 7.0})
    assert (await asking).status_code == 200
    assert [new.queue.deadline_s for new in switch.to] == [7.0]
