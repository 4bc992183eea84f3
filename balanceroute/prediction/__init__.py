"""Predictors of what is left of a request, their refresh rules, their history and their evaluation."""

from .contract import AnchorPredictor, FinishedRequest, Predictor, TwoStage
from .evaluation import Evaluation, evaluate
from .exact_match import ExactMatchPredictor
from .forecaster import Forecaster
from .history import History, HistoryStats
from .keys import PromptKeyer
from .learned import LearnedPredictor
from .refit import Refitter, refit_on_growth
from .survival import SurvivalCurve, SurvivalPredictor

__all__ = [
    "AnchorPredictor",
    "Evaluation",
    "ExactMatchPredictor",
    "FinishedRequest",
    "Forecaster",
    "History",
    "HistoryStats",
    "LearnedPredictor",
    "Predictor",
    "PromptKeyer",
    "Refitter",
    "SurvivalCurve",
    "SurvivalPredictor",
    "TwoStage",
    "evaluate",
    "refit_on_growth",
]
