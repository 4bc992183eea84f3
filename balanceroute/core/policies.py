"""All policies, by name."""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

from balanceroute.core.balance_route import BalanceRoute, BalanceRouteParams
from balanceroute.core.baselines import ASSIGN_AT_ONCE, PoolFifo
from balanceroute.core.fit_rules import LEVEL_FIT, TARGET_FIT, TargetFitParams
from balanceroute.core.knobs import ALL, BR_H_BETA, DEFAULTS, Option, PolicySettings, accepted, is_accepted
from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.core.pool_bypass import PoolBypass
from balanceroute.core.target_fit import TargetFit
from balanceroute.errors import ConfigError, InputError


def _balance_route(settings: PolicySettings, stage_timer: StageTimer | None) -> AdmissionPolicy:
    looks_ahead = settings.policy == "br_h"
    if settings.pool_bypass:
        if looks_ahead:
            raise ConfigError("pool_bypass works with br_0 only: br_h needs the pool to choose from")
        return PoolBypass(settings.alpha, settings.beta, settings.bypass_margin)
    beta = settings.beta if settings.beta is not None or not looks_ahead else BR_H_BETA
    params = BalanceRouteParams(
        horizon_steps=settings.horizon_steps if looks_ahead else 0,
        horizon_auto=settings.horizon_auto and looks_ahead,
        alpha=settings.alpha,
        beta=beta,
        gamma=settings.gamma,
        s_greedy=settings.s_greedy,
        r_max=settings.r_max,
        candidate_order=settings.candidate_order,
        slack_placement=settings.slack_placement,
        guard=settings.guard,
        max_wait_s=settings.max_wait_s,
    )
    return BalanceRoute(settings.policy, params, stage_timer)


def _target_fit(settings: PolicySettings, stage_timer: StageTimer | None) -> AdmissionPolicy:
    rules = {"target_fit": TARGET_FIT, "level_fit": LEVEL_FIT}[settings.policy]
    return TargetFit(settings.policy, TargetFitParams(settings.max_wait_s, settings.hold_s), rules, stage_timer)


Maker = Callable[[PolicySettings, StageTimer | None], AdmissionPolicy]

POLICIES: dict[str, Maker] = {
    "br_0": _balance_route,
    "br_h": _balance_route,
    "target_fit": _target_fit,
    "level_fit": _target_fit,
    "pool_fifo": lambda settings, stage_timer: PoolFifo(),
    **dict.fromkeys(ASSIGN_AT_ONCE, lambda settings, stage_timer: ASSIGN_AT_ONCE[settings.policy](settings.seed)),
}
BUILT_IN = frozenset(POLICIES)
"""The names above; `balanceroute.plugins` adds those of others."""


_OF_BALANCE_ROUTE = ("alpha", "beta", "s_greedy", "r_max", "candidate_order", "slack_placement", "guard", "max_wait_s")
KNOBS: dict[str, tuple[str, ...]] = {
    "br_0": (*_OF_BALANCE_ROUTE, "pool_bypass", "bypass_margin"),
    "br_h": (*_OF_BALANCE_ROUTE, "horizon_steps", "horizon_auto", "gamma"),
    "target_fit": ("max_wait_s", "hold_s"),
    "level_fit": ("max_wait_s", "hold_s"),
    "pool_fifo": (),
    **dict.fromkeys(ASSIGN_AT_ONCE, ("seed",)),
}
"""What each policy reads of `PolicySettings`; anything else given to it would change nothing, and is refused."""
_OF_ONES_OWN = ("horizon_steps", "horizon_auto")


def knobs_of(policy: str) -> tuple[str, ...]:
    """The knobs of a policy; a user's own one has its `options` and its horizon."""
    return KNOBS.get(policy, _OF_ONES_OWN)


def misplaced(policy: str, knob: str) -> str | None:
    """The error for a knob that this policy does not have; None: it has it."""
    if knob in knobs_of(policy):
        return None
    others = [name for name, knobs in KNOBS.items() if knob in knobs]
    theirs = f"; {', '.join(others)} {'have' if len(others) > 1 else 'has'} it" if others else ""
    return f"{policy} does not have this knob{theirs}"


def make_policy(settings: PolicySettings, stage_timer: StageTimer | None = None) -> AdmissionPolicy:
    """Make the policy of that name with its knobs. Raises: ConfigError: an unknown name, or an invalid knob."""
    if settings.policy not in POLICIES:
        raise ConfigError(unknown_policy(settings.policy))
    for key in DEFAULTS:
        if key != "policy" and not is_accepted(key, value := getattr(settings, key)):
            raise ConfigError(f"{key}: expected {accepted(key)}, found {value!r:.60}")
    if settings.options and settings.policy in BUILT_IN:
        raise ConfigError(f"policy {settings.policy} takes no options; they are for a policy of your own")
    return POLICIES[settings.policy](settings, stage_timer)


def unknown_policy(name: str, others: Iterable[str] = ()) -> str:
    """The error for an unknown name, with the closest known one; `others`: further known names."""
    names = [*sorted(POLICIES), *sorted(others)]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"policy {name!r:.60} is unknown; {hint}accepted: {', '.join(names)}"


def settings_to_dict(settings: PolicySettings) -> dict[str, Any]:
    """The policy's name and its `params`, JSON-ready; null is beta None, and a time without limit."""
    params: dict[str, Any] = {key: getattr(settings, key) for key in DEFAULTS}
    params = {key: None if value == math.inf else value for key, value in params.items()}
    if settings.options:
        params["options"] = dict(settings.options)
    return {"policy": params.pop("policy"), "params": params}


def settings_from_dict(data: dict[str, Any]) -> PolicySettings:
    """Read them back; absent params have their defaults. Raises InputError that names the field."""
    name, params = data.get("policy"), data.get("params", {})
    if not isinstance(name, str) or name not in POLICIES:
        raise InputError(f"policy: {name!r:.60}; accepted: {', '.join(sorted(POLICIES))}")
    if not isinstance(params, dict):
        raise InputError(f"params: expected an object, found {params!r:.60}")
    known = [key for key in DEFAULTS if key != "policy"]
    endless = {key for key, knob in ALL.items() if knob.endless}
    params = {key: math.inf if value is None and key in endless else value for key, value in params.items()}
    options = options_from(params.pop("options", {}))
    for key, value in params.items():
        if key not in known:
            raise InputError(f"params.{key}: unknown; accepted: {', '.join(known)}")
        if not is_accepted(key, value):
            raise InputError(f"params.{key}: expected {accepted(key)}, found {value!r:.60}")
    return PolicySettings(policy=name, options=options, **params)


def options_from(given: object) -> tuple[tuple[str, Option], ...]:
    """Options as settings hold them, from a JSON object (or pairs). Raises: InputError."""
    try:
        options = dict(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        options = {"": None}
    if not all(isinstance(key, str) and isinstance(value, Option) for key, value in options.items()):
        raise InputError(f"params.options: expected names with plain values, found {given!r:.60}")
    return tuple(options.items())
