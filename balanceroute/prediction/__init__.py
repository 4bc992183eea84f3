"""Predictors of what is left of a request, their refresh rules, their history and their evaluation."""

from .contract import AnchorPredictor, FinishedRequest, Predictor, TwoStage
from .exact_match import ExactMatchPredictor
from .forecaster import Forecaster
from .survival import SurvivalCurve, SurvivalPredictor

__all__ = [
    "AnchorPredictor",
    "ExactMatchPredictor",
    "FinishedRequest",
    "Forecaster",
    "Predictor",
    "SurvivalCurve",
    "SurvivalPredictor",
    "TwoStage",
]
