"""One try at a prefiller: what its answer is taken for, and what is given up with it."""

import asyncio

import pytest

from balanceroute.core.types import Outcome, WorkerState
from balanceroute.errors import (
    BadUpstreamReply,
    ConnectionLost,
    ForeignReply,
    NoCompletion,
    UpstreamError,
    UpstreamStatus,
)
from balanceroute.proxy.admission import decider
from balanceroute.proxy.life.errors import ClientGone, NothingPinned
from balanceroute.proxy.life.leg import Leg
from balanceroute.proxy.life.prefilling import PROBE_GRACE_S
from balanceroute.proxy.ops.services import Services
from balanceroute.proxy.telemetry.conditions import CONNECTOR
from tests.unit.proxy.life.legs import DONE, WHOLE, a_leg, dispatching, events, idle, probed
from tests.unit.proxy.virtual_time import (
    Answer,
    Page,
    a_config,
    a_router,
    let_pass,
    script,
    with_virtual_time,
)
from tests.waiting import until

ONE_TRY = {"max_attempts": 1}


async def failed(services: Services, *answers: Answer) -> UpstreamError:
    """What a request ends with whose only prefiller answers like this."""
    script(services, "p0", *answers)
    d0 = script(services, "d0")
    async with dispatching(services):
        with pytest.raises(UpstreamError) as caught:
            await a_leg(services).run()
    assert not d0.asked and idle(services)
    return caught.value


@pytest.mark.parametrize(
    ("page", "kind", "orphans"),
    [
        (Page(b"no JSON"), NoCompletion, 1),
        (Page(breaks=ConnectionLost("reset", worker="p0", tier="prefill")), ConnectionLost, 1),
        (Page(status=500, body=b"broken"), UpstreamStatus, 0),
        (probed(params=None), NothingPinned, 0),
        (probed(params={}), NothingPinned, 0),
        (probed(params=None, finish_reason="abort"), BadUpstreamReply, 0),
        (probed(id_="cmpl-another"), ForeignReply, 1),
    ],
    ids=["no JSON", "broken off", "500", "null", "empty", "aborted", "of another request"],
)
@with_virtual_time
async def test_an_unusable_prefill_reply_is_a_failure_of_the_prefiller(
    page: Page, kind: type[UpstreamError], orphans: int
) -> None:
    services = a_router(a_config(1, 1, retry=ONE_TRY))
    services.fleet["p0"].echoes_ids = True
    error = await failed(services, page)
    assert type(error) is kind and (error.worker, error.tier) == ("p0", "prefill")
    assert services.metrics.orphaned_kv == orphans


@with_virtual_time
async def test_the_id_of_a_prefillers_answer_is_not_kept() -> None:
    """It may have 256 MiB, and nothing needs it once it is checked."""
    services = a_router(a_config(1, 1))
    script(services, "p0", probed(id_="y" * 1000 + "$ID"))
    script(services, "d0", WHOLE)
    leg = a_leg(services)
    async with dispatching(services):
        await leg.run()
    assert leg.answer._prompt.reply_id is None


@with_virtual_time
async def test_a_prefiller_that_pins_nothing_is_named_to_the_operator() -> None:
    services = a_router(a_config(1, 1, retry=ONE_TRY))
    await failed(services, probed(params=None))
    assert services.metrics.conditions.count(CONNECTOR) == 1


@with_virtual_time
async def test_a_prefiller_that_went_down_before_its_turn_is_not_used() -> None:
    """Between the scheduler's word and the request's turn the prefiller may go out."""
    services = a_router(a_config(2, 1))
    scripts = {name: script(services, name, probed()) for name in ("p0", "p1")}
    script(services, "d0", Page(events(20) + DONE))
    on_answer = services.ledger.on_answer

    def goes_out(request_id: str, answer: decider.Answer) -> None:
        on_answer(request_id, answer)
        services.fleet.set_healthy(services.fleet["p0"], False)

    services.ledger.on_answer = goes_out
    async with dispatching(services):
        leg = a_leg(services)
        await leg.run()
    assert not scripts["p0"].asked and len(scripts["p1"].asked) == 1
    assert leg.prefiller_id == "p1" and services.fleet["p0"].state is WorkerState.DOWN


@pytest.mark.parametrize("answers_in_s", [PROBE_GRACE_S / 2, 2 * PROBE_GRACE_S])
@with_virtual_time
async def test_a_probe_of_a_gone_client_may_finish_so_that_its_kv_can_be_freed(
    answers_in_s: float,
) -> None:
    services = a_router(a_config(1, 1))
    p0, d0 = script(services, "p0", None), script(services, "d0")
    leg = a_leg(services)
    async with dispatching(services):
        task = services.loop.create_task(leg.run())
        await until(lambda: p0.under_way)
        answered = asyncio.Event()
        p0.answers = [answered]
        leg.abandon()
        await let_pass(answers_in_s)
        assert task.done() == (answers_in_s > PROBE_GRACE_S)
        if not task.done():
            task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert leg.outcome is Outcome.CANCELLED and not d0.asked
    assert services.metrics.orphaned_kv == 1, "the prefiller may finish all the same"


@with_virtual_time
async def test_a_failed_probe_of_a_gone_client_is_not_retried_or_held_against_the_prefiller() -> None:
    services = a_router(a_config(1, 1))
    answers_badly = asyncio.Event()
    p0 = script(services, "p0", answers_badly)
    leg = a_leg(services)
    async with dispatching(services):
        task = services.loop.create_task(leg.run())
        await until(lambda: p0.under_way)
        leg.abandon()
        answers_badly.set()
        with pytest.raises(ClientGone):
            await task
    assert len(p0.asked) == 1 and not services.fleet["p0"].circuit.doubtful
    assert leg.outcome is Outcome.CANCELLED and idle(services)


@with_virtual_time
async def test_each_try_has_a_new_id_so_that_late_answers_are_recognised() -> None:
    services = a_router(a_config(1, 1))
    sent: list[str] = []

    class Noting(Leg):
        __slots__ = ()

        def new_try(self) -> None:
            super().new_try()
            sent.append(self.upstream_id)

    script(services, "p0", 500, probed())
    script(services, "d0", Page(events(20) + DONE))
    async with dispatching(services):
        plain = a_leg(services)
        leg = Noting(services, plain.id, plain.answer.request, plain.answer.outlet, [], plain._strategy)
        await leg.run()
    assert sent == ["request-1", "request-1-2"]
