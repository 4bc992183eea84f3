"""What the router's own routes answer."""

import asyncio
import math

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from balanceroute.build import policy_settings
from balanceroute.core.policies import settings_from_dict
from balanceroute.core.types import RequestSpec
from balanceroute.errors import InvariantError
from balanceroute.explain import explain
from balanceroute.proxy.ops.admin import Admin, http_error
from balanceroute.proxy.ops.guard import ERROR_HANDLERS
from tests.unit.proxy.ops.test_steering import Patient
from tests.unit.proxy.virtual_time import a_config, a_router

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "routing",
    [
        {"policy": f"{Patient.__module__}:Patient", "options": {"patience_s": 5}},
        {"policy": "level_fit", "hold_s": math.inf},
    ],
    ids=["options of one's own policy", "a time without limit"],
)
async def test_the_state_is_read_back_as_the_policy_and_params_in_force(routing: dict[str, object]) -> None:
    services = a_router(a_config(routing=routing))
    services.ledger.scheduler.submit_prefilled(RequestSpec("r", 100), services.ledger.now())
    app = Starlette(routes=Admin(lambda: services).routes(), exception_handlers=ERROR_HANDLERS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        state = (await client.get("/state")).json()
    assert settings_from_dict(state) == policy_settings(services.config)
    assert list(explain(state).admissions) == services.ledger.scheduler.admit(services.ledger.now())
    assert state["params"].get("options", {}) == services.config.routing.options


async def test_other_work_goes_on_while_the_page_of_metrics_is_made() -> None:
    services = a_router()
    asking, turns = True, 0

    async def work() -> None:
        nonlocal turns
        while asking:
            turns += 1
            await asyncio.sleep(0)

    async def ask() -> str:
        nonlocal asking
        app = Starlette(routes=Admin(lambda: services).routes())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            page = await client.get("/metrics")
        asking = False
        return page.text

    page, _ = await asyncio.gather(ask(), work())
    families = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert families == [line for line in services.metrics.exposition().decode().splitlines() if line in families]
    assert turns > len(families) > 40


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/chat/completions", "; the route is /v1/chat/completions: see the client's base URL"),
        ("/v1/v1/messages", "; the route is /v1/messages: see the client's base URL"),
        ("/v1//chat/completions", "; the route is /v1/chat/completions: see the client's base URL"),
        ("/v1/metaserver", ""),  # of mooncake_layerwise
        ("/v1/state", ""),
        ("/nowhere", ""),
    ],
)
async def test_a_client_whose_base_url_has_v1_or_a_slash_too_often_or_no_v1_is_told_the_route(
    path: str, expected: str
) -> None:
    app = Starlette(exception_handlers={HTTPException: http_error})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        reply = await client.post(path)
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, f"POST {path}: Not Found{expected}")


@pytest.mark.parametrize(
    ("instance", "drained"),
    [
        ("d:1", ["d0", "d1", "d2"]),
        ({"url": "http://d:1"}, ["d0", "d1", "d2"]),
        ({"url": "http://d:1", "dp_rank": 1}, ["d1"]),
        ({"url": "d:1", "id": "d2", "max_num_seqs": 5}, ["d2"]),
        ({"url": "d:1", "id": "d2", "dp_rank": 0}, []),
        ({"url": "d:1", "dp_rank": 9}, []),
        ({"url": "d:1", "id": "other"}, []),
    ],
)
async def test_a_change_of_a_named_rank_or_worker_changes_only_that_one(instance: object, drained: list[str]) -> None:
    ranks = [{"url": "http://d:1", "id": f"d{rank}", "dp_rank": rank} for rank in range(3)]
    services = a_router(a_config(decode={"workers": ranks}))
    app = Starlette(routes=Admin(lambda: services).routes(), exception_handlers=ERROR_HANDLERS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        reply = await client.post("/instances/drain", json={"type": "decode", "instances": [instance]})
    assert reply.status_code == (200 if drained else 404)
    assert [worker.id for worker in services.fleet if worker.drained] == drained


async def test_localhost_and_127_0_0_1_name_the_same_server_as_on_the_example_proxy() -> None:
    services = a_router(a_config(decode={"workers": [{"url": "http://127.0.0.1:1", "id": "d0"}]}))
    app = Starlette(routes=Admin(lambda: services).routes(), exception_handlers=ERROR_HANDLERS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        body = {"type": "decode", "instances": "localhost:1"}
        assert (await client.post("/instances/add", json=body)).status_code == 400  # it is here
        assert (await client.post("/instances/drain", json=body)).status_code == 200
    assert [worker.id for worker in services.fleet if worker.drained] == ["d0"]


async def test_an_internal_error_is_raised_to_the_server_and_hidden_from_the_caller() -> None:
    def fail() -> None:
        raise InvariantError("a secret of ours")

    services = a_router(a_config(decode={"workers": [{"url": "http://127.0.0.1:1", "id": "d0"}]}))
    services.keep_changes = fail
    app = Starlette(routes=Admin(lambda: services).routes(), exception_handlers=ERROR_HANDLERS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        with pytest.raises(InvariantError):
            await client.post("/instances/drain", json={"type": "decode", "instances": "127.0.0.1:1"})
