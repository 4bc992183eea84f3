"""What others run on our decode workers: a second router over the same cluster, clients that go there directly.

A worker reports its requests and its KV usage; our ledger says what of that is ours, exactly and at once. The
difference is somebody else's, once it can't be the reports' lag: each report is compared with the *most* that we had
there since the report before, and only what two reports in a row have above it counts. So the first second or two of a
foreign request go unseen, and it is gone with the first report without it. A report of less than our own says nothing:
what we have just sent is not in it yet.

Foreign requests take slots and weigh as load (`Scheduler.report_decoder`), and they must not shut us out: a router
that comes to a full cluster would wait for ever for slots that the other one refills at once. So while requests wait
and no slot is left anywhere, a router may use a few slots more than are free (`least_own_slots`), up to half of a
worker, where the engine's own queue is empty. The other router sees that and refills fewer, so two routers end at equal
shares without a queue at the engines for longer than the reports take. Where requests queue at the engines, as clients
make them who count nothing, ours queue with them only while we have less than 1/16 of all slots.

Pure: reports come with what our ledger says, out come the figures for the scheduler.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LAG_REPORTS: Final = 2  # a difference in so many reports in a row is no lag
STEP_SHARE: Final = 16  # 1/16 of a worker's slots, at least one, are taken at a time when others hold them all


@dataclass(frozen=True, slots=True)
class Foreign:
    """What others hold on a worker: requests running and waiting there, and their KV tokens."""

    requests: int = 0
    tokens: int = 0


NOBODY: Final = Foreign()


@dataclass(frozen=True, slots=True)
class Own:
    """The most that we had on a worker since its last report, and what a request holds on average, tokens."""

    requests: int
    tokens: int
    mean_tokens: float


class ForeignLoad:
    """The last reports of one decode worker against our ledger."""

    __slots__ = ("_load", "_seen", "_unread")

    def __init__(self) -> None:
        self._load = 0  # ours at the last report, tokens
        self._seen: deque[Foreign] = deque([NOBODY], maxlen=LAG_REPORTS)
        self._unread = 0

    def see(self, samples: Mapping[str, float] | None, requests: int, load: int, mean_tokens: float) -> Foreign:
        """Take in a report (None: it could not be read); returns the part of it that is others'.

        Args: requests: the most that we had there since the last report. load: KV tokens that we have there now.
        mean_tokens: what a request of ours holds.

        Reads `num_requests_running`, `num_requests_waiting`, `kv_cache_usage_perc`, `kv_capacity_tokens` and
        `kv_block_tokens`. A report that can't be read leaves everything as it is, `LAG_REPORTS` in a row make it
        unknown, which counts as nobody.
        """
        own = Own(requests, max(load, self._load), mean_tokens)
        self._load = load
        if samples is None or "num_requests_running" not in samples:
            self._unread += 1
            if self._unread >= LAG_REPORTS:
                self._seen.append(NOBODY)
        else:
            self._unread = 0
            self._seen.append(difference(samples, own))
        return Foreign(min(one.requests for one in self._seen), min(one.tokens for one in self._seen))


def difference(samples: Mapping[str, float], own: Own) -> Foreign:
    """The part of a report that exceeds our own load, at least 0.

    Without the size of the KV cache a foreign request counts as large as ours are on average.
    """
    requests = int(samples["num_requests_running"] + samples.get("num_requests_waiting", 0.0)) - own.requests
    if requests <= 0:
        return NOBODY
    usage, capacity = samples.get("kv_cache_usage_perc"), samples.get("kv_capacity_tokens")
    if usage is None or not capacity:
        return Foreign(requests, int(requests * own.mean_tokens))
    rounding = own.requests * samples.get("kv_block_tokens", 0.0)  # the last block of each of ours
    return Foreign(requests, max(0, int(usage * capacity - own.tokens - rounding)))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A decode worker that is up, as the share-out sees it; `queued` are the requests in the engine's own queue."""

    slots: int
    active: int
    foreign: int
    queued: int

    @property
    def free(self) -> int:
        """Free slots."""
        return self.slots - self.active - self.foreign


def least_own_slots(worker: Occupancy, others: Sequence[Occupancy], waiting: int) -> int:
    """How many slots of `worker` we may use even where others hold them; 0: only free ones.

    Args: others: the other decode workers that are up. waiting: requests in our pool.
    """
    if not waiting or not worker.foreign or worker.free > 0 or any(other.free > 0 for other in others):
        return 0
    all_slots = worker.slots + sum(other.slots for other in others)
    all_active = worker.active + sum(other.active for other in others)
    if worker.queued and all_active >= max(1, all_slots // STEP_SHARE):
        return 0
    return min(worker.active + max(1, worker.slots // STEP_SHARE), (worker.slots + 1) // 2)
