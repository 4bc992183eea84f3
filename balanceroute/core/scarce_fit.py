"""The scarce decision of TargetFit and LevelFit: more requests wait than slots are free.

There are as many rounds as free slots. In each the emptiest worker (requests over slots; tie: least load) takes the
request with the least cost

    |x - T| + penalty * max(0, x - max L) - bonus,      x = L_g + slowdown_g (s_i + c_g)

When two or more were chosen, each is taken out and chosen again, given all the others (`swap_passes` times): the first
choices were made before it was known what the last slots would get.

The bonus is for waiting. With u = wait / cap (`fit_rules.caps_s`) it is u^2 (A (s + c) + B (mean prompt + c)), so that
no request waits long for a perfect fit. It is measured by what requests cost, c being the mean over the workers: where
c is several times a prompt, a token of misfit makes the step longer by so much less, and a wait for the right prompt
gains as little. Past its cap a request goes before every younger one, because 1e13 u exceeds any load.

`Loads` are the workers during one decision, `Window` the requests; both include what was chosen so far.
`choose_scarce` chooses. Nothing of the snapshot is changed.

LevelFit adds the following; `FitRules` has the constants.

*Level below the mean.* A departure takes away a prompt and its answer; an admission adds a prompt alone. Between two
departures a worker grows by one token per request and step, by the mean answer o in all. If each load came back to the
mean, the loads would rise by that much from one departure to the next; only large prompts could sustain that, and the
pool would run out of them. So LevelFit comes back to where the worker stood after its last departure. The others are,
on average, half way through their growth, and relative to the mean that is T = mean L - slowdown_g (1 - 1/G) o. Until
the first answer has ended T is the mean.

*Stock.* If the level is still too high, waiting prompts become smaller than arriving ones, and larger if it is too low.
T falls by `stock_share` times the difference, or rises by it, though never above max L. A prompt above `LARGE` mean
ones counts as that many. A small pool is a weak sample, so the correction is bounded: with it T is below the mean by
no more than half a mean prompt, or twice the growth where that is more, and it raises T by no more than it may lower
it. Where answers are short the growth is little and departures are many. A bound of the growth alone would not preserve
the pool's mix of sizes, and all prompts left in it would be admitted at once when slots are plenty, as after an outage.

*Small prompts with long answers.* Over its life a request holds its prompt and half of its answer on average. Where
answers have nothing to do with prompts that half is the same for all, and where large prompts have the longer answers
the order of prompts is the order of both. Where small prompts have the longer ones (`WorkloadMeans.answer_slope`), the
prompt alone misleads: a worker above the others would get the smallest prompts, be filled further by their answers, and
have fewer departures than the others to be levelled by. So there a request also costs `answer_share` times what its
answer is expected to have beyond the mean one. Where prompts are nearly alike a line through their answers says nothing
of one that is far smaller, so no answer counts as more than `MOST_ANSWERS` mean ones longer.

*Cost outside the present range of loads.* Between the least and the largest load, a distance from the level does not
change the load spread. Below the least it does, as above the largest, though no other worker waits for it. So each
token below the least load of the other workers (or below T, where that is less) costs `underflow_penalty`. The square
of the distance costs `curvature` / (mean prompt + c): one large misfit is worse than two of half its size, because the
largest misfit sets the load spread.

*Large prompts wait for a place.* A large prompt fits only where a large one ended; elsewhere it raises a worker far
above the others. So it waits for such a place as long as it may. With A above 1 + penalty its bonus exceeds that cost
on the least loaded worker before its cap, up to 24 mean prompts (the curvature keeps larger ones until their cap, if no
place comes). Until then the places go to those that waited longest.

*Huge prompts come together.* While one worker has a huge prompt, another one on another worker makes no step longer. So
the square adds at most `most_slope` = 6 for each token, such that 1 + penalty + 6 = A; it does so from 24 mean requests
on. A huge prompt that raises the largest load waits until its cap, but up to that load a token costs 1 + 6, less than
its bonus from .73 of its cap on. When one goes in, those that have waited nearly as long follow, and the barrier is
slow once for all of them. The square alone would keep each until its own cap, one after another.

*Room for huge prompts.* One that reaches its cap before its place comes raises its worker far above the others, and all
of them wait for it. A worker that is as far below the others waits alone, which costs G - 1 times less. So shortly
before the cap of a prompt of `room_from` mean requests, the lightest worker makes room: it counts as if it had
`room_share` of what the prompt costs already. So it gets the smallest requests, while the level of the others stays.
Once so much of the prompt fits below the largest load, it goes there, or to any other worker where so much of it fits;
where nothing else waits, at once. A departure makes room for a mean request, so room for k of them takes k mean
answers' times over the slots; `room_lead` times that before its cap it begins. Room for all of a prompt would serve the
most tokens, for half of it would give the least load spread; three quarters do nearly as well in both. From its cap on
the prompt goes to its own worker, room or not; from `room_caps` caps on, anywhere.

*Bonus by how much prompts differ.* A wait competes with differences of misfit, and these are as large as the prompts
differ. Measured by the mean prompt alone, a wait weighs too little where few prompts are large and most are small: the
small ones, more than half of all, wait longest there. So B is `deviation_bonus` times the mean absolute deviation of
prompts, in mean prompts: 48 where prompts have a heavy tail (`heavy_tailed`), 31 where they are bounded (`capped`).

*Long answers.* Where answers are longer than prompts, the distance from the level is made of answers, and the choice
among prompts changes it by little. Measured by the mean prompt, the square of the distance would exceed any bonus, and
small differences of size would decide who waits for a minute. So in the square and in the factor of B the mean answer
stands for the mean request (mean prompt + c) where it is larger; not in caps, nor in what is huge.

*Slower workers.* Small prompts keep a slower worker level with the others, but not where each request costs c beside
its tokens, nor, c unknown, where prompts are alike (`ALIKE`), as then none are small. With all slots in use such a
worker costs `slowdown` times as much as the others do, and all wait for it. So it is filled to a level only. Where all
workers are filled to a level L, or until no slot is free, a step serves the sum of min(slots, L / cost) requests, and
takes as long as L and what no load changes, `STEADY_TOKENS`. The level is the one that serves most in that time, of
those where the others, or some slower ones too, have all slots in use. If one of the others is above it, no step is
shorter for a slower one that stays below that. A request costs what those that run hold on average, but at least a
mean prompt and half an answer. A worker takes whole requests, so it may pass the level by half of one.
Where c is known, loads say more of what a step takes. One request more among the N that run yields 1/N more tokens, so
it must not make the step longer by more than 1/N; and what no load changes takes up to twice as long as the loads do.
So there a request must not raise the largest load by more than `most_rise` = 3 times its Nth part either.
A worker counts as slower only beside its own barrier group, as no others wait for it, and only if its load with all
slots in use is above the median there: where most are slower than a few, to leave slots of most free loses more than
longer steps do. So one with many more slots than most counts as slower, too; but if its requests cost no more than
theirs, only where the level leaves some of its slots free, as what runs there may be above the level by chance.

*Large pools.* Where more wait than there are slots, whatever the last of them are chosen for, they wait longer than the
mean answer takes; and so many are not needed to find one that fits. So a decision chooses among as many as there are
slots in the barrier, and `MOST_WINDOW` at most, the first in waiting order.
"""

import math
from dataclasses import dataclass

import numpy as np

from balanceroute.arrays import FloatArray
from balanceroute.core.fit_rules import MIN_CAP_S, FitRules, TargetFitParams, caps_s, step_alone
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import DecodeInstanceState
from balanceroute.core.types import DOWN, UP, WorkerSpec
from balanceroute.core.workload_means import WorkloadMeans

OVERDUE_BONUS = 1e13
MOST_WINDOW = 512  # of a class, in waiting order, that a decision chooses from
GROWTH_ANSWERS = 2.0  # mean answers of KV memory that are kept free for growth: see `kv_memory`
MOST_GROWTH_SHARE = 1 / 32  # of the KV memory: no more is kept free
MOST_ANSWERS = 10.0  # mean answers by which one is expected to be longer at most; few are where prompts differ much
ALIKE = 0.3  # of what a request holds on average: prompts that differ by less, on average, are alike
STEADY_TOKENS = 208_000.0  # whose time is as long as what no load changes: b/a of the reference step
LARGE = 5.0  # mean prompts: a larger one counts for no more in the stock, as it waits there for its place


def kv_memory(worker: DecodeInstanceState, means: WorkloadMeans) -> float:
    """How many tokens of KV may be on the worker beside what these grow by; infinite where that is not known.

    What runs grows by a mean answer from one departure to the next; twice that is kept free, but at most 1/32.
    """
    capacity_tokens = worker.kv_capacity_tokens
    if not capacity_tokens:
        return math.inf
    return capacity_tokens - min(GROWTH_ANSWERS * means.answer_tokens, capacity_tokens * MOST_GROWTH_SHARE)


def kv_room(worker: DecodeInstanceState, means: WorkloadMeans) -> float:
    """How large a prompt may be to fit the worker's KV memory beside what is there, tokens.

    Infinite where nothing runs: what does not fit there fits nowhere.
    """
    return kv_memory(worker, means) - worker.total_load if worker.occupied else math.inf


def cost(spec: WorkerSpec, prompt_tokens: float) -> float:
    """What a request of this prompt adds to the load of a worker."""
    return spec.slowdown * (prompt_tokens + spec.request_tokens)


class SlowerWorkers:
    """Up to which load slower workers are filled (see above). O(G log G) to make.

    Attributes: `matter`, whether any is filled to less than its slots. None is where a full step of none takes longer
    than the median of its barrier group, no worker waits for another, or small prompts keep it level.
    """

    def __init__(self, snapshot: ClusterSnapshot, rules: FitRules) -> None:
        means, knows_c = snapshot.means, snapshot.request_tokens > 0.0
        self._half_answer = 0.5 * means.answer_tokens
        # by barrier group: the median slowdown, the median load with all slots in use, and the level
        self._levels: dict[str, tuple[float, float, float]] = {}
        self._held, self._most_rise, self.matter = 0.0, math.inf, False
        if snapshot.uniform or rules.most_rise == math.inf or not snapshot.shared_barrier:
            return
        if not knows_c and means.deviation_tokens >= ALIKE * (means.prompt_tokens + self._half_answer):
            return
        groups: dict[str, list[DecodeInstanceState]] = {}
        for worker in snapshot.up:
            groups.setdefault(worker.spec.barrier_group, []).append(worker)
        if len(groups) > 1:
            groups.pop("", None)  # beside named groups a worker without one steps alone
        running = sum([worker.occupied for worker in snapshot.up])
        self._held = sum([worker.total_load for worker in snapshot.up]) / max(1, running)
        self._held = max(self._held, means.prompt_tokens + self._half_answer)  # while what runs is young
        for group, workers in groups.items():
            loads = sorted([self._full(worker.spec) for worker in workers])
            usual = loads[(len(loads) - 1) // 2]
            if loads[-1] > usual:
                slowdowns = sorted([worker.spec.slowdown for worker in workers])
                self._levels[group] = slowdowns[(len(slowdowns) - 1) // 2], usual, self._level(workers, usual)
        self.matter = bool(self._levels)
        if knows_c:
            in_barrier = [worker.occupied for worker in snapshot.workers if worker.state is not DOWN]
            self._most_rise = rules.most_rise / max(1, sum(in_barrier))

    def _full(self, spec: WorkerSpec) -> float:
        """The load of such a worker with all slots in use."""
        return spec.slots * cost(spec, self._held)

    def _level(self, workers: list[DecodeInstanceState], usual: float) -> float:
        """The level that serves most in time; the largest load of a worker that is not slower where one is above it."""
        costs = [(max(1.0, cost(worker.spec, self._held)), worker.spec.slots) for worker in workers]
        others = [worker.step_load for worker in workers if self._full(worker.spec) <= usual]
        level, full, per_load, most = usual, 0, math.fsum([1.0 / each for each, _ in costs]), 0.0
        for load, each, slots in sorted([(slots * each, each, slots) for each, slots in costs]):
            full += slots  # requests on workers that have no slot free at this level
            per_load -= 1.0 / each  # requests on the others, over the level
            served = (full + load * per_load) / (load + STEADY_TOKENS)
            if load >= usual and served > most:
                level, most = load, served
        return max(level, max(others))

    def may_take(self, spec: WorkerSpec, load: float, prompt_tokens: float, envelope: float) -> bool:
        """Whether a prompt may go to a worker of this load, where the largest load is `envelope`."""
        found = self._levels.get(spec.barrier_group)
        if found is None:
            return True
        usual_slowdown, usual, level = found
        if self._full(spec) <= (usual if spec.slowdown > usual_slowdown else level):
            return True
        limit = level + 0.5 * cost(spec, self._held)
        if self._most_rise < math.inf:
            limit = min(limit, envelope + self._most_rise * envelope)
        return load + cost(spec, prompt_tokens + self._half_answer) <= limit


class OpenWorker:
    """A worker that had a free slot when a scarce decision began, and what the decision makes of it.

    Attributes: `load`, what a step costs (L_g); `active`, requests on it (n_g), `most`, how many there may be, and
    `share`, how many there are over its slots; `room`, see `kv_room`, and `roomiest`, whether no worker had more;
    `expects`, the position of the huge request that it makes room for, or -1, and `kept_free`, that room, a load.
    """

    def __init__(self, worker: DecodeInstanceState, load: float) -> None:
        self.worker, self.spec, self.load = worker, worker.spec, load
        self.room, self.roomiest, self._memory = math.inf, True, math.inf
        self.active = worker.occupied
        self.most = worker.own_slots + worker.foreign_requests
        self.share = self.active / self.spec.slots
        self.expects, self.kept_free = -1, 0.0

    def see_memory(self, means: WorkloadMeans) -> None:
        """Give it only what fits its KV memory."""
        self.room, self._memory = kv_room(self.worker, means), kv_memory(self.worker, means)

    def fill(self, prompt_tokens: float) -> None:
        """A prompt takes room; the first one of an idle worker leaves the rest of its memory."""
        self.room = min(self.room, self._memory) - prompt_tokens

    def occupy(self) -> None:
        """One slot less."""
        self.active += 1
        self.share = self.active / self.spec.slots


class Loads:
    """The workers while a scarce decision is made; those without a free slot do not change and are summed once.

    Attributes: `changing`, those that had a free slot; `open`, those that have one; `left`, whether some keep theirs
    because nothing fits.
    """

    def __init__(self, snapshot: ClusterSnapshot, open_workers: list[DecodeInstanceState], rules: FitRules) -> None:
        fixed = snapshot.step_loads()
        self.changing = [OpenWorker(worker, fixed[worker.index]) for worker in open_workers]
        self.left = False
        if rules.sees_memory:
            most = max([kv_room(worker, snapshot.means) for worker in snapshot.workers if worker.state is UP])
            for each in self.changing:
                each.see_memory(snapshot.means)
                each.roomiest = each.room == most
        self._slower = SlowerWorkers(snapshot, rules)
        self.open = self.changing.copy()
        for index in sorted([worker.index for worker in open_workers] + snapshot.down, reverse=True):
            del fixed[index]
        self._count = len(fixed) + len(open_workers)
        self._fixed_sum = math.fsum(fixed)
        self._fixed_max, self._fixed_min = float(max(fixed, default=0.0)), float(min(fixed, default=math.inf))

    def make_room(self, snapshot: ClusterSnapshot, window: "Window") -> None:
        """Let the lightest workers make room for the requests that the window expects, one each."""
        loads = snapshot.step_loads()
        changing = {each.worker.index: each for each in self.changing}
        lightest = sorted([(loads[each.index], each.index) for each in snapshot.workers if each.state is UP])
        for (load, index), position in zip(lightest, window.expected):  # noqa: B905 (the shorter one decides)
            kept_free = window.rules.room_share * window.added(snapshot.workers[index].spec)[position]
            loads[index] = load + kept_free
            if index in changing:
                changing[index].expects, changing[index].kept_free = position, kept_free
        fixed = [load for index, load in enumerate(loads) if index not in changing and index not in snapshot.down]
        self._fixed_sum, self._fixed_min = math.fsum(fixed), float(min(fixed, default=math.inf))

    def around(self, worker: OpenWorker) -> tuple[float, float, float]:
        """Mean and largest load of the barrier, and the least of all but `worker`. O(workers that had a free slot).

        Room that is kept free counts in the mean and in the least load.
        """
        total, envelope, least = 0.0, self._fixed_max, self._fixed_min
        for each in self.changing:
            load = each.load
            if load > envelope:
                envelope = load
            load += each.kept_free
            total += load
            if load < least and each is not worker:
                least = load
        return (self._fixed_sum + total) / self._count, envelope, least

    def too_slow(self, worker: OpenWorker, window: "Window") -> bool:
        """Whether a request here slows the others down by more than it serves ("Slower workers")."""
        if not self._slower.matter:
            return False
        _, envelope, _ = self.around(worker)
        return not self._slower.may_take(worker.spec, worker.load, window.smallest, envelope)

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
        """Leave its slots free: nothing fits its memory."""
        self.left = True
        self.open.remove(worker)


class Window:
    """The requests that a scarce decision chooses from, all of one class, and the bonus of each for waiting.

    Attributes: `trackers`, in waiting order; `prompts`, their tokens, and `smallest`, the least of these, used or not;
    `age`, u = wait / cap, shape (W,), with a shorter cap where workers step alone; `drop`, how far below the mean load
    the level is, tokens; `expected`, the positions of huge requests that room is made for, the most urgent first.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, now: float, params: TargetFitParams, rules: FitRules, pool_is_full: bool
    ) -> None:
        means, waiting = snapshot.means, snapshot.pool.front
        self.rules = rules
        self._mean_prompt = means.prompt_tokens or 1.0
        self._request_tokens = snapshot.request_tokens
        self._mean_request = self._mean_prompt + self._request_tokens
        self._unit = max(self._mean_request, means.answer_tokens) if rules.sees_answers else self._mean_request
        self._curvature = rules.curvature / self._unit
        count = int(min(MOST_WINDOW, rules.window_per_slot * snapshot.slots))
        self.trackers = waiting.head(count)
        sizes, ready_s = waiting.arrays()
        self._sizes: FloatArray = sizes[:count]
        wait_s = now - ready_s[:count]
        self._late: FloatArray = wait_s / caps_s(self._sizes, snapshot, params, rules, pool_is_full)
        self.age = self._late
        if step_alone(snapshot, rules) and params.max_wait_s < math.inf:
            self.age = np.maximum(self._late, wait_s / max(rules.alone_waits * snapshot.mean_wait_s(), MIN_CAP_S))
        self.drop = self._level_drop(means, snapshot.n_in_barrier)
        self._held = self._held_tokens(means)
        self.prompts: list[float] = self._sizes.tolist()
        self._largest = float(np.maximum.reduce(self._sizes))
        self.smallest, self._latest = min(self.prompts), float(np.maximum.reduce(self._late))
        self.expected = self._expected(snapshot, wait_s)
        self._bonus: list[float] = self._bonuses(means).tolist()
        self._available: list[float] = self._bonus.copy()  # -inf where the request is used
        self._added: dict[tuple[float, int], list[float]] = {}  # (slowdown, c) -> what each adds to a load

    def _expected(self, snapshot: ClusterSnapshot, wait_s: FloatArray) -> list[int]:
        """See "Room for huge prompts": none before the answers' time is known, or where workers step alone."""
        rules, stay_s = self.rules, snapshot.mean_stay_s()
        huge = rules.room_from * self._mean_request - self._request_tokens
        if self._largest < huge or stay_s == math.inf or not snapshot.shared_barrier:
            return []
        departure_s = stay_s * snapshot.n_in_barrier / snapshot.slots
        urgent: list[tuple[float, int]] = []
        positions: list[int] = np.flatnonzero((self._sizes >= huge) & (self._late > 0.0)).tolist()
        for position in positions:
            waited_s = float(wait_s[position])
            left_s = waited_s / float(self._late[position]) - waited_s
            room = rules.room_share * (self.prompts[position] + self._request_tokens)
            early_s = rules.room_lead * departure_s * room / self._mean_request - left_s
            if early_s > 0.0:
                urgent.append((-early_s, position))
        most = max(1, int(rules.room_workers * snapshot.n_in_barrier))
        return [position for _, position in sorted(urgent)[:most]]

    def _bonuses(self, means: WorkloadMeans) -> FloatArray:
        """u^2 (A (s + c) + B (mean prompt + c)), and `OVERDUE_BONUS` u past the cap; tokens, shape (W,)."""
        rules = self.rules
        bonus: FloatArray = self._sizes + self._request_tokens
        bonus *= rules.size_bonus
        bonus += (rules.mean_bonus + rules.deviation_bonus * means.deviation_tokens / self._mean_prompt) * self._unit
        bonus *= self.age * self.age
        if np.maximum.reduce(self.age) > 1.0:
            bonus += np.where(self.age > 1.0, OVERDUE_BONUS * self.age, 0.0)
        return bonus

    def _level_drop(self, means: WorkloadMeans, n_in_barrier: int) -> float:
        """How far below the mean load the level is, tokens: the growth, and the correction by the stock."""
        rules = self.rules
        growth = rules.growth_share * means.answer_tokens * (1.0 - 1.0 / n_in_barrier)
        if not growth:
            return growth
        stock = float(np.add.reduce(np.minimum(self._sizes, LARGE * self._mean_prompt))) / len(self._sizes)
        most = max(growth, self._mean_prompt / 2.0 - growth)
        return growth + min(most, max(-most, rules.stock_share * (self._mean_prompt - stock)))

    def _held_tokens(self, means: WorkloadMeans) -> FloatArray:
        """What each request holds, prompt and the share of its answer beyond the mean one; tokens, shape (W,)."""
        slope = self.rules.answer_share and means.answer_slope()
        if not slope:
            return self._sizes
        more: FloatArray = slope * (np.log(np.maximum(self._sizes, 1.0)) - means.log_prompt)
        np.clip(more, -means.answer_tokens, MOST_ANSWERS * means.answer_tokens, out=more)
        return self._sizes + self.rules.answer_share * more

    def added(self, spec: WorkerSpec) -> list[float]:
        """What each request adds to the load of such a worker: `cost`, by what it holds over its life."""
        kind = (spec.slowdown, spec.request_tokens)
        added = self._added.get(kind)
        if added is None:
            added = self._added[kind] = ((self._held + spec.request_tokens) * spec.slowdown).tolist()
        return added

    def may_fit(self, worker: OpenWorker) -> bool:
        """False where no request fits its memory, used or not: so on nearly all workers while memory is short."""
        return worker.room >= self.smallest or self._latest > _caps_until_forced(worker)

    def _fitting(self, worker: OpenWorker) -> list[float]:
        """As `_available`, of those that fit the worker's memory."""
        room = worker.room
        if room >= self._largest:
            return self._available
        fits = (self._sizes <= room) | (self._late > _caps_until_forced(worker))
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

    def take_expected(self, worker: OpenWorker, envelope: float) -> int:
        """Use the largest of the expected requests that has room enough on this worker: its position, or -1."""
        best, largest, added = -1, 0.0, self.added(worker.spec)
        for position in self.expected:
            adds, prompt = added[position], self.prompts[position]
            fits = worker.load + self.rules.room_share * adds <= envelope and prompt <= worker.room
            if fits and prompt > largest and self._available[position] != -math.inf:
                best, largest = position, prompt
        if best >= 0:
            self._available[best] = -math.inf
        return best

    def hide_expected(self, worker: OpenWorker) -> list[int]:
        """Use, for now, the expected requests that are not to go to this worker; returns their positions."""
        hidden: list[int] = []
        for position in self.expected:
            late = float(self._late[position])
            stays = late <= 1.0 if position == worker.expects else late <= self.rules.room_caps
            if stays and self._available[position] != -math.inf:
                self._available[position] = -math.inf
                hidden.append(position)
        return hidden

    def put_back(self, position: int) -> None:
        """The request is not used after all."""
        self._available[position] = self._bonus[position]


def _caps_until_forced(worker: OpenWorker) -> float:
    """After how many caps of waiting a request goes to this worker though it does not fit its memory.

    One where no worker has more room, else two. It then waits in the engine, and so does all that comes after it: a
    worker without room gets no more such requests.
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


def choose_scarce(loads: Loads, window: Window) -> list[Fit]:
    """Choose a request for each free slot; then `swap_passes` times each again, given all the others."""
    fits: list[Fit] = []
    while loads.open and len(fits) < len(window.trackers):
        worker = loads.emptiest()
        fit = None if loads.too_slow(worker, window) else _fit(worker, loads, window)
        if fit is None:
            loads.leave(worker)
            continue
        fits.append(fit)
        loads.occupy(worker)
    settled = 1  # choices in a row that hold, given all the others as they are now; the last one made does
    for index in list(range(len(fits))) * window.rules.swap_passes:
        if settled == len(fits):
            break  # all hold: another choice would change nothing
        fit = fits[index]
        if fit.worker.room < 0.0:  # it got a request that does not fit, so what else it got might not fit again
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
    position, price = _choice(worker, window, level, envelope, min(level, least))
    if position < 0:
        return None
    worker.load += window.added(spec)[position]
    worker.fill(window.prompts[position])
    return Fit(worker, position, price)


def _choice(worker: OpenWorker, window: Window, level: float, envelope: float, least: float) -> tuple[int, float]:
    """`Window.take` with room for huge requests: one that has its room goes first; until then none goes elsewhere."""
    if not window.expected:
        return window.take(worker, level, envelope, least)
    position = window.take_expected(worker, envelope)
    if position >= 0:
        worker.kept_free = 0.0
        return position, 0.0
    hidden = window.hide_expected(worker)
    worker.load += worker.kept_free
    position, price = window.take(worker, level, envelope, least)
    worker.load -= worker.kept_free
    for each in hidden:
        window.put_back(each)
    if position < 0:  # nothing else waits
        position, price = window.take(worker, level, envelope, least)
    return position, price
