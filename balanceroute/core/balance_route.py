"""BR-0 and BR-H: the paper's two-stage admission (Algorithms 1 and 2), with every knob that the paper leaves open.

Classes of priority are served one after the other, each by the two stages with the class alone for a pool ("the whole
pool" below). In a class requests that have waited beyond their patience come first, each to the worker where its
F-score is highest. Then, stage 1 (abundant capacity): while more than `s_greedy` slots are free, the worker with the
most free slots (tie: smallest load) takes the single request of the whole pool with the largest F. Stage 2 (scarce):
the worker with the largest (free slots, least margin over the horizon) takes the best subset of the first `r_max`
candidates; when nothing scores above zero, the single best request goes anyway, so that no slot idles beside a waiting
request.

Where everything that waits fits into the free slots, choosing workers by free slots balances requests instead of load;
`slack_placement: load` then gives the largest prompt to the lightest worker until the pool is empty.

Where some workers are slower, loads are in tokens of a worker of slowdown 1, and so is what rises above the envelope;
a worker's margins are divided by its slowdown, and the score speaks of the tokens that it is given. Where a request
costs c tokens beside its own, each counts c more.

BR-0 is BR-H with H = 0, alpha = 1, beta = G. The two share this code; only the margins differ: one number per worker,
or a row of H + 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from mypy_extensions import mypyc_attr

from balanceroute.arrays import FloatArray
from balanceroute.core.fscore import HorizonWeights, Score, present_score, present_value
from balanceroute.core.policy import Choice, StageTimer
from balanceroute.core.pool import WaitingClass
from balanceroute.core.projection import LoadArray
from balanceroute.core.snapshot import ClusterSnapshot, free_slots
from balanceroute.core.subset import best_subset
from balanceroute.core.tracker import DecodeInstanceState, RequestTracker

HORIZON_SHARE = 1 / 6  # of the mean answer: 5 steps for answers of 28 tokens, 80 from 480 on


@dataclass(frozen=True, slots=True)
class BalanceRouteParams:
    """The knobs; `core/knobs.py` has their defaults.

    `beta` None means G, the number of decode workers in the barrier (BR-0's own penalty). `horizon_steps` 0 is BR-0;
    with `horizon_auto` it is the most steps that are looked ahead, and answers decide how many are (`horizon_of`).
    """

    horizon_steps: int
    alpha: float
    beta: float | None
    gamma: float
    s_greedy: int
    r_max: int
    candidate_order: str
    slack_placement: str
    guard: str
    max_wait_s: float
    horizon_auto: bool


class Margins(Protocol):
    """The loads during one decision: what each worker's margins are as admissions are made."""

    def score(self, worker: DecodeInstanceState) -> Score:
        """F of the worker as a function of the admitted tokens, c per request included."""

    def least_margin(self, worker: DecodeInstanceState) -> float:
        """Smallest margin of the worker over the horizon, tokens."""

    def best(self, workers: Sequence[DecodeInstanceState], prompt_tokens: int) -> tuple[DecodeInstanceState, float]:
        """The worker where F of a prompt is largest (tie: smallest load, then the first), and that F."""

    def admit(self, choice: RequestTracker, worker: DecodeInstanceState) -> None:
        """Take in an admission that was just made; asked for only while more may follow."""


class PresentMargins:
    """Margins of the present step alone, read from the snapshot itself: m_g = M - L_g."""

    def __init__(self, snapshot: ClusterSnapshot, alpha: float, beta: float | None) -> None:
        self._alpha = alpha
        self._beta = beta if beta is not None else float(snapshot.n_in_barrier)
        self._envelope = snapshot.envelope

    def score(self, worker: DecodeInstanceState) -> Score:
        slowdown = worker.spec.slowdown
        return present_score(self.least_margin(worker) / slowdown, self._alpha, self._beta * slowdown)

    def least_margin(self, worker: DecodeInstanceState) -> float:
        return self._envelope - worker.step_load

    def best(self, workers: Sequence[DecodeInstanceState], prompt_tokens: int) -> tuple[DecodeInstanceState, float]:
        envelope, alpha, beta = self._envelope, self._alpha, self._beta
        best, most, least_load = workers[0], -math.inf, math.inf
        for worker in workers:
            spec, load = worker.spec, worker.step_load
            slowdown, tokens = spec.slowdown, prompt_tokens + spec.request_tokens
            value = present_value(tokens, (envelope - load) / slowdown, alpha, beta * slowdown)
            if value > most or (value == most and load < least_load):
                best, most, least_load = worker, value, load
        return best, most

    def admit(self, choice: RequestTracker, worker: DecodeInstanceState) -> None:
        self._envelope = max(self._envelope, worker.step_load)


class ProjectedMargins:
    """Margins m_{g,h} = M_h - L_g(k+h) over the horizon; an admission adds to one row.

    The loads are projected when the first margin is asked for. In slack none ever is: everything that waits finds a
    slot by the present loads alone, and that is most decisions of a router below saturation.
    """

    def __init__(self, snapshot: ClusterSnapshot, weights: HorizonWeights) -> None:
        self._snapshot, self._weights = snapshot, weights
        self._horizon = weights.horizon_steps
        self._loads: LoadArray | None = None
        self._scores: dict[int, Score] = {}  # by worker, for its present margins
        self._envelope: LoadArray
        self._slowdowns: FloatArray
        self._request_tokens: FloatArray

    def _project(self) -> LoadArray:
        loads = self._loads = self._snapshot.projected_loads()[:, : self._horizon + 1]
        down = self._snapshot.down
        standing = np.delete(loads, down, axis=0) if down else loads
        self._envelope = np.maximum.reduce(standing)
        specs = [worker.spec for worker in self._snapshot.workers]
        self._slowdowns = np.array([spec.slowdown for spec in specs])
        self._request_tokens = np.array([float(spec.request_tokens) for spec in specs])
        return loads

    def _margin(self, worker: DecodeInstanceState) -> LoadArray:
        loads = self._project() if self._loads is None else self._loads
        margin: LoadArray = self._envelope - loads[worker.index]
        return margin

    def score(self, worker: DecodeInstanceState) -> Score:
        score = self._scores.get(worker.index)
        if score is None:
            slowdown, margin = worker.spec.slowdown, self._margin(worker)
            score = self._weights.score(margin) if slowdown == 1.0 else self._weights.score(margin / slowdown, slowdown)
            self._scores[worker.index] = score
        return score

    def least_margin(self, worker: DecodeInstanceState) -> float:
        return float(self._margin(worker).min())

    def best(self, workers: Sequence[DecodeInstanceState], prompt_tokens: int) -> tuple[DecodeInstanceState, float]:
        """All workers are scored step by step, and by segments only those that come near the best."""
        loads = self._project() if self._loads is None else self._loads
        slowdowns, weights = self._slowdowns, self._weights
        tokens: FloatArray = prompt_tokens + self._request_tokens
        if self._snapshot.alike:
            above = loads - (self._envelope - prompt_tokens)
        else:
            above = (loads - self._envelope) / slowdowns[:, None] + tokens[:, None]
        losses = weights.losses(np.maximum(above, 0, out=above), slowdowns)
        values: list[float] = (weights.gain * tokens - losses).tolist()
        lost: list[float] = losses.tolist()
        near = max([values[worker.index] for worker in workers])
        near -= weights.rounding * float(tokens.max()) * max(1.0, float(slowdowns.max()))
        best, most, least_load = workers[0], -math.inf, math.inf
        for worker in workers:
            value = values[worker.index]
            if value < near:
                continue
            if lost[worker.index]:
                value = self.score(worker)(prompt_tokens + worker.spec.request_tokens)
            load = worker.step_load
            if value > most or (value == most and load < least_load):
                best, most, least_load = worker, value, load
        return best, most

    def admit(self, choice: RequestTracker, worker: DecodeInstanceState) -> None:
        if self._loads is None:
            return  # the scheduler has charged it to the snapshot, which is what will be projected
        row = self._loads[worker.index]
        within = int(choice.remaining(self._horizon)) + 1
        first = choice.prompt_tokens + worker.spec.request_tokens
        if worker.spec.slowdown == 1.0:
            row[:within] += np.arange(first, first + within)
        else:
            row[:within] += worker.spec.slowdown * np.arange(first, first + within)
        if (row > self._envelope).any():
            np.maximum(self._envelope, row, out=self._envelope)
            self._scores.clear()
        else:
            self._scores.pop(worker.index, None)


class Room:
    """The workers with free slots during one decision, so that none is searched for again."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.workers = snapshot.open_workers()
        self.free = free_slots(self.workers)

    def take(self, worker: DecodeInstanceState) -> None:
        """Take in an admission that was just made."""
        self.free -= 1
        if len(worker.active) >= worker.own_slots:
            self.workers.remove(worker)

    def most_free(self) -> list[DecodeInstanceState]:
        """The workers with the most free slots, by index."""
        if len(self.workers) == 1:
            return self.workers
        most = max(worker.free_slots for worker in self.workers)
        return [worker for worker in self.workers if worker.free_slots == most]


@mypyc_attr(allow_interpreted_subclasses=True)
class BalanceRoute:
    """BR-0 (`horizon_steps` 0) or BR-H, by name `br_0` or `br_h`."""

    waits_for_slots = True

    def __init__(self, name: str, params: BalanceRouteParams, stage_timer: StageTimer | None = None) -> None:
        self.name = name
        self.params = params
        self.horizon_steps = params.horizon_steps
        self.stage_timer = stage_timer
        self._weights: tuple[float, HorizonWeights] | None = None  # and the beta that they are made with, of some H

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        return self.params.max_wait_s * snapshot.means.patience_factor(prompt_tokens)

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        """Never: nothing is held back beside a free slot."""
        return math.inf

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        """Yield admissions. O(G*H) to read the loads, O(H log H + log W) per admission, and subset searches.

        An overdue request is scored on every worker with a free slot: O(G*H).
        """
        pool = snapshot.pool
        if not len(pool):
            return
        room = Room(snapshot)
        if not room.free:
            return
        timer = self.stage_timer
        margins = self.margins(snapshot)
        if timer:
            timer("prepare")
        while room.free and len(pool):
            waiting = pool.front
            single = chain(
                self._overdue(waiting, margins, room, now),
                self._slack(waiting, room),
                self._greedy(waiting, margins, room),
            )
            for stage, choices in (("stage1", single), ("stage2", self._refined(waiting, margins, room))):
                for choice in choices:
                    yield choice
                    room.take(choice.worker)
                    if room.free:
                        margins.admit(choice.request, choice.worker)
                if timer:
                    timer(stage)

    def margins(self, snapshot: ClusterSnapshot) -> Margins:
        """The margins for one decision: present ones for H = 0, else the projected."""
        if self.horizon_steps == 0:
            return PresentMargins(snapshot, self.params.alpha, self.params.beta)
        beta = self.params.beta if self.params.beta is not None else float(snapshot.n_in_barrier)
        horizon = self.horizon_of(snapshot)
        if self._weights is None or self._weights[0] != beta or self._weights[1].horizon_steps != horizon:
            self._weights = (beta, HorizonWeights(horizon, self.params.alpha, beta, self.params.gamma))
        return ProjectedMargins(snapshot, self._weights[1])

    def horizon_of(self, snapshot: ClusterSnapshot) -> int:
        """How many steps ahead are looked at now: H or, where it follows the answers, a share of their mean length.

        What is admitted stays for an answer's length. A horizon as long as that sees departures that the requests of
        many decisions to come will have replaced.
        """
        if not self.params.horizon_auto or not snapshot.means.answers:
            return self.horizon_steps
        return min(self.horizon_steps, max(1, round(HORIZON_SHARE * snapshot.means.answer_tokens)))

    def _overdue(self, waiting: WaitingClass, margins: Margins, room: Room, now: float) -> Iterator[Choice]:
        """Requests beyond their patience, each to the worker where F is largest (tie: smallest load)."""
        while room.free and (request := waiting.most_overdue(now)):
            worker, score = margins.best(room.workers, request.prompt_tokens)
            yield Choice(request, worker, 0, score)

    def _slack(self, waiting: WaitingClass, room: Room) -> Iterator[Choice]:
        """Everything fits: the largest prompt to the lightest worker, again and again."""
        if self.params.slack_placement != "load" or len(waiting) > room.free:
            return
        while request := waiting.largest_at_most(math.inf):
            worker = min(room.workers, key=lambda candidate: candidate.step_load)
            yield Choice(request, worker, 1, float(request.prompt_tokens))

    def _greedy(self, waiting: WaitingClass, margins: Margins, room: Room) -> Iterator[Choice]:
        """Stage 1: most free slots (tie: smallest load), best single request of the whole pool."""
        while room.free > self.params.s_greedy and len(waiting):
            worker = min(room.most_free(), key=lambda candidate: candidate.step_load)
            request, score = best_single(waiting, margins.score(worker), worker.spec.request_tokens)
            yield Choice(request, worker, 1, score)

    def _refined(self, waiting: WaitingClass, margins: Margins, room: Room) -> Iterator[Choice]:
        """Stage 2: the worker with most room takes the best subset of the first candidates."""
        while room.free and len(waiting):
            tied = room.most_free()
            worker = tied[0] if len(tied) == 1 else max(tied, key=margins.least_margin)
            score = margins.score(worker)
            candidates = self._candidates(waiting)
            each = worker.spec.request_tokens
            sizes = [candidate.prompt_tokens + each for candidate in candidates]
            picked, total = best_subset(sizes, min(worker.free_slots, self.params.r_max), score.peak, score)
            chosen: Sequence[RequestTracker] = [candidates[index] for index in picked]
            if total <= 0 and self.params.guard == "pool":
                single, total = best_single(waiting, score, each)
                chosen = [single]
            elif total <= 0:
                single = max(candidates, key=lambda candidate: score(candidate.prompt_tokens + each))
                chosen, total = [single], score(single.prompt_tokens + each)
            for request in chosen:
                yield Choice(request, worker, 2, total)

    def _candidates(self, waiting: WaitingClass) -> list[RequestTracker]:
        """The first `r_max` of the pool in the configured order of its head."""
        if self.params.candidate_order == "fifo":
            return waiting.head(self.params.r_max)
        return waiting.by_size(self.params.r_max, descending=self.params.candidate_order == "descending")


def best_single(waiting: WaitingClass, score: Score, request_tokens: int = 0) -> tuple[RequestTracker, float]:
    """The waiting request with the largest F({i}), each counting `request_tokens` more; tie: first in waiting order.

    Two probes, O(log n), unless F is level below its peak, where many may tie: then O(n).
    """
    if score.level_from < score.peak:
        level = waiting.first_between(score.level_from - request_tokens, score.peak - request_tokens)
        if level is not None:
            return level, score(level.prompt_tokens + request_tokens)
    below = waiting.largest_at_most(score.peak - request_tokens)
    above = waiting.smallest_above(score.peak - request_tokens)
    if above is None or below is None:
        only = below or above
        assert only is not None, "somebody waits"
        return only, score(only.prompt_tokens + request_tokens)
    low, high = score(below.prompt_tokens + request_tokens), score(above.prompt_tokens + request_tokens)
    if high > low or (high == low and above.order < below.order):
        return above, high
    return below, low
