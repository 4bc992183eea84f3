"""TargetFit and LevelFit: fill every worker to one level, and choose from all that waits. Beyond the paper.

The F-score fills margins up to the envelope. So it takes the largest request that fits, and uses up the sizes that
later margins need. These policies aim at a level T near the mean load instead. A load costs its distance from T on
either side, and more above the envelope, where every worker waits. TargetFit takes the mean load for T. LevelFit, the
default, aims below the mean and has further rules; a rule that is of LevelFit alone says so.

A load is what a step costs (`DecodeInstanceState.step_load`): tokens, and c for each request, times the worker's
slowdown. So equal loads mean equal step times.

A decision serves the front class of the pool, then the next one. There are three situations:

    slack     every request finds a slot: the largest prompt goes to the lightest worker     `_slack`
    memory    every request finds a slot, but perhaps no KV memory (LevelFit)                `_by_memory`
    scarce    more requests wait than slots are free: each slot gets its cheapest request    `scarce_fit.py`

*Ageing.* The longer a request waits, the less its misfit counts (`scarce_fit.py`). Every request has a cap
(`fit_rules.caps_s`); past its cap it goes before every younger one.

*Holding back.* In slack a request that would raise the envelope may be held back beside a free slot: a lighter worker
is often one departure away. It is held for `hold_s`, or for `HOLD_SHARE` of the time that the mean answer takes where
that is less; a large prompt up to 6 times as long (`WorkloadMeans.patience_factor`). Nothing is held back while a
worker has fewer than `MIN_ACTIVE_TO_HOLD` requests, or with LevelFit less than half of its slots in use: below that the
cluster keeps up anyway, and a wait gains nothing. Nor is anything held back in four cases: the pool is full, and what
is held would keep out what could use the slots; a later class waits; no worker waits for another (LevelFit); that share
of the mean answer's time is less than a step, so that even the shortest hold, until the next step, would be longer.

*KV memory* (LevelFit). A worker whose KV memory is known gets only requests that fit it. One that does not fit would
wait on its slot inside the engine, and so would all later ones. A smaller request takes the slot, or the slot stays
free until a request leaves. A worker on which nothing runs takes any first request, as that fits no better elsewhere.
Past its cap a request goes to the worker with the most room all the same; past twice its cap a scarce decision sends it
to any worker that has some room. A request that fits nowhere would keep all slots from a later class. So if a later
class waits and every request of this class finds a slot, it goes to the most room at once.

*Slower workers* (LevelFit) keep slots free that cost more than they serve, where c is known or prompts are alike
(`scarce_fit.py`), and so do workers with many more slots than most. In slack, and where memory is short, a request
passes by those where it would. It goes to the one of the others that is lightest with it: of two idle ones to the
faster.

*One worker alone* waits for nobody (LevelFit): requests go in waiting order, as far as memory goes. One that does not
fit holds up later classes there, as it would inside the engine.
"""

import math
from collections.abc import Generator, Iterator
from heapq import heapify, heappop, heappush

from mypy_extensions import mypyc_attr

from balanceroute.core.fit_rules import FitRules, TargetFitParams, caps_s, step_alone
from balanceroute.core.policy import Choice, StageTimer
from balanceroute.core.scarce_fit import Loads, OpenWorker, SlowerWorkers, Window, choose_scarce, cost, kv_memory
from balanceroute.core.snapshot import ClusterSnapshot, free_slots
from balanceroute.core.tracker import DecodeInstanceState, RequestTracker
from balanceroute.core.types import DOWN

MIN_ACTIVE_TO_HOLD = 4  # requests; nothing is held back while a worker has fewer, as the envelope then says little
HOLD_SHARE = 0.1  # of the mean answer's time: where answers are short, an empty slot costs more than it gains


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
            open_workers = worth_filling(snapshot, self.rules)
            if not open_workers:
                return
            waiting = len(pool.front)
            behind = len(pool) - waiting
            alone = snapshot.n_in_barrier == 1 and not self.rules.orders_alone
            if alone or waiting <= len(open_workers) or waiting <= free_slots(open_workers):
                if timer:
                    timer("prepare")
                if alone or (self.rules.sees_memory and short_of_memory(snapshot, open_workers)):
                    force = behind > 0 and not alone
                    yield from self._by_memory(snapshot, open_workers, now, pool_is_full, force)
                else:
                    may_hold = not (behind or pool_is_full or step_alone(snapshot, self.rules))
                    yield from self._slack(snapshot, open_workers, now, may_hold)
                if timer:
                    timer("stage1")
                if len(pool) > behind:
                    return  # no later class passes a request that waits
            else:
                slots_stay_free = yield from self._scarce(snapshot, open_workers, now, pool_is_full)
                if slots_stay_free:
                    return

    def fillable(self, snapshot: ClusterSnapshot) -> list[DecodeInstanceState]:
        """Workers with a free slot that something may yet take; the pool is not empty."""
        return worth_filling(snapshot, self.rules)

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """When the first request that is held back in slack must go.

        What waits for memory needs no such time: it is looked at again when a request leaves, or when a worker reports
        what others hold there.
        """
        if not self.params.hold_s or not 0 < len(snapshot.pool) <= snapshot.free_slots:
            return math.inf
        hold_s = self.hold_s(snapshot)
        held_until_s = [held_until(request, hold_s, snapshot) for request in snapshot.pool]
        return min([until_s for until_s in held_until_s if until_s > now], default=math.inf)

    def hold_s(self, snapshot: ClusterSnapshot) -> float:
        """How long a usual request may be held back beside a free slot: not at all while no bound is known. O(G)."""
        if HOLD_SHARE * snapshot.mean_answer_steps() < 1.0:
            return 0.0
        hold_s = min(self.params.hold_s, HOLD_SHARE * snapshot.mean_stay_s())
        return hold_s if hold_s < math.inf else 0.0

    def _scarce(
        self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], now: float, pool_is_full: bool
    ) -> Generator[Choice, None, bool]:
        """Fill the slots from the front class. Returns whether slots stay free because nothing fits their memory."""
        timer = self.stage_timer
        loads = Loads(snapshot, open_workers, self.rules)
        window = Window(snapshot, now, self.params, self.rules, pool_is_full)
        if window.expected:
            loads.make_room(snapshot, window)
        if timer:
            timer("prepare")
        for fit in choose_scarce(loads, window):
            stage = 0 if window.age[fit.position] > 1.0 else 2
            yield Choice(window.trackers[fit.position], fit.worker.worker, stage, -fit.cost)
        if timer:
            timer("stage2")
        return loads.left

    def _slack(
        self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], now: float, may_hold: bool
    ) -> Iterator[Choice]:
        """The largest prompt to the lightest worker, again and again. `may_hold`: see "Holding back"."""
        workers, loads = snapshot.workers, snapshot.step_loads()
        envelope = max(snapshot.in_barrier(loads))
        lightest = [(loads[worker.index], worker.index) for worker in open_workers]
        heapify(lightest)
        waiting, busy = snapshot.pool.front, False
        hold_s = self.hold_s(snapshot) if may_hold else 0.0
        slower = SlowerWorkers(snapshot, self.rules)
        for request in waiting.by_size(len(waiting), descending=True):
            place = lightest[0]
            if slower.matter:
                tokens = request.prompt_tokens
                worth = [each for each in lightest if slower.may_take(workers[each[1]].spec, each[0], tokens, envelope)]
                if not worth:
                    continue  # it waits for a departure
                place = min([(each[0] + cost(workers[each[1]].spec, tokens), each) for each in worth])[1]
            load, index = place
            worker = workers[index]
            load += cost(worker.spec, request.prompt_tokens)
            if hold_s and load > envelope:
                busy = busy or self._busy(workers)  # once they are, they stay so: a decision only adds requests
                if busy and now < held_until(request, hold_s, snapshot):
                    continue
            yield Choice(request, worker, 1, min(0.0, envelope - load))
            envelope = max(envelope, load)
            if place is lightest[0]:
                heappop(lightest)
            else:
                lightest.remove(place)
                heapify(lightest)
            if len(worker.active) < worker.own_slots:
                heappush(lightest, (load, index))

    def _by_memory(
        self,
        snapshot: ClusterSnapshot,
        open_workers: list[DecodeInstanceState],
        now: float,
        pool_is_full: bool,
        force: bool,
    ) -> Iterator[Choice]:
        """In waiting order, each request to the worker that is lightest with it (`SlowerWorkers`), if it fits there.

        A request that fits none of these waits, unless it is past its cap: then it goes to the one with the most room,
        if there is any. `force`: treat every request as past its cap.
        """
        loads, waiting = snapshot.step_loads(), snapshot.pool.front
        places = [OpenWorker(worker, loads[worker.index]) for worker in open_workers]
        for place in places:
            place.see_memory(snapshot.means)
        sizes, ready_s = waiting.arrays()
        age = (now - ready_s) / caps_s(sizes, snapshot, self.params, self.rules, pool_is_full)
        past_cap = ((age > 1.0) | force).tolist()
        slower = SlowerWorkers(snapshot, self.rules)
        envelope = max(snapshot.in_barrier(loads))
        for request, late in zip(waiting.head(len(waiting)), past_cap, strict=True):
            tokens, worth = request.prompt_tokens, places
            if slower.matter:
                worth = [each for each in places if slower.may_take(each.spec, each.load, tokens, envelope)]
                if not worth:
                    continue  # it waits for a departure
            fitting = [each for each in worth if tokens <= each.room]
            if fitting:
                place = lightest_with(fitting, tokens)
            else:
                place = roomiest(worth)
                if not late or place.room <= 0.0:
                    continue
            yield Choice(request, place.worker, 1, 0.0)
            place.load += cost(place.spec, tokens)
            envelope = max(envelope, place.load)
            place.fill(tokens)
            place.occupy()
            if place.active >= place.most:
                places.remove(place)
                if not places:
                    return

    def _busy(self, workers: list[DecodeInstanceState]) -> bool:
        """Whether every worker in the barrier runs enough requests for holding back to gain anything."""
        share = self.rules.hold_from
        for worker in workers:
            if worker.state is not DOWN and worker.occupied < max(MIN_ACTIVE_TO_HOLD, share * worker.spec.slots):
                return False
        return True


def held_until(request: RequestTracker, hold_s: float, snapshot: ClusterSnapshot) -> float:
    """Until when a request may be held back, seconds; `hold_s`: how long a usual one may be."""
    return request.ready_s + hold_s * snapshot.means.patience_factor(request.prompt_tokens)


def worth_filling(snapshot: ClusterSnapshot, rules: FitRules) -> list[DecodeInstanceState]:
    """Workers with a free slot, without slower ones where no request is worth its cost (`SlowerWorkers`)."""
    open_workers, slower = snapshot.open_workers(), SlowerWorkers(snapshot, rules)
    if not open_workers or not slower.matter:
        return open_workers
    envelope, smallest = snapshot.envelope, min([tracker.prompt_tokens for tracker in snapshot.pool.front])
    return [worker for worker in open_workers if slower.may_take(worker.spec, worker.step_load, smallest, envelope)]


def short_of_memory(snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState]) -> bool:
    """Whether some request might not fit: all that wait together exceed the least room of a worker. O(G + waiting)."""
    least = min([kv_memory(worker, snapshot.means) - worker.total_load for worker in open_workers])
    return least < math.inf and least < sum([tracker.prompt_tokens for tracker in snapshot.pool.front])


def lightest_with(workers: list[OpenWorker], prompt_tokens: int) -> OpenWorker:
    """The first of those that are lightest once they have the prompt."""
    return min(workers, key=lambda worker: worker.load + cost(worker.spec, prompt_tokens))


def roomiest(workers: list[OpenWorker]) -> OpenWorker:
    """The first of those with the most room."""
    return max(workers, key=lambda worker: worker.room)
