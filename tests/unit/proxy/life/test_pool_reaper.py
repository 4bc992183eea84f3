"""What has waited too long is ended: by whose limit, and how."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from balanceroute.core.types import Outcome
from balanceroute.errors import QueueTimeout, UpstreamError, UpstreamTimeout
from balanceroute.proxy.life.errors import ClientStalled, DeadlineExceeded
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.pool_reaper import PERIOD_S, PoolReaper
from balanceroute.proxy.ops.services import Services
from tests.unit.proxy.life.legs import DONE, PROMPT_IDS, a_leg, dispatching, events, idle, probed, streaming
from tests.unit.proxy.virtual_time import (
    Page,
    a_config,
    a_router,
    let_pass,
    script,
    stand_still,
    with_virtual_time,
)
from tests.waiting import until

NEXT_LOOK_S = 2 * PERIOD_S
MUTE = Page(events(20, finish=None), ends=False)


@asynccontextmanager
async def reaped(services: Services) -> AsyncIterator[None]:
    """Dispatchers and reaper run."""
    async with dispatching(services):
        task = services.loop.create_task(PoolReaper(services, services.ledger.expire).run())
        try:
            yield
        finally:
            task.cancel()


async def ends_after_s(services: Services, leg: Leg, kind: type[BaseException]) -> float:
    began_s = services.ledger.now()
    with pytest.raises(kind):
        await leg.run()
    return services.ledger.now() - began_s


@with_virtual_time
async def test_a_prefiller_is_late_with_its_first_byte_and_the_request_tries_again() -> None:
    services = a_router(a_config(1, 1, limits={"first_byte_timeout_s": {"prefill": 3.0}}))
    p0 = script(services, "p0", None, probed())
    script(services, "d0", Page(events(20) + DONE))
    async with reaped(services):
        leg = a_leg(services)
        await leg.run()
    first, second = (one.at_s for one in p0.asked if one.path == "/v1/completions")
    assert 3.0 < second - first and leg.outcome is Outcome.FINISHED
    assert services.metrics.upstream_errors.value("p0", "prefill", "timeout") == 1


@pytest.mark.parametrize(("max_tokens", "late_s"), [(1, 3.0), (4, 18.0)])
@with_virtual_time
async def test_a_decode_worker_is_late_with_an_unstreamed_answer_when_a_stream_would_be_over(
    max_tokens: int, late_s: float
) -> None:
    limits = {"first_byte_timeout_s": {"decode": 3.0}, "idle_timeout_s": 5.0}
    services = a_router(a_config(1, 1, limits=limits, retry={"max_attempts": 1}))
    script(services, "p0", probed())
    script(services, "d0", None)
    async with reaped(services):
        leg = a_leg(services, stream=False, max_tokens=max_tokens)
        took_s = await ends_after_s(services, leg, UpstreamTimeout)
    assert late_s < took_s <= late_s + NEXT_LOOK_S
    assert services.metrics.upstream_errors.value("d0", "decode", "timeout") == 1 and idle(services)


@with_virtual_time
async def test_a_decode_worker_is_late_with_its_next_token() -> None:
    limits = {"idle_timeout_s": 5.0}
    services = a_router(a_config(1, 1, limits=limits, retry={"max_attempts": 1, "resume_on_worker_loss": False}))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    async with reaped(services):
        leg = a_leg(services)
        took_s = await ends_after_s(services, leg, Exception)
    assert 5.0 < took_s <= 5.0 + NEXT_LOOK_S
    assert leg.outcome is Outcome.FAILED and idle(services)


@with_virtual_time
async def test_a_decode_worker_that_was_frozen_with_the_router_gets_a_new_time_limit() -> None:
    """As where the machine of both is suspended; it may need seconds until it is at work again."""
    services = a_router(a_config(1, 1, limits={"idle_timeout_s": 20.0}))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    async with reaped(services):
        leg, task = await streaming(services)
        await let_pass(NEXT_LOOK_S)
        stand_still(100.0)
        await let_pass(19.0)
        assert services.metrics.upstream_errors.value("d0", "decode", "timeout") == 0
        await let_pass(2.0)
        assert services.metrics.upstream_errors.value("d0", "decode", "timeout") == 1
        leg.abandon()
        await asyncio.wait({task})


@pytest.mark.parametrize("answer", [None, MUTE])
@with_virtual_time
async def test_a_worker_is_late_also_for_a_router_that_stands_still_now_and_then(answer: Page | None) -> None:
    """One that is short of CPU; it gives back the time, not all that a worker has."""
    limits = {"first_byte_timeout_s": {"decode": 20.0}, "idle_timeout_s": 20.0}
    services = a_router(a_config(1, 1, limits=limits, retry={"max_attempts": 1, "resume_on_worker_loss": False}))
    script(services, "p0", probed())
    script(services, "d0", answer)

    async def short_of_cpu() -> None:
        while True:
            await let_pass(9.0)
            stand_still(1.0)

    async with reaped(services):
        pauses = services.loop.create_task(short_of_cpu())
        took_s = await ends_after_s(services, a_leg(services), UpstreamTimeout)
        pauses.cancel()
    assert 20.0 < took_s < 25.0


@pytest.mark.parametrize("worker_answers", [False, True])
@with_virtual_time
async def test_the_requests_own_deadline_ends_it_in_any_phase(worker_answers: bool) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed() if worker_answers else None)
    script(services, "d0", MUTE)
    async with reaped(services):
        leg = a_leg(services)
        leg.deadline_s = services.ledger.now() + 2.0
        took_s = await ends_after_s(services, leg, DeadlineExceeded)
    assert 2.0 < took_s <= 2.0 + NEXT_LOOK_S
    assert all(worker.in_use == 0 for worker in services.fleet)


@pytest.mark.parametrize(("drained", "waits_for"), [("p0", "a prefiller"), ("d0", "a decode worker")])
@with_virtual_time
async def test_the_request_s_own_deadline_blames_no_worker_while_it_waits_for_one(drained: str, waits_for: str) -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    services.fleet.drain(services.fleet[drained])
    async with reaped(services):
        leg = a_leg(services)
        leg.deadline_s = services.ledger.now() + 2.0
        with pytest.raises(QueueTimeout, match=f"X-Request-Timeout.* while it waited for {waits_for}") as ended:
            await leg.run()
    assert leg.outcome is Outcome.EXPIRED and ended.value.retry_after_s > 0
    view = services.ledger.view()
    assert not (view.queued or view.pooled or services.legs)


@with_virtual_time
async def test_a_request_whose_decode_worker_failed_before_its_first_token_expires_like_an_arrival() -> None:
    services = a_router(a_config(1, 1, queue={"deadline_s": 4.0}))
    script(services, "p0", probed())
    fails = asyncio.Event()  # then it answers with what is no stream
    d0 = script(services, "d0", fails)
    async with reaped(services):
        ends = services.loop.create_task(ends_after_s(services, a_leg(services), QueueTimeout))
        await until(lambda: d0.asked)
        services.fleet.drain(services.fleet["p0"])
        await let_pass(10.0)
        fails.set()
        took_s = await ends
    assert 14.0 < took_s < 15.0 and idle(services)


@with_virtual_time
async def test_a_request_that_waits_for_a_prefiller_expires_at_the_queue_deadline() -> None:
    config = a_config(1, 1, prefill={"max_inflight": 1}, queue={"deadline_s": 4.0})
    services = a_router(config)
    script(services, "p0", None)
    async with reaped(services):
        holds = services.loop.create_task(a_leg(services).run())
        await until(lambda: services.ledger.view().prefilling)
        waits = a_leg(services, request_id="request-2")
        took_s = await ends_after_s(services, waits, QueueTimeout)
        holds.cancel()
    assert 4.0 <= took_s <= 4.0 + NEXT_LOOK_S and waits.outcome is Outcome.EXPIRED


@with_virtual_time
async def test_a_client_that_reads_nothing_is_disconnected_and_its_worker_is_not_late() -> None:
    limits = {"idle_timeout_s": 1.0, "client_stall_timeout_s": 6.0}
    services = a_router(a_config(1, 1, limits=limits))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    async with reaped(services):
        leg = a_leg(services)

        async def stop_reading() -> None:
            await until(lambda: leg.streaming_from is not None)
            reply: Any = leg.reply
            reply.pause()

        stopping = services.loop.create_task(stop_reading())
        took_s = await ends_after_s(services, leg, ClientStalled)
        await stopping
    assert 6.0 < took_s <= 6.0 + 2 * NEXT_LOOK_S
    assert leg.outcome is Outcome.CANCELLED
    assert services.metrics.upstream_errors.value("d0", "decode", "timeout") == 0


@with_virtual_time
async def test_a_client_that_reads_again_restarts_its_workers_time_limit() -> None:
    limits = {"idle_timeout_s": 3.0, "client_stall_timeout_s": 6.0}
    services = a_router(a_config(1, 1, limits=limits, retry={"max_attempts": 1, "resume_on_worker_loss": False}))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    async with reaped(services):
        leg = a_leg(services)

        async def read_now_and_then() -> None:
            await until(lambda: leg.streaming_from is not None)
            reply: Any = leg.reply
            for _ in range(2):
                reply.pause()
                await let_pass(5.0)
                reply.resume()
                await let_pass(1.0)

        reading = services.loop.create_task(read_now_and_then())
        took_s = await ends_after_s(services, leg, UpstreamError)
        await reading
    assert 11.0 + 3.0 - PERIOD_S <= took_s <= 11.0 + 3.0 + NEXT_LOOK_S
    assert services.metrics.upstream_errors.value("d0", "decode", "timeout") == 1


@with_virtual_time
async def test_a_leaving_worker_is_removed_when_it_holds_no_request() -> None:
    services = a_router(a_config(1, 2))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    script(services, "d1", MUTE)
    async with reaped(services):
        leg, task = await streaming(services)
        for worker in services.fleet:
            services.fleet.leave(worker)
        await let_pass(NEXT_LOOK_S)
        assert {worker.id for worker in services.fleet} == {leg.decoder_id}
        task.cancel()
        await let_pass(NEXT_LOOK_S)
        assert not list(services.fleet)


@with_virtual_time
async def test_tokens_are_reported_to_the_scheduler_and_count_as_worker_progress() -> None:
    services = a_router(a_config(1, 1))
    script(services, "p0", probed())
    script(services, "d0", MUTE)
    async with reaped(services):
        leg, task = await streaming(services)
        leg.ticket.progress(5)
        at_s = leg.last_token_s
        await let_pass(NEXT_LOOK_S)
        (decoder,) = services.ledger.view().decoders
        assert decoder.load_tokens == len(PROMPT_IDS) + 6
        assert services.fleet["d0"].progress_s == at_s
        task.cancel()


@with_virtual_time
async def test_a_late_worker_is_counted_once_per_leg() -> None:
    """A leg is interrupted once, with the first error."""
    services = a_router(a_config(1, 1, limits={"first_byte_timeout_s": {"prefill": 1.0}}, retry={"max_attempts": 1}))
    script(services, "p0", None)
    async with reaped(services):
        await ends_after_s(services, a_leg(services), UpstreamTimeout)
    assert services.metrics.upstream_errors.value("p0", "prefill", "timeout") == 1
