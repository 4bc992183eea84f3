"""The constants of TargetFit and LevelFit, and how long these let a request wait.

What each is for is told in `target_fit.py`. They are operating points of the simulator on the two synthetic workloads,
from a search for the shortest p99 wait at the same load spread; `growth_share` came out a tenth above the 1 that the
argument gives.
"""

import math
from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray
from balanceroute.core.snapshot import ClusterSnapshot

MIN_CAP_S = 1e-3  # keeps u finite when max_wait_s is 0, which makes the order first come, first served


@dataclass(frozen=True, slots=True)
class FitRules:
    """The constants of one policy of this family.

    `overflow_penalty`, `underflow_penalty`: what a token above the envelope, or below the least load of the others,
    costs beside its distance; `curvature`: what the square of the distance costs, in mean requests (`mean prompt + c`).
    `size_bonus` and `mean_bonus`: A and B of the ageing; `deviation_bonus`: what B has besides for each mean prompt
    that prompts deviate from the mean, on average. `mean_waits`: in a cap; `least_cap`: of `max_wait_s`, and
    `least_stays`: of the mean answer's time, the shorter of which is the shortest one. `patience`: times its cap that a
    request may wait longer, for each mean request of its cost, and `most_patience`, at most. `large_from`: mean
    requests from which on a prompt waits for its place while a small pool is full. `alone_waits`: mean waits after
    which a request goes first where workers step alone. `outlier_from`: usual requests that an outlier holds;
    `outlier_patience`: of G mean answers' times, what it may wait for each of them, and `most_outlier_wait`: of
    `max_wait_s`, at most. `window_per_slot`: requests that a scarce decision chooses from, the longest waiting ones,
    for each slot in the barrier. `growth_share`, `stock_share`: how far T is below the mean, of (1 - 1/G) o, and of
    what the stock lacks. `hold_from`: the share of its slots that every worker must have in use before a request is
    held back beside a free one. `swap_passes`: how often the choices for several slots are made again.
    `sees_memory`: whether a worker gets only what fits its KV memory. `sees_answers`: whether curvature and ageing are
    measured by the mean answer where that is longer than the mean request. `orders_alone`: whether there is something
    to choose where one worker is alone.
    """

    overflow_penalty: float
    underflow_penalty: float
    curvature: float
    size_bonus: float
    mean_bonus: float
    deviation_bonus: float
    mean_waits: float
    least_cap: float
    least_stays: float
    patience: float
    most_patience: float
    large_from: float
    alone_waits: float
    outlier_from: float
    outlier_patience: float
    most_outlier_wait: float
    window_per_slot: float
    growth_share: float
    stock_share: float
    hold_from: float
    swap_passes: int
    sees_memory: bool
    sees_answers: bool
    orders_alone: bool


TARGET_FIT = FitRules(
    overflow_penalty=7.0,
    underflow_penalty=0.0,
    curvature=0.0,
    size_bonus=2.0,
    mean_bonus=32.0,
    deviation_bonus=0.0,
    mean_waits=5.0,
    least_cap=1.0,
    least_stays=math.inf,
    patience=0.1,
    most_patience=5.0,
    large_from=math.inf,
    alone_waits=math.inf,
    outlier_from=math.inf,
    outlier_patience=0.0,
    most_outlier_wait=0.0,
    window_per_slot=math.inf,
    growth_share=0.0,
    stock_share=0.0,
    hold_from=0.0,
    swap_passes=2,
    sees_memory=False,
    sees_answers=False,
    orders_alone=True,
)
LEVEL_FIT = FitRules(
    overflow_penalty=6.0,
    underflow_penalty=1.5,
    curvature=0.25,
    size_bonus=13.0,
    mean_bonus=0.0,
    deviation_bonus=46.0,
    mean_waits=6.3,
    least_cap=1 / 15,
    least_stays=3.0,
    patience=0.07,
    most_patience=0.62,
    large_from=5.0,
    alone_waits=1.0,
    outlier_from=50.0,
    outlier_patience=1 / 64,
    most_outlier_wait=3.0,
    window_per_slot=1.0,
    growth_share=1.1,
    stock_share=1.0,
    hold_from=0.5,
    swap_passes=1,
    sees_memory=True,
    sees_answers=True,
    orders_alone=False,
)


@dataclass(frozen=True, slots=True)
class TargetFitParams:
    """The knobs of TargetFit; `PolicySettings` has the defaults of those that can be set.

    `max_wait_s`: age at which a request precedes younger ones. `hold_s`: longest hold in slack, 0 for never.
    `window`: how many of a class, in waiting order, a scarce decision chooses from, at most.
    """

    max_wait_s: float
    hold_s: float
    window: int = 512


def step_alone(snapshot: ClusterSnapshot, rules: FitRules) -> bool:
    """Whether no worker waits for another, and the policy looks at that."""
    return not snapshot.shared_barrier and rules.alone_waits < math.inf


def caps_s(
    prompt_tokens: FloatArray,
    snapshot: ClusterSnapshot,
    params: TargetFitParams,
    rules: FitRules,
    pool_is_full: bool,
) -> FloatArray:
    """The cap of requests of these prompts, seconds; shape (n,). The more a request costs, the longer it may wait.

    `pool_is_full`: when the decision began.
    """
    if params.max_wait_s == math.inf:
        return np.full(len(prompt_tokens), math.inf)
    means, c = snapshot.means, snapshot.request_tokens
    times: FloatArray = (prompt_tokens + c) / (means.prompt_tokens + c or 1.0)
    patience: FloatArray = 1.0 + np.minimum(rules.patience * times, rules.most_patience)
    usual_s = max(_least_cap_s(snapshot, params, rules), rules.mean_waits * means.wait_s, MIN_CAP_S)
    cap_s: FloatArray = patience * usual_s
    place_s = _place_s(snapshot, params, rules) if pool_is_full else 0.0
    if place_s:
        np.maximum(cap_s, patience * np.minimum(times * (place_s / rules.large_from), place_s), out=cap_s)
    if rules.outlier_patience:
        np.maximum(cap_s, _outlier_caps_s(prompt_tokens + c, snapshot, params, rules), out=cap_s)
    np.minimum(cap_s, max(snapshot.longest_wait_s, MIN_CAP_S), out=cap_s)
    return cap_s


def _least_cap_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """How long a mean request may wait however little others do, seconds."""
    least_s = rules.least_cap * params.max_wait_s
    return least_s if rules.least_stays == math.inf else min(least_s, rules.least_stays * snapshot.mean_stay_s())


def _place_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """How long a large prompt may wait for its place whatever others wait, where the pool is full, seconds.

    0: no longer than that.
    """
    stay_s = snapshot.mean_stay_s()
    if rules.large_from == math.inf or stay_s == math.inf:
        return 0.0
    return min(params.max_wait_s, stay_s * snapshot.n_in_barrier**2 / snapshot.max_pooled)


def _outlier_caps_s(
    costs: FloatArray, snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules
) -> FloatArray:
    """The caps of requests that cost many times what usual ones hold, seconds, 0 for the others; shape (n,)."""
    stay_s, means = snapshot.mean_stay_s(), snapshot.means
    if stay_s == math.inf:
        return np.zeros(len(costs))
    times: FloatArray = costs / (means.usual_tokens + means.answer_tokens / 2.0 + snapshot.request_tokens)
    cap_s: FloatArray = times * (rules.outlier_patience * snapshot.n_in_barrier * stay_s)
    np.minimum(cap_s, rules.most_outlier_wait * params.max_wait_s, out=cap_s)
    cap_s[times < rules.outlier_from] = 0.0
    return cap_s
