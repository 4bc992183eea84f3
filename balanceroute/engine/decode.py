"""Decode ranks and the group that steps them together.

A request on a rank is in one of three places, in this order:

    waiting ------------> transferring -----------> running --> finished | recomputed | removed
      FIFO; no slot,        holds its blocks,         holds a slot; one token per step;
      no blocks             no slot; its KV is        `load` counts it
                            on the way                (preempted: back to the front of waiting)

Transfers begin as in vLLM (0.32.0, v1/core/sched/scheduler.py, `schedule`): in a step that finds a free slot, those of
all waiting requests whose blocks fit; requests whose KV has come are taken first. So while all slots are in use nothing
begins, and a request on the way keeps no other from a slot. `transfers_beside_full` lets them begin at any time. Only
what the rank computes itself (`local`) holds a slot meanwhile.

A balancer inside the engine may let a running request stand still (`pause`, `resume`): it keeps its slot and its KV, is
no load and gets no token.

`transferring` lasts until `ready_s`. The driver may set `ready_s` to infinity when it does not know when
the KV comes (or never does) and call `kv_arrived` later. A step is two calls, so that a driver with a clock
can wait in between: `begin_step` moves requests forward, makes room for one more token per running request
and tells how long the step takes; `end_step` gives every running request its token. Nothing here knows the
time: it comes as an argument.

When a running request needs a block and none is free, the *last* running request gives way:

- `Preemption.RECOMPUTE_LOCALLY` (vLLM): it goes back to the front of the queue without its KV and later waits
  `recompute_s_per_token` for each token it had, prompt and generated.
- `Preemption.POP_LAST` (vllm-ascend's recompute scheduler): it leaves the engine; the router must prefill
  it again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from balanceroute.engine.kv_blocks import KvBlocks
from balanceroute.engine.step_time import StepTimeModel
from balanceroute.errors import ConfigError, InvariantError


class Preemption(StrEnum):
    """How the last running request is preempted when KV blocks run out."""

    RECOMPUTE_LOCALLY = "recompute_locally"
    POP_LAST = "pop_last"


class Place(StrEnum):
    """The place of a request on its rank; `gone` before it came and after it left."""

    GONE = "gone"
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence on a decode rank; drivers may subclass it to carry what is theirs.

    output_tokens: it finishes after so many. transfer_s: from getting its blocks to being able to run. local: the rank
    computes its KV itself, in the batch.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    transfer_s: float = 0.0
    local: bool = False
    generated: int = 0
    ready_s: float = math.inf
    place: Place = Place.GONE
    preemptions: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the request holds: prompt and everything generated."""
        return self.prompt_tokens + self.generated

    @property
    def finished(self) -> bool:
        """Whether it has all its output tokens."""
        return self.generated >= self.output_tokens


R = TypeVar("R", bound=EngineRequest)


@dataclass(slots=True)
class StepOutcome(Generic[R]):
    """The result of a step on one rank, in the order of the batch.

    stepped: got a token (look at `finished` for those that have left with it). recomputed: popped without a
    token, to be told before this step's tokens.
    """

    stepped: list[R] = field(default_factory=list)
    recomputed: list[R] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan(Generic[R]):
    """The start of a step: its duration in seconds, the requests whose transfer begins, and those that start to run."""

    duration_s: float
    admitted: list[R] = field(default_factory=list)
    started: list[R] = field(default_factory=list)


class DecodeRank(Generic[R]):
    """One data-parallel rank: `slots` requests at most (B), a FIFO queue, and KV blocks."""

    def __init__(
        self,
        slots: int,
        kv: KvBlocks,
        *,
        preemption: Preemption = Preemption.RECOMPUTE_LOCALLY,
        recompute_s_per_token: float = 0.0,
        transfers_beside_full: bool = False,
    ) -> None:
        if slots < 1:
            raise ConfigError(f"decode rank: slots must be positive, got {slots}")
        self.slots = slots
        self.kv = kv
        self.preemption = preemption
        self.recompute_s_per_token = recompute_s_per_token
        self.transfers_beside_full = transfers_beside_full
        self.load = 0  # tokens of the running requests: L_g
        self.stalled = False  # frozen by a fault: keeps what it has, moves nothing
        self.preemptions = 0  # requests sent back to the queue so far
        self.waiting: dict[str, R] = {}
        self.transferring: dict[str, R] = {}
        self.running: dict[str, R] = {}
        self.paused: dict[str, R] = {}
        self.popped: list[R] = []  # reported in the next `end_step`
        self._computing = 0  # local ones among the transferring

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return self.slots - len(self.running) - len(self.paused) - self._computing

    @property
    def busy(self) -> bool:
        """Whether any request is here."""
        return bool(self.running or self.paused or self.transferring or self.waiting)

    def find(self, request_id: str) -> R | None:
        """The request of that id, wherever on this rank it is."""
        places = (self.running, self.paused, self.transferring, self.waiting)
        return next((place[request_id] for place in places if request_id in place), None)

    def submit(self, request: R) -> None:
        """Queue a request. Raises: ConfigError when its KV can never fit this rank."""
        if request.place is not Place.GONE or self.find(request.id):
            raise InvariantError(f"decode rank: {request.id} is already here")
        needed = self.kv.blocks_for(request.prompt_tokens + 1)
        if needed > self.kv.num_blocks:
            text = f"decode rank: {request.id} needs {needed} KV blocks, the rank has {self.kv.num_blocks}"
            raise ConfigError(text)
        request.place = Place.WAITING
        self.waiting[request.id] = request

    def admit(self, now: float) -> list[R]:
        """Give blocks to waiting requests, first come first served; returns those whose KV is now on its way."""
        admitted: list[R] = []
        while self.waiting:
            request = next(iter(self.waiting.values()))
            if self.free_slots <= 0 and (request.local or not self.transfers_beside_full):
                break
            # the first token's KV is part of the claim, so that a fresh request evicts nobody in its first
            # step
            if not self.kv.grow(request.id, request.kv_tokens + 1):
                break
            del self.waiting[request.id]
            request.place = Place.TRANSFERRING
            delay = request.transfer_s
            if request.preemptions:
                delay = self.recompute_s_per_token * request.kv_tokens
            request.ready_s = now + delay
            self.transferring[request.id] = request
            self._computing += request.local
            admitted.append(request)
        return admitted

    def kv_arrived(self, request_id: str, now: float) -> None:
        """Note that a request's KV has come: it runs from the next step on."""
        self.transferring[request_id].ready_s = now

    def start_ready(self, now: float) -> list[R]:
        """Move requests whose KV has arrived into the batch, in the order in which they got their blocks."""
        started: list[R] = []
        for request in [request for request in self.transferring.values() if request.ready_s <= now]:
            if self.free_slots <= 0 and not request.local:
                continue
            del self.transferring[request.id]
            self._computing -= request.local
            request.place = Place.RUNNING
            self.running[request.id] = request
            self.load += request.kv_tokens
            started.append(request)
        return started

    def begin_step(self, now: float) -> tuple[list[R], list[R]]:
        """Fill the batch, begin transfers and make room for a token each; returns the requests that transfer, and that
        start.
        """
        started = self.start_ready(now)
        admitted = self.admit(now)
        started += self.start_ready(now)  # where a transfer takes no time
        self.make_room()
        return admitted, started

    def pause(self, request_id: str) -> None:
        """Pause a running request."""
        request = self.running.pop(request_id)
        request.place = Place.PAUSED
        self.load -= request.kv_tokens
        self.paused[request_id] = request

    def resume(self) -> None:
        """Resume all paused requests, behind those that run."""
        for request in self.paused.values():
            request.place = Place.RUNNING
            self.load += request.kv_tokens
            self.running[request.id] = request
        self.paused.clear()

    def make_room(self) -> None:
        """Secure one more KV token for every running request, taking it from the last ones when memory is out."""
        for request in list(self.running.values()):
            while request.place is Place.RUNNING and not self.kv.grow(request.id, request.kv_tokens + 1):
                self._give_way(next(reversed(self.running.values())))

    def pop(self, request_id: str) -> R:
        """Pop a request, as the recompute scheduler does; the next `end_step` reports it."""
        popped = self.remove(request_id)
        self.popped.append(popped)
        return popped

    def end_step(self) -> StepOutcome[R]:
        """Give every running request its token and let the finished ones go."""
        outcome = StepOutcome(list(self.running.values()), self.popped)
        self.popped = []
        self.load += len(outcome.stepped)
        for request in outcome.stepped:
            request.generated += 1
            if request.generated >= request.output_tokens:
                self.remove(request.id)
        return outcome

    def remove(self, request_id: str) -> R:
        """Take a request off the rank with all it holds (finish, abort); raises InvariantError when it is not here."""
        for place in (self.running, self.paused, self.transferring, self.waiting):
            request = place.pop(request_id, None)
            if request is not None:
                break
        else:
            raise InvariantError(f"decode rank: {request_id} is not here")
        if request.place is Place.RUNNING:
            self.load -= request.kv_tokens
        elif request.place is Place.TRANSFERRING:
            self._computing -= request.local
        if self.kv.holds(request_id):
            self.kv.release(request_id)
        request.place = Place.GONE
        return request

    def fail(self) -> list[R]:
        """Lose everything at once, as a worker that crashes does; returns what was lost."""
        lost = [
            request
            for place in (self.running, self.paused, self.transferring, self.waiting)
            for request in place.values()
        ]
        for request in lost:
            self.remove(request.id)
        lost += self.popped
        self.popped = []
        return lost

    def check_invariants(self) -> None:
        """Recount; raises InvariantError on a contradiction."""
        if self.load != sum(request.kv_tokens for request in self.running.values()):
            raise InvariantError("decode rank: load differs from the recount")
        if self.free_slots < 0:
            raise InvariantError("decode rank: more requests than slots")
        for place, members in (
            (Place.RUNNING, self.running),
            (Place.PAUSED, self.paused),
            (Place.TRANSFERRING, self.transferring),
            (Place.WAITING, self.waiting),
        ):
            if any(request.place is not place for request in members.values()):
                raise InvariantError(f"decode rank: a request in {place} believes it is elsewhere")
        self.kv.check_invariants()

    def _give_way(self, last: R) -> None:
        if self.preemption is Preemption.POP_LAST:
            self.pop(last.id)
            return
        # alone and still out of blocks: hopeless only if nobody else (a request whose KV is on its way) holds any
        if self.kv.blocks_for(last.kv_tokens + 1) > self.kv.used + self.kv.free:
            raise ConfigError(f"decode rank: one request alone ({last.id}) needs more KV blocks than the rank has")
        self.remove(last.id)
        last.preemptions += 1
        last.local = True
        last.place = Place.WAITING
        self.preemptions += 1
        self.waiting = {last.id: last, **self.waiting}


class DecodeGroup(Generic[R]):
    """Ranks that share one step barrier."""

    def __init__(self, ranks: Sequence[DecodeRank[R]], step_time: StepTimeModel) -> None:
        if not ranks:
            raise ConfigError("decode group: needs at least one rank")
        self.ranks = list(ranks)
        self.step_time = step_time
        self.steps = 0

    @property
    def busy(self) -> bool:
        """Whether any rank has a request anywhere."""
        return any(rank.busy for rank in self.ranks)

    @property
    def running(self) -> bool:
        """Whether a step makes progress: the batch is not empty, or a popped request is to be reported."""
        return any((rank.running or rank.popped) and not rank.stalled for rank in self.ranks)

    def next_ready_s(self) -> float:
        """When the next transferring request can run; infinity if none is known."""
        ranks = [rank for rank in self.ranks if not rank.stalled]
        return min((r.ready_s for rank in ranks for r in rank.transferring.values()), default=math.inf)

    def begin_step(self, now: float) -> StepPlan[R]:
        """Admit, start what is ready, make room for a token each; a stalled rank is left as it is."""
        plan: StepPlan[R] = StepPlan(0.0)
        for rank in self.ranks:
            if not rank.stalled:
                admitted, started = rank.begin_step(now)
                plan.admitted += admitted
                plan.started += started
        plan.duration_s = self.step_time.duration_s(rank.load for rank in self.ranks)
        return plan

    def end_step(self) -> list[StepOutcome[R]]:
        """One token for every running request of every rank; outcomes in the order of the ranks."""
        self.steps += 1
        return [StepOutcome() if rank.stalled else rank.end_step() for rank in self.ranks]
