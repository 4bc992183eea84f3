"""The two stages of BR-0 and BR-H: who comes first when several are as good."""

import pytest

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.types import RequestSpec, Role, WorkerSpec, WorkerState
from tests.unit.core.builders import a_scheduler, admitted, pool_all

BOTH = pytest.mark.parametrize("policy", ["br_0", "br_h"])


@BOTH
def test_stage_1_takes_the_lowest_index_of_equal_workers(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=3, slots=2, s_greedy=0, slack_placement="free_slots", horizon_steps=4)
    pool_all(scheduler, {"a": 50, "b": 50, "c": 50})
    assert admitted(scheduler) == [("a", "d0"), ("b", "d1"), ("c", "d2")]


@BOTH
def test_stage_2_takes_the_lowest_index_of_equal_workers(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=3, slots=1, s_greedy=9, r_max=1, horizon_steps=4)
    pool_all(scheduler, {name: 50 for name in "abcd"})
    assert admitted(scheduler) == [("a", "d0"), ("b", "d1"), ("c", "d2")]


@BOTH
def test_stage_2_serves_the_worker_with_the_larger_margin_first(policy: str) -> None:
    scheduler = a_scheduler(policy, workers=2, slots=2, s_greedy=9, r_max=4, horizon_steps=4)
    pool_all(scheduler, {"x": 900, "y": 100})
    assert dict(admitted(scheduler)) == {"x": "d0", "y": "d1"}
    pool_all(scheduler, {"a": 300, "b": 700, "c": 10})
    assert admitted(scheduler)[0] == ("b", "d1"), "its margin is 800; d0 has none"


@BOTH
def test_overdue_requests_with_equal_scores_go_to_the_lightest_worker(policy: str) -> None:
    """60 tokens fit the margins of d1 (900 - 500) and d2 (900 - 200): F is the same on both."""
    scheduler = a_scheduler(policy, workers=3, slots=2, max_wait_s=5.0, s_greedy=0, horizon_steps=4)
    pool_all(scheduler, {"x": 900, "y": 500, "z": 200})
    assert len(admitted(scheduler)) == 3
    pool_all(scheduler, {"old": 60}, now=1.0)
    pool_all(scheduler, {name: 10 for name in "abc"}, now=99.0)
    action = scheduler.admit(100.0)[0]
    assert (action.request, action.worker, action.stage) == ("old", "d2", 0)


@pytest.mark.parametrize(("guard", "taken"), [("pool", "tiny"), ("head", "large")])
def test_the_guard_fills_the_slot_when_nothing_scores(guard: str, taken: str) -> None:
    """One worker alone has no margin, so every score is 0 or below with G = 1 and beta = 5."""
    scheduler = a_scheduler("br_0", workers=1, slots=1, s_greedy=9, r_max=2, beta=5.0, guard=guard)
    for name, size in {"large": 800, "larger": 900, "tiny": 5}.items():
        scheduler.submit_prefilled(RequestSpec(name, size), 0.0)
    assert admitted(scheduler) == [(taken, "d0")]


def test_a_horizon_that_follows_the_answers_is_a_sixth_of_their_mean() -> None:
    scheduler = a_scheduler("br_h", horizon_auto=True)
    horizon_of = scheduler.policy.horizon_of  # type: ignore[attr-defined]
    assert horizon_of(scheduler.snapshot) == 80, "nothing is known yet"
    for tokens, steps in ((28.0, 5), (2.0, 1), (300.0, 50), (5000.0, 80)):
        scheduler.snapshot.means.answers, scheduler.snapshot.means.answer_tokens = 9, tokens
        assert horizon_of(scheduler.snapshot) == steps


@pytest.mark.parametrize("steps", [1, 7, 30])
def test_a_shorter_look_at_a_long_projection_decides_as_a_short_one(steps: int) -> None:
    """Where nothing is predicted, all that is read of the projection is its first H + 1 steps."""
    waiting = {f"w{n}": size for n, size in enumerate((900, 40, 2500, 700, 130, 60))}
    decided = []
    for settings in ({"horizon_auto": True}, {"horizon_steps": steps}):
        scheduler = a_scheduler("br_h", workers=3, slots=2, **settings)
        scheduler.snapshot.means.answers, scheduler.snapshot.means.answer_tokens = 9, 6.0 * steps
        pool_all(scheduler, {"a": 1000, "b": 300, "c": 20})
        admitted(scheduler)
        pool_all(scheduler, waiting)
        decided.append(admitted(scheduler))
    assert decided[0] == decided[1] and len(decided[0]) == 3


@BOTH
def test_a_worker_that_is_down_sets_no_envelope(policy: str) -> None:
    """Without it d1 has a margin of 600; with it, one of 8,600 that would take the largest prompt."""
    scheduler = a_scheduler(policy, workers=3, slots=2, s_greedy=0, slack_placement="free_slots", horizon_steps=4)
    for worker, size in {"d0": 1000, "d1": 400, "d2": 9000}.items():
        for other in ("d0", "d1", "d2"):
            scheduler.set_worker_state(other, WorkerState.UP if other == worker else WorkerState.DRAINING, 0.0)
        pool_all(scheduler, {f"on {worker}": size})
        assert admitted(scheduler) == [(f"on {worker}", worker)]
    scheduler.set_worker_state("d2", WorkerState.DOWN, 1.0)
    scheduler.set_worker_state("d1", WorkerState.UP, 1.0)
    pool_all(scheduler, {"fits": 550, "huge": 5000, "small": 10}, now=1.0)
    assert admitted(scheduler, 1.0)[0] == ("fits", "d1")


def test_overflow_on_a_slow_worker_counts_by_its_slowdown() -> None:
    """D tokens are D times the slowdown of load: F = D - G (slowdown D - m)."""
    scheduler = a_scheduler("br_0", workers=0)
    for name, slowdown in (("d0", 1.0), ("d1", 2.0)):
        scheduler.add_worker(WorkerSpec(name, Role.DECODE, slots=2, slowdown=slowdown), 0.0)
    scheduler.set_worker_state("d1", WorkerState.DRAINING, 0.0)
    pool_all(scheduler, {"x": 1000})
    admitted(scheduler)
    margins = scheduler.policy.margins(scheduler.snapshot)  # type: ignore[attr-defined]
    score = margins.score(scheduler.snapshot.workers[1])
    assert score(500) == pytest.approx(500.0)
    assert score(700) == pytest.approx(700.0 - 2 * (2.0 * 700 - 1000))


def test_foreign_requests_are_projected_with_their_growth_and_cost() -> None:
    scheduler = a_scheduler("br_h", workers=0, horizon_steps=3)
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=8, request_tokens=100), 0.0)
    scheduler.report_decoder("d0", 2, 50, 1, 0.0)
    assert scheduler.snapshot.projected_loads().tolist() == [[250, 252, 254, 256]]


@pytest.mark.parametrize("order", [("below", "above"), ("above", "below")])
def test_the_first_request_in_waiting_order_wins_among_equal_scores(order: tuple[str, str]) -> None:
    """With a margin of 100 and beta 2, 90 tokens score 90 and 110 tokens 110 - 2 * 10."""
    scheduler = a_scheduler("br_0", workers=2, slots=2, s_greedy=0, slack_placement="free_slots", beta=2.0)
    pool_all(scheduler, {"x": 100})
    assert admitted(scheduler) == [("x", "d0")]
    pool_all(scheduler, {name: {"below": 90, "above": 110}[name] for name in order})
    assert admitted(scheduler)[0] == (order[0], "d1")


@BOTH
def test_where_as_many_slots_are_free_as_wait_the_largest_prompt_goes_first(policy: str) -> None:
    """By its score the smaller one would, as both raise the envelope."""
    scheduler = a_scheduler(policy, workers=2, slots=1, s_greedy=0, slack_placement="load", horizon_steps=4)
    pool_all(scheduler, {"small": 10, "large": 90})
    assert admitted(scheduler) == [("large", "d0"), ("small", "d1")]


def test_the_weights_that_a_policy_keeps_follow_the_answers() -> None:
    scheduler = a_scheduler("br_h", workers=3, horizon_auto=True)
    snapshot = scheduler.snapshot
    pool_all(scheduler, {"x": 1000})
    admitted(scheduler)

    def scores(policy: AdmissionPolicy) -> list[float]:
        margins = policy.margins(snapshot)  # type: ignore[attr-defined]
        return [margins.score(worker)(3000) for worker in snapshot.workers]

    before = scores(scheduler.policy)
    snapshot.means.answers, snapshot.means.answer_tokens = 9, 60.0
    after = scores(scheduler.policy)
    assert before != after == scores(make_policy(PolicySettings(policy="br_h", horizon_auto=True)))


@pytest.mark.parametrize(("slowdown", "request_tokens"), [(1.0, 0), (1.0, 300), (1.5, 300)])
@pytest.mark.parametrize("remaining", [None, 0.0, 2.0, 4.0])
def test_margins_after_an_admission_are_those_of_a_projection_made_anew(
    remaining: float | None, slowdown: float, request_tokens: int
) -> None:
    """The first raises the envelope, the second stays below it."""
    scheduler = a_scheduler("br_h", workers=0, horizon_steps=4)
    for name in ("d0", "d1", "d2"):
        spec = WorkerSpec(name, Role.DECODE, slots=2, slowdown=slowdown, request_tokens=request_tokens)
        scheduler.add_worker(spec, 0.0)
    policy, snapshot = scheduler.policy, scheduler.snapshot
    margins = policy.margins(snapshot)  # type: ignore[attr-defined]
    assert margins.least_margin(snapshot.workers[0]) == 0.0
    for worker, size in zip(snapshot.workers, (1000, 400), strict=False):
        for each in snapshot.workers:
            margins.score(each)
        scheduler.submit_prefilled(RequestSpec(f"{size}", size), 0.0, remaining)
        request = snapshot.pool.front[0]
        scheduler._bind(Choice(request, worker, 1, 0.0), 0.0)
        margins.admit(request, worker)
        anew = policy.margins(snapshot)  # type: ignore[attr-defined]
        for each in snapshot.workers:
            for tokens in (1, 500, 1001, 3000):
                assert margins.score(each)(tokens) == anew.score(each)(tokens)
