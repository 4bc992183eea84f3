"""What becomes of a begun answer whose worker falls silent alone: whether it can go on elsewhere decides."""

import asyncio
import math
from typing import Any

import pytest

from balanceroute.core.types import Phase
from balanceroute.errors import UpstreamTimeout
from balanceroute.proxy.life.errors import WorkerSilent
from balanceroute.proxy.life.leg import Event, Leg
from balanceroute.proxy.life.pool_reaper import PoolReaper
from tests.unit.proxy.life.test_answer import PREFILLED, Client, a_request, give
from tests.unit.proxy.stage import a_config, a_router, on_stage

MOVABLE: dict[str, Any] = {}
NOT_MOVABLE: dict[str, Any] = {"response_format": {"type": "json_object"}}  # a grammar would begin anew
PATIENCE_S = 5.0


class Streams:
    """A strategy whose one request has given a token at d0, and gives no other."""

    first = Phase.QUEUED
    follows = {Phase.QUEUED: {Event.COMPLETE: Phase.GONE}}

    def __init__(self, leg: Leg, begun: asyncio.Event) -> None:
        self.leg, self.begun = leg, begun

    async def queued(self) -> Event:
        leg = self.leg
        worker = leg.decoder = leg.services.fleet["d0"]
        leg.enter(worker, "decode", math.inf, 0.0)
        leg.answer.begin(PREFILLED)
        give(leg.answer, 20)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            leg.decoder = None
            leg.leave(worker)
        return Event.COMPLETE


async def at_a_silent_worker(fields: dict[str, Any]) -> tuple[Leg, asyncio.Task[None], asyncio.Task[None]]:
    """A leg in the middle of its answer at d0, which health checks have just judged down; and the reaper."""
    services = a_router(a_config(retry={"resume_after_silence_s": PATIENCE_S}))
    begun = asyncio.Event()
    leg = Leg(services, "r", a_request(**fields), Client(), [], lambda leg: Streams(leg, begun))
    loop = asyncio.get_running_loop()
    task = loop.create_task(leg.run())
    await begun.wait()
    services.fleet["d0"].healthy = False
    return leg, task, loop.create_task(PoolReaper(services).run())


def test_one_that_can_go_on_elsewhere_leaves_when_the_worker_has_had_its_time() -> None:
    async def silent() -> None:
        leg, task, reaper = await at_a_silent_worker(MOVABLE)
        await asyncio.sleep(PATIENCE_S - 1)
        assert not task.done()
        await asyncio.sleep(2)
        with pytest.raises(WorkerSilent):
            await task
        assert leg.services.metrics.moves.value("decode") == 1
        reaper.cancel()

    on_stage(silent)


def test_one_that_cannot_stays_however_long_the_worker_is_silent() -> None:
    async def silent() -> None:
        leg, task, reaper = await at_a_silent_worker(NOT_MOVABLE)
        await asyncio.sleep(100 * PATIENCE_S)
        assert not task.done() and leg.services.metrics.moves.value("decode") == 0
        reaper.cancel()
        task.cancel()

    on_stage(silent)


def test_one_that_is_late_there_is_left_for_its_move_and_ended_at_once_if_it_has_none() -> None:
    async def late() -> None:
        for fields, ended in ((MOVABLE, False), (NOT_MOVABLE, True)):
            leg, task, reaper = await at_a_silent_worker(fields)
            leg.stage_deadline_s = leg.services.ledger.now() + 1
            await asyncio.sleep(3)  # before it may move
            assert task.done() is ended
            if ended:
                with pytest.raises(UpstreamTimeout):
                    await task
            reaper.cancel()
            task.cancel()

    on_stage(late)
