"""The lead among the pods of a Kubernetes cluster: whose brain holds a Lease. In each pod one has the lock of a file.

The rules are those of client-go's leaderelection, and so are the proportions of its times (15 s, 10 s, 2 s):

    every 2/15 of the Lease's duration     the leader renews it, and others look whether it does
    2/3 of the duration after the leader last asked for a renewal that was granted, it leads no more
    1/1 after they last saw the Lease change, others take it

Both spans are measured by each one's own monotonic clock: what a Lease says of the time is by another's, and is not
looked at. The leader begins to count before it asks, and the others when they have seen the answer, so it has stepped
down before another one leads, unless one's clock runs half as fast again as the other's. Beyond that, epochs decide:
`leaseTransitions` is counted up by each new leader, and relays go to no brain that leads under a smaller number.

A Lease is held by a run folder, not by a process. So who gets the file's lock in a folder that holds the Lease leads at
once: its former leader is dead or deposed (`leadership.py`), and writes no more, as the Lease has another version then.
A Lease that somebody deletes is made again with a number above all that were seen.

A thread renews, as a thread touches the file. It stops where the event loop hangs for `STUCK_S`.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from balanceroute.errors import ConfigError
from balanceroute.proxy.link.kubernetes import Lease, LeaseApi, LeaseError, LeaseSpec
from balanceroute.proxy.link.leadership import STUCK_S, FileLead
from balanceroute.proxy.telemetry.troubles import Trouble

log = logging.getLogger(__name__)

DEADLINE: Final = 2 / 3  # of the duration; these three are client-go's defaults
RETRY: Final = 2 / 15
JITTER: Final = 1.2
MOST_TRANSITIONS: Final = 2**31 - 2**20  # that a relay is believed: Kubernetes' int32 has room for leaders after that


class LeaseLead:
    """The lead among those who know a Lease; see `leadership.Lead`."""

    def __init__(
        self,
        local: FileLead,
        api: LeaseApi,
        identity: Callable[[], str],
        duration_s: int,
        clock: Callable[[], float] = time.monotonic,
        again: bool = False,
    ) -> None:
        """`local`: the lead in this pod. `identity`: returns that of its folder; called with the lock held. `again`:
        the API server has let this pod lead before, so it will again.
        """
        self._local, self._api, self._identity, self._duration_s, self._clock = local, api, identity, duration_s, clock
        self._deadline_s, self._retry_s = DEADLINE * duration_s, RETRY * duration_s
        self._holder = ""  # we, in the Lease
        self._next_s = 0.0  # not to be taken before
        self._seen: LeaseSpec | None = None  # and when that was seen first
        self._seen_s = 0.0
        self._heard = again  # the API server has answered
        self._trouble = Trouble(log, "the lease can't be read or renewed")  # by the last call
        self._asked_s = self._renewed_s = 0.0  # when the loop asked last, and when we asked for the last renewal
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
            lease = self._taken()
            self._heard = True
            self._trouble.end()
        except LeaseError as error:
            if error.denied and not self._heard:
                raise ConfigError(f"listen.lease: {error}") from None
            self._warn(error)
            return False
        if lease is None or self._clock() - now >= self._deadline_s:
            return False
        self._lead(lease, now)
        return True

    def renew(self) -> bool:
        """Show that the event loop goes on; False: the lead is lost, here or (until we resign) in the cluster."""
        now = self._asked_s = self._clock()
        if not self._local.renew() or self._lost:
            return False
        if self._resigned or now - self._renewed_s < self._deadline_s:
            return True
        log.warning("the lease was not renewed in time", extra={"lease": self._api.name})
        self._lost = True
        return False

    def outrank(self, epoch: int) -> bool:
        """See `Lead`: another pod has led under that number, or the Lease was deleted while no pod knew it."""
        if epoch <= MOST_TRANSITIONS:
            self._local.outrank(epoch)
        return False

    def resign(self) -> None:
        """Let another pod lead; what this one has begun it leads to its end."""
        self._resigned = True
        self._ends.set()

    def release(self) -> None:
        """Let another process of this pod lead; if there is none, the Lease runs out and is free for other pods."""
        self._ends.set()
        self._local.release()  # whoever gets it writes on another version than the thread, and one of the two fails
        if self._thread is not None:
            self._thread.join(self._deadline_s)  # an answer that comes byte by byte has no end
            if self._thread.is_alive():
                return  # and ends with its process
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

    def _taken(self) -> Lease | None:
        """Take the Lease; returns it as it is then. None: another pod holds it. Raises: LeaseError."""
        found = self._api.read()
        if found is None:
            return self._api.create(self._held(self._next_epoch()))
        self._look_at(found.spec)
        holder = found.spec.holder_identity
        if holder and holder != self._holder and not self._is_over(found.spec):
            return None
        return self._api.replace(found, self._held(self._next_epoch()))

    def _look_at(self, spec: LeaseSpec) -> None:
        if spec != self._seen:
            if spec.holder_identity and (self._seen is None or spec.holder_identity != self._seen.holder_identity):
                log.info("who holds the lease", extra={"lease": self._api.name, "holder": spec.holder_identity})
            self._seen, self._seen_s = spec, self._clock()
            self.epoch = max(self.epoch, spec.lease_transitions or 0)
            if spec.holder_identity != self._holder:  # of one that was given up that was we, or another one
                self.others = self.epoch

    def _is_over(self, spec: LeaseSpec) -> bool:
        """Whether the Lease has not been renewed for its duration, by our own clock, while we looked all the time."""
        return self._clock() - self._seen_s > (spec.lease_duration_seconds or self._duration_s)

    def _next_epoch(self) -> int:
        return max(self.epoch + 1, self._local.epoch)  # the file counts as well

    def _held(self, epoch: int, since: str | None = None) -> LeaseSpec:
        """The contents of a Lease that we hold now; `since`: when it was acquired, if that was earlier."""
        now = _now()
        return LeaseSpec(
            holder_identity=self._holder,
            lease_duration_seconds=self._duration_s,
            acquire_time=since or now,
            renew_time=now,
            lease_transitions=epoch,
        )

    def _lead(self, lease: Lease, asked_s: float) -> None:
        self._renewed_s, self._asked_s = asked_s, self._clock()
        self._lost = self._resigned = False
        self.epoch = lease.spec.lease_transitions or 0
        self._local.lift(self.epoch)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(lease, self._ends), name="lease", daemon=True)
        self._thread.start()

    # -- keeping: in the thread

    def _keep(self, lease: Lease, ends: threading.Event) -> None:
        """In a thread: renew the Lease, but not when the loop hangs, until the lead is released or lost."""
        held: Lease | None = lease
        while held is not None and not ends.wait(self._retry_s):
            if self._clock() - self._asked_s < STUCK_S:
                held = self._renewed(held)
        if held is None:
            log.warning("the lease is another's", extra={"lease": self._api.name, "epoch": self.epoch})
            self._lost = True
        elif self._resigned:
            self._give_up(held)

    def _renewed(self, held: Lease) -> Lease | None:
        """The renewed Lease, or the one as it was if the answer is unknown; None: it is not ours any more."""
        asked_s = self._clock()
        try:
            renewed = self._api.replace(held, self._held(self.epoch, held.spec.acquire_time))
            if renewed is None and (held_by_now := self._reread()) is not None:
                asked_s = self._clock()
                renewed = self._api.replace(held_by_now, self._held(self.epoch, held_by_now.spec.acquire_time))
        except LeaseError as error:
            self._warn(error)
            return held
        if renewed is not None:
            self._renewed_s = asked_s
            self._trouble.end()
        return renewed

    def _reread(self) -> Lease | None:
        """Read the Lease again, after a lost answer or a change by others; None: it is not ours any more."""
        found = self._api.read()
        if found is None:
            return None
        spec = found.spec
        ours = spec.holder_identity == self._holder and spec.lease_transitions == self.epoch
        return found if ours else None

    def _give_up(self, held: Lease) -> None:
        """Release the Lease; its epoch stays. If that fails, the Lease runs out."""
        nobody = LeaseSpec(
            holder_identity="", lease_duration_seconds=1, renew_time=_now(), lease_transitions=self.epoch
        )
        try:
            if self._api.replace(held, nobody) is None and (ours := self._reread()) is not None:
                self._api.replace(ours, nobody)
            log.info("the lease is given up", extra={"lease": self._api.name, "epoch": self.epoch})
        except LeaseError as error:
            self._warn(error)

    def _warn(self, error: LeaseError) -> None:
        self._trouble.begin(lease=self._api.name, error=str(error))


def _now() -> str:
    """As Kubernetes' MicroTime has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
