"""The step simulator: replays a trace through the live router's scheduler and policies in seconds."""

from balanceroute.simulator.replay import PREDICTORS, Replay, parse_params
from balanceroute.simulator.result import Figures, Outcome
from balanceroute.simulator.setting import Failure, Setting

__all__ = ["PREDICTORS", "Failure", "Figures", "Outcome", "Replay", "Setting", "parse_params"]
