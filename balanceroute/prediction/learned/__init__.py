"""The learned predictor: what a request looks like in numbers, the trees that are grown on that, and who asks them."""

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
