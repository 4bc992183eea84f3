"""Who is silent, and whether that is the worker's own silence.

A connection that breaks says what happened. Silence does not: the worker may be frozen, or its whole group waits at the
step barrier for one frozen rank, or the network in between is gone, or it was our own process that stood still. Moving
requests helps in the first case alone. In the others it takes running requests off workers that would have gone on,
and computes all their prompts again for nothing.

So silence is looked at in company. Workers that fell silent within a window did so together, and if they are most of
a barrier group, the group is *frozen*: nothing of it moves. The same over all workers, prefillers included, and not
within one group alone, is taken for our network. A worker that gives no token while streams are open has been silent
since its last one, whatever its /health says, because a rank's API server answers while the rank waits at the barrier;
an idle one has been silent since its last answer to a check, if the check after that got none. Workers that are down
and hold nothing of ours have no vote: they fell silent some other time.

Our own pauses are seen by a loop that looks several times per second: what it sees in the moments after a late look
is what lay in the sockets meanwhile, and no evidence (`Attention`).

Pure: vitals and times come in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ALL_WORKERS: Final = "all workers"  # the name of the group that everybody belongs to
LATE_LOOK_S: Final = 0.5  # above what a busy machine delays a timer by, below every timeout that silence is judged by
SETTLE_S: Final = 1.0  # after a pause of ours, or a worker's death: what lay in the sockets has been read by then


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known of one worker now.

    `silent_since_s` is its last sign of life, None while it is not silent. `mute`: it has had streams and given no
    token since its first one began, so that time says nothing of when it fell silent. `votes`: false for one that is
    down and holds nothing of ours.
    """

    id: str
    group: str
    silent_since_s: float | None
    mute: bool = False
    votes: bool = True


@dataclass(frozen=True, slots=True)
class FrozenGroup:
    """A group that fell silent together: its name, the silent workers, and since when."""

    name: str
    workers: tuple[str, ...]
    since_s: float


def frozen_groups(vitals: Sequence[Vitals], now: float, window_s: float) -> list[FrozenGroup]:
    """Groups of two workers or more, most of which fell silent within `window_s`, at least so long ago.

    With the group of all workers last. O(n log n), O(n) while nobody is silent.
    """
    if not any(worker.silent_since_s is not None for worker in vitals):
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
        (worker.silent_since_s, worker.id, worker.mute)
        for worker in voters
        if worker.silent_since_s is not None and now - worker.silent_since_s >= window_s
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
    """Whether this process has looked all the time. `since_s`: the end of its last pause and its backlog."""

    def __init__(self) -> None:
        self._last_look_s: float | None = None
        self.since_s = float("-inf")

    def look(self, now: float, period_s: float) -> bool:
        """Note a look, one per period; returns whether silence that is seen now may be judged."""
        if self._last_look_s is not None and now - self._last_look_s > period_s + LATE_LOOK_S:
            self.since_s = now
        self._last_look_s = now
        return now - self.since_s >= SETTLE_S
