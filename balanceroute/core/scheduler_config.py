"""`SchedulerConfig`: the bounds and cadences of a scheduler. It is written to the journal, so it stays Python."""

import math
from dataclasses import dataclass

from balanceroute.core.bounds import check_flag, check_number
from balanceroute.core.prefill import PREFILL_POLICIES
from balanceroute.core.prefill_queue import AGEING
from balanceroute.errors import InputError

COUNTS = {"max_queued": 0, "max_pooled": 1, "max_prefill_inflight": 1, "refresh_every_tokens": 1, "overlap_requests": 0}
"""The least of each whole number; all of them may be None, too."""
TIMES = ("pool_ttl_s", "queue_deadline_s")
FLAGS = ("lock_step", "decode_first", "shared_barrier")
MOST_AGEING = 1_000_000


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds and cadences of the scheduler.

    Args:
        max_queued: arrivals that may wait for a prefiller; None for no bound.
        max_pooled: pool entries plus prefills under way; at this number no further prefill starts. None for no bound.
        pool_ttl_s: how long an entry may wait in the pool before it expires.
        queue_deadline_s: how long an arrival may wait for a prefiller before it expires.
        kv_usage_limit: KV usage (ratio) of a prefiller above which it gets no new probe.
        max_prefill_inflight: probes under way on one prefiller, and their seconds in mean prompts; None for no bound.
        prefill_policy: which prefiller takes a probe, of `core.prefill.PREFILL_POLICIES`.
        refresh_every_tokens: dT, generated tokens between predictor refreshes (H/2); None without a predictor.
        ageing: seconds of waiting for a prefiller that weigh as one of the own prefill; 0: first come first served.
        decode_first: whether a decode worker is chosen before the prefill; `max_pooled` then refuses arrivals.
        overlap_requests: requests that each decode worker is sent beyond its slots (m, `core.overlap`); None: as many
            as measured transfers need.
        shared_barrier: whether decode workers wait for each other at the end of a step; False: each steps alone.
        lock_step: whether the driver steps the engine itself (`start`, `step`) instead of reporting `progress`.
    """

    max_queued: int | None = None
    max_pooled: int | None = None
    pool_ttl_s: float = math.inf
    queue_deadline_s: float = math.inf
    kv_usage_limit: float = 0.9
    max_prefill_inflight: int | None = None
    refresh_every_tokens: int | None = None
    lock_step: bool = False
    decode_first: bool = False
    prefill_policy: str = "least_tokens"
    ageing: float = AGEING
    overlap_requests: int | None = 0
    shared_barrier: bool = True

    def checked(self) -> "SchedulerConfig":
        """The configuration itself. Raises: InputError that names the first value which makes no sense."""
        for name, least in COUNTS.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least, whole=True)
        for name in TIMES:
            check_number(name, getattr(self, name), 0, whole=False)
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        check_number("kv_usage_limit", self.kv_usage_limit, 0, 1, whole=False, above_least=True)
        check_number("ageing", self.ageing, 0, MOST_AGEING, whole=False)
        if self.prefill_policy not in PREFILL_POLICIES:
            raise InputError(f"prefill_policy {self.prefill_policy!r:.60}: one of {', '.join(PREFILL_POLICIES)}")
        return self
