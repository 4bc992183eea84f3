"""Explains a policy's decision on a state document.

The state document (`core.state`) is what `GET /state` of a running router returns; a hand-made one needs only the
workers with their active requests and what waits. `explain` lets the policy decide on it and adds what a reader needs
to check the answer by hand: load, margins and free slots per worker before the decision, and for each admission its
stage, its score and the *runner-up*.

The runner-up of an admission is what the policy does when it may not make it. The earlier admissions are made first.
Where more requests wait than slots are free, the policy then decides without the request; where every request finds a
slot, without the worker. The runner-up is its first admission. If it makes none, the other of the two is left out.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Final

from balanceroute.core.policies import BUILT_IN
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.core.scarce_fit import SlowerWorkers, kv_room
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.scheduler_config import SchedulerConfig
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.snapshot_json import snapshot_to_dict
from balanceroute.core.state import misspelt, state_from_dict
from balanceroute.core.target_fit import TargetFit
from balanceroute.core.tracker import DecodeInstanceState
from balanceroute.core.types import Admit, WorkerState
from balanceroute.errors import InputError
from balanceroute.plugins import learn_installed, learn_policy, while_it_runs


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A decode worker before the decision; `margins` over h = 0..H in tokens, empty when it is down.

    `load_tokens` and `active` count what others hold there, too, as the decision does. `ahead`: how many requests it
    may be sent beyond its slots.
    """

    id: str
    state: str
    load_tokens: int
    active: int
    free_slots: int
    ahead: int
    margins: tuple[int, ...]

    @property
    def margin(self) -> int | None:
        """M - L_g now, tokens."""
        return self.margins[0] if self.margins else None

    @property
    def least_margin(self) -> int | None:
        """The smallest margin over the horizon, tokens."""
        return min(self.margins, default=None)


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prompt that is being prefilled and why there: what each prefiller would have cost, tokens, the least first."""

    request: str
    prefiller: str
    prompt_tokens: int
    uncached_tokens: int
    costs: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The policy's first choice if it may not make a certain admission.

    `admission`: None where it then makes none; `why` says whether it had a choice. `score`: of this admission, where
    both were made in the same stage. It may exceed the score of the admission that was made: some policies
    (`level_fit`) aim at what suits all waiting requests, and without one of them the aim is another.
    """

    admission: Admit | None
    why: str = ""
    score: float | None = None

    def __str__(self) -> str:
        if self.admission is None:
            return self.why
        return f"{self.admission.request} to {self.admission.worker}"


NO_CHOICE: Final = "no other choice"
WOULD_WAIT: Final = "nothing: the rest would wait"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision and what it rests on; `runners_up[i]` belongs to `admissions[i]`.

    `sent_ahead`: how many of the admissions, the last ones, go to workers whose slots are all taken
    (`decode.overlap_requests`). `prefills`: the choices of prefillers that were made before, as far as their prompts
    are still there.
    """

    policy: str
    params: dict[str, Any]
    workers: tuple[WorkerView, ...]
    admissions: tuple[Admit, ...]
    sent_ahead: int
    runners_up: tuple[RunnerUp, ...]
    left_waiting: int
    reason: str
    prefills: tuple[PrefillView, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values: `admissions`, `margins` by worker, `workers`, the requests left waiting and why."""
        into_slots = len(self.admissions) - self.sent_ahead
        return {
            "policy": self.policy,
            "params": self.params,
            "admissions": [
                {
                    **asdict(admission),
                    "sent_ahead": index >= into_slots,
                    "runner_up": runner_up.admission and asdict(runner_up.admission),
                    "otherwise": str(runner_up),
                }
                for index, (admission, runner_up) in enumerate(zip(self.admissions, self.runners_up, strict=True))
            ],
            "margins": {worker.id: list(worker.margins) for worker in self.workers},
            "workers": [
                {
                    "id": worker.id,
                    "state": worker.state,
                    "load_tokens": worker.load_tokens,
                    "active": worker.active,
                    "free_slots": worker.free_slots,
                    "ahead": worker.ahead,
                    "margin": worker.margin,
                    "least_margin": worker.least_margin,
                }
                for worker in self.workers
            ],
            "left_waiting": self.left_waiting,
            "reason": self.reason,
            "prefills": [asdict(prefill) for prefill in self.prefills],
        }


def explain(state: Any, policy_name: str | None = None) -> Explanation:
    """Decide on a state document and say why: who gets the free slots, and what is then sent ahead of taken ones, as
    many to each worker as the document says.

    `policy_name`: decide by this policy with its own defaults, not by the document's; one of your own, if the document
    names it, too. Raises: InputError that names the field when it cannot be read, ConfigError for an unknown policy, or
    one of your own that raises.
    """
    if isinstance(state, dict) and (wrong := misspelt(state)):
        raise InputError(wrong)
    if policy_name is not None:
        state = _decided_by(policy_name, state)
    elif isinstance(state, dict):
        learn_installed(state.get("policy"))
    with _running_its_policy(state):
        return _explanation(state)


def _running_its_policy(state: Any) -> AbstractContextManager[None]:
    """A context for a document's policy. Raises: ConfigError: it is one of your own, and raises."""
    name = state.get("policy") if isinstance(state, dict) else None
    ours = not isinstance(name, str) or name in BUILT_IN
    return nullcontext() if ours else while_it_runs(f"policy {name}")


def _explanation(state: Any) -> Explanation:
    policy, snapshot, now = state_from_dict(state)
    workers = tuple(worker_views(snapshot))
    situation = _Situation(state, policy, snapshot, now)
    decision = _decide(policy, snapshot, now)
    admissions = decision.admissions
    return Explanation(
        policy=policy.name,
        params=state.get("params", {}),
        workers=workers,
        admissions=tuple(admissions),
        sent_ahead=decision.sent_ahead,
        runners_up=tuple(situation.runner_up(admissions, index) for index in range(len(admissions))),
        left_waiting=len(snapshot.pool),
        reason=_why_no_more(policy, snapshot),
        prefills=tuple(prefill_views(state)),
    )


def _decided_by(policy_name: str, state: Any) -> Any:
    """The document with this policy, and with its defaults unless it is the document's own. Raises: ConfigError."""
    learn_policy(policy_name)
    if isinstance(state, dict) and state.get("policy") != policy_name:
        return {**state, "policy": policy_name, "params": {}}
    return state


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a policy would do now: its admissions, and the largest and mean load (tokens) of the workers in the barrier
    once they are made.
    """

    policy: str
    admissions: tuple[Admit, ...]
    left_waiting: int
    reason: str
    max_load_tokens: int
    mean_load_tokens: float


def outlook(state: Any, policy_name: str) -> Outlook:
    """Decide on a state document by another policy with its defaults, without runners-up: one decision.

    Raises: as `explain`.
    """
    state = _decided_by(policy_name, state)
    with _running_its_policy(state):
        return _outlook(state, policy_name)


def _outlook(state: Any, policy_name: str) -> Outlook:
    policy, snapshot, now = state_from_dict(state)
    admissions = _decide(policy, snapshot, now).admissions
    loads = [worker.total_load for worker in snapshot.workers if worker.state is not WorkerState.DOWN]
    return Outlook(
        policy=policy_name,
        admissions=tuple(admissions),
        left_waiting=len(snapshot.pool),
        reason=_why_no_more(policy, snapshot),
        max_load_tokens=max(loads, default=0),
        mean_load_tokens=sum(loads) / len(loads) if loads else 0.0,
    )


def prefill_views(state: dict[str, Any]) -> list[PrefillView]:
    """The state document's prompts under way. Raises: InputError: it has no such list."""
    try:
        return [
            PrefillView(
                request=str(entry["id"]),
                prefiller=str(entry["prefiller"]),
                prompt_tokens=int(entry["prompt_tokens"]),
                uncached_tokens=int(entry["uncached_tokens"]),
                costs={str(name): float(cost) for name, cost in sorted(entry["costs"].items(), key=itemgetter(1))},
            )
            for entry in state.get("prefilling", [])
        ]
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"prefilling: expected a list of objects as GET /state returns it ({type(error).__name__}: {error})"
        ) from error


def worker_views(snapshot: ClusterSnapshot) -> list[WorkerView]:
    """Loads, free slots and margins of the decode workers."""
    loads = snapshot.projected_loads()
    standing = [worker.index for worker in snapshot.workers if worker.state is not WorkerState.DOWN]
    envelope = loads[standing].max(axis=0) if standing else None
    return [
        WorkerView(
            id=worker.spec.id,
            state=worker.state.value,
            load_tokens=worker.total_load,
            active=worker.occupied,
            free_slots=worker.free_slots,
            ahead=worker.ahead,
            margins=tuple((envelope - loads[worker.index]).tolist())
            if envelope is not None and worker.state is not WorkerState.DOWN
            else (),
        )
        for worker in snapshot.workers
    ]


@dataclass(frozen=True, slots=True)
class _Decision:
    """A policy's admissions; the last `sent_ahead` are ahead of a slot."""

    admissions: list[Admit]
    sent_ahead: int


class _AsWritten(Scheduler):
    """Sends as many requests ahead of a worker's slots as the document says: it lacks what they are measured by."""

    def places_ahead(self, worker: DecodeInstanceState) -> int:
        return worker.ahead


def _decide(policy: AdmissionPolicy, snapshot: ClusterSnapshot, now: float) -> _Decision:
    scheduler = _AsWritten(policy, SchedulerConfig(overlap_requests=None))
    scheduler.snapshot = snapshot
    admissions = scheduler.admit(now)
    ahead = [admission for admission in admissions if snapshot.requests[admission.request].sent_ahead]
    return _Decision(admissions, len(ahead))


class _Situation:
    """A state before a decision, to decide on it again with a little changed."""

    def __init__(self, state: dict[str, Any], policy: AdmissionPolicy, snapshot: ClusterSnapshot, now: float) -> None:
        # written anew, with means and overdue times: a changed document then differs only in what was changed
        self._written = {
            "policy": state["policy"],
            "params": state.get("params", {}),
            **snapshot_to_dict(snapshot, now),
        }
        self._snapshot = snapshot
        self._scarce = policy.waits_for_slots and len(snapshot.pool) > snapshot.free_slots

    def runner_up(self, admissions: list[Admit], index: int) -> RunnerUp:
        """The policy's first choice after the earlier admissions, if it may not make this one."""
        made, before = admissions[index], _after(self._written, admissions[:index])
        drawn = self._snapshot.draws - self._written["draws"]  # by the decision, which has been taken since
        before["draws"] += index * drawn // len(admissions)
        others = {**before, "waiting": [entry for entry in before["waiting"] if entry["id"] != made.request]}
        elsewhere = {**before, "workers": [_closed(worker, made.worker) for worker in before["workers"]]}
        had_choice = False
        for changed in (others, elsewhere) if self._scarce else (elsewhere, others):
            policy, snapshot, now = state_from_dict(changed)
            had_choice = had_choice or _can_admit(policy, snapshot)
            found = next(iter(_decide(policy, snapshot, now).admissions), None)
            if found is not None:
                return RunnerUp(found, score=found.score if made.stage == found.stage else None)
        return RunnerUp(None, WOULD_WAIT if had_choice else NO_CHOICE)


def runners_up(state: dict[str, Any], last: int) -> list[tuple[Admit, RunnerUp]]:
    """The last so many admissions of the decision on a state document, each with what would have been done instead.

    Raises: as `explain`.
    """
    learn_installed(state.get("policy"))
    policy, snapshot, now = state_from_dict(state)
    situation = _Situation(state, policy, snapshot, now)
    admissions = _decide(policy, snapshot, now).admissions
    first = max(0, len(admissions) - last)
    return [(admissions[index], situation.runner_up(admissions, index)) for index in range(first, len(admissions))]


def _closed(worker: dict[str, Any], worker_id: str) -> dict[str, Any]:
    return {**worker, "state": WorkerState.DRAINING.value} if worker["id"] == worker_id else worker


def _can_admit(policy: AdmissionPolicy, snapshot: ClusterSnapshot) -> bool:
    if policy.waits_for_slots:
        return bool(len(snapshot.pool) and snapshot.has_room)
    return bool(len(snapshot.pool)) and any(worker.state is WorkerState.UP for worker in snapshot.workers)


def _after(written: dict[str, Any], admissions: list[Admit]) -> dict[str, Any]:
    """The state document once these admissions are made."""
    workers = {worker["id"]: {**worker, "active": list(worker["active"])} for worker in written["workers"]}
    waiting = {entry["id"]: entry for entry in written["waiting"]}
    for admission in admissions:
        entry = waiting.pop(admission.request)
        workers[admission.worker]["active"].append(
            {key: entry[key] for key in ("id", "prompt_tokens", "expected_remaining")}
        )
    return {**written, "workers": list(workers.values()), "waiting": list(waiting.values())}


def _why_no_more(policy: AdmissionPolicy, snapshot: ClusterSnapshot) -> str:
    """Why the decision ends where it ends."""
    if not len(snapshot.pool):
        return "nothing is left waiting"
    if not any(worker.state is WorkerState.UP for worker in snapshot.workers):
        return "no worker takes new requests"
    if policy.waits_for_slots and not snapshot.has_room:
        ahead = any(worker.ahead for worker in snapshot.up)
        return "no slot is left free" + ", and no place ahead of one" * ahead
    if isinstance(policy, TargetFit):
        return f"held back: the rest {_why_held_back(policy, snapshot)}"
    return "held back by the policy" + ", though a slot is free" * snapshot.has_room


def _why_held_back(policy: TargetFit, snapshot: ClusterSnapshot) -> str:
    """Why the class in front, which alone may be admitted, leaves places free: by its smallest prompt."""
    rules, prompt_tokens = policy.rules, min([tracker.prompt_tokens for tracker in snapshot.pool.front])
    slower, envelope = SlowerWorkers(snapshot, rules), snapshot.envelope
    places = snapshot.open_workers() or [w for w in snapshot.up if len(w.active) < w.own_slots + w.ahead]
    worth = [w for w in places if slower.may_take(w.spec, w.step_load, prompt_tokens, envelope)]
    if not worth:
        return "would slow the others down by more than the slower workers with a free slot would serve"
    if rules.sees_memory and prompt_tokens > max([kv_room(worker, snapshot.means) for worker in worth]):
        return "fits the KV memory of no worker with a free slot"
    return "would raise the envelope, and may wait a little for a lighter worker"
