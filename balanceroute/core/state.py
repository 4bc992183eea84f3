"""The state document: policy, params and snapshot in one JSON object.

`balanceroute explain` reads it, from `GET /state` of a running proxy or made by hand. The policy made from the
document, on the snapshot made from it, decides as the running router does.
"""

import difflib
from typing import Any

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy, settings_from_dict, settings_to_dict
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.snapshot_json import snapshot_from_dict, snapshot_to_dict
from balanceroute.core.types import RequestSpec, Role, WorkerSpec
from balanceroute.errors import ConfigError, InputError


def state_to_dict(
    settings: PolicySettings, snapshot: ClusterSnapshot, now: float, scheduler: Scheduler | None = None
) -> dict[str, Any]:
    """The document of this moment, JSON-ready; with its `scheduler` as that would decide on it. O(requests)."""
    return {**settings_to_dict(settings), **snapshot_to_dict(snapshot, now, scheduler)}


def state_from_dict(data: Any) -> tuple[AdmissionPolicy, ClusterSnapshot, float]:
    """The policy, the snapshot and its time, read back. Raises InputError that names the field."""
    if not isinstance(data, dict):
        raise InputError(f"expected an object with policy, workers and waiting, found {data!r:.60}")
    try:
        policy = make_policy(settings_from_dict(data))
    except ConfigError as error:
        raise InputError(f"params: {error}") from error
    snapshot, now = snapshot_from_dict(data, policy.horizon_steps, policy.patience_s)
    return policy, snapshot, now


def misspelt(data: dict[str, Any]) -> str:
    """The error for a name in a document by hand that is nearly one that is read; "": there is none.

    What it stands for would have its default in silence. Names that are like no other are of other versions.
    """
    return _misspelt(data, {**_example(), "params": {}}, "")


def _misspelt(value: Any, like: Any, path: str) -> str:
    if isinstance(value, list) and isinstance(like, list) and like:
        found = (_misspelt(item, like[0], f"{path}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    if not (isinstance(value, dict) and isinstance(like, dict)):
        return ""
    for name, item in value.items():
        at = f"{path}.{name}" if path else name
        close = [] if name in like else difflib.get_close_matches(name, like.keys() - value.keys(), 1, 0.8)
        if close:
            return f"{at:.60}: unknown; did you mean {close[0]}?"
        if within := _misspelt(item, like.get(name), at):
            return within
    return ""


def _example() -> dict[str, Any]:
    """A document with every name that is read: a request runs, and another one waits."""
    scheduler = Scheduler(make_policy(PolicySettings(policy="br_0")))  # whose documents say `overdue_s`
    scheduler.add_worker(WorkerSpec("d0", Role.DECODE, slots=1), 0.0)
    for name in ("r0", "r1"):
        scheduler.submit_prefilled(RequestSpec(name, 1), 0.0)
    scheduler.admit(0.0)
    return state_to_dict(PolicySettings(), scheduler.snapshot, 0.0)
