"""The step simulator: replays a trace through the live router's scheduler and policies in seconds."""

from balanceroute.simulator.prefill_tier import PrefillFigures, PrefillTier, replay_prefill, replay_queue
from balanceroute.simulator.replay import PREDICTORS, Replay, usual_predictor
from balanceroute.simulator.result import Figures, Outcome
from balanceroute.simulator.setting import Failure, Setting, at_load
from balanceroute.simulator.simulation import Stopped

__all__ = [
    "PREDICTORS",
    "Failure",
    "Figures",
    "Outcome",
    "PrefillFigures",
    "PrefillTier",
    "Replay",
    "Setting",
    "Stopped",
    "at_load",
    "replay_prefill",
    "replay_queue",
    "usual_predictor",
]
