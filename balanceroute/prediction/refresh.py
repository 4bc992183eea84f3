"""The refresh rules of c_hat (arXiv:2605.06113, appendix C, "Refresh logic"), as functions of values.

    composite   c = (1 - p) * H + p * mu, clipped to [0, H]                                    (eq. composite)
    gate        the composite counts only where p >= 0.5; otherwise c_hat is the anchor H: a mean over the
                finish-positive part says nothing about a request that most likely is not one of it
    anchor      c_hat = H means "does not finish in the window" and is not decremented
    floor       an active request contributes at least 1; reaching the floor asks for a refresh at once
    period      dT = H / 2 generated tokens; in between c_hat loses one per token
    limit       not in the paper: the window ends where the client's own limit does. With l < H tokens left the
                rules hold for l in place of H, and the anchor l, which is certain then, is decremented

The scheduler keeps c_hat and tells which trackers are due; it takes values only, so a journal replays without
a predictor. With H = 0 there is no window: anchor and floor are both 0.
"""

import math

import numpy as np

from .contract import FloatArray, TwoStage

GATE = 0.5  # paper, appendix C: the natural decision boundary of stage 1
FLOOR = 1.0


def refresh_interval_tokens(horizon_steps: int) -> int:
    """Return dT, the generated tokens between two refreshes of one request."""
    return max(1, horizon_steps // 2)


def composite(p_finish: float, mean_if_finished: float, horizon_steps: float) -> float:
    """Return E[min(r, H)] from both stages, clipped to [0, H] (eq. composite)."""
    value = (1.0 - p_finish) * horizon_steps + p_finish * mean_if_finished
    return min(max(value, 0.0), horizon_steps)


def gated(p_finish: float, mean_if_finished: float, horizon_steps: float, left_tokens: float = math.inf) -> float:
    """Return the c_hat that a refresh stores: composite, gate, limit and floor.

    `left_tokens`: what the client's limit leaves to generate; infinite where there is none.
    """
    floor = min(FLOOR, horizon_steps)
    window = max(min(left_tokens, horizon_steps), floor)
    if p_finish >= GATE:
        return max(composite(p_finish, min(mean_if_finished, window), window), floor)
    return window  # also where p_finish is NaN


def gated_batch(stages: TwoStage, horizon_steps: float, left_tokens: FloatArray | float = math.inf) -> FloatArray:
    """Return `gated` of each request of a batch."""
    p_finish, mean = stages
    floor = min(FLOOR, horizon_steps)
    window = np.clip(left_tokens, floor, horizon_steps)
    value = (1.0 - p_finish) * window + p_finish * np.minimum(mean, window)
    return np.where(p_finish >= GATE, np.maximum(value, floor), window)


def decremented(expected_remaining: float, tokens: int, horizon_steps: float) -> float:
    """Return c_hat after `tokens` more generated tokens without a refresh."""
    if expected_remaining >= horizon_steps:
        return expected_remaining
    return max(expected_remaining - tokens, FLOOR)


def is_due(expected_remaining: float, tokens_since_refresh: int, horizon_steps: int) -> bool:
    """Tell whether c_hat must be refreshed: the period is over, or it was decremented down to the floor."""
    if tokens_since_refresh >= refresh_interval_tokens(horizon_steps):
        return True
    return tokens_since_refresh > 0 and expected_remaining <= FLOOR < horizon_steps
