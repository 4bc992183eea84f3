"""TargetFit: fit every worker to the mean load, from the whole pool, with soft ageing. Beyond the paper.

The F-score fills holes up to the envelope, so it takes the largest request that fits and uses up the sizes that later
holes need. TargetFit aims at the mean load instead and pays for the distance on either side, and more above the
envelope, where every worker waits. Three parts:

*Slack* (everything that waits fits into free slots): place by load, the largest prompt on the lightest worker. A
request that would raise the envelope may be held back for `hold_s`: a lighter worker is often one departure away.

*Scarce*: as many rounds as slots are free. The emptiest worker (requests over slots; tie: least load) takes the request
with the least cost

    |x - mean L| + 7 max(0, x - max L) - bonus,      x = L_g + speed_g s_i

and when two or more were chosen, each is taken out and chosen again, twice, given all the others: the first choices
were made before it was known what the last slots would get.

*Ageing*: with u = wait / cap the bonus is u^2 (2 s + 32 mean prompt), so that nothing waits long for its perfect hole;
past its cap (u > 1) a request precedes every younger one, because 1e13 u exceeds any load. The cap is `max_wait_s`, or
five times the mean wait where that is more, and up to six times as long for prompts far above the mean.

Loads are scaled by the workers' relative speed: equal loads mean equal step times. The constants 7, 2, 32 and 5 are the
operating point of the reference simulations (six seeds each of two synthetic traces).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from operator import attrgetter, mul

import numpy as np
from numpy.typing import NDArray

from balanceroute.core.policy import Choice, StageTimer
from balanceroute.core.snapshot import ClusterSnapshot, RequestTracker

FloatArray = NDArray[np.float64]

OVERFLOW_PENALTY = 7.0
SWAP_PASSES = 2
OVERDUE_BONUS = 1e13
MIN_ACTIVE_TO_HOLD = 4  # with fewer requests on some worker the envelope says little: nothing is held back
MIN_CAP_S = 1e-3  # keeps u finite when max_wait_s is 0, which makes the order first come, first served


@dataclass(frozen=True, slots=True)
class TargetFitParams:
    """The knobs of TargetFit; `PolicySettings` has the defaults of those that can be set.

    `max_wait_s`: age at which a request precedes younger ones. `hold_s`: longest hold in slack, 0 for never.
    `window`: how many of the pool, in waiting order, a scarce decision chooses from.
    """

    max_wait_s: float
    hold_s: float
    window: int = 512


class TargetFit:
    """The policy `target_fit`."""

    name = "target_fit"
    waits_for_slots = True
    horizon_steps = 0

    def __init__(self, params: TargetFitParams, stage_timer: StageTimer | None = None) -> None:
        self.params = params
        self.stage_timer = stage_timer

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        """Infinite: ageing is part of every decision, computed from the wait itself."""
        return math.inf

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """Yield admissions. O(G + W) per free slot, vectorised over the window of W requests."""
        timer = self.stage_timer
        while len(snapshot.pool):
            loads = Loads(snapshot)
            if not loads.free:
                return
            if len(snapshot.pool) <= loads.free:
                if timer:
                    timer("prepare")
                yield from self._slack(snapshot, loads, now)
                if timer:
                    timer("stage1")
                return
            window = Window(snapshot, now, self.params)
            if timer:
                timer("prepare")
            fits = choose_scarce(loads, window, min(loads.free, len(window.trackers)))
            for fit in fits:
                stage = 0 if window.age[fit.position] > 1.0 else 2
                yield Choice(window.trackers[fit.position], snapshot.workers[fit.worker], stage, -fit.cost)
            if timer:
                timer("stage2")
            if len(fits) == loads.free:
                return

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """When the first request that is held back in slack must go."""
        if not self.params.hold_s or not 0 < len(snapshot.pool) <= snapshot.free_slots:
            return math.inf
        return min(self.held_until_s(request, snapshot) for request in snapshot.pool)

    def held_until_s(self, request: RequestTracker, snapshot: ClusterSnapshot) -> float:
        """Until when a request may be held back beside a free slot."""
        return request.ready_s + self.params.hold_s * snapshot.means.patience_factor(request.prompt_tokens)

    def _slack(self, snapshot: ClusterSnapshot, loads: "Loads", now: float) -> Iterator[Choice]:
        _, envelope = loads.mean_and_envelope()
        lightest = [(loads.scaled[worker], worker) for worker in loads.open]
        heapify(lightest)
        for request in snapshot.pool.by_size(len(snapshot.pool), descending=True):
            load, worker = lightest[0]
            load += loads.speeds[worker] * request.prompt_tokens
            if load > envelope and now < self.held_until_s(request, snapshot) and loads.may_hold():
                continue
            loads.occupy(worker)
            if loads.active[worker] < snapshot.workers[worker].spec.slots:
                heapreplace(lightest, (load, worker))
            else:
                heappop(lightest)
            yield Choice(request, snapshot.workers[worker], 1, min(0.0, envelope - load))
            envelope = max(envelope, load)


class Loads:
    """The workers while a decision is made; those without a free slot at its start do not change and are summed once.

    Attributes: `scaled`, speed times KV tokens by worker (L_g); `active`, requests of each worker that had a free slot
    (n_g); `open`, the workers with a free slot; `free`, their free slots.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.workers = snapshot.workers
        self.speeds = snapshot.speeds
        self.scaled: list[float] = list(map(mul, self.speeds, map(attrgetter("load"), self.workers)))
        self.open = [worker.index for worker in snapshot.open_workers()]
        self.active = {worker: len(self.workers[worker].active) for worker in self.open}
        self.free = sum(self.workers[worker].spec.slots - active for worker, active in self.active.items())
        self._down = snapshot.down_workers()
        apart = {*self.open, *self._down}
        fixed = [load for worker, load in enumerate(self.scaled) if worker not in apart]
        self._fixed_count, self._fixed_sum, self._fixed_max = len(fixed), sum(fixed), max(fixed, default=0.0)

    def mean_and_envelope(self) -> tuple[float, float]:
        """Mean and largest load of the workers that share the barrier. O(workers that had a free slot)."""
        changing = [self.scaled[worker] for worker in self.active]
        mean = (self._fixed_sum + sum(changing)) / (self._fixed_count + len(changing))
        return mean, max(self._fixed_max, *changing)

    def may_hold(self) -> bool:
        """Whether every worker in the barrier is busy enough for its load to say where requests should go."""
        return all(len(w.active) >= MIN_ACTIVE_TO_HOLD for w in self.workers if w.index not in self._down)

    def emptiest(self) -> int:
        """The open worker with the fewest requests over slots; ties: least load, then lowest index."""
        if len(self.open) == 1:
            return self.open[0]
        return min(self.open, key=lambda g: (self.active[g] / self.workers[g].spec.slots, self.scaled[g]))

    def occupy(self, worker: int) -> None:
        """One slot less on the worker."""
        self.active[worker] += 1
        if self.active[worker] >= self.workers[worker].spec.slots:
            self.open.remove(worker)


class Window:
    """The requests that a scarce decision chooses from, and what their ageing is worth.

    Attributes: `trackers`, in waiting order; `age`, u = wait / cap, shape (W,).
    """

    def __init__(self, snapshot: ClusterSnapshot, now: float, params: TargetFitParams) -> None:
        means, pool = snapshot.means, snapshot.pool
        mean_prompt = means.prompt_tokens or 1.0
        self.trackers = pool.head(params.window)
        self._sizes: FloatArray = pool.prompt_tokens()[: params.window]
        ready_s = pool.ready_s()[: params.window]
        cap_s = self._sizes * (0.1 / mean_prompt)
        np.minimum(cap_s, 5.0, out=cap_s)
        cap_s += 1.0
        cap_s *= max(params.max_wait_s, 5.0 * means.wait_s, MIN_CAP_S)
        self.age: FloatArray = (now - ready_s) / cap_s
        self._bonus: FloatArray = self._sizes * 2.0
        self._bonus += 32.0 * mean_prompt
        self._bonus *= self.age * self.age
        if self.age.max() > 1.0:
            self._bonus += np.where(self.age > 1.0, OVERDUE_BONUS * self.age, 0.0)
        self._available = self._bonus.copy()  # -inf where the request is used
        self._scaled: dict[float, tuple[FloatArray, FloatArray]] = {}  # speed -> sizes, and 8 times as much
        self._cost = np.empty_like(self._sizes)
        self._above = np.empty_like(self._sizes)

    def take(self, load: float, speed: float, mean: float, envelope: float) -> tuple[int, float]:
        """Use the request with the least cost on a worker of this load and speed: its position, and that cost.

        `mean` and `envelope`: of the loads in the barrier. Ties go to the first in waiting order.

        With y = x - mean L and c = max L - mean L >= 0 the distance |y| + 7 max(0, y - c) is max(|y|, 8 y - 7 c).
        """
        if speed not in self._scaled:
            self._scaled[speed] = (self._sizes * speed, self._sizes * (speed * (1.0 + OVERFLOW_PENALTY)))
        sizes, steep_sizes = self._scaled[speed]
        cost, above = self._cost, self._above
        offset = load - mean
        np.add(sizes, offset, out=cost)
        np.abs(cost, out=cost)
        np.add(steep_sizes, (1.0 + OVERFLOW_PENALTY) * offset - OVERFLOW_PENALTY * (envelope - mean), out=above)
        np.maximum(cost, above, out=cost)
        np.subtract(cost, self._available, out=cost)
        position = int(cost.argmin())
        self._available[position] = -math.inf
        return position, float(cost[position])

    def scaled_size(self, position: int, speed: float) -> float:
        """The load that the request adds to a worker of this speed."""
        return float(self._sizes[position]) * speed

    def put_back(self, position: int) -> None:
        """The request is not used after all."""
        self._available[position] = self._bonus[position]


@dataclass(slots=True)
class Fit:
    """A tentative admission: the request at `position` of the window to `worker`, at `cost` tokens."""

    worker: int
    position: int
    cost: float


def choose_scarce(loads: Loads, window: Window, rounds: int) -> list[Fit]:
    """Choose a request for each of `rounds` slots, then each again, given all the others."""
    fits: list[Fit] = []
    for _ in range(rounds):
        worker = loads.emptiest()
        fits.append(_fit(worker, loads, window))
        loads.occupy(worker)
    if len(fits) > 1:
        for _ in range(SWAP_PASSES):
            before = [fit.position for fit in fits]
            for index, fit in enumerate(fits):
                loads.scaled[fit.worker] -= window.scaled_size(fit.position, loads.speeds[fit.worker])
                window.put_back(fit.position)
                fits[index] = _fit(fit.worker, loads, window)
            if before == [fit.position for fit in fits]:
                break  # so would every further pass
    return fits


def _fit(worker: int, loads: Loads, window: Window) -> Fit:
    speed = loads.speeds[worker]
    position, cost = window.take(loads.scaled[worker], speed, *loads.mean_and_envelope())
    loads.scaled[worker] += window.scaled_size(position, speed)
    return Fit(worker, position, cost)
