"""The learned predictor: features of requests, boosted trees, and the predictor that uses them."""

from .features import NAMES, KeyMemory, RecentPast, TrainingSet, assemble, training_set
from .predictor import NEEDS_SCIKIT_LEARN, LearnedFit, LearnedFitter, LearnedPredictor, can_grow
from .trees import Trees, flatten

__all__ = [
    "NAMES",
    "NEEDS_SCIKIT_LEARN",
    "KeyMemory",
    "LearnedFit",
    "LearnedFitter",
    "LearnedPredictor",
    "RecentPast",
    "TrainingSet",
    "Trees",
    "assemble",
    "can_grow",
    "flatten",
    "training_set",
]
