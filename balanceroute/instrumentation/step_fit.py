"""Fits a step's duration to its KV tokens and requests, from the steps of a log.

Least squares of step_ms = a * (L + c * n) + b, L and n being the KV tokens and the requests of a step. Steps far off
the line (pauses of the engine) are dropped once. A c that is no larger than its error is 0. `Fit.doubt` says when the
fit means nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ENOUGH_STEPS = 30  # fewer say little: of a slope, of a common barrier, or of what kind of engine it was
LEAST_R2 = 0.2  # share of the variance below which a fit is no use for predicting a step
LEAST_T = 4.0  # errors that a coefficient must be away from 0: one in 15,000 by chance
LEAST_MS = 0.01  # of a step: less is the rounding of a log
FAR_OFF = 8.0  # median absolute deviations: a step further off the line is a pause, not a step


@dataclass(frozen=True, slots=True)
class Fit:
    """step_ms = a_us_per_token * (L + c_tokens * n) / 1000 + b_ms.

    `r2` is the share of the variance that it explains; `doubt` is why it means nothing, None where it does mean
    something.
    """

    a_us_per_token: float
    b_ms: float
    r2: float
    steps: int
    c_tokens: float = 0.0
    doubt: str | None = None


def fit_steps(load: Floats, requests: Floats, step_ms: Floats) -> Fit | None:
    """None where there is nothing to tell a slope from: fewer than three steps, or all with one load."""
    if len(load) < 3 or float(np.ptp(load)) == 0.0:
        return None
    first = _Line.through(load, requests, step_ms)
    near = first.near(step_ms)
    if near.all() or near.sum() < 3 or float(np.ptp(load[near])) == 0.0:
        found = first.fit()
    else:
        found = _Line.through(load[near], requests[near], step_ms[near]).fit()
    negative = int(np.count_nonzero(step_ms < 0.0))
    return replace(found, doubt=f"{negative} of the steps cost less than 0 ms") if negative else found


@dataclass(frozen=True, slots=True)
class _Line:
    """A least-squares solution: coefficients of tokens, requests (0 where they say nothing) and 1, ms."""

    per_token: float
    per_request: float
    base: float
    token_t: float
    base_t: float
    rest: Floats
    r2: float

    @classmethod
    def through(cls, load: Floats, requests: Floats, step_ms: Floats) -> "_Line":
        if len(load) >= ENOUGH_STEPS and float(np.ptp(requests)) > 0:
            (token, request, base), errors, rest, r2 = _least_squares(step_ms, load, requests)
            if request > LEAST_T * errors[1]:
                return cls(token, request, base, ratio(token, errors[0]), ratio(base, errors[2]), rest, r2)
        (token, base), errors, rest, r2 = _least_squares(step_ms, load)
        return cls(token, 0.0, base, ratio(token, errors[0]), ratio(base, errors[1]), rest, r2)

    def near(self, step_ms: Floats) -> NDArray[np.bool_]:
        """Which steps are not far off the line."""
        off = np.abs(self.rest - np.median(self.rest))
        limit = max(FAR_OFF * 1.4826 * float(np.median(off)), 1e-6 * float(np.abs(step_ms).max()))
        return off <= limit

    def fit(self) -> Fit:
        c_tokens = self.per_request / self.per_token if self.per_token > 0 else 0.0
        return Fit(self.per_token * 1e3, self.base, self.r2, len(self.rest), c_tokens, self.doubt())

    def doubt(self) -> str | None:
        """Why the fit means nothing."""
        if self.per_token <= 0:
            return "the slope is not above zero: time does not follow the KV tokens"
        if self.token_t < LEAST_T:
            return "the slope is no larger than its error"
        if self.base_t < -LEAST_T and self.base < -LEAST_MS:
            return f"an empty step would take {self.base:.3f} ms: time does not follow the KV tokens in a line"
        if self.r2 < LEAST_R2:
            return f"it explains {self.r2:.0%} of the variance of step times"
        if len(self.rest) < ENOUGH_STEPS:
            return f"{len(self.rest)} steps are too few"
        return None


def ratio(coefficient: float, error: float) -> float:
    """How many errors a coefficient is away from 0."""
    return coefficient / error if error else float(np.copysign(np.inf, coefficient))


def _least_squares(step_ms: Floats, *columns: Floats) -> tuple[list[float], list[float], Floats, float]:
    """Coefficients (the last is the constant's), their standard errors, the residual, and R^2."""
    scales = [float(np.abs(column).max()) or 1.0 for column in columns] + [1.0]
    matrix = np.stack([*(c / s for c, s in zip(columns, scales, strict=False)), np.ones(len(step_ms))], axis=1)
    solution = np.linalg.lstsq(matrix, step_ms, rcond=None)[0]
    rest: Floats = step_ms - matrix @ solution
    total, left = float(((step_ms - step_ms.mean()) ** 2).sum()), float((rest**2).sum())
    free = max(1, len(step_ms) - matrix.shape[1])
    variances = np.diag(np.linalg.pinv(matrix.T @ matrix)) * left / free
    errors = np.sqrt(np.clip(variances, 0.0, None))
    r2 = 1.0 - left / total if total else 1.0
    return (
        [float(value / scale) for value, scale in zip(solution, scales, strict=True)],
        [float(value / scale) for value, scale in zip(errors, scales, strict=True)],
        rest,
        r2,
    )
