"""One replay from its parameters: trace, cluster, policy, predictor, seed. Picklable, so that many run in parallel."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from balanceroute.core.knobs import DEFAULTS, Option, PolicySettings, accepted, is_accepted
from balanceroute.core.policies import BUILT_IN, knobs_of, make_policy, misplaced
from balanceroute.core.policy import AdmissionPolicy, StageTimer
from balanceroute.errors import ConfigError, InputError
from balanceroute.plugins import check_predictor, check_predictor_name, learn_policy, while_it_runs
from balanceroute.prediction import KINDS, Forecaster, OwnPredictor, Predictor, build_predictor
from balanceroute.prediction.build import BuiltPredictor
from balanceroute.simulator.history import fitted
from balanceroute.simulator.oracle import Forecast, OracleForecast, PredictorForecast, TrueLengths
from balanceroute.simulator.result import Outcome
from balanceroute.simulator.setting import Setting
from balanceroute.simulator.simulation import Progress, Simulation
from balanceroute.traces import Trace

PREDICTORS = ("none", "oracle", *KINDS[1:])
OPTIONS = ("policy", "seed")  # parameters that the command line sets by separate options


@dataclass(frozen=True, slots=True)
class Replay:
    """What to simulate. `own_policy`: the policy itself, in place of the one that `policy` makes.

    `predictor`: of `PREDICTORS`, one of your own by name, made with `predictor_options`, or itself. `train` is the
    history that a predictor by name is fitted on, once and for all. Without it all but learned start cold and learn
    from what finishes during the run.
    """

    trace: Trace
    policy: PolicySettings
    setting: Setting = field(default_factory=Setting)
    predictor: str | Predictor = "none"
    train: Trace | None = None
    with_loads: bool = False
    check_invariants: bool = False
    own_policy: AdmissionPolicy | None = None
    predictor_options: tuple[tuple[str, Option], ...] = ()

    def checked(self) -> "Replay":
        """The replay itself. Raises: InputError that names the first option which nothing would read."""
        learn_policy(self.policy.policy)
        policy = self.own_policy or make_policy(self.policy)
        predictor = self.predictor if isinstance(self.predictor, str) else type(self.predictor).__name__
        if isinstance(self.predictor, str):
            self._check_name(self.predictor)
        if predictor != "none" and not policy.horizon_steps and self.policy.policy != "br_h":
            raise InputError(f"predictor {predictor}: changes nothing; {policy.name} does not look ahead, br_h does")
        if self.train is not None and self.predictor in ("none", "oracle"):
            raise InputError(f"train: changes nothing; predictor {predictor} learns from no past")
        if self.setting.prefix_cache_tokens > 0 < self.setting.prefillers and not any(self.trace.prefix):
            raise InputError(
                f"prefix cache {self.setting.prefix_cache_tokens}: changes nothing; the trace does not say which "
                "prompts begin alike (prefix_blocks)"
            )
        if self.setting.overlap_requests and not policy.waits_for_slots:
            raise InputError(
                f"overlap requests: changes nothing; {policy.name} assigns at once, even if no slot is free"
            )
        return self

    def run(self, on_progress: Progress | None = None, stage_timer: StageTimer | None = None) -> Outcome:
        """Simulate; `stage_timer` is told "begin" before each decision, then each stage by the policy.

        Raises: InputError for a predictor that lacks its history, or settings that make no sense.
        """
        learn_policy(self.policy.policy)  # as this may be another process than the one that named it
        of_ones_own = self._of_ones_own()
        with while_it_runs(of_ones_own) if of_ones_own else nullcontext():
            return self._run(on_progress, stage_timer)

    def _run(self, on_progress: Progress | None, stage_timer: StageTimer | None) -> Outcome:
        lengths = TrueLengths(self.trace)
        simulation = Simulation(
            self.trace,
            self.setting,
            self.own_policy or make_policy(self.policy, stage_timer),
            lengths,
            self.forecast(lengths),
            with_loads=self.with_loads,
            stage_timer=stage_timer,
            check_invariants=self.check_invariants,
        )
        return simulation.run(on_progress)

    def _of_ones_own(self) -> str:
        """The name of a user's own policy or predictor, whose code may raise any error; "": both are built in."""
        policy, predictor = self.policy.policy, self.predictor
        found = []
        if self.own_policy is not None:
            found.append(f"policy {type(self.own_policy).__name__}")
        elif policy not in BUILT_IN:
            found.append(f"policy {policy}")
        if isinstance(predictor, str) and predictor not in PREDICTORS:
            found.append(f"predictor {predictor}")
        elif not isinstance(predictor, str | BuiltPredictor):
            found.append(f"predictor {type(predictor).__name__}")
        return " and ".join(found)

    @staticmethod
    def _check_name(predictor: str) -> None:
        try:
            check_predictor_name(predictor, PREDICTORS)
        except ConfigError as error:
            raise InputError(f"predictor: {error}") from error

    @staticmethod
    def _answering(predictor: Predictor, horizon: int) -> Predictor:
        """The predictor; each answer of a user's own one is checked."""
        if isinstance(predictor, BuiltPredictor):
            return predictor
        name = type(predictor).__name__
        return OwnPredictor(name, check_predictor(predictor, name), horizon)

    def forecast(self, lengths: TrueLengths) -> Forecast:
        """The source of c-hat that `predictor` names."""
        horizon = self.policy.horizon_steps
        if not isinstance(self.predictor, str):
            return PredictorForecast(Forecaster(self._answering(self.predictor, horizon), horizon), learns=True)
        self._check_name(self.predictor)
        options = dict(self.predictor_options)
        if options and self.predictor in PREDICTORS:
            raise InputError(f"predictor {self.predictor}: it takes no options, and {', '.join(options)} are given")
        if self.predictor == "none":
            return Forecast()
        if self.predictor == "oracle":
            if self.setting.barrier_groups > 1 or self.setting.draft_tokens:
                raise InputError("predictor oracle: it is not modelled together with barrier groups or draft tokens")
            return OracleForecast(lengths, horizon)
        if self.train is not None:
            return PredictorForecast(Forecaster(fitted(self.predictor, self.train, horizon, options), horizon))
        if self.predictor == "learned":
            raise InputError(f"predictor {self.predictor} needs a trace of the past: --train FILE")
        learner = build_predictor(self.predictor, horizon, options=options)
        return PredictorForecast(Forecaster(learner, horizon), learns=True)


def usual_predictor(policy: str) -> str:
    """The default predictor of a policy: survival for br_h, which needs one."""
    return "survival" if policy == "br_h" else "none"


def parse_params(settings: PolicySettings, params: list[str]) -> PolicySettings:
    """Settings with `name=value` texts applied. Raises: InputError that names what is accepted."""
    learn_policy(settings.policy)
    known = [name for name in DEFAULTS if name not in OPTIONS]
    changes: dict[str, Any] = {}
    options: dict[str, Option] = {}
    for param in params:
        name, equals, text = param.partition("=")
        if name in OPTIONS:
            raise InputError(f"--param {param}: the {name} has an option of its own, --{name}")
        if equals and settings.policy not in BUILT_IN and name.isidentifier():
            options[name] = plain_value(text)
            continue
        if not equals or name not in known:
            raise InputError(f"--param {param}: {_accepted_params(settings.policy)}")
        changes[name] = parsed(text, DEFAULTS[name])
        if not is_accepted(name, changes[name]):
            raise InputError(f"--param {param}: accepted is {accepted(name)}")
        if wrong := misplaced(settings.policy, name):
            raise InputError(f"--param {param}: {wrong}; its own: {', '.join(_own_knobs(settings.policy)) or 'none'}")
    return replace(settings, **changes, options=tuple(options.items()))


def _own_knobs(policy: str) -> list[str]:
    return [knob for knob in knobs_of(policy) if knob not in OPTIONS]


def _accepted_params(policy: str) -> str:
    """The error for a param that is no knob of any policy."""
    if policy not in BUILT_IN:
        return "accepted is name=value"
    own = _own_knobs(policy)
    return f"accepted is name=value with a name of {', '.join(own)}" if own else f"{policy} has no knobs"


def parse_options(flag: str, texts: list[str]) -> dict[str, Option]:
    """`name=value` texts of a flag as keyword arguments. Raises: InputError for anything else."""
    options: dict[str, Option] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"{flag} {text}: accepted is name=value")
        options[name] = plain_value(value)
    return options


def plain_value(text: str) -> Option:
    """The value of a text: true, false, a number, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parsed(text: str, default: Any) -> Any:
    """The text as a value of the default's kind, or as it stands when it is none."""
    if default is None and text == "null":
        return None
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, str):
            return text
        return int(text) if isinstance(default, int) else float(text)
    except (KeyError, ValueError):
        return text
