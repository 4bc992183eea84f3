"""A model of the choices of vllm-ascend's balancer inside a decode group, DyntraLB.

Where one process per rank serves a data-parallel group on one node, the ranks can tell each other after every step how
many KV blocks each request holds, and all compute the same plan for the step after the next exchange: which of its own
requests each rank runs. A request never changes its rank. One that is not run pauses: it keeps its KV and its place
among the rank's waiting requests, and its stream stands still.

The plan begins with what runs, filled up from each rank's waiting requests in their order. While the fullest rank is
`threshold_blocks` or more above the mean: the lightest rank exchanges a running request for a larger waiting one, and
the fullest one for a smaller one, whichever exchange brings the rank closest to the mean; where neither is possible the
fullest rank pauses the request whose absence raises requests per second most, by the step time model.

Source: vllm-project/vllm-ascend, pull request 12292 (`bubble_threshold` 5 blocks of 128 tokens by default). Left out:
its dynamic mode, which plans only for a while after a request of 700 blocks was seen, and its first 250 steps, which
have no plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.engine.step_time import StepTimeModel

BLOCK_TOKENS = 128
THRESHOLD_BLOCKS = 5.0
MAX_ROUNDS = 1000


class Held(NamedTuple):
    """A request on a rank: the KV blocks that it holds, and its number."""

    blocks: int
    request: int


@dataclass(slots=True)
class RankBatch:
    """The running and the waiting requests of a rank, in order; paused ones wait."""

    running: list[Held]
    waiting: list[Held]

    @property
    def blocks(self) -> int:
        """KV blocks of the running requests."""
        return sum(held.blocks for held in self.running)


@dataclass(frozen=True, slots=True)
class DpBalancer:
    """The planner of a group with `slots` requests per rank at most."""

    slots: int
    step_time: StepTimeModel
    threshold_blocks: float = THRESHOLD_BLOCKS

    def plan(self, batches: Sequence[RankBatch]) -> list[set[int]]:
        """Which requests each rank runs in the next step; the batches are changed on the way."""
        for batch in batches:
            room = self.slots - len(batch.running)
            batch.running += batch.waiting[:room]
            del batch.waiting[:room]
        loads = [batch.blocks for batch in batches]
        for _ in range(MAX_ROUNDS):
            if self.even(loads) or not self._improve(batches, loads):
                break
        return [{held.request for held in batch.running} for batch in batches]

    def even(self, loads: Sequence[int]) -> bool:
        """Whether no rank waits long enough for the fullest one to do anything about it."""
        return max(loads) - sum(loads) / len(loads) < self.threshold_blocks

    def _improve(self, batches: Sequence[RankBatch], loads: list[int]) -> bool:
        lightest = loads.index(min(loads))
        swapped = self._swap(batches, loads, lightest, larger=True)
        if swapped and self.even(loads):
            return True
        fullest = loads.index(max(loads))
        swapped |= self._swap(batches, loads, fullest, larger=False)
        return swapped or self._pause(batches, loads, fullest)

    def _swap(self, batches: Sequence[RankBatch], loads: list[int], rank: int, *, larger: bool) -> bool:
        """Exchange a running request for a larger (or smaller) waiting one, if the rank comes closer to the mean."""
        batch = batches[rank]
        if not batch.running or not batch.waiting:
            return False
        change = _blocks(batch.waiting)[None, :] - _blocks(batch.running)[:, None]
        apart = loads[rank] - sum(loads) / len(loads)
        distance = np.abs(apart + change * (1.0 - 1.0 / len(loads)))
        distance[change <= 0 if larger else change >= 0] = np.inf
        best = int(distance.argmin())
        if not distance.flat[best] < abs(apart):
            return False
        out, into = divmod(best, len(batch.waiting))
        loads[rank] += int(change.flat[best])
        leaving, coming = batch.running.pop(out), batch.waiting.pop(into)
        batch.running.append(coming)
        batch.waiting.append(leaving)
        return True

    def _pause(self, batches: Sequence[RankBatch], loads: list[int], fullest: int) -> bool:
        """Pause the request of the fullest rank without which the group serves most per second, if more than now."""
        running = sum(len(batch.running) for batch in batches)
        batch = batches[fullest]
        if running < 2 or not batch.running:
            return False
        others = max((load for rank, load in enumerate(loads) if rank != fullest), default=0)
        after = np.maximum(loads[fullest] - _blocks(batch.running), others)
        rates = (running - 1) / self._duration_s(after)
        best = int(rates.argmax())
        if not rates[best] > running / self._duration_s(np.array([float(loads[fullest])]))[0]:
            return False
        paused = batch.running.pop(best)
        batch.waiting.append(paused)
        loads[fullest] -= paused.blocks
        return True

    def _duration_s(self, blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        model = self.step_time
        return model.overhead_s + model.per_token_s * BLOCK_TOKENS * blocks


def _blocks(held: Sequence[Held]) -> NDArray[np.float64]:
    return np.array([each.blocks for each in held], dtype=np.float64)


def blocks_of(kv_tokens: int) -> int:
    """KV blocks that a request of so many tokens holds."""
    return -(-kv_tokens // BLOCK_TOKENS)
