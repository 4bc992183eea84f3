"""The learned predictor: a gradient-boosted classifier for stage 1, a regressor for stage 2.

200 trees of depth 3 each (arXiv:2605.06113, appendix C, "Learned classifier and regressor"), grown with
scikit-learn's histogram boosting on samples walked at ages 0, dT, 2 dT, ...: the classifier with
cross-entropy on all of them, the regressor with squared error on those that finish within H. The newest part
of the history is held out of the growing and checks the calibration; where stated and observed frequencies
differ by more than `CALIBRATION_LIMIT` on average, a logistic correction (Platt) fitted on that part is
applied.

Growing takes seconds and happens in a process of its own (`refit.py`); asking needs numpy only (`trees.py`).
Until there is a model, or with too little history for one, the marginal survival curve answers.
"""

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from balanceroute.arrays import FloatArray, IntArray
from balanceroute.errors import ConfigError

from ..contract import FinishedRequest, TwoStage
from ..evaluation import calibration_bins, calibration_error
from ..observations import DEFAULT_ROWS, ObservationRing, Observations, key_id
from ..refit import FIRST_ROWS_IN_PROCESS
from ..survival import SurvivalCurve
from .features import KeyMemory, RecentPast, TrainingSet, assemble, training_set
from .trees import DEPTH, Trees, flatten

N_TREES = 200
MAX_SAMPLES = 200_000  # a fit of this size takes about 5 s on one core
HELD_OUT = 0.15
CALIBRATION_LIMIT = 0.03
MAX_KEYS = 20_000
RECALLED = 8192  # rows of a history; what is older weighs less than 1e-30 in any statistic of the recent past
NEEDS_SCIKIT_LEARN = "predictor.kind: 'learned' needs scikit-learn to be fitted: scripts/install learned"


def can_grow() -> bool:
    """Tell whether scikit-learn is installed, without importing it."""
    return importlib.util.find_spec("sklearn") is not None


@dataclass(frozen=True, slots=True)
class LearnedFit:
    """Both ensembles, the logistic correction of stage 1 (slope, shift), the held-out calibration error, the curve."""

    classifier: Trees | None
    regressor: Trees | None
    slope: float
    shift: float
    calibration_error: float
    curve: SurvivalCurve

    @classmethod
    def without_trees(cls, curve: SurvivalCurve) -> "LearnedFit":
        """A fit without trees, if the history is too small for them."""
        return cls(None, None, 1.0, 0.0, 0.0, curve)


@dataclass(frozen=True, slots=True)
class LearnedFitter:
    """Grows the trees; picklable, so that it can run in another process."""

    horizon_steps: int
    n_trees: int = N_TREES  # of each stage

    def __call__(self, observations: Observations) -> LearnedFit:
        """Fit both stages. Raises: ConfigError without scikit-learn."""
        curve = SurvivalCurve(observations)
        if len(observations) < FIRST_ROWS_IN_PROCESS:
            return LearnedFit.without_trees(curve)
        samples = training_set(observations, self.horizon_steps, MAX_SAMPLES)
        return _grow(samples, curve, self.n_trees)


def _grow(samples: TrainingSet, curve: SurvivalCurve, n_trees: int) -> LearnedFit:
    *classes, limits = _scikit_learn()
    features = samples.features.astype(np.float32)
    n_train = int(len(samples.finishes) * (1.0 - HELD_OUT))
    train, held_out = slice(0, n_train), slice(n_train, None)
    labels = samples.finishes
    if len(np.unique(labels[train])) < 2 or not len(labels[held_out]):
        return LearnedFit.without_trees(curve)
    options = {"max_iter": n_trees, "max_depth": DEPTH, "early_stopping": False, "random_state": 0}
    positive = np.flatnonzero(labels[train])
    with limits(1):  # two threads on two busy cores spin against each other: 8,000 rows took 12-22 s, not 5
        classifier = classes[0](**options).fit(features.T[train], labels[train])
        regressor = classes[1](**options).fit(features.T[positive], samples.remaining[positive])
    check = features[:, :: max(1, features.shape[1] // 4096)]
    classifying = flatten(classifier, check, classifier.decision_function(check.T))
    regressing = flatten(regressor, check, regressor.predict(check.T))
    slope, shift, error = _calibrate(classifying.raw(features[:, held_out]), labels[held_out])
    return LearnedFit(classifying, regressing, slope, shift, error, curve)


def _scikit_learn() -> tuple[Any, Any, Any]:
    """Import scikit-learn, which only growing needs. Raises: ConfigError with the remedy."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits  # scikit-learn requires it
    except ImportError as error:
        raise ConfigError(NEEDS_SCIKIT_LEARN) from error
    return HistGradientBoostingClassifier, HistGradientBoostingRegressor, threadpool_limits


def _calibrate(raw: FloatArray, labels: IntArray) -> tuple[float, float, float]:
    """Return (slope, shift, calibration error after them); (1, 0) while the error is small enough as it is."""
    error = _calibration_error(_sigmoid(raw), labels)
    if error <= CALIBRATION_LIMIT:
        return 1.0, 0.0, error
    slope, shift = _platt(raw, labels)
    corrected = _calibration_error(_sigmoid(slope * raw + shift), labels)
    return (slope, shift, corrected) if corrected < error else (1.0, 0.0, error)


def _calibration_error(p_finish: FloatArray, labels: IntArray) -> float:
    return calibration_error(calibration_bins(p_finish, labels.astype(np.bool_)))


def _platt(raw: FloatArray, labels: IntArray) -> tuple[float, float]:
    """Logistic regression of the label on the raw score, by Newton's method; ridge 1e-3 keeps it finite."""
    design = np.stack([raw, np.ones(len(raw))])
    weights = np.zeros(2)  # from slope 0 Newton's steps stay short; from slope 1 they can overshoot for good
    for _ in range(25):
        p = _sigmoid(weights @ design)
        gradient = design @ (p - labels) + 1e-3 * weights
        hessian = (design * (p * (1.0 - p))) @ design.T + 1e-3 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return float(weights[0]), float(weights[1])


def _sigmoid(raw: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(raw, -30.0, 30.0))))


class LearnedPredictor:
    """Boosted trees over causal features; the marginal curve until they are grown."""

    refits_in_process = True

    def __init__(self, horizon_steps: int, *, max_rows: int = DEFAULT_ROWS, max_age_s: float | None = None) -> None:
        self._horizon = horizon_steps
        self.ring = ObservationRing(max_rows, max_age_s)
        self._past = RecentPast()
        self._keys = KeyMemory(MAX_KEYS)
        self.fitted = LearnedFit.without_trees(SurvivalCurve(Observations.of([])))

    def start(self, rows: Iterable[FinishedRequest]) -> None:
        """Load a whole history, oldest first; the marginal curve answers until trees are fitted and adopted."""
        finished = list(rows)
        for row in finished:
            self._remember(row)
        for row in finished[-RECALLED:]:
            self._recall(row)
        pending = self.ring.pending
        self.fitted = LearnedFit.without_trees(SurvivalCurve(self.ring.take()))
        self.ring.pending = pending  # still unseen by any tree: the first re-fit is due

    def grow(self) -> None:
        """Grow the trees here and now: seconds."""
        self.adopt(self.fitter()(self.ring.take()))

    def observe(self, finished: FinishedRequest) -> None:
        """Renew the statistics of the recent past and of the key; O(1)."""
        self._remember(finished)
        self._recall(finished)

    def _remember(self, finished: FinishedRequest) -> None:
        self.ring.add(finished)
        if not finished.censored:
            self._keys.observe(key_id(finished.prompt_key), finished.output_tokens)

    def _recall(self, finished: FinishedRequest) -> None:
        if not finished.censored:
            self._past.observe(finished.output_tokens, finished.prompt_tokens)

    def predict(self, ages: IntArray, prompt_tokens: IntArray, keys: Sequence[str]) -> TwoStage:
        """Answer both stages for many requests; 1.1 ms for 512."""
        fitted = self.fitted
        if fitted.classifier is None or fitted.regressor is None:
            return fitted.curve.many(ages, self._horizon)
        if not len(ages):
            return TwoStage(np.empty(0), np.empty(0))
        get, unknown = self._keys.get, KeyMemory.UNKNOWN
        states = np.array([get(key_id(key), unknown) for key in keys]).T
        features = assemble(ages, prompt_tokens, self._past.published[:, None], states).astype(np.float32)
        p_finish = _sigmoid(fitted.slope * fitted.classifier.raw(features) + fitted.shift)
        mean = np.clip(fitted.regressor.raw(features), math.ulp(1.0), self._horizon)
        return TwoStage(p_finish, mean)

    def predict_one(self, age: int, prompt_tokens: int, key: str) -> tuple[float, float]:
        """Answer both stages for one request: a batch of one, 0.1 ms."""
        p_finish, mean = self.predict(np.array([age]), np.array([prompt_tokens]), [key])
        return float(p_finish[0]), float(mean[0])

    def fitter(self) -> Callable[[Observations], LearnedFit]:
        """Return the function that grows the trees."""
        return LearnedFitter(self._horizon)

    def adopt(self, fitted: LearnedFit) -> None:
        """Answer from `fitted` from now on, but keep trees until there are others: few rows may be young enough now."""
        trees = self.fitted if fitted.classifier is None else fitted
        self.fitted = replace(trees, curve=fitted.curve)
