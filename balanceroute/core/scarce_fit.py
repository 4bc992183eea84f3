"""The scarce decision of TargetFit and LevelFit: more requests wait than slots are free (theory in `target_fit.py`).

`Loads` are the workers and `Window` the requests while one decision is made, both as they would be with what has been
chosen so far; `choose_scarce` chooses. Nothing of the snapshot is changed.
"""

import math
from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray
from balanceroute.core.fit_rules import MIN_CAP_S, FitRules, TargetFitParams, caps_s, step_alone
from balanceroute.core.snapshot import ClusterSnapshot, free_slots
from balanceroute.core.tracker import DecodeInstanceState
from balanceroute.core.types import UP, WorkerSpec
from balanceroute.core.workload_means import WorkloadMeans

OVERDUE_BONUS = 1e13
MOST_WINDOW = 512  # of a class, in waiting order, that a decision chooses from
GROWTH_ANSWERS, GROWTH_PART = 2.0, 32.0  # of the memory that is kept for growth: see `kv_room`
LARGE = 5.0  # mean prompts: a larger one counts for no more in the stock, where it waits for its hole


def kv_room(worker: DecodeInstanceState, means: WorkloadMeans) -> float:
    """How large a prompt may be to fit the worker's KV memory beside what is there and grows, tokens.

    Infinite where the memory is not known, and where nothing runs: what does not fit there fits nowhere. What runs
    grows by a mean answer from one departure to the next; twice that is kept free, but at most 1/32 of the memory.
    """
    capacity_tokens = worker.kv_capacity_tokens
    if not capacity_tokens or not worker.occupied:
        return math.inf
    growth_tokens = min(GROWTH_ANSWERS * means.answer_tokens, capacity_tokens / GROWTH_PART)
    return capacity_tokens - growth_tokens - worker.total_load


class OpenWorker:
    """A worker that had a free slot when a scarce decision began, and what the decision makes of it.

    Attributes: `load`, what a step costs (L_g); `active`, requests on it (n_g), `most`, how many there may be, and
    `share`, how many there are over its slots; `room`, see `kv_room`, and `roomiest`, whether no worker has more.
    """

    def __init__(self, worker: DecodeInstanceState, load: float) -> None:
        self.worker, self.spec, self.load = worker, worker.spec, load
        self.room, self.roomiest = math.inf, True
        self.active = worker.occupied
        self.most = worker.own_slots + worker.foreign_requests
        self.share = self.active / self.spec.slots

    def occupy(self) -> None:
        """One slot less."""
        self.active += 1
        self.share = self.active / self.spec.slots


class Loads:
    """The workers while a scarce decision is made; those without a free slot do not change and are summed once.

    Attributes: `changing`, those that had a free slot, and `free`, how many they had; `open`, those that have one;
    `left`, whether some keep theirs because nothing fits.
    """

    def __init__(self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], rules: FitRules) -> None:
        fixed = snapshot.step_loads()
        self.changing = [OpenWorker(worker, fixed[worker.index]) for worker in open_workers]
        self.left = False
        if rules.sees_memory:
            most = max([kv_room(worker, snapshot.means) for worker in snapshot.workers if worker.state is UP])
            for each in self.changing:
                each.room = kv_room(each.worker, snapshot.means)
                each.roomiest = each.room == most
        self.open = self.changing.copy()
        self.free = free_slots(open_workers)
        for index in sorted([worker.index for worker in open_workers] + snapshot.down, reverse=True):
            del fixed[index]
        self._count = len(fixed) + len(open_workers)
        self._fixed_sum = math.fsum(fixed)
        self._fixed_max, self._fixed_min = float(max(fixed, default=0.0)), float(min(fixed, default=math.inf))

    def around(self, worker: OpenWorker) -> tuple[float, float, float]:
        """Mean and largest load of the barrier, and the least of all but `worker`. O(workers that had a free slot)."""
        total, envelope, least = 0.0, self._fixed_max, self._fixed_min
        for each in self.changing:
            load = each.load
            total += load
            if load > envelope:
                envelope = load
            if load < least and each is not worker:
                least = load
        return (self._fixed_sum + total) / self._count, envelope, least

    def emptiest(self) -> OpenWorker:
        """The open worker with the fewest requests over slots; ties: least load, then lowest index."""
        emptiest = self.open[0]
        for worker in self.open:
            if worker.share < emptiest.share or (worker.share == emptiest.share and worker.load < emptiest.load):
                emptiest = worker
        return emptiest

    def occupy(self, worker: OpenWorker) -> None:
        """One slot less on the worker."""
        worker.occupy()
        if worker.active >= worker.most:
            self.open.remove(worker)

    def leave(self, worker: OpenWorker) -> None:
        """Its slots stay free."""
        self.left = True
        self.open.remove(worker)


class Window:
    """The requests that a scarce decision chooses from, all of one class, and what their ageing is worth.

    Attributes: `trackers`, in waiting order, `prompts`, their tokens, and `age`, u = wait / cap, shape (W,), where
    workers step alone by a cap of its own; `drop`, how far below the mean load the level is, tokens.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, now: float, params: TargetFitParams, rules: FitRules, pool_is_full: bool
    ) -> None:
        means, waiting = snapshot.means, snapshot.pool.front
        mean_prompt = means.prompt_tokens or 1.0
        self.rules = rules
        request_tokens = snapshot.request_tokens
        mean_cost = mean_prompt + request_tokens
        if rules.sees_answers:
            mean_cost = max(mean_cost, means.answer_tokens)
        self._curvature = rules.curvature / mean_cost
        count = int(min(MOST_WINDOW, rules.window_per_slot * snapshot.slots))
        self.trackers = waiting.head(count)
        sizes, ready_s = waiting.arrays()
        self._sizes: FloatArray = sizes[:count]
        wait_s = now - ready_s[:count]
        self._late: FloatArray = wait_s / caps_s(self._sizes, snapshot, params, rules, pool_is_full)
        self.age = self._late
        if step_alone(snapshot, rules) and params.max_wait_s < math.inf:
            self.age = np.maximum(self._late, wait_s / max(rules.alone_waits * means.wait_s, MIN_CAP_S))
        bonus: FloatArray = self._sizes + request_tokens
        bonus *= rules.size_bonus
        bonus += (rules.mean_bonus + rules.deviation_bonus * means.deviation_tokens / mean_prompt) * mean_cost
        bonus *= self.age * self.age
        if np.maximum.reduce(self.age) > 1.0:
            bonus += np.where(self.age > 1.0, OVERDUE_BONUS * self.age, 0.0)
        self.drop = growth = rules.growth_share * means.answer_tokens * (1.0 - 1.0 / snapshot.n_in_barrier)
        if growth:
            stock = float(np.add.reduce(np.minimum(self._sizes, LARGE * mean_prompt))) / len(self._sizes)
            most = max(growth, mean_prompt / 2.0 - growth)
            self.drop += min(most, max(-most, rules.stock_share * (mean_prompt - stock)))
        self.prompts: list[float] = self._sizes.tolist()
        self._largest = float(np.maximum.reduce(self._sizes))
        self._smallest, self._latest = min(self.prompts), float(np.maximum.reduce(self._late))
        self._bonus: list[float] = bonus.tolist()
        self._available: list[float] = self._bonus.copy()  # -inf where the request is used
        self._added: dict[tuple[float, int], list[float]] = {}  # (slowdown, c) -> what each adds to a load

    def added(self, spec: WorkerSpec) -> list[float]:
        """What each request adds to the load of such a worker, as `cost`."""
        kind = (spec.slowdown, spec.request_tokens)
        added = self._added.get(kind)
        if added is None:
            added = self._added[kind] = ((self._sizes + spec.request_tokens) * spec.slowdown).tolist()
        return added

    def may_fit(self, worker: OpenWorker) -> bool:
        """False where nothing fits its memory, whatever is used: so it is on nearly all workers once that is short."""
        return worker.room >= self._smallest or self._latest > _past(worker)

    def _fitting(self, worker: OpenWorker) -> list[float]:
        """As `_available`, of those that fit the worker's memory."""
        room = worker.room
        if room >= self._largest:
            return self._available
        fits = (self._sizes <= room) | (self._late > _past(worker))
        return [bonus if fit else -math.inf for bonus, fit in zip(self._available, fits.tolist(), strict=True)]

    def take(self, worker: OpenWorker, level: float, envelope: float, least: float) -> tuple[int, float]:
        """Use the request with the least cost on this worker: its position, and that cost; -1 where nothing fits.

        `level`: T, at most `envelope`, the largest load in the barrier, and at least `least`. Ties go to the first in
        waiting order.

        With y = x - T and c = max L - T >= 0 the distance |y| + p max(0, y - c) is max(|y|, (1 + p) y - p c), and below
        alike. A plain loop, as it is compiled to one over doubles: 1 us for 128 requests, which as eleven calls of
        numpy take 6 us; not compiled it takes 16 us.
        """
        rules = self.rules
        above, below = 1.0 + rules.overflow_penalty, 1.0 + rules.underflow_penalty
        curvature, most_slope = self._curvature, rules.most_slope
        offset = worker.load - level
        upper = above * offset - rules.overflow_penalty * (envelope - level)
        lower = below * offset + rules.underflow_penalty * (level - least)
        best, position, index = math.inf, -1, 0
        added, available = self.added(worker.spec), self._fitting(worker)
        for size, bonus in zip(added, available):  # noqa: B905 (mypyc has no loop for a strict one)
            misfit = size + offset
            price = distance = misfit if misfit > 0.0 else -misfit
            beyond = above * size + upper
            if beyond > price:
                price = beyond
            beyond = -below * size - lower
            if beyond > price:
                price = beyond
            bend = misfit * misfit * curvature
            if bend > most_slope * distance:
                bend = most_slope * distance
            price = price + bend - bonus
            if price < best:
                best, position = price, index
            index += 1
        if position >= 0:
            self._available[position] = -math.inf
        return position, best

    def put_back(self, position: int) -> None:
        """The request is not used after all."""
        self._available[position] = self._bonus[position]


def _past(worker: OpenWorker) -> float:
    """Caps after which a request need not fit the worker's memory.

    What is past its cap need not fit where no worker has more room, and past twice its cap nowhere: it waits in the
    engine then, and what comes after it as well, so a worker that has no room left gets no more of it.
    """
    if worker.room <= 0.0:
        return math.inf
    return 1.0 if worker.roomiest else 2.0


@dataclass(slots=True)
class Fit:
    """A tentative admission: the request at `position` of the window to `worker`, at `cost` tokens."""

    worker: OpenWorker
    position: int
    cost: float


def choose_scarce(loads: Loads, window: Window, rounds: int) -> list[Fit]:
    """Choose a request for each of `rounds` slots, then each again, given all the others: `swap_passes` times."""
    fits: list[Fit] = []
    while len(fits) < rounds and loads.open:
        worker = loads.emptiest()
        fit = _fit(worker, loads, window)
        if fit is None:
            loads.leave(worker)
            continue
        fits.append(fit)
        loads.occupy(worker)
    settled = 1  # choices in a row that were made, or stood, given all the others as they are: the last was
    for index in list(range(len(fits))) * window.rules.swap_passes:
        if settled == len(fits):
            break  # so would every further choice
        fit = fits[index]
        if fit.worker.room < 0.0:  # by one that need not fit: what else it got might not now
            settled += 1
            continue
        fit.worker.load -= window.added(fit.worker.spec)[fit.position]
        fit.worker.room += window.prompts[fit.position]
        window.put_back(fit.position)
        again = _fit(fit.worker, loads, window)
        assert again is not None, "what was chosen fits"
        fits[index] = again
        settled = settled + 1 if again.position == fit.position else 1
    return fits


def _fit(worker: OpenWorker, loads: Loads, window: Window) -> Fit | None:
    if not window.may_fit(worker):
        return None
    spec = worker.spec
    mean, envelope, least = loads.around(worker)
    level = min(envelope, mean - spec.slowdown * window.drop)
    position, price = window.take(worker, level, envelope, min(level, least))
    if position < 0:
        return None
    worker.load += window.added(spec)[position]
    worker.room -= window.prompts[position]
    return Fit(worker, position, price)
