"""Predictors of a request's remaining tokens, their refresh rules, history and evaluation."""

from .build import KINDS, build_predictor
from .contract import AnchorPredictor, FinishedRequest, Predictor, TwoStage
from .evaluation import Evaluation, evaluate
from .exact_match import ExactMatchPredictor
from .forecaster import Forecaster, finished_row
from .history import History
from .keys import PromptKeyer
from .learned import LearnedPredictor
from .model_file import Model, load_model, save_model
from .own import OwnPredictor
from .refit import Refitter, refit_on_growth
from .survival import SurvivalCurve, SurvivalPredictor

__all__ = [
    "KINDS",
    "AnchorPredictor",
    "Evaluation",
    "ExactMatchPredictor",
    "FinishedRequest",
    "Forecaster",
    "History",
    "LearnedPredictor",
    "Model",
    "OwnPredictor",
    "Predictor",
    "PromptKeyer",
    "Refitter",
    "SurvivalCurve",
    "SurvivalPredictor",
    "TwoStage",
    "build_predictor",
    "evaluate",
    "finished_row",
    "load_model",
    "refit_on_growth",
    "save_model",
]
