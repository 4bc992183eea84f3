"""Finds silent workers, and decides whether the silence is theirs, their group's, or the router's.

A broken connection has a clear cause. Silence has not: the worker may be frozen; its group may wait at the step barrier
for one frozen rank; the network may be gone; or this process was stopped. Moving requests helps only in the first case.
In the others it takes requests off workers that would continue, and computes their prompts again for nothing.

So silent workers are compared. If most of a barrier group fell silent within a window, the group is *frozen*, and none
of its requests move. If the same holds for all workers, prefillers included, and not within one group only, the
router's network is assumed to be gone. A worker that sends no token while streams are open is silent since its last
one, whatever its /health says, because a rank's API server answers while the rank waits at the barrier. An idle worker
is silent since its last answered check, if the next one got no answer. Workers that are down and hold no requests do
not vote: they fell silent at some other time.

Pauses of this process are noticed by a check several times per second: for a moment after a late check, silence is no
evidence, because the sockets' contents must be read first (`Attention`).

Pure: takes vitals and times as arguments.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from balanceroute.proxy.telemetry.ticks import Looks

ALL_WORKERS: Final = "all workers"  # the name of the group of all workers
LATE_LOOK_S: Final = 0.5  # above what a busy machine delays a timer by, below every timeout that silence is judged by
_MOST_PAUSES: Final = 256  # kept; to forget older ones makes long silence count for longer
SETTLE_S: Final = 1.0  # after a pause of this process, or a worker's death: time to read the sockets' contents


@dataclass(frozen=True, slots=True)
class Vitals:
    """The last signs of life of a worker.

    `silent_since_s`: its last sign of life; infinite: it owes none. `mute`: it has sent no token since its first stream
    began, so that time does not tell when it fell silent. `votes`: False: it is down and holds no requests.
    """

    id: str
    group: str
    silent_since_s: float
    mute: bool = False
    votes: bool = True


@dataclass(frozen=True, slots=True)
class FrozenGroup:
    """A group that fell silent together: its name, the silent workers, and since when."""

    name: str
    workers: tuple[str, ...]
    since_s: float


def frozen_groups(vitals: Sequence[Vitals], now: float, window_s: float) -> list[FrozenGroup]:
    """Groups of at least two workers, most of which fell silent within `window_s`, at least so long ago.

    The group of all workers comes last. O(n log n); O(n) while none is silent.
    """
    if not any(now - worker.silent_since_s >= window_s for worker in vitals):
        return []
    groups: dict[str, list[Vitals]] = {}
    for worker in vitals:
        if worker.group:
            groups.setdefault(worker.group, []).append(worker)
    found = [_frozen(name, members, now, window_s) for name, members in groups.items()]
    everybody = _frozen(ALL_WORKERS, vitals, now, window_s)
    if everybody is not None:
        silent = set(everybody.workers)
        if len({worker.group or worker.id for worker in vitals if worker.id in silent}) > 1:
            found.append(everybody)
    return [group for group in found if group is not None]


def _frozen(name: str, members: Iterable[Vitals], now: float, window_s: float) -> FrozenGroup | None:
    voters = [worker for worker in members if worker.votes]
    silent = sorted(
        (worker.silent_since_s, worker.id, worker.mute) for worker in voters if now - worker.silent_since_s >= window_s
    )
    if len(voters) < 2:
        return None
    mute = [entry for entry in silent if entry[2]]
    dated = [entry for entry in silent if not entry[2]]
    most: list[tuple[float, str, bool]] = []
    first = 0
    for last, entry in enumerate(dated):
        while entry[0] - dated[first][0] > window_s:
            first += 1
        if last + 1 - first > len(most):
            most = dated[first : last + 1]
    together = most + mute
    if 2 * len(together) <= len(voters):
        return None
    return FrozenGroup(name, tuple(sorted(entry[1] for entry in together)), min(entry[0] for entry in together))


class Attention:
    """Whether this process has run without pauses.

    `since_s`: the end of its last pause and of the backlog after it. `paused_s`: how long it stood still before the
    present look; 0: it did not.
    """

    def __init__(self) -> None:
        self._looks = Looks()
        self.since_s = float("-inf")
        self.paused_s = 0.0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)  # end and length of each

    def look(self, now: float, period_s: float) -> bool:
        """Note a look, one per period; returns whether silence that is seen now may be judged."""
        before_s, self.paused_s = self._looks.last_s, 0.0
        if self._looks.stood_still(now, period_s + LATE_LOOK_S):
            self.since_s, self.paused_s = now, now - before_s
            self._pauses.append((now, self.paused_s))
        return now - self.since_s >= SETTLE_S

    def attended_since_s(self, silent_since_s: float, limit_s: float) -> float:
        """As if this process had not paused: when silence began that is judged after `limit_s`.

        Who stood still with it needs time to be at work again, so what is left after a pause is no less than the pause.
        """
        since_s = silent_since_s
        for end_s, paused_s in self._pauses:
            if end_s > since_s:
                left_s = min(max(paused_s, SETTLE_S), limit_s)
                since_s = max(min(since_s + paused_s, end_s), end_s + left_s - limit_s)
        return since_s
