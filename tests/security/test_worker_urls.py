"""URLs of workers that cannot be asked: they never get in, and nobody else goes unobserved because of one."""

from dataclasses import replace

import pytest

from tests.security.evil_worker import attacked, other
from tests.unit.config.test_urls import ODD
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_an_operator_cannot_add_a_worker_with_an_unusable_url() -> None:
    async with attacked() as router:
        for url in (*(url for url in ODD.values() if "://" in url), "http://h:1/v1", "h\\x:1", "h:99999"):
            reply = await router.client.post("/instances/add", json={"type": "decode", "instances": url})
            assert reply.status_code == 400, url
            assert "accepted is" in reply.text or "leave out /v1" in reply.text
        assert len(router.app.services.fleet.of(router.app.services.fleet["d0"].spec.role)) == 1
        await router.unharmed()


async def test_a_worker_with_an_unusable_url_does_not_stop_the_health_checks_of_others() -> None:
    """However it got in: here as no operator can bring it in any more."""
    async with attacked(health={"timeout_s": 0.5}) as router:
        services = router.app.services
        spec = replace(services.fleet["d0"].spec, id="odd")
        services.fleet.add(spec, 1_000)
        upstream = services.fleet["odd"].upstream
        object.__setattr__(services.fleet["odd"], "spec", replace(spec, url="http://h:1/\u00e9"))
        upstream._prefix = "/\u00e9"
        router.decoder.others = lambda asked: b"" if asked.target == "/health" else other(asked)
        await until(lambda: not services.fleet["d0"].healthy)  # it takes longer to tell than from round to round
        router.decoder.others = other
        await until(lambda: services.fleet["d0"].healthy)
        before = services.metrics.tasks_failed.value("health")
        await until(lambda: services.metrics.tasks_failed.value("health") > before)
        assert not services.fleet["odd"].healthy
        assert (await router.complete()).status_code == 200
