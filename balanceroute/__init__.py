"""balanceroute: a load-balancing router for disaggregated LLM serving.

    >>> import balanceroute
    >>> run = balanceroute.simulate("heavy_tailed", policy="level_fit", max_requests=400)
    >>> run.figures.recomputed
    0

What `__all__` names is the library, described in docs/library.md; paths may be given as text. A name is imported when
it is first used, so that `import balanceroute` takes no time. This module imports nothing itself, so Ctrl-C at the
beginning of a command prints no traceback.
"""

TYPE_CHECKING = False  # as `typing` has it, for type checkers

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "AdmissionPolicy",
    "BalanceRouteError",
    "Choice",
    "ClusterSnapshot",
    "Config",
    "ConfigError",
    "ExactMatchPredictor",
    "Failure",
    "Figures",
    "FinishedRequest",
    "InputError",
    "Outcome",
    "PolicySettings",
    "Predictor",
    "RequestSpec",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "Setting",
    "SimulationResult",
    "SurvivalPredictor",
    "Trace",
    "TwoStage",
    "WorkerSpec",
    "build_predictor",
    "build_scheduler",
    "convert_trace",
    "describe_trace",
    "generate_trace",
    "load_config",
    "load_trace",
    "make_policy",
    "read_trace",
    "simulate",
    "write_trace",
]

if TYPE_CHECKING:
    from typing import Any

    from balanceroute.build import build_scheduler
    from balanceroute.config import Config
    from balanceroute.config import load as load_config
    from balanceroute.core.knobs import PolicySettings
    from balanceroute.core.policies import make_policy
    from balanceroute.core.policy import AdmissionPolicy, Choice
    from balanceroute.core.scheduler import Scheduler
    from balanceroute.core.scheduler_config import SchedulerConfig
    from balanceroute.core.snapshot import ClusterSnapshot
    from balanceroute.core.types import RequestSpec, Role, WorkerSpec
    from balanceroute.errors import BalanceRouteError, ConfigError, InputError
    from balanceroute.library import SimulationResult, simulate
    from balanceroute.prediction import (
        ExactMatchPredictor,
        FinishedRequest,
        Predictor,
        SurvivalPredictor,
        TwoStage,
        build_predictor,
    )
    from balanceroute.simulator import Failure, Figures, Outcome, Setting
    from balanceroute.traces import (
        Trace,
        convert_trace,
        describe_trace,
        generate_trace,
        load_trace,
        read_trace,
        write_trace,
    )

_HOMES = {
    "build": ("build_scheduler",),
    "config": ("Config", "load_config"),
    "core.knobs": ("PolicySettings",),
    "core.policies": ("make_policy",),
    "core.policy": ("AdmissionPolicy", "Choice"),
    "core.scheduler": ("Scheduler",),
    "core.scheduler_config": ("SchedulerConfig",),
    "core.snapshot": ("ClusterSnapshot",),
    "core.types": ("RequestSpec", "Role", "WorkerSpec"),
    "errors": ("BalanceRouteError", "ConfigError", "InputError"),
    "library": ("SimulationResult", "simulate"),
    "prediction": (
        "ExactMatchPredictor",
        "FinishedRequest",
        "Predictor",
        "SurvivalPredictor",
        "TwoStage",
        "build_predictor",
    ),
    "simulator": ("Failure", "Figures", "Outcome", "Setting"),
    "traces": (
        "Trace",
        "convert_trace",
        "describe_trace",
        "generate_trace",
        "load_trace",
        "read_trace",
        "write_trace",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_NAMES_THERE = {"load_config": "load"}


def __getattr__(name: str) -> "Any":
    """Import the name's home; remember it, so that this is asked once per name."""
    from importlib import import_module

    if name not in _HOME_OF:
        raise AttributeError(f"module 'balanceroute' has no attribute {name!r}")
    found = getattr(import_module(f"balanceroute.{_HOME_OF[name]}"), _NAMES_THERE.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
