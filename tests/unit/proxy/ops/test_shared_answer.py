"""Whoever asks gets an answer that is no older than the question, and it is made a tenth of the time at most."""

import asyncio

import pytest

from balanceroute.errors import NoHealthyWorkers
from balanceroute.proxy.ops.shared_answer import MAX_PAUSE_S, SharedAnswer
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time

MAKING_S = 0.1


class Maker:
    """Takes `takes_s`; says when it began, or fails."""

    def __init__(self, takes_s: float = MAKING_S) -> None:
        self._takes_s = takes_s
        self.begun_s: list[float] = []
        self.fails = False

    async def __call__(self) -> float:
        self.begun_s.append(asyncio.get_running_loop().time())
        await let_pass(self._takes_s)
        if self.fails:
            raise NoHealthyWorkers("nobody")
        return self.begun_s[-1]


@with_virtual_time
async def test_a_rare_caller_is_answered_at_once() -> None:
    maker = Maker()
    answer, now = SharedAnswer(maker), asyncio.get_running_loop().time
    for _ in range(3):
        await let_pass(10 * MAKING_S)
        asked_s = now()
        assert await answer.get() == asked_s and now() == pytest.approx(asked_s + MAKING_S)


@with_virtual_time
async def test_constant_callers_share_answers_that_are_never_older_than_their_request() -> None:
    maker = Maker()
    answer, now = SharedAnswer(maker), asyncio.get_running_loop().time
    ends_s = now() + 100 * MAKING_S

    async def one() -> None:
        while now() < ends_s:
            asked_s = now()
            assert await answer.get() >= asked_s
            await let_pass(MAKING_S / 7)

    await asyncio.gather(*(one() for _ in range(50)))
    assert 9 <= len(maker.begun_s) <= 12


@pytest.mark.parametrize("waiting", [1, 20])
@with_virtual_time
async def test_a_failure_reaches_all_current_waiters_and_no_later_one(waiting: int) -> None:
    maker = Maker()
    answer = SharedAnswer(maker)
    await answer.get()
    maker.fails = True
    results = await asyncio.gather(*(answer.get() for _ in range(waiting)), return_exceptions=True)
    assert len(maker.begun_s) == 2 and all(isinstance(one, NoHealthyWorkers) for one in results)
    maker.fails = False
    assert await answer.get() == maker.begun_s[2]


@with_virtual_time
async def test_a_slow_answer_is_made_again_after_a_bounded_pause() -> None:
    maker = Maker(takes_s=30.0)
    answer = SharedAnswer(maker)
    await answer.get()
    ended_s = asyncio.get_running_loop().time()
    assert await answer.get() == pytest.approx(ended_s + MAX_PAUSE_S)


@with_virtual_time
async def test_a_cancelled_waiter_does_not_cancel_the_answer_for_others() -> None:
    maker = Maker()
    answer = SharedAnswer(maker)
    first, second = asyncio.ensure_future(answer.get()), asyncio.ensure_future(answer.get())
    await let_pass(MAKING_S / 2)
    first.cancel()
    assert await second == maker.begun_s[1]
