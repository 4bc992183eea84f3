"""Users' own policies and predictors: found by name, and checked.

A name is either one that an installed package gives in an entry point group (`balanceroute.policies`,
`balanceroute.predictors`), or `module:Class` of a module that can be imported. A policy's class is called with
`PolicySettings.options` as keyword arguments, has what `core.policy.AdmissionPolicy` has, and is from then on known to
`core.policies` like the others. A predictor's is called with the horizon (steps) and its options, and has what
`prediction.contract.Predictor` has. `balanceroute.testing` checks that they behave.

Importing a module runs its code, which may raise anything, and call `sys.exit`: a configuration that names it is wrong
then, and no more (`of_others`). What is named in a configuration or on the command line is the operator's own word;
documents that come from elsewhere (states, journals) name installed policies only, unless the operator names the class
too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Any

from balanceroute.core.knobs import Option, PolicySettings
from balanceroute.core.policies import POLICIES, make_policy, unknown_policy
from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.errors import ConfigError, InputError

PACKAGE = Path(__file__).parent
POLICIES_GROUP = "balanceroute.policies"
PREDICTORS_GROUP = "balanceroute.predictors"
CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
NEEDED = ("name", "waits_for_slots", "horizon_steps", "decide", "patience_s", "recheck_s")
NEEDED_OF_PREDICTORS = ("predict", "predict_one", "observe")


def installed(group: str = POLICIES_GROUP) -> dict[str, EntryPoint]:
    """The entry points of a group in installed packages, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


@contextmanager
def of_others(name: str) -> Iterator[None]:
    """A context for imports of a user's class of this name. Raises: ConfigError: one line for any error of it."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt):  # Ctrl-C is the operator's
        raise
    except BaseException as error:
        raise ConfigError(f"{name}: {described(error)}{place(error)}") from error


@contextmanager
def while_it_runs(what: str) -> Iterator[None]:
    """A context for a user's code. Raises: ConfigError: one line for any error or exit of it, with the place.

    No line of it has raised where an answer of it is not what it should be.
    """
    try:
        yield
    except (ConfigError, InputError):
        raise
    except (Exception, SystemExit) as error:
        where = place(error) or "; python -m balanceroute.testing names the rule that it breaks"
        raise ConfigError(f"{what}: {described(error)}{where}") from error


def place(error: BaseException) -> str:
    """The last line of a user's own that led to an error, in brackets; nothing where there is none."""
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in extract_tb(error.__traceback__)
        # compiled modules name their files from the package on
        if not (PACKAGE.parent / frame.filename).is_relative_to(PACKAGE) and "importlib" not in frame.filename
    ]
    return lines[-1] if lines else ""


def described(error: BaseException) -> str:
    """An error of a user's code as one line of valid text; with its type if the text may not tell."""
    try:
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    except Exception:  # its own __str__ may raise anything
        text = ""
    if isinstance(error, ModuleNotFoundError):
        return f"{text} (is its folder installed, or on PYTHONPATH?)"
    if isinstance(error, ImportError | AttributeError | TypeError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load(name: str, group: str, what: str) -> Callable[..., Any] | None:
    """The class of this name, imported; None for a name that is neither installed nor `module:Class`.

    `what` it is, for errors. Raises: ConfigError for a class that cannot be imported.
    """
    point = EntryPoint(name, name, group) if CLASS_NAME.fullmatch(name) else installed(group).get(name)
    if point is None:
        return None
    with of_others(f"{what} {name}"):
        made: object = point.load()
    if not callable(made):
        raise ConfigError(f"{what} {name}: {point.value} is no class")
    return made


def learn_policy(name: str) -> None:
    """Make the policy of this name known to `core.policies`; one that is known stays as it is.

    Raises: ConfigError for a name that is neither installed nor `module:Class`, or a class that cannot be imported.
    """
    if name in POLICIES:
        return
    of_ones_own = load(name, POLICIES_GROUP, "policy")
    if of_ones_own is None:
        raise ConfigError(f"{unknown_policy(name, installed())}, or module:Class for one of your own")

    def make(settings: PolicySettings, stage_timer: StageTimer | None) -> AdmissionPolicy:
        with of_others(f"policy {name} with options {dict(settings.options)}"):
            policy: AdmissionPolicy = of_ones_own(**dict(settings.options))
        with of_others(f"policy {name}"):
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


def check_predictor_name(name: str, built_in: tuple[str, ...]) -> None:
    """Raises: ConfigError unless it is one of ours, or a class that can be imported."""
    if name not in built_in and load(name, PREDICTORS_GROUP, "predictor") is None:
        others = sorted(installed(PREDICTORS_GROUP))
        known = ", ".join([*built_in, *others])
        raise ConfigError(f"predictor {name!r:.60} is unknown; accepted are {known}, or module:Class of your own")


def make_predictor(name: str, horizon_steps: int, options: Mapping[str, Option]) -> Any:
    """Make a user's own predictor, with the methods of `prediction.contract.Predictor`.

    Raises: ConfigError for a name that `check_predictor_name` refuses, options that it does not take, or a method that
    it lacks.
    """
    of_ones_own = load(name, PREDICTORS_GROUP, "predictor")
    if of_ones_own is None:
        raise ConfigError(f"predictor {name!r} is unknown; accepted is module:Class, or what a package offers")
    with of_others(f"predictor {name} with horizon_steps {horizon_steps} and options {dict(options)}"):
        predictor = of_ones_own(horizon_steps, **options)
    return check_predictor(predictor, name)


def check_predictor(predictor: Any, name: str) -> Any:
    """The predictor itself. Raises: ConfigError where it is a class, or lacks a method."""
    if isinstance(predictor, type):
        raise ConfigError(f"predictor {predictor.__name__}: is a class, and not an object of it")
    with of_others(f"predictor {name}"):
        missing = [needed for needed in NEEDED_OF_PREDICTORS if not callable(getattr(predictor, needed, None))]
    if missing:
        raise ConfigError(f"predictor {name}: lacks {', '.join(missing)}; see balanceroute.Predictor")
    return predictor
