"""The constants of TargetFit and LevelFit, and the cap: how long each request may wait before it goes first.

The constants are operating points of the simulator on the two synthetic workloads. They come from a search for the
shortest p99 wait at the same load spread (docs/results). `growth_share` came out a tenth above the 1 that the argument
in `scarce_fit.py` gives.

The cap (`caps_s`) of a usual request is `mean_waits` mean waits of its priority class, or `least_cap` times
`max_wait_s` where that is more. A class that others precede waits far longer than they do. If its cap came from their
waits, all of its requests would be past it, and go in waiting order, whatever fits. The cap is longer by `patience` of
it for each mean request that a request costs, the first one included, at most by `most_patience`. No cap exceeds
`ClusterSnapshot.longest_wait_s`, after which a request would leave the pool unserved, unless `max_wait_s` is infinite.
LevelFit changes this in five ways.

*Shorter caps of large prompts.* LevelFit's bonus for waiting grows with the size of a prompt (`size_bonus` in
`scarce_fit.py`), so most large prompts are placed before their cap. Their cap can then be a third of TargetFit's at no
more load spread.

*Short waits.* Where hardly anybody waits, as below saturation and after a burst, a wait of `max_wait_s` is long and
gains little. So `least_cap` is 1/15. Where answers are short departures are many, and a place comes soon: there
`least_stays` times the mean answer's time is the least cap, if that is less.

*Full pool.* While a pool of W is full, the mean wait is W over the rate of departures, so `mean_waits` of these are
short where W is small beside G (512 for 144 workers, say). But how soon a place for a large prompt comes does not
depend on W, and how many requests a large prompt slows down elsewhere grows with G. So while the pool is full the least
cap of a request of `large_from` mean requests is R G^2 / W, R being the time of the mean answer, or `max_wait_s` where
that is less; of a smaller one it is less in proportion. To this, too, what a request costs adds its `patience`. Before
R is known there is no such cap, nor one of outliers. Few requests are so large, so the p99 wait hardly grows. With 16
in the pool for each of eight workers this is less than 6.3 mean waits.

*Outliers.* A usual request is `WorkloadMeans.usual_tokens`, half a mean answer and c. A prompt of k of them that goes
where no large one ended raises the largest load by k requests, of the n that a worker has. For the time R of its answer
all G n requests of the barrier are slower by about k / n, which costs them G R k together; if it waits for a place, it
alone loses. So from k = `outlier_from` on a prompt may wait in proportion to G R k, whatever others wait, at most
`most_outlier_wait` times `max_wait_s`. At most one request in k is so large.

*Workers that step alone.* Where no worker waits for another (`SchedulerConfig.shared_barrier`), a misfit slows down
one worker alone, and unequal loads serve as many tokens: level loads only make the slowest requests faster. That is not
worth a long wait. So a request that has waited for `alone_waits` mean waits goes first, whatever its size; the longest
waits are then about those of first come, first served. For KV memory requests wait as they do elsewhere.
"""

import math
from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray
from balanceroute.core.snapshot import ClusterSnapshot

MIN_CAP_S = 1e-3  # keeps wait / cap finite when max_wait_s is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRules:
    """The constants of one policy of this family. At its default a constant has no effect."""

    # Cost of a load, in tokens: `scarce_fit.Window.take`.
    overflow_penalty: float  # cost of a token above the envelope, beside its distance from the level
    underflow_penalty: float = 0.0  # cost of a token below the least load of the others, beside its distance
    curvature: float = 0.0  # factor of the squared distance, which is divided by a mean request
    most_slope: float = math.inf  # the most that the square adds for each token of distance
    answer_share: float = 0.0  # of the answer expected of its prompt beyond the mean one that a request costs
    swap_passes: int  # how often the choices for several slots are made again

    # Level T: `scarce_fit.Window`.
    growth_share: float = 0.0  # how far T is below the mean, in (1 - 1/G) mean answers
    stock_share: float = 0.0  # factor of the difference between arriving and waiting prompts, which lowers T further

    # Slower workers: `scarce_fit.SlowerWorkers`.
    most_rise: float = math.inf  # where c is known: how far one may raise the largest load, in Nth parts of it

    # Bonus for waiting, u^2 times tokens: `scarce_fit.Window`.
    size_bonus: float  # A: factor of what the request costs
    mean_bonus: float = 0.0  # B: factor of what the mean request costs
    deviation_bonus: float = 0.0  # what prompts' mean absolute deviation, in mean prompts, adds to B: a factor

    # Room for huge prompts: `scarce_fit.Window.expected`.
    room_from: float = math.inf  # mean requests: room is made ahead for a request of this size
    room_share: float = 0.0  # of what it costs, for which room is made
    room_lead: float = 0.0  # how early that begins, in the times that departures need to make it
    room_workers: float = 0.0  # the most workers that make room at a time, as a share of all; one at least
    room_caps: float = 1.0  # after how many caps it goes anywhere

    # Cap: see above.
    mean_waits: float  # mean waits in the cap of a usual request
    least_cap: float  # the least such cap, in `max_wait_s`
    least_stays: float = math.inf  # the least such cap in mean answers' times, where that is less than by `least_cap`
    patience: float  # how much longer the cap is for each mean request that a request costs: a factor
    most_patience: float  # the most that this adds
    large_from: float = math.inf  # mean requests: from this size on a full pool's longer cap holds in full
    outlier_from: float = math.inf  # usual requests: from this size on a request is an outlier
    outlier_patience: float = 0.0  # cap of an outlier for each usual request, in G mean answers' times
    most_outlier_wait: float = 0.0  # the most of such a cap, in `max_wait_s`
    alone_waits: float = math.inf  # the cap where workers step alone, in mean waits

    # What a decision looks at.
    window_per_slot: float = math.inf  # waiting requests that a scarce decision chooses from, for each slot
    hold_from: float = 0.0  # share of its slots that each worker has in use before a request is held back
    sees_memory: bool = False  # whether a worker gets only what fits its KV memory
    sees_answers: bool = False  # whether the mean answer stands for the mean request where it is larger
    orders_alone: bool = True  # whether one worker alone gets requests by size, not in waiting order


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
    answer_share=0.5,
    growth_share=1.1,
    most_rise=3.0,
    stock_share=1.0,
    room_from=12.0,
    room_share=0.75,
    room_lead=1.2,
    room_workers=3 / 8,
    room_caps=1.05,
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
    """Whether no worker waits for another, and the policy has a rule for that."""
    return not snapshot.shared_barrier and rules.alone_waits < math.inf


def caps_s(
    prompt_tokens: FloatArray,
    snapshot: ClusterSnapshot,
    params: TargetFitParams,
    rules: FitRules,
    pool_is_full: bool,
) -> FloatArray:
    """The cap of requests of the class in front with prompts of these sizes, shape (n,); returns seconds alike.

    `pool_is_full`: whether it was when the decision began.
    """
    if params.max_wait_s == math.inf:
        return np.full(len(prompt_tokens), math.inf)
    means, c = snapshot.means, snapshot.request_tokens
    times: FloatArray = (prompt_tokens + c) / (means.prompt_tokens + c or 1.0)
    patience: FloatArray = 1.0 + np.minimum(rules.patience * times, rules.most_patience)
    usual_s = max(_least_cap_s(snapshot, params, rules), rules.mean_waits * snapshot.mean_wait_s(), MIN_CAP_S)
    cap_s: FloatArray = patience * usual_s
    place_s = _place_s(snapshot, params, rules) if pool_is_full else 0.0
    if place_s:
        np.maximum(cap_s, patience * np.minimum(times * (place_s / rules.large_from), place_s), out=cap_s)
    if rules.outlier_patience:
        np.maximum(cap_s, _outlier_caps_s(prompt_tokens + c, snapshot, params, rules), out=cap_s)
    np.minimum(cap_s, max(snapshot.longest_wait_s, MIN_CAP_S), out=cap_s)
    return cap_s


def _least_cap_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """The least cap of a usual request, seconds."""
    least_s = rules.least_cap * params.max_wait_s
    return least_s if rules.least_stays == math.inf else min(least_s, rules.least_stays * snapshot.mean_stay_s())


def _place_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """The least cap of a large request while the pool is full, seconds; 0: none ("Full pool")."""
    stay_s = snapshot.mean_stay_s()
    if rules.large_from == math.inf or stay_s == math.inf:
        return 0.0
    return min(params.max_wait_s, stay_s * snapshot.n_in_barrier**2 / snapshot.max_pooled)


def _outlier_caps_s(
    costs: FloatArray, snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules
) -> FloatArray:
    """The caps of outliers, seconds, and 0 for other requests; shape (n,) ("Outliers")."""
    stay_s, means = snapshot.mean_stay_s(), snapshot.means
    if stay_s == math.inf:
        return np.zeros(len(costs))
    times: FloatArray = costs / (means.usual_tokens + means.answer_tokens / 2.0 + snapshot.request_tokens or 1.0)
    cap_s: FloatArray = times * (rules.outlier_patience * snapshot.n_in_barrier * stay_s)
    np.minimum(cap_s, rules.most_outlier_wait * params.max_wait_s, out=cap_s)
    cap_s[times < rules.outlier_from] = 0.0
    return cap_s
