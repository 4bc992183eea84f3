"""The state document: policy, params and snapshot in one JSON object.

`balanceroute explain` reads it, from `GET /state` of a running proxy or made by hand. The policy made from the
document, on the snapshot made from it, decides as the running router does.
"""

from typing import Any

from balanceroute.core.knobs import PolicySettings
from balanceroute.core.policies import make_policy, settings_from_dict, settings_to_dict
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.core.scheduler import Scheduler
from balanceroute.core.snapshot import ClusterSnapshot
from balanceroute.core.snapshot_json import snapshot_from_dict, snapshot_to_dict
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
