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
    """The constants of one policy of this family. What has a default does nothing by it."""

    overflow_penalty: float  # what a token above the envelope costs beside its distance
    size_bonus: float  # A of the ageing
    mean_waits: float  # in a cap,
    least_cap: float  # which is at least so much of `max_wait_s`,
    patience: float  # and so many times longer for each mean request (`mean prompt + c`) that a request costs,
    most_patience: float  # at most so many times
    swap_passes: int  # how often the choices for several slots are made again
    least_stays: float = math.inf  # of the mean answer's time: the shortest cap, where that is less than `least_cap`
    mean_bonus: float = 0.0  # B of the ageing,
    deviation_bonus: float = 0.0  # and more of it for each mean prompt that prompts deviate from the mean, on average
    underflow_penalty: float = 0.0  # what a token below the least load of the others costs beside its distance
    curvature: float = 0.0  # what the square of the distance costs, in mean requests
    most_slope: float = math.inf  # what that adds for each token of the distance, at most
    growth_share: float = 0.0  # how far T is below the mean, of (1 - 1/G) o,
    stock_share: float = 0.0  # and of what the stock lacks
    large_from: float = math.inf  # mean requests from which on a prompt waits for its place while a small pool is full
    outlier_from: float = math.inf  # usual requests that an outlier holds;
    outlier_patience: float = 0.0  # of G mean answers' times, what it may wait for each of them,
    most_outlier_wait: float = 0.0  # and of `max_wait_s`, at most
    alone_waits: float = math.inf  # mean waits after which a request goes first where workers step alone
    window_per_slot: float = math.inf  # of the barrier: how many of the longest waiting a scarce decision looks at
    hold_from: float = 0.0  # share of its slots that each worker must have in use before a request is held back
    sees_memory: bool = False  # whether a worker gets only what fits its KV memory
    sees_answers: bool = False  # whether curvature and ageing go by the mean answer where that is more than a request
    orders_alone: bool = True  # whether there is something to choose where one worker is alone


TARGET_FIT = FitRules(
    overflow_penalty=7.0,
    size_bonus=2.0,
    mean_waits=5.0,
    least_cap=1.0,
    patience=0.1,
    most_patience=5.0,
    swap_passes=2,
    mean_bonus=32.0,
)
LEVEL_FIT = FitRules(
    overflow_penalty=6.0,
    size_bonus=13.0,
    mean_waits=6.3,
    least_cap=1 / 15,
    patience=0.07,
    most_patience=0.62,
    swap_passes=1,
    least_stays=3.0,
    deviation_bonus=46.0,
    underflow_penalty=1.5,
    curvature=0.25,
    most_slope=6.0,
    growth_share=1.1,
    stock_share=1.0,
    large_from=5.0,
    outlier_from=50.0,
    outlier_patience=1 / 64,
    most_outlier_wait=3.0,
    alone_waits=1.0,
    window_per_slot=1.0,
    hold_from=0.5,
    sees_memory=True,
    sees_answers=True,
    orders_alone=False,
)


@dataclass(frozen=True, slots=True)
class TargetFitParams:
    """The knobs of TargetFit; `PolicySettings` has the defaults of those that can be set.

    `max_wait_s`: age at which a request precedes younger ones. `hold_s`: longest hold in slack, 0 for never.
    """

    max_wait_s: float
    hold_s: float


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
