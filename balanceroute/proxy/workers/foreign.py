"""Foreign load: requests on decode workers that another router, or clients, sent there directly.

A worker reports its requests and its KV usage; the ledger has the router's own part exactly. The difference is foreign
unless the report's lag explains it: each report is compared with the *maximum* of own requests since the former report,
and only a surplus in two reports in a row counts. So a foreign request is seen after a second or two, and is gone with
the first report without it. A report of fewer requests than own ones says nothing: the newest are not in it yet.

Foreign requests take slots and count as load (`Scheduler.report_decoder`). They must not shut this router out: on a
full cluster it would wait for ever for slots that the other router refills at once. So while requests wait and no slot
is free, but on slower workers, whose slots may stay free for good (`core.scarce_fit`), a router may use a few slots
more (`least_own_slots`), up to half of a worker, if the engine's own queue is empty. The other router sees that and
refills fewer, so two routers end at equal shares, with a queue at the engines only until the next reports. If requests
queue at the engines anyway (of clients without a router), this router's queue with them only while it has less than
1/16 of all slots. With four slots per worker, and answers no longer than a few reports, shares stay unequal (up to 9 to
1 on the emulator): all of few foreign requests may be lag.

Pure: from reports and the ledger's figures to figures for the scheduler.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LAG_REPORTS: Final = 2  # a difference in this many reports in a row is no lag
STEP_SHARE: Final = 16  # 1/16 of a worker's slots, at least one, are taken at a time when others hold them all


@dataclass(frozen=True, slots=True)
class Foreign:
    """Foreign requests on a worker: running, waiting, and their KV tokens."""

    requests: int = 0
    tokens: int = 0


NOBODY: Final = Foreign()


class ForeignLoad:
    """The last reports of a decode worker, compared with the ledger."""

    __slots__ = ("_load", "_seen", "_unread")

    def __init__(self) -> None:
        self._load = 0  # own tokens at the last report
        self._seen: deque[Foreign] = deque([NOBODY], maxlen=LAG_REPORTS)
        self._unread = 0

    def see(self, samples: Mapping[str, float] | None, requests: int, load: int, mean_tokens: float) -> Foreign:
        """Take a report (None: it could not be read); returns its foreign part.

        Args: requests: the maximum of own requests there since the last report. load: own KV tokens there now.
        mean_tokens: of an own request.

        Reads `num_requests_running`, `num_requests_waiting`, `kv_cache_usage_perc`, `kv_capacity_tokens` and
        `kv_block_tokens`. A report that can't be read changes nothing; after `LAG_REPORTS` in a row foreign load is
        unknown, and counts as none.
        """
        own_tokens, self._load = max(load, self._load), load
        if samples is None or "num_requests_running" not in samples:
            self._unread += 1
            if self._unread >= LAG_REPORTS:
                self._seen.append(NOBODY)
        else:
            self._unread = 0
            self._seen.append(_difference(samples, requests, own_tokens, mean_tokens))
        return Foreign(min(one.requests for one in self._seen), min(one.tokens for one in self._seen))


def _difference(samples: Mapping[str, float], own_requests: int, own_tokens: int, mean_tokens: float) -> Foreign:
    """The part of a report that exceeds the own load, at least 0.

    If the size of the KV cache is unknown, a foreign request counts as the mean own request.
    """
    requests = int(samples["num_requests_running"] + samples.get("num_requests_waiting", 0.0)) - own_requests
    if requests <= 0:
        return NOBODY
    usage, capacity = samples.get("kv_cache_usage_perc"), samples.get("kv_capacity_tokens")
    if usage is None or not capacity:
        return Foreign(requests, int(requests * mean_tokens))
    rounding = own_requests * samples.get("kv_block_tokens", 0.0)  # the last block of each own request
    return Foreign(requests, max(0, int(usage * capacity - own_tokens - rounding)))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of a decode worker that is up; `queued`: requests in the engine's own queue."""

    slots: int
    active: int
    foreign: int
    queued: int
    slowdown: float = 1.0

    @property
    def free(self) -> int:
        """Free slots."""
        return self.slots - self.active - self.foreign


def least_own_slots(worker: Occupancy, others: Sequence[Occupancy], waiting: int) -> int:
    """The slots of `worker` that the router may use although foreign requests hold them; 0: only free slots.

    Args: others: the other decode workers that are up. waiting: requests in the pool.
    """
    if not waiting or not worker.foreign or worker.free > 0:
        return 0
    if any(other.free > 0 and other.slowdown <= worker.slowdown for other in others):
        return 0
    all_slots = worker.slots + sum(other.slots for other in others)
    all_active = worker.active + sum(other.active for other in others)
    if worker.queued and all_active >= max(1, all_slots // STEP_SHARE):
        return 0
    return min(worker.active + max(1, worker.slots // STEP_SHARE), (worker.slots + 1) // 2)
