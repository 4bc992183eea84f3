"""`balanceroute.simulate`: a simulation in one call, with a plot.

    >>> import balanceroute
    >>> run = balanceroute.simulate("heavy_tailed", policy="level_fit", max_requests=400)
    >>> run.figures.admitted
    400

`simulate` drives the scheduler and policies of the live router on the clock of a simulated engine, as
`balanceroute replay` does, and takes what the command line cannot give: a policy or a predictor as an object.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.arrays import plain
from balanceroute.core.bounds import check_number
from balanceroute.core.knobs import DEFAULTS, Option, PolicySettings, accepted, is_accepted
from balanceroute.core.policies import BUILT_IN, misplaced, settings_from_dict, settings_to_dict
from balanceroute.core.policy import AdmissionPolicy
from balanceroute.errors import InputError
from balanceroute.experiments import figures
from balanceroute.plugins import checked, learn_policy
from balanceroute.prediction import Predictor
from balanceroute.simulator import Figures, Outcome, Replay, Setting, at_load, usual_predictor
from balanceroute.traces import Trace, load_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation.

    Args:
        label: the policy's name, as figures show it.
        trace: what was simulated; its arrivals are stretched where a load was asked for.
        setting: the simulated cluster.
        outcome: figures, and per-request and per-step arrays (`Outcome` has their shapes).
    """

    label: str
    trace: Trace = field(repr=False)
    setting: Setting
    outcome: Outcome = field(repr=False)

    @property
    def figures(self) -> Figures:
        """Means and percentiles: load spread, balance, throughput, TPOT, waits."""
        return self.outcome.figures

    def plot(self, path: str | Path | None = None, *others: "SimulationResult") -> "Figure":
        """The KV load of every worker over 1,500 steps in the middle of the steady window, `others` beside it.

        Args: path: where to write it too, as PNG and SVG, with or without either suffix. Returns matplotlib's figure.
        Raises: InputError where matplotlib is not installed, or no file can be written there.
        """
        panels = [(run.label, run.outcome.segment) for run in (self, *others)]
        figure = figures.draw_load_panels(panels, f"{len(self.trace):,} requests, {self.setting.n_workers} workers")
        if path is not None:
            figures.save(figure, figures.stem_of(Path(path)))
        return figure


def simulate(
    trace: Trace | str | Path = "heavy_tailed",
    policy: str | PolicySettings | AdmissionPolicy = DEFAULTS["policy"],
    *,
    predictor: str | Predictor | None = None,
    params: Mapping[str, Option | None] | None = None,
    setting: Setting | None = None,
    load: float | None = None,
    train: Trace | str | Path | None = None,
    max_requests: int | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Simulate a trace under a policy on a data-parallel decode tier.

    Args:
        trace: a `Trace`, a CSV's path, or heavy_tailed or capped for a generated one.
        policy: a name (also of your own: `module:Class`), settings, or a policy object. An object is used for this run
            alone.
        predictor: none, oracle, survival, exact_match or learned, or an object (`balanceroute.Predictor`) for the
            policy's horizon. None: survival for br_h, which is of no use without one, and none for all others.
        params: knobs of a policy that is named, as in the YAML's `routing` section; of your own class, its arguments.
        setting: the cluster; 8 workers of 64 slots by default.
        load: stretch the arrivals to this fraction of ideal capacity (`at_load`).
        train: what a predictor by name has learned from before; without it survival and exact_match learn as they go.
        max_requests: the first so many requests.
        seed: of a generated trace and of policies that draw at random.

    Warns of what a file in a foreign form does not say. Raises: InputError or ConfigError, in one line that says what
    is accepted.
    """
    seed, max_requests = plain(seed), plain(max_requests)
    if not is_accepted("seed", seed):
        raise InputError(f"seed {seed!r:.60}: accepted is {accepted('seed')}")
    if max_requests is not None:
        check_number("max_requests", max_requests, 1, whole=True)
    if not isinstance(setting, Setting | None):
        raise InputError(f"setting {setting!r:.60}: accepted is a balanceroute.Setting")
    if not isinstance(params, Mapping | None):
        raise InputError(f"params {params!r:.60}: accepted is a mapping of names to values")
    cluster = (setting or Setting()).checked()
    requests = _read(trace, seed).head(max_requests)
    if load is not None:
        requests = at_load(requests, plain(load), cluster)
    past = None if train is None else _read(train, seed + 1)
    settings, own = settings_of(policy, params or {}, seed)
    if predictor is None:
        predictor = usual_predictor(own.name if own and own.horizon_steps else settings.policy)
    job = Replay(requests, settings, cluster, predictor, past, with_loads=True, own_policy=own)
    return SimulationResult(own.name if own else settings.policy, requests, cluster, job.checked().run())


def _read(trace: Trace | str | Path, seed: int) -> Trace:
    """The trace, or the one of this name; what was left out or estimated is a warning at the caller of `simulate`."""
    if isinstance(trace, Trace):
        return trace.checked()
    notes: list[str] = []
    requests = load_trace(str(trace), seed=seed, on_note=notes.append)
    for note in notes:
        warnings.warn(f"{trace}: {note}", stacklevel=3)
    return requests


def settings_of(
    policy: str | PolicySettings | AdmissionPolicy, params: Mapping[str, Option | None], seed: int
) -> tuple[PolicySettings, AdmissionPolicy | None]:
    """The settings, and the policy itself where it is given as an object."""
    if isinstance(policy, str):
        learn_policy(policy)
        given = {name: plain(value) for name, value in params.items()}
        if policy not in BUILT_IN:
            return settings_from_dict({"policy": policy, "params": {"options": given}}), None
        for name in params:
            if name in DEFAULTS and (wrong := misplaced(policy, name)):
                raise InputError(f"params.{name}: {wrong}")
        return settings_from_dict({"policy": policy, "params": {"seed": seed, **given}}), None
    if params:
        raise InputError("params: accepted only where policy is a name; PolicySettings and objects have their own")
    if isinstance(policy, PolicySettings):
        if isinstance(policy.policy, str):  # else the name is refused below
            learn_policy(policy.policy)
        written = settings_to_dict(replace(policy, seed=seed) if seed else policy)
        written["params"] = {name: plain(value) for name, value in written["params"].items()}
        return settings_from_dict(written), None
    if isinstance(policy, type) or not hasattr(policy, "decide"):
        raise InputError(f"policy {policy!r}: accepted is a name, PolicySettings, or an object of an AdmissionPolicy")
    settings = PolicySettings(horizon_steps=getattr(policy, "horizon_steps", 0))
    if not is_accepted("horizon_steps", settings.horizon_steps):
        raise InputError(f"policy {type(policy).__name__}: horizon_steps must be {accepted('horizon_steps')}")
    return settings, checked(policy, type(policy).__name__, settings)
