"""Policies of one's own: found by name, checked, and from then on known to `core.policies` like the others.

A name is either one that an installed package gives in the entry point group `balanceroute.policies`, or
`module:Class` of a module that can be imported. The class is called with `PolicySettings.options` as keyword arguments
and has what `core.policy.AdmissionPolicy` has; `balanceroute.testing` checks that it behaves.

Importing a module runs its code. What is named in a configuration or on the command line is the operator's own word;
documents that come from elsewhere (states, journals) name installed policies only, unless the operator names the class
too.
"""

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from balanceroute.core.knobs import Option, PolicySettings
from balanceroute.core.policies import POLICIES, make_policy, unknown_policy
from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.errors import ConfigError

GROUP = "balanceroute.policies"
CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
NEEDED = ("name", "waits_for_slots", "horizon_steps", "decide", "patience_s", "recheck_s")


def installed() -> dict[str, EntryPoint]:
    """The policies that installed packages offer, by name; none of their code is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def learn_policy(name: str) -> None:
    """Make the policy of this name known to `core.policies`; one that is known stays as it is.

    Raises: ConfigError for a name that is neither installed nor `module:Class`, or a class that cannot be imported.
    """
    if name in POLICIES:
        return
    is_class = CLASS_NAME.fullmatch(name) is not None
    point = EntryPoint(name, name, GROUP) if is_class else installed().get(name)
    if point is None:
        raise ConfigError(f"{unknown_policy(name, installed())}, or module:Class for one of your own")
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        hint = " (is its folder installed, or on PYTHONPATH?)" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"policy {name}: {error}{hint}") from error
    if not callable(made):
        raise ConfigError(f"policy {name}: {point.value} is no class")

    def make(settings: PolicySettings, stage_timer: StageTimer | None) -> AdmissionPolicy:
        try:
            policy = made(**dict(settings.options))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"policy {name} with options {dict(settings.options)}: {error}") from error
        return checked(policy, name, settings)

    POLICIES[name] = make


def learn_installed(name: object) -> None:
    """The same for a name out of a document: an installed policy, or none.

    Raises: ConfigError for a class that the document names and the operator did not.
    """
    if not isinstance(name, str) or name in POLICIES:
        return
    if CLASS_NAME.fullmatch(name):
        raise ConfigError(f"policy {name}: the document names a class, which is imported only with --policy {name}")
    if name in installed():
        learn_policy(name)


def try_policy(name: str, horizon_steps: int, options: Mapping[str, Option]) -> None:
    """Make the policy once. Raises: ConfigError where that cannot be done."""
    learn_policy(name)
    make_policy(PolicySettings(policy=name, horizon_steps=horizon_steps, options=tuple(options.items())))


def checked(policy: AdmissionPolicy, name: str, settings: PolicySettings) -> AdmissionPolicy:
    """The policy itself. Raises: ConfigError where it lacks what every policy has, or projects over another horizon."""
    missing = [needed for needed in NEEDED if not hasattr(policy, needed)]
    if missing:
        raise ConfigError(f"policy {name}: lacks {', '.join(missing)}; see balanceroute.AdmissionPolicy")
    if policy.horizon_steps not in (0, settings.horizon_steps):
        raise ConfigError(
            f"policy {name}: looks {policy.horizon_steps} steps ahead, and horizon_steps is {settings.horizon_steps}: "
            "they must be the same, or its own 0"
        )
    return policy
