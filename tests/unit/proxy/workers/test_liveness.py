"""Whether a worker lives, by one look."""

import asyncio

import pytest

from balanceroute.errors import BadUpstreamReply, CannotConnect, ConnectFailed
from balanceroute.proxy.workers.liveness import is_alive
from tests.unit.proxy.virtual_time import (
    Answer,
    Page,
    a_router,
    let_pass,
    script,
    stand_still,
    with_virtual_time,
)


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (200, True),
        (404, True),
        (500, False),
        (503, False),
        (ConnectFailed("refused", worker="d0", tier="decode"), False),
        (Page(b"", breaks=BadUpstreamReply("cut", worker="d0", tier="decode")), False),
        (CannotConnect("too many open files", worker="d0", tier="decode"), True),
        (None, False),
        (Page(b"half", ends=False), False),
    ],
    ids=["200", "404", "500", "503", "refused", "broken off", "our own shortage", "silent", "never ends"],
)
@with_virtual_time
async def test_a_worker_that_answers_in_time_with_200_or_404_is_alive(answer: Answer, alive: bool) -> None:
    services = a_router()
    upstream = script(services, "d0", answer)
    began_s = services.ledger.now()
    assert await is_alive(services.fleet["d0"], 2.0) is alive
    assert services.ledger.now() - began_s <= 2.0
    assert [asked.path for asked in upstream.asked] == ["/health"]


@with_virtual_time
async def test_all_who_ask_at_the_same_time_share_one_check() -> None:
    services = a_router()
    upstream = script(services, "d0", ConnectFailed("refused", worker="d0", tier="decode"), 200)
    asking = [asyncio.ensure_future(is_alive(services.fleet["d0"], 2.0)) for _ in range(3)]
    await asyncio.sleep(0)
    asking.pop().cancel()  # the others' check goes on
    assert await asyncio.gather(*asking) == [False, False]
    assert len(upstream.asked) == 1
    assert await is_alive(services.fleet["d0"], 2.0)
    assert len(upstream.asked) == 2


@with_virtual_time
async def test_a_caller_may_cancel_its_question() -> None:
    services = a_router()
    script(services, "d0", None)
    looking = asyncio.ensure_future(is_alive(services.fleet["d0"], 60.0))
    await let_pass(1.0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking


@with_virtual_time
async def test_a_workers_silence_during_a_pause_of_the_router_is_not_a_death() -> None:
    services = a_router()
    script(services, "d0", None)
    looking = asyncio.ensure_future(is_alive(services.fleet["d0"], 2.0))
    await let_pass(0.1)
    stand_still(60.0)
    assert await looking
