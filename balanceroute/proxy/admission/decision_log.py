"""The last admissions, for who watches the router, and now and then the state that one was decided on.

A state is the whole snapshot, so it is kept only while somebody watches, at most once per `EVERY_S`, and of a cluster
with at most `MOST_REQUESTS`: from it the runner-up can be worked out elsewhere, without holding up the decisions.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from balanceroute.core.types import Admit
from balanceroute.proxy.admission.ledger import Ledger

ROWS: Final = 100
EVERY_S: Final = 2.0
MOST_REQUESTS: Final = 1500
MOST_ADMISSIONS: Final = 8
_WATCHED_S: Final = 5.0


@dataclass(slots=True)
class Decision:
    """One admission, at the ledger's time `at_s`; `number` counts them. `runner_up`: what the policy would have done
    without it, None where that was not worked out.
    """

    number: int
    at_s: float
    policy: str
    admission: Admit
    runner_up: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The state before a decision, JSON-ready, and what was decided on it."""

    state: dict[str, Any]
    decisions: tuple[Decision, ...]


class DecisionLog:
    """Fed by the decode dispatcher."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._count = 0
        self._watched_until_s = self._next_s = 0.0
        self._state: dict[str, Any] | None = None
        self.rows: deque[Decision] = deque(maxlen=ROWS)
        self.sample: Sample | None = None  # the newest; whoever takes it sets None

    def watch(self) -> None:
        """Somebody is watching now."""
        self._watched_until_s = self._ledger.now() + _WATCHED_S

    def before(self) -> None:
        """A decision is about to be taken."""
        now = self._ledger.now()
        self._state = None
        if self._next_s <= now < self._watched_until_s and self._ledger.requests <= MOST_REQUESTS:
            self._ledger.settle()
            self._state = self._ledger.state()

    def after(self, admissions: Sequence[Admit]) -> None:
        """It has been taken."""
        if not admissions:
            return
        now, policy = self._ledger.now(), self._ledger.scheduler.policy.name
        made = [Decision(self._count + i, now, policy, admission) for i, admission in enumerate(admissions)]
        self._count += len(made)
        self.rows.extend(made)
        if self._state is not None and len(made) <= MOST_ADMISSIONS:
            self._next_s = now + EVERY_S
            self.sample = Sample(self._state, tuple(made))
