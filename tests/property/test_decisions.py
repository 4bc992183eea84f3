"""Scores and choices against their definitions, on random clusters and pools."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.core.balance_route import BalanceRoute, BalanceRouteParams, ProjectedMargins, best_single
from balanceroute.core.fit_rules import LEVEL_FIT, TARGET_FIT, FitRules, TargetFitParams
from balanceroute.core.fscore import HorizonWeights, present_score, present_value
from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy
from balanceroute.core.policy import Choice
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.target_fit import TargetFit
from balanceroute.core.types import RequestSpec, Role, WorkerSpec

MANY = settings(max_examples=100, deadline=None)
sizes = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 4_000)), min_size=1, max_size=10)
margins = st.lists(st.one_of(st.just(0), st.integers(0, 3_000)), min_size=1, max_size=6)
weights = st.tuples(st.floats(0.1, 4), st.floats(0, 50), st.floats(0, 1))
clusters = st.lists(st.lists(st.integers(1, 2_000), max_size=3), min_size=1, max_size=4)


def a_cluster(loads: list[list[int]], waiting: list[int], policy: BalanceRoute | None = None) -> Scheduler:
    """Workers of four slots that hold requests of these sizes, and a pool."""
    scheduler = Scheduler(policy or make_policy(PolicySettings(policy="pool_fifo")))
    for worker, held in enumerate(loads):
        scheduler.add_worker(WorkerSpec(f"d{worker}", Role.DECODE, slots=4), 0.0)
        for index, size in enumerate(held):
            scheduler.submit_prefilled(RequestSpec(f"d{worker}.{index}", size), 0.0, 2.0 if size % 3 == 0 else None)
            scheduler._bind(Choice(scheduler.snapshot.pool.front[0], scheduler.snapshot.workers[worker], 0, 0.0), 0.0)
    for index, size in enumerate(waiting):
        scheduler.submit_prefilled(RequestSpec(f"w{index}", size), 0.0)
    return scheduler


@MANY
@given(margins, weights, st.integers(1, 6_000))
def test_the_horizon_score_is_the_sum_over_the_steps(
    row: list[int], knobs: tuple[float, float, float], tokens: int
) -> None:
    alpha, beta, gamma = knobs
    score = HorizonWeights(len(row) - 1, alpha, beta, gamma).score(np.array(row))
    discounts = [gamma**h for h in range(len(row))]
    reward = alpha * sum(discounts) * tokens
    penalty = beta * sum(d * max(0, tokens - m) for d, m in zip(discounts, row, strict=True))
    assert score(tokens) == pytest.approx(reward - penalty, rel=1e-9, abs=1e-9 * (reward + penalty))


@MANY
@given(margins, weights, st.lists(st.integers(0, 6_000), min_size=2, max_size=6))
def test_the_score_rises_up_to_its_peak_and_falls_after_it(
    row: list[int], knobs: tuple[float, float, float], totals: list[int]
) -> None:
    score = HorizonWeights(len(row) - 1, *knobs).score(np.array(row))
    slack = 1e-9 * abs(score.gain) * 10_000
    for lower, higher in itertools.pairwise(sorted(totals)):
        if higher <= score.peak:
            assert score(lower) <= score(higher) + slack
        if lower >= score.peak:
            assert score(lower) >= score(higher) - slack


@MANY
@given(st.integers(0, 5_000), st.integers(1, 200), st.floats(0, 1), st.integers(0, 9_000))
def test_the_horizon_score_with_no_horizon_is_the_score_of_br_0(
    margin: int, workers: int, gamma: float, tokens: int
) -> None:
    """INV-9, in the scores: H = 0, alpha = 1, beta = G, exactly."""
    horizon = HorizonWeights(0, 1.0, float(workers), gamma).score(np.array([margin]))
    present = present_score(margin, 1.0, float(workers))
    assert (horizon(tokens), horizon.peak) == (present(tokens), present.peak)


@MANY
@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=60), weights, st.data())
def test_scores_by_segments_and_by_steps_differ_by_rounding_alone(
    row: list[int], knobs: tuple[float, float, float], data: st.DataObject
) -> None:
    slowdown = data.draw(st.sampled_from([1.0, 1.1, 1e9]))
    tokens = data.draw(st.sampled_from(row) | st.integers(1, 6_000))
    by_steps = HorizonWeights(len(row) - 1, *knobs)
    above = np.maximum(tokens - np.array([row], dtype=float), 0.0)
    loss = float(by_steps.losses(above, np.array([slowdown]))[0])
    score = by_steps.score(np.array(row), slowdown)(tokens)
    assert abs(by_steps.gain * tokens - loss - score) <= by_steps.rounding * tokens * slowdown
    if tokens <= min(row):
        assert loss == 0.0 and score == by_steps.gain * tokens


@MANY
@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.1, 0.3, 1.0, 2.5]), st.sampled_from([0.0, 0.7, 43.0]))
def test_the_value_of_br_0_is_its_score_to_the_last_bit(margin: int, tokens: int, alpha: float, beta: float) -> None:
    assert present_value(tokens, margin, alpha, beta) == present_score(margin, alpha, beta)(tokens)


class ProjectingBalanceRoute(BalanceRoute):
    """BR-H that reads the projection even when its horizon is the present step."""

    def margins(self, snapshot: ClusterSnapshot) -> ProjectedMargins:
        return ProjectedMargins(snapshot, HorizonWeights(0, 1.0, float(len(snapshot.workers)), self.params.gamma))


@MANY
@given(clusters, sizes, st.integers(0, 3), st.integers(1, 5), st.sampled_from(["pool", "head"]))
def test_br_h_without_a_horizon_decides_as_br_0(
    loads: list[list[int]], waiting: list[int], s_greedy: int, r_max: int, guard: str
) -> None:
    """INV-9, in the decisions."""
    params = BalanceRouteParams(0, 1.0, None, 0.86, s_greedy, r_max, "fifo", "free_slots", guard, 60.0, False)
    br_0 = BalanceRoute("br_0", params)
    br_h = ProjectingBalanceRoute("br_h", replace(params, beta=float(len(loads))))
    assert a_cluster(loads, waiting, br_h).admit(1.0) == a_cluster(loads, waiting, br_0).admit(1.0)


@MANY
@given(sizes, st.integers(0, 4_000), st.integers(1, 9))
def test_stage_1_finds_the_best_request_of_the_whole_pool(waiting: list[int], margin: int, workers: int) -> None:
    snapshot = a_cluster([[]], waiting).snapshot
    score = present_score(margin, 1.0, float(workers))
    best, value = best_single(snapshot.pool.front, score)
    scores = [score(size) for size in waiting]
    assert value == max(scores)
    assert best.id == f"w{scores.index(max(scores))}", "ties go to the first in waiting order"


@MANY
@given(sizes, st.lists(st.integers(0, 4_000), min_size=1, max_size=9), st.floats(0.1, 1))
def test_requests_above_every_margin_tie_where_beta_is_alpha(
    waiting: list[int], margins: list[int], gamma: float
) -> None:
    snapshot = a_cluster([[]], waiting).snapshot
    score = HorizonWeights(len(margins) - 1, 1.0, 1.0, gamma).score(np.array(margins))
    tied = [size for size in waiting if size >= max(margins)]
    best, _ = best_single(snapshot.pool.front, score)
    assert best.prompt_tokens == (tied[0] if tied else max(waiting))


def naive_fit(
    loads: list[list[int]], waiting: list[int], rules: FitRules, drop: float = 0.0, mean_prompt: int = 1
) -> list[tuple[str, str]]:
    """The scarce branch as it is specified, request by request, for waits of zero and equal slowdowns."""
    load, active = [sum(held) for held in loads], [len(held) for held in loads]
    chosen: list[tuple[int, int]] = []

    def best(worker: int) -> int:
        mean, envelope = sum(load) / len(load), max(load)
        unused = [i for i in range(len(waiting)) if i not in {i for _, i in chosen}]
        totals = {i: load[worker] + waiting[i] for i in unused}
        level = min(envelope, mean - drop)
        least = min([level, *(load[g] for g in range(len(load)) if g != worker)])

        def cost(i: int) -> float:
            distance = abs(totals[i] - level)
            beyond = rules.overflow_penalty * max(0.0, totals[i] - envelope)
            beyond += rules.underflow_penalty * max(0.0, least - totals[i])
            square = rules.curvature * distance**2 / mean_prompt
            return distance + beyond + min(square, rules.most_slope * distance if distance else 0.0)

        return min(unused, key=cost)

    for _ in range(sum(4 - n for n in active)):
        worker = min((g for g in range(len(load)) if active[g] < 4), key=lambda g: (active[g], load[g]))
        chosen.append((worker, best(worker)))
        load[worker] += waiting[chosen[-1][1]]
        active[worker] += 1
    for index in [*range(len(chosen))] * rules.swap_passes if len(chosen) > 1 else []:
        worker, request = chosen[index]
        load[worker] -= waiting[request]
        chosen[index] = (worker, -1)
        chosen[index] = (worker, best(worker))
        load[worker] += waiting[chosen[index][1]]
    return [(f"w{request}", f"d{worker}") for worker, request in chosen]


full = st.lists(st.integers(1, 2_000), min_size=2, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.one_of([st.lists(full, min_size=n, max_size=n) for n in (1, 2, 4)]), st.data())
def test_target_fit_chooses_as_specified_when_slots_are_scarce(loads: list[list[int]], data: st.DataObject) -> None:
    """G is a power of two, so that means are exact and a tie is a tie."""
    free = sum(4 - len(held) for held in loads)
    waiting = data.draw(st.lists(st.integers(1, 3_000), min_size=free + 1, max_size=free + 6))
    scheduler = a_cluster(loads, waiting)
    scheduler.policy = make_policy(PolicySettings(policy="target_fit"))
    admissions = scheduler.admit(0.0)
    assert [(action.request, action.worker) for action in admissions] == naive_fit(loads, waiting, TARGET_FIT)
    assert all(math.isfinite(action.score) for action in admissions)


@settings(max_examples=250, deadline=None)
@given(
    st.one_of([st.lists(full, min_size=n, max_size=n) for n in (1, 2, 4)]),
    st.integers(0, 1_000) | st.sampled_from([2**n for n in range(12)]),
    st.data(),
)
def test_level_fit_chooses_as_specified_below_the_mean(
    loads: list[list[int]], output: int, data: st.DataObject
) -> None:
    """By (1 - 1/G) of the mean answer, and by what the stock is smaller than the prompts that arrive, within bounds.

    Sizes are multiples of the pool's, so that the stock's mean is exact, and no prompt is large. Mean prompts are
    powers of two, and so are the rules' curvature and share of the growth, so that a tie is a tie. So is the mean
    answer, where distances are measured by it. All that wait are in the window.
    """
    sees_answers = output.bit_count() == 1
    exact = replace(LEVEL_FIT, curvature=0.25, growth_share=1.0, window_per_slot=math.inf)
    rules = replace(exact, sees_answers=sees_answers, orders_alone=True)
    free = sum(4 - len(held) for held in loads)
    size = 8 if free < 8 else 16
    waiting = data.draw(st.lists(st.integers(1, 3_000).map(lambda n: n * 16), min_size=size, max_size=size))
    mean_prompt = data.draw(st.sampled_from([2**n for n in range(4, 18) if max(waiting) <= 5 * 2**n][:4]))
    scheduler = a_cluster(loads, waiting)
    scheduler.policy = TargetFit("level_fit", TargetFitParams(max_wait_s=30.0, hold_s=0.5), rules)
    scheduler.snapshot.means.prompt_tokens, scheduler.snapshot.means.answer_tokens = mean_prompt, output * 16
    growth = output * 16 * (1 - 1 / len(loads))
    most = max(growth, mean_prompt / 2 - growth) if growth else 0.0
    drop = growth + min(most, max(-most, mean_prompt - sum(waiting) / size))
    admissions = scheduler.admit(0.0)
    assert [(action.request, action.worker) for action in admissions] == naive_fit(
        loads, waiting, rules, drop, max(mean_prompt, output * 16 if sees_answers else 0)
    )
