"""The interface of a policy: it reads the snapshot and yields admissions, one by one.

`decide` is a generator. The scheduler applies each admission to the snapshot before it asks for the next one, so a
policy always reads the state that includes its own choices, and no policy keeps a copy of it. A policy has no state of
its own beyond its parameters: whatever it remembers (running means, the number of random draws) is in the snapshot, so
a written snapshot reproduces its decision.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import DecodeInstanceState, RequestTracker

StageTimer = Callable[[str], None]
"""Told the name of each stage as it ends; a driver with a clock measures with it (`prepare`, `stage1`, `stage2`)."""


@dataclass(slots=True)
class Choice:
    """Admit this request to this worker; see `Admit` for stage and score."""

    request: RequestTracker
    worker: DecodeInstanceState
    stage: int
    score: float


class AdmissionPolicy(Protocol):
    """Decides which waiting requests go to which decode workers.

    A subclass needs a name and `decide`; the other methods have simple defaults.
    """

    name: str
    waits_for_slots: bool = True
    """Whether it admits only into free slots, from the pool; else it assigns as soon as a prefill is done."""
    horizon_steps: int = 0
    """H of the projection it reads; 0 when the present load is all it needs."""

    @abstractmethod
    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """Yield admissions for the present snapshot; each is applied before the next is asked for."""

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        """How long a prompt of this size may wait in the pool before it goes first; infinite for no limit."""
        return math.inf

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """The time of the next decision without an event; infinite unless requests are held back beside free slots."""
        return math.inf
