"""The snapshot as JSON: in what `GET /state` returns, and what `balanceroute explain` reads.

A written snapshot holds all that a policy looks at, so the decision taken on what was read back is the decision that
the running router takes. A hand-made one needs only workers (id, slots, active) and waiting requests.
"""

import bisect
import math
import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.tracker import DecodeInstanceState, PrefillerBudget, RequestTracker
from balanceroute.core.types import Phase, Role, WorkerSpec, WorkerState
from balanceroute.errors import InputError

SIGNED = {"now_s", "ready_s", "overdue_s", "wait_s", "log_covariance"}  # times of any origin; all others: at least 0
LARGEST = 1e15  # of any number: products of what is larger would leave the range of a float
SLOWDOWNS = (1e-9, 1e9)  # loads are multiplied and margins divided by them; far beyond what a configuration accepts
OF_PROMPTS = ("deviation_tokens", "start_tokens", "usual_tokens")  # means that are about the mean prompt if absent
OTHER_MEANS = ("wait_s", "answer_tokens", "log_prompt", "log_variance", "log_covariance")  # and those that are 0 then
PRIORITY = re.compile(r"-?[0-9]{1,10}")
MOST = 10**9  # of any size, or count of what is there: far above every real one, and sums of them stay exact
MOST_EVER = 10**15  # of what is counted over the whole run of a router

Patience = Callable[[int, ClusterSnapshot], float]
"""How long a prompt of this size may wait before it goes first, seconds (`AdmissionPolicy.patience_s`)."""


def snapshot_to_dict(snapshot: ClusterSnapshot, now: float, scheduler: Scheduler | None = None) -> dict[str, Any]:
    """The snapshot at `now` as JSON-ready values; with its `scheduler` as that would decide on it now."""
    return {
        "now_s": now,
        "horizon_steps": snapshot.horizon_steps,
        "workers": [_worker(worker, snapshot.horizon_steps, scheduler) for worker in snapshot.workers],
        "waiting": _all_waiting(snapshot, now, snapshot.horizon_steps, scheduler),
        "queued": [
            {"id": tracker.id, "prompt_tokens": tracker.prompt_tokens, "wait_s": now - tracker.arrived_s}
            for tracker in snapshot.queued.values()
        ],
        "prefilling": [_prefilling(tracker) for tracker in snapshot.requests.values() if tracker.offers is not None],
        "prefillers": [_prefiller(prefiller) for prefiller in snapshot.prefillers],
        **_cluster(snapshot),
    }


def outline_to_dict(snapshot: ClusterSnapshot, now: float, scheduler: Scheduler | None = None) -> dict[str, Any]:
    """The document for a policy that uses only present loads: running requests are written as sums, like foreign ones.
    Loads, free slots and what waits are the same. O(workers + waiting).
    """
    return {
        "now_s": now,
        "workers": [_summed(worker, scheduler) for worker in snapshot.workers],
        "waiting": _all_waiting(snapshot, now, 0, scheduler),
        **_cluster(snapshot),
    }


def _cluster(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """The cluster-wide fields that policies read."""
    bounded = snapshot.max_pooled < math.inf
    return {
        "means": _means(snapshot),
        "draws": snapshot.draws,
        "longest_wait_s": None if snapshot.longest_wait_s == math.inf else snapshot.longest_wait_s,
        "pool_is_full": snapshot.pool_is_full,
        "max_pooled": int(snapshot.max_pooled) if bounded else None,  # compiled, the snapshot has it as a float
        "shared_barrier": snapshot.shared_barrier,
    }


def _means(snapshot: ClusterSnapshot) -> dict[str, Any]:
    means = snapshot.means
    return {
        **{name: getattr(means, name) for name in ("prompt_tokens", *OF_PROMPTS, *OTHER_MEANS, "prompts", "answers")},
        "class_wait_s": {str(priority): wait_s for priority, wait_s in means.class_wait_s.items()},
        "token_s": snapshot.overlap.token_s,
    }


def _fixed(worker: DecodeInstanceState, scheduler: Scheduler | None) -> dict[str, Any]:
    return {
        "id": worker.spec.id,
        "state": worker.state.value,
        "slots": worker.spec.slots,
        "slowdown": worker.spec.slowdown,
        "request_tokens": worker.spec.request_tokens,
        "barrier_group": worker.spec.barrier_group,
        "kv_capacity_tokens": worker.kv_capacity_tokens,
        "tokens_per_step": worker.tokens_per_step,
        "ahead": worker.ahead if scheduler is None else scheduler.places_ahead(worker),
    }


def _summed(worker: DecodeInstanceState, scheduler: Scheduler | None) -> dict[str, Any]:
    fixed, free = _fixed(worker, scheduler), worker.own_slots - len(worker.active)
    return {
        **fixed,
        "ahead": max(0, fixed["ahead"] + min(0, free)),  # without those sent ahead already
        "foreign": {
            "requests": worker.occupied,
            "tokens": worker.total_load,
            "least_own_slots": max(0, free),
        },
        "active": [],
    }


def _worker(worker: DecodeInstanceState, horizon_steps: int, scheduler: Scheduler | None) -> dict[str, Any]:
    return {
        **_fixed(worker, scheduler),
        "load_tokens": worker.load,
        "reported": worker.reported,
        "foreign": {
            "requests": worker.foreign_requests,
            "tokens": worker.foreign_tokens,
            "least_own_slots": worker.least_own_slots,
        },
        "active": [
            {
                "id": tracker.id,
                "prompt_tokens": tracker.prompt_tokens,
                "generated_tokens": tracker.generated,
                "expected_remaining": tracker.remaining(horizon_steps),
                "running": tracker.running,
            }
            for tracker in worker.active.values()
        ],
    }


def _all_waiting(
    snapshot: ClusterSnapshot, now: float, horizon_steps: int, scheduler: Scheduler | None
) -> list[dict[str, Any]]:
    promoted = None if scheduler is None else scheduler.due_promotion(now)
    entries = [_waiting(tracker, now, horizon_steps) for tracker in snapshot.pool if tracker is not promoted]
    if promoted is not None:
        entry = {**_waiting(promoted, now, horizon_steps), "priority": snapshot.pool.front[0].priority}
        bisect.insort(entries, entry, key=itemgetter("priority", "order"))
    return entries


def _waiting(tracker: RequestTracker, now: float, horizon_steps: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": tracker.id,
        "prompt_tokens": tracker.prompt_tokens,
        "wait_s": now - tracker.ready_s,
        "ready_s": tracker.ready_s,
        "priority": tracker.priority,
        "order": tracker.order,
        "expected_remaining": min(tracker.refreshed_remaining, float(horizon_steps)),
    }
    if tracker.overdue_s < math.inf:
        entry["overdue_s"] = tracker.overdue_s
    return entry


def _prefilling(tracker: RequestTracker) -> dict[str, Any]:
    """Its prefiller, and the cost at each possible prefiller, in tokens."""
    assert tracker.offers is not None and tracker.prefiller is not None
    return {
        "id": tracker.id,
        "prefiller": tracker.prefiller.spec.id,
        "prompt_tokens": tracker.prompt_tokens,
        "uncached_tokens": tracker.uncached_tokens,
        "shared_tokens": tracker.shared_blocks * tracker.block_tokens,
        "costs": {ready.spec.id: cost for ready, cost in zip(*tracker.offers, strict=True)},
    }


def _prefiller(prefiller: PrefillerBudget) -> dict[str, Any]:
    cache, hits = prefiller.cache, prefiller.hits
    return {
        "id": prefiller.spec.id,
        "state": prefiller.state.value,
        "kv_usage": prefiller.kv_usage,
        "inflight": prefiller.inflight,
        "inflight_tokens": prefiller.inflight_tokens,
        "inflight_uncached_tokens": prefiller.inflight_uncached_tokens,
        "inflight_s": prefiller.inflight_s,
        "s_per_token": prefiller.pace.s_per_token,
        "prefix_cache": {
            "blocks": len(cache),
            "tokens": cache.tokens,
            "capacity_tokens": cache.capacity_tokens,
            "limit_tokens": None if cache.limit_tokens == math.inf else cache.limit_tokens,
        },
        "prefix_hits": {
            "prompt_tokens": hits.prompt_tokens,
            "predicted_tokens": hits.predicted_tokens,
            "real_tokens": hits.real_tokens,
            "missed_tokens": hits.missed_tokens,
        },
        "pinned": prefiller.pinned,
        "pinned_tokens": prefiller.pinned_tokens,
    }


def snapshot_from_dict(
    data: dict[str, Any], horizon_steps: int, patience_s: Patience | None = None
) -> tuple[ClusterSnapshot, float]:
    """Read a snapshot back, and the time it was taken at (0.0 where it says none).

    Absent fields mean: worker up with slowdown 1, no tokens per request, in no named barrier group, used by nobody else
    and sent nothing ahead of its slots, every request running, a pool that is not full, `expected_remaining` H, no
    wait, waiting order as listed, means taken over the requests that are there, `overdue_s` the ready time plus the
    policy's patience.
    Only workers, pool and means are read: what a policy looks at. Raises InputError that names the field.
    """
    data = _object(data, "snapshot")
    snapshot = ClusterSnapshot(horizon_steps)
    now = _number(data, "now_s", "", default=0.0)
    for index, entry in enumerate(_list(data, "workers", "")):
        _read_worker(snapshot, entry, f"workers[{index}]")
        _read_active(snapshot, snapshot.workers[index], entry, f"workers[{index}]")
    snapshot.projection = snapshot.recount_projection()
    waiting = _list(data, "waiting", "", default=[])
    trackers = [_read_waiting(snapshot, entry, index, now, f"waiting[{index}]") for index, entry in enumerate(waiting)]
    if len({(tracker.priority, tracker.order) for tracker in trackers}) < len(trackers):
        raise InputError("waiting: two requests have the same order")
    _read_means(snapshot, data.get("means"))
    for tracker in trackers:
        if tracker.overdue_s == math.inf and patience_s is not None:
            tracker.overdue_s = tracker.ready_s + patience_s(tracker.prompt_tokens, snapshot)
        snapshot.pool.add(tracker)
    snapshot.draws = _whole(data, "draws", "", default=0, most=MOST_EVER)
    if data.get("longest_wait_s") is not None:
        snapshot.longest_wait_s = _number(data, "longest_wait_s", "")
    if data.get("max_pooled") is not None:
        snapshot.max_pooled = _whole(data, "max_pooled", "", least=1)
    if "shared_barrier" in data:
        snapshot.shared_barrier = _flag(data, "shared_barrier", "")
    if _flag(data, "pool_is_full", ""):
        snapshot.max_pooled = min(snapshot.max_pooled, MOST)
        snapshot.prefilling = max(0, int(snapshot.max_pooled) - len(snapshot.pool))  # nothing else reads their number
    return snapshot, now


def _read_worker(snapshot: ClusterSnapshot, entry: Any, path: str) -> None:
    entry = _object(entry, path)
    spec = WorkerSpec(
        id=_text(entry, "id", path),
        role=Role.DECODE,
        slots=_whole(entry, "slots", path, least=1),
        slowdown=_slowdown(entry, path),
        request_tokens=_whole(entry, "request_tokens", path, default=0),
        barrier_group=_text(entry, "barrier_group", path, default=""),
    )
    if snapshot.find_worker(spec.id) is not None:
        raise InputError(f"{path}.id: {spec.id!r} is there twice")
    snapshot.add_worker(spec)
    worker = snapshot.workers[-1]
    accepted = [state.value for state in WorkerState]
    if entry.get("state", "up") not in accepted:
        raise InputError(f"{path}.state: {entry['state']!r:.60}; accepted: {', '.join(accepted)}")
    snapshot.set_state(worker, WorkerState(entry.get("state", "up")))
    worker.kv_capacity_tokens = _whole(entry, "kv_capacity_tokens", path, default=0)
    worker.tokens_per_step = _number(entry, "tokens_per_step", path, default=1.0, least=1)
    worker.ahead = _whole(entry, "ahead", path, default=0)
    foreign = _object(entry.get("foreign", {}), f"{path}.foreign")
    worker.set_foreign(
        _whole(foreign, "requests", f"{path}.foreign", default=0),
        _whole(foreign, "tokens", f"{path}.foreign", default=0),
        _whole(foreign, "least_own_slots", f"{path}.foreign", default=0),
    )


def _read_active(snapshot: ClusterSnapshot, worker: DecodeInstanceState, entry: dict[str, Any], path: str) -> None:
    for index, active in enumerate(_list(entry, "active", path, default=[])):
        where = f"{path}.active[{index}]"
        tracker = _read_tracker(_object(active, where), len(snapshot.requests), where)
        tracker.phase, tracker.worker = Phase.DECODING, worker
        tracker.counted = _whole(active, "generated_tokens", where, default=0)
        tracker.refreshed_at = tracker.counted
        tracker.running = _flag(active, "running", where, default=True)
        _register(snapshot, tracker, where)
        worker.active[tracker.id] = tracker
        worker.load += tracker.kv_tokens
        worker.running += tracker.running


def _read_waiting(snapshot: ClusterSnapshot, entry: Any, position: int, now: float, path: str) -> RequestTracker:
    entry = _object(entry, path)
    tracker = _read_tracker(entry, _whole(entry, "order", path, default=position, most=MOST_EVER), path)
    tracker.phase = Phase.POOLED
    tracker.priority = _whole(entry, "priority", path, default=0, least=-MOST)
    tracker.ready_s = _number(entry, "ready_s", path, default=now - _number(entry, "wait_s", path, default=0.0))
    if "overdue_s" in entry:
        tracker.overdue_s = _number(entry, "overdue_s", path)
    _register(snapshot, tracker, path)
    return tracker


def _read_tracker(entry: dict[str, Any], order: int, path: str) -> RequestTracker:
    return RequestTracker(
        id=_text(entry, "id", path),
        prompt_tokens=_whole(entry, "prompt_tokens", path),
        order=order,
        refreshed_remaining=_number(entry, "expected_remaining", path) if "expected_remaining" in entry else math.inf,
    )


def _register(snapshot: ClusterSnapshot, tracker: RequestTracker, path: str) -> None:
    if tracker.id in snapshot.requests:
        raise InputError(f"{path}.id: {tracker.id!r} is there twice")
    snapshot.requests[tracker.id] = tracker


def _read_means(snapshot: ClusterSnapshot, means: Any) -> None:
    read = snapshot.means
    if means is None:
        for tracker in snapshot.requests.values():
            read.see_prompt(tracker.prompt_tokens)
        return
    means = _object(means, "means")
    read.prompt_tokens = _number(means, "prompt_tokens", "means")
    for name in OF_PROMPTS:
        setattr(read, name, _number(means, name, "means", default=read.prompt_tokens))
    for name in OTHER_MEANS:
        setattr(read, name, _number(means, name, "means", default=0.0))
    read.class_wait_s = _class_waits(_object(means.get("class_wait_s", {}), "means.class_wait_s"))
    snapshot.overlap.token_s = _number(means, "token_s", "means", default=0.0)
    read.prompts = _whole(means, "prompts", "means", default=50, most=MOST_EVER)
    read.answers = _whole(means, "answers", "means", default=0, most=MOST_EVER)


def _class_waits(waits: dict[str, Any]) -> dict[int, float]:
    for name in waits:
        if not PRIORITY.fullmatch(name):
            raise InputError(f"means.class_wait_s: expected priorities, found {name!r:.60}")
    return {int(name): _number(waits, name, "means.class_wait_s") for name in waits}


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object, found {value!r:.60}")
    return value


def _list(data: dict[str, Any], name: str, path: str, default: list[Any] | None = None) -> list[Any]:
    value = data.get(name, default)
    if not isinstance(value, list):
        raise InputError(f"{_join(path, name)}: expected a list, found {value!r:.60}")
    return value


def _text(data: dict[str, Any], name: str, path: str, default: str | None = None) -> str:
    value = data.get(name, default)
    if not isinstance(value, str) or (not value and value != default):
        raise InputError(f"{_join(path, name)}: expected a name, found {value!r:.60}")
    return value


def _number(data: dict[str, Any], name: str, path: str, default: float | None = None, least: float = 0) -> float:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise InputError(f"{_join(path, name)}: expected a number, found {value!r:.60}")
    if value < least and name not in SIGNED:
        raise InputError(f"{_join(path, name)}: expected a number of at least {least}, found {value!r:.60}")
    return value


def _slowdown(data: dict[str, Any], path: str) -> float:
    value = _number(data, "slowdown", path, default=1.0)
    least, most = SLOWDOWNS
    if not least <= value <= most:
        raise InputError(f"{path}.slowdown: expected a number from {least:g} to {most:g}, found {value!r:.60}")
    return value


def _flag(data: dict[str, Any], name: str, path: str, default: bool = False) -> bool:
    value = data.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{_join(path, name)}: expected true or false, found {value!r:.60}")
    return value


def _whole(
    data: dict[str, Any], name: str, path: str, default: int | None = None, least: int = 0, most: int = MOST
) -> int:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{_join(path, name)}: expected a whole number from {least} to {most}, found {value!r:.60}")
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
