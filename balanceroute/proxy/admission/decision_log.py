"""The last admissions and the states before them, for the dashboard.

Runners-up are computed from these states elsewhere, without delaying decisions. States are kept only while a client
watches. To write a row (a worker, a request) takes about 2 us, and after each row nothing is written for `PAUSE_S`, so
that at most 2 % of the time is spent on it. If the policy uses only present loads, running requests are summed per
worker, and a state has few rows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from balanceroute.core.policies import BUILT_IN
from balanceroute.core.pool_bypass import PoolBypass
from balanceroute.core.snapshot_json import outline_to_dict, snapshot_to_dict
from balanceroute.core.types import Admit
from balanceroute.proxy.admission.ledger import Ledger

ROWS: Final = 100
SAMPLES: Final = 20  # as many as the dashboard shows
PAUSE_S: Final = 1e-4
MOST_ROWS: Final = 3000
UNWATCHED: Final = "unknown: nobody watched"
TOO_MANY: Final = "unknown: too many requests"
_WATCHED_S: Final = 5.0


@dataclass(slots=True)
class Decision:
    """One admission, at the ledger's time `at_s`; `number` counts them.

    `runner_up`: the policy's choice without this one, and its score if both are of one stage; None: not computed yet.
    """

    number: int
    at_s: float
    policy: str
    admission: Admit
    runner_up: str | None = None
    runner_up_score: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The snapshot before a decision, JSON-ready, and what was decided on it."""

    state: dict[str, Any]
    decisions: tuple[Decision, ...]


_Admissions = tuple[int, float, str, Sequence[Admit], str | None]  # the arguments of `_decisions`


class DecisionLog:
    """Fed by the decode dispatcher."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.count = 0
        self._watched_until_s = self._next_s = 0.0
        self._state: dict[str, Any] | None = None
        self._unknown: str | None = UNWATCHED  # why this decision's runner-up can't be computed
        self._kept: deque[_Admissions | list[Decision]] = deque(maxlen=ROWS)  # one entry per decision
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)  # the recorder removes those that it works on

    def watch(self) -> None:
        """Keep states for a while: a client watches the dashboard, and gets their runners-up."""
        self._watched_until_s = self._ledger.now() + _WATCHED_S

    def before(self) -> None:
        """Keep the state before a decision, if a client watches."""
        now = self._ledger.now()
        self._state, self._unknown = None, None if now < self._watched_until_s else UNWATCHED
        if self._next_s <= now < self._watched_until_s:
            policy = self._ledger.scheduler.policy
            whole = policy.horizon_steps or policy.name not in BUILT_IN or isinstance(policy, PoolBypass)
            rows = self._ledger.rows(running=bool(whole))
            if rows > MOST_ROWS:
                self._unknown = TOO_MANY
                return
            self._next_s = now + rows * PAUSE_S
            self._ledger.settle()
            write = snapshot_to_dict if whole else outline_to_dict
            scheduler = self._ledger.scheduler
            self._state = write(scheduler.snapshot, now, scheduler)

    def after(self, admissions: Sequence[Admit]) -> None:
        """Note a decision that has been taken."""
        if not admissions:
            return
        now, policy = self._ledger.now(), self._ledger.scheduler.policy.name
        kept = (self.count, now, policy, admissions, self._unknown)
        self.count += len(admissions)
        if self._state is None:
            self._kept.append(kept)
            return
        made = _decisions(*kept)
        self._kept.append(made)
        self.samples.append(Sample(self._state, tuple(made)))

    @property
    def rows(self) -> list[Decision]:
        """The last decisions, the newest at the end."""
        kept = [each if isinstance(each, list) else _decisions(*each) for each in self._kept]
        return [row for made in kept for row in made][-ROWS:]


def _decisions(
    number: int, at_s: float, policy: str, admissions: Sequence[Admit], runner_up: str | None
) -> list[Decision]:
    return [Decision(n, at_s, policy, each, runner_up) for n, each in enumerate(admissions, number)]
