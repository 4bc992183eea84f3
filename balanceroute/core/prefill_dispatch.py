"""`PrefillDispatch`: which request gets which prefiller, and the prefill slots that requests hold there.

Requests wait in `PrefillQueue`; decode first, in `ClusterSnapshot.asking`, whose requests go before those of the queue.
Which prefillers may take another prompt, and at what cost, is in `core.prefill`. A prefill takes its slot by `begin`
and releases it by `end`, whatever has become of it.
"""

import math
from operator import attrgetter

from balanceroute.core.prefill import PREFILL_POLICIES, SHARED_BY, PrefillPolicy, cheapest, ready_prefillers
from balanceroute.core.prefill_queue import PrefillQueue
from balanceroute.core.prefill_work import work_tokens
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import PrefillerBudget, RequestTracker, prefiller_of
from balanceroute.core.types import DECODING, PREFILLING, QUEUED, Prefill


class PrefillDispatch:
    """The queue, and the choice of prefillers; what requests hold is in the snapshot."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._queue = PrefillQueue()
        self._prefills = 0
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Apply another configuration from now on."""
        self._config = config
        self.policy: PrefillPolicy = PREFILL_POLICIES[config.prefill_policy]
        self._queue.configure(config.ageing, config.queue_deadline_s)

    def enqueue(self, tracker: RequestTracker, snapshot: ClusterSnapshot) -> None:
        """The request waits for a prefiller; one that comes back keeps its place."""
        tracker.phase = QUEUED
        snapshot.queued[tracker.id] = tracker
        self._queue.add(tracker, len(snapshot.queued))

    def order_anew(self) -> None:
        """Order the waiting requests again by new arrival numbers."""
        self._queue.order_anew()

    def dispatch(self, snapshot: ClusterSnapshot, now: float, most: int | None) -> list[Prefill]:
        """As `Scheduler.dispatch`."""
        prefills: list[Prefill] = []
        if snapshot.asking:
            for tracker in sorted(snapshot.asking.values(), key=attrgetter("priority"))[:most]:
                prefiller = self._choose(tracker, snapshot)
                if prefiller is None:
                    return prefills
                del snapshot.asking[tracker.id]
                prefills.append(self.begin(tracker, prefiller, snapshot, now))
        pools = not self._config.decode_first  # there what queues needs no slot, and never comes to the pool
        while not (pools and snapshot.pool_is_full) and len(prefills) != most:
            head = self._queue.head(snapshot)
            if head is None or (prefiller := self._choose(head, snapshot)) is None:
                break
            self._queue.pop()
            del snapshot.queued[head.id]
            prefills.append(self.begin(head, prefiller, snapshot, now))
        return prefills

    def _choose(self, tracker: RequestTracker, snapshot: ClusterSnapshot) -> PrefillerBudget | None:
        most = self._config.max_prefill_inflight
        prompt_s = math.inf if most is None else snapshot.means.prefill_tokens * snapshot.prefill_s_per_token
        ready = ready_prefillers(snapshot.prefillers, self._config.kv_usage_limit, most, prompt_s)
        if not ready:
            return None
        if tracker.prefix:
            least = SHARED_BY * len(snapshot.prefillers)
            tracker.shared_blocks = snapshot.shared_prefixes.shared(tracker.prefix, least)
        costs = self.policy(ready, tracker)
        tracker.offers = (ready, costs)
        return cheapest(ready, costs)

    def begin(
        self, tracker: RequestTracker, prefiller: PrefillerBudget, snapshot: ClusterSnapshot, now: float
    ) -> Prefill:
        """The request takes a slot: it prefills from now on or, if it decodes already, its KV is pushed."""
        if tracker.phase is DECODING:
            tracker.pushing = True
        else:
            tracker.phase = PREFILLING
            snapshot.prefilling += tracker.decodes
        self._prefills += 1
        prefiller.begin(tracker, now)
        prefiller.last_used = self._prefills
        if tracker.prefix:
            snapshot.shared_prefixes.use(tracker.prefix)
        snapshot.means.see_prefill(work_tokens(tracker.prompt_tokens, tracker.uncached_tokens))
        return Prefill(tracker.id, prefiller.spec.id)

    def done(
        self,
        tracker: RequestTracker,
        prompt_tokens: int,
        cached_tokens: int | None,
        snapshot: ClusterSnapshot,
        now: float,
    ) -> PrefillerBudget:
        """The prefill is done, at the prefiller that is returned.

        Args: prompt_tokens: the exact size. cached_tokens: None where the engine does not tell.
        """
        prefiller = prefiller_of(tracker)
        prefiller.learn_cached(tracker, prompt_tokens, cached_tokens)
        self.end(tracker, snapshot, now, done=True)
        return prefiller

    def failed(self, tracker: RequestTracker, snapshot: ClusterSnapshot, now: float) -> None:
        """The prefiller has not computed the prompt, so its blocks do not count as cached there."""
        prefiller_of(tracker).withdraw_prefix(tracker)
        self.end(tracker, snapshot, now)

    def end(self, tracker: RequestTracker, snapshot: ClusterSnapshot, now: float, done: bool = False) -> None:
        """The request releases its slot. `done`: whether the prompt was computed, so that its time counts."""
        if tracker.pushing:
            tracker.pushing = False
        else:
            snapshot.prefilling -= tracker.decodes
        prefiller_of(tracker).end(tracker, now, done)
