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

TargetFit takes the mean for the level: T = mean L. LevelFit (`LEVEL_FIT`) differs in twelve things.

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
because the largest misfit sets the load spread. From 24 mean requests on it is 6 |y|: see huge prompts.

*What fits the memory.* Where a worker's KV memory is known, a request that does not fit it is not sent there: it would
wait on its slot inside the engine, and so would all later ones. A smaller request takes the slot, or it stays free
until a request leaves. Past its cap a request is sent to the worker with the most room all the same, past twice its
cap to any that has some. Where a later class waits, one that fits nowhere would keep the slots of all workers from that
class; so if there are slots for all of its own class it goes to the most room at once.

*Ageing by size.* Large prompts fit only where a large one ended; admitting one elsewhere raises that worker far above
the others. So a large prompt waits for such a place as long as it may. With A above 1 + penalty its bonus exceeds that
cost on the least loaded worker before its cap, up to 24 mean prompts (the curvature keeps larger ones until their cap,
if no place comes); until then the places go to those that waited longest. So the cap of large prompts can be a third of
TargetFit's at no more load spread.

*Huge prompts come together.* While one worker has a huge prompt, another one on another worker makes no step longer. So
what curvature adds is bounded by 6 |y|, such that 1 + penalty + 6 = A: a huge prompt that raises the largest load waits
until its cap, but up to that load it costs 1 + 6 for each token, less than its bonus from .73 of its cap on. When one
goes in, those that have waited nearly as long follow, and the barrier is slow once for all of them. The square alone
would keep each until its own cap, one after another.

*Ageing by how much prompts differ.* A wait competes with differences of misfit, and these are as large as the prompts
differ. Measured by the mean prompt alone, a wait weighs too little where few prompts are large and most are small: the
small ones, more than half of all, wait longest there. So LevelFit's B is 46 times the mean absolute deviation of
prompts, in mean prompts: 48 where prompts have a heavy tail (`heavy_tailed`), 31 where they are bounded (`capped`).

*Short caps.* A wait of `max_wait_s` is long where hardly anybody waits, as below saturation and after a burst, and wins
little there. So LevelFit's cap is 6.3 mean waits, or a fifteenth of `max_wait_s` where that is more. Where answers are
short departures are many, and a place comes soon: there three times the mean answer's time takes the place of that
fifteenth.

*Large pools.* Where more wait than there are slots, whatever the last of them are chosen for, they wait longer than the
mean answer takes; and so many are not needed to find one that fits. So LevelFit chooses among as many as there are
slots in the barrier, those that have waited longest.

*Small pools.* While a pool of W is full, the mean wait is W over the rate of departures, so 6.3 mean waits are short
where W is small beside G, as 512 are for 144 workers. But how soon a place comes for a large prompt does not depend on
W, and how many requests it slows down elsewhere grows with G. So while the pool is full the cap of five mean requests
is at least R G^2 / W, R being the time of the mean answer, and at most `max_wait_s`; that of a smaller one is less in
proportion. Few are so large, so the p99 wait hardly grows. With 16 in the pool for each of eight workers that is less
than 6.3 mean waits.

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
relative slowdown, so that equal loads mean equal step times.

The constants and the caps are in `fit_rules.py`, the choice for scarce slots in `scarce_fit.py`, and here who is asked
when, slack, and what waits for memory.
"""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from mypy_extensions import mypyc_attr

from balanceroute.core.fit_rules import FitRules, TargetFitParams, caps_s, step_alone
from balanceroute.core.policy import Choice, StageTimer
from balanceroute.core.scarce_fit import Loads, OpenWorker, Window, choose_scarce, kv_room
from balanceroute.core.snapshot import ClusterSnapshot, free_slots
from balanceroute.core.tracker import DecodeInstanceState, RequestTracker
from balanceroute.core.types import DOWN, WorkerSpec

MIN_ACTIVE_TO_HOLD = 4  # with fewer requests on some worker the envelope says little: nothing is held back
HOLD_SHARE = 0.1  # of the mean answer's time: where answers are short, a slot that stays empty costs more than it wins


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
            behind = len(pool) - waiting
            alone = snapshot.n_in_barrier == 1 and not self.rules.orders_alone
            if alone or waiting <= len(open_workers) or waiting <= free_slots(open_workers):
                if timer:
                    timer("prepare")
                if alone or (self.rules.sees_memory and short_of_memory(snapshot, open_workers)):
                    holds_all_up = behind > 0 and not alone
                    yield from self._by_memory(snapshot, open_workers, now, pool_is_full, holds_all_up)
                else:
                    may_hold = not (behind or pool_is_full or step_alone(snapshot, self.rules))
                    yield from self._slack(snapshot, open_workers, now, may_hold)
                if timer:
                    timer("stage1")
                if len(pool) > behind:
                    return  # nobody of a later class passes one that waits
                continue
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
        self,
        snapshot: ClusterSnapshot,
        open_workers: list[DecodeInstanceState],
        now: float,
        pool_is_full: bool,
        holds_all_up: bool,
    ) -> Iterator[Choice]:
        """There are slots for all, and perhaps no memory: in waiting order, each to the least load among those where it
        fits; past its cap to the most room, if there is any. `holds_all_up`: as if each were past its cap.
        """
        loads, waiting = snapshot.step_loads(), snapshot.pool.front
        places = [OpenWorker(worker, loads[worker.index]) for worker in open_workers]
        for place in places:
            place.room = kv_room(place.worker, snapshot.means)
        sizes, ready_s = waiting.arrays()
        age = (now - ready_s) / caps_s(sizes, snapshot, self.params, self.rules, pool_is_full)
        most = roomiest(places)
        past_cap = ((age > 1.0) | holds_all_up).tolist()
        for request, late in zip(waiting.head(len(waiting)), past_cap, strict=True):
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


def cost(spec: WorkerSpec, prompt_tokens: float) -> float:
    """What a request of this prompt adds to the load of a worker."""
    return spec.slowdown * (prompt_tokens + spec.request_tokens)


def short_of_memory(snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState]) -> bool:
    """Whether what waits might not fit: all of it together on the worker with the least room. O(G + waiting)."""
    least = min([kv_room(worker, snapshot.means) for worker in open_workers])
    return least < math.inf and least < sum([tracker.prompt_tokens for tracker in snapshot.pool.front])


def roomiest(workers: list[OpenWorker]) -> OpenWorker:
    """The first of those with the most room."""
    return max(workers, key=lambda worker: worker.room)


def load_of(worker: OpenWorker) -> float:
    """What a step costs there."""
    return worker.load
