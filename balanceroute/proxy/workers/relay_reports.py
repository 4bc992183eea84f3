"""The brain's record of relays' reports on workers: requests' results, requests under way, times of the last tokens."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from balanceroute.proxy.link.messages import (
    FAR,
    Activity,
    CacheDoubted,
    ConnectorDoubted,
    Counted,
    Finding,
    Judged,
    Learned,
    Report,
    SilentGroup,
    Use,
    WorkerStanding,
)
from balanceroute.proxy.perimeter.key_use import KeyUse
from balanceroute.proxy.telemetry.metrics import read_counts
from balanceroute.proxy.workers.circuit import Circuit, CircuitState
from balanceroute.proxy.workers.connector_check import WrongConnector
from balanceroute.proxy.workers.fleet import Fleet, Worker
from balanceroute.proxy.workers.silence import FrozenGroup

MOST_AWAY: Final = 256  # far relays that have left; more than a router has, because replaced machines never return


class ReportListener(Protocol):
    """What the brain does with reports that concern more than a worker's circuit: `ops/services.Services`."""

    @property
    def pin_s(self) -> float | None:
        """How long prefillers keep KV that nobody can drain."""

    def relays_hold(self, exchanges: int, drains: int, orphans: int) -> None:
        """The numbers of all relays' client requests, drains and undrainable KV."""

    def relay_given_up(self, counts: bytes) -> None:
        """The counts of a relay that will not return."""

    def keys_elsewhere(self, relay: str, keys: tuple[KeyUse, ...]) -> None:
        """The use of client keys at a relay."""

    def note_connector(self, worker: Worker, connector: str | None) -> None:
        """Which connector a worker runs. Raises: WrongConnector."""

    def doubt_connector(self, worker: Worker, reason: str) -> None:
        """Why a worker may have another connector than the configured one."""


class RelayReports:
    """All relays' reports on the workers of one fleet; implements the hub's `Reports`."""

    def __init__(
        self,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        frozen: Sequence[FrozenGroup],
        listener: ReportListener,
    ) -> None:
        """`frozen`: groups of workers that fell silent together, updated by the reaper."""
        self._fleet, self._loop, self._frozen, self._listener = fleet, loop, frozen, listener
        self.keys_used = listener.keys_elsewhere
        self.counts: dict[str, bytes] = {}  # counts of every relay, also of absent ones: a sum must not fall
        self._away: dict[str, None] = {}  # far relays that have left, the first one first
        self._activities: dict[str, Activity] = {}
        self._uses: dict[str, dict[str, Use]] = {}  # by relay and worker
        self._left_orphans: dict[str, int] = {}  # of relays that are gone, while prefillers may keep that KV

    # -- what relays say

    def take(self, relay: str, report: Report) -> None:
        """Take a report of a relay. Raises: ValueError: its counts are none."""
        if isinstance(report, Activity):
            self._take_activity(relay, report)
        elif isinstance(report, Counted):
            self._take_counts(relay, report.counts)
        elif report.worker in self._fleet:
            self._take_on_worker(self._fleet[report.worker], report)

    def _take_on_worker(self, worker: Worker, report: Judged | Learned | ConnectorDoubted | CacheDoubted) -> None:
        if isinstance(report, Judged):
            _judge(worker.circuit, report, self._loop.time())
        elif isinstance(report, Learned):
            with suppress(WrongConnector):  # operators have been told, and the relay has refused its request
                self._listener.note_connector(worker, report.connector)
        elif isinstance(report, ConnectorDoubted):
            self._listener.doubt_connector(worker, report.reason)
        else:  # all relays are to use this salt, or a later one
            self._fleet.salt_cache(worker, report.cache_salt)

    def _take_activity(self, relay: str, activity: Activity) -> None:
        if relay not in self._activities:  # if it has only joined anew, it counts its orphans itself
            self._drop_orphans(relay, activity.orphans)
        self._activities[relay] = activity
        self._count()
        uses, now = self._uses.setdefault(relay, {}), self._loop.time()
        for use in activity.uses:
            if use.worker in self._fleet:
                _note(self._fleet[use.worker], relay, use, uses.get(use.worker), now)
                uses[use.worker] = use

    def _take_counts(self, relay: str, counts: bytes) -> None:
        read_counts(counts)  # raises ValueError
        self._away.pop(relay, None)
        self.counts[relay] = counts

    def lost(self, relay: str) -> None:
        """Remove a relay that is gone, with its requests under way; a trial among them ends, so another may be made."""
        activity, pin_s = self._activities.pop(relay, None), self._listener.pin_s
        if activity is not None and activity.orphans and pin_s is not None:
            self._left_orphans[relay] = self._left_orphans.get(relay, 0) + activity.orphans
            self._loop.call_later(pin_s, self._orphans_dropped, relay, activity.orphans)
        self._count()
        if relay in self.counts:
            self._note_away(relay)
        for use in self._uses.pop(relay, {}).values():
            if use.worker in self._fleet:
                worker = self._fleet[use.worker]
                worker.in_use -= use.in_use
                worker.awaited.pop(relay, None)
        for worker in self._fleet:
            if worker.circuit.state is CircuitState.TRIAL:
                worker.circuit.inconclusive()

    def forget(self, worker_id: str) -> None:
        """Forget a worker that has left: late reports on it must not count for a later worker of its name."""
        for uses in self._uses.values():
            uses.pop(worker_id, None)

    def _note_away(self, relay: str) -> None:
        """Keep the counts of a far relay, which has no file here, until `MOST_AWAY` others have left after it."""
        if FAR in relay:
            self._away[relay] = None
            if len(self._away) > MOST_AWAY:
                first = next(iter(self._away))
                del self._away[first]
                self._listener.relay_given_up(self.counts.pop(first))

    def _orphans_dropped(self, relay: str, orphans: int) -> None:
        self._drop_orphans(relay, orphans)
        self._count()

    def _drop_orphans(self, relay: str, orphans: int) -> None:
        left = self._left_orphans.pop(relay, 0) - orphans
        if left > 0:
            self._left_orphans[relay] = left

    def _count(self) -> None:
        activities = self._activities.values()
        self._listener.relays_hold(
            sum(each.exchanges for each in activities),
            sum(each.drains for each in activities),
            sum(each.orphans for each in activities) + sum(self._left_orphans.values()),
        )

    # -- what relays are told

    def standings(self) -> dict[str, WorkerStanding]:
        """All workers as they are judged now, by id."""
        return {worker.id: _standing(worker) for worker in self._fleet}

    def silent(self) -> tuple[SilentGroup, ...]:
        """The groups of workers that fell silent together."""
        now = self._loop.time()
        return tuple(SilentGroup(group.name, group.workers, now - group.since_s) for group in self._frozen)


def _judge(circuit: Circuit, judged: Judged, now: float) -> None:
    """Apply a request's result to its worker's circuit."""
    match judged.finding:
        case Finding.USED:
            circuit.used()
        case Finding.SUCCESS:
            circuit.success()
        case Finding.INCONCLUSIVE:
            circuit.inconclusive()
        case Finding.FAULT:
            circuit.fault(now, judged.reason)
        case Finding.BUSY:
            circuit.busy(now, judged.retry_after_s)


def _note(worker: Worker, relay: str, use: Use, before: Use | None, now: float) -> None:
    had = 0 if before is None else before.in_use
    others = worker.in_use - had
    worker.in_use = others + use.in_use
    worker.peak_in_use = max(worker.peak_in_use, worker.in_use, others + use.peak)
    if use.awaits_tokens and use.awaited_age_s is not None:
        worker.awaited[relay] = now - use.awaited_age_s
    else:
        worker.awaited.pop(relay, None)
    if use.progress_age_s is not None:
        worker.progress_s = max(worker.progress_s, now - use.progress_age_s)


def _standing(worker: Worker) -> WorkerStanding:
    circuit = worker.circuit
    return WorkerStanding(
        spec=worker.spec,
        state=worker.state,
        circuit=circuit.state.value,
        doubtful=circuit.doubtful,
        out=worker.out,
        cache_salt=worker.cache_salt,
        ended_at=worker.ended_at,
        kv_connector=worker.kv_connector,
        withdrawn=worker.drained or worker.leaving,
    )
