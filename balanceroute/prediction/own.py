"""Checks the answers of a user's own predictor against the two-stage contract."""

from collections.abc import Sequence

import numpy as np

from balanceroute.arrays import BoolArray, FloatArray, IntArray
from balanceroute.errors import ConfigError

from .contract import FinishedRequest, Predictor, TwoStage
from .refresh import ROUNDING


class OwnPredictor:
    """A predictor and its name; each of its answers is checked. Raises: ConfigError in place of one that is none.

    What is out of bounds by rounding alone is an answer: a sum of weights may be a little more than 1.
    """

    def __init__(self, name: str, predictor: Predictor, horizon_steps: int) -> None:
        self.predictor = predictor
        self._name, self._horizon = name, horizon_steps

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """The checked answers for many requests."""
        answer = self.predictor.predict(ages, prompt_tokens, keys)
        try:
            p_finish, mean = (np.asarray(stage, dtype=np.float64) for stage in answer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"predictor {self._name}: predict must answer a TwoStage: {error}") from error
        for stage in (p_finish, mean):
            if stage.shape != (len(ages),):
                shape = f"of shape {stage.shape} for {len(ages)} requests"
                raise ConfigError(f"predictor {self._name}: predict answers an array {shape}")
        wrong = np.flatnonzero(~self._valid(p_finish, mean))
        if wrong.size:
            raise self._out_of_range(float(p_finish[wrong[0]]), float(mean[wrong[0]]))
        return TwoStage(p_finish, mean)

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """The checked answer for one request."""
        answer = self.predictor.predict_one(age, prompt_tokens, key)
        try:
            p_finish, mean = map(float, answer)
        except (TypeError, ValueError) as error:
            text = f"predict_one must answer two numbers, not {answer!r}"
            raise ConfigError(f"predictor {self._name}: {text}") from error
        if not self._valid(np.array(p_finish), np.array(mean)):
            raise self._out_of_range(p_finish, mean)
        return p_finish, mean

    def observe(self, finished: FinishedRequest) -> None:
        """Pass a finished request on."""
        self.predictor.observe(finished)

    def _valid(self, p_finish: FloatArray, mean: FloatArray) -> BoolArray:
        least, most = -ROUNDING, 1.0 + ROUNDING
        return (p_finish >= least) & (p_finish <= most) & (mean >= least) & (mean <= self._horizon + ROUNDING)

    def _out_of_range(self, p_finish: float, mean: float) -> ConfigError:
        accepted = f"p_finish must be from 0 to 1, mean_if_finished from 0 to {self._horizon} (horizon_steps)"
        return ConfigError(f"predictor {self._name} answers ({p_finish:g}, {mean:g}): {accepted}")
