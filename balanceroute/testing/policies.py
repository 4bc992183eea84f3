"""The rules for users' own admission policies.

The policy is driven through the real scheduler over random situations of small clusters: workers that drain, die and
return, prompts of 1 to 200,000 tokens, clocks that jump. A broken rule is told with its number, the round and what was
found.

1. It has the attributes of `AdmissionPolicy`; `horizon_steps` is at least 0, `patience_s` above 0, `recheck_s` a
   number, and `decide` yields choices. None of them raises anything.
2. It admits requests of the class in front (`snapshot.pool.front`), each once, to workers that are up; a policy that
   `waits_for_slots` to those with a free slot.
3. Equal calls have equal answers: no clock, no random state of its own, nothing remembered between decisions.
4. It decides on a snapshot that was written and read back as on the one in memory (`explain` and journals rest on it).
5. It changes nothing in the snapshot: loads and counters are the scheduler's.
6. Nothing waits for ever: on an idle cluster it admits all, at once or after the time that `recheck_s` names.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from balanceroute.core.policy import AdmissionPolicy, Choice
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.snapshot_json import snapshot_from_dict, snapshot_to_dict
from balanceroute.core.types import Admit, Outcome, RequestSpec, Role, WorkerSpec, WorkerState
from balanceroute.errors import BalanceRouteError, InvariantError
from balanceroute.plugins import NEEDED, place
from balanceroute.testing.rules import RuleBroken, require

LARGEST_PROMPT_TOKENS = 200_000
MOST_RECHECKS = 10_000


def check_policy(make: Callable[[], AdmissionPolicy], *, rounds: int = 60, seed: int = 0) -> None:
    """Drive policies that `make` returns through `rounds` random clusters. Raises: RuleBroken for a broken rule."""
    check_attributes(make())
    for number in range(rounds):
        random = Random(f"{seed}/{number}")
        try:
            _Round(make, random).run()
        except (RuleBroken, InvariantError) as error:
            raise RuleBroken(f"round {number}: {error}") from error
        except BalanceRouteError:  # it cannot be made
            raise
        except (Exception, SystemExit) as error:  # the check must not end as a success
            raise RuleBroken(f"round {number}: rule 1: it raises {error!r}{place(error)}") from error


def check_attributes(policy: AdmissionPolicy) -> None:
    """Rule 1, as far as it needs no snapshot. Raises: RuleBroken."""
    missing = [name for name in NEEDED if not hasattr(policy, name)]
    require(not missing, f"rule 1: it lacks {', '.join(missing)}")
    require(isinstance(policy.name, str) and bool(policy.name), f"rule 1: name is {policy.name!r}, not a text")
    horizon = policy.horizon_steps
    require(type(horizon) is int and horizon >= 0, f"rule 1: horizon_steps is {horizon!r}")


@dataclass(slots=True)
class _Watched:
    """The policy between the scheduler and the checks: each choice is looked at before it is applied."""

    policy: AdmissionPolicy
    name: str
    waits_for_slots: bool
    horizon_steps: int

    def decide(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Choice]:
        written = frozen(snapshot, now)
        choices = self.policy.decide(snapshot, now)
        require(isinstance(choices, Iterable), f"rule 1: decide answers {choices!r:.60}; it must yield choices")
        for choice in choices:
            require(frozen(snapshot, now) == written, "rule 5: deciding changed the snapshot")
            self.check(choice, snapshot)
            yield choice
            written = frozen(snapshot, now)
        require(frozen(snapshot, now) == written, "rule 5: deciding changed the snapshot")

    def check(self, choice: Choice, snapshot: ClusterSnapshot) -> None:
        """Rule 2."""
        require(isinstance(choice, Choice), f"rule 2: {choice!r:.60} is no balanceroute.Choice")
        front = len(snapshot.pool) > 0 and any(tracker is choice.request for tracker in snapshot.pool.front)
        request = getattr(choice.request, "id", choice.request)  # which may be an index
        require(front, f"rule 2: request {request!s:.60} does not wait, or one of a lower class does")
        worker = choice.worker
        named = worker.spec.id if hasattr(worker, "spec") else worker
        known = any(known is worker for known in snapshot.workers)
        require(known, f"rule 2: worker {named!s:.60} is none of snapshot.workers")
        require(worker.state is WorkerState.UP, f"rule 2: worker {worker.spec.id} is {worker.state.value}")
        full = self.waits_for_slots and not worker.free_slots
        require(not full, f"rule 2: worker {worker.spec.id} has no free slot")
        stage_known = type(choice.stage) is int and choice.stage in (0, 1, 2, 3)
        require(stage_known, f"rule 2: stage {choice.stage!r}; see balanceroute.Choice")
        number = isinstance(choice.score, int | float) and not math.isnan(choice.score)
        require(number, f"rule 2: the score {choice.score!r} is not a number")

    def patience_s(self, prompt_tokens: int, snapshot: ClusterSnapshot) -> float:
        found = self.policy.patience_s(prompt_tokens, snapshot)
        require(isinstance(found, int | float) and found > 0, f"rule 1: patience_s is {found!r:.60}")
        return found

    def recheck_s(self, snapshot: ClusterSnapshot, now: float) -> float:
        found = self.policy.recheck_s(snapshot, now)
        require(isinstance(found, int | float) and not math.isnan(found), f"rule 1: recheck_s is {found!r:.60}")
        return found


def watched(policy: AdmissionPolicy) -> _Watched:
    """The policy under watch."""
    return _Watched(policy, policy.name, policy.waits_for_slots, policy.horizon_steps)


def frozen(snapshot: ClusterSnapshot, now: float) -> dict[str, Any]:
    """All of the snapshot that a decision sees, but for the count of random draws, which is the policy's to raise."""
    written = snapshot_to_dict(snapshot, now)
    written.pop("draws", None)
    return written


class _Round:
    """One random cluster, driven twice: by the policy, and by another of the same making."""

    def __init__(self, make: Callable[[], AdmissionPolicy], random: Random) -> None:
        self.make = make
        self.random = random
        self.schedulers = [Scheduler(watched(make())) for _ in range(2)]
        self.now = 0.0
        self.made = 0
        for index in range(random.randint(1, 6)):
            spec = WorkerSpec(f"d{index}", Role.DECODE, slots=random.choice((1, 2, 4, 16)))
            self.each("add_worker", spec)

    def each(self, call: str, *arguments: object) -> None:
        """Make the call on both schedulers."""
        for scheduler in self.schedulers:
            getattr(scheduler, call)(*arguments, self.now)

    def run(self) -> None:
        """A few dozen random events, a decision after each; then the idle cluster."""
        for _ in range(self.random.randint(10, 40)):
            self.random.choice((self.arrive, self.arrive, self.generate, self.leave, self.change_a_worker))()
            self.now += self.random.choice((0.0, 0.03, 1.0, 200.0))
            self.decide()
        self.empty()

    def arrive(self) -> None:
        """Some requests are prefilled."""
        for _ in range(self.random.randint(1, 8)):
            tokens = int(math.exp(self.random.uniform(0, math.log(LARGEST_PROMPT_TOKENS))))
            spec = RequestSpec(f"r{self.made}", tokens, priority=self.random.choice((0, 0, 0, 1)))
            self.made += 1
            self.each("submit_prefilled", spec)

    def generate(self) -> None:
        """Every running request gets tokens."""
        tokens = self.random.choice((1, 7, 300))
        for request in self.running():
            self.each("progress", request, tokens)

    def leave(self) -> None:
        """About half of what runs finishes."""
        for request in self.running():
            if self.random.random() < 0.5:
                self.each("finish", request, Outcome.FINISHED)

    def change_a_worker(self) -> None:
        """A worker drains, dies with what it held, or takes requests again."""
        worker = self.random.choice(self.schedulers[0].snapshot.workers)
        state = self.random.choice(list(WorkerState))
        if state is WorkerState.DOWN:
            for request in list(worker.active):
                self.each("finish", request, Outcome.FAILED)
        self.each("set_worker_state", worker.spec.id, state)

    def decide(self) -> list[Admit]:
        """Decide everywhere and compare: rules 3 and 4."""
        first, second = self.schedulers
        written = snapshot_to_dict(first.snapshot, self.now)
        answer = first.admit(self.now)
        first.snapshot.check_invariants()
        require(second.admit(self.now) == answer, "rule 3: equal calls had different answers")
        policy = watched(self.make())
        snapshot, now = snapshot_from_dict(json.loads(json.dumps(written)), policy.horizon_steps, policy.patience_s)
        reader = Scheduler(policy)
        reader.snapshot = snapshot
        require(reader.admit(now) == answer, "rule 4: it decides otherwise on the snapshot that was written and read")
        require(not math.isnan(first.recheck_s(self.now)), "rule 1: recheck_s is not a number")
        return answer

    def empty(self) -> None:
        """Rule 6: workers are up and idle again and again until nothing waits."""
        scheduler = self.schedulers[0]
        for worker in scheduler.snapshot.workers:
            self.each("set_worker_state", worker.spec.id, WorkerState.UP)
        for _ in range(MOST_RECHECKS):
            for request in self.running():
                self.each("finish", request, Outcome.FINISHED)
            if not len(scheduler.snapshot.pool):
                return
            if not self.decide():
                at = scheduler.recheck_s(self.now)
                require(math.isfinite(at), "rule 6: it leaves requests waiting on an idle cluster for ever")
                self.now = max(at, self.now) + 1e-6  # past it, whatever is lost to rounding
        raise RuleBroken("rule 6: requests wait on an idle cluster however often it is asked")

    def running(self) -> list[str]:
        """The requests on decode workers, by id."""
        return [request for worker in self.schedulers[0].snapshot.workers for request in worker.active]
