"""The lead among the pods of a Kubernetes cluster: one pod holds a Lease; in the pod, one brain holds a file's lock.

The rules are those of client-go's leaderelection, and so are the proportions of its times (15 s, 10 s, 2 s):

    every 2/15 of the Lease's duration     the leader renews it, and standbys read it
    2/3 of the duration                    after it sent its last successful renewal, the leader leads no more
    1/1 of the duration                    after they last saw the Lease change, standbys may take it

Each process measures these spans by its own clock, which goes on while its machine is suspended; times in the Lease are
another's, and are not used. The leader counts from before its write, standbys from after their answer. So the leader
has stepped down before another one leads, unless one clock runs 1.5 times as fast as the other. Beyond that, epochs
decide: each new leader increments `leaseTransitions`, and relays join no brain with a smaller number.

The holder of a Lease is a run folder, not a process. So a brain that gets the file's lock in that folder leads at once:
the former leader there is dead or deposed (`leadership.py`), and its next write fails because the Lease's version has
changed. A deleted Lease is created again with a number above all that were seen.

A thread renews the Lease. It stops when the event loop hangs for `STUCK_S`.
"""

import logging
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.kubernetes import Lease, LeaseApi, LeaseError, LeaseSpec
from balanceroute.proxy.link.leadership import STUCK_S, FileLead
from balanceroute.proxy.telemetry.clock import now_s
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

DEADLINE: Final = 2 / 3  # share of the duration; these three are client-go's defaults
RETRY: Final = 2 / 15
JITTER: Final = 1.2
MOST_TRANSITIONS: Final = 2**31 - 2**20  # accepted from a relay; Kubernetes' int32 leaves room for more leaders


class LeaseLead:
    """The lead among pods that use one Lease; see `leadership.Lead`."""

    def __init__(
        self,
        local: FileLead,
        api: LeaseApi,
        identity: Callable[[], str],
        duration_s: int,
        clock: Callable[[], float] = now_s,
        again: bool = False,
    ) -> None:
        """`local`: the lead in this pod. `identity`: returns the run folder's name; called with the lock held. `again`:
        the API server has accepted this pod before, so a refusal is not final.
        """
        self._local, self._api, self._identity, self._duration_s, self._clock = local, api, identity, duration_s, clock
        self._deadline_s, self._retry_s = DEADLINE * duration_s, RETRY * duration_s
        self._holder = ""  # our holderIdentity
        self._next_s = 0.0  # the earliest next try
        self._seen: LeaseSpec | None = None  # and when that was seen first
        self._seen_s = 0.0
        self._heard = again  # the API server has answered
        self._trouble = Trouble(log, "the lease can't be read or renewed")  # by the last call
        self._asked_s = self._renewed_s = 0.0  # of the last `renew`, and of the last renewal that succeeded
        self._lost = self._resigned = False
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.epoch = self.others = 0

    def take(self) -> bool:
        """Take the lead, if it is free here and in the cluster. Raises: ConfigError: the API server refuses us."""
        if not self._leads_here():
            return False
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + self._retry_s * random.uniform(1.0, JITTER)
        try:
            lease, asked_s = self._taken()
            self._heard = True
            self._trouble.end()
        except LeaseError as error:
            if error.denied and not self._heard:
                raise ConfigError(f"listen.lease: {error}") from None
            self._warn(error)
            return False
        if lease is None or self._clock() - asked_s >= self._deadline_s:
            return False
        if not self._local.renew():  # deposed here while the API server was slow; the one that leads here has the Lease
            return False
        return self._lead(lease, asked_s)

    def renew(self) -> bool:
        """Show that the event loop runs; False: the lead is lost, here or (before `resign`) in the cluster."""
        now = self._asked_s = self._clock()
        if not self._local.renew() or self._lost:
            return False
        if self._resigned or now - self._renewed_s < self._deadline_s:
            return True
        log.warning("the lease was not renewed in time", extra={"lease": self._api.name})
        self._lost = True
        return False

    def raise_epoch(self, epoch: int) -> bool:
        """See `Lead`: another pod has led under that number, or the Lease was deleted while no pod ran that knew it."""
        if epoch <= MOST_TRANSITIONS:
            self._local.raise_epoch(epoch)
        return False

    def resign(self) -> None:
        """Let another pod lead; this one still finishes its own requests."""
        self._resigned = True
        self._ends.set()

    def release(self) -> None:
        """Let another process of this pod lead; if there is none, the Lease expires and is free for other pods."""
        self._ends.set()
        self._local.release()  # of the next holder's write and the thread's one fails: versions differ
        if self._thread is not None:
            self._thread.join(self._deadline_s)  # an answer that comes byte by byte may never end
            if self._thread.is_alive():
                return  # the thread ends with its process
            self._thread = None
        self._api.close()

    # -- taking

    def _leads_here(self) -> bool:
        if self._local.renew():
            return True
        self._local.release()
        if not self._local.take():
            return False
        self._holder = self._identity()
        return True

    def _taken(self) -> tuple[Lease | None, float]:
        """Take the Lease; returns it as it is then, and when that was asked for. None: another pod holds it.

        Raises: LeaseError.
        """
        found, asked_s = self._api.read(), self._clock()
        if found is None:
            return self._api.create(self._held(self._next_epoch())), asked_s
        self._look_at(found.spec)
        holder = found.spec.holder_identity
        if holder and holder != self._holder and not self._is_over(found.spec):
            return None, asked_s
        return self._api.replace(found, self._held(self._next_epoch())), asked_s

    def _look_at(self, spec: LeaseSpec) -> None:
        if spec != self._seen:
            if spec.holder_identity and (self._seen is None or spec.holder_identity != self._seen.holder_identity):
                log.info("who holds the lease", extra={"lease": self._api.name, "holder": spec.holder_identity})
            self._seen, self._seen_s = spec, self._clock()
            self.epoch = max(self.epoch, spec.lease_transitions or 0)
            if spec.holder_identity != self._holder:  # a Lease without holder was given up by this pod or another
                self.others = self.epoch

    def _is_over(self, spec: LeaseSpec) -> bool:
        """Whether the Lease, as just read, was not renewed for its duration by our clock."""
        return self._clock() - self._seen_s > (spec.lease_duration_seconds or self._duration_s)

    def _next_epoch(self) -> int:
        return max(self.epoch + 1, self._local.epoch)  # the file counts as well

    def _held(self, epoch: int, since: str | None = None) -> LeaseSpec:
        """The spec of a Lease that this pod holds now; `since`: when it was acquired, if earlier."""
        now = _now()
        return LeaseSpec(
            holder_identity=self._holder,
            lease_duration_seconds=self._duration_s,
            acquire_time=since or now,
            renew_time=now,
            lease_transitions=epoch,
        )

    def _lead(self, lease: Lease, asked_s: float) -> bool:
        """Begin to lead; False: no thread can be started to renew the Lease, which is given up: another pod may have
        room for one.
        """
        self._renewed_s, self._asked_s = asked_s, self._clock()
        self._lost = self._resigned = False
        self.epoch = lease.spec.lease_transitions or 0
        self._local.lift(self.epoch)
        self._ends = threading.Event()
        thread = threading.Thread(target=self._keep, args=(lease, self._ends), name="lease", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("not leading: no thread can be started to renew the lease", extra={"error": str(error)})
            self._give_up(lease)
            return False
        self._thread = thread
        return True

    # -- keeping: in the thread

    def _keep(self, lease: Lease, ends: threading.Event) -> None:
        """In a thread: renew the Lease, but not when the loop hangs, until the lead is released or lost."""
        held: Lease | None = lease
        next_s = self._renewed_s + self._retry_s  # from call to call: a slow API server leaves no time for pauses
        while held is not None and not ends.wait(max(0.0, next_s - self._clock())):
            next_s = self._clock() + self._retry_s
            if self._clock() - self._asked_s < STUCK_S:
                held = self._renewed(held)
        if held is None:
            log.warning("the lease is another's", extra={"lease": self._api.name, "epoch": self.epoch})
            self._lost = True
        elif self._resigned:
            self._give_up(held)

    def _renewed(self, held: Lease) -> Lease | None:
        """The renewed Lease, or the old one if the answer is unknown; None: another pod holds it."""
        asked_s = self._clock()
        try:
            renewed = self._replaced(held, self._held(self.epoch, held.spec.acquire_time))
        except LeaseError as error:
            self._warn(error)
            return held
        if renewed is not None:
            self._renewed_s = asked_s
            self._trouble.end()
        return renewed

    def _replaced(self, held: Lease, spec: LeaseSpec) -> Lease | None:
        """Write our Lease, over others' changes that leave it ours. None: another pod holds it. Raises: LeaseError."""
        replaced = self._api.replace(held, spec)
        if replaced is None and (found := self._reread()) is not None:
            replaced = self._api.replace(found, spec)
            if replaced is None:  # changed again; the next try will find out whose it is
                raise LeaseError("others change the lease all the time")
        return replaced

    def _reread(self) -> Lease | None:
        """Read the Lease again, after a lost answer or a change by others; None: another pod holds it."""
        found = self._api.read()
        if found is None:
            return None
        spec = found.spec
        ours = spec.holder_identity == self._holder and spec.lease_transitions == self.epoch
        return found if ours else None

    def _give_up(self, held: Lease) -> None:
        """Release the Lease; its epoch stays. If that fails, the Lease expires."""
        nobody = LeaseSpec(
            holder_identity="", lease_duration_seconds=1, renew_time=_now(), lease_transitions=self.epoch
        )
        try:
            self._replaced(held, nobody)
            log.info("the lease is given up", extra={"lease": self._api.name, "epoch": self.epoch})
        except LeaseError as error:
            self._warn(error)

    def _warn(self, error: LeaseError) -> None:
        self._trouble.begin(lease=self._api.name, error=str(error))


def _now() -> str:
    """The present time as Kubernetes' MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
