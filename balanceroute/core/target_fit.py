"""TargetFit and LevelFit: fill every worker to a level, from the whole pool, with soft ageing. Beyond the paper.

The F-score fills margins up to the envelope, so it takes the largest request that fits and uses up the sizes that later
margins need. These policies aim at a level T near the mean load instead and pay for the distance on either side, and
more above the envelope, where every worker waits. Three parts:

*Slack* (everything that waits fits into free slots): place by load, the largest prompt on the lightest worker. A
request that would raise the envelope may be held back for `hold_s`, or for a tenth of the time that the mean answer
takes where that is less: a lighter worker is often one departure away. LevelFit does so only where half of all slots
are in use: below that, every request is served, and a wait gains nothing. Nothing is held back while the pool is full:
what is held would keep out what could use the slots.

*Scarce*: as many rounds as slots are free. The emptiest worker (requests over slots; tie: least load) takes the request
with the least cost

    |x - T| + penalty * max(0, x - max L) - bonus,      x = L_g + slowdown_g (s_i + c_g)

and when two or more were chosen, each is taken out and chosen again, given all the others (TargetFit twice, LevelFit
once): the first choices were made before it was known what the last slots would get.

*Ageing*: with u = wait / cap the bonus is u^2 (A (s + c) + B (mean prompt + c)), so that no request waits long for a
perfect fit. It is measured by what requests cost, c being the mean over the workers: where c is several times a prompt,
a token of misfit makes the step longer by so much less, and a wait for the right prompt wins as little. Past its
cap (u > 1) a request precedes every younger one, because 1e13 u exceeds any load. The cap is `max_wait_s`, or five
times the mean wait where that is more, and longer for requests that cost far more than the mean; but none leaves the
pool unserved for it (`ClusterSnapshot.longest_wait_s`), unless `max_wait_s` is infinite.

TargetFit takes the mean for the level: T = mean L. LevelFit (`LEVEL_FIT`) differs in ten things.

*Why the level is below the mean.* A departure takes away a prompt and its answer, an admission adds a prompt alone.
Between two departures a worker grows by one token per request and step, by the mean answer o in all. If each load came
back to the mean, the loads would rise by that much from one departure to the next; only large prompts could sustain
that, and the pool would run out of them. So LevelFit comes back to where the worker stood after its last departure.
The others are, on average, half way through their growth, and relative to the mean that is T = mean L - (1 - 1/G) o. If
the level is still too high, waiting prompts become smaller than arriving ones; T falls by `stock_share` times the
difference. A small pool is a weak sample, so the correction is bounded: T is below the mean by no more than half a mean
prompt, or twice the growth where that is more. Where answers are short the growth is little and departures are many. A
bound of the growth alone would not preserve the pool's mix of sizes, and all prompts left in it would be admitted at
once when slots are plenty, as after an outage.

*Extra cost outside the current minimum and maximum load.* Between the least and the largest load, a distance from the
level does not change the load spread. Below the least it does, as above the largest, though no other worker waits for
it. So LevelFit adds `underflow_penalty` per token below the least load of the other workers (or below T, where that is
less), and `curvature` times y^2 / (mean prompt + c), y = x - T: one large misfit is worse than two of half its size,
because the largest misfit sets the load spread.

*What fits the memory.* Where a worker's KV memory is known, a request that does not fit it is not sent there: it would
wait on its slot inside the engine, and so would all later ones. A smaller request takes the slot, or it stays free
until a request leaves. Past its cap a request is sent to the worker with the most room all the same, past twice its
cap to any that has some.

*Ageing by size.* Large prompts fit only where a large one ended; admitting one elsewhere raises that worker far above
the others. So a large prompt waits for such a place as long as it may. With A above 1 + penalty its bonus exceeds that
cost on the least loaded worker before its cap, up to 24 mean prompts (the curvature keeps larger ones until their cap,
if no place comes); until then the places go to those that waited longest. So the cap of large prompts can be a third of
TargetFit's at no more load spread.

*Short caps.* A wait of `max_wait_s` is long where hardly anybody waits, as below saturation and after a burst, and wins
little there. So LevelFit's cap is six mean waits, or a fifteenth of `max_wait_s` where that is more. Where answers are
short departures are many, and a place comes soon: there three times the mean answer's time takes the place of that
fifteenth.

*Small pools.* While a pool of W is full, the mean wait is W over the rate of departures, so six mean waits are short
where W is small beside G, as 512 are for 144 workers. But how soon a place comes for a large prompt does not depend on
W, and how many requests it slows down elsewhere grows with G. So while the pool is full the cap of five mean requests
is at least R G^2 / W, R being the time of the mean answer, and at most `max_wait_s`; that of a smaller one is less in
proportion. Few are so large, so the p99 wait hardly grows. With 16 in the pool for each of eight workers that is less
than six mean waits.

*Outliers.* A prompt of k usual requests that goes where no large one ended raises the largest load by k requests, of
the n that a worker has. For the time R of its answer all G n requests of the barrier are slower by about k / n, which
costs them G R k together; if it waits for a place, it alone loses. So from k = 50 on a prompt may wait in proportion to
G R k, whatever others wait, at most three times `max_wait_s`. At most one request in k is so large.

*Workers that step alone.* Where no worker waits for another (`SchedulerConfig.shared_barrier`), a misfit slows down one
worker alone, and unequal loads serve as many tokens: level ones only make the slowest requests faster. That is not
worth a long wait, so a request that has waited for as long as the mean goes first, of any size: the longest waits are
about those of first come, first served. Nothing is held back beside a free slot. For KV memory requests wait as they do
elsewhere.

*What a slot holds.* Where answers are longer than prompts, the distance from the level is made of answers, and the
choice among prompts changes it by little. Measured by the mean prompt, the square of the distance would exceed any
bonus, and small differences of size would decide who waits for a minute. So curvature and ageing are measured by the
mean answer there.

*One worker alone* waits for nobody: requests go in waiting order, as far as memory goes.

A load is what a step costs (`DecodeInstanceState.step_load`): tokens and c for each request, times the worker's
relative slowdown, so that equal loads mean equal step times. The constants are operating points of the simulator on the
two synthetic workloads, from a search for the shortest p99 wait at the same load spread; `growth_share` came out a
tenth above the 1 that the argument gives.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from mypy_extensions import mypyc_attr

from balanceroute.arrays import FloatArray
from balanceroute.core.policy import Choice, StageTimer
from balanceroute.core.snapshot import ClusterSnapshot, WorkloadMeans, free_slots
from balanceroute.core.tracker import DecodeInstanceState, RequestTracker
from balanceroute.core.types import DOWN, UP, WorkerSpec

OVERDUE_BONUS = 1e13
MIN_ACTIVE_TO_HOLD = 4  # with fewer requests on some worker the envelope says little: nothing is held back
MIN_CAP_S = 1e-3  # keeps u finite when max_wait_s is 0, which makes the order first come, first served
HOLD_SHARE = 0.1  # of the mean answer's time: where answers are short, a slot that stays empty costs more than it wins
GROWTH_ANSWERS, GROWTH_PART = 2.0, 32.0  # of the memory that is kept for growth: see `kv_room`
LARGE = 5.0  # mean prompts: a larger one counts for no more in the stock, where it waits for its hole


@dataclass(frozen=True, slots=True)
class FitRules:
    """The constants of one policy of this family.

    `overflow_penalty`, `underflow_penalty`: what a token above the envelope, or below the least load of the others,
    costs beside its distance; `curvature`: what the square of the distance costs, in mean requests (`mean prompt + c`).
    `size_bonus` and `mean_bonus`: A and B of the ageing. `mean_waits`: in a cap; `least_cap`: of `max_wait_s`, and
    `least_stays`: of the mean answer's time, the shorter of which is the shortest one. `patience`: times its cap that a
    request may wait longer, for each mean request of its cost, and `most_patience`, at most. `large_from`: mean
    requests from which on a prompt waits for its place while a small pool is full. `alone_waits`: mean waits after
    which a request goes first where workers step alone. `outlier_from`: usual requests that an outlier holds;
    `outlier_patience`: of G mean answers' times, what it may wait for each of them, and `most_outlier_wait`: of
    `max_wait_s`, at most. `growth_share`, `stock_share`: how far T is below the mean, of (1 - 1/G) o, and of what the
    stock lacks. `hold_from`: the share of its slots that every worker must have in use before a request is held back
    beside a free one. `swap_passes`: how often the choices for several slots are made again. `sees_memory`: whether a
    worker gets only what fits its KV memory. `sees_answers`: whether curvature and ageing are measured by the mean
    answer where that is longer than the mean request. `orders_alone`: whether there is something to choose where one
    worker is alone.
    """

    overflow_penalty: float
    underflow_penalty: float
    curvature: float
    size_bonus: float
    mean_bonus: float
    mean_waits: float
    least_cap: float
    least_stays: float
    patience: float
    most_patience: float
    large_from: float
    alone_waits: float
    outlier_from: float
    outlier_patience: float
    most_outlier_wait: float
    growth_share: float
    stock_share: float
    hold_from: float
    swap_passes: int
    sees_memory: bool
    sees_answers: bool
    orders_alone: bool


TARGET_FIT = FitRules(
    overflow_penalty=7.0,
    underflow_penalty=0.0,
    curvature=0.0,
    size_bonus=2.0,
    mean_bonus=32.0,
    mean_waits=5.0,
    least_cap=1.0,
    least_stays=math.inf,
    patience=0.1,
    most_patience=5.0,
    large_from=math.inf,
    alone_waits=math.inf,
    outlier_from=math.inf,
    outlier_patience=0.0,
    most_outlier_wait=0.0,
    growth_share=0.0,
    stock_share=0.0,
    hold_from=0.0,
    swap_passes=2,
    sees_memory=False,
    sees_answers=False,
    orders_alone=True,
)
LEVEL_FIT = FitRules(
    overflow_penalty=6.0,
    underflow_penalty=1.5,
    curvature=0.25,
    size_bonus=13.0,
    mean_bonus=22.0,
    mean_waits=6.0,
    least_cap=1 / 15,
    least_stays=3.0,
    patience=0.07,
    most_patience=0.7,
    large_from=5.0,
    alone_waits=1.0,
    outlier_from=50.0,
    outlier_patience=1 / 64,
    most_outlier_wait=3.0,
    growth_share=1.1,
    stock_share=1.0,
    hold_from=0.5,
    swap_passes=1,
    sees_memory=True,
    sees_answers=True,
    orders_alone=False,
)


@dataclass(frozen=True, slots=True)
class TargetFitParams:
    """The knobs of TargetFit; `PolicySettings` has the defaults of those that can be set.

    `max_wait_s`: age at which a request precedes younger ones. `hold_s`: longest hold in slack, 0 for never.
    `window`: how many of a class, in waiting order, a scarce decision chooses from.
    """

    max_wait_s: float
    hold_s: float
    window: int = 512


@mypyc_attr(allow_interpreted_subclasses=True)
class TargetFit:
    """The policies `target_fit` and `level_fit`, by their rules."""

    waits_for_slots = True
    horizon_steps = 0

    def __init__(
        self, name: str, params: TargetFitParams, rules: FitRules, stage_timer: StageTimer | None = None
    ) -> None:
        self.name = name
        self.params = params
        self.rules = rules
        self.stage_timer = stage_timer

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        """Infinite: ageing is part of every decision, computed from the wait itself."""
        return math.inf

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """Yield admissions. O(G) in slack; else O(G + W) per free slot, with the window of W requests."""
        timer, pool = self.stage_timer, snapshot.pool
        pool_is_full = snapshot.pool_is_full  # now: it empties as choices are taken
        while len(pool):
            open_workers = snapshot.open_workers()
            if not open_workers:
                return
            waiting = len(pool.front)
            if snapshot.n_in_barrier == 1 and not self.rules.orders_alone:
                behind = len(pool) - waiting
                yield from self._by_memory(snapshot, open_workers, now, pool_is_full)
                if len(pool) > behind:
                    return
                continue
            if waiting <= len(open_workers) or waiting <= free_slots(open_workers):
                if timer:
                    timer("prepare")
                others_wait = len(pool) > waiting
                if self.rules.sees_memory and not others_wait and short_of_memory(snapshot, open_workers):
                    yield from self._by_memory(snapshot, open_workers, now, pool_is_full)
                else:
                    may_hold = not (others_wait or pool_is_full or step_alone(snapshot, self.rules))
                    yield from self._slack(snapshot, open_workers, now, may_hold)
                if timer:
                    timer("stage1")
                if others_wait:
                    continue
                return
            loads = Loads(snapshot, open_workers, self.rules)
            window = Window(snapshot, now, self.params, self.rules, pool_is_full)
            if timer:
                timer("prepare")
            fits = choose_scarce(loads, window, min(loads.free, len(window.trackers)))
            for fit in fits:
                stage = 0 if window.age[fit.position] > 1.0 else 2
                yield Choice(window.trackers[fit.position], fit.worker.worker, stage, -fit.cost)
            if timer:
                timer("stage2")
            if len(fits) == loads.free or loads.left:
                return

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """When the first request that is held back in slack must go; what fits no memory goes when something leaves."""
        if not self.params.hold_s or not 0 < len(snapshot.pool) <= snapshot.free_slots:
            return math.inf
        held_until_s = [self.held_until_s(request, snapshot) for request in snapshot.pool]
        return min([until_s for until_s in held_until_s if until_s > now], default=math.inf)

    def held_until_s(self, request: RequestTracker, snapshot: ClusterSnapshot) -> float:
        """Until when a request may be held back beside a free slot; not at all where nothing bounds it yet."""
        hold_s = min(self.params.hold_s, HOLD_SHARE * snapshot.mean_stay_s())
        if hold_s == math.inf:
            return request.ready_s
        return request.ready_s + hold_s * snapshot.means.patience_factor(request.prompt_tokens)

    def _slack(
        self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], now: float, may_hold: bool
    ) -> Iterator[Choice]:
        workers, loads = snapshot.workers, snapshot.step_loads()
        envelope = max(snapshot.in_barrier(loads))
        lightest = [(loads[worker.index], worker.index) for worker in open_workers]
        heapify(lightest)
        waiting, busy = snapshot.pool.front, False
        for request in waiting.by_size(len(waiting), descending=True):
            load, index = lightest[0]
            worker = workers[index]
            load += cost(worker.spec, request.prompt_tokens)
            if may_hold and load > envelope:
                busy = busy or self._busy(workers)  # what is placed here only makes it busier
                if busy and now < self.held_until_s(request, snapshot):
                    continue
            yield Choice(request, worker, 1, min(0.0, envelope - load))
            envelope = max(envelope, load)
            if len(worker.active) < worker.own_slots:
                heapreplace(lightest, (load, index))
            else:
                heappop(lightest)

    def _by_memory(
        self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], now: float, pool_is_full: bool
    ) -> Iterator[Choice]:
        """There are slots for all, and perhaps no memory: in waiting order, each to the least load among those where it
        fits; past its cap to the most room, if there is any.
        """
        loads, waiting = snapshot.step_loads(), snapshot.pool.front
        places = [OpenWorker(worker, loads[worker.index]) for worker in open_workers]
        for place in places:
            place.room = kv_room(place.worker, snapshot.means)
        sizes, ready_s = waiting.arrays()
        age = (now - ready_s) / caps_s(sizes, snapshot, self.params, self.rules, pool_is_full)
        most = roomiest(places)
        for request, late in zip(waiting.head(len(waiting)), (age > 1.0).tolist(), strict=True):
            if request.prompt_tokens <= most.room:
                place = min([each for each in places if request.prompt_tokens <= each.room], key=load_of)
            elif late and most.room > 0.0:
                place = most
            else:
                continue
            yield Choice(request, place.worker, 1, 0.0)
            place.load += cost(place.spec, request.prompt_tokens)
            place.room -= request.prompt_tokens
            place.occupy()
            if place.active >= place.most:
                places.remove(place)
                if not places:
                    return
            most = roomiest(places)

    def _busy(self, workers: list[DecodeInstanceState]) -> bool:
        """Whether every worker in the barrier is busy enough for its load to say where requests should go."""
        share = self.rules.hold_from
        for worker in workers:
            if worker.state is not DOWN and worker.occupied < max(MIN_ACTIVE_TO_HOLD, share * worker.spec.slots):
                return False
        return True


def step_alone(snapshot: ClusterSnapshot, rules: FitRules) -> bool:
    """Whether no worker waits for another, and the policy looks at that."""
    return not snapshot.shared_barrier and rules.alone_waits < math.inf


def cost(spec: WorkerSpec, prompt_tokens: float) -> float:
    """What a request of this prompt adds to the load of a worker."""
    return spec.slowdown * (prompt_tokens + spec.request_tokens)


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


def caps_s(
    prompt_tokens: FloatArray,
    snapshot: ClusterSnapshot,
    params: TargetFitParams,
    rules: FitRules,
    pool_is_full: bool,
) -> FloatArray:
    """The cap of requests of these prompts, seconds; shape (n,). The more a request costs, the longer it may wait.

    `pool_is_full`: when the decision began.
    """
    if params.max_wait_s == math.inf:
        return np.full(len(prompt_tokens), math.inf)
    means, c = snapshot.means, snapshot.request_tokens
    times: FloatArray = (prompt_tokens + c) / (means.prompt_tokens + c or 1.0)
    patience: FloatArray = 1.0 + np.minimum(rules.patience * times, rules.most_patience)
    usual_s = max(_least_cap_s(snapshot, params, rules), rules.mean_waits * means.wait_s, MIN_CAP_S)
    cap_s: FloatArray = patience * usual_s
    place_s = _place_s(snapshot, params, rules) if pool_is_full else 0.0
    if place_s:
        np.maximum(cap_s, patience * np.minimum(times * (place_s / rules.large_from), place_s), out=cap_s)
    if rules.outlier_patience:
        np.maximum(cap_s, _outlier_caps_s(prompt_tokens + c, snapshot, params, rules), out=cap_s)
    np.minimum(cap_s, max(snapshot.longest_wait_s, MIN_CAP_S), out=cap_s)
    return cap_s


def _least_cap_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """How long a mean request may wait however little others do, seconds."""
    least_s = rules.least_cap * params.max_wait_s
    return least_s if rules.least_stays == math.inf else min(least_s, rules.least_stays * snapshot.mean_stay_s())


def _place_s(snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules) -> float:
    """How long a large prompt may wait for its place whatever others wait, where the pool is full, seconds.

    0: no longer than that.
    """
    stay_s = snapshot.mean_stay_s()
    if rules.large_from == math.inf or stay_s == math.inf:
        return 0.0
    return min(params.max_wait_s, stay_s * snapshot.n_in_barrier**2 / snapshot.max_pooled)


def _outlier_caps_s(
    costs: FloatArray, snapshot: ClusterSnapshot, params: TargetFitParams, rules: FitRules
) -> FloatArray:
    """The caps of requests that cost many times what usual ones hold, seconds, 0 for the others; shape (n,)."""
    stay_s, means = snapshot.mean_stay_s(), snapshot.means
    if stay_s == math.inf:
        return np.zeros(len(costs))
    times: FloatArray = costs / (means.usual_tokens + means.answer_tokens / 2.0 + snapshot.request_tokens)
    cap_s: FloatArray = times * (rules.outlier_patience * snapshot.n_in_barrier * stay_s)
    np.minimum(cap_s, rules.most_outlier_wait * params.max_wait_s, out=cap_s)
    cap_s[times < rules.outlier_from] = 0.0
    return cap_s


def short_of_memory(snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState]) -> bool:
    """Whether what waits might not fit: all of it together on the worker with the least room. O(G + waiting)."""
    least = min([kv_room(worker, snapshot.means) for worker in open_workers])
    return least < math.inf and least < sum([tracker.prompt_tokens for tracker in snapshot.pool.front])


def roomiest(workers: "list[OpenWorker]") -> "OpenWorker":
    """The first of those with the most room."""
    return max(workers, key=lambda worker: worker.room)


def load_of(worker: "OpenWorker") -> float:
    """What a step costs there."""
    return worker.load


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
        self.trackers = waiting.head(params.window)
        sizes, ready_s = waiting.arrays()
        self._sizes: FloatArray = sizes[: params.window]
        wait_s = now - ready_s[: params.window]
        self._late: FloatArray = wait_s / caps_s(self._sizes, snapshot, params, rules, pool_is_full)
        self.age = self._late
        if step_alone(snapshot, rules) and params.max_wait_s < math.inf:
            self.age = np.maximum(self._late, wait_s / max(rules.alone_waits * means.wait_s, MIN_CAP_S))
        bonus: FloatArray = self._sizes + request_tokens
        bonus *= rules.size_bonus
        bonus += rules.mean_bonus * mean_cost
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

    def _fitting(self, worker: OpenWorker) -> list[float]:
        """As `_available`, of those that fit the worker's memory.

        What is past its cap need not fit where no worker has more room, and past twice its cap nowhere: it waits in the
        engine then, and what comes after it as well, so a worker that has no room left gets no more of it.
        """
        room = worker.room
        if room >= self._largest:
            return self._available
        past = math.inf if room <= 0.0 else 1.0 if worker.roomiest else 2.0
        fits = (self._sizes <= room) | (self._late > past)
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
        above, below, curvature = 1.0 + rules.overflow_penalty, 1.0 + rules.underflow_penalty, self._curvature
        offset = worker.load - level
        upper = above * offset - rules.overflow_penalty * (envelope - level)
        lower = below * offset + rules.underflow_penalty * (level - least)
        best, position, index = math.inf, -1, 0
        added, available = self.added(worker.spec), self._fitting(worker)
        for size, bonus in zip(added, available):  # noqa: B905 (mypyc has no loop for a strict one)
            misfit = size + offset
            price = misfit if misfit > 0.0 else -misfit
            beyond = above * size + upper
            if beyond > price:
                price = beyond
            beyond = -below * size - lower
            if beyond > price:
                price = beyond
            price = price + misfit * misfit * curvature - bonus
            if price < best:
                best, position = price, index
            index += 1
        if position >= 0:
            self._available[position] = -math.inf
        return position, best

    def put_back(self, position: int) -> None:
        """The request is not used after all."""
        self._available[position] = self._bonus[position]


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
    spec = worker.spec
    mean, envelope, least = loads.around(worker)
    level = min(envelope, mean - spec.slowdown * window.drop)
    position, price = window.take(worker, level, envelope, min(level, least))
    if position < 0:
        return None
    worker.load += window.added(spec)[position]
    worker.room -= window.prompts[position]
    return Fit(worker, position, price)
