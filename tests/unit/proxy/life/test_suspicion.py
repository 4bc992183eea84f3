"""Who is taken for the cause of a decode worker's death."""

import asyncio
import gc

import pytest

from balanceroute.errors import (
    BadUpstreamReply,
    ConnectFailed,
    ConnectionLost,
    UpstreamError,
    UpstreamStatus,
    UpstreamTimeout,
)
from balanceroute.proxy.life.suspicion import (
    CLEARED_AFTER_S,
    KNOWN_S,
    SAME_DEATH_S,
    TURN_S,
    Choices,
    Loss,
    Sign,
    Suspect,
    Suspicions,
    sign_of,
)
from tests.unit.proxy.virtual_time import let_pass, with_virtual_time

AT = {"worker": "d0", "tier": "decode"}
DEAD = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause."}}'


def unsent() -> ConnectFailed:
    error = ConnectFailed("refused", **AT)
    error.sent = False
    return error


@pytest.mark.parametrize(
    ("error", "sign"),
    [
        (UpstreamStatus("", **AT, status=500, body=DEAD), Sign.DEATH),
        (UpstreamStatus("", **AT, status=500, body=b'{"error":{"message":"Internal server error"}}'), Sign.NONE),
        (ConnectFailed("reset", **AT), Sign.MAYBE),
        (unsent(), Sign.NONE),
        (ConnectionLost("closed", **AT), Sign.MAYBE),
        (BadUpstreamReply("no JSON", **AT), Sign.NONE),
        (UpstreamTimeout("late", **AT), Sign.NONE),
    ],
    ids=["engine", "transfer", "reset", "refused", "mid-stream", "nonsense", "late"],
)
def test_only_a_death_counts_as_a_loss(error: UpstreamError, sign: Sign) -> None:
    assert sign_of(error) is sign


def test_two_losses_identify_a_cause_and_explain_those_of_other_requests() -> None:
    suspicions, cause, bystander = Suspicions(), Suspect(), Suspect()
    assert not suspicions.lost(cause, "d0", 0.0)
    assert not suspicions.lost(bystander, "d0", 0.1)
    assert suspicions.lost(cause, "d1", 5.0)
    assert cause.workers == ["d0", "d1"]
    assert bystander.explained == 1 and not bystander.given_up


def test_three_losses_under_an_answer_identify_a_cause_unless_it_ran_long_on_a_worker() -> None:
    suspicions, cause = Suspicions(), Suspect()
    found = [suspicions.lost_midway(cause, f"d{number}", 10.0 * number, 1.0) for number in range(3)]
    assert found == [False, False, True] and cause.workers == ["d0", "d1", "d2"]

    suspicions, cleared = Suspicions(), Suspect()
    lived_s = [1.0, 1.0, CLEARED_AFTER_S, 1.0, 1.0]
    found = [suspicions.lost_midway(cleared, f"d{number}", 50.0 * number, each) for number, each in enumerate(lived_s)]
    assert found == [False, False, False, False, True]  # the one after the long life counts


def test_a_loss_that_another_request_caused_does_not_count_against_an_answer() -> None:
    suspicions, cause, bystander = Suspicions(), Suspect(), Suspect()
    suspicions.lost(cause, "d0", 0.0)
    suspicions.lost_midway(bystander, "d0", 0.1, 1.0)
    suspicions.lost(cause, "d1", 5.0)
    assert not suspicions.lost_midway(bystander, "d2", 20.0, 1.0)
    assert not suspicions.lost_midway(bystander, "d3", 40.0, 1.0)
    assert suspicions.lost_midway(bystander, "d4", 60.0, 1.0)


def test_two_requests_that_kill_and_share_a_worker_reach_one_more_each() -> None:
    suspicions, first, second = Suspicions(), Suspect(), Suspect()
    suspicions.lost(first, "d0", 0.0)
    suspicions.lost(second, "d0", 0.1)
    assert suspicions.lost(first, "d1", 5.0)
    assert suspicions.lost(second, "d2", 9.0)  # though the first of its losses is explained
    assert second.workers == ["d0", "d2"]


def test_a_second_death_of_a_worker_is_not_explained_by_its_first() -> None:
    suspicions, first, second = Suspicions(), Suspect(), Suspect()
    suspicions.lost(first, "d0", 0.0)
    suspicions.lost(first, "d1", 1.0)
    assert not suspicions.lost(second, "d0", 1.0 + SAME_DEATH_S)
    assert suspicions.lost(second, "d1", 2.0 + SAME_DEATH_S)


def test_a_first_token_clears_a_request() -> None:
    suspicions, suspect = Suspicions(), Suspect()
    suspicions.lost(suspect, "d0", 0.0)
    suspicions.cleared(suspect)
    assert not suspicions.lost(suspect, "d1", 9.0)


@with_virtual_time
async def test_suspects_use_a_worker_one_at_a_time() -> None:
    loop = asyncio.get_running_loop()
    suspicions, first, second, third = Suspicions(), Suspect(), Suspect(), Suspect()
    await suspicions.turn(first, "d0")
    await suspicions.turn(third, "d1")  # another worker: at once
    waits = asyncio.ensure_future(suspicions.turn(second, "d0"))
    await let_pass(1)
    assert not waits.done()
    suspicions.end_turn(first)
    await waits
    start_s = loop.time()
    await suspicions.turn(first, "d0")  # the second one never ends: not for ever
    assert loop.time() - start_s == pytest.approx(TURN_S)
    suspicions.end_turn(second)
    suspicions.end_turn(second)


@with_virtual_time
async def test_a_suspect_that_goes_to_another_worker_frees_its_turn_at_the_first() -> None:
    suspicions, first, second = Suspicions(), Suspect(), Suspect()
    await suspicions.turn(first, "d0")
    await suspicions.turn(first, "d1")  # it was not sent to the first after all
    start_s = asyncio.get_running_loop().time()
    await suspicions.turn(second, "d0")
    assert asyncio.get_running_loop().time() == start_s


@with_virtual_time
async def test_no_more_choices_are_out_than_may_be_lost_when_workers_take_long() -> None:
    choices, suspicions = Choices(), Suspicions()
    went: list[int] = []

    async def one(number: int) -> None:
        await choices.turn(number)
        went.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(5)]
    await let_pass(TURN_S / 2)
    assert went == [0]
    await let_pass(10 * TURN_S)
    assert len(went) == 2
    assert not suspicions.lost(Suspect(choices), "d0", 0.0)
    choices.back(0)
    await let_pass(10 * TURN_S)
    assert len(went) == 2  # who is out may be the second loss
    choices.back(went[1])  # unharmed
    await let_pass(TURN_S)
    assert len(went) == 3
    choices.clear()
    await asyncio.gather(*tasks)
    assert sorted(went) == [0, 1, 2, 3, 4]


def test_a_choice_keeps_its_own_losses_when_another_gets_its_first_token() -> None:
    choices, suspicions = Choices(), Suspicions()
    kills, good = Suspect(choices), Suspect(choices)
    assert not suspicions.lost(kills, "d0", 0.0)
    suspicions.cleared(good)
    choices.clear()
    assert suspicions.lost(kills, "d1", 5.0)
    assert kills.workers == ["d0", "d1"]
    assert not suspicions.lost(good, "d2", 9.0)


def test_two_choices_that_share_a_lost_worker_count_one_loss() -> None:
    choices, suspicions = Choices(), Suspicions()
    assert not suspicions.lost(Suspect(choices), "d0", 0.0)
    assert not suspicions.lost(Suspect(choices), "d0", 0.1)
    last = Suspect(choices)
    assert suspicions.lost(last, "d1", 5.0)
    assert last.workers == ["d0", "d1"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_caused_by_a_request_of_another_process_is_explained(when: str) -> None:
    here = Suspicions()
    cause, bystander = Suspect(), Suspect()

    def tell(losses: list[Loss]) -> None:
        for loss in losses:
            here.explained_elsewhere(loss.worker, loss.at_s)

    there = Suspicions(tell)
    if when == "before":
        here.lost(bystander, "d1", 5.1)
    there.lost(cause, "d0", 0.0)
    assert there.lost(cause, "d1", 5.0)
    if when == "after":
        here.lost(bystander, "d1", 5.1)
    assert bystander.explained == 1 and not bystander.given_up


def test_old_deaths_are_forgotten_for_any_number_of_worker_names() -> None:
    known, suspicions, informed = losses(), Suspicions(), Suspicions()
    for number in range(500):
        suspicions.lost(Suspect(), f"d{number}", number * KNOWN_S / 10)
        informed.explained_elsewhere(f"d{number}", number * KNOWN_S / 10)
    assert len(losses() - known) == 20


def losses() -> set[int]:
    """All that are known of still, by identity."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, Loss)}


def test_a_death_is_not_explained_by_an_earlier_one_of_the_same_worker() -> None:
    suspicions, suspect = Suspicions(), Suspect()
    suspicions.lost(suspect, "d0", 100.0)
    suspicions.explained_elsewhere("d0", 100.0 - SAME_DEATH_S - 0.1)
    assert suspect.explained == 0
    suspicions.explained_elsewhere("d0", 300.0)  # a later one
    assert suspect.explained == 0
