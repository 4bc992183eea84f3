"""The refresh rules of c_hat (arXiv:2605.06113, appendix C, "Refresh logic"), as functions of values.

    composite   r = (1 - p) * H + p * mu, clipped to [0, H]: the steps to go, the present one included
                                                                                               (eq. composite)
    last step   c_hat = ceil(r) - 1, the h of the last of them: what the router keeps (`core.projection`)
    gate        the composite counts only where p >= 0.5; otherwise c_hat is the anchor H: a mean over the
                finish-positive part says nothing about a request that most likely is not one of it
    anchor      c_hat = H means "does not finish in the window" and is not decremented
    floor       an active request takes part in the present step: r >= 1, c_hat >= 0; reaching the floor asks for a
                refresh at once
    period      dT = H / 2 generated tokens; in between c_hat loses one per token
    limit       not in the paper: the window ends where the client's own limit does. With l <= H tokens left the
                rules hold for l in place of H, and the anchor l - 1, which is certain then, is decremented

The scheduler keeps c_hat and tells which trackers are due; it takes values only, so a journal is run again without
a predictor. With H = 0 there is no window: anchor and floor are both 0.
"""

import math

import numpy as np

from balanceroute.arrays import FloatArray, IntArray

from .contract import TwoStage

GATE = 0.5  # paper, appendix C: the natural decision boundary of stage 1
ROUNDING = 1e-6  # tokens: a mean over equal lengths that weights have made a little larger is still their length


def refresh_interval_tokens(horizon_steps: int) -> int:
    """Return dT, the generated tokens between two refreshes of one request."""
    return max(1, horizon_steps // 2)


def refresh_ages(end_tokens: IntArray, horizon_steps: int, most: int) -> tuple[IntArray, IntArray]:
    """Walk each of some requests at the ages 0, dT, 2 dT, ... below its end: whose, by its place, and at what age.

    Of more than `most` such samples it is a random part, the same every time.
    """
    period = refresh_interval_tokens(horizon_steps)
    until = np.cumsum(-(-end_tokens // period))
    total = int(until[-1]) if len(until) else 0
    if total > most:
        at = np.unique(np.random.default_rng(0).integers(total, size=most))
    else:
        at = np.arange(total)
    request = until.searchsorted(at, side="right")
    first = np.concatenate(([0], until[:-1]))
    return request, (at - first[request]) * period


def composite(p_finish: float, mean_if_finished: float, horizon_steps: float) -> float:
    """Return E[min(r, H)] from both stages, clipped to [0, H] (eq. composite); r steps to go, with the present one."""
    value = (1.0 - p_finish) * horizon_steps + p_finish * mean_if_finished
    return min(max(value, 0.0), horizon_steps)


def last_step(steps_to_go: float) -> float:
    """Return c: the h of the last step of a request that takes part in so many, the present one (h = 0) included."""
    return max(0.0, math.ceil(steps_to_go - ROUNDING) - 1.0)


def gated(p_finish: float, mean_if_finished: float, horizon_steps: float, left_tokens: float = math.inf) -> float:
    """Return the c_hat that a refresh stores, in [0, H]: composite, last step, gate, limit and floor.

    `left_tokens`: what the client's limit leaves to generate; infinite where there is none.
    """
    if p_finish >= GATE and not math.isnan(mean_if_finished):
        window = min(left_tokens, horizon_steps)
        return last_step(composite(p_finish, min(mean_if_finished, window), window))
    return max(0.0, min(left_tokens - 1.0, horizon_steps))  # also where one of them is NaN


def gated_batch(stages: TwoStage, horizon_steps: float, left_tokens: FloatArray | float = math.inf) -> FloatArray:
    """Return `gated` of each request of a batch."""
    p_finish, mean = stages
    window = np.minimum(left_tokens, horizon_steps)
    steps = (1.0 - p_finish) * window + p_finish * np.minimum(mean, window)
    last = np.ceil(steps - ROUNDING) - 1.0
    anchor = np.minimum(np.subtract(left_tokens, 1.0), horizon_steps)
    counts = (p_finish >= GATE) & ~np.isnan(last)
    value: FloatArray = np.maximum(np.where(counts, last, anchor), 0.0)
    return value


def decremented(expected_remaining: float, tokens: int, horizon_steps: float) -> float:
    """Return c_hat after `tokens` more generated tokens without a refresh."""
    if expected_remaining >= horizon_steps:
        return expected_remaining
    return max(expected_remaining - tokens, 0.0)
