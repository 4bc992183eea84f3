"""Requests sent ahead of a slot: how many, to whom, and that nothing changes where there are none."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from balanceroute.core.overlap import Overlap
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.types import Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from tests.unit.core import builders

POOLED = ["level_fit", "target_fit", "br_0", "br_h", "pool_fifo"]


def a_scheduler(overlap_requests: int | None, policy: str = "level_fit", workers: int = 2, slots: int = 2) -> Scheduler:
    """Empty workers."""
    config = SchedulerConfig(overlap_requests=overlap_requests)
    return builders.a_scheduler(policy, workers=workers, slots=slots, prefillers=0, config=config, hold_s=0.0)


def offer(scheduler: Scheduler, *names: str, now: float = 0.0) -> None:
    """Requests of 100 tokens into the pool."""
    for name in names:
        scheduler.submit_prefilled(RequestSpec(name, 100), now)


def held(scheduler: Scheduler) -> list[int]:
    """Requests on each worker."""
    return [len(worker.active) for worker in scheduler.snapshot.workers]


@pytest.mark.parametrize(
    ("slots", "transfer_s", "answer_tokens", "unlike", "alike"),
    [
        (64, 1.5, 1200.0, 2, 3),
        (64, 0.1, 1200.0, 0, 0),
        (64, 0.46, 1200.0, 0, 1),
        (64, 0.48, 1200.0, 1, 1),
        (8, 90.0, 20.0, 8, 8),
        (64, 1.0, 0.0, 0, 0),
        (64, 0.02, 10.0, 0, 0),  # of a step of 0.05
        (64, 0.03, 10.0, 4, 6),
        (4, 2.0, 500.0, 0, 2),  # each slot would be empty for 8 % of its time
        (8, 0.2, 500.0, 0, 1),  # for .8 %
    ],
)
def test_as_many_are_sent_ahead_as_leave_during_a_transfer(
    slots: int, transfer_s: float, answer_tokens: float, unlike: int, alike: int
) -> None:
    overlap = Overlap()
    overlap.see_answer(0.05 * 9, 10)
    overlap.see_first_token(transfer_s + 0.05, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    for early_choice_slots, sent in ((0.9, unlike), (0.5, unlike), (0.0, alike)):
        assert overlap.requests(slots, answer_tokens, 1.0, early_choice_slots, pool_share=0.0) == sent


@pytest.mark.parametrize(
    ("slots", "transfer_s", "pool_share", "sent"),
    [
        (16, 3.8, 512.0, 6),  # as many as leave meanwhile
        (16, 7.0, 512.0, 58),
        (16, 10.0, math.inf, 136),
        (16, 20.0, 128.0, 112),  # and 16 stay in the pool for each worker
        (64, 7.0, 100.0, 45),  # as many as leave meanwhile, though fewer stay
    ],
)
def test_where_a_transfer_takes_half_an_answer_or_more_requests_are_sent_ahead_as_far_as_the_pool_has_them(
    slots: int, transfer_s: float, pool_share: float, sent: int
) -> None:
    """Answers take ten seconds."""
    overlap = Overlap(transfer_s=transfer_s, token_s=0.1, transfers=1, answers=1)
    assert overlap.requests(slots, 100.0, 1.0, 0.5, pool_share) == sent


@given(slots=st.integers(1, 256), answers=st.floats(0.01, 50.0))
def test_no_more_slots_than_a_twentieth_are_lost_to_pauses_between_transfers(slots: int, answers: float) -> None:
    """While a worker waits for KV its slots run empty: within a transfer `answers` long, counted in answers."""
    overlap = Overlap(transfer_s=answers, token_s=0.01, transfers=1, answers=1)
    sent = overlap.requests(slots, 100.0, 1.0, 0.5, math.inf)
    empty = answers**2 / 2 if answers < 1 else answers - 0.5  # of one slot, as it ends at random
    assert empty / ((slots + sent) / slots + empty) <= 0.051 + 1 / slots


@pytest.mark.parametrize(
    ("tokens_per_step", "transfer_s", "sent"), [(1.0, 0.025, 6), (1.0, 0.024, 0), (2.5, 0.0625, 16), (2.5, 0.06, 0)]
)
def test_a_transfer_that_takes_less_than_half_a_step_counts_as_none(
    tokens_per_step: float, transfer_s: float, sent: int
) -> None:
    """A token takes .05 s, a step as many times that as it yields tokens."""
    overlap = Overlap(transfer_s=transfer_s, token_s=0.05, transfers=1, answers=1)
    assert overlap.requests(64, 5.0, tokens_per_step, 0.5, pool_share=16.0) == sent


@given(slots=st.integers(8, 64), on_way=st.floats(0.0, 8.0), early_choice_slots=st.floats(0.0, 2.0))
def test_requests_are_sent_ahead_until_one_more_would_too_rarely_find_a_slot(
    slots: int, on_way: float, early_choice_slots: float
) -> None:
    """Departures during a transfer are Poisson's; m is within one of the quantile of these that the cost asks for."""
    overlap = Overlap(transfer_s=on_way / slots * 100.0, token_s=0.01, transfers=1, answers=1)
    assume(overlap.transfer_s >= 0.01)
    sent = overlap.requests(slots, 10_000.0, 1.0, early_choice_slots, pool_share=0.0)
    worth_it = min(0.5, max(0.002 * slots, early_choice_slots))
    enough, more_leave = 0, 1.0 - math.exp(-on_way)
    while more_leave >= worth_it and enough < slots:
        enough += 1
        more_leave -= math.exp(-on_way) * on_way**enough / math.factorial(enough)
    assert abs(sent - enough) <= 1


@pytest.mark.parametrize(
    ("prompts", "workers", "shared_barrier", "slots_lost"),
    [
        ([100, 100, 100], 8, True, 0.0),
        ([50, 150] * 40, 2, True, 0.25),
        ([50, 150] * 40, 4, True, 0.375),
        ([50, 150] * 40, 4, False, 0.0),
        ([50, 150] * 40, 1, True, 0.0),
        ([], 8, True, 0.0),
    ],
)
def test_an_early_choice_costs_more_with_varied_prompts_and_a_shared_barrier(
    prompts: list[int], workers: int, shared_barrier: bool, slots_lost: float
) -> None:
    scheduler = a_scheduler(None, workers=workers)
    scheduler.configure(SchedulerConfig(shared_barrier=shared_barrier), 0.0)
    for tokens in prompts:
        scheduler.snapshot.means.see_prompt(tokens)
    assert scheduler.snapshot.early_choice_slots() == pytest.approx(slots_lost, abs=0.02)


def test_a_worker_that_is_down_adds_no_cost_to_early_choices() -> None:
    scheduler = a_scheduler(None, workers=2)
    for tokens in [50, 150] * 40:
        scheduler.snapshot.means.see_prompt(tokens)
    assert scheduler.snapshot.early_choice_slots() > 0.0
    scheduler.set_worker_state("d0", WorkerState.DOWN, 0.0)
    assert scheduler.snapshot.early_choice_slots() == 0.0


def test_the_step_of_a_first_token_is_no_transfer_where_a_step_yields_several_tokens() -> None:
    overlap = Overlap()
    overlap.see_answer(1.8, 28)  # three tokens per step of .2 s
    overlap.see_first_token(0.2, sent_ahead=False, tokens_per_step=3.0, mean_prompts=1.0)
    assert overlap.transfer_s == pytest.approx(0.0, abs=1e-9)
    assert overlap.requests(64, 28.0, 3.0, 0.5, pool_share=16.0) == 0
    believed_single = Overlap()
    believed_single.see_answer(1.8, 28)
    believed_single.see_first_token(0.2, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    assert believed_single.requests(64, 28.0, 1.0, 0.5, pool_share=16.0) > 0


def test_overlap_figures_are_means_of_all_measurements() -> None:
    overlap = Overlap()
    for step_s in (0.02, 0.04, 0.06):
        overlap.see_answer(step_s * 9, 10)
    assert overlap.token_s == pytest.approx(0.04)
    for transfer_s in (1.0, 2.0, 3.0):
        overlap.see_first_token(transfer_s + 0.04, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    assert overlap.transfer_s == pytest.approx(2.0)


def test_nothing_is_sent_ahead_before_the_first_measurement() -> None:
    overlap = Overlap()
    overlap.see_first_token(
        5.0, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0
    )  # how much is a step, nobody knows yet
    assert overlap.requests(64, 100.0, 1.0, 0.5, pool_share=16.0) == 0
    overlap.see_answer(9.0, 1)  # one token says nothing of a step
    assert overlap.token_s == 0.0


def test_an_answer_with_a_negative_duration_counts_as_zero() -> None:
    """A relay's word of the first token came later than its word of the end."""
    overlap = Overlap()
    overlap.see_answer(-0.25, 2)
    assert overlap.token_s == 0.0 and overlap.requests(8, 100.0, 1.0, 0.5, pool_share=16.0) == 0
    overlap.see_answer(0.5, 2)
    assert overlap.token_s == 0.25


def test_a_wait_for_a_slot_never_lengthens_the_measured_transfer() -> None:
    overlap = Overlap()
    overlap.see_answer(1.0, 2)
    overlap.see_first_token(3.0, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    overlap.see_first_token(9.0, sent_ahead=True, tokens_per_step=1.0, mean_prompts=1.0)
    assert overlap.transfer_s == 2.0
    overlap.see_first_token(2.0, sent_ahead=True, tokens_per_step=1.0, mean_prompts=1.0)
    assert overlap.transfer_s == 1.5


def test_a_short_transfer_of_a_small_prompt_sent_ahead_says_nothing_against_the_mean_one() -> None:
    overlap = Overlap()
    overlap.see_answer(1.0, 2)
    overlap.see_first_token(5.0, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    overlap.see_first_token(2.0, sent_ahead=True, tokens_per_step=1.0, mean_prompts=0.25)  # 1 s, as four to a mean one
    assert overlap.transfer_s == 4.0
    overlap.see_first_token(1.5, sent_ahead=True, tokens_per_step=1.0, mean_prompts=0.25)  # a half of that
    assert overlap.transfer_s == 3.75
    overlap.see_first_token(4.8, sent_ahead=True, tokens_per_step=1.0, mean_prompts=3.0)  # it may have no more to move
    assert overlap.transfer_s == 3.75
    overlap.see_first_token(4.0, sent_ahead=True, tokens_per_step=1.0, mean_prompts=3.0)
    assert overlap.transfer_s == 3.5


@pytest.mark.parametrize("policy", POOLED)
def test_slots_are_filled_first_and_then_the_allowed_overlap(policy: str) -> None:
    scheduler = a_scheduler(1, policy)
    offer(scheduler, "a", "b", "c")
    assert len(scheduler.admit(0.0)) == 3
    assert sorted(held(scheduler)) == [1, 2]  # a slot is free: nothing goes ahead of one
    offer(scheduler, *"defgh")
    assert len(scheduler.admit(1.0)) == 3
    assert held(scheduler) == [3, 3]
    assert len(scheduler.snapshot.pool) == 2
    ahead = sorted(tracker.id for tracker in scheduler.snapshot.decoding() if tracker.sent_ahead)
    assert len(ahead) == 2
    assert [(worker.free_slots, worker.own_slots) for worker in scheduler.snapshot.workers] == [(0, 2), (0, 2)]
    scheduler.snapshot.check_invariants()


def test_slots_that_a_slower_worker_keeps_free_keep_nobody_from_being_sent_ahead_to_a_fast_one() -> None:
    """They stay free as long as it is busy, while transfers to the fast worker would leave its slots empty.

    What is sent ahead to the fast worker raises the envelope; that makes no slot of the slow one a place ahead.
    """
    scheduler = a_scheduler(2, workers=0)
    for name, slowdown in (("fast", 1.0), ("slow", 3.0)):
        spec = WorkerSpec(name, Role.DECODE, slots=8, slowdown=slowdown, request_tokens=1_000)
        scheduler.add_worker(spec, 0.0)
    for number in range(24):  # one by one: while few run, a slower worker takes more
        offer(scheduler, f"r{number}")
        scheduler.admit(0.0)
    fast, slow = scheduler.snapshot.workers
    assert [tracker.sent_ahead for tracker in fast.active.values()] == [False] * 8 + [True] * 2
    assert 0 < slow.free_slots < len(scheduler.snapshot.pool)
    assert not any(tracker.sent_ahead for tracker in slow.active.values())
    assert (fast.own_slots, slow.own_slots) == (8, 8)


def test_slots_that_a_large_worker_keeps_free_keep_nobody_from_being_sent_ahead_though_few_wait() -> None:
    """Fewer wait than it has slots free, so that they might find one there; but those are not to be filled."""
    scheduler = a_scheduler(2, workers=0)
    for name, slots in (("small", 4), ("other", 4), ("large", 64)):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=slots, request_tokens=60_000), 0.0)
    for number in range(12):
        offer(scheduler, f"r{number}")
        scheduler.admit(0.0)
    assert held(scheduler) == [4, 4, 4]
    offer(scheduler, "ahead")
    assert [admission.worker for admission in scheduler.admit(0.0)] == ["small"]
    assert scheduler.snapshot.requests["ahead"].sent_ahead


def test_nothing_is_sent_ahead_while_memory_keeps_a_slot_free() -> None:
    """What is sent ahead holds memory too, and what waits for memory would lose its place to it."""
    scheduler = a_scheduler(1)
    offer(scheduler, "a", "b", "c")
    scheduler.admit(0.0)
    short = next(worker for worker in scheduler.snapshot.workers if worker.free_slots)
    scheduler.report_decoder_memory(short.spec.id, 150, 0.0)
    offer(scheduler, "d", "e")
    assert scheduler.admit(0.0) == []


def test_a_worker_may_be_sent_requests_ahead_before_anything_has_waited() -> None:
    """Drivers ask for a decision only where there is room, so the room ahead must be known before the first one."""
    scheduler = a_scheduler(1, workers=1)
    offer(scheduler, "a", "b")
    assert len(scheduler.admit(0.0)) == 2  # nothing is left to wait, and no slot is free
    assert scheduler.snapshot.has_room
    offer(scheduler, "c")
    assert [admission.request for admission in scheduler.admit(1.0)] == ["c"]
    assert not scheduler.snapshot.has_room


@pytest.mark.parametrize("policy", ["join_shortest_queue", "least_kv"])
def test_a_policy_that_assigns_at_once_sends_everything_anyway(policy: str) -> None:
    scheduler = a_scheduler(1, policy)
    offer(scheduler, *"abcdefgh")
    assert len(scheduler.admit(0.0)) == 8


def test_nothing_is_sent_ahead_to_a_draining_worker() -> None:
    scheduler = a_scheduler(1)
    offer(scheduler, *"abcdef")
    scheduler.set_worker_state("d0", scheduler.snapshot.workers[0].state.DRAINING, 0.0)
    scheduler.admit(0.0)
    assert held(scheduler) == [0, 3]


def test_the_overlap_is_sized_from_first_tokens_and_departures() -> None:
    """Transfers of 3 s, and answers of 10 tokens in 9 s: of two slots .6 wait for one, and a choice costs nothing."""
    scheduler = a_scheduler(None, workers=1)
    now = 0.0
    for round_ in range(20):
        offer(scheduler, f"{round_}", now=now)
        assert len(scheduler.admit(now)) == 1
        scheduler.began(f"{round_}", now + 4.0)
        scheduler.progress(f"{round_}", 10, now + 4.0)
        now += 13.0
        scheduler.finish(f"{round_}", Outcome.FINISHED, now)
    overlap = scheduler.snapshot.overlap
    assert (overlap.token_s, overlap.transfer_s) == (pytest.approx(1.0), pytest.approx(3.0))
    offer(scheduler, *"abcdef", now=now)
    assert len(scheduler.admit(now)) == 4
    assert scheduler.snapshot.workers[0].ahead == 2


def test_tokens_per_step_are_per_worker() -> None:
    scheduler = a_scheduler(None, workers=1, slots=64)
    scheduler.report_tokens_per_step("d0", 2.0, 0.0)
    for round_ in range(20):
        name, now = f"{round_}", 10.0 * round_
        offer(scheduler, name, now=now)
        scheduler.admit(now)
        scheduler.began(name, now + 1.0)  # one step, of two tokens
        scheduler.progress(name, 10, now + 1.0)
        scheduler.finish(name, Outcome.FINISHED, now + 5.5)
    assert scheduler.snapshot.overlap.transfer_s == pytest.approx(0.0)
    scheduler.admit(300.0)
    assert scheduler.snapshot.workers[0].ahead == 0
    scheduler.report_tokens_per_step("d0", 1.0, 300.0)
    offer(scheduler, "last", now=300.0)
    scheduler.admit(300.0)
    scheduler.began("last", 301.0)
    assert scheduler.snapshot.overlap.transfer_s > 0.0


def test_beside_foreign_requests_nothing_is_measured_or_sent_ahead() -> None:
    """A wait for a slot that one of theirs has looks like a transfer."""
    scheduler = a_scheduler(None, workers=1)
    worker = scheduler.snapshot.workers[0]
    overlap = scheduler.snapshot.overlap
    offer(scheduler, "first")
    scheduler.admit(0.0)
    scheduler.began("first", 4.0)
    scheduler.progress("first", 10, 4.0)
    scheduler.finish("first", Outcome.FINISHED, 13.0)
    offer(scheduler, "second", now=13.0)
    scheduler.admit(13.0)
    scheduler.began("second", 17.0)
    assert overlap.transfers == 1
    worker.set_foreign(1, 100, least_own_slots=1)
    offer(scheduler, *"abcdef", now=17.0)
    scheduler.admit(17.0)
    scheduler.finish("second", Outcome.FINISHED, 20.0)
    (third,) = scheduler.admit(20.0)
    scheduler.began(third.request, 300.0)
    assert overlap.transfers == 1
    assert worker.ahead == 0
    worker.set_foreign(0, 0, least_own_slots=1)
    scheduler.admit(300.0)
    assert worker.ahead == 2


def test_an_overlap_that_is_turned_off_ends_at_once() -> None:
    scheduler = a_scheduler(1, workers=1)
    offer(scheduler, *"abcd")
    scheduler.admit(0.0)
    assert held(scheduler) == [3]
    scheduler.configure(SchedulerConfig(), 1.0)
    scheduler.finish("a", Outcome.FINISHED, 2.0)
    assert not scheduler.snapshot.has_room
    assert scheduler.admit(2.0) == []
    scheduler.finish("b", Outcome.FINISHED, 3.0)
    assert [admission.request for admission in scheduler.admit(3.0)] == ["d"]


def test_a_reload_sizes_the_overlap_by_the_new_bounds() -> None:
    scheduler = a_scheduler(None, slots=64)
    snapshot = scheduler.snapshot
    snapshot.overlap.see_answer(0.05 * 9, 10)
    snapshot.overlap.see_first_token(1.55, sent_ahead=False, tokens_per_step=1.0, mean_prompts=1.0)
    snapshot.means.answer_tokens, snapshot.means.prompt_tokens, snapshot.means.deviation_tokens = 1200.0, 300.0, 900.0
    for shared_barrier, sent in ((True, 2), (False, 3)):
        scheduler.configure(SchedulerConfig(overlap_requests=None, shared_barrier=shared_barrier), 1.0)
        assert [worker.ahead for worker in snapshot.workers] == [sent, sent]


class FailsAtTheSecond(AdmissionPolicy):
    """Decides as another policy does, once."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy, self.calls = policy, 0

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        yield from self.policy.decide(snapshot, now)


def test_a_policy_that_raises_leaves_the_slots_unchanged() -> None:
    scheduler = a_scheduler(1, workers=1)
    offer(scheduler, *"abcd")
    scheduler.policy = FailsAtTheSecond(scheduler.policy)
    with pytest.raises(ZeroDivisionError):
        scheduler.admit(0.0)
    assert scheduler.snapshot.workers[0].own_slots == 2


def test_a_readmitted_request_is_measured_again() -> None:
    scheduler = a_scheduler(None, workers=1)
    scheduler.add_worker(WorkerSpec("p", Role.PREFILL), 0.0)
    scheduler.submit(RequestSpec("a", 100), 0.0)
    scheduler.dispatch(0.0)
    scheduler.prefilled("a", 100, 0.0)
    scheduler.admit(0.0)
    scheduler.began("a", 1.0)
    scheduler.progress("a", 1, 1.0)
    scheduler.requeue("a", 2.0)
    scheduler.dispatch(2.0)
    scheduler.prefilled("a", 101, 3.0)
    scheduler.admit(3.0)
    assert scheduler.snapshot.requests["a"].began_s == math.inf
