"""The paper's experiments, each one command, on the step simulator."""

from balanceroute.experiments.reproduce import EXPERIMENTS, files_of, reproduce
from balanceroute.experiments.scope import Scope

__all__ = ["EXPERIMENTS", "Scope", "files_of", "reproduce"]
