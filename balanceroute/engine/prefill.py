"""A prefiller: prompts in, pinned KV out.

    queued --(a lane and blocks are free)--> running --(prompt done)--> pinned --> pulled | expired
                                                                 \\--> gone, when nobody asked for the KV

With a prefix cache, the leading blocks of a prompt that the cache holds when it starts are not computed; its own full
blocks are there once it is done.

"Delayed free": after a probe the blocks stay pinned until a decoder has pulled them or the lease passes. A
prefiller whose blocks are all pinned computes nothing: the queue waits, exactly what a router's
back-pressure must prevent. Nothing here knows the time: `now` (seconds) is an argument, and `next_event_s`
says when to call `advance` again.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from balanceroute.engine.kv_blocks import KvBlocks
from balanceroute.engine.prefix_cache import PrefixCache
from balanceroute.errors import ConfigError, InvariantError


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt on a prefiller; drivers may subclass it.

    `pin`: keep the KV for a decoder (a probe). `prefix`: names of its full blocks (`block_names`), where it may share
    them. `cached_tokens`: of those that were not computed, once it has started.
    """

    id: str
    prompt_tokens: int
    pin: bool = True
    prefix: Sequence[Hashable] = ()
    cached_tokens: int = 0
    start_s: float = math.inf
    done_s: float = math.inf
    expires_s: float = math.inf


J = TypeVar("J", bound=PrefillJob)


class Prefiller(Generic[J]):
    """Computes `lanes` prompts at a time, each at `tokens_per_s`, first come first served.

    overhead_s: per prompt. lease_s: how long pinned KV waits for a decoder. slowdown: 1.0 is healthy, 10
    ten times slower. cache: None: prefix caching is off.
    """

    def __init__(
        self,
        kv: KvBlocks,
        *,
        tokens_per_s: float,
        overhead_s: float,
        lanes: int,
        lease_s: float,
        cache: PrefixCache | None = None,
    ) -> None:
        if not tokens_per_s > 0 or lanes < 1 or not lease_s > 0 or overhead_s < 0:
            raise ConfigError(
                "prefiller: tokens_per_s, lanes and lease_s must be positive,"
                f" got {tokens_per_s}, {lanes}, {lease_s} (overhead_s {overhead_s})"
            )
        self.kv = kv
        self.tokens_per_s = tokens_per_s
        self.overhead_s = overhead_s
        self.lanes = lanes
        self.lease_s = lease_s
        self.cache = cache
        self.slowdown = 1.0
        self.expired = 0  # pins that ran into the lease so far
        self.queued: dict[str, J] = {}
        self.running: dict[str, J] = {}
        self.pinned: dict[str, J] = {}

    @property
    def pinned_blocks(self) -> int:
        """Blocks that wait for a decoder."""
        return sum(len(self.kv.held_by(job_id)) for job_id in self.pinned)

    def submit(self, job: J, now: float) -> None:
        """Queue a prompt and start it at once if a lane and blocks are free."""
        if job.id in self.queued or job.id in self.running or job.id in self.pinned:
            raise InvariantError(f"prefiller: {job.id} is already here")
        if self.kv.blocks_for(job.prompt_tokens) > self.kv.num_blocks:
            raise ConfigError(f"prefiller: {job.id} needs more KV blocks than there are ({self.kv.num_blocks})")
        self.queued[job.id] = job
        self._start(now)

    def advance(self, now: float) -> list[J]:
        """Do everything due by `now`: finish prompts, drop expired pins, start the next; returns the finished jobs."""
        finished: list[J] = []
        while True:
            self._expire(now)
            self._start(now)
            due = [job for job in self.running.values() if job.done_s <= now]
            if not due:
                return finished
            for job in sorted(due, key=lambda job: job.done_s):
                self._finish(job, now)
            finished.extend(due)

    def next_event_s(self) -> float:
        """When `advance` has something to do next; infinity when never."""
        done = min((job.done_s for job in self.running.values()), default=math.inf)
        return min(done, min((job.expires_s for job in self.pinned.values()), default=math.inf))

    def pull(self, job_id: str, now: float) -> bool:
        """A decoder has read the pinned KV: free it. False when it is not (or no longer) pinned."""
        if job_id not in self.pinned:
            return False
        del self.pinned[job_id]
        self.kv.release(job_id)
        self._start(now)
        return True

    def set_expiry(self, job_id: str, moment: float) -> None:
        """Move the end of a pin's lease, if there is one, as a decoder's heartbeats do."""
        job = self.pinned.get(job_id)
        if job is not None:
            job.expires_s = moment

    def abort(self, job_id: str, now: float) -> bool:
        """The caller left before its prompt was done; a finished, pinned job is not touched (False)."""
        if self.queued.pop(job_id, None) is not None:
            return True
        if self.running.pop(job_id, None) is None:
            return False
        self.kv.release(job_id)
        self._start(now)
        return True

    def fail(self) -> list[J]:
        """Drop everything, like a worker that crashes; returns the jobs that get no answer."""
        lost = [*self.running.values(), *self.queued.values()]
        for job_id in [*self.running, *self.pinned]:
            self.kv.release(job_id)
        self.queued, self.running, self.pinned = {}, {}, {}
        if self.cache is not None:
            self.cache.clear()
        return lost

    def prefill_s(self, prompt_tokens: int) -> float:
        """Seconds that a prompt takes once it runs."""
        return (self.overhead_s + prompt_tokens / self.tokens_per_s) * self.slowdown

    def _start(self, now: float) -> None:
        while self.queued and len(self.running) < self.lanes:
            job = next(iter(self.queued.values()))
            if not self.kv.grow(job.id, job.prompt_tokens):
                return
            del self.queued[job.id]
            job.start_s = now
            if self.cache is not None:  # the last token is always computed
                found = self.cache.found(job.prefix) * self.kv.block_size
                job.cached_tokens = min(found, (job.prompt_tokens - 1) // self.kv.block_size * self.kv.block_size)
            job.done_s = now + self.prefill_s(job.prompt_tokens - job.cached_tokens)
            self.running[job.id] = job

    def _finish(self, job: J, now: float) -> None:
        del self.running[job.id]
        if self.cache is not None:
            self.cache.compute(job.prefix)
        if job.pin:
            # not from `done_s`: a driver that stood still answers only now, and must not name KV that is gone already
            job.expires_s = now + self.lease_s
            self.pinned[job.id] = job
        else:
            self.kv.release(job.id)

    def _expire(self, now: float) -> None:
        for job_id in [job.id for job in self.pinned.values() if job.expires_s <= now]:
            del self.pinned[job_id]
            self.kv.release(job_id)
            self.expired += 1
